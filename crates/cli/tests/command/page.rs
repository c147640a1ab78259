//! Tests `gpumem report --html`. If Node.js is installed, the results of the page's script are compared with the report.

use std::{fs, time::Duration};

use fastrand::Rng;
use gpumem_core::model::{Block, Bytes, CallsiteId, Device, EventKind, Family, Key, MemKind, PoolId, StackId};
use gpumem_recording::{Item, PoolDefinition};
use serde_json::{Value, json};

use crate::{
    file, folder, output_of, ran,
    recording_builder::{DEVICE, MIB, RecordingBuilder},
    report::{json, printed, recorded, training},
};

pub(crate) fn page(name: &str, recordings: &[&str]) -> (String, String) {
    let out = file(&format!("{name}.html"));
    let path = out.to_str().expect("the name is text").to_owned();
    assert_eq!(printed(&[&["report", "--html", &path], recordings].concat()), "");
    let text = fs::read_to_string(&out).expect("the page is there");
    (path, text)
}

#[test]
fn a_page_loads_nothing() {
    let (_, text) = page("alone", &[&training("alone.capture")]);
    assert!(text.starts_with("<!DOCTYPE html>") && text.trim_end().ends_with("</html>"), "{text}");
    assert!(text.contains("default-src 'none'"), "a policy forbids it to load anything");
    for mark in ["http://", "https://", "src=", "href=", "@import", "url(", "<!--"] {
        assert!(!text.contains(mark), "{mark}");
    }
}

#[test]
fn a_page_has_the_marks() {
    let mut made = RecordingBuilder::new("train");
    for callsite in [3, 4, 3] {
        made.event(EventKind::Mark { callsite: CallsiteId(callsite) });
    }
    let (_, text) = page("marks", &[&recorded("marked.capture", made)]);
    assert!(text.contains(r#""marks":[[1000,0],[2000,1],[3000,0]]"#), "{text}");
    assert!(text.contains(r#""frames":["train","forward"]"#), "{text}");
}

/// The row is in the report, in its JSON and on the page.
#[test]
fn what_a_pool_keeps_unused_has_a_row() {
    let (mut made, pool) = (RecordingBuilder::new("train"), PoolId(1));
    made.item(&Item::Pool(PoolDefinition { pool, name: "arena".to_owned() }));
    made.event(EventKind::PoolRegistered { pool, device: DEVICE });
    let start = made.alloc(64 * MIB, MemKind::Device, 2).get();
    made.event(EventKind::PoolReserved { pool, bytes: Bytes::mib(64) });
    let [first, second, unknown] = [0, 20, 50].map(|mib| Key::of_part(pool, start + mib * MIB));
    for (key, mib) in [(first, 20), (second, 16)] {
        let (kind, stack) = (MemKind::Part, StackId(2));
        made.alloc_at(key, Block { device: DEVICE, bytes: Bytes::mib(mib), kind, context: pool.0, stack });
    }
    made.free(second);
    made.free(unknown);
    made.rejected(MIB << 20, MemKind::Device, 2);
    let file = recorded("pool.capture", made);
    let row = "cache of arena: 28 MiB of 64 MiB; wrong calls: 1 free of an unknown part";
    let report = printed(&["report", &file]);
    let peaks = "device 0: the peak was 36 MiB, and the driver's blocks peaked at 64 MiB\n";
    assert!(report.contains(peaks) && report.contains(&format!("\n{row}\n")), "{report}");
    let later = &*row.replace("28", "44");
    for (moment, words) in [("oom", later), ("end", later), ("peak", "cache of arena: 28 MiB of 64 MiB"), ("start", "")]
    {
        let text = printed(&["report", "--at", moment, &file]);
        let pools: String = text.lines().filter(|line| line.starts_with("cache of ")).collect();
        assert_eq!(pools, words, "{text}");
        let pools = &json(&["report", "--json", "--at", moment, &file])["devices"][0]["pools"];
        assert_eq!(pools.as_array().unwrap().len(), usize::from(!words.is_empty()), "{moment}: {pools}");
    }
    let between = json(&["report", "--json", "--between", "start", "peak", &file]);
    assert!(between["devices"][0]["pools"].is_null(), "{between}");
    assert!(report.contains("while the process had 64 MiB of device 0 in use"), "{report}");
    let overview = json(&["report", "--json", &file]);
    let [used, reserved, unused] = [36, 64, 28].map(|mib| mib * MIB);
    let expected = json!([{"name": "arena", "is_at_end": false, "used_bytes": used, "reserved_bytes": reserved, "unused_bytes": unused, "wrong_calls": 1}]);
    assert_eq!(overview["devices"][0]["pools"], expected, "{overview}");
    let (_, text) = page("pool", &[&file]);
    assert!(text.contains(&format!("\"pools\":[\"{row}\"]")), "{text}");
}

/// The recording has two devices, several kinds, parts that are freed, frees that fail or are missed, and contexts that
/// end.
fn varied() -> RecordingBuilder {
    let mut made = RecordingBuilder::new("varied").training(4, 10, 3 * MIB);
    let second = Device { family: Family::Cuda, ordinal: 1 };
    made.device(second, "NVIDIA H200");
    let mut random = Rng::with_seed(1);
    for round in 0..3_000 {
        let key = Key::from_raw(random.u64(..200) << 20);
        let kind = [MemKind::Pool, MemKind::Device, MemKind::PinnedHost][random.usize(..3)];
        let device = if random.u64(..3) == 0 { second } else { DEVICE };
        match random.u64(..10) {
            0..5 => {
                made.event(EventKind::Lost { count: 1 });
                let (bytes, context) = (Bytes::new(random.u64(..MIB)), 1 + random.u8(..2));
                made.alloc_at(key, Block { device, bytes, kind, context, stack: StackId(1 + random.u32(..6)) });
            }
            5..8 => {
                made.free(key);
                if random.u64(..5) == 0 {
                    made.event(EventKind::FreeFailed);
                }
            }
            8 => made.event(EventKind::Shrink { key, bytes: Bytes::new(random.u64(..100)) }),
            _ if round == 2_000 => made.event(EventKind::ContextDestroyed { context: 2 }),
            _ => made.wait(random.u64(..50)),
        }
    }
    made
}

/// Runs the script of the page in Node.js, and prints its results.
const DRIVER: &str = r"
const fs = require('fs');
const vm = require('vm');
const html = fs.readFileSync(process.argv[2], 'utf8');
const script = html.match(/<script>([^]*)<\/script>/)[1];
const about = JSON.parse(html.match(/id=.about-data.>([^]*?)<\/script>/)[1]);
vm.runInThisContext(script);
(async () => {
  const all = [];
  const sources = about.recordings.flatMap((recording, number) => !recording.columns ? [] : [
    [`data-${number}`, recording],
    ...(recording.tensors ? [[`tensors-${number}`, { ...recording, ...recording.tensors }]] : []),
  ]);
  for (const [id, recording] of sources) {
    const data = decode(recording, await inflate(html.match(new RegExp(`id=.${id}.>([^]*?)</script>`))[1]));
    for (const pool of pools(data)) {
      const curves = series(data, pool, 'scope');
      // The drawn values equal a plain sum over all changes.
      let live = 0;
      let wrong = 0;
      for (let change = 0; change < data.time.length; change++) {
        const block = data.block[change];
        const isIn = data.device[block] === pool.device && recording.origins[data.origin[block]].isOnDevice === pool.isOnDevice;
        if (isIn) live += data.delta[change];
        const values = curves.valuesAfter(change).reduce((sum, value) => sum + value, 0);
        if (live !== curves.sum[change] || live !== values) wrong++;
      }
      for (let first = 0; first < data.time.length; first += 97) {
        for (const length of [1, 63, 64, 65, 1000, 5000]) {
          const end = Math.min(data.time.length, first + length);
          const [least, most] = curves.extremes(first, end);
          const part = curves.sum.subarray(first, end);
          if (curves.sum[least] !== part.reduce((a, b) => Math.min(a, b)) || curves.sum[most] !== part.reduce((a, b) => Math.max(a, b))) wrong++;
        }
      }
      const last = data.time.length - 1;
      const moments = [curves.peakAt, last].map((change) => flameOf(data, heldAfter(data, pool, change)).bytes);
      const { bands, left } = bandsOf(data, pool, 0, last, 50);
      const overlap = bands.some((a) => bands.some((b) => a.block < b.block && data.born[b.block] < data.died[a.block]
        && a.offset < b.offset + data.bytes[b.block] && b.offset < a.offset + data.bytes[a.block]));
      const known = [250, 600, 850].map((millis) => knownIn(data, curves, millis * 1e6, (millis + 1) * 1e6))
        .concat(knownIn(data, curves, recording.end, recording.end * 1.005));
      const segments = recording.allocator && series(data, { ...pool, isOnDevice: false }, 'kind').sum;
      const map = recording.allocator && [curves.peakAt, last].map((change) => {
        const of = segmentsAfter(data, pool, change);
        const sum = (pieces) => pieces.reduce((bytes, { begin, end }) => bytes + end - begin, 0);
        return [sum(of), sum(of.flatMap((segment) => segment.tensors)), of.map(({ end, begin }) => end - begin)];
      });
      all.push({ map, segments: segments && [segments[curves.peakAt], segments[last]], peakTime: data.time[curves.peakAt], peakWords: timeInWords(data.time[curves.peakAt]), name: pool.name, isOnDevice: pool.isOnDevice, peak: curves.sum[curves.peakAt], end: live, wrong, moments, bands: bands.length, left, overlap, known, curve: recording.curve,
        places: placesOf(data, heldAfter(data, pool, curves.peakAt)).slice(0, 1) });
    }
  }
  console.log(JSON.stringify(all));
})();
";

pub(crate) fn computed(path: &str) -> Option<Value> {
    let driver = file("driver.js");
    fs::write(&driver, DRIVER).expect("the driver is written");
    let output = output_of("node", &[driver.to_str().expect("the name is text"), path])?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("it is JSON"))
}

#[test]
fn the_script_computes_what_the_report_says() {
    let files = [training("script.capture"), recorded("varied.capture", varied())];
    let (path, _) = page("script", &[&files[0], &files[1]]);
    let Some(all) = computed(&path) else { return };
    let mut all = all.as_array().expect("it is a list").iter();
    for file in &files {
        let overview = json(&["report", "--json", file]);
        for device in overview["devices"].as_array().unwrap() {
            let on_device = all.next().unwrap();
            assert_eq!(on_device["peak"], device["peak_bytes"], "{on_device}");
            assert_eq!(on_device["end"], device["live_at_end_bytes"], "{on_device}");
            assert_eq!(on_device["moments"], json!([device["peak_bytes"], device["live_at_end_bytes"]]), "{on_device}");
            assert_eq!((&on_device["wrong"], &on_device["overlap"]), (&json!(0), &json!(false)), "{on_device}");
            if file == &files[0] {
                assert_eq!(on_device["places"][0]["name"], "train > step: src/adam.rs:30, from src/main.rs:9");
                assert_eq!((&on_device["bands"], &on_device["left"]), (&json!(50), &json!(31)));
            } else {
                // The memory outside of the device comes after the memory on it.
                let besides = all.next().unwrap();
                assert_eq!((&besides["isOnDevice"], &besides["wrong"]), (&json!(false), &json!(0)), "{besides}");
                assert!(besides["peak"].as_u64() > Some(MIB), "{besides}");
            }
        }
    }
    assert!(all.next().is_none());
}

/// The tensors are a second list of blocks in the page. The page has the same numbers for them as the report.
#[test]
fn the_script_computes_what_the_report_says_of_tensors() {
    let known_from = Some(Duration::from_micros(60));
    let files = [None, known_from].map(|from| {
        let name = format!("page-tensors-{}.capture", from.is_some());
        let mut made = RecordingBuilder::new("train");
        if from.is_none() {
            // The peak is after 1.2348 s. Reports truncate this number instead of rounding it.
            made.wait(1_234_567);
        }
        recorded(&name, made.tensors(3, 10, 10 * MIB, from))
    });
    let (path, text) = page("tensors", &[&files[0], &files[1], &training("page-no-tensors.capture")]);
    assert_eq!(text.matches("PyTorch 2.11.0, device 0: tensors had 205 MiB at most, after ").count(), 2);
    assert!(text.contains("\"knownFrom\":") && !text.contains("tensors-2"), "{text}");
    let Some(all) = computed(&path) else { return };
    let all = all.as_array().expect("it is a list");
    assert_eq!(all.len(), 5, "each recording has its blocks, two have tensors: {all:?}");
    for (file, tensors) in files.iter().zip([&all[1], &all[3]]) {
        let report = json(&["report", "--json", file]);
        let device = &report["torch"]["devices"][0];
        let [peak, end] = ["peak", "at_end"].map(|moment| &device[moment]);
        assert_eq!((&tensors["peak"], &peak["allocated_bytes"]), (&json!(205 * MIB), &json!(205 * MIB)));
        assert_eq!(tensors["moments"], json!([peak["allocated_bytes"], end["allocated_bytes"]]), "{tensors}");
        assert_eq!(tensors["segments"], json!([peak["reserved_bytes"], end["reserved_bytes"]]), "{tensors}");
        let expected = [peak, end].map(|moment| {
            let sizes = if moment == peak { vec![200 * MIB, 100 * MIB] } else { vec![100 * MIB] };
            json!([moment["reserved_bytes"], moment["allocated_bytes"], sizes])
        });
        assert_eq!(tensors["map"], json!(expected), "{tensors}");
        let seconds = tensors["peakTime"].as_f64().unwrap() / 1e9;
        assert!((seconds - peak["seconds"].as_f64().unwrap()).abs() < 1e-9, "{tensors}");
        let words = format!("tensors had 205 MiB at most, after {}\n", tensors["peakWords"].as_str().unwrap());
        assert!(printed(&["report", file]).contains(&words), "{words}");
        assert_eq!((&tensors["wrong"], &tensors["overlap"]), (&json!(0), &json!(false)), "{tensors}");
        assert_eq!(tensors["places"][0]["bytes"], 100 * MIB, "{tensors}");
    }
}

/// If there are many recordings, the page has all curves. It has the events only of the recordings with the highest, the median
/// and the lowest peak, of those that ran out of memory, and of those that a user asks for.
#[test]
fn a_page_of_many_ranks_has_the_events_of_a_few() {
    let folder = folder("page-ranks");
    for rank in 0..65 {
        fs::write(
            folder.join(format!("train.rank{rank}.gpu0.pid{rank}.capture")),
            RecordingBuilder::of_rank(rank).file(),
        )
        .unwrap();
    }
    let runs = folder.to_str().unwrap();
    let (path, text) = page("ranks", &[runs, "--rank", "40"]);
    let about = text.split("id=\"about-data\">").nth(1).and_then(|rest| rest.split("</script>").next()).unwrap();
    let about: Value = serde_json::from_str(about).unwrap();
    let (recordings, fleet) = (about["recordings"].as_array().unwrap(), &about["fleet"]);
    let report = json(&["report", "--json", runs]);
    let peak = |at: usize| report[at]["devices"][0]["peak_bytes"].as_u64().unwrap();
    let mut peaks: Vec<_> = (0..65).map(peak).collect();
    peaks.sort_unstable();

    let words = fleet["words"][0].as_str().unwrap();
    assert!(words.starts_with("The peaks are from ") && words.contains(" (rank17); the median is "), "{words}");
    let place = fleet["words"][1].as_str().unwrap();
    assert!(place.starts_with("rank17 differs most in train: block_3.py:30: it has 6.0"), "{place}");
    assert_eq!(fleet["words"][2], "Out of memory: rank29.");
    assert_eq!(fleet["places"][0]["name"], "train: block_3.py:30");
    let rank = |at: usize| report[at]["rank"].as_u64().unwrap();
    let in_detail: Vec<(usize, String)> = serde_json::from_value(fleet["inDetail"].clone()).unwrap();
    let why: Vec<_> = in_detail.iter().map(|(at, why)| (rank(*at), peak(*at), why.as_str())).collect();
    assert_eq!((why[0].0, why[0].1, why[0].2), (17, peaks[64], "the highest peak"));
    assert_eq!((why[1].1, why[1].2), (peaks[32], "the median peak"));
    assert_eq!((why[2].1, why[2].2), (peaks[0], "the lowest peak"));
    assert_eq!((why[3].0, why[3].2, why[4].0, why[4].2), (29, "out of memory", 40, "asked for"));
    for (at, recording) in recordings.iter().enumerate() {
        let is_in_detail = in_detail.iter().any(|(number, _)| *number == at);
        let has_data = text.contains(&format!("id=\"data-{at}\""));
        assert_eq!((has_data, recording["origins"].is_array()), (is_in_detail, is_in_detail), "{recording}");
        // The curve keeps the peak exactly.
        let most = recording["curve"].as_array().unwrap().iter().filter_map(Value::as_u64).max();
        assert_eq!(most, Some(peak(at)));
    }
    // Each recording takes some kilobytes of the page.
    assert!(text.len() < 1_000_000, "{}", text.len());
    let small = page("ranks-small", &[&training("page-rank.capture")]).1;
    assert!(!small.contains("\"fleet\":"), "{small}");

    let out = file("ranks-none.html");
    let ran = ran(&["report", "--html", out.to_str().unwrap(), runs, "--rank", "65"]);
    assert!(
        ran.code == Some(2) && ran.stderr.contains("--rank 65 cannot be shown: no recording has this rank; "),
        "{ran:?}"
    );
    let Some(all) = computed(&path) else { return };
    assert_eq!(all.as_array().unwrap().len(), recordings.iter().filter(|of| of["origins"].is_array()).count());
}

#[test]
fn a_page_of_nothing_and_a_page_of_a_cut_file() {
    let (path, _) = page("nothing", &[&recorded("page-nothing.capture", RecordingBuilder::new("train"))]);
    assert_eq!(computed(&path).unwrap_or_else(|| json!([])), json!([]));
    let bytes = RecordingBuilder::new("train").training(200, 100, MIB).file();
    let cut = crate::report::written("page-cut.capture", &bytes[..bytes.len() / 2]);
    let out = file("cut.html");
    let ran = ran(&["report", "--html", out.to_str().unwrap(), &cut]);
    assert!(ran.code == Some(2) && ran.stderr.contains("has no end"), "{ran:?}");
    assert!(fs::read_to_string(out).unwrap().contains("The file has no end: "));
}
