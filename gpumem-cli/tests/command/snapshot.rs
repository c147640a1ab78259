//! Tests snapshots of PyTorch as input. `tests/data/snapshot-2.pickle` to `snapshot-5.pickle` are one snapshot in each protocol of
//! Python's pickle, with an allocation that was refused, an expandable segment, and blocks that are older than the first event.
//! `snapshot-h200.pickle` is the end of one that PyTorch 2.11 wrote on an H200. `old.rs` compares the reports.

use std::{fs, path::Path};

use serde_json::Value;

use crate::{
    file,
    made::{MIB, Made},
    old::data,
    ran,
    report::{json, printed, recorded, written},
};

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

/// gpumem reads the file again that it writes for PyTorch's viewer.
#[test]
fn a_recording_survives_the_way_through_a_snapshot() {
    let recording = recorded("through.capture", Made::new("train").tensors(3, 4, MIB, None));
    let [first, second] = ["through-1.pickle", "through-2.pickle"].map(|name| file(name).display().to_string());
    for (from, to) in [(&recording, &first), (&first, &second)] {
        printed(&["report", "--format", "torch", "-o", to, from]);
    }
    let peak = |file: &str| {
        let overview = overview(file);
        let device = overview["devices"][0]["peak_bytes"].clone();
        let peak = &overview["torch"]["devices"][0]["peak"];
        // Files are named from the folder that the program ran in, which a snapshot does not have.
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

/// The snapshot has no history, but one segment of a private pool, with one block at its beginning.
fn without_history(name: &str, segment_mib: u64, block_mib: u64) -> String {
    let text = |text: &str| [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let number = |number: u64| [b"J", &i32::try_from(number).unwrap().to_le_bytes()[..]].concat();
    let field = |name: &str, value: Vec<u8>| [text(name), value].concat();
    let dictionary = |fields: &[Vec<u8>]| [b"}(", &*fields.concat(), b"u"].concat();
    let bytes_field = |name, bytes| field(name, number(bytes));
    let sizes = [bytes_field("size", block_mib * MIB), bytes_field("requested_size", 5 * MIB)];
    let block = [sizes.concat(), field("state", text("active_allocated"))];
    let pool = [number(0), number(1), vec![0x86]].concat();
    let segment = [
        bytes_field("address", MIB),
        bytes_field("total_size", segment_mib * MIB),
        bytes_field("stream", 5),
        field("segment_pool_id", pool),
        field("blocks", [b"](", &*dictionary(&block), b"e"].concat()),
    ];
    let segments = field("segments", [b"](", &*dictionary(&segment), b"e"].concat());
    let traces = field("device_traces", b"](]e".to_vec());
    written(name, &[b"\x80\x04", &*dictionary(&[segments, traces]), b"."].concat())
}

#[test]
fn a_snapshot_without_a_history_is_one_moment() {
    let file = without_history("no-history.pickle", 20, 4);
    let text = printed(&["report", &file]);
    let why = "The snapshot has no history, only what was live when it was made: ";
    assert!(text.contains(why) && !text.contains("max_entries"), "{text}");
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
    assert!(contradictory.contains("contradicts itself on device 0: 20 MiB of the tensors lie in no segment"));
}

#[test]
fn the_pools_of_a_snapshot_are_known() {
    let torch = &json(&["report", "--at", "end", "--json", &data("snapshot-h200.pickle")])["torch"][0];
    let segments = torch["segments"].as_array().unwrap();
    assert!(segments.len() > 10 && segments.iter().all(|segment| segment["pool"] == 0), "{segments:?}");
    let reserved: u64 = segments.iter().filter_map(|segment| segment["bytes"].as_u64()).sum();
    assert_eq!(torch["reserved_bytes"], reserved);
}

/// The history of a snapshot often begins late. Its data is compared all the same.
#[test]
fn snapshots_are_compared_as_recordings_are() {
    let file = data("snapshot-4.pickle");
    let text = printed(&["diff", &file, &file, "--fail-on-increase", "1%"]);
    assert!(text.contains("The peak did not increase by more than 1 %"), "{text}");
    assert_eq!(text.matches("The first events of PyTorch are not in its snapshot").count(), 1, "{text}");
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
fn a_pickle_that_runs_code_is_refused() {
    let (pickle, ran_it) = (file("code.pickle"), file("code-ran"));
    _ = fs::remove_file(&ran_it);
    let command = format!("touch {}", ran_it.display());
    let length = u8::try_from(command.len()).expect("the path is short");
    fs::write(&pickle, [b"\x80\x04cos\nsystem\n\x8c", &[length][..], command.as_bytes(), b"\x85R."].concat()).unwrap();
    let refused = ran(&["report", pickle.to_str().unwrap()]);
    let said = "the opcode GLOBAL would run `os.system`. gpumem reads data only, and has run nothing; give a file that";
    assert!(refused.code == Some(2) && refused.stderr.contains(said), "{refused:?}");
    assert!(!Path::new(&ran_it).exists());
}
