//! Tests budgets: code that keeps them, the message when they are exceeded, and the error when they cannot be measured.
#![deny(warnings, clippy::pedantic)]
#![forbid(unsafe_code)]

use std::any::Any;
use std::future::Future;
use std::panic::catch_unwind;
use std::task::{Context, Poll, Waker};
use std::thread;

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, assert_gpu_mem, gpu_mem_test, gpu_mem_trace};
use pollster::block_on;

#[gpu_mem_test]
fn the_tests_share_a_device(gpu: &SimGpu) {
    assert_eq!(gpu.ordinal(), SimGpu::all().expect("one")[0].ordinal());
}

fn take(mib: u64) -> SimBlock {
    gpumem::__private::simulated_gpu().alloc(Bytes::mib(mib)).expect("there is room")
}

/// Returns the panic message of `run`.
#[track_caller]
fn panic_of<T>(run: impl FnOnce() -> T + std::panic::UnwindSafe) -> String {
    let text = |payload: Box<dyn Any + Send>| match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => (*payload.downcast::<&str>().expect("a text")).to_owned(),
    };
    text(catch_unwind(run).err().expect("it panics"))
}

mod functions {
    use super::*;

    #[gpu_mem_trace(max_peak = "30 MB", silent)]
    fn frugal(mib: u64) -> SimBlock {
        drop(take(10));
        take(mib)
    }

    #[gpu_mem_trace(max_peak = 31457280, lines, silent)]
    fn with_lines(mib: u64) {
        let _held = take(10);
        drop(take(mib));
    }

    #[gpu_mem_trace(max_peak = "30 MB", silent)]
    async fn asynchronous(mib: u64) {
        let held = take(mib);
        std::future::ready(()).await;
        drop(held);
    }

    #[gpu_mem_trace(max_peak = "1 MB", silent)]
    fn panics() {
        drop(take(2));
        panic!("its own");
    }

    #[gpu_mem_trace(max_peak = "1 MB", silent)]
    fn early(fail: bool) -> Result<(), std::fmt::Error> {
        let _held = take(2);
        if fail {
            return Err(std::fmt::Error);
        }
        Ok(())
    }

    #[gpu_mem_test]
    fn fail_when_they_end() {
        drop(frugal(30));
        with_lines(20);
        block_on(asynchronous(30));
        let over = |name: &str, was: &str| {
            format!(
                "gpumem: `{name}` did not keep its GPU memory budget:\n  peak <= 30 MiB: it was {was} over\n  measured on \
                 simulated device 0, exact, the allocations of its own thread\n"
            )
        };
        let reported = panic_of(|| frugal(31));
        let (values, places) = reported.split_at(reported.find("  the peak of ").expect("what made it"));
        assert_eq!(values, over("frugal", "31 MiB, 1 MiB"));
        let (peak, places) = places.split_at(places.find("  the largest places:\n").expect("where it is"));
        assert!(
            peak.starts_with("  the peak of 31 MiB was made of:\n          31 MiB: tests/sim_budgets.rs:"),
            "{peak}"
        );
        assert!(peak.contains(", in fail_when_they_end > frugal, from tests/sim_budgets.rs:"), "{peak}");
        assert!(places.contains(" 31 MiB in 1 block: ") && places.contains("frugal"), "{places}");
        let reported = panic_of(|| with_lines(21));
        assert!(reported.starts_with(&over("with_lines", "31 MiB, 1 MiB")), "{reported}");
        // The peak covers the whole body and not only its last statement. Two lines made it up.
        assert!(reported.contains("\n          21 MiB: ") && reported.contains("\n          10 MiB: "), "{reported}");
        let reported = panic_of(|| block_on(asynchronous(40)));
        assert!(reported.starts_with(&over("asynchronous", "40 MiB, 10 MiB")), "{reported}");
        assert!(
            reported.contains("  the peak of 40 MiB was made of:\n          40 MiB: tests/sim_budgets.rs:"),
            "{reported}"
        );
        assert!(!reported.contains("nothing that was allocated inside is live"), "{reported}");
        assert!(panic_of(|| early(true)).contains("peak <= 1 MiB: it was 2 MiB"));
        assert!(panic_of(|| early(false)).contains("peak <= 1 MiB: it was 2 MiB"));
    }

    #[gpu_mem_test]
    fn leave_another_panic_alone() {
        assert_eq!(panic_of(panics), "its own");
    }

    #[gpu_mem_test]
    fn of_a_future_that_is_dropped() {
        #[gpu_mem_trace(max_peak = "1 MB", silent)]
        async fn pending() {
            let _held = take(2);
            std::future::pending::<()>().await;
        }
        let mut future = Box::pin(pending());
        let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert_eq!(poll, Poll::Pending);
        assert!(panic_of(std::panic::AssertUnwindSafe(|| drop(future))).contains("it was 2 MiB"));
        drop(pending());
    }
}

mod assertions {
    use super::*;

    #[gpu_mem_test]
    fn give_the_value_of_the_block() {
        let most = Bytes::mib(20);
        let kept: Box<dyn Any> = assert_gpu_mem!(peak <= "30 MiB", used == most, peak > 10_u8, used != -1, {
            drop(take(30));
            Box::new(take(20))
        });
        drop(kept);
        assert_gpu_mem!(crate = gpumem, used >= "-20 MiB", used < usize::MAX, {});
        let block = take(5);
        assert_gpu_mem!(used == "-5 MiB", peak == 0, { drop(block) });
    }

    #[gpu_mem_test]
    fn report_every_condition_that_is_false() {
        let here = line!() + 2;
        let reported = panic_of(|| {
            assert_gpu_mem!(peak < "2 MiB", used == 0, {
                std::mem::forget(take(2));
            });
        });
        let expected = format!(
            "gpumem: `tests/tests/sim_budgets.rs:{here}` did not keep its GPU memory budget:\n  peak < 2 MiB: it was 2 MiB\n  \
             used == 0 B: it was 2 MiB, 2 MiB over\n"
        );
        assert!(reported.starts_with(&expected), "{reported}");
    }

    #[gpu_mem_test]
    fn leave_the_ways_out_of_a_block_open() {
        fn question(text: &str) -> Result<u32, std::num::ParseIntError> {
            let mut sum = 0;
            for _ in 0..3 {
                sum += assert_gpu_mem!(peak < "2 MiB", {
                    if text.is_empty() {
                        break;
                    }
                    text.parse::<u32>()?
                });
            }
            Ok(sum)
        }
        assert_eq!((question("7"), question("")), (Ok(21), Ok(0)));
        assert!(question("x").is_err());
    }

    #[gpu_mem_test]
    fn count_the_blocks_that_are_left() {
        let kept = assert_gpu_mem!(leaks == 2, { [take(1), take(1)] });
        assert_gpu_mem!(leaks == 0, { drop((take(1), kept)) });
        let reported = panic_of(|| assert_gpu_mem!(leaks == 0, { std::mem::forget(take(1)) }));
        assert!(reported.contains("leaks == 0 blocks: it was 1 block, 1 block over"), "{reported}");
    }
}

mod tests {
    use super::*;

    #[gpu_mem_test(max_peak = "30 MB", max_used = 0, leaks = 0)]
    fn takes_a_device(gpu: &SimGpu) -> gpumem::Result<()> {
        let _held = gpu.alloc(Bytes::mib(30))?;
        Ok(())
    }

    #[gpu_mem_test(max_peak = "30 MB")]
    fn owns_a_device(gpu: SimGpu) {
        drop(gpu.alloc(Bytes::mib(30)));
    }

    #[gpu_mem_test(max_peak = "30 MB", crate = gpumem, device = 0)]
    #[should_panic(expected = "peak <= 30 MiB: it was 31 MiB, 1 MiB over")]
    fn fails() {
        drop(take(31));
    }

    #[gpu_mem_test(max_used = "1 MB")]
    #[should_panic(expected = "used <= 1 MiB: it was 2 MiB, 1 MiB over")]
    fn keeps_memory(gpu: &SimGpu) {
        std::mem::forget(gpu.alloc(Bytes::mib(2)));
    }

    #[gpu_mem_test(leaks = 0)]
    #[should_panic(expected = "leaks <= 0 blocks: it was 1 block, 1 block over")]
    fn loses_a_block(gpu: &SimGpu) {
        std::mem::forget(gpu.alloc(Bytes::mib(2)));
    }

    /// The environment variable `GROWS_MIB` sets the amount that this test allocates.
    #[gpu_mem_test(max_peak = "1 GB", fail_on_increase = "5%")]
    fn grows(gpu: &SimGpu) {
        let mib = std::env::var("GROWS_MIB").map_or(100, |mib| mib.parse().expect("a number"));
        drop(gpu.alloc(Bytes::mib(mib)));
    }

    /// The test attribute of an async runtime may be below this attribute.
    #[gpu_mem_test(max_peak = "30 MB", max_used = 0)]
    #[pollster::test]
    async fn runs_a_future(gpu: &SimGpu) -> gpumem::Result<()> {
        let held = gpu.alloc(Bytes::mib(30))?;
        std::future::ready(()).await;
        drop(held);
        Ok(())
    }

    #[gpu_mem_test(max_peak = "30 MB")]
    #[pollster::test]
    #[should_panic(expected = "peak <= 30 MiB: it was 31 MiB, 1 MiB over")]
    async fn runs_a_future_that_needs_more() {
        let held = take(31);
        std::future::ready(()).await;
        drop(held);
    }

    #[gpu_mem_test(max_peak = "1 MB", baseline = "no/such/folder/baseline.json")]
    #[should_panic(
        expected = "cannot use the baseline no/such/folder/baseline.json: there is no such file; run the test"
    )]
    fn without_a_baseline(gpu: &SimGpu) {
        drop(gpu.alloc(Bytes::mib(1)));
    }
}

/// Returns whether the process has read the debug information of this program. Reading it maps the whole file.
fn has_read_debug_information() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("a process may read it");
    let program = std::env::current_exe().expect("it has a path");
    let size = program.metadata().expect("it is there").len();
    let length = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        number(to)?.checked_sub(number(from)?)
    };
    let of_program = maps.lines().filter(|line| line.ends_with(program.to_str().expect("UTF-8")));
    of_program.filter_map(length).any(|length| length >= size)
}

/// `a_budget_of_all_threads_that_is_kept_looks_up_no_lines` runs this test without any other test, as nextest does.
#[test]
fn workers_with_any_names_keep_a_budget() {
    let gpu = gpumem::__private::simulated_gpu();
    let work = || drop(gpu.alloc(Bytes::mib(9)).expect("there is room"));
    assert_gpu_mem!(threads = "all", peak == "9 MB", {
        thread::scope(|threads| drop(threads.spawn(work).join()));
        for name in ["worker", "tokio-rt-worker", "tests::grows"] {
            let named = thread::Builder::new().name(name.to_owned());
            thread::scope(|threads| drop(named.spawn_scoped(threads, work).expect("it starts").join()));
        }
    });
    assert!(gpumem_tests::part().is_none() || !has_read_debug_information());
}

#[gpu_mem_test(threads = "all")]
fn counts_all_threads(gpu: &SimGpu) {
    drop(gpu.alloc(Bytes::mib(1)));
}

/// Tests that run other tests of this file in separate processes.
mod in_a_child {
    use std::fs;

    use gpumem_tests::{Ended, OwnProcess, Running};

    #[track_caller]
    fn passes(test: &str, env: &[(&str, &str)]) -> String {
        OwnProcess::new(test).envs(env).passes().stderr
    }

    #[track_caller]
    fn fails(test: &str, env: &[(&str, &str)], reason: &str) {
        let Ended { code, stdout, stderr } = OwnProcess::new(test).envs(env).run();
        assert!(code == Some(101) && [&stdout, &stderr].iter().any(|text| text.contains(reason)), "{stdout}\n{stderr}");
    }

    #[test]
    fn a_peak_is_held_to_the_baseline() {
        const GROWS: &str = "tests::grows";
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("baseline.json").to_str().expect("UTF-8").to_owned();
        let baseline = ("GPUMEM_BASELINE", file.as_str());
        let of = |mib| [baseline, ("GROWS_MIB", mib)];
        let next = "; run the test with GPUMEM_BASELINE_UPDATE=1";
        fails(GROWS, &of("100"), &format!("there is no such file{next}"));
        passes(GROWS, &[baseline, ("GPUMEM_BASELINE_UPDATE", "1")]);
        let written = fs::read_to_string(&file).expect("it was written");
        assert_eq!(written, "{\n  \"peaks\": {\n    \"sim_budgets::tests::grows\": \"100 MiB\"\n  }\n}\n");
        passes(GROWS, &of("105"));
        passes(GROWS, &of("1"));
        fails(GROWS, &of("106"), "and 5 % of growth): it was 106 MiB, 1 MiB over");
        // The panic is reported at a line of the user's test and not at one of gpumem's lines.
        fails(GROWS, &of("106"), " panicked at tests/tests/sim_budgets.rs:");
        assert_eq!(fs::read_to_string(&file).expect("still there"), written, "only an update writes");
        // A failed test does not change the baseline.
        fails(GROWS, &[baseline, ("GPUMEM_BASELINE_UPDATE", "1"), ("GROWS_MIB", "2000")], "peak <= 1 GiB");
        assert_eq!(fs::read_to_string(&file).expect("still there"), written);
        fs::write(&file, "{\"peaks\": {}}").expect("a file");
        fails(GROWS, &of("100"), &format!("it has no peak of `sim_budgets::tests::grows`{next}"));
        fs::write(&file, "{").expect("a file");
        fails(GROWS, &of("100"), "it is not a baseline file (EOF");
        fails(GROWS, &[baseline, ("GPUMEM_BASELINE_UPDATE", "1")], "it is not a baseline file (EOF");
    }

    #[test]
    fn a_peak_of_all_threads_that_may_not_grow_is_warned_of() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("baseline.json");
        let env = [("GPUMEM_BASELINE", file.to_str().expect("UTF-8")), ("GPUMEM_BASELINE_UPDATE", "1")];
        let warning = "counts_all_threads` counts all threads and allows no growth over its baseline";
        for env in [&env[..], &env[..1]] {
            assert!(passes("counts_all_threads", env).contains(warning));
        }
        assert!(
            !passes("counts_all_threads", &[]).contains(warning)
                && !passes("tests::takes_a_device", &env).contains(warning)
        );
    }

    /// Reading debug information takes a second, so only a budget that is exceeded may read it.
    #[test]
    fn a_budget_of_all_threads_that_is_kept_looks_up_no_lines() {
        OwnProcess::new("workers_with_any_names_keep_a_budget").part("alone").passes();
    }

    #[test]
    fn processes_write_one_baseline() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("baseline.json").to_str().expect("UTF-8").to_owned();
        let env = [("GPUMEM_BASELINE", file.as_str()), ("GPUMEM_BASELINE_UPDATE", "1")];
        let tests = ["tests::grows", "tests::takes_a_device", "tests::owns_a_device"];
        let running = tests.map(|test| OwnProcess::new(test).envs(&env).start());
        for ended in running.map(Running::end) {
            assert_eq!(ended.code, Some(0), "{ended:?}");
        }
        let written = fs::read_to_string(&file).expect("it was written");
        for test in tests {
            assert!(written.contains(&format!("\"sim_budgets::{test}\": ")), "{written}");
        }
    }

    #[test]
    fn what_cannot_be_measured_fails_or_is_skipped_aloud() {
        const TEST: &str = "tests::takes_a_device";
        let off = ("GPUMEM_GAUGE", "off");
        fails(
            TEST,
            &[off],
            "cannot be measured: traces are off (GPUMEM_GAUGE is off); GPUMEM_BUDGETS=skip runs without it",
        );
        // A budget always measures exactly, even if the environment requests another gauge, or a gauge or source that does not
        // exist.
        for gauge in ["sampled", "nonsense"] {
            passes(TEST, &[("GPUMEM_GAUGE", gauge)]);
        }
        passes(TEST, &[("GPUMEM_SOURCE", "nonsense")]);
        let reported = passes(TEST, &[off, ("GPUMEM_BUDGETS", "skip")]);
        assert!(
            reported
                .contains("the GPU memory budget of `sim_budgets::tests::takes_a_device` was skipped: traces are off"),
            "{reported}"
        );
        fails(TEST, &[off, ("GPUMEM_BUDGETS", "no")], "cannot use GPUMEM_BUDGETS: `no` is not `skip`");
    }
}
