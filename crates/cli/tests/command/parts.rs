//! Tests recordings of `--only-peak` and `--max-size`. A value that they lack is `?`, `null` or missing in each report and
//! format, and never 0.

use std::fs;

use gpumem_core::model::MemKind;
use gpumem_recording::{Item, Part, Writer, items_of};
use parquet::record::Field;
use serde_json::{Value, json};

use crate::{
    file,
    formats::{counters, field, instants, rows},
    page::computed,
    ran,
    recording_builder::{MIB, RecordingBuilder},
    report::{json, printed, written},
};

/// The program has 500 MiB live from 100 to 400 ms. At its peak after 600 ms it has 800 MiB, in addition to 64 MiB of pinned host
/// memory. From 800 to 900 ms it has 210 MiB, and 10 MiB at the end, after a second.
fn program() -> RecordingBuilder {
    let mut made = RecordingBuilder::new("train");
    let alloc = |made: &mut RecordingBuilder, millis: u64, bytes, kind, place| {
        made.wait_until(millis * 1000);
        made.alloc(bytes * MIB, kind, place)
    };
    let early = alloc(&mut made, 100, 500, MemKind::Pool, 0);
    made.wait_until(400_000);
    made.free(early);
    let host = alloc(&mut made, 500, 64, MemKind::PinnedHost, 1);
    let peak = [alloc(&mut made, 599, 790, MemKind::Pool, 2), alloc(&mut made, 600, 10, MemKind::Device, 3)];
    made.wait_until(700_000);
    made.free(peak[0]);
    made.free(host);
    let between = alloc(&mut made, 800, 200, MemKind::Pool, 4);
    made.wait_until(900_000);
    made.free(between);
    made.wait_until(1_000_000);
    made
}

/// Returns a partial recording: the blocks that were live after `after` events, or at the peaks, and then the other events.
fn part_of(made: RecordingBuilder, mut part: Part, after: usize) -> Vec<u8> {
    let (items, _) = items_of(&*made.file()).expect("it is a recording");
    let (events, others): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| matches!(item, Item::Event(_)));
    for item in events.iter().take(after) {
        let Item::Event(event) = item else { unreachable!("they are events") };
        part.apply(event);
    }
    let mut writer = Writer::new(Vec::new()).expect("memory takes all");
    let kept = part.items();
    let all =
        others.into_iter().chain([Item::Part(part.definition())]).chain(kept).chain(events.into_iter().skip(after));
    all.for_each(|item| writer.write(&item).expect("memory takes all"));
    writer.finish().expect("memory takes all")
}

/// Returns the recording of the peak.
fn peaks(name: &str) -> String {
    written(name, &part_of(program(), Part::peaks(), usize::MAX))
}

/// Returns the recording of the latest events, from 500 ms on.
fn latest(name: &str) -> String {
    written(name, &part_of(program(), Part::latest(), 2))
}

#[test]
fn the_summary_of_peaks_has_no_totals() {
    let file = peaks("peaks-summary.capture");
    let text = printed(&["report", &file]);
    for words in [": ? allocations\n", ", ? frees\n", "the peak was 800 MiB", "besides  ? (", "10 MiB"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let all = json(&["report", "--json", &file]);
    assert_eq!([&all["allocations"], &all["frees"], &all["not_freed"]["gone_with_context"]], [&Value::Null; 3]);
    let device = &all["devices"][0];
    assert_eq!(device["peak_bytes"], 800 * MIB);
    assert_eq!([&device["besides"], &device["pinned_by_pytorch"]], [&Value::Null; 2]);
    assert_eq!((&device["live_at_end_bytes"], &all["not_freed"]["bytes"]), (&json!(10 * MIB), &json!(10 * MIB)));
    // A recording of all events has the totals.
    let whole = written("peaks-whole.capture", &program().file());
    let all = json(&["report", "--json", &whole]);
    assert_eq!((&all["allocations"], &all["frees"]), (&json!(5), &json!(4)));
    assert_eq!(all["devices"][0]["besides"], json!([{ "name": "pinned host", "bytes": 64 * MIB, "blocks": 1 }]));
}

#[test]
fn other_moments_are_not_known() {
    let (peaks, latest) = (peaks("peaks-at.capture"), latest("newest-at.capture"));
    for (file, moment, bytes) in [
        (&peaks, "250ms", None),
        (&peaks, "850ms", None),
        (&peaks, "start", Some(0)),
        (&peaks, "peak", Some(800)),
        (&peaks, "end", Some(10)),
        (&peaks, "2s", Some(10)),
        (&latest, "250ms", None),
        (&latest, "650ms", Some(800)),
        (&latest, "850ms", Some(210)),
        (&latest, "end", Some(10)),
    ] {
        let text = printed(&["report", "--at", moment, file]);
        let words = bytes.map_or("? in use at ".to_owned(), |bytes| {
            if bytes == 0 { "0 B in use at ".to_owned() } else { format!("{bytes} MiB in use at ") }
        });
        assert!(text.contains(&words), "{file} {moment}: {text}");
        let device = &json(&["report", "--json", "--at", moment, file])["devices"][0];
        assert_eq!(device["bytes"], bytes.map_or(Value::Null, |bytes| json!(bytes * MIB)), "{file} {moment}");
        for list in ["blocks", "by_kind", "by_library", "by_scope", "by_place"] {
            assert_eq!(device[list].is_null(), bytes.is_none(), "{file} {moment} {list}");
        }
    }
    let text = printed(&["report", "--between", "250ms", "peak", &peaks]);
    assert!(text.contains(": ? more between 250 ms and the peak"), "{text}");
    let text = printed(&["report", "--between", "peak", "end", &peaks]);
    assert!(text.contains(": -790 MiB (less) between the peak"), "{text}");
}

/// A peak counts only the memory of the device. Therefore a recording of the peaks does not contain pinned host memory at that time.
#[test]
fn pinned_memory_at_a_peak_is_not_known() {
    let (peaks, whole) = (peaks("peaks-pinned.capture"), written("whole-pinned.capture", &program().file()));
    let pinned = json!([{ "name": "pinned host", "bytes": 64 * MIB, "blocks": 1 }]);
    for (file, view, besides) in [
        (&peaks, &["--at", "peak"][..], Value::Null),
        (&peaks, &["--between", "peak", "end"], Value::Null),
        (&peaks, &["--at", "end"], json!([])),
        (&whole, &["--at", "peak"], pinned),
        (&whole, &["--at", "end"], json!([])),
    ] {
        let device = &json(&[&["report", "--json"], view, &[&**file]].concat())["devices"][0];
        assert_eq!(device["besides"], besides, "{file} {view:?}");
        assert_eq!(device["besides_by_place"].is_null(), besides.is_null(), "{file} {view:?}");
        let text = printed(&[&["report"], view, &[&**file]].concat());
        let words = "\nbesides  ? (managed and pinned host memory at the peak is not in the recording)\n";
        assert_eq!(text.contains(words), besides.is_null(), "{file} {view:?}: {text}");
    }
}

#[test]
fn tables_have_no_totals() {
    let file = peaks("peaks-table.capture");
    let text = printed(&["report", "--table", &file]);
    assert!(text.lines().any(|line| line.contains("790") && line.matches(" ?").count() == 2), "{text}");
    let all = json(&["report", "--json", "--table", &file]);
    let place = &all["places"][0];
    assert_eq!((&place["at_peak_bytes"], &place["live_at_end_bytes"]), (&json!(790 * MIB), &json!(0)));
    assert_eq!((&place["allocated_bytes"], &place["allocations"]), (&Value::Null, &Value::Null));
    assert!(printed(&["report", "--tree", &file]).starts_with("scopes are not in the recording (--only-peak)"));
    assert_eq!(json(&["report", "--json", "--tree", &file])["scopes"], Value::Null);
    assert!(printed(&["report", "--calls", &file]).contains("the peak was 800 MiB"));
    assert!(printed(&["report", "--leaks", &file]).contains("10 MiB"));
    let whole = written("peaks-diff.capture", &program().file());
    assert!(printed(&["diff", &whole, &file, "--fail-on-increase", "0%"]).contains("no change"));
    assert!(printed(&["report", &whole, &file]).contains("800"), "side by side");
}

#[test]
fn formats_have_what_is_known() {
    let (peaks, latest) = (peaks("peaks-formats.capture"), latest("newest-formats.capture"));
    let live = |file: &str| -> Vec<Value> {
        let lines = printed(&["report", "--format", "json", file]);
        lines
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("it is JSON")["live_bytes"].clone())
            .collect()
    };
    assert_eq!(live(&peaks), [Value::Null, json!(800 * MIB), Value::Null]);
    let expected = [0, 790, 800, 10, 10, 210, 10].map(|bytes| json!(bytes * MIB));
    assert_eq!(live(&latest), expected);
    // Perfetto gets no counter where it would be wrong.
    let out = file("peaks.pftrace").into_os_string().into_string().unwrap();
    let perfetto = |recording: &str| {
        printed(&["report", "--format", "perfetto", "-o", &out, recording]);
        fs::read(&out).expect("it was written")
    };
    let bytes = perfetto(&peaks);
    assert_eq!(counters(&bytes), Vec::<i64>::new());
    assert_eq!(instants(&bytes), ["device 0: the peak was 800 MiB"]);
    assert!(counters(&perfetto(&latest)).contains(&(800 * MIB).cast_signed()));
    for format in ["folded", "pprof"] {
        let of = |moment| ran_to(format, &["--at", moment], &peaks);
        assert!(
            of("250ms")
                .is_some_and(|error| error.contains("the blocks that were live at 250 ms are not in the recording"))
        );
        assert_eq!((of("peak"), of("end")), (None, None), "{format}");
    }
    let stacks = printed(&["report", "--format", "folded", &peaks]);
    let sum: u64 = stacks.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
    assert_eq!(sum, 800 * MIB, "{stacks}");
    assert_eq!(ran_to("torch", &[], &peaks), None);
    // A picture has the peak and the end, and grey columns around them.
    let picture = printed(&["report", "--format", "svg", &peaks]);
    for part in [">800 MiB at the peak", "V68.5", "fill=\"#eef1f4\" d=\"M66 232V62H", "(--only-peak)"] {
        assert!(picture.contains(part), "{part}: {picture}");
    }
    let folder = file("peaks-tables");
    printed(&["report", "--format", "parquet", "-o", folder.to_str().unwrap(), &peaks]);
    let events = rows(&folder.join("peaks-formats.events.parquet"));
    let live: Vec<_> = events.iter().map(|row| field(row, "live_bytes").clone()).collect();
    assert_eq!(live, [Field::Null, Field::Long((800 * MIB).cast_signed()), Field::Null]);
}

/// Writes a format to a file. Returns the error.
fn ran_to(format: &str, more: &[&str], recording: &str) -> Option<String> {
    let out = file("part.out").into_os_string().into_string().unwrap();
    let ran = ran(&[&["report", "--format", format, "-o", &out], more, &[recording]].concat());
    (ran.code != Some(0)).then_some(ran.stderr)
}

#[test]
fn the_page_draws_what_is_known() {
    let files = [peaks("peaks-page.capture"), latest("newest-page.capture")];
    let out = file("parts.html").into_os_string().into_string().unwrap();
    printed(&["report", "--html", &out, &files[0], &files[1]]);
    let text = fs::read_to_string(&out).expect("the page is there");
    assert!(text.contains("\"hasOnlyPeaks\":true"), "{text}");
    let Some(all) = computed(&out) else { return };
    let on_device: Vec<_> = all.as_array().unwrap().iter().filter(|pool| pool["isOnDevice"] == true).collect();
    // The moments are 250, 600 and 850 ms, and the end.
    assert_eq!(on_device[0]["known"], json!(["nothing", "peak", "nothing", "all"]), "{}", on_device[0]);
    assert_eq!(on_device[1]["known"], json!(["nothing", "all", "all", "all"]), "{}", on_device[1]);
    // Only the peak and the end of the small curve are drawn.
    let drawn = |pool: &Value| -> Vec<u64> {
        pool["curve"].as_array().unwrap().iter().filter_map(Value::as_u64).filter(|bytes| *bytes > 0).collect()
    };
    assert_eq!(drawn(on_device[0]), [800 * MIB, 10 * MIB]);
    assert!(on_device[1]["curve"][100].is_null() && drawn(on_device[1]).contains(&(800 * MIB)));
}
