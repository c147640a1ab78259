//! Tests the tracker with faults of the driver and of the program.

use gpumem_tests::{CONTEXT, Library, Outcome, Standin, without_line_numbers};

/// Returns the output of the trackers, without line numbers.
fn printed(outcome: &Outcome) -> String {
    let reports: Vec<_> = outcome.reports();
    without_line_numbers(&reports.join("\n"))
}

#[track_caller]
fn clean(outcome: Outcome) -> Outcome {
    assert!(outcome.is_clean(), "panicked or did not end well\n{outcome}");
    outcome
}

#[test]
fn blocks_of_the_driver() {
    let script = format!(
        "{CONTEXT}; tracker; track; call cuMemAlloc_v2 &a 9437184; label conv1 f32 512x512x3x3 a; \
         call cuMemAlloc_v2 &b 9437184; call cuMemAllocManaged &m 4096 1; call cuMemHostAlloc &h 8192 0; label bias f16 2x2 a+1; label bias f16 2x2 0; \
         track; call cuMemFree_v2 a; call cuMemAlloc_v2 &a 9437184; track; label a u8 9 a; call cuMemFree_v2 a; call cuMemFree_v2 b; track"
    );
    let outcome = clean(Standin::new().cupti().env("GPUMEM_BACKTRACE", "0").run(&script));
    for unknown in ["label bias f16 2x2 a+1", "label bias f16 2x2 0"] {
        assert!(outcome.answer(unknown).starts_with("error[unknown block] no known block starts at 0x"), "{outcome}");
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
}

/// A label for a slice of cudarc takes the type from the slice, and its shape must have as many elements as the slice.
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
    let wrong = "cannot use a label's shape: `wrong`: (64, 2) has 128 elements, and the slice has 64";
    assert_eq!(outcome.answer("mislabelled"), format!("error[invalid setting] {wrong}"), "{outcome}");
    assert_eq!(outcome.stderr.matches("cannot use a label's shape").count(), 1, "said once\n{outcome}");
}

/// Without libcupti, the tracker reports only the total, and one notice gives the reason.
#[test]
fn without_interception() {
    let script =
        format!("{CONTEXT}; new_tracker; call cuMemAlloc_v2 &a 2097152; label w u8 2 a; track; track; labelled w 2");
    let outcome = Standin::new().run(&script);
    let used: Vec<_> = outcome.answers("track");
    assert!(used.iter().all(|used| used.starts_with("used=5") && used.ends_with(" live=?, ?")), "{outcome}");
    assert_eq!(
        outcome.stderr.matches("which blocks were allocated and freed is not known, because").count(),
        1,
        "{outcome}"
    );
    assert!(outcome.stderr.contains("cannot load libcupti"), "{outcome}");
    assert!(printed(&outcome).ends_with("  device 0: 529 MiB used"), "{outcome}");
    let label = outcome.answer("label w u8 2 a");
    assert!(
        label.starts_with("error[unavailable, unknown block] the block at 0x") && label.contains("libcupti"),
        "{outcome}"
    );
    let outcome = clean(Standin::new().cupti().env("GPUMEM_GAUGE", "sampled").run("context 0; tracker; track"));
    let why = "GPUMEM_GAUGE is sampled";
    assert!(outcome.answer("track").ends_with(" live=?, ?") && outcome.stderr.contains(why), "{outcome}");
}

/// gpumem does not know these blocks. They count in the total, but not in the differences.
#[test]
fn blocks_that_are_older_than_the_tracker() {
    let script =
        format!("{CONTEXT}; call cuMemAlloc_v2 &a 4194304; tracker; track; label w u8 9 a; call cuMemFree_v2 a; track");
    let outcome = clean(Standin::new().cupti().run(&script));
    let [before, after] = outcome.answers("track")[..] else { panic!("two answers\n{outcome}") };
    assert!(before.ends_with(" live=0 B") && after.ends_with(" live=0 B") && before != after, "{outcome}");
    assert!(outcome.answer("label w u8 9 a").starts_with("error[unknown block] no known block"), "{outcome}");
}

#[test]
fn across_unsubscribe_and_subscribe() {
    let script = format!(
        "{CONTEXT}; tracker; call cuMemAlloc_v2 &a 2097152; track; unsubscribe; call cuMemAlloc_v2 &b 4194304; track; subscribe; \
         call cuMemAlloc_v2 &c 6291456; track; track"
    );
    let outcome = clean(Standin::new().cupti().run(&script));
    let [intercepted, not, again, last] = outcome.answers("track")[..] else { panic!("four answers\n{outcome}") };
    assert!(intercepted.ends_with(" live=2 MiB, +1 * 2097152 device"), "{outcome}");
    assert!(not.ends_with(" live=?, ?"), "{outcome}");
    assert!(again.ends_with(" live=8 MiB, +1 * 6291456 device, 1 lost"), "{outcome}");
    assert!(last.ends_with(" live=8 MiB"), "{outcome}");
    assert!(printed(&outcome).contains("\n  1 event was missed: later values may be wrong\n"), "{outcome}");
    assert!(outcome.stderr.contains("gpumem::intercept::unsubscribe() was called"), "{outcome}");
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
fn in_the_child_of_a_fork() {
    let outcome =
        Standin::new().cupti().run("context 0; tracker; pooled 1; track; fork label w u8 1 0x10 | new_tracker | track");
    assert!(outcome.answer("label w u8 1 0x10").starts_with("error[unavailable] this process was forked"), "{outcome}");
    assert_eq!(outcome.answers("track")[1], "used=? live=?, ?", "{outcome}");
    assert_eq!(printed(&outcome).matches("TIME ").count(), 1, "{outcome}");
    assert!(outcome.is_clean(), "{outcome}");
}
