//! Tests recordings in CI: limits, baselines, and the difference of two runs.

use std::{fs, time::Duration};

use gpumem_core::model::{Block, Bytes, Device, EventKind, Family, Key, MemKind, PoolId, StackId};
use gpumem_recording::{
    DevicePeak, Finished, Item, PartDefinition, Process, ProcessEnd, RingDefinition, TensorClass, Totals,
};
use serde_json::Value;

use crate::{
    Ran, folder, golden, ran,
    recording_builder::{DEVICE, MIB, RecordingBuilder},
    report::{json, recorded, training, written},
    within,
};

/// Writes the recordings of a run. `ranks` contains each rank, with the size of its layers in MiB.
fn run(folder: &std::path::Path, name: &str, pid: u32, ranks: &[(u32, u64)]) {
    let run = folder.join(name);
    fs::create_dir_all(&run).expect("it can be made");
    for (rank, mib) in ranks {
        let file = run.join(format!("train.rank{rank}.gpu0.pid{}.capture", pid + rank));
        let made = RecordingBuilder::of_job("train", (*rank).into()).training(3, 10, mib * MIB);
        fs::write(file, made.file()).expect("it can be written");
    }
}

/// `forward` has 5 MiB at the peak of the device, and had 50 before.
#[test]
fn a_place_has_a_limit_of_its_own() {
    let file = training("ci-place.capture");
    let of = |limits: &[&str]| {
        let limits = limits.iter().flat_map(|limit| ["--max-peak", limit]);
        let Ran { code, stderr, .. } = ran(&["report"].into_iter().chain(limits).chain([&*file]).collect::<Vec<_>>());
        (code, stderr.replace(&file, "FILE"))
    };
    assert_eq!(of(&["437MiB", "src/model.rs:42=50MiB", "cuBLAS=32MiB"]), (Some(0), String::new()));
    let above = "gpumem: FILE: `src/model.rs:42` had 50 MiB at most on device 0, 1 MiB above the limit of 49 MiB\n";
    assert_eq!(of(&["437MiB", "src/model.rs:42=49MiB", "cuBLAS=32MiB"]), (Some(1), above.to_owned()));
    assert_eq!(of(&["436MiB", "src/model.rs:42=49MiB"]).1.lines().count(), 2);
    // A misspelt limit is an error.
    let (code, stderr) = of(&["1TiB", "model.rs:42=49MiB"]);
    assert_eq!(code, Some(2));
    let why = "gpumem: --max-peak cannot be checked for `model.rs:42`: no recording has such a place; \
               `gpumem report --table` lists the places, such as `src/model.rs:42`, ";
    assert!(stderr.starts_with(why), "{stderr}");
    let report = folder("ci-misspelt").join("junit.xml");
    let junit = format!("junit={}", report.display());
    ran(&["report", "--max-peak", "1TiB", "--max-peak", "nowhere=1TiB", "--annotations", &junit, &file]);
    let text = fs::read_to_string(&report).expect("it was written");
    assert!(
        text.contains("failures=\"1\"") && text.contains("<failure message=\"--max-peak cannot be checked"),
        "{text}"
    );
    // A test report replaces an earlier test report, and no other file.
    assert_eq!(ran(&["report", "--max-peak", "1TiB", "--annotations", &junit, &file]).code, Some(0));
    let recording = fs::read(&file).expect("it is there");
    let over = ran(&["report", "--max-peak", "1TiB", "--annotations", &format!("junit={file}"), &file]);
    assert!(over.code == Some(2) && over.stderr.contains("is not a JUnit test report, and would be lost"), "{over:?}");
    assert!(fs::read(&file).is_ok_and(|after| after == recording));
    let (code, stderr) = of(&["1MiB", "nowhere=1TiB"]);
    assert!(code == Some(2) && stderr.starts_with("gpumem: FILE: the peak of device 0 was "), "{stderr}");
    // Only one of several recordings contains the place.
    let other = recorded("ci-place-other.capture", {
        let mut made = RecordingBuilder::new("other");
        made.alloc(MIB, MemKind::Device, 4);
        made
    });
    let both = ran(&["report", "--max-peak", "src/model.rs:42=1MiB", &other, &file]);
    assert!(both.code == Some(1) && both.stderr.lines().count() == 1, "{both:?}");
}

/// A process in a container, which started at this second.
fn in_container(pid: u32, second: u64) -> RecordingBuilder {
    let started = Duration::from_secs(1_790_000_000 + second);
    let host = Some(format!("container-{pid}"));
    RecordingBuilder::of(
        Process { pid, started, host, arguments: vec!["train".to_owned()], ..Process::default() },
        true,
    )
}

/// Writes the recording of a process that had this memory for two seconds.
fn process(file: &std::path::Path, pid: u32, second: u64, mib: u64) {
    let mut made = in_container(pid, second);
    let block = made.alloc(mib * MIB, MemKind::Device, 2);
    made.wait(2_000_000);
    made.free(block);
    fs::write(file, made.file()).expect("it can be written");
}

#[test]
fn processes_have_one_device_together() {
    let folder = folder("ci-together");
    let limited = |limit: &str| within(&folder, &["report", "--max-peak", limit, "a.capture", "b.capture"]);
    process(&folder.join("a.capture"), 10, 0, 5_000);
    process(&folder.join("b.capture"), 11, 1, 5_000);
    let above = limited("8GiB");
    let words = "gpumem: device 0: 2 processes had 9.77 GiB at the same time, 1.77 GiB above the limit of 8 GiB: \
                 a.capture 4.88 GiB, b.capture 4.88 GiB\n";
    assert_eq!((above.code, &*above.stderr), (Some(1), words));
    assert_eq!(limited("10000MiB").code, Some(0));
    // Both recordings contain the place.
    let place = limited("train=8GiB");
    let words = "gpumem: device 0: 2 processes had 9.77 GiB in `train` at the same time, \
                 1.77 GiB above the limit of 8 GiB: a.capture 4.88 GiB, b.capture 4.88 GiB\n";
    assert_eq!((place.code, &*place.stderr), (Some(1), words));
    assert_eq!(limited("train=10000MiB").code, Some(0));
    // The recording of one process may be given twice.
    assert_eq!(within(&folder, &["report", "--max-peak", "8GiB", "a.capture", "./a.capture"]).code, Some(0));
    // A copy of a recording is of the same process.
    let mut made = in_container(10, 0);
    made.item(&Item::Ring(RingDefinition { segment: None, recording: 7 }));
    made.alloc(5_000 * MIB, MemKind::Device, 2);
    made.wait(2_000_000);
    made.item(&Item::Finished(Finished::default()));
    let file = made.file();
    for name in ["a.capture", "b.capture"] {
        fs::write(folder.join(name), &file).unwrap();
    }
    assert_eq!(limited("8GiB").code, Some(0));
    process(&folder.join("a.capture"), 10, 0, 5_000);
    // The second process starts after the first one has ended.
    process(&folder.join("b.capture"), 11, 3, 5_000);
    assert_eq!(limited("8GiB").code, Some(0));
    assert_eq!(limited("train=8GiB").code, Some(0));
    // A process that was killed has freed nothing. If its end is not known, its memory counts until its last event.
    let mut killed = in_container(12, 0);
    killed.alloc(5_000 * MIB, MemKind::Device, 2);
    fs::write(folder.join("a.capture"), killed.file()).unwrap();
    assert_eq!(limited("8GiB").code, Some(0));
    // If the end of the process is known, the process had the memory until then.
    let ended = |latest, within| {
        let mut made = in_container(12, 0);
        made.alloc(5_000 * MIB, MemKind::Device, 2);
        let [latest, within] = [latest, within].map(Duration::from_millis);
        made.item(&Item::Finished(Finished { ended: Some(ProcessEnd { latest, within }) }));
        fs::write(folder.join("a.capture"), made.file()).unwrap();
        limited("8GiB")
    };
    process(&folder.join("b.capture"), 11, 3, 5_000);
    let above = |had: &str| {
        format!(
            "gpumem: device 0: 2 processes {had} 9.77 GiB at the same time, 1.77 GiB above the limit of 8 GiB: a.capture 4.88 GiB, \
             b.capture 4.88 GiB\n"
        )
    };
    for (latest, within, stderr) in [
        (2_900, 0, String::new()),
        (3_100, 0, above("had")),
        (3_100, 200, above("may have had")),
        (3_600, 500, above("had")),
    ] {
        assert_eq!(ended(latest, within).stderr, stderr, "{latest} {within}");
    }
    // In recordings of the peaks, the times of the peaks are not known.
    for (name, second) in [("a.capture", 0), ("b.capture", 1)] {
        let mut made = in_container(1, second);
        made.item(&Item::Part(PartDefinition { is_peaks: true, after: 0 }));
        made.alloc(5_000 * MIB, MemKind::Device, 2);
        made.wait(2_000_000);
        fs::write(folder.join(name), made.file()).unwrap();
    }
    let may_be = limited("8GiB");
    assert!(may_be.code == Some(1) && may_be.stderr.contains(" 2 processes may have had 9.77 GiB "), "{may_be:?}");
    let may_be = limited("train=8GiB");
    assert!(may_be.stderr.contains(" 2 processes may have had 9.77 GiB in `"), "{may_be:?}");
    let diff = |after| within(&folder, &["diff", "before", after, "--fail-on-increase", "5%"]);
    fs::create_dir(folder.join("before")).unwrap();
    for name in ["a.capture", "b.capture"] {
        fs::rename(folder.join(name), folder.join("before").join(name)).unwrap();
    }
    let unknown = diff("before");
    assert!(
        unknown.code == Some(2) && unknown.stderr.contains("do not show how much memory they held at the same time"),
        "{unknown:?}"
    );
    // Both processes were killed before the UUID of their device was recorded.
    for name in ["a.capture", "b.capture"] {
        let started = Duration::from_secs(1_790_000_000);
        let mut made = RecordingBuilder::of(Process { pid: 1, started, ..Process::default() }, true);
        made.alloc_on(Device { family: Family::Cuda, ordinal: 5 }, 5_000 * MIB, MemKind::Device, 2);
        made.wait(2_000_000);
        fs::write(folder.join(name), made.file()).unwrap();
    }
    let may_be = limited("8GiB");
    assert!(may_be.code == Some(1) && may_be.stderr.contains(" 2 processes may have had 9.77 GiB "), "{may_be:?}");
    // Snapshots do not name their GPUs, which may differ.
    let snapshot = golden::data("snapshot-4.pickle");
    for name in ["a.pickle", "b.pickle"] {
        fs::copy(&snapshot, folder.join(name)).unwrap();
    }
    let of_snapshots = within(&folder, &["report", "--max-peak", "150MiB", "a.pickle", "b.pickle"]);
    assert!(!of_snapshots.stderr.contains("2 processes"), "{of_snapshots:?}");
}

/// Two processes that ran one after the other now run at the same time.
#[test]
fn processes_that_start_to_overlap_have_more() {
    let folder = folder("ci-overlap");
    for (run, second) in [("before", 3), ("after", 1)] {
        fs::create_dir(folder.join(run)).unwrap();
        process(&folder.join(run).join("a.capture"), 10, 0, 5_000);
        process(&folder.join(run).join("b.capture"), 11, second, 5_000);
    }
    let diff = |after| within(&folder, &["diff", "before", after, "--fail-on-increase", "5%"]);
    assert_eq!(diff("before").code, Some(0));
    let grew = diff("after");
    let words = grew.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        grew.code == Some(1) && words.contains(" device 0, all processes together 4.883 9.766 +4.883 "),
        "{grew:?}"
    );
    let baseline = |what, run| within(&folder, &["baseline", what, "peaks.json", run]);
    assert_eq!(baseline("write", "before").code, Some(0));
    assert_eq!(baseline("check", "before").code, Some(0));
    let grew = baseline("check", "after");
    let words = grew.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let row = " all processes together, device 0 4.906 9.812 +4.906";
    assert!(grew.code == Some(1) && words.contains(row), "{grew:?}");
    // Without one of the two processes, the baseline needs no line for all processes together.
    let (peaks, gone) = (folder.join("peaks.json"), folder.join("before").join("b.capture"));
    let mut json: Value = serde_json::from_slice(&fs::read(&peaks).unwrap()).unwrap();
    json["peaks"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("b, "));
    fs::write(peaks, json.to_string()).unwrap();
    fs::remove_file(gone).unwrap();
    assert_eq!(baseline("check", "before").code, Some(0));
}

/// Processes are told apart by their commands and peaks, because their ids differ in each run.
#[test]
fn a_baseline_has_each_process_of_a_name() {
    let folder = folder("ci-namesakes");
    let baseline = |what, files: &[&str]| within(&folder, &[&["baseline", what, "peaks.json"], files].concat());
    process(&folder.join("x.gpu0.pid10.capture"), 10, 0, 1_000);
    process(&folder.join("x.gpu0.pid11.capture"), 11, 0, 4_000);
    let files = ["x.gpu0.pid10.capture", "x.gpu0.pid11.capture"];
    assert_eq!(baseline("write", &files).code, Some(0));
    let text = fs::read_to_string(folder.join("peaks.json")).unwrap();
    assert!(text.contains("\"x #2, device 0\": \"1000 MiB\""), "{text}");
    assert_eq!(baseline("check", &[files[1], files[0]]).code, Some(0));
    process(&folder.join("x.gpu0.pid10.capture"), 10, 0, 3_900);
    let grew = baseline("check", &files);
    let words = grew.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(grew.code == Some(1) && words.contains(" x #2, device 0 1000 3904 +2904 "), "{grew:?}");
    let gone = baseline("check", &files[1..]);
    assert!(gone.code == Some(1) && gone.stdout.contains("\nNo recording has x #2, device 0.\n"), "{gone:?}");
    // A merge can leave two lines for the same peak.
    fs::write(folder.join("peaks.json"), text.replace("\"x, device 0\": ", "\"x #2, device 0\": ")).unwrap();
    let twice = baseline("check", &files);
    assert!(twice.code == Some(2) && twice.stderr.contains("`x #2, device 0` has two lines"), "{twice:?}");
}

/// A pool has 64 MiB in use. In the second run, it keeps 39 GiB.
#[test]
fn what_a_pool_keeps_counts() {
    let folder = folder("ci-pool");
    let pool = PoolId(1);
    for (name, reserved) in [("before", 64), ("after", 39 << 10)] {
        let mut made = RecordingBuilder::new("train");
        made.event(EventKind::PoolRegistered { pool, device: DEVICE });
        let part = Key::of_part(pool, made.alloc(reserved * MIB, MemKind::Device, 2).get());
        let (bytes, kind, stack) = (Bytes::mib(64), MemKind::Part, StackId(2));
        made.alloc_at(part, Block { device: DEVICE, bytes, kind, context: pool.0, stack });
        fs::create_dir_all(folder.join(name)).unwrap();
        fs::write(folder.join(name).join("train.capture"), made.file()).unwrap();
    }
    for (before, after) in [("before", "after"), ("before/train.capture", "after/train.capture")] {
        let grew = within(&folder, &["diff", before, after, "--fail-on-increase", "5%"]);
        assert_eq!(grew.code, Some(1), "{grew:?}");
        assert!(grew.stdout.contains("driver's blocks") && grew.stdout.contains("+38.94 GiB"), "{grew:?}");
        assert_eq!(within(&folder, &["diff", after, before, "--fail-on-increase", "5%"]).code, Some(0));
    }
    let baseline = |what, file| within(&folder, &["baseline", what, "peaks.json", file]);
    assert_eq!(baseline("write", "before/train.capture").code, Some(0));
    let grew = baseline("check", "after/train.capture");
    assert!(grew.code == Some(1) && grew.stdout.contains("train, device 0, driver's blocks"), "{grew:?}");
    // The row of the pool is printed once.
    let report = within(&folder, &["report", "before/train.capture"]).stdout;
    assert_eq!(report.matches("cache of ").count(), 1, "{report}");
}

/// A recording of the peaks lacks the memory that was live between the peaks. In a recording with tensors, the place of a tensor
/// can have a limit.
#[test]
fn a_limit_of_a_place_knows_what_is_in_a_recording() {
    let mut peaks = RecordingBuilder::new("train");
    peaks.item(&Item::Part(PartDefinition { is_peaks: true, after: 0 }));
    let peaks = recorded("ci-peaks.capture", peaks.training(1, 1, 10 * MIB));
    let ran_of = |limit: &str, file: &str| ran(&["report", "--max-peak", limit, file]);
    let doubtful = ran_of("src/model.rs:42=1GiB", &peaks);
    assert_eq!(doubtful.code, Some(1), "{doubtful:?}");
    assert!(
        doubtful.stderr.contains("may have been above the limit of 1 GiB. ") && doubtful.stderr.contains("--only-peak")
    );

    let mut made = RecordingBuilder::new("train").tensors(0, 1, 4 * MIB, None);
    made.tensor(1, "Net.fc: Linear", TensorClass::Weights, [10 * MIB, 10 * MIB]);
    let tensors = recorded("ci-tensors.capture", made);
    let table = json(&["report", "--json", &tensors]);
    let places = table["torch"]["devices"][0]["peak"]["by_place"].as_array().expect("it is a list");
    let line = places.iter().find_map(|place| place["line"].as_str()).expect("a tensor has a line");
    let above = ran_of(&format!("{line}=1MiB"), &tensors);
    assert!(above.code == Some(1) && above.stderr.contains(&format!(": tensors of `{line}` had ")), "{above:?}");
}

/// The peak of the driver's blocks was at another time than the peak of the parts.
#[test]
fn a_recording_of_the_peaks_knows_that_of_the_drivers_blocks() {
    let (mut made, pool) = (RecordingBuilder::new("train"), PoolId(1));
    made.item(&Item::Part(PartDefinition { is_peaks: true, after: 0 }));
    made.event(EventKind::PoolRegistered { pool, device: DEVICE });
    made.alloc(64 * MIB, MemKind::Device, 2);
    made.event(EventKind::PoolReserved { pool, bytes: Bytes::mib(64) });
    let peak = DevicePeak { device: DEVICE, bytes: 100 * MIB, time: Duration::ZERO };
    made.item(&Item::Totals(Totals { driver_peaks: vec![peak], ..Totals::default() }));
    let file = recorded("ci-driver.capture", made);
    let limited = |limit: &str| ran(&["report", "--max-peak", limit, &file]);
    assert_eq!(limited("100MiB").code, Some(0));
    let above = limited("99MiB");
    let words = "the peak of the driver's blocks on device 0 was 100 MiB, 1 MiB above the limit of 99 MiB\n";
    assert!(above.code == Some(1) && above.stderr.ends_with(words), "{above:?}");
}

#[test]
fn what_was_lost_fails_if_that_is_asked() {
    let whole = training("ci-whole.capture");
    assert_eq!(ran(&["report", "--fail-if", "lost", &whole]).code, Some(0));
    let mut lost = RecordingBuilder::new("train");
    lost.alloc(MIB, MemKind::Pool, 0);
    lost.event(EventKind::Lost { count: 3 });
    let lost = recorded("ci-lost.capture", lost);
    assert_eq!(ran(&["report", &lost]).code, Some(0));
    let bytes = fs::read(&whole).expect("it is there");
    let cut = written("ci-cut.capture", &bytes[..bytes.len() - 10]);
    for (file, why) in [(&lost, "3 events were lost: some numbers may be wrong."), (&cut, "The file has no end: ")] {
        let ran = ran(&["report", "--fail-if", "lost", file]);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains(&format!("gpumem: {file}: {why}")), "{ran:?}");
    }
    // A recording of the peaks contains everything that its option keeps, so nothing counts as lost.
    let mut peaks = RecordingBuilder::new("train");
    peaks.item(&Item::Part(PartDefinition { is_peaks: true, after: 0 }));
    let peaks = recorded("ci-lost-peaks.capture", peaks.training(1, 1, MIB));
    assert_eq!(ran(&["report", "--fail-if", "lost", &peaks]).code, Some(0));
    let empty = recorded("ci-lost-nothing.capture", RecordingBuilder::new("idle"));
    assert_eq!(ran(&["report", "--fail-if", "lost", &empty]).code, Some(1), "nothing was measured");
}

/// A value that is not in a recording is not shown as 0 next to the values of other ranks.
#[test]
fn a_rank_that_is_not_known_has_no_numbers() {
    let mut lost = RecordingBuilder::new("train");
    lost.event(EventKind::Lost { count: 3 });
    let (whole, lost) = (training("ci-rank0.capture"), recorded("ci-rank1.capture", lost));
    let Ran { code, stdout, stderr } = ran(&["report", &whole, &lost]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("\n   the peak is not known\n") && !stdout.contains("nothing was allocated"), "{stdout}");
    let places = stdout.split_once("at the peaks, by scope and place\n").expect("there are places").1;
    assert!(places.lines().next().is_some_and(|heading| !heading.contains("rank1")), "{stdout}");
}

#[test]
fn ci_reads_what_was_not_kept() {
    let file = training("ci-annotated.capture");
    let limits = ["--max-peak", "436MiB", "--max-peak", "src/adam.rs:30=1MiB", "--fail-if", "lost"];
    let github = ran(&[&["report", "--annotations", "github"], &limits[..], &[&file]].concat());
    let place = "::error file=src/adam.rs,line=30,title=GPU memory::";
    let lines: Vec<_> = github.stderr.lines().collect();
    assert!(github.code == Some(1) && lines.len() == 2, "{github:?}");
    assert!(lines.iter().all(|line| line.starts_with(place)), "most of the peak is there: {github:?}");
    let report = folder("ci-junit").join("junit.xml");
    let junit = format!("junit={}", report.display());
    let ran_with = ran(&[&["report", "--annotations", &junit], &limits[..], &[&file]].concat());
    assert!(ran_with.code == Some(1) && ran_with.stderr.lines().count() == 2, "{ran_with:?}");
    let text = fs::read_to_string(&report).expect("it was written");
    assert!(text.contains("tests=\"3\"") && text.contains("failures=\"2\""), "{text}");
    assert!(
        text.contains("<testcase name=\"the peak is at most 436 MiB\"") && text.contains("<failure message="),
        "{text}"
    );
    assert_eq!(ran(&["report", "--annotations", "github", &file]).code, Some(2), "there is no limit");
    assert_eq!(ran(&["report", "--tree", "--max-peak", "1GiB", &file]).code, Some(2), "--tree has no limits");
}

#[test]
fn runs_are_compared_rank_by_rank() {
    let folder = folder("ci-runs");
    run(&folder, "before", 100, &[(0, 10), (1, 10), (2, 10), (10, 10)]);
    run(&folder, "after", 907, &[(0, 10), (1, 12), (2, 11), (10, 9)]);
    let Ran { code, stdout, stderr } = within(&folder, &["diff", "before", "after"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let words = stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "before → after 4 peaks compared, of which 2 grew; their sum: +81 MiB (+4.6 %) ",
        " sum of 4 1748 1829 +81 device 0, all processes together 1748 1829 +81 rank 1, device 0 437 518 +81 rank 2, device 0 437 478 +40 rank 10, device 0 437 396 -40 ",
        " the peak that grew most: rank 1, device 0: before/train.rank1.gpu0.pid101.capture → after/train.rank1.gpu0.pid908.capture ",
        " src/adam.rs:30 200 240 +40 ",
    ] {
        assert!(words.contains(part), "{part:?} is not in\n{stdout}");
    }
    let limited = |limit: &str| within(&folder, &["diff", "before", "after", "--fail-on-increase", limit]);
    assert_eq!([limited("18%").code, limited("19%").code], [Some(1), Some(0)]);
    assert!(limited("18%").stdout.ends_with("\nThe peak increased by more than 18 %.\n"));
    let github = within(&folder, &["diff", "before", "after", "--fail-on-increase", "18%", "--annotations", "github"]);
    let error = "::error title=GPU memory::after/train.rank1.gpu0.pid908.capture: the peak of rank 1, device 0 was 437 MiB and is 518 MiB";
    assert!(github.code == Some(1) && github.stderr.starts_with(error), "{github:?}");
    let markdown = within(&folder, &["diff", "before", "after", "--markdown"]).stdout;
    for row in [
        "\n| `sum of 4` | 1.71 GiB |",
        "\n| `rank 1, device 0` | 437 MiB | 518 MiB | +81 MiB (+18.5 %) |\n",
        "\n| `src/adam.rs:30` | 200 MiB |",
    ] {
        assert!(markdown.contains(row), "{row:?} is not in\n{markdown}");
    }
    let json: Value = serde_json::from_str(&within(&folder, &["diff", "before", "after", "--json"]).stdout).unwrap();
    assert_eq!((&json["sum"]["change_bytes"], &json["peaks"][0]["rank"]), (&(81 * MIB).into(), &1.into()));

    // The comparison also works in the other direction, and without a change.
    let fell = within(&folder, &["diff", "after/*rank[12].*", "before/*rank[12].*"]).stdout;
    assert!(fell.contains("\nthe peak that shrank most: rank 1, device 0:\n") && !fell.contains("grew most"), "{fell}");
    let same = within(&folder, &["diff", "before", "before"]).stdout;
    assert_eq!(same, "before → before\n4 peaks compared, of which 0 grew; their sum: no change\n");

    // A rank that only one of the runs has is named. Whether a limit is kept is then not known.
    fs::remove_file(folder.join("after/train.rank0.gpu0.pid907.capture")).unwrap();
    let alone = within(&folder, &["diff", "before", "after"]);
    let line = "\nOnly in before: rank 0, device 0 (before/train.rank0.gpu0.pid100.capture), with a peak of 437 MiB.\n";
    assert!(alone.code == Some(0) && alone.stdout.contains(line), "{alone:?}");
    assert_eq!([limited("18%").code, limited("19%").code], [Some(1), Some(2)]);
    let why = limited("19%").stderr;
    assert!(why.ends_with("with a peak of 437 MiB; record the missing data again\n"), "{why}");
    // If one recording has lost events, whether a limit is kept is not known either.
    let mut lost = RecordingBuilder::of_job("train", 10);
    lost.alloc(MIB, MemKind::Pool, 0);
    lost.event(EventKind::Lost { count: 3 });
    fs::write(folder.join("after/train.rank10.gpu0.pid917.capture"), lost.file()).unwrap();
    let doubtful = limited("1000%");
    assert!(
        doubtful.code == Some(2) && doubtful.stderr.contains("rank10.gpu0.pid917.capture: 3 events were lost"),
        "{doubtful:?}"
    );
}

/// The program of the first recording ended before it used a GPU. The program of the second one ended before it wrote anything.
#[test]
fn an_empty_recording_hides_no_other() {
    let folder = folder("ci-empty");
    run(&folder, "runs", 100, &[(0, 10), (1, 10)]);
    let peaks = |what| within(&folder, &["baseline", what, "peaks.json", "runs"]);
    assert_eq!(peaks("write").code, Some(0));
    let unused = gpumem_recording::Writer::new(Vec::new()).unwrap().finish().unwrap();
    for (bytes, name, why) in [
        (unused, "unused", "its program ended before it used a GPU, or its allocations were not intercepted"),
        (
            Vec::new(),
            "empty",
            "the file is empty: its program ended, or the disk was full, before anything was written",
        ),
    ] {
        let file = format!("runs/{name}.capture");
        fs::write(folder.join(&file), bytes).unwrap();
        for view in [&[][..], &["--table"], &["--json"], &["--html", "page.html"]] {
            let report = within(&folder, &[&["report", "runs"], view].concat());
            assert_eq!(report.code, Some(0), "{report:?}");
            let left_out = format!("gpumem: `{file}` is left out: {why}\n");
            assert_eq!(report.stderr, if name == "empty" { left_out } else { String::new() });
            assert!(view.contains(&"--html") || report.stdout.contains("train.rank1.gpu0.pid101"), "{report:?}");
        }
        // The peak is not known.
        let limit = within(&folder, &["report", "runs", "--max-peak", "1TiB"]);
        assert!(limit.code == Some(1) && limit.stderr.starts_with(&format!("gpumem: {file}: ")), "{limit:?}");

        let line = format!("\n{file}: Nothing is recorded: {why}.\n");
        let diff = within(&folder, &["diff", "runs", "runs"]);
        assert!(diff.code == Some(0) && diff.stderr.is_empty() && diff.stdout.contains(&line), "{diff:?}");
        assert!(diff.stdout.contains("\n2 peaks compared, of which 0 grew; their sum: no change\n"), "{diff:?}");
        let limit = within(&folder, &["diff", "runs", "runs", "--fail-on-increase", "1%"]);
        let unknown = "Whether the peak increased by more than 1 % is not known.\n";
        assert!(limit.code == Some(2) && limit.stdout.ends_with(unknown) && limit.stderr.contains(why), "{limit:?}");

        let line = format!("gpumem: `{file}` has no peaks: {why}\n");
        let check = peaks("check");
        assert_eq!((check.code, &check.stderr), (Some(2), &line), "{check:?}");
        assert_eq!(check.stdout, "The 13 peaks of peaks.json changed by 2 % at most.\n");
        let junit = ["baseline", "check", "peaks.json", "runs", "--annotations", "junit=peaks.xml"];
        assert_eq!(within(&folder, &junit).code, Some(2));
        assert!(fs::read_to_string(folder.join("peaks.xml")).unwrap().contains("failures=\"1\""));
        let (before, written) = (fs::read(folder.join("peaks.json")).unwrap(), peaks("write"));
        assert_eq!((written.code, &written.stderr), (Some(2), &line), "{written:?}");
        assert_eq!(fs::read(folder.join("peaks.json")).unwrap(), before);

        // An empty recording is an error if the folder has no other recording, or if the user named the file.
        for (folder_of_it, named) in [("only", "only"), ("only", "only/x.capture")] {
            fs::create_dir_all(folder.join(folder_of_it)).unwrap();
            fs::copy(folder.join(&file), folder.join("only/x.capture")).unwrap();
            for command in [&["baseline", "write", "new.json", named][..], &["diff", "runs", named]] {
                let ran = within(&folder, command);
                assert!(ran.code == Some(2) && ran.stderr.lines().all(|line| line.starts_with("gpumem: ")), "{ran:?}");
            }
            let report = within(&folder, &["report", named]);
            assert_eq!(report.code, Some(if name == "empty" { 2 } else { 0 }), "{report:?}");
        }
        fs::remove_file(folder.join(&file)).unwrap();
    }
}

/// The id of a process differs in each run, and the arguments of a rank may differ.
#[test]
fn processes_without_a_rank_are_matched_by_their_command() {
    let folder = folder("ci-commands");
    for (name, pid, mib) in [("before", 10, 10), ("after", 20, 12)] {
        let run = folder.join(name);
        fs::create_dir_all(&run).unwrap();
        for (number, program) in [(0, "eval"), (1, "train")] {
            let file = run.join(format!("x.gpu0.pid{}.capture", pid + (number + u32::from(mib == 12)) % 2));
            fs::write(file, RecordingBuilder::new(program).training(1, 1, mib * MIB).file()).unwrap();
        }
    }
    let json: Value = serde_json::from_str(&within(&folder, &["diff", "before", "after", "--json"]).stdout).unwrap();
    let names: Vec<_> = json["peaks"].as_array().unwrap().iter().map(|peak| peak["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 2, "{json}");
    for peak in json["peaks"].as_array().unwrap() {
        let [before, after] = ["before_file", "after_file"].map(|side| peak[side].as_str().unwrap().to_owned());
        assert_ne!(before[before.len() - 9..], after[after.len() - 9..], "other numbers: {before} {after}");
    }
}

#[test]
fn a_baseline_is_a_file_for_reviews() {
    let folder = folder("ci-baseline");
    let training = |mib: u64| {
        fs::write(folder.join("train.capture"), RecordingBuilder::new("train").training(3, 10, mib * MIB).file())
    };
    training(10).unwrap();
    let peaks =
        |arguments: &[&str]| within(&folder, &[&["baseline"], arguments, &["peaks.json", "train.capture"]].concat());
    let missing = peaks(&["check"]);
    assert!(missing.code == Some(2) && missing.stderr.contains("write it with `gpumem baseline write`"), "{missing:?}");
    let written = peaks(&["write"]);
    assert_eq!((written.code, written.stdout.as_str(), written.stderr.as_str()), (Some(0), "", ""));
    let text = fs::read_to_string(folder.join("peaks.json")).unwrap();
    let expected = r#"{
  "peaks": {
    "train, device 0": "438 MiB",
    "train, device 0: cuBLAS": "32 MiB",
    "train, device 0: src/adam.rs:30": "200 MiB",
    "train, device 0: src/model.rs:12": "100 MiB",
    "train, device 0: src/model.rs:42": "50 MiB",
    "train, device 0: src/model.rs:77": "100 MiB"
  }
}
"#;
    assert_eq!(text, expected);
    let same = peaks(&["check"]);
    assert_eq!((same.code, same.stdout.as_str()), (Some(0), "The 6 peaks of peaks.json changed by 2 % at most.\n"));

    training(12).unwrap();
    assert_eq!(peaks(&["check", "--fail-on-increase", "20%"]).code, Some(0));
    let markdown = peaks(&["check", "--markdown"]).stdout;
    assert!(
        markdown.contains("\n| `train, device 0: src/adam.rs:30` | 200 MiB | 240 MiB | +40 MiB (+20.0 %) |\n"),
        "{markdown}"
    );
    let github = peaks(&["check", "--annotations", "github"]).stderr;
    assert!(github.contains("::error file=src/adam.rs,line=30,title=GPU memory::train, device 0: src/adam.rs:30: the peak was 200 MiB and is 240 MiB"), "{github}");
    // After the new baseline is written, the check succeeds.
    assert_eq!([peaks(&["write"]).code, peaks(&["check"]).code], [Some(0), Some(0)]);
    training(10).unwrap();
    let less = peaks(&["check"]);
    assert!(
        less.code == Some(0)
            && less.stdout.starts_with(
                "No peak of peaks.json grew by more than 2 %. `gpumem baseline write` accepts the changes.\n"
            ),
        "{less:?}"
    );
    // A device that is not recorded any more cannot be compared, so the check does not succeed.
    fs::rename(folder.join("train.capture"), folder.join("other.capture")).unwrap();
    let gone = within(&folder, &["baseline", "check", "peaks.json", "other.capture"]);
    assert!(gone.code == Some(1) && gone.stdout.contains("\nNo recording has train, device 0.\n"), "{gone:?}");
    // An unknown value is not 0.
    assert!(gone.stdout.contains("\nNew: other, device 0: src/adam.rs:30 has 200 MiB.\n"), "{gone:?}");
    assert!(!gone.stdout.contains("train, device 0: "), "{gone:?}");

    // The peaks of tests may be in the same file. They are not compared, and stay there.
    let tests = r#"{"peaks": {"tests::forward": "5 MiB"}}"#;
    fs::write(folder.join("peaks.json"), tests).unwrap();
    let of_tests = within(&folder, &["baseline", "write", "peaks.json", "other.capture"]);
    assert_eq!(of_tests.code, Some(0), "{of_tests:?}");
    assert!(fs::read_to_string(folder.join("peaks.json")).unwrap().contains("\n    \"tests::forward\": \"5 MiB\"\n"));
    let same = within(&folder, &["baseline", "check", "peaks.json", "other.capture"]);
    assert_eq!((same.code, same.stdout.as_str()), (Some(0), "The 6 peaks of peaks.json changed by 2 % at most.\n"));
}

/// The id of the process, its folder, and the name of its recording differ in each run.
#[test]
fn a_baseline_has_the_same_names_in_each_run() {
    let folder = folder("ci-names");
    fs::create_dir_all(folder.join("repository/.git")).unwrap();
    fs::create_dir_all(folder.join("repository/ci")).unwrap();
    let root = folder.join("repository").canonicalize().unwrap().display().to_string();
    let recording = |name: &str, pid, rank, runs_in: &str| {
        let (folder_of_process, arguments) = (runs_in.to_owned(), vec!["/usr/bin/train".to_owned()]);
        let process = Process { pid, rank, folder: folder_of_process, arguments, ..Process::default() };
        let mut made = RecordingBuilder::of(process, true);
        for file in [format!("{root}/src/model.py"), "/opt/library/layers.py".to_owned(), "generated.py".to_owned()] {
            let stack = made.stack(&[(0, "forward", &file, 12)]);
            made.alloc(MIB, MemKind::Device, stack.0 - 1);
        }
        fs::write(folder.join("repository").join(name), made.file()).unwrap();
    };
    let ran = |what: &str, recordings: &[&str]| {
        let arguments = [&["baseline", what, "ci/peaks.json"], recordings].concat();
        within(&folder.join("repository"), &arguments)
    };
    for (names, pids, runs_in, line) in [
        (["train-80.capture", "train-81.capture"], [80, 81], root.clone(), "train.rank"),
        (["train.rank0.gpu0.pid9.capture", "train-99.capture"], [9, 99], format!("{root}/src"), "train.rank"),
        (["7.capture", "8.capture"], [7, 8], "/tmp".to_owned(), "train.rank"),
    ] {
        for (rank, (name, pid)) in (0..).zip(names.into_iter().zip(pids)) {
            recording(name, pid, Some(rank), &runs_in);
        }
        if !folder.join("repository/ci/peaks.json").exists() {
            let written = ran("write", &names);
            assert_eq!(written.code, Some(0), "{written:?}");
            let text = fs::read_to_string(folder.join("repository/ci/peaks.json")).unwrap();
            let places = ["", ": /opt/library/layers.py:12", ": generated.py:12", ": src/model.py:12"];
            let lines = [0, 1].map(|rank| places.map(|place| format!("\"{line}{rank}, device 0{place}\": ")));
            let has_line = |line: &String| text.contains(line);
            assert!(lines.as_flattened().iter().all(has_line) && text.lines().count() == 8 + 1 + 4, "{text}");
        }
        let same = ran("check", &names);
        assert_eq!((same.code, &*same.stdout), (Some(0), "The 9 peaks of ci/peaks.json changed by 2 % at most.\n"));
    }
}

/// A recording whose peaks are not known cannot become a baseline.
#[test]
fn a_baseline_has_only_what_is_known() {
    let folder = folder("ci-baseline-unknown");
    let mut peaks = RecordingBuilder::new("train");
    peaks.item(&Item::Part(PartDefinition { is_peaks: true, after: 0 }));
    let mut lost = RecordingBuilder::new("train");
    lost.alloc(MIB, MemKind::Pool, 0);
    lost.event(EventKind::Lost { count: 3 });
    let mut latest = RecordingBuilder::new("train");
    latest.item(&Item::Part(PartDefinition { is_peaks: false, after: 7 }));
    for (name, made, why) in [
        ("newest.capture", latest.training(1, 1, MIB), "record the program without --max-size"),
        ("peaks.capture", peaks.training(1, 1, MIB), "record the program without --only-peak"),
        ("lost.capture", lost, "3 events were lost"),
        ("idle.capture", RecordingBuilder::new("idle"), "nothing was measured"),
    ] {
        fs::write(folder.join(name), made.file()).unwrap();
        let ran = within(&folder, &["baseline", "write", "peaks.json", name]);
        assert!(ran.code == Some(2) && ran.stderr.contains(why), "{ran:?}");
        assert!(!folder.join("peaks.json").exists());
    }
}
