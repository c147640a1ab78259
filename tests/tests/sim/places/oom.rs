//! Tests the reports when memory runs out, and `retry_after_trim`.

use super::*;

/// Returns a device of 1 GiB of which 712 MiB are in use. Its pool keeps 64 MiB of these without using them. Also returns the
/// live blocks.
fn crowded() -> (SimGpu, Vec<SimBlock>) {
    let gpu = SimGpu::install(Bytes::gib(1)).expect("GPUMEM_SIM is not set");
    gpumem::intercept::subscribe().expect("simulated devices report their allocations");
    let weights = GpuMemTrace::scope("load", |_| take(&gpu, 600 * MIB));
    let train = GpuMemTrace::with_ctx("train");
    let pooled = gpu.alloc_async(Bytes::mib(64)).expect("there is room");
    let activation = GpuMemTrace::scope("forward", |_| take(&gpu, 48 * MIB));
    drop(pooled);
    drop(train);
    (gpu, vec![weights, activation])
}

fn ask(gpu: &SimGpu) -> Result<SimBlock, Error> {
    gpu.alloc(Bytes::mib(900))
}

pub(super) fn rejected() {
    let (gpu, _kept) = crowded();
    on_oom(|oom: &OutOfMemory| {
        let free = oom.breakdown.as_ref().map(|breakdown| breakdown.memory.free).expect("it can be read");
        println!("> {} of {}, {} in {:?}, {free} free", oom.requested, oom.kind, oom.device, oom.path);
        println!("> {}", oom.line.as_deref().unwrap_or("not known yet"));
        println!("> {:?}", oom.scopes.iter().map(|place| (place.name.as_str(), place.bytes.mb())).collect::<Vec<_>>());
    });
    let _train = GpuMemTrace::with_ctx("train");
    let _backward = GpuMemTrace::with_ctx("backward");
    // The lines of live blocks are looked up before the allocation fails, because there is little time after that.
    breakdown(gpu.ordinal()).expect("it can be read");
    assert!(gpu.alloc(Bytes::mib(900)).is_err_and(|error| error.is_out_of_memory()));
    println!("> {}", line!() - 1);
    // An invalid request does not fail for lack of memory, so it is not reported.
    assert!(gpu.alloc(Bytes::ZERO).is_err());
}

pub(super) fn rejected_often() {
    static CALLED: AtomicU64 = AtomicU64::new(0);
    let (gpu, _kept) = crowded();
    on_oom(|_| _ = CALLED.fetch_add(1, Relaxed));
    for _ in 0..5 {
        assert!(ask(&gpu).is_err());
    }
    thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| (0..10).for_each(|_| assert!(gpu.alloc_async(Bytes::gib(2)).is_err())));
        }
    });
    println!("> {}", CALLED.load(Relaxed));
}

pub(super) fn hook_that_panics() {
    let (gpu, _kept) = crowded();
    on_oom(|_| panic!("as it is meant to"));
    for _ in 0..2 {
        println!("> {}", ask(&gpu).is_err_and(|error| error.is_out_of_memory()));
    }
}

pub(super) fn hook_that_allocates() {
    let (gpu, _kept) = crowded();
    let own = gpu.clone();
    on_oom(move |_| {
        println!("> a hook");
        println!("> {}", ask(&own).is_err_and(|error| error.is_out_of_memory()));
        println!("> {}", retry_after_trim(|| ask(&own)).is_err());
        println!("> {}", GpuMemTrace::scope("in the hook", |_| own.alloc(Bytes::mib(1))).is_ok());
    });
    println!("> {}", ask(&gpu).is_err());
}

pub(super) fn hook_that_sets_another() {
    struct Last;
    impl Drop for Last {
        fn drop(&mut self) {
            println!("> the first is gone");
            on_oom(|_| println!("> third"));
        }
    }
    let (gpu, _kept) = crowded();
    let last = Last;
    on_oom(move |_| {
        let _ = &last;
        println!("> first");
        on_oom(|_| println!("> second"));
    });
    assert!(ask(&gpu).is_err());
    assert!(ask(&gpu).is_err());
}

pub(super) fn hook_that_exits() {
    let (gpu, _kept) = crowded();
    on_oom(|_| std::process::exit(3));
    drop(ask(&gpu));
}

fn reports(said: &Ended) -> usize {
    said.stderr.lines().filter(|line| line.contains("is out of memory")).count()
}

#[test]
fn a_rejection_reports_which_scopes_hold_the_memory() {
    // On a busy machine, reading the device may take too long. The hook then gets an incomplete report.
    let said = (0..100).map(|_| passes("refused", &[])).find(|said| said.answers().len() == 4);
    let said = said.expect("a reading of a simulated device takes little time");
    let [reported, at, scopes, line] = said.answers()[..] else { panic!("{}", said.stdout) };
    let place = format!("tests/sim/places/oom.rs:{line}:17");
    assert_eq!(reported, "900 MiB of device, 0 in [\"train\", \"backward\"], 312 MiB free");
    assert!(at == place || at == "not known yet", "{at}");
    assert_eq!(scopes, "[(\"load\", 600), (\"train > forward\", 48)]");
    assert!(said.stderr.lines().all(|line| line.width() <= 80), "{}", said.stderr);
    let expected = format!(
        "gpumem: device 0 is out of memory: 900 MiB (device) were requested\n  \
               free 312 MiB; in use by allocations 648 MiB,\n  \
               by the driver for this process 64 MiB\n  \
               at {place}\n  \
               in train > backward\n\
             device 0 (simulated GPU (1 GiB)): 712 MiB of 1 GiB in use, 312 MiB free\n \
              where                       MiB  blocks\n \
              ─────────────────────────────────────────────────\n \
              this process                712       2  ████████\n   \
                load                      600       1  ██████▋\n   \
                kept by the pool, unused   64          ▋\n   \
                train                      48       1  ▌\n     \
                  forward                  48       1  ▌\n\
             gpumem::torch::empty_cache() would return 64 MiB\n\
             places that hold the most:\n"
    );
    let (head, places) = said.stderr.split_at(expected.len().min(said.stderr.len()));
    assert_eq!(head, expected);
    // Both blocks were allocated on one line, which was called from two lines. The pool's unused memory is not among the places.
    let places: Vec<_> = places.lines().skip(2).collect();
    let [large, large_from, small, small_from, peak, at_peak @ ..] = &places[..] else { panic!("{}", said.stderr) };
    assert!(large.starts_with(" tests/sim/places/mod.rs:") && large.ends_with("  600       1  ████████"), "{large}");
    assert!(small.starts_with(" tests/sim/places/mod.rs:") && small.ends_with("   48       1  ▋"), "{small}");
    for caller in [large_from, small_from] {
        assert!(caller.starts_with("   from tests/sim/places/oom.rs:"), "{caller}");
    }
    // The peak is higher than the 648 MiB that are live when the allocation fails.
    assert_eq!(*peak, "simulated device 0: the peak was 712 MiB");
    for (scope, mib) in [(" load", 600), (" train", 112), ("   forward", 48)] {
        let row = |line: &&str| line.starts_with(&format!("{scope}  ")) && line.contains(&format!(" {mib}  "));
        assert!(at_peak.iter().any(row), "{scope}: {}", said.stderr);
    }
}

#[test]
fn three_are_reported_and_the_hook_gets_each() {
    let said = passes("refused often", &[]);
    assert_eq!((reports(&said), said.answers()), (3, vec!["45"]), "{}", said.stderr);
    assert!(said.stderr.ends_with("gpumem: further failed allocations are not reported\n"), "{}", said.stderr);
    let silent = passes("refused often", &[("GPUMEM_REPORT", "off")]);
    assert_eq!((silent.stderr.as_str(), silent.answers()), ("", vec!["45"]));
}

#[test]
fn hooks_that_misbehave_do_no_harm() {
    let said = passes("hook that panics", &[]);
    assert_eq!((reports(&said), said.answers()), (1, vec!["true", "true"]));
    let said = passes("hook that allocates", &[]);
    assert_eq!((reports(&said), said.answers()), (1, vec!["a hook", "true", "true", "true", "true"]));
    let said = passes("hook that sets another", &[]);
    assert_eq!(said.answers(), ["first", "the first is gone", "third"]);
    let said = run("hook that exits", &[("GPUMEM_LEAKS", "1")]);
    assert_eq!((said.code, reports(&said)), (Some(3), 1));
    assert!(said.stderr.contains(" ends, and 2 blocks (648 MiB) were not freed:"), "{}", said.stderr);
}

/// Returns the number of attempts, and the last result.
fn tried<T>(attempt: impl Fn() -> Result<T, Error>) -> (u32, Result<T, Error>) {
    let mut count = 0;
    let result = retry_after_trim(|| {
        count += 1;
        attempt()
    });
    (count, result)
}

pub(super) fn retries() {
    let (gpu, _kept) = crowded();
    on_oom(|_| println!("> a hook"));
    let (count, block) = tried(|| gpu.alloc(Bytes::mib(350)));
    println!("> {count} {}", block.is_ok());
    drop(block);
    let (count, block) = tried(|| gpu.alloc(Bytes::mib(1)));
    println!("> {count} {}", block.is_ok());
    let (count, other) = tried(|| gpu.alloc(Bytes::ZERO));
    println!("> {count} {}", other.is_err_and(|error| !error.is_out_of_memory()));
    // A failed allocation on another thread does not cause a second try on this thread.
    let (count, elsewhere) = tried(|| {
        thread::scope(|threads| threads.spawn(|| assert!(ask(&gpu).is_err())).join().expect("it does not panic"));
        gpu.alloc(Bytes::ZERO)
    });
    println!("> {count} {}", elsewhere.is_err());
    // One attempt is inside another one. The inner one succeeds at its second try, so the outer one needs no second try.
    drop(gpu.alloc_async(Bytes::mib(64)));
    let (count, nested) = tried(|| tried(|| gpu.alloc(Bytes::mib(350))).1);
    println!("> {count} {}", nested.is_ok());
}

pub(super) fn retries_in_vain() {
    let (gpu, _kept) = crowded();
    on_oom(|oom| println!("> a hook, {}", oom.requested));
    let (count, full) = tried(|| ask(&gpu));
    println!("> {count} {}", full.is_err_and(|error| error.is_out_of_memory()));
    let (count, full) = tried(|| tried(|| gpu.alloc(Bytes::mib(901))).1);
    println!("> {count} {}", full.is_err());
    // After a panic in an attempt, failed allocations are still reported.
    let unwound = catch_unwind(AssertUnwindSafe(|| retry_after_trim(|| -> Result<(), Error> { panic_any(()) })));
    assert!(unwound.is_err() && gpu.alloc(Bytes::mib(902)).is_err());
}

#[test]
fn a_second_try_after_the_pools_gave_back() {
    let said = passes("retries", &[]);
    assert_eq!(said.answers(), ["2 true", "1 true", "1 true", "a hook", "1 true", "1 true"]);
    assert_eq!(reports(&said), 1, "{}", said.stderr);
    let said = passes("retries in vain", &[]);
    let answers = said.answers();
    assert_eq!(answers[..2], ["a hook, 900 MiB", "2 true"]);
    assert_eq!(answers.iter().filter(|answer| **answer == "a hook, 901 MiB").count(), 1, "{answers:?}");
    assert_eq!(answers.last(), Some(&"a hook, 902 MiB"));
}
