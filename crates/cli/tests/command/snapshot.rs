//! Tests PyTorch snapshots as input. `tests/data/snapshot-2.pickle` to `snapshot-5.pickle` are one snapshot in each protocol
//! of Python's pickle, with an allocation that failed, an expandable segment, and blocks that are older than the first event.
//! `snapshot-h200.pickle` is the end of a snapshot that PyTorch 2.11 wrote on an H200. `golden.rs` compares the reports.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{
    file,
    golden::data,
    limits::Limits,
    ran,
    recording_builder::{MIB, RecordingBuilder},
    report::{json, printed, recorded, written},
};

fn file_of(name: &str) -> String {
    file(name).into_os_string().into_string().expect("the name is text")
}

/// Returns the overview in JSON, without the name of the file.
fn overview(file: &str) -> Value {
    let mut json = json(&["report", "--json", file]);
    json["file"].take();
    json
}

#[test]
fn all_protocols_say_the_same() {
    let [first, others @ ..] = [2, 3, 4, 5].map(|protocol| overview(&data(&format!("snapshot-{protocol}.pickle"))));
    let peaks = ["/devices/0/peak_bytes", "/torch/devices/0/peak/allocated_bytes", "/devices/1/peak_bytes"];
    let peaks = peaks.map(|path| first.pointer(path).and_then(Value::as_u64));
    assert_eq!(peaks, [104 * MIB, 75 * MIB + 1536, 60 * MIB].map(Some));
    assert!(first["pid"].is_null() && first["missing"]["has_only_pytorch"] == true, "{first:#}");
    assert!(others.iter().all(|other| *other == first));
}

/// gpumem can read the files that it writes for PyTorch's viewer.
#[test]
fn a_recording_survives_the_way_through_a_snapshot() {
    let recording = recorded("through.capture", RecordingBuilder::new("train").tensors(3, 4, MIB, None));
    let [first, second] = ["through-1.pickle", "through-2.pickle"].map(|name| file(name).display().to_string());
    for (from, to) in [(&recording, &first), (&first, &second)] {
        printed(&["report", "--format", "torch", "-o", to, from]);
    }
    let peak = |file: &str| {
        let overview = overview(file);
        let device = overview["devices"][0]["peak_bytes"].clone();
        let peak = &overview["torch"]["devices"][0]["peak"];
        // File names are relative to the folder in which the program ran, and a snapshot does not contain this folder.
        let line = |line: &Value| line.as_str().map(|line| line.trim_start_matches("/home/ada/train/").to_owned());
        let place = |place: &Value| {
            let [bytes, blocks] = ["bytes", "blocks"].map(|name| place[name].as_i64());
            (line(&place["line"]), line(&place["caller"]), bytes, blocks)
        };
        let mut places: Vec<_> = peak["by_place"].as_array().unwrap().iter().map(place).collect();
        places.sort();
        (device, peak["allocated_bytes"].clone(), peak["reserved_bytes"].clone(), places)
    };
    let expected = peak(&recording);
    assert!(expected.3.len() > 1, "{expected:?}");
    assert_eq!(peak(&first), expected);
    assert_eq!(peak(&second), expected);
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &u32::try_from(text.len()).unwrap().to_le_bytes()[..], text.as_bytes()].concat()
}

fn number(number: u64) -> Vec<u8> {
    [b"\x8a\x08", &number.to_le_bytes()[..]].concat()
}

fn list(values: &[Vec<u8>]) -> Vec<u8> {
    [b"](", &*values.concat(), b"e"].concat()
}

fn dictionary(fields: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let fields: Vec<_> = fields.iter().map(|(name, value)| [text(name), value.clone()].concat()).collect();
    [b"}(", &*fields.concat(), b"u"].concat()
}

fn snapshot(name: &str, segments: &[Vec<u8>], trace: &[Vec<u8>]) -> String {
    let all = dictionary(&[("segments", list(segments)), ("device_traces", list(&[list(trace)]))]);
    written(name, &[b"\x80\x04", &*all, b"."].concat())
}

/// Writes a snapshot that has no history, but one segment of a private pool, with one block at its start.
fn without_history(name: &str, segment_mib: u64, block_mib: u64) -> String {
    let requested_mib = block_mib.min(5);
    one_segment(name, [segment_mib, block_mib, requested_mib, block_mib, block_mib])
}

/// Writes a snapshot of one segment. The numbers are the sizes of the segment and of its block, the size that was requested of
/// the block, and the segment's own sums of allocated blocks and of blocks in use.
fn one_segment(name: &str, [segment_mib, block_mib, requested_mib, allocated_mib, active_mib]: [u64; 5]) -> String {
    let mib = |mib: u64| number(mib * MIB);
    let block =
        |bytes, requested, state| dictionary(&[("size", bytes), ("requested_size", requested), ("state", text(state))]);
    let used = block(mib(block_mib), mib(requested_mib), "active_allocated");
    let segment = dictionary(&[
        ("device", number(0)),
        ("address", mib(1)),
        ("total_size", mib(segment_mib)),
        ("allocated_size", mib(allocated_mib)),
        ("active_size", mib(active_mib)),
        ("stream", number(5)),
        ("segment_pool_id", [number(0), number(1), vec![0x86]].concat()),
        ("blocks", list(&[used, block(mib(segment_mib.saturating_sub(block_mib)), mib(0), "inactive")])),
    ]);
    snapshot(name, &[segment], &[])
}

#[test]
fn a_snapshot_without_a_history_is_one_moment() {
    let file = without_history("no-history.pickle", 20, 4);
    let text = printed(&["report", &file]);
    let why = "The snapshot has no history, only the blocks that were live when it was made: ";
    assert!(text.contains(why) && !text.contains("max_entries") && !text.contains("left out"), "{text}");
    assert!(text.contains("\n before the history    4 "), "{text}");
    let same = printed(&["diff", &file, &file, "--fail-on-increase", "1%"]);
    assert!(same.contains("device 0: the peak was 20 MiB and is 20 MiB: no change\n"), "{same}");
    // The peak may have been higher than the peak of a recording from the start.
    let whole = crate::report::training("no-history-before.capture");
    let unknown = ran(&["diff", &whole, &file, "--fail-on-increase", "1%"]);
    assert!(unknown.code == Some(2) && unknown.stderr.contains(why), "{unknown:?}");
    assert_eq!(ran(&["diff", &file, &whole, "--fail-on-increase", "1%"]).code, Some(1));
    let baseline = ran(&["baseline", "write", &file_of("no-history.json"), &file]);
    assert!(baseline.code == Some(2) && baseline.stderr.contains(why), "{baseline:?}");
    let start = printed(&["report", "--at", "start", &file]);
    assert!(start.contains("device 0: 20 MiB in use at the start"), "{start}");
    assert!(text.contains("asked for 4 MiB (20 %), unused in private pools of graphs 16 MiB (80 %)"), "{text}");
    let json = json(&["report", "--at", "end", "--json", &file]);
    let segment = &json["torch"][0]["segments"][0];
    assert_eq!(["stream", "pool", "used_bytes"].map(|name| segment[name].as_u64()), [5, 1, 4 * MIB].map(Some));
    assert_eq!(segment["blocks"][0]["bytes"], 4 * MIB);
    let contradictory = printed(&["report", &without_history("contradictory.pickle", 4, 20)]);
    assert!(
        contradictory
            .contains("asked for 5 MiB (21 %), rounding 15 MiB (63 %), unused in private pools of graphs 4 MiB (17 %)")
    );
    let what = "contradicts itself on device 0: 20 MiB of blocks are in a segment with another size at the end. ";
    assert_eq!(contradictory.matches(what).count(), 1, "{contradictory}");
    for (sizes, what) in [
        ([20, 4, 5, 4, 4], "5 MiB of a tensor are in a smaller block at the end. "),
        ([20, 4, 4, 9, 4], "4 MiB of blocks are in a segment with another sum of them at the end. "),
        ([20, 4, 4, 4, 3], "4 MiB of blocks are in a segment with another sum of them at the end. "),
    ] {
        let text = printed(&["report", &one_segment("sizes.pickle", sizes)]);
        assert_eq!(text.matches(&format!("contradicts itself on device 0: {what}")).count(), 1, "{text}");
    }
    // The peak of the contradictory snapshot is not known.
    let file = file_of("contradictory.pickle");
    for arguments in [&["report", "--max-peak", "30MiB", &file][..], &["diff", &file, &file]] {
        let ran = ran(arguments);
        assert!(ran.code != Some(0) && ran.stderr.contains(what.trim_end()), "{ran:?}");
    }
}

/// Each frame contains a name. The names of a file have up to 400 KB.
#[test]
fn long_names_cost_little() {
    let long = |name: &str, length: usize| text(&format!("/{}{name}", name.repeat(length / name.len())));
    let page = file_of("long-names.html");
    for (name, file, function, view) in [
        ("file", long("n", 400_000), text("f"), &["report", "--html", &page][..]),
        ("function", text("a.py"), long("ñ", 400_000), &["report"]),
        ("invisible", long("\u{200b}", 400_000), text("f"), &["report", "--leaks"]),
        ("both", long("n", 4_000), long("f", 4_000), &["report"]),
    ] {
        // Later events take the names from the memo.
        let (mut trace, memo) = (Vec::new(), [&b"\x94"[..], b"j\0\0\0\0", b"j\x01\0\0\0"]);
        for at in 0..1_000 {
            let [file, function] = match at {
                0 => [[&file, memo[0]].concat(), [&function, memo[0]].concat()],
                _ => [memo[1].to_vec(), memo[2].to_vec()],
            };
            let frame = dictionary(&[("filename", file), ("name", function), ("line", number(at + 1))]);
            let about = [("action", text("alloc")), ("addr", number((at + 1) * MIB)), ("size", number(MIB))];
            trace.push(dictionary(&[&about[..], &[("frames", list(&[frame]))]].concat()));
        }
        let path = snapshot(&format!("long-{name}.pickle"), &[], &trace);
        Limits::OF_A_RECORDING.run(&[view, &[&path]].concat()).unwrap_or_else(|why| panic!("{name}: {why}"));
    }
}

#[test]
fn the_pools_of_a_snapshot_are_known() {
    let torch = &json(&["report", "--at", "end", "--json", &data("snapshot-h200.pickle")])["torch"][0];
    let segments = torch["segments"].as_array().unwrap();
    assert!(segments.len() > 10 && segments.iter().all(|segment| segment["pool"] == 0), "{segments:?}");
    let reserved: u64 = segments.iter().filter_map(|segment| segment["bytes"].as_u64()).sum();
    assert_eq!(torch["reserved_bytes"], reserved);
}

/// The history of a snapshot often starts late, but the snapshot is still compared.
#[test]
fn snapshots_are_compared_as_recordings_are() {
    let file = data("snapshot-4.pickle");
    let text = printed(&["diff", &file, &file, "--fail-on-increase", "1%"]);
    assert!(text.contains("The peak did not increase by more than 1 %"), "{text}");
    assert_eq!(text.matches("The first PyTorch events are not in the snapshot").count(), 1, "{text}");
}

#[test]
fn a_snapshot_has_a_page_and_tables() {
    let (from, page, tables) = (data("snapshot-4.pickle"), file("snapshot.html"), file("snapshot-tables"));
    printed(&["report", "--html", page.to_str().unwrap(), &from]);
    let page = fs::read_to_string(page).unwrap();
    for part in ["\"pid\":null", "id=\"tensors-0\"", "\"reserved: PyTorch had 64 MiB from the driver: "] {
        assert!(page.contains(part), "{part}");
    }
    printed(&["report", "--format", "parquet", "-o", tables.to_str().unwrap(), &from]);
    assert!(tables.join("snapshot-4.tensors.parquet").metadata().unwrap().len() > 1000);
}

#[test]
fn a_pickle_that_runs_code_is_rejected() {
    let (pickle, ran_it) = (file("code.pickle"), file("code-ran"));
    _ = fs::remove_file(&ran_it);
    let command = format!("touch {}", ran_it.display());
    let length = u8::try_from(command.len()).expect("the path is short");
    fs::write(&pickle, [b"\x80\x04cos\nsystem\n\x8c", &[length][..], command.as_bytes(), b"\x85R."].concat()).unwrap();
    let rejected = ran(&["report", pickle.to_str().unwrap()]);
    let said = "the opcode GLOBAL would run `os.system`. gpumem reads data only, and has run nothing; pass a file that";
    assert!(rejected.code == Some(2) && rejected.stderr.contains(said), "{rejected:?}");
    assert!(!Path::new(&ran_it).exists());
}
