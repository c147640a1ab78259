//! Tests the list of live blocks, and the line that allocated each block.

use std::{
    cell::Cell,
    ffi::{c_int, c_void},
    rc::Rc,
};

use gpumem_tests::with_nested_calls;

use super::*;

#[test]
fn what_is_still_there_of_traces() {
    let gpu = simulated_gpu();
    let before = take(&gpu, 1);
    let mut outer = GpuMemTrace::with_ctx("outer");
    assert!(outer.live().is_empty());
    let a = take(&gpu, 10);
    let inner = GpuMemTrace::with_ctx("inner");
    let (b, freed) = (take(&gpu, 20), take(&gpu, 30));
    let pooled = gpu.alloc_async(Bytes::new(25)).expect("there is room");
    // The blocks of another thread are in the scope only if that thread has entered it through a handle.
    let others = thread::scope(|threads| {
        let (gpu, handle) = (&gpu, inner.handle());
        let alone = threads.spawn(move || take(gpu, 40));
        let handed = threads.spawn(move || handle.in_scope(|| take(gpu, 50)));
        [alone, handed].map(|thread| thread.join().expect("it does not panic"))
    });
    assert_eq!(sizes(&outer.live()), [50, 30, 25, 20, 10]);
    assert_eq!(sizes(&inner.live()), [50, 30, 25, 20]);
    drop(freed);
    assert_eq!(sizes(&inner.live()), [50, 25, 20]);
    drop(inner);
    let after_inner = take(&gpu, 5);
    assert_eq!(sizes(&outer.live()), [50, 25, 20, 10, 5]);
    // A stopped trace keeps the blocks that it had, until they are freed.
    outer.stop();
    let after = take(&gpu, 60);
    assert_eq!(sizes(&outer.live()), [50, 25, 20, 10, 5]);
    drop((a, others));
    assert_eq!(sizes(&outer.live()), [25, 20, 5]);
    let kinds: Vec<_> = outer.live().iter().map(|block| (block.kind.name(), block.path.join("/"))).collect();
    assert_eq!(
        kinds,
        [("pool", "outer/inner"), ("device", "outer/inner"), ("device", "outer")]
            .map(|(kind, path)| (kind, path.to_owned()))
    );
    drop((before, b, pooled, after_inner, after));
    assert!(outer.live().is_empty());
}

#[test]
fn the_same_path_at_the_same_time_on_three_threads() {
    let gpu = simulated_gpu();
    let (all_in, reported) = (Barrier::new(3), Barrier::new(3));
    let own = |thread: u64| {
        gpu.make_current();
        [0, 10].map(|round| {
            let trace = GpuMemTrace::with_ctx("same");
            // The block of the first round still exists in the second round, but it belongs to an earlier trace.
            mem::forget(take(&gpu, thread + round));
            all_in.wait();
            let live = sizes(&trace.live());
            reported.wait();
            live
        })
    };
    let live = thread::scope(|threads| {
        let own = &own;
        let started = [1, 2, 3].map(|thread| threads.spawn(move || own(thread)));
        started.map(|thread| thread.join().expect("it does not panic"))
    });
    assert_eq!(live, [1, 2, 3].map(|thread| [vec![thread], vec![thread + 10]]));
    assert_eq!(scopes(&gpu)["same"].calls, 6);
}

#[test]
fn blocks_of_others_that_come_and_go_meanwhile() {
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("busy");
    let kept: Vec<_> = (1..=2000).map(|bytes| take(&gpu, bytes)).collect();
    let rounds_left = AtomicU64::new(20);
    let seen: Vec<_> = thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                while rounds_left.load(Relaxed) > 0 {
                    drop(take(&gpu, 7));
                }
            });
        }
        let look = |_| {
            let live = sizes(&trace.live());
            rounds_left.fetch_sub(1, Relaxed);
            (live.len(), live.iter().sum::<u64>())
        };
        (0..20).map(look).collect()
    });
    assert_eq!(seen, [(2000, 2000 * 2001 / 2); 20]);
    drop(kept);
}

pub(super) fn blocks() {
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("train");
    let opened = line!() - 1;
    let large = gpu.alloc(Bytes::mib(1));
    let small = gpu.alloc(Bytes::kib(1));
    let pooled = gpu.alloc_async(Bytes::mib(2));
    let line = line!();
    println!("> {opened} {} {} {}", line - 1, line - 3, line - 2);
    for block in trace.live() {
        let text = |text: &Option<String>| text.as_deref().unwrap_or("?").to_owned();
        let functions = block.backtrace.iter().any(|frame| frame.contains("blocks"));
        println!("> {} {} {functions} {}", text(&block.line), text(&block.scope_place), text(&block.library));
        println!("> {block}");
    }
    drop((large, small, pooled));
}

/// Allocates below more than 60 other functions. Some of them, such as `qsort`, are written in C.
#[inline(never)]
fn asks_from_afar(gpu: &SimGpu) -> (SimBlock, u32) {
    thread_local! {
        static ASK: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
    }
    extern "C" fn order(_: *const c_void, _: *const c_void) -> c_int {
        with_nested_calls(60, &mut || ASK.take().into_iter().for_each(|ask| ask()));
        0
    }
    unsafe extern "C" {
        fn qsort(
            of: *mut c_void,
            count: usize,
            size: usize,
            order: extern "C" fn(*const c_void, *const c_void) -> c_int,
        );
    }

    let taken = Rc::new(Cell::new(None));
    let (to, gpu) = (Rc::clone(&taken), gpu.clone());
    ASK.set(Some(Box::new(move || to.set(gpu.alloc_async(Bytes::mib(3)).ok()))));
    let mut numbers = [2_u64, 1];
    // SAFETY: the array has 2 elements of 8 bytes each, and `order` does not read them.
    unsafe { qsort(numbers.as_mut_ptr().cast(), 2, 8, order) };
    (taken.take().expect("the device has room"), line!() - 1)
}

pub(super) fn deep() {
    let gpu = simulated_gpu();
    let trace = GpuMemTrace::with_ctx("train");
    // The second block has the stack of the first block, which is already known.
    let blocks: Vec<_> = (0..2).map(|_| asks_from_afar(&gpu)).collect();
    for block in trace.live() {
        let count = |name: &str| block.backtrace.iter().filter(|frame| frame.contains(name)).count();
        let outermost = block.backtrace.iter().rposition(|frame| frame.contains("asks_from_afar"));
        let outermost = outermost.expect("its function is on the stack");
        let is_there = block.backtrace[outermost].contains(&format!("tests/sim/places/live.rs:{}:", blocks[0].1));
        println!("> {} {outermost} {is_there}", count("nested_calls::with_nested_calls"));
    }
    drop(blocks);
}

#[test]
fn a_line_is_found_however_much_is_called_from_there() {
    let said = passes("deep", &[]);
    assert_eq!(said.answers().len(), 2);
    for reported in said.answers() {
        let reported: Vec<_> = reported.split(' ').collect();
        let [functions, outermost, is_there] = reported[..] else { panic!("{}", said.stdout) };
        let [functions, outermost] = [functions, outermost].map(|count| count.parse::<usize>().unwrap());
        assert!(functions >= 61 && outermost > functions, "{}", said.stdout);
        assert_eq!(is_there, "true");
    }
}

#[test]
fn the_line_that_asked_is_the_programs_own() {
    // The blocks, the largest first: one in the pool, a large one outside it, and a small one.
    for (setting, known) in [
        ("", [true, true, false]),
        ("auto", [true, true, false]),
        ("1", [true, true, true]),
        ("0", [false, false, false]),
        ("off", [false, false, false]),
        ("nonsense", [true, true, false]),
    ] {
        let said = passes("blocks", &[("GPUMEM_BACKTRACE", setting)]);
        let complaint = "gpumem: cannot use GPUMEM_BACKTRACE: `nonsense` is not one of";
        assert_eq!(said.stderr.contains(complaint), setting == "nonsense", "{}", said.stderr);
        let answers = said.answers();
        let [opened, lines @ ..] = &answers[0].split(' ').collect::<Vec<_>>()[..] else { panic!("{}", said.stdout) };
        assert_eq!(answers.len(), 7, "{}", said.stdout);
        for (at, (line, is_known)) in lines.iter().zip(known).enumerate() {
            let reported: Vec<_> = answers[1 + 2 * at].split(' ').collect();
            let [reported, scope, functions, library] = reported[..] else { panic!("{}", said.stdout) };
            assert!(scope.ends_with(&format!("tests/sim/places/live.rs:{opened}")), "{scope}, not {opened}");
            assert_eq!((functions, library), (if is_known { "true" } else { "false" }, "?"));
            let text = answers[2 + 2 * at];
            if is_known {
                assert!(reported.contains(&format!("tests/sim/places/live.rs:{line}:")), "{reported}, not {line}");
                assert!(!reported.starts_with('/'), "not from where the program was built: {reported}");
                assert!(
                    text.contains(&format!("tests/sim/places/live.rs:{line}:")) && text.ends_with(", in train"),
                    "{text}"
                );
            } else {
                assert_eq!(reported, "?");
                assert!(text.contains(&format!("in the scope of tests/tests/sim/places/live.rs:{opened}")), "{text}");
            }
        }
    }
}
