//! The tracker: on simulated devices with its whole text, and on the stand-in driver with everything that can be wrong.

use std::{
    fs::{self, File},
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    thread,
};

use gpumem::{
    Bytes, GpuMemTrace, MemTracker, Tracked, label,
    sim::{SimBlock, SimGpu},
    track,
};
use gpumem_tests::{Library, Outcome, Standin};

/// Where a tracker of a test writes.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    /// What was written since the last call, without the numbers of this file's lines.
    fn take(&self) -> String {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        without_numbers(&text)
    }
}

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `src/main.rs:12` is `src/main.rs:NN`.
fn without_numbers(text: &str) -> String {
    let mut lines = text.split_inclusive('\n').map(|line| {
        let Some((file, rest)) = line.strip_prefix("At ").and_then(|line| line.split_once(".rs:")) else {
            return line.to_owned();
        };
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        format!("At {file}.rs:NN{}", &rest[digits..])
    });
    let text: String = lines.by_ref().collect();
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    text
}

/// A simulated device of its own for the calling test, with a tracker and what that writes.
fn gpu() -> (SimGpu, MemTracker, Page) {
    let gpu = SimGpu::install(Bytes::gib(64)).expect("GPUMEM_SIM is not set");
    gpu.make_current();
    let page = Page::default();
    let mut tracker = MemTracker::builder().to(page.clone()).start().unwrap();
    tracker.track();
    let first = page.take();
    let ordinal = gpu.ordinal();
    assert!(
        first
            .starts_with(&format!("GPU Memory Track | simulated device {ordinal} | older blocks are not known\n\nAt ")),
        "{first}"
    );
    (gpu, tracker, page)
}

/// Small enough to be known by its scopes alone.
fn kib(gpu: &SimGpu, kib: u64) -> SimBlock {
    gpu.alloc_async(Bytes::kib(kib)).unwrap()
}

/// The lines below the one that says where.
fn changes(page: &Page) -> Vec<String> {
    let text = page.take();
    text.lines().filter(|line| line.starts_with(['+', '-', '?'])).map(str::to_owned).collect()
}

#[test]
fn a_story() {
    let (gpu, mut tracker, page) = gpu();
    let conv: Vec<_> = (0..7).map(|_| kib(&gpu, 9)).collect();
    for (number, block) in conv.iter().enumerate() {
        block.label(format!("conv{number}.weight"), &[512, 512, 3, 3], "f32").unwrap();
    }
    let loaded = GpuMemTrace::builder().ctx("load").on_exit_report(false).start().unwrap();
    let batch = GpuMemTrace::builder().ctx("batch").on_exit_report(false).start().unwrap();
    let inputs = [gpu.alloc_async(Bytes::new(1_500)).unwrap(), gpu.alloc_async(Bytes::new(1_500)).unwrap()];
    drop((batch, loaded));
    track!(tracker);
    assert_eq!(
        page.take(),
        "At tests/tests/tracker.rs:NN: a_story
                                      Total Used Memory: 32 MiB, live: 65.93 KiB
+ | 7 * 9 KiB f32 (512, 512, 3, 3) |   63 KiB | conv0.weight and 6 more
+ | 2 * 1.46 KiB                   | 2.93 KiB | load > batch

"
    );
    let eighth = kib(&gpu, 9);
    eighth.label("conv7.weight", &[512, 512, 3, 3], "f32").unwrap();
    drop(inputs);
    tracker.track_with("");
    let expected = [
        "+ | 1 * 9 KiB f32 (512, 512, 3, 3) |    9 KiB | conv7.weight",
        "- | 2 * 1.46 KiB                   | 2.93 KiB | load > batch",
    ];
    assert_eq!(changes(&page), expected);
    tracker.track();
    assert_eq!(changes(&page), [""; 0]);
    drop((conv, eighth));
    let saw = tracker.track();
    assert_eq!(changes(&page), ["- | 8 * 9 KiB f32 (512, 512, 3, 3) | 72 KiB | conv0.weight and 7 more"]);
    assert_eq!((saw.live, saw.lost), (Some(Bytes::ZERO), 0));
    assert_eq!(saw.changes.unwrap()[0].names.len(), 8);
}

#[test]
fn blocks_whose_line_is_known() {
    let (gpu, mut tracker, _page) = gpu();
    let trace = GpuMemTrace::builder().ctx("load").on_exit_report(false).start().unwrap();
    let (block, line) = (gpu.alloc(Bytes::mib(64)).unwrap(), line!());
    drop(trace);
    let changes = tracker.track().changes.unwrap();
    let [change] = changes.as_slice() else { panic!("{changes:?}") };
    assert_eq!((change.path.join(" > "), &change.library), ("load".to_owned(), &None));
    let known = change.line.as_deref().unwrap();
    assert!(known.contains(&format!("tests/tracker.rs:{line}:")), "{known}");
    drop(block);
}

#[test]
fn where_it_was_called() {
    let (_gpu, mut tracker, page) = gpu();
    let (saw, line) = (track!(tracker), line!());
    assert_eq!((saw.at.file(), saw.at.line()), (file!(), line));
    assert_eq!(saw.word.as_deref(), Some("where_it_was_called"));
    let inner = |tracker: &mut MemTracker| tracker.track();
    let (saw, line) = (inner(&mut tracker), line!() - 1);
    assert_eq!((saw.at.line(), saw.word), (line, None));
    assert_eq!(tracker.track_with("a\nb").word.as_deref(), Some("a\nb"));
    assert!(page.take().contains(": a\\nb "));
}

/// The simulated devices give out the same addresses: blocks are told apart all the same.
#[test]
fn each_tracker_sees_its_own_device() {
    let (one, mut tracker, page) = gpu();
    let (two, mut other, other_page) = gpu();
    let blocks = [kib(&one, 1), kib(&two, 1), kib(&two, 2)];
    assert_eq!(blocks[0].address(), blocks[1].address());
    blocks[0].label("of one", &[], "u8").unwrap();
    blocks[1].label("of two", &[], "u8").unwrap();
    tracker.track();
    other.track();
    assert_eq!(changes(&page), ["+ | 1 * 1 KiB u8 () | 1 KiB | of one"]);
    let expected = ["+ | 1 * 2 KiB       | 2 KiB | outside of all scopes", "+ | 1 * 1 KiB u8 () | 1 KiB | of two"];
    assert_eq!(changes(&other_page), expected);
    let mut by_number = MemTracker::builder().device(two.ordinal()).to(io::sink()).start().unwrap();
    assert_eq!(by_number.track().live, Some(Bytes::kib(3)));
    let error = MemTracker::builder().device(10_000).start().unwrap_err();
    assert!(error.is_unknown_device(), "{error}");
}

#[test]
fn trackers_of_one_device_do_not_know_of_each_other() {
    let (gpu, mut tracker, page) = gpu();
    let _first = kib(&gpu, 4);
    tracker.track();
    assert_eq!(changes(&page), ["+ | 1 * 4 KiB | 4 KiB | outside of all scopes"]);
    let page_of_late = Page::default();
    let mut late = MemTracker::builder().to(page_of_late.clone()).start().unwrap();
    let _second = kib(&gpu, 4);
    late.track();
    assert_eq!(changes(&page_of_late), ["+ | 2 * 4 KiB | 8 KiB | outside of all scopes"], "the first call tells all");
    tracker.track();
    assert_eq!(changes(&page), ["+ | 1 * 4 KiB | 4 KiB | outside of all scopes"]);
}

#[test]
fn an_address_that_is_given_out_again_has_no_label() {
    let (gpu, mut tracker, page) = gpu();
    let block = kib(&gpu, 4);
    block.label("first", &[4], "f32").unwrap();
    tracker.track();
    changes(&page);
    let address = block.address();
    drop(block);
    let block = kib(&gpu, 4);
    assert_eq!(block.address(), address);
    tracker.track();
    let expected = ["+ | 1 * 4 KiB          | 4 KiB | outside of all scopes", "- | 1 * 4 KiB f32 (4,) | 4 KiB | first"];
    assert_eq!(changes(&page), expected);
    block.label("second", &[4], "f32").unwrap();
    tracker.track();
    let expected =
        ["+ | 1 * 4 KiB f32 (4,) | 4 KiB | second", "- | 1 * 4 KiB          | 4 KiB | outside of all scopes"];
    assert_eq!(changes(&page), expected);
}

#[test]
fn what_is_not_known_is_not_labelled() {
    let (gpu, mut tracker, _page) = gpu();
    let block = kib(&gpu, 4);
    // High above what the simulated devices of this process give out.
    for address in [0, 1 << 56, u64::MAX] {
        let error = label("nobody", &[], "u8", address).unwrap_err();
        assert!(error.to_string().contains(&format!("begins at {address:#x}: ")), "{error}");
        assert!(!error.is_unavailable() && !error.is_invalid_setting());
    }
    assert!(tracker.track().changes.unwrap().iter().all(|change| change.names.is_empty()));
    drop(block);
}

#[test]
fn scopes_of_other_threads() {
    let (gpu, mut tracker, page) = gpu();
    let trace = GpuMemTrace::builder().ctx("load").on_exit_report(false).start().unwrap();
    let (handle, gpu) = (trace.handle(), &gpu);
    let blocks: Vec<_> = thread::scope(|threads| {
        let handle = &handle;
        let alloc = |_| threads.spawn(move || handle.in_scope(|| kib(gpu, 3)));
        let started: Vec<_> = (0..4).map(alloc).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut tracker = thread::spawn(move || {
        tracker.track();
        tracker
    })
    .join()
    .unwrap();
    assert_eq!(changes(&page), ["+ | 4 * 3 KiB | 12 KiB | load"]);
    drop(blocks);
    tracker.track();
    assert_eq!(changes(&page), ["- | 4 * 3 KiB | 12 KiB | load"]);
}

/// Each difference is right whatever comes and goes meanwhile: all of them together are what is there in the end.
#[test]
fn while_others_allocate_and_label() {
    let (gpu, mut tracker, _page) = gpu();
    let kept = thread::scope(|threads| {
        let work = |thread: usize| {
            let gpu = &gpu;
            threads.spawn(move || {
                let mut kept = Vec::new();
                for round in 0..400 {
                    let block = gpu.alloc_async(Bytes::kib(4)).unwrap();
                    block.label(format!("of {thread}"), &[round], "f32").unwrap();
                    if round % 8 == 0 {
                        kept.push(block);
                    }
                }
                kept
            })
        };
        let workers: Vec<_> = (0..4).map(work).collect();
        let mut count = 0;
        let mut add =
            |tracked: Tracked| count += tracked.changes.unwrap().iter().map(|change| change.count).sum::<i64>();
        for _ in 0..50 {
            add(tracker.track());
        }
        let kept: Vec<_> = workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect();
        add(tracker.track());
        assert_eq!(count, 200);
        kept
    });
    let mut fresh = MemTracker::builder().device(gpu.ordinal()).to(io::sink()).start().unwrap();
    let changes = fresh.track().changes.unwrap();
    assert_eq!(changes.len(), 50, "one for each shape");
    assert!(changes.iter().all(|change| change.count == 4 && change.names.len() == 4), "{changes:?}");
    drop(kept);
    assert_eq!(fresh.track().live, Some(Bytes::ZERO));
}

#[test]
fn a_file() {
    let (gpu, ..) = gpu();
    let path = std::env::temp_dir().join(format!("gpumem-tracker-{}", std::process::id()));
    let mut tracker = MemTracker::builder().to(File::create(&path).unwrap()).start().unwrap();
    let block = kib(&gpu, 4);
    tracker.track();
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.ends_with("\n+ | 1 * 4 KiB | 4 KiB | outside of all scopes\n\n"), "not there at once: {text}");
    drop(block);
    tracker.track();
    drop(tracker);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.ends_with("\n- | 1 * 4 KiB | 4 KiB | outside of all scopes\n\n"), "{text}");
    fs::remove_file(path).unwrap();
}

#[test]
fn a_disk_that_is_full() {
    struct Failing;
    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (gpu, ..) = gpu();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let builders = [
        MemTracker::builder().to(full()),
        MemTracker::builder().to(io::BufWriter::new(full())),
        MemTracker::builder().to(Failing),
    ];
    for builder in builders {
        let mut tracker = builder.start().unwrap();
        for step in 0..3 {
            let block = kib(&gpu, 4);
            assert_eq!(tracker.track().live, Some(Bytes::kib(4)), "step {step}");
            drop(block);
        }
    }
}

#[test]
fn a_writer_that_panics_does_no_harm_to_others() {
    struct Panics;
    impl Write for Panics {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            panic!("the user's own")
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (gpu, mut sound, _page) = gpu();
    let mut tracker = MemTracker::builder().to(Panics).start().unwrap();
    assert!(catch_unwind(AssertUnwindSafe(|| tracker.track())).is_err());
    let block = kib(&gpu, 4);
    block.label("w", &[], "u8").unwrap();
    assert_eq!(sound.track().live, Some(Bytes::kib(4)));
}

#[test]
fn a_device_that_cannot_be_read() {
    let (gpu, mut tracker, page) = gpu();
    let _block = kib(&gpu, 4);
    gpu.set_lost(true);
    let saw = tracker.track();
    assert_eq!((saw.used, saw.live), (None, Some(Bytes::kib(4))));
    assert!(page.take().contains("Total Used Memory: ?, live: 4 KiB\n"));
}

/// What trackers printed on the stand-in driver.
fn printed(outcome: &Outcome) -> String {
    let reports: Vec<_> = outcome.reports();
    without_numbers(&reports.join("\n"))
}

#[track_caller]
fn clean(outcome: Outcome) -> Outcome {
    assert!(outcome.is_clean(), "panicked or did not end well\n{outcome}");
    outcome
}

/// The spaces on the left bring it to the right margin.
fn amounts(text: &str) -> String {
    format!("{text:>80}")
}

const CONTEXT: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx";

#[test]
fn blocks_of_the_driver() {
    let script = format!(
        "{CONTEXT}; tracker; track; call cuMemAlloc_v2 &a 9437184; label conv1 f32 512x512x3x3 a; \
         call cuMemAlloc_v2 &b 9437184; call cuMemAllocManaged &m 4096 1; call cuMemHostAlloc &h 8192 0; label bias f16 2x2 a+1; label bias f16 2x2 0; \
         track; call cuMemFree_v2 a; call cuMemAlloc_v2 &a 9437184; track; label a u8 9 a; call cuMemFree_v2 a; call cuMemFree_v2 b; track"
    );
    let outcome = clean(Standin::new().cupti().env("GPUMEM_BACKTRACE", "0").run(&script));
    for unknown in ["label bias f16 2x2 a+1", "label bias f16 2x2 0"] {
        assert!(outcome.answer(unknown).starts_with("error[] no block that is known begins at 0x"), "{outcome}");
    }
    let [first, second, third, last] = outcome.answers("track")[..] else { panic!("four answers\n{outcome}") };
    assert!(first.ends_with(" live=0 B"), "{outcome}");
    assert!(
        second.ends_with(
            " live=18 MiB, +1 * 9437184 device, +1 * 9437184 device f32 [512, 512, 3, 3] [(\"conv1\", 1)], \
             +1 * 8192 pinned host, +1 * 4096 managed"
        ),
        "{outcome}"
    );
    assert!(
        third.ends_with(" live=18 MiB, +1 * 9437184 device, -1 * 9437184 device f32 [512, 512, 3, 3] [(\"conv1\", 1)]"),
        "{outcome}"
    );
    assert!(last.ends_with(" live=0 B, -2 * 9437184 device"), "{outcome}");
    assert!(outcome.stderr.is_empty(), "{outcome}");
    assert_eq!(
        printed(&outcome).lines().skip(4).take(6).collect::<Vec<_>>().join("\n"),
        "At tests/src/bin/probe/track.rs:NN: Probe::track
                                        Total Used Memory: 547 MiB, live: 18 MiB
+ | 1 * 9 MiB                      | 9 MiB | outside of all scopes
+ | 1 * 9 MiB f32 (512, 512, 3, 3) | 9 MiB | conv1
+ | 1 * 8 KiB pinned host          | 8 KiB | outside of all scopes
+ | 1 * 4 KiB managed              | 4 KiB | outside of all scopes",
        "{outcome}"
    );
    let outcome =
        clean(Standin::new().cupti().run(&format!("{CONTEXT}; tracker; call cuMemAlloc_v2 &a 9437184; track")));
    assert!(
        printed(&outcome).contains("+ | 1 * 9 MiB | 9 MiB | ") && printed(&outcome).contains("raw.rs:"),
        "{outcome}"
    );
}

/// What cudarc allocates knows its type, and its size is that of the elements.
#[test]
fn slices_of_cudarc() {
    let script = "tracker; context 0; labelled conv1.weight 64x3x3x3; labelled bias 64; pooled 1; track; mislabelled; mislabelled; \
                  track; drop_labelled; track";
    let outcome = clean(Standin::new().cupti().run(script));
    let [labelled, same, freed] = outcome.answers("track")[..] else { panic!("three answers\n{outcome}") };
    let expected = ", +1 * 1048576 device, +1 * 6912 device f32 [64, 3, 3, 3] [(\"conv1.weight\", 1)], +1 * 256 device f32 [64] [(\"bias\", 1)]";
    assert!(labelled.ends_with(expected), "{outcome}");
    assert!(same.ends_with(" live=1.01 MiB"), "a wrong label changes nothing\n{outcome}");
    assert!(freed.ends_with(&expected.replace('+', "-").replace(", -1 * 1048576 device", "")), "{outcome}");
    let wrong = "cannot use a label's shape: `wrong`: (64, 2) has 128 elements, and the slice 64";
    assert_eq!(outcome.answer("mislabelled"), format!("error[invalid setting] {wrong}"), "{outcome}");
    assert_eq!(outcome.stderr.matches("cannot use a label's shape").count(), 1, "said once\n{outcome}");
}

/// Without libcupti: the total, and once why no more.
#[test]
fn where_allocations_are_not_heard() {
    let script =
        format!("{CONTEXT}; new_tracker; call cuMemAlloc_v2 &a 2097152; label w u8 2 a; track; track; labelled w 2");
    let outcome = Standin::new().run(&script);
    let used: Vec<_> = outcome.answers("track");
    assert!(used.iter().all(|used| used.starts_with("used=5") && used.ends_with(" live=?, ?")), "{outcome}");
    assert_eq!(outcome.stderr.matches("which blocks came and went is not known, because").count(), 1, "{outcome}");
    assert!(outcome.stderr.contains("cannot load libcupti"), "{outcome}");
    assert!(printed(&outcome).ends_with("Total Used Memory: 529 MiB"), "{outcome}");
    let label = outcome.answer("label w u8 2 a");
    assert!(label.starts_with("error[unavailable] the block at 0x") && label.contains("libcupti"), "{outcome}");
    for (gauge, says) in [("sampled", "GPUMEM_GAUGE says sampled"), ("pool", "GPUMEM_GAUGE says pool")] {
        let outcome = clean(Standin::new().cupti().env("GPUMEM_GAUGE", gauge).run("context 0; tracker; track"));
        assert!(outcome.answer("track").ends_with(" live=?, ?") && outcome.stderr.contains(says), "{outcome}");
    }
}

/// Nobody heard of them: they are neither there nor gone, and the total has them.
#[test]
fn blocks_that_are_older_than_the_tracker() {
    let script =
        format!("{CONTEXT}; call cuMemAlloc_v2 &a 4194304; tracker; track; label w u8 9 a; call cuMemFree_v2 a; track");
    let outcome = clean(Standin::new().cupti().run(&script));
    let [before, after] = outcome.answers("track")[..] else { panic!("two answers\n{outcome}") };
    assert!(before.ends_with(" live=0 B") && after.ends_with(" live=0 B") && before != after, "{outcome}");
    assert!(outcome.answer("label w u8 9 a").starts_with("error[] no block that is known"), "{outcome}");
}

#[test]
fn when_the_subscription_is_given_up_and_taken_again() {
    let script = format!(
        "{CONTEXT}; tracker; call cuMemAlloc_v2 &a 2097152; track; unsubscribe; call cuMemAlloc_v2 &b 4194304; track; subscribe; \
         call cuMemAlloc_v2 &c 6291456; track; track"
    );
    let outcome = clean(Standin::new().cupti().run(&script));
    let [heard, not, again, last] = outcome.answers("track")[..] else { panic!("four answers\n{outcome}") };
    assert!(heard.ends_with(" live=2 MiB, +1 * 2097152 device"), "{outcome}");
    assert!(not.ends_with(" live=?, ?"), "{outcome}");
    assert!(again.ends_with(" live=8 MiB, +1 * 6291456 device, 1 lost"), "{outcome}");
    assert!(last.ends_with(" live=8 MiB"), "{outcome}");
    assert!(printed(&outcome).contains("\n? | 1 events were missed: what follows may be wrong\n+ | "), "{outcome}");
    assert!(outcome.stderr.contains("gpumem::unsubscribe() was called"), "{outcome}");
}

#[test]
fn without_a_gpu_a_tracker_is_off() {
    let outcome = clean(Standin::new().without(Library::Cuda).run("new_tracker; track; tracker; label w u8 1 0x10"));
    assert_eq!((outcome.answer("track"), outcome.reports().len()), ("used=? live=?, ?", 0), "{outcome}");
    assert!(outcome.answer("tracker").starts_with("error[unavailable"), "{outcome}");
    assert!(outcome.answer("label w u8 1 0x10").starts_with("error[unavailable"), "{outcome}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
    let outcome = clean(Standin::new().cupti().env("GPUMEM_GAUGE", "off").run("tracker; track"));
    assert_eq!((outcome.answer("track"), outcome.reports().len()), ("used=? live=?, ?", 0), "{outcome}");
    let outcome = clean(Standin::new().run("tracker 1"));
    assert!(outcome.answer("tracker 1").starts_with("error[unknown device]"), "{outcome}");
}

#[test]
fn a_card_that_fell_off_the_bus() {
    let machine = Standin::new().cupti().fail("nvmlDeviceGetMemoryInfo_v2=15");
    let outcome = clean(machine.run("tracker; context 0; pooled 1; track; track"));
    assert!(outcome.answers("track").iter().all(|answer| answer.starts_with("used=? live=1 MiB")), "{outcome}");
    assert_eq!(outcome.stderr.matches("NVML_ERROR_GPU_IS_LOST").count(), 1, "{outcome}");
}

#[test]
fn where_reports_go() {
    let script = "tracker; context 0; labelled w 2x3; track";
    let run = |to: &str| clean(Standin::new().cupti().env("GPUMEM_REPORT", to).run(script));
    let outcome = run("json");
    let [line] = outcome.reports()[..] else { panic!("one line\n{outcome}") };
    assert!(line.starts_with("{\"tracked_at\":\"tests/src/bin/probe/track.rs:"), "{outcome}");
    assert!(
        line.ends_with(
            "\"live\":24,\"changes\":[{\"count\":1,\"bytes_each\":24,\"bytes\":24,\"kind\":\"device\",\"dtype\":\"f32\",\
             \"shape\":[2,3],\"names\":[{\"name\":\"w\",\"count\":1}],\"scopes\":null,\"line\":null,\"library\":null}],\"lost_events\":0}"
        ),
        "{outcome}"
    );
    let outcome = run("stderr");
    assert!(
        outcome.reports().is_empty() && outcome.stderr.ends_with("+ | 1 * 24 B f32 (2, 3) | 24 B | w\n\n"),
        "{outcome}"
    );
    let outcome = run("off");
    assert!(outcome.reports().is_empty() && outcome.stderr.is_empty(), "{outcome}");
    assert!(outcome.answer("track").contains(" live=24 B"), "{outcome}");
}

#[test]
fn in_the_child_of_a_fork() {
    let outcome =
        Standin::new().cupti().run("context 0; tracker; pooled 1; track; fork label w u8 1 0x10 | new_tracker | track");
    assert!(outcome.answer("label w u8 1 0x10").starts_with("error[unavailable] this process was forked"), "{outcome}");
    assert_eq!(outcome.answers("track")[1], "used=? live=?, ?", "{outcome}");
    assert_eq!(printed(&outcome).matches("At ").count(), 1, "{outcome}");
    assert!(outcome.is_clean(), "{outcome}");
}

/// The text stands at the right margin, whatever its length.
#[test]
fn amounts_stand_at_the_margin() {
    let (gpu, mut tracker, page) = gpu();
    let _block = kib(&gpu, 4);
    tracker.track_with("a word that leaves no room for amounts");
    assert_eq!(page.take().lines().nth(1), Some(amounts("Total Used Memory: 32 MiB, live: 4 KiB").as_str()));
}
