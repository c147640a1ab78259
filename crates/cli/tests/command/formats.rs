//! Reads each file of `gpumem report --format` back, with the crate of its format if there is one. `tests/proof/formats.py` reads
//! the files with the tools that they are made for.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    io::Read,
    process::{Command, Output, Stdio},
    time::Duration,
};

use gpumem_core::model::{CallsiteId, Device, DriverGauge, EventKind, MemKind};
use gpumem_recording::TensorClass;
use parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::{Field, Row},
};
use serde_json::{Value, json};

use gpumem_core::testing::skipped;

use crate::{
    file, folder,
    golden::data,
    gpumem, linked, output_of, ran,
    recording_builder::{DEVICE, MIB, RecordingBuilder},
    report::{json, printed, recorded, training, written},
};

/// The numbers are the same as in the tests of reports.
const PEAK: u64 = 437 * MIB;
const CUBLAS: u64 = 32 * MIB;

fn bytes(format: &str, recording: &str) -> Vec<u8> {
    let output = gpumem(&["report", "--format", format, recording]).output().expect("the command starts");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{format}");
    output.stdout
}

/// Returns the sum of folded stacks.
fn sum(text: &str) -> u64 {
    text.lines().map(|line| line.rsplit_once(' ').expect("a stack, and bytes").1.parse::<u64>().unwrap()).sum()
}

#[test]
fn folded_stacks_add_up_to_the_peak() {
    let file = training("folded.capture");
    let text = printed(&["report", "--format", "folded", &file]);
    assert_eq!(sum(&text), PEAK, "{text}");
    let line = "train;step;train::main (src/main.rs:9);train::Adam::step (src/adam.rs:30) 209715200\n";
    assert!(text.contains(line), "{text}");
    assert_eq!(sum(&printed(&["report", "--format", "folded", "--at", "end", &file])), CUBLAS);
}

/// Memory of the host is not part of the device's peak.
#[test]
fn memory_of_the_host_stands_apart() {
    let mut made = RecordingBuilder::new("train");
    for (mib, kind) in [(32, MemKind::PinnedHost), (4, MemKind::Device)] {
        made.alloc(mib * MIB, kind, 1);
    }
    let file = recorded("folded-host.capture", made);
    let text = printed(&["report", "--format", "folded", &file]);
    let (host, device): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.starts_with("pinned host;"));
    assert_eq!([host, device].map(|lines| sum(&lines.join("\n"))), [32 * MIB, 4 * MIB], "{text}");
}

/// The recordings contain blocks that were freed in part, missed frees, and live memory of the host.
#[test]
fn the_blocks_of_a_table_add_up_to_the_peak() {
    for name in ["events.capture", "unfinished.capture", "snapshot-4.pickle"] {
        let (path, folder) = (data(name), folder("peak-sums"));
        printed(&["report", "--format", "parquet", "--output", folder.to_str().unwrap(), &path]);
        let blocks = rows(&folder.join(std::path::Path::new(name).with_extension("blocks.parquet")));
        for device in json(&["report", "--json", &path])["devices"].as_array().unwrap() {
            let ordinal = i32::try_from(device["device"].as_i64().unwrap()).unwrap();
            let of_device = blocks.iter().filter(|row| {
                *field(row, "device") == Field::Int(ordinal) && *field(row, "is_on_device") == Field::Bool(true)
            });
            let sum: i64 = of_device.map(|row| long(row, "bytes_at_peak").unwrap()).sum();
            assert_eq!(device["peak_bytes"], sum, "{name}");
        }
    }
}

/// Folding keeps all bytes, and works in each format with stacks.
#[test]
fn folded_functions_add_up_to_the_same() {
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt2.capture");
    for format in ["folded", "pprof"] {
        let written = file(&format!("fold.{format}"));
        let words = ["report", "--format", format, "-o", written.to_str().expect("the name is text"), recording];
        let [all, folded] = [&words[..], &[&words[..], &["--fold"]].concat()].map(|arguments| {
            assert_eq!(ran(arguments).code, Some(0), "{arguments:?}");
            let bytes = fs::read(&written).expect("it was written");
            let mut text = Vec::new();
            let is_plain = flate2::read::GzDecoder::new(&*bytes).read_to_end(&mut text).is_err();
            String::from_utf8_lossy(if is_plain { &bytes } else { &text }).into_owned()
        });
        for (text, has_wrappers) in [(&all, true), (&folded, false)] {
            assert!(text.contains("GPT2MLP.forward"), "{format}: {text}");
            assert_eq!(text.contains("Module._call_impl"), has_wrappers, "{format}: {text}");
        }
        if format == "folded" {
            assert_eq!(sum(&all), sum(&folded));
            let line = "GPT2MLP.forward (modeling_gpt2.py);NewGELUActivation.forward (activations.py) ";
            assert!(folded.contains(line), "{folded}");
        }
    }
    let rejected = ran(&["report", "--format", "json", "--fold", recording]);
    let why = "gpumem: --fold cannot be used with --format json: the format has no stacks to fold; leave --fold out\n";
    assert_eq!((rejected.code, rejected.stderr.as_str()), (Some(2), why));
}

#[test]
fn json_lines_have_each_event() {
    let text = printed(&["report", "--format", "json", &training("lines.capture")]);
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect();
    assert_eq!(events.len(), 81 + 80);
    let most = events.iter().map(|event| event["live_bytes"].as_u64().unwrap()).max();
    assert_eq!((most, &events.last().unwrap()["live_bytes"]), (Some(PEAK), &CUBLAS.into()));
    let sum: i64 = events.iter().map(|event| event["change_bytes"].as_i64().unwrap()).sum();
    assert_eq!(sum.unsigned_abs(), CUBLAS);
    assert!(events.is_sorted_by_key(|event| event["time_ns"].as_u64()));
}

/// A field of a message: a number, or bytes.
#[derive(Clone, Debug, PartialEq)]
enum Wire {
    Number(u64),
    Bytes(Vec<u8>),
}

/// The fields of a message of protocol buffers, without a schema. The field numbers in the tests come from the `.proto` files.
#[derive(Clone, Debug)]
pub(crate) struct Fields(Vec<(u64, Wire)>);

impl Fields {
    pub(crate) fn of(mut bytes: &[u8]) -> Self {
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let tag = varint(&mut bytes);
            let value = match tag & 7 {
                0 => Wire::Number(varint(&mut bytes)),
                2 => {
                    let length = usize::try_from(varint(&mut bytes)).unwrap();
                    let (field, rest) = bytes.split_at(length);
                    bytes = rest;
                    Wire::Bytes(field.to_vec())
                }
                other => panic!("wire type {other}"),
            };
            fields.push((tag >> 3, value));
        }
        Self(fields)
    }

    fn numbers(&self, field: u64) -> Vec<u64> {
        let all = self.0.iter().filter(|(number, _)| *number == field);
        all.flat_map(|(_, value)| match value {
            Wire::Number(number) => vec![*number],
            // The numbers of a list follow each other in one field.
            Wire::Bytes(bytes) => {
                let mut bytes = bytes.as_slice();
                std::iter::from_fn(|| (!bytes.is_empty()).then(|| varint(&mut bytes))).collect()
            }
        })
        .collect()
    }

    fn number(&self, field: u64) -> Option<u64> {
        self.numbers(field).first().copied()
    }

    pub(crate) fn bytes(&self, field: u64) -> Vec<&[u8]> {
        let all = self.0.iter().filter(|(number, _)| *number == field);
        all.map(|(_, value)| if let Wire::Bytes(bytes) = value { bytes.as_slice() } else { panic!("{value:?}") })
            .collect()
    }

    pub(crate) fn text(&self, field: u64) -> Option<String> {
        self.bytes(field).first().map(|bytes| String::from_utf8(bytes.to_vec()).expect("it is text"))
    }

    pub(crate) fn messages(&self, field: u64) -> Vec<Self> {
        self.bytes(field).into_iter().map(Self::of).collect()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().expect("the number ends");
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            break;
        }
    }
    number
}

#[test]
fn pprof_has_what_is_live_and_what_was_allocated() {
    let mut plain = Vec::new();
    let compressed = bytes("pprof", &training("pprof.capture"));
    flate2::read::GzDecoder::new(compressed.as_slice()).read_to_end(&mut plain).expect("it is compressed");
    let profile = Fields::of(&plain);
    let texts: Vec<_> = profile.bytes(6).into_iter().map(|text| String::from_utf8(text.to_vec()).unwrap()).collect();
    let text = |number: u64| texts[usize::try_from(number).unwrap()].as_str();
    assert_eq!(texts[0], "");
    let types: Vec<_> =
        profile.messages(1).iter().map(|of| (text(of.number(1).unwrap()), text(of.number(2).unwrap()))).collect();
    assert_eq!(
        types,
        [("inuse_objects", "count"), ("inuse_space", "bytes"), ("alloc_objects", "count"), ("alloc_space", "bytes")]
    );
    assert_eq!(text(profile.number(14).unwrap()), "inuse_space");
    let samples = profile.messages(2);
    let sum = |at: usize| samples.iter().map(|sample| sample.numbers(2)[at]).sum::<u64>();
    assert_eq!([sum(1), sum(2), sum(3)], [PEAK, 81, 782 * MIB]);
    // Functions and locations have ids.
    let functions: BTreeMap<u64, (String, String)> = profile
        .messages(5)
        .iter()
        .map(|of| {
            (
                of.number(1).unwrap(),
                (text(of.number(2).unwrap()).to_owned(), text(of.number(4).unwrap_or(0)).to_owned()),
            )
        })
        .collect();
    let locations: BTreeMap<u64, (String, u64)> = profile
        .messages(4)
        .iter()
        .map(|of| {
            let line = &of.messages(4)[0];
            (of.number(1).unwrap(), (functions[&line.number(1).unwrap()].0.clone(), line.number(2).unwrap_or(0)))
        })
        .collect();
    let stacks: BTreeSet<Vec<_>> =
        samples.iter().map(|sample| sample.numbers(1).iter().map(|at| locations[at].clone()).collect()).collect();
    let frame = |name: &str, line| (name.to_owned(), line);
    assert!(
        stacks.contains(&vec![
            frame("train::Adam::step", 30),
            frame("train::main", 9),
            frame("step", 0),
            frame("train", 0)
        ]),
        "the innermost first: {stacks:?}"
    );
}

/// Returns the events of a trace of this type.
fn events_of(trace: &[u8], kind: u64) -> Vec<Fields> {
    let packets = Fields::of(trace).messages(1);
    packets.iter().flat_map(|packet| packet.messages(11)).filter(|event| event.number(9) == Some(kind)).collect()
}

/// Returns the values of all counters of a trace.
pub(crate) fn counters(trace: &[u8]) -> Vec<i64> {
    events_of(trace, 4).iter().map(|event| event.number(30).expect("it has a value").cast_signed()).collect()
}

/// Returns the names of the marks in a trace.
pub(crate) fn instants(trace: &[u8]) -> Vec<String> {
    events_of(trace, 3).iter().map(|event| event.text(23).expect("it has a name")).collect()
}

#[test]
fn perfetto_has_counters_and_slices() {
    let trace = Fields::of(&bytes("perfetto", &training("perfetto.capture")));
    let packets = trace.messages(1);
    assert!(packets.iter().all(|packet| packet.number(10) == Some(4711)), "each packet has its sequence");
    let mut tracks = BTreeMap::new();
    for track in packets.iter().flat_map(|packet| packet.messages(60)) {
        let thread = track.messages(4).first().and_then(|thread| thread.text(5));
        tracks.insert(track.number(1).unwrap(), track.text(2).or(thread).unwrap_or_default());
    }
    let names: BTreeSet<_> = tracks.values().map(String::as_str).collect();
    assert_eq!(
        names,
        BTreeSet::from(["", "device 0: in use", "device 0: device", "device 0: pool", "device 0: vmm", "main"])
    );
    let mut most: BTreeMap<&str, u64> = BTreeMap::new();
    let mut open: Vec<String> = Vec::new();
    let mut slices: BTreeMap<String, u32> = BTreeMap::new();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for packet in &packets {
        let Some(event) = packet.messages(11).pop() else { continue };
        let (time, on) = (packet.number(8).unwrap(), event.number(11).unwrap());
        assert!(last.insert(on, time).is_none_or(|last| last <= time), "time does not go back on a track");
        match event.number(9) {
            Some(4) => {
                let most = most.entry(&tracks[&on]).or_default();
                *most = (*most).max(event.number(30).unwrap());
            }
            Some(1) => {
                *slices.entry(event.text(23).unwrap()).or_default() += 1;
                open.push(event.text(23).unwrap());
            }
            Some(2) => assert!(open.pop().is_some()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((most["device 0: in use"], most["device 0: vmm"]), (PEAK, 200 * MIB));
    assert!(open.is_empty(), "{open:?}");
    let expected = [("backward", 3), ("forward", 3), ("load", 1), ("step", 3), ("train", 1)];
    assert_eq!(slices, expected.map(|(name, count)| (name.to_owned(), count)).into());
}

/// Returns the value in a pickle, as Python reads it. `None` if there is no Python.
pub(crate) fn unpickled(file: &std::path::Path) -> Option<Value> {
    let script = "import json, pickle, sys; json.dump(pickle.load(open(sys.argv[1], 'rb')), sys.stdout)";
    let output = output_of("python3", &[OsStr::new("-c"), script.as_ref(), file.as_ref()])?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("Python writes JSON"))
}

#[test]
fn torch_reads_the_snapshot() {
    let mut made = RecordingBuilder::new("train").training(3, 100, 10 * MIB);
    // These sizes need numbers of all lengths in the pickle.
    for bytes in [1, 255, 256, 65_536, (1 << 31) - 1, 1 << 31, 1 << 40] {
        made.alloc(bytes, MemKind::Pool, 1);
    }
    let pickle = bytes("torch", &recorded("torch.capture", made));
    let file = file("snapshot.pickle");
    fs::write(&file, &pickle).unwrap();
    let Some(snapshot) = unpickled(&file) else { return };
    let segments = snapshot["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 1 + 7);
    for segment in segments {
        let blocks = segment["blocks"].as_array().unwrap();
        let sum: u64 = blocks.iter().map(|block| block["size"].as_u64().unwrap()).sum();
        assert_eq!(segment["total_size"], sum, "the blocks of a segment add up to it");
        assert!(blocks.iter().all(|block| block["state"] == "active_allocated"));
    }
    assert_eq!(segments.last().unwrap()["total_size"], 1_u64 << 40);
    let trace = snapshot["device_traces"][0].as_array().unwrap();
    let (mut live, mut most) = (0, 0);
    for (at, event) in trace.iter().enumerate() {
        let size = event["size"].as_u64().unwrap();
        match event["action"].as_str().unwrap() {
            "alloc" => live += size,
            "free_completed" => live -= size,
            "segment_alloc" | "segment_free" | "free_requested" => {}
            other => panic!("{other}"),
        }
        // The last events belong to the blocks with sizes of all lengths.
        if at < trace.len() - 14 {
            most = most.max(live);
        }
        let frame = &event["frames"][0];
        assert!(frame["name"].is_string() && frame["filename"].is_string() && frame["line"].is_u64(), "{frame}");
    }
    assert_eq!(most, (PEAK - CUBLAS - 5 * MIB) * 10 + CUBLAS + 5 * MIB);
    let events = 100 + 1 + 3 * 200 + 100;
    assert_eq!(trace.len(), 2 * (events + 7) + 3 * (events - 1));
    // Each frame is written only once.
    assert!(pickle.len() < 70 * trace.len(), "{} bytes for {} events", pickle.len(), trace.len());
}

pub(crate) fn rows(file: &std::path::Path) -> Vec<Row> {
    let reader = SerializedFileReader::new(File::open(file).expect("the file is there")).expect("it is a table");
    reader.get_row_iter(None).expect("it has rows").map(|row| row.expect("it is readable")).collect()
}

pub(crate) fn field<'a>(row: &'a Row, name: &str) -> &'a Field {
    row.get_column_iter().find(|(column, _)| *column == name).map(|(_, field)| field).expect("the column is there")
}

fn long(row: &Row, name: &str) -> Option<i64> {
    match field(row, name) {
        Field::Long(number) => Some(*number),
        Field::Null => None,
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn the_tables_have_events_and_blocks() {
    let folder = folder("tables");
    let out = folder.to_str().unwrap();
    let [first, second] = ["fleet-0.capture", "fleet-1.capture"].map(training);
    assert_eq!(printed(&["report", "--format", "parquet", "--output", out, &first, &second]), "");
    for name in ["fleet-0", "fleet-1"] {
        let events = rows(&folder.join(format!("{name}.events.parquet")));
        assert_eq!(events.len(), 161);
        let live = events.iter().map(|row| long(row, "live_bytes").unwrap()).max();
        assert_eq!(live.map(i64::unsigned_abs), Some(PEAK));
        assert!(events.iter().all(|row| *field(row, "recording") == Field::Str(name.to_owned())));
        let blocks = rows(&folder.join(format!("{name}.blocks.parquet")));
        assert_eq!(blocks.len(), 81);
        let sum: i64 = blocks.iter().map(|row| long(row, "bytes_at_peak").unwrap()).sum();
        assert_eq!(sum.unsigned_abs(), PEAK);
        let live: Vec<_> = blocks.iter().filter(|row| long(row, "freed_ns").is_none()).collect();
        assert_eq!(live.len(), 1);
        assert_eq!(*field(live[0], "library"), Field::Str("cuBLAS".to_owned()));
        assert_eq!(*field(live[0], "line"), Field::Null);
    }
    // A recording without allocations has tables without rows.
    let empty = recorded("no-events.capture", RecordingBuilder::new("train"));
    printed(&["report", "--format", "parquet", "--output", out, &empty]);
    assert_eq!(rows(&folder.join("no-events.blocks.parquet")).len(), 0);
    // The tables of another recording are not overwritten.
    let copy = crate::folder("copies").join("fleet-0.capture");
    fs::copy(&first, &copy).unwrap();
    let ran = ran(&["report", "--format", "parquet", "--output", out, &first, copy.to_str().unwrap()]);
    assert!(ran.code == Some(2) && ran.stderr.contains("another recording has the same name"), "{ran:?}");
}

/// Returns the output of a script of `python3` with `DuckDB`, which is installed once, next to the tests. If it cannot be
/// installed, prints a line and returns `None`.
fn duckdb(script: &str) -> Option<Output> {
    const PACKAGE: &str = "duckdb==2.0.0";
    let packages = file(PACKAGE);
    let path = packages.to_str().unwrap();
    if !packages.exists() {
        let installed = output_of("python3", &["-m", "pip", "install", "--quiet", "--target", path, PACKAGE])?;
        if !installed.status.success() {
            _ = fs::remove_dir_all(&packages);
            skipped(format_args!("no DuckDB: {}", String::from_utf8_lossy(&installed.stderr).trim_end()));
            return None;
        }
    }
    let python = Command::new("python3").args(["-c", script]).env("PYTHONPATH", path).current_dir(file("")).output();
    Some(python.expect("it was there before"))
}

/// The query in the book finds the rank with the highest peak, and the place that makes the difference.
#[test]
fn the_query_of_the_book_finds_the_rank_that_differs() {
    let [runs, folder] = ["runs-of-a-fleet", "fleet"].map(folder);
    for rank in 0..20 {
        fs::write(runs.join(format!("rank-{rank}.capture")), RecordingBuilder::of_rank(rank).file()).unwrap();
    }
    let [runs, folder] = [&runs, &folder].map(|path| path.to_str().unwrap());
    assert_eq!(printed(&["report", "--format", "parquet", "--output", folder, runs]), "");
    let page = fs::read_to_string(linked("command.md")).expect("the page is there");
    let query = page.split("```sql\n").nth(1).and_then(|rest| rest.split("```").next()).expect("it has a query");
    let script = format!("import duckdb, json; print(json.dumps(duckdb.sql({query:?}).fetchall()))");
    let Some(output) = duckdb(&script) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Vec<Vec<Value>> = serde_json::from_slice(&output.stdout).expect("it is JSON");
    assert_eq!(rows.len(), 10);
    let report = |rank: &str| {
        let file = format!("{runs}/rank-{rank}.capture");
        serde_json::from_str::<Value>(&printed(&["report", "--json", &file])).unwrap()
    };
    let [highest, second] = [&rows[0], &rows[1]];
    assert_eq!(highest[..3], [json!(17), json!("node-1"), json!(0)]);
    assert_eq!(highest[3], report("17")["devices"][0]["peak_bytes"]);
    assert_eq!(highest[4], json!("block_3.py:30"));
    let [bytes, median] = [&highest[5], &highest[6]].map(|bytes| bytes.as_f64().unwrap());
    assert!((5.9..6.1).contains(&((bytes - median) / f64::from(1 << 30))), "{highest:?}");
    assert_eq!(second[3], report(&second[0].to_string())["devices"][0]["peak_bytes"]);
}

/// The table of tensors has the same peak of tensors as the summary. The other tables have only the driver's blocks.
#[test]
fn the_table_of_tensors_has_the_peak_of_the_summary() {
    let folder = folder("tables-of-tensors");
    let out = folder.to_str().unwrap();
    let known_from = Some(Duration::from_micros(60));
    let mut made = RecordingBuilder::new("train").tensors(3, 10, 10 * MIB, known_from);
    // This tensor is allocated after the peak.
    made.tensor(1, "Net.fc: Linear", TensorClass::Gradients, [512, 512]);
    let file = recorded("tensor-rows.capture", made);
    assert_eq!(printed(&["report", "--format", "parquet", "--output", out, &file]), "");
    let path = folder.join("tensor-rows.tensors.parquet");
    let tensors = rows(&path);
    // There are weights, two tensors in each layer of each step, and the one whose module is known.
    assert_eq!(tensors.len(), 10 + 3 * 20 + 1);
    let known: Vec<_> = tensors.iter().filter(|row| *field(row, "module") != Field::Null).collect();
    assert_eq!((known.len(), long(known[0], "bytes")), (1, Some(512)));
    assert_eq!(*field(known[0], "module"), Field::Str("Net.fc: Linear".to_owned()));
    assert_eq!(*field(known[0], "class"), Field::Str("gradients".to_owned()));
    let at_peak = tensors.iter().filter(|row| long(row, "bytes_at_peak") != Some(0));
    let (bytes, requested): (Vec<_>, Vec<_>) =
        at_peak.map(|row| (long(row, "bytes_at_peak").unwrap(), long(row, "requested_bytes").unwrap())).unzip();
    let sums = [bytes, requested].map(|all| all.into_iter().sum::<i64>().unsigned_abs());
    assert_eq!(sums, [205 * MIB; 2]);
    // The allocation time of tensors that are older than the history is not known.
    let older: Vec<_> = tensors.iter().filter(|row| long(row, "allocated_ns").is_none()).collect();
    assert_eq!(older.len(), 10);
    assert!(older.iter().all(|row| long(row, "freed_ns").is_none()), "the weights stay");
    assert_eq!(*field(older[0], "place"), Field::Str("src/model.rs:12".to_owned()));
    let without_line = tensors.iter().filter(|row| *field(row, "line") == Field::Null);
    let words = Field::Str("no line of Python (such as in the backward pass)".to_owned());
    assert_eq!(without_line.filter(|row| *field(row, "place") == words).count(), 30 + 1);
    assert_eq!(rows(&folder.join("tensor-rows.blocks.parquet")).len(), 2);
    assert_eq!(rows(&folder.join("tensor-rows.events.parquet")).len(), 3);
    // If a later recording with the same name has no tensors, the old table of tensors is removed.
    recorded("tensor-rows.capture", RecordingBuilder::new("train").training(1, 2, MIB));
    printed(&["report", "--format", "parquet", "--output", out, &file]);
    assert!(!path.exists());
}

#[test]
fn perfetto_has_marks() {
    let mut made = RecordingBuilder::new("train");
    made.event(EventKind::Mark { callsite: CallsiteId(3) });
    made.on_thread(9);
    made.event(EventKind::Mark { callsite: CallsiteId(99) });
    let trace = Fields::of(&bytes("perfetto", &recorded("marks.capture", made)));
    let events = trace.messages(1).into_iter().flat_map(|packet| packet.messages(11));
    let marks: Vec<_> = events.filter(|event| event.number(9) == Some(3)).map(|event| event.text(23)).collect();
    assert_eq!(marks[0].as_deref(), Some("train"));
    assert_eq!(marks.len(), 2, "an unknown name is not an error: {marks:?}");
}

/// The last sizes are those at the end. The tables of allocations have no row of the driver.
#[test]
fn the_drivers_memory_has_a_table() {
    let folder = folder("driver-tables");
    let out = folder.to_str().unwrap();
    let file = recorded("driver-table.capture", RecordingBuilder::new("train").with_driver_memory(DriverGauge::AtMost));
    printed(&["report", "--format", "parquet", "--output", out, &file]);
    let path = folder.join("driver-table.driver.parquet");
    let mut last = BTreeMap::new();
    for row in rows(&path) {
        assert_eq!(*field(&row, "is_at_most"), Field::Bool(true));
        last.insert(field(&row, "kind").to_string(), long(&row, "bytes").unwrap().unsigned_abs());
    }
    assert_eq!(last.values().sum::<u64>(), (1 + 526 + 140 + 3072 + 100 + 32) * MIB, "{last:?}");
    assert_eq!(rows(&folder.join("driver-table.blocks.parquet")).len(), 3);
    // The table of an earlier recording of this name does not stay.
    fs::copy(training("driver-table-none.capture"), &file).unwrap();
    printed(&["report", "--format", "parquet", "--output", out, &file]);
    assert!(!path.exists());
}

#[test]
fn perfetto_has_counters_of_the_drivers_memory() {
    let made = RecordingBuilder::new("train").with_driver_memory(DriverGauge::Process);
    let trace = Fields::of(&bytes("perfetto", &recorded("perfetto-driver.capture", made)));
    let packets = trace.messages(1);
    let mut names = BTreeMap::new();
    for track in packets.iter().flat_map(|packet| packet.messages(60)) {
        names.insert(track.number(1).unwrap(), track.text(2).unwrap_or_default());
    }
    let mut last: BTreeMap<String, u64> = BTreeMap::new();
    for packet in &packets {
        let Some(event) = packet.messages(11).pop() else { continue };
        last.insert(names[&event.number(11).unwrap()].clone(), event.number(30).unwrap() / MIB);
    }
    let expected = [
        ("context", 526),
        ("device", 63),
        ("executable graphs", 100),
        ("in use", 79),
        ("local memory", 3072),
        ("modules", 140),
        ("pool", 16),
        ("rest of 2 MiB pages", 1),
        ("the process", 3950),
        ("unused in pools", 32),
    ];
    let expected = expected.map(|(name, mib)| (format!("device 0: {name}"), mib));
    assert_eq!(last, BTreeMap::from(expected));
}

#[test]
fn perfetto_has_counters_of_tensors() {
    let most_and_end = |from| {
        let made = RecordingBuilder::new("train").tensors(3, 10, 10 * MIB, from);
        let trace = Fields::of(&bytes("perfetto", &recorded("perfetto-tensors.capture", made)));
        let packets = trace.messages(1);
        let mut names = BTreeMap::new();
        for track in packets.iter().flat_map(|packet| packet.messages(60)) {
            names.insert(track.number(1).unwrap(), track.text(2).unwrap_or_default());
        }
        let mut values: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
        for packet in &packets {
            let Some(event) = packet.messages(11).pop() else { continue };
            let value = (packet.number(8).unwrap(), event.number(30).unwrap());
            values.entry(names[&event.number(11).unwrap()].clone()).or_default().push(value);
        }
        ["device 0: PyTorch tensors", "device 0: PyTorch segments", "device 0: device"].map(|name| {
            let values = &values[name];
            (values[0].0, values.iter().map(|(_, bytes)| *bytes).max().unwrap() / MIB, values.last().unwrap().1 / MIB)
        })
    };
    assert_eq!(most_and_end(None), [(42_000, 205, 100), (21_000, 300, 100), (21_000, 300, 100)]);
    // The counter has no value before the history starts.
    let [tensors, segments, _] = most_and_end(Some(Duration::from_micros(60)));
    assert_eq!([(tensors.1, tensors.2), (segments.1, segments.2)], [(205, 100), (300, 100)]);
    assert!(tensors.0 > 60_000 && segments.0 == tensors.0, "{tensors:?} {segments:?}");
}

/// The picture shows the memory of each place at the peak, even if the peak was short, and the time that is not known.
#[test]
fn pictures_show_the_peak() {
    let second = Device { ordinal: 1, ..DEVICE };
    let mut many = RecordingBuilder::new("train");
    let places: Vec<_> = (1..=10).map(|line| many.stack(&[(0, "f", "/home/ada/train/many.py", line)]).0 - 1).collect();
    for place in &places {
        let key = many.alloc(u64::from(place - places[0] + 1) * MIB, MemKind::Device, *place);
        many.wait(1_000_000);
        if *place == places[9] {
            many.free(key);
        }
    }
    let mut short = RecordingBuilder::new("train");
    short.device(second, "NVIDIA H200");
    short.alloc(512 * MIB, MemKind::Device, 0);
    for second_size in [1000, 1024] {
        short.wait(500_000);
        let key = short.alloc_on(second, second_size * MIB, MemKind::Pool, 2);
        short.free(key);
    }
    short.wait(1_000_000);
    let mut rejected = RecordingBuilder::new("train");
    rejected.alloc(64 * MIB, MemKind::Device, 1);
    rejected.rejected(2 << 30, MemKind::Device, 2);
    rejected.wait(1000);
    rejected.rejected(3 << 30, MemKind::Device, 2);
    let tensors = |from| RecordingBuilder::new("train").tensors(3, 10, 10 * MIB, from);
    // The highest value is here.
    let top = "V68.5";
    for (made, expected, others) in [
        (
            RecordingBuilder::new("train").training(3, 10, 10 * MIB),
            &[">437 MiB at the peak; src/adam.rs:30 held 200 MiB<", top, ">128 MiB<", ">cuBLAS<", ">32 MiB<"][..],
            &["other places", "reject", "the driver's blocks"][..],
        ),
        (
            many,
            &[
                ">55 MiB at the peak; many.py:10 held 10 MiB<",
                top,
                ">many.py:3<",
                ">other places<",
                ">3 MiB<",
                ">10 s<",
            ],
            &[">many.py:2<"],
        ),
        (
            short,
            &[">1 GiB at the peak; src/model.rs:77 held 1 GiB<", top, ">device 1 (NVIDIA H200), of 2 devices; train "],
            &["512 MiB held", "src/model.rs:12"],
        ),
        (
            rejected,
            &[top, ">2 rejected, the largest<", ">3 GiB<", "M66.5 62V232", "M495.5 62V232", ">64 MiB after 1 µs<"],
            &["not known"],
        ),
        (
            tensors(None),
            &[
                ">PyTorch's tensors: 205 MiB at the peak; ",
                ">the driver's blocks, at most<",
                ">300 MiB<",
                "V120.3H168V",
                "V68.5H496\"",
            ],
            &["other places", "reject"],
        ),
        (
            tensors(Some(Duration::from_micros(60))),
            &["PyTorch's tensors: 205 MiB", "fill=\"#eef1f4\" d=\"M66 232V62H", ">Tensors on device 0 are known from "],
            &[],
        ),
        (RecordingBuilder::new("train"), &[">Nothing was allocated<"], &["<path", "at the peak"]),
    ] {
        let picture = String::from_utf8(bytes("svg", &recorded("picture.capture", made))).expect("it is text");
        assert!(picture.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"820\""), "{picture}");
        for part in expected {
            assert!(picture.contains(part), "{part}: {picture}");
        }
        for part in others.iter().chain(&["<script", "<style", "href", "url(", "<image"]) {
            assert!(!picture.contains(part), "{part}: {picture}");
        }
        assert!(picture.len() < 50_000, "it is small: {picture}");
    }
}

#[test]
fn what_cannot_be_written_is_said_in_one_line() {
    let recording = training("refused.capture");
    for (arguments, why) in [
        (
            &["--format", "parquet"][..],
            "--format parquet cannot be written: it consists of several files; pass --output FOLDER",
        ),
        (&["--format", "torch", "--at", "end"], "--at cannot be used with --format torch: the format has all moments"),
        (&["--format", "svg", "--at", "end"], "--at cannot be used with --format svg: the format has all moments"),
        (&["--format", "svg", "--fold"], "--fold cannot be used with --format svg: the format has no stacks to fold"),
        (&["--format", "folded", "--output", "/no/such/folder/x"], "`/no/such/folder/x` cannot be written: "),
        (&["--format", "parquet", "--output", "/dev/null/x"], "the tables cannot be written to `/dev/null/x`: "),
        (&["--format", "folded", &recording], "--format folded cannot be written: it is for one recording"),
    ] {
        let ran = ran(&[&["report"][..], arguments, &[&recording]].concat());
        assert_eq!((ran.code, ran.stderr.lines().count()), (Some(2), 1), "{ran:?}");
        assert!(ran.stderr.starts_with(&format!("gpumem: {why}")), "{ran:?}");
    }
    assert_eq!(ran(&["report", "--format", "xml", &recording]).code, Some(2));
    assert_eq!(ran(&["report", "--output", "x", &recording]).code, Some(2), "--output needs --format");
}

#[test]
fn a_file_gets_its_name_when_all_of_it_is_written() {
    let recording = training("named.capture");
    let out = file("named.folded");
    fs::write(&out, "before").unwrap();
    let path = out.to_str().unwrap();
    printed(&["report", "--format", "folded", "-o", path, &recording]);
    assert!(fs::read_to_string(&out).unwrap().contains("train::Adam::step"));
    // A path that is not a regular file is written in place.
    assert_eq!(
        printed(&["report", "--format", "folded", "-o", "/dev/stdout", &recording]),
        fs::read_to_string(&out).unwrap()
    );
    let cut = written("named-cut.capture", &fs::read(&recording).unwrap()[..800]);
    let ran = ran(&["report", "--format", "folded", &cut]);
    assert!(ran.code == Some(2) && ran.stderr.contains("has no end"), "{ran:?}");
}

#[test]
fn all_formats_stop_when_nobody_reads() {
    let recording = training("closed.capture");
    let formats = ["folded", "json", "pprof", "perfetto", "torch", "svg"].map(|format| format!("--format={format}"));
    for option in ["--json"].into_iter().chain(formats.iter().map(String::as_str)) {
        let mut child = gpumem(&["report", option, &recording])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{option}");
    }
}
