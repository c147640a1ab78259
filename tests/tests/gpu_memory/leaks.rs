//! Tests a block that is never freed.

use super::{program::*, running_out::quietly, *};

/// Allocates memory and forgets it.
#[inline(never)]
fn leaky() -> u32 {
    // SAFETY: a context is current. The memory is never read.
    let (line, leaked) = (line!(), unsafe { result::malloc_sync(MIB) });
    leaked.expect("the device has room");
    line
}

pub(super) fn leak() {
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let mut program = Program::new(&context);
    let (line, left) = quietly("train", |_| {
        let weights = program.pooled(1024, 1024);
        let found = quietly("step", |step| {
            let (a, b) = (program.pooled(1024, 512), program.plain(1024, 2048));
            let line = leaky();
            program.free(a);
            program.free(b);
            (line, step.live())
        });
        program.free(weights);
        found
    });
    for block in &left {
        println!("live: {block}\n  by {:#?}", block.backtrace.iter().take(20).collect::<Vec<_>>());
    }
    let [block] = left.as_slice() else { panic!("{} blocks are left, not 1", left.len()) };
    assert_eq!(
        (block.bytes, block.kind, block.library.as_deref()),
        (Bytes::mib(1), gpumem::report::MemKind::Device, None)
    );
    assert_eq!(block.path, ["train", "step"]);
    let place = format!("gpu_memory/leaks.rs:{line}:");
    println!("leaked at {place}");
    // The context is never destroyed, so its blocks stay until the process ends.
    mem::forget(context);
    assert!(block.line.as_ref().is_some_and(|line| line.contains(&place)), "{:?} is not {place}", block.line);
    assert!(block.backtrace.iter().any(|frame| frame.contains("leaky")), "{:?}", block.backtrace);
}
