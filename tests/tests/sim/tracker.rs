//! Tests the tracker and its complete output.

use std::{
    fs::File,
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
};

use gpumem::{
    Bytes, GpuMemTrace,
    sim::{SimBlock, SimGpu},
    track,
    tracker::MemTracker,
};
use gpumem_tests::without_line_numbers;

/// The output of a tracker in a test.
#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Page {
    /// Returns the text written since the last call, without the line numbers of this file.
    fn take(&self) -> String {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        without_line_numbers(&text)
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

/// Returns a new simulated device for the calling test, a tracker, and the tracker's output.
fn gpu() -> (SimGpu, MemTracker, Page) {
    let gpu = SimGpu::install(Bytes::gib(64)).expect("GPUMEM_SIM is not set");
    gpu.make_current();
    let page = Page::default();
    let mut tracker = MemTracker::builder().to(page.clone()).start().unwrap();
    tracker.track();
    let first = page.take();
    let ordinal = gpu.ordinal();
    let (header, below) = first.split_once('\n').unwrap();
    assert!(header.starts_with("TIME ") && header.contains(&format!("  device {ordinal}: ")), "{first}");
    assert_eq!(below, "  the first call: blocks from before the tracing are not known\n");
    (gpu, tracker, page)
}

/// Allocates a block that is so small that gpumem records no stack for it, but only its scopes.
fn kib(gpu: &SimGpu, kib: u64) -> SimBlock {
    gpu.alloc_async(Bytes::kib(kib)).unwrap()
}

/// Returns the lines that list blocks, from the text written since the last call.
fn changes(page: &Page) -> Vec<String> {
    let text = page.take();
    text.lines().filter(|line| line.starts_with(' ') && line.contains('×')).map(str::to_owned).collect()
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
    let ordinal = gpu.ordinal();
    assert_eq!(
        page.take(),
        format!(
            "\
TIME …/sim/tracker.rs:NN (a_story)  device {ordinal}: 32 MiB used, 65.93 KiB live
      KiB  blocks
 ─────────────────────────────────────────────────────────────────────
 +  63.00  7 × 9 KiB     f32 (512, 512, 3, 3)  conv0.weight and 6 more
 +   2.93  2 × 1.46 KiB                        load > batch
"
        )
    );
    let eighth = kib(&gpu, 9);
    eighth.label("conv7.weight", &[512, 512, 3, 3], "f32").unwrap();
    drop(inputs);
    tracker.track_with("");
    let expected = [
        " +  9.000  1 × 9 KiB     f32 (512, 512, 3, 3)  conv7.weight",
        " -  2.930  2 × 1.46 KiB                        load > batch",
    ];
    assert_eq!(changes(&page), expected);
    tracker.track();
    assert_eq!(changes(&page), [""; 0]);
    drop((conv, eighth));
    let saw = tracker.track();
    assert_eq!(changes(&page), [" -   72  8 × 9 KiB  f32 (512, 512, 3, 3)  conv0.weight, conv1.weight and 6 more"]);
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
    assert!(known.contains(&format!("tests/sim/tracker.rs:{line}:")), "{known}");
    drop(block);
}

#[test]
fn where_it_was_called() {
    let (_gpu, mut tracker, page) = gpu();
    let (saw, line) = (track!(tracker), line!());
    assert_eq!((saw.at.file(), saw.at.line()), (file!(), line));
    assert_eq!(saw.ctx.as_deref(), Some("where_it_was_called"));
    let inner = |tracker: &mut MemTracker| tracker.track();
    let (saw, line) = (inner(&mut tracker), line!() - 1);
    assert_eq!((saw.at.line(), saw.ctx), (line, None));
    assert_eq!(tracker.track_with("a\nb").ctx.as_deref(), Some("a\nb"));
    assert!(page.take().contains(" (a\\nb)  device "));
}

#[test]
fn each_tracker_sees_its_own_device() {
    let (one, mut tracker, page) = gpu();
    let (two, mut other, other_page) = gpu();
    let blocks = [kib(&one, 1), kib(&two, 1), kib(&two, 2)];
    // As with CUDA, two live blocks of a process never have the same address.
    assert_ne!(blocks[0].address(), blocks[1].address());
    blocks[0].label("of one", &[], "u8").unwrap();
    blocks[1].label("of two", &[], "u8").unwrap();
    tracker.track();
    other.track();
    assert_eq!(changes(&page), [" +    1  1 × 1 KiB  u8 ()  of one"]);
    let expected = [" +    2  1 × 2 KiB         outside of all scopes", " +    1  1 × 1 KiB  u8 ()  of two"];
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
    assert_eq!(changes(&page), [" +    4  1 × 4 KiB  outside of all scopes"]);
    let page_of_late = Page::default();
    let mut late = MemTracker::builder().to(page_of_late.clone()).start().unwrap();
    let _second = kib(&gpu, 4);
    late.track();
    assert_eq!(
        changes(&page_of_late),
        [" +    8  2 × 4 KiB  outside of all scopes"],
        "the first call lists everything"
    );
    tracker.track();
    assert_eq!(changes(&page), [" +    4  1 × 4 KiB  outside of all scopes"]);
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
