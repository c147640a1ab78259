//! A training loop, and a long random program, compared with their own logs.

use super::{program::*, *};

const BATCH: usize = 256;
const IN: usize = 1024;
const HIDDEN: usize = 4096;
const OUT: usize = 1000;

/// A model of two linear layers, which learns to return zero.
struct Model {
    x: Matrix,
    first: Matrix,
    second: Matrix,
}

/// Makes the forward pass. The backward pass needs its results: the activations and the output.
fn forward(program: &mut Program, by: &CudaBlas, model: &Model, inside: impl FnOnce()) -> (Matrix, Matrix) {
    program.scope("forward", |program| {
        let hidden = program.pooled(HIDDEN, BATCH);
        multiply(by, (&model.first, false), (&model.x, false), &hidden);
        let spare = program.plain(1_000_003, 1);
        let output = program.plain(OUT, BATCH);
        multiply(by, (&model.second, false), (&hidden, false), &output);
        inside();
        program.free(spare);
        (hidden, output)
    })
}

/// Returns the gradients of both layers.
fn backward(program: &mut Program, by: &CudaBlas, model: &Model, (hidden, output): (Matrix, Matrix)) -> [Matrix; 2] {
    program.scope("backward", |program| {
        let second = program.pooled(OUT, HIDDEN);
        multiply(by, (&output, false), (&hidden, true), &second);
        let back = program.pooled(HIDDEN, BATCH);
        multiply(by, (&model.second, true), (&output, false), &back);
        program.free(hidden);
        program.free(output);
        let first = program.plain(HIDDEN, IN);
        multiply(by, (&back, false), (&model.x, true), &first);
        program.free(back);
        [first, second]
    })
}

pub(super) fn train() {
    const STEPS: usize = 4;
    let mut wrong = Wrong::default();
    result::init().expect("GPUMEM_DEVICE says that there is a driver");
    // SAFETY: it only looks.
    let there = unsafe { blas_sys::is_culib_present() };
    assert!(there, "libcublas is not on the loader's path; add its folder to LD_LIBRARY_PATH");

    checked_breakdown("before the context", &mut wrong);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    checked_breakdown("after the context", &mut wrong);
    println!("{}", status());
    let mut program = Program::new(&context);

    let (model, work) = program.scope("load", |program| {
        let model = Model {
            x: program.pooled(IN, BATCH),
            first: program.pooled(HIDDEN, IN),
            second: program.plain(OUT, HIDDEN),
        };
        for (matrix, value) in [(&model.x, 1.0), (&model.first, 1.0 / 1024.0), (&model.second, 1.0 / 4096.0)] {
            fill(matrix, value);
        }
        let shapes = [(HIDDEN, BATCH), (OUT, BATCH), (OUT, HIDDEN), (HIDDEN, BATCH), (HIDDEN, IN)];
        (model, shapes.map(|(rows, columns)| program.pooled(rows, columns)))
    });
    // All that is allocated in this scope is the library's: it loads now what the loop needs. The module of the kernel is loaded as well.
    let (by, descent) = program.scope("library", |program| {
        let by = CudaBlas::new(Arc::clone(&program.stream)).expect("cuBLAS begins");
        let [hidden, output, second, back, first] = &work;
        multiply(&by, (&model.first, false), (&model.x, false), hidden);
        multiply(&by, (&model.second, false), (hidden, false), output);
        multiply(&by, (output, false), (hidden, true), second);
        multiply(&by, (&model.second, true), (output, false), back);
        multiply(&by, (back, false), (&model.x, true), first);
        let descent = Descent::load();
        descent.step(first, first, 0.0);
        (by, descent)
    });
    program.scope("load", |program| work.into_iter().for_each(|matrix| program.free(matrix)));
    let library = bytes_of_libraries(&program, &mut wrong);
    let mut driver = vec![("after load", checked_breakdown("after load", &mut wrong))];
    let libraries: Vec<_> = driver[0].1.parts.iter().filter(|part| part.kind == PartKind::Library).collect();
    println!("of libraries: {libraries:#?}");

    reset_peak_memory_stats(0).expect("allocations are intercepted");
    let (began, mut outputs) = (program.log.entries.len(), Vec::new());
    for step in 0..STEPS {
        program.scope("step", |program| {
            let kept = forward(program, &by, &model, || {
                if step == STEPS - 1 {
                    driver.push(("inside forward", checked_breakdown("inside forward", &mut wrong)));
                }
            });
            outputs.push(first(&kept.1));
            let [first, second] = backward(program, &by, &model, kept);
            program.scope("update", |program| {
                for (weights, gradient) in [(&model.first, first), (&model.second, second)] {
                    descent.step(weights, &gradient, 1e-7);
                    program.free(gradient);
                }
            });
        });
        compare_statistics(&program, library, began, &mut wrong);
    }
    result::ctx::synchronize().expect("nothing failed");
    driver.push(("at the end", checked_breakdown("at the end", &mut wrong)));
    println!("outputs: {outputs:?}");
    wrong.unless(outputs.windows(2).all(|pair| pair[1] < pair[0]), || format!("nothing is learnt: {outputs:?}"));

    let drivers: Vec<_> = driver.iter().map(|(when, reported)| (*when, of_kind(reported, PartKind::Driver))).collect();
    println!("context, kernels and modules, in bytes: {drivers:?}");
    let (least, most) = (drivers.iter().map(|(_, bytes)| *bytes).min(), drivers.iter().map(|(_, bytes)| *bytes).max());
    wrong.unless(least > Some(0), || format!("the driver's part is missing: {drivers:?}"));
    wrong.unless(most.zip(least).is_some_and(|(most, least)| most - least <= 64 << 20), || {
        format!("the driver's part is not the same: {drivers:?}")
    });

    compare(&program.log, library, &mut wrong);
    println!("{}", memory_summary(0).expect("allocations are intercepted"));
    for matrix in [model.x, model.first, model.second] {
        program.free(matrix);
    }
    compare_statistics(&program, library, began, &mut wrong);
    drop(by);
    println!("left when all was freed and cuBLAS is gone: {:?}", memory_allocated(0));
    let counts = status();
    wrong.unless((counts.untracked, counts.lost) == (0, 0), || format!("something was missed: {counts}"));
    wrong.end();
}

/// Returns the bytes that libraries allocated for themselves, which are all that was allocated in their scope. Notes an error if a library
/// is not named.
fn bytes_of_libraries(program: &Program, wrong: &mut Wrong) -> u64 {
    let (all, own) = (memory_allocated(0).expect("allocations are intercepted").get(), program.log.replay(&[]).used);
    let blocks = memory_snapshot().expect("allocations are intercepted").into_iter();
    let theirs: Vec<_> = blocks.filter(|block| block.path == ["library"]).collect();
    println!("\nallocated by libraries, and so in their scope:");
    for block in &theirs {
        println!("  {block}");
    }
    let on_device = theirs.iter().filter(|block| block.kind.is_on_device());
    let library: u64 = on_device.map(|block| block.bytes.get()).sum();
    wrong.unless(own + library == all, || format!("{own} B of ours and {library} B of theirs are not {all} B"));
    let large =
        theirs.iter().filter(|block| block.kind == gpumem::report::MemKind::Device && block.bytes >= Bytes::mib(1));
    let large: Vec<_> = large.map(|block| block.library.as_deref()).collect();
    let of_cublas = |library: Option<&str>| library.is_some_and(|name| name.starts_with("cuBLAS"));
    wrong
        .unless(large.is_empty() || large.iter().copied().any(of_cublas), || format!("cuBLAS is not named: {large:?}"));
    if env::var_os("GPUMEM_BACKTRACE").is_some() {
        let named: Vec<_> = theirs.iter().map(|block| block.library.as_deref()).collect();
        wrong.unless(named.iter().all(Option::is_some), || format!("not all are named: {named:?}"));
        let reported = of_kind(&breakdown(0).expect("the device can be read"), PartKind::Library);
        wrong.unless(reported == library, || format!("the breakdown has {reported} B of libraries, not {library} B"));
    }
    if theirs.is_empty() {
        println!("  nothing: this cuBLAS has not allocated");
    }
    library
}

/// PyTorch's statistics equal what the program adds up, plus what libraries hold.
fn compare_statistics(program: &Program, library: u64, began: usize, wrong: &mut Wrong) {
    let statistics = (memory_allocated(0), max_memory_allocated(0));
    let (Ok(now), Ok(most)) = statistics else { panic!("allocations are intercepted: {statistics:?}") };
    let own = (program.log.replay(&[]).used + library, program.log.peak_since(began) + library);
    println!("allocated {} B, at most {} B; added up {} B and {} B", now.get(), most.get(), own.0, own.1);
    wrong.unless((now.get(), most.get()) == own, || format!("allocated {now:?}, at most {most:?}, added up {own:?}"));
}

/// The summary equals the replayed log, to the byte.
fn compare(log: &Log, library: u64, wrong: &mut Wrong) {
    let summary = summary();
    println!("\n{summary}");
    let mut left = log.paths();
    for scope in &summary.scopes {
        let path: Vec<&str> = scope.path.iter().map(String::as_str).collect();
        let reported = Figures {
            calls: scope.calls,
            used: scope.used.get(),
            peak: scope.peak.get(),
            total: scope.allocated.get(),
            allocations: scope.allocations,
        };
        left.retain(|known| *known != path);
        match path.as_slice() {
            [] => {
                let all = log.replay(&[]).used + library;
                wrong.unless(reported.used == all, || format!("the whole process: {reported:?}, used should be {all}"));
            }
            ["library"] => {
                let right = (reported.calls, reported.used) == (1, library);
                wrong.unless(right, || format!("{path:?}: {reported:?}, of which {library} B should be used"));
            }
            _ => {
                let replayed = log.replay(&path);
                println!("{path:?}: {replayed:?}");
                wrong.unless(reported == replayed, || format!("{path:?}: {reported:?}, replayed {replayed:?}"));
            }
        }
    }
    wrong.unless(left.is_empty(), || format!("the summary lacks {left:?}"));
}
