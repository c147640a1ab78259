//! Tests `gpumem diff`.

use gpumem_core::model::{Device, EventKind, Family, MemKind};
use gpumem_recording::{Item, PartDefinition, TensorClass};
use serde_json::Value;

use crate::{
    file, ran,
    recording_builder::{MIB, RecordingBuilder},
    report::{json, printed, recorded, training, written},
};

fn two(name: &str) -> [String; 2] {
    [10, 12].map(|mib| {
        recorded(&format!("{name}-{mib}.capture"), RecordingBuilder::new("train").training(3, 10, mib * MIB))
    })
}

#[test]
fn less_is_below_0_and_the_same_is_no_change() {
    let [before, after] = two("diff");
    let text = printed(&["diff", &after, &before]);
    assert!(
        text.contains(": -81 MiB (-15.6 %)\n") && text.contains("\n train > step         240    200     -40\n"),
        "{text}"
    );
    let text = printed(&["diff", &before, &before]);
    assert!(text.ends_with("device 0: the peak was 437 MiB and is 437 MiB: no change\n"), "{text}");
}

#[test]
fn the_device_of_an_estimate_stands_for_the_real_one() {
    let mut measured = RecordingBuilder::new("measured");
    measured.alloc(10 * MIB, MemKind::Pool, 0);
    let mut estimated = RecordingBuilder::new("estimated");
    estimated.alloc_on(Device { family: Family::Simulated, ordinal: 0 }, 12 * MIB, MemKind::Pool, 0);
    let files = [recorded("measured.capture", measured), recorded("estimated.capture", estimated)];
    let text = printed(&["diff", &files[0], &files[1]]);
    assert!(text.contains("\ndevice 0: the peak was 10 MiB and is 12 MiB: +2 MiB (+20.0 %)\n"), "{text}");
    let back = printed(&["diff", &files[1], &files[0]]);
    assert!(back.contains("\ndevice 0: the peak was 12 MiB and is 10 MiB: -2 MiB (-16.7 %)\n"), "{back}");
}

/// A run that is compared with an estimate has the classes of the estimate: `rounding` is a separate class.
#[test]
fn an_estimate_is_compared_with_the_classes_of_tensors() {
    let config = written("diff-estimate.json", br#"{"model_type": "gpt2", "n_layer": 2}"#);
    let estimated = file("diff-estimate.capture").display().to_string();
    printed(&["estimate", &config, "--train", "adam", "--record", &estimated]);
    let mut made = RecordingBuilder::new("train").tensors(0, 1, 4 * MIB, None);
    let classes =
        [TensorClass::Weights, TensorClass::Activations, TensorClass::BackwardTemporary, TensorClass::Weights];
    for (group, class) in (1..).zip(classes) {
        made.tensor(group, "Net.fc: Linear", class, [10 * MIB, 9 * MIB]);
    }
    let run = recorded("diff-estimated-run.capture", made);
    let text = printed(&["diff", &estimated, &run]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [" used for ", " weights 204.3 18.0 -186.3 ", " 147.2 18.0 -129.2 ", " rounding 6.8 4.0 -2.8 "] {
        assert!(words.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(!words.contains("not compared") && !words.contains(" library "), "{text}");

    // Two runs are compared by class and by module.
    let mut made = RecordingBuilder::new("train").tensors(0, 1, 4 * MIB, None);
    made.tensor(1, "Net.fc: Linear", TensorClass::ForwardTemporary, [50 * MIB, 50 * MIB]);
    let text = printed(&["diff", "--markdown", &run, &recorded("diff-run.capture", made)]);
    for row in
        ["| used for |", "| `temporary (forward)` | 0 B | 50 MiB |", "| module |", "| `Net.fc` | 40 MiB | 50 MiB |"]
    {
        assert!(text.contains(row), "{row:?} is not in\n{text}");
    }
}

/// Two lines were inserted above, and one place grew.
#[test]
fn a_line_that_moved_is_compared_with_itself() {
    let made = |by: u32, mib: u64| {
        let mut made = RecordingBuilder::new("train");
        for (line, mib) in [(10, 100), (20, 50), (30, mib), (31, 40)] {
            let stack = made.stack(&[(0, "forward", "/home/ada/train/model.py", line + by)]);
            made.alloc(mib * MIB, MemKind::Device, stack.0 - 1);
        }
        made
    };
    let files = [("diff-line-before.capture", 0, 30), ("diff-line-after.capture", 2, 70)];
    let [before, after] = files.map(|(name, by, mib)| recorded(name, made(by, mib)));
    let text = printed(&["diff", &before, &after]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains(" src/model.py:32 (was :30) 30 70 +40 ") || words.contains(" model.py:32 (was :30) 30 70 +40 "),
        "{text}"
    );
    assert_eq!(text.matches("model.py:").count(), 1, "the other lines are the same: {text}");
    let place = &json(&["diff", "--json", &before, &after])["devices"][0]["by_place"][0];
    assert!(place["moved_from"].as_str().unwrap().ends_with("model.py:30"), "{place}");
    assert!(printed(&["diff", "--markdown", &before, &after]).contains("model.py:32 (was :30)`"));
}

/// The memory of tensors is a part of the device's memory, so tensors are in separate rows.
#[test]
fn tensors_are_compared_if_both_recordings_have_them() {
    let made = |mib: u64, from| RecordingBuilder::new("train").tensors(3, 10, mib * MIB, from);
    let [before, after] = [10, 12].map(|mib| recorded(&format!("diff-tensors-{mib}.capture"), made(mib, None)));
    let text = printed(&["diff", &before, &after]);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "device 0: the peak was 300 MiB and is 360 MiB: +60 MiB (+20.0 %) ",
        "device 0, tensors: the peak was 205 MiB and is 246 MiB: +41 MiB (+20.0 %) ",
        " no line of Python (such as in the backward pass) 100 120 +20 ",
        " src/model.rs:12 100 120 +20 ",
        " src/model.rs:42 5 6 +1",
    ] {
        assert!(words.contains(part), "{part:?} is not in\n{text}");
    }
    let text = printed(&["diff", "--markdown", &before, &after]);
    assert!(
        text.contains(
            "\nPeak of tensors on device 0: 205 MiB → **246 MiB**, +41 MiB (+20.0 %)\n\n| tensors at | before |"
        ) && text.contains("\n| `src/model.rs:12` | 100 MiB | 120 MiB | +20 MiB (+20.0 %) |\n"),
        "{text}"
    );
    let json = json(&["diff", "--json", &before, &after]);
    let tensors = &json["devices"][0]["tensors"];
    assert_eq!((&tensors["change_bytes"], &json["tensors_missing"]), (&(41 * MIB).into(), &Value::Array(Vec::new())));
    let places = tensors["by_place"].as_array().expect("it is a list");
    assert_eq!(places.iter().map(|place| place["change_bytes"].as_u64().unwrap()).sum::<u64>(), 41 * MIB);

    // If only one of the recordings has tensors, a sentence reports that. If neither has tensors, there is no such sentence.
    let without = training("diff-no-tensors.capture");
    for files in [[&before, &without], [&without, &before]] {
        let text = printed(&["diff", files[0], files[1]]);
        let line = format!(
            "\n\nPyTorch's tensors are not compared: {before} has them, {without} does not (gpumem run --torch).\n"
        );
        assert!(text.ends_with(&line) && !text.contains("tensors:"), "{text}");
    }
    assert!(!printed(&["diff", &without, &without]).contains("ensors "));

    // Missing parts of a history are not hidden.
    let late = recorded("diff-tensors-late.capture", made(10, Some(std::time::Duration::from_micros(100))));
    let text = printed(&["diff", &before, &late]);
    assert!(text.contains("diff-tensors-late.capture: Tensors on device 0 are known from 100 µs on: "), "{text}");
}

#[test]
fn a_limit_decides_the_exit_code() {
    let [before, after] = two("limit");
    let code = |limit: &str, from: &str, to: &str| ran(&["diff", "--fail-on-increase", limit, from, to]).code;
    assert_eq!([code("18%", &before, &after), code("19%", &before, &after)], [Some(1), Some(0)]);
    assert_eq!([code("80MiB", &before, &after), code("81MiB", &before, &after)], [Some(1), Some(0)]);
    assert_eq!(code("0%", &after, &before), Some(0));
    // The limit is about the device, not about tensors: here tensors need more, and the device does not.
    let tensors = [10, 12].map(|layers| {
        let mut made = RecordingBuilder::new("train");
        made.alloc(1000 * MIB - 3 * layers * 10 * MIB, MemKind::Device, 5);
        recorded(&format!("limit-tensors-{layers}.capture"), made.tensors(2, layers, 10 * MIB, None))
    });
    assert_eq!(code("0%", &tensors[0], &tensors[1]), Some(0));
    assert_eq!(ran(&["diff", "--fail-on-increase", "much", &before, &after]).code, Some(2));
}

#[test]
fn what_is_not_known_is_no_success() {
    let before = training("known.capture");
    let bytes = RecordingBuilder::new("train").training(3, 10, MIB).file();
    let cut = written("diff-cut.capture", &bytes[..bytes.len() - 1]);
    let mut lost = RecordingBuilder::new("train");
    lost.alloc(MIB, MemKind::Pool, 0);
    lost.event(EventKind::Lost { count: 3 });
    let lost = recorded("lost.capture", lost);
    let mut part = RecordingBuilder::new("train");
    part.item(&Item::Part(PartDefinition { is_peaks: false, after: 7 }));
    let part = recorded("part.capture", part.training(3, 10, MIB));
    let empty = recorded("nothing.capture", RecordingBuilder::new("train"));
    for (file, why) in [
        (&cut, "has no end"),
        (&lost, "3 events were lost"),
        (&part, "The first 7 events are not in the recording"),
        (&empty, "Nothing was allocated"),
    ] {
        for arguments in [["diff", &before, file], ["diff", file, &before]] {
            let ran = ran(&arguments);
            assert_eq!(ran.code, Some(2), "{ran:?}");
            assert!(
                ran.stderr.starts_with("gpumem: the peaks cannot be compared: ") && ran.stderr.contains(why),
                "{ran:?}"
            );
        }
        let ran = ran(&["diff", "--fail-on-increase", "1000%", &before, file]);
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stdout.ends_with("Whether the peak increased by more than 1000 % is not known.\n"), "{ran:?}");
    }
    assert_eq!(ran(&["diff", &before, "/no/such/file"]).code, Some(2));
}

#[test]
fn markdown_and_json() {
    let [before, after] = two("markdown");
    let text = printed(&["diff", "--markdown", &before, &after]);
    assert!(
        text.starts_with("### GPU memory\n\nPeak of device 0: 437 MiB → **518 MiB**, +81 MiB (+18.5 %)\n"),
        "{text}"
    );
    assert!(text.contains("\n| `train > step` | 200 MiB | 240 MiB | +40 MiB (+20.0 %) |\n"), "{text}");
    let difference = json(&["diff", "--json", &before, &after]);
    let device = &difference["devices"][0];
    assert_eq!(device["change_bytes"], 81 * MIB);
    for by in ["by_scope", "by_place", "by_library", "by_kind"] {
        let changes =
            device[by].as_array().expect("it is a list").iter().map(|named| named["change_bytes"].as_u64().unwrap());
        assert_eq!(changes.sum::<u64>(), 81 * MIB, "{by}");
    }
    assert_eq!(difference["is_exceeded"], Value::Null);
}
