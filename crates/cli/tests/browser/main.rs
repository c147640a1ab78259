//! Tests the page of `gpumem report --html` in Chromium. `cargo test` leaves these tests out, because not every machine has
//! Chromium:
//!
//! ```text
//! cargo test -p gpumem-cli --test browser
//! ```
//!
//! They leave pictures in `target/browser`.

mod devtools;
#[path = "../command/made.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod made;

use std::{
    fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use gpumem_core::model::{Device, Family, MemKind};
use serde_json::{Value, json};

use self::{
    devtools::Browser,
    made::{MIB, Made},
};

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("browser-{name}"))
}

fn gpumem(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gpumem")).args(arguments).output().expect("the command starts");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the output is text")
}

/// Returns the page of some recordings, and the report of each.
fn page(name: &str, recordings: Vec<(&str, Made)>) -> (PathBuf, Vec<Value>) {
    let page = file(&format!("{name}.html"));
    let mut files = Vec::new();
    for (name, made) in recordings {
        let file = file(name);
        fs::write(&file, made.file()).expect("the recording can be written");
        files.push(file.into_os_string().into_string().expect("the name is text"));
    }
    let files: Vec<_> = files.iter().map(String::as_str).collect();
    gpumem(&[&["report", "--html", page.to_str().expect("the name is text")], &*files].concat());
    let reports =
        files.iter().map(|file| serde_json::from_str(&gpumem(&["report", "--json", file])).expect("it is JSON"));
    (page, reports.collect())
}

/// Checks that the page requested only itself, and reported no errors.
#[track_caller]
fn is_quiet(browser: &mut Browser) {
    let (requests, errors) = browser.requests_and_errors();
    let pages = format!("file://{}/", env!("CARGO_TARGET_TMPDIR"));
    assert!(requests.iter().all(|url| url.starts_with(&pages)), "{requests:?}");
    assert!(errors.is_empty(), "{errors:?}");
}

/// The page is as wide as the window, so nothing has to be scrolled from side to side.
#[track_caller]
fn fits(browser: &mut Browser) {
    let [width, window] =
        ["document.documentElement.scrollWidth", "innerWidth"].map(|expression| browser.number(expression));
    assert!(width <= window, "the page is {width} wide, the window {window}");
    let wide = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter((element) => !element.closest('#flame') &&
            element.getBoundingClientRect().right > innerWidth + 1).map((element) => element.outerHTML.slice(0, 80))",
    );
    assert_eq!(wide, json!([]));
}

/// The script returns the drawn curve: the top of the coloured area in each column. The margins of `page.js` are left
/// out.
const TOPS: &str = "(() => {
    const chart = document.getElementById('chart');
    const copy = new OffscreenCanvas(chart.width, chart.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(chart, 0, 0);
    const pixels = copy.getImageData(0, 0, chart.width, chart.height);
    const isColoured = (x, y) => {
        const [red, green, blue, alpha] = pixels.data.subarray((y * chart.width + x) * 4, (y * chart.width + x) * 4 + 4);
        return alpha > 0 && Math.max(red, green, blue) - Math.min(red, green, blue) > 24;
    };
    const tops = [];
    for (let x = 66; x < chart.width - 22; x++) {
        let y = 0;
        while (y < chart.height - 22 && !isColoured(x, y)) y++;
        tops.push(chart.height - 22 - y);
    }
    return tops;
})()";

fn tops(browser: &mut Browser) -> Vec<u64> {
    serde_json::from_value(browser.evaluate(TOPS)).expect("they are numbers")
}

/// Returns the sum of the table of the selected moment, if it has all places.
fn moment(browser: &mut Browser) -> String {
    browser.text("#moment")
}

/// Returns the bytes of the lowest row of the flame graph, as its tips have them, and the part of the width that it
/// fills.
fn flame(browser: &mut Browser) -> (Vec<String>, f64) {
    let of = "[...document.querySelectorAll('.frame')].filter((frame) => frame.style.top === '0px')";
    let labels = browser.evaluate(&format!("{of}.map((frame) => frame.getAttribute('aria-label'))"));
    let width = browser.number(&format!("{of}.reduce((sum, frame) => sum + parseFloat(frame.style.width), 0)"));
    (serde_json::from_value(labels).expect("they are texts"), width)
}

/// Returns the tip at a place of the curve, which is a part of its width.
fn hover(browser: &mut Browser, part: f64) -> String {
    let [left, top, width, height] = browser.place("#chart");
    let at = [left + 66.5 + (width - 66.0 - 22.0 - 1.0) * part, top + height / 2.0];
    browser.mouse("mouseMoved", at, &json!({}));
    browser.drawn();
    browser.text("#tip")
}

/// Returns `15.24` for `after 15.24 s: 63.6 GiB`.
#[track_caller]
fn seconds(tip: &str) -> f64 {
    let text = tip.strip_prefix("after ").and_then(|text| text.split_once(':')).map(|(time, _)| time);
    let (number, unit) = text.and_then(|time| time.split_once(' ')).unwrap_or_else(|| panic!("{tip}"));
    let scale = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "µs" => 1e-6,
        "ns" => 1e-9,
        _ => panic!("{tip}"),
    };
    number.parse::<f64>().unwrap_or_else(|_| panic!("{tip}")) * scale
}

/// Returns the part of the width where the curve reaches its top first. Edges of light columns are a pixel higher or
/// lower.
fn highest(browser: &mut Browser) -> f64 {
    let tops = tops(browser);
    let most = tops.iter().max().expect("the curve has columns");
    let at = tops.iter().position(|top| top + 1 >= *most).expect("one of them is the highest");
    #[expect(clippy::cast_precision_loss, reason = "they are some hundreds")]
    let part = at as f64 / (tops.len() - 1) as f64;
    part
}

fn click_on_curve(browser: &mut Browser, part: f64) {
    let [left, top, width, height] = browser.place("#chart");
    browser.click([left + 66.5 + (width - 66.0 - 22.0 - 1.0) * part, top + height / 2.0]);
}

/// Returns the distance from the top of the chart at which it draws the line of dashes for the device's memory, and the words about it.
fn capacity(browser: &mut Browser) -> Value {
    browser.evaluate(
        "new Promise((done) => {
            const of = CanvasRenderingContext2D.prototype;
            const { moveTo } = of;
            const drawn = [];
            of.moveTo = function (x, y) {
                if (String(this.getLineDash()) === '8,4') drawn.push(Math.round(y));
                moveTo.call(this, x, y);
            };
            document.getElementById('whole').click();
            requestAnimationFrame(() => requestAnimationFrame(() => {
                Object.assign(of, { moveTo });
                done([...drawn, document.getElementById('capacity').innerText.trim()]);
            }));
        })",
    )
}

/// The first screen says which rank differs, and in which place.
#[test]
fn many_ranks() {
    let (folder, page) = (file("ranks"), file("ranks.html"));
    fs::create_dir_all(&folder).expect("the folder can be created");
    for rank in 0..100 {
        let recording = folder.join(format!("train.rank{rank}.gpu0.pid{rank}.capture"));
        fs::write(recording, Made::of_rank(rank).file()).expect("the recording can be written");
    }
    let [out, folder] = [&page, &folder].map(|path| path.to_str().expect("the name is text"));
    gpumem(&["report", "--html", out, folder]);
    let mut browser = Browser::start();
    browser.open(&page);
    assert_eq!(browser.text("#title"), "train, rank 17: 17.2 GiB at most");
    let words = browser.text("#fleet-words");
    assert!(words.contains("rank17 differs most in train: block_3.py:30: it has 6.0"), "{words}");
    assert_eq!(browser.text("#fleet-places tbody td"), "train: block_3.py:30");
    let [_, top, _, height] = browser.place("#fleet-map");
    assert!(top + height < 720.0, "the rows end at {}", top + height);
    browser.picture("ranks-1280");
    is_quiet(&mut browser);
    fits(&mut browser);

    // The highest peak has the first row, if rows are ordered by peaks. The last row is the rank that ran out of memory.
    browser.evaluate(
        "const order = document.getElementById('fleet-order');
        order.value = 'peak';
        order.dispatchEvent(new Event('change'));",
    );
    let [left, top, width, height] = browser.place("#fleet-map");
    browser.mouse("mouseMoved", [left + width / 4.0, top + 1.0], &json!({}));
    assert!(browser.text("#tip").starts_with("rank 17: 17.2 GiB at most\nafter "), "{}", browser.text("#tip"));
    // A recording without events has only its curve and its places.
    browser.click([left + width / 4.0, top + height / 3.0]);
    assert!(browser.text("#fleet-selected").ends_with(" at its peak, compared with the median of all"));
    assert_eq!(browser.evaluate("document.getElementById('events').hidden"), json!(true));
    assert_eq!(browser.evaluate("document.body.getAttribute('aria-busy')"), json!("false"));
    browser.evaluate("document.querySelector('.rank').click()");
    browser.drawn();
    assert!(tops(&mut browser).iter().any(|top| *top > 0));
    for width in ["0px", "100px", ""] {
        browser.evaluate(&format!("document.getElementById('fleet-map').style.width = '{width}'"));
        browser.drawn();
    }
    is_quiet(&mut browser);
}

#[test]
fn a_million_events() {
    let (page, reports) = page("million", vec![("million.capture", Made::new("train").varied(1_000_000))]);
    let device = &reports[0]["devices"][0];
    let peak_seconds = device["peak_seconds"].as_f64().expect("there is a peak");
    let mut browser = Browser::start();
    let began = Instant::now();
    browser.open(&page);
    println!("the page of a million events was drawn after {:.1} s", began.elapsed().as_secs_f64());

    // With one colour, no edges between colours are rounded to pixels.
    browser.evaluate(
        "{ const by = document.getElementById('by'); by.value = 'kind'; by.dispatchEvent(new Event('change')); }",
    );
    browser.drawn();
    // The curve is drawn, and is the highest where the report says.
    let tops_of_all = tops(&mut browser);
    assert!(tops_of_all.iter().all(|top| *top > 0), "each column has some memory: {tops_of_all:?}");
    // A hundredth is for the memory that is live at the end.
    let end = reports[0]["seconds"].as_f64().expect("it has an end") * 1.01;
    let part = highest(&mut browser);
    assert!((part - peak_seconds / end).abs() < 0.002, "{part} is not {peak_seconds} of {end} s");
    // The axis ends 5 % above the 141 GiB of the card, and the peak has 80.7 GiB of them. Margins take 30 of 320
    // pixels.
    let tallest = tops_of_all.iter().max().expect("the curve has columns");
    assert!((156..=160).contains(tallest), "the peak is {tallest} pixels high");
    assert_eq!(capacity(&mut browser), json!([22, "the device's memory, 141 GiB"]));
    browser.picture("million-1280");

    // A click on the peak shows the memory that was live then.
    click_on_curve(&mut browser, 0.05);
    assert!(!moment(&mut browser).contains("the peak"), "{}", moment(&mut browser));
    click_on_curve(&mut browser, part);
    let words = "80.7 GiB live after 8.068 s, the peak";
    assert_eq!(moment(&mut browser), words);
    let (labels, width) = flame(&mut browser);
    assert!(labels[0].starts_with("forward\n") && labels[0].contains(" GiB, 3"), "{labels:?}");
    assert!((width - 100.0).abs() < 0.5, "the frames fill {width} % of the width");
    // The scopes of the report, each as large as its frame.
    let scopes = device["peak_by_scope"].as_array().expect("it is a list");
    let mut outermost = std::collections::BTreeMap::new();
    for scope in scopes {
        let name = scope["name"].as_str().unwrap().split(" > ").next().unwrap().to_owned();
        *outermost.entry(name).or_insert(0.0) += scope["bytes"].as_f64().unwrap();
    }
    let whole = device["peak_bytes"].as_f64().unwrap();
    for (name, bytes) in outermost {
        let share = format!(", {:.1} %, ", bytes * 100.0 / whole);
        let is_there = labels.iter().any(|label| label.starts_with(&format!("{name}\n")) && label.contains(&share));
        assert!(is_there, "{name} {share} {labels:?}");
    }

    // The wheel zooms around the cursor; a drag and keys move; buttons zoom and go back.
    let before = seconds(&hover(&mut browser, part));
    for _ in 0..30 {
        let [left, top, width, height] = browser.place("#chart");
        let at = [left + 66.5 + (width - 89.0) * part, top + height / 2.0];
        browser.mouse("mouseWheel", at, &json!({ "deltaX": 0, "deltaY": -100 }));
    }
    browser.drawn();
    let [first, at_cursor, last] = [0.0, part, 1.0].map(|part| seconds(&hover(&mut browser, part)));
    let length = last - first;
    assert!(length < end / 500.0 && length > 0.0, "{length} of {end} s");
    assert!((at_cursor - before).abs() < end / 500.0, "{at_cursor} is not {before}");
    browser.picture("million-zoomed-1280");
    let [left, top, width, height] = browser.place("#chart");
    let (x, y) = (left + width / 2.0, top + height / 2.0);
    browser.drag([x, y], &[[x + (width - 88.0) / 2.0, y]]);
    let dragged = seconds(&hover(&mut browser, 0.0));
    assert!((first - dragged - length / 2.0).abs() < length / 50.0, "{first} {dragged} {length}");
    assert_eq!(moment(&mut browser), words, "a drag selects nothing");
    browser.evaluate("document.getElementById('chart').focus()");
    browser.key("ArrowRight", false);
    let moved = seconds(&hover(&mut browser, 0.0));
    assert!((moved - dragged - length / 10.0).abs() < length / 50.0, "{moved} {dragged} {length}");
    browser.key("+", false);
    let zoomed = seconds(&hover(&mut browser, 1.0)) - seconds(&hover(&mut browser, 0.0));
    assert!((zoomed / length - 0.7).abs() < 0.02, "{zoomed} {length}");
    // The keys go to the event before the peak, and to the one after it.
    browser.key("ArrowLeft", true);
    let earlier = moment(&mut browser);
    assert!(!earlier.contains("the peak"), "{earlier}");
    browser.key("ArrowRight", true);
    assert_eq!(moment(&mut browser), words);
    let [left, top, width, height] = browser.place("#whole");
    browser.click([left + width / 2.0, top + height / 2.0]);
    assert!(seconds(&hover(&mut browser, 1.0)) > end * 0.99);

    // The window is small.
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    let part = highest(&mut browser);
    assert!((part - peak_seconds / end).abs() < 0.006, "{part} is not {peak_seconds} of {end} s");
    browser.picture("million-400");
    is_quiet(&mut browser);
}

#[test]
fn a_training_run() {
    let (page, reports) = page("training", vec![("train.capture", Made::new("train").training(12, 10, 10 * MIB))]);
    let mut browser = Browser::start();
    browser.open(&page);
    assert_eq!(browser.text("#title"), "train: 437 MiB at most");
    // The scopes have colours, because there are several.
    assert_eq!(browser.evaluate("document.getElementById('by').value"), "scope");
    // A line at 141 GiB would leave no room for the curve.
    assert_eq!(capacity(&mut browser), json!(["the device's memory, 141 GiB, is above this chart"]));
    let summary = browser.text("#summary");
    assert!(
        summary.starts_with("device 0: the peak was 437 MiB, after ")
            && summary.ends_with("src/adam.rs:30 in train > step, called from src/main.rs:9, holds 46 % of the peak."),
        "{summary}"
    );
    // The table has each byte of the peak.
    let rows =
        browser.evaluate("[...document.querySelectorAll('#places tbody tr')].map((row) => row.cells[2].innerText)");
    assert_eq!(rows, json!(["200 MiB", "100 MiB", "100 MiB", "32 MiB", "5 MiB"]));
    assert_eq!(reports[0]["devices"][0]["peak_bytes"], 437 * MIB);
    // A frame can be looked at alone, and left again.
    let frames = "document.querySelectorAll('.frame').length";
    let all = browser.number(frames);
    let [left, top, width, height] = browser.place(".frame");
    browser.mouse("mouseMoved", [left + width / 2.0, top + height / 2.0], &json!({}));
    assert_eq!(browser.text("#tip"), "train\n305 MiB, 69.8 %, 21 blocks");
    browser.click([left + width / 2.0, top + height / 2.0]);
    assert!(browser.number(frames) < all);
    assert_eq!(browser.text("#path"), "all\ntrain");
    let [left, top, width, height] = browser.place("#path button");
    browser.click([left + width / 2.0, top + height / 2.0]);
    assert!((browser.number(frames) - all).abs() < 0.5);
    // Blocks have a tip too.
    let [left, top, _, height] = browser.place("#bands");
    browser.mouse("mouseMoved", [left + 400.0, top + height - 8.0], &json!({}));
    assert!(browser.text("#tip").contains(" MiB, "), "{}", browser.text("#tip"));
    browser.mouse("mouseMoved", [1.0, 1.0], &json!({}));
    for by in ["scope", "outer", "library", "place", "kind"] {
        browser.evaluate(&format!(
            "{{ const by = document.getElementById('by'); by.value = '{by}'; by.dispatchEvent(new Event('change')); }}"
        ));
        browser.drawn();
        assert!(browser.number("document.querySelectorAll('#legend span').length") >= 2.0, "{by}");
        if by == "place" {
            browser.picture("training-by-place-1280");
        }
    }
    browser.picture("training-1280");
    browser.is_dark(true);
    browser.drawn();
    browser.picture("training-dark-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("training-dark-400");
    is_quiet(&mut browser);
}

#[test]
fn functions_that_pass_a_call_on_are_shown_when_they_are_asked_for() {
    let page = file("gpt2.html");
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/gpt2.capture");
    gpumem(&["report", "--html", page.to_str().expect("the name is text"), recording]);
    let mut browser = Browser::start();
    browser.open(&page);
    let labels = "[...document.querySelectorAll('.frame')].map((frame) => frame.getAttribute('aria-label')).join()";
    let called = "NewGELUActivation.forward (activations.py)\n2.25 GiB, 25.4 %, 48 blocks";
    let folded = browser.evaluate(labels);
    assert!(folded.as_str().expect("it is text").contains(called), "{folded}");
    assert!(!folded.as_str().expect("it is text").contains("_call_impl"), "{folded}");
    let (lowest, width) = flame(&mut browser);
    browser.picture("gpt2-1280");
    let [left, top, width_of, height] = browser.place("#all");
    browser.click([left + width_of / 2.0, top + height / 2.0]);
    let all = browser.evaluate(labels);
    assert!(all.as_str().expect("it is text").contains("Module._call_impl ("), "{all}");
    let (lowest_of_all, width_of_all) = flame(&mut browser);
    assert_eq!(lowest[0], lowest_of_all[0]);
    assert!((width - width_of_all).abs() < 0.5, "{width} {width_of_all}");
    // The page sums up and marks the results of a search.
    assert_eq!(browser.evaluate("document.title"), "gpt2.py: 8.86 GiB at most");
    browser.evaluate("document.getElementById('search').focus()");
    for key in ["G", "E", "L", "U"] {
        browser.key(key, false);
    }
    assert_eq!(browser.text("#found"), "1 of 5 places, 2.25 GiB");
    let marked = "[...document.querySelectorAll('.frame:not(.other)')].map((frame) => frame.ariaLabel)";
    let found = browser.evaluate(marked);
    assert!(
        found.to_string().contains("NewGELUActivation.forward") && !found.to_string().contains("Conv1D"),
        "{found}"
    );
    assert_eq!(browser.evaluate("document.querySelectorAll('#places tbody tr').length"), 1);
    browser.picture("gpt2-search-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    // Chromium clears the field at a real key by itself, other browsers do not.
    browser
        .evaluate("document.getElementById('search').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))");
    browser.drawn();
    assert_eq!(browser.text("#found"), "");
    assert!(browser.evaluate(marked).to_string().contains("Conv1D"));
    assert_eq!(browser.evaluate("document.getElementById('search').value"), "");
    is_quiet(&mut browser);
}

fn choose(browser: &mut Browser, id: &str, value: &str) {
    browser.evaluate(&format!(
        "{{ const choice = document.getElementById('{id}'); choice.value = '{value}'; choice.dispatchEvent(new Event('change')); }}"
    ));
    browser.wait_for("document.body.getAttribute('aria-busy') === 'false'");
    browser.drawn();
}

#[test]
fn tensors_are_shown_in_place_of_the_memory_from_the_driver() {
    let known_from = Duration::from_micros(60);
    let made = Made::new("train").tensors(6, 10, 10 * MIB, Some(known_from));
    let (page, reports) = page("tensors", vec![("tensors.capture", made)]);
    let peak = &reports[0]["torch"]["devices"][0]["peak"];
    assert_eq!(peak["allocated_bytes"], 205 * MIB);
    let mut browser = Browser::start();
    browser.open(&page);
    let summary = browser.text("#summary");
    assert!(summary.ends_with("\nPyTorch 2.11.0, device 0: tensors had 205 MiB at most, after 270 µs."), "{summary}");
    // The page opens on the tensors.
    let of_tensors = tops(&mut browser);
    choose(&mut browser, "source", "driver");
    assert!(moment(&mut browser).starts_with("300 MiB live after "), "{}", moment(&mut browser));
    let of_driver = tops(&mut browser);
    choose(&mut browser, "source", "tensors");
    // The curve of the tensors is the highest at their peak, and is as high as its share of the driver's.
    assert_ne!(of_tensors, of_driver);
    assert_eq!(of_tensors, tops(&mut browser));
    let end = reports[0]["seconds"].as_f64().expect("it has an end") * 1.01;
    let (part, seconds) = (highest(&mut browser), peak["seconds"].as_f64().expect("there is a peak"));
    assert!((part - seconds / end).abs() < 0.003, "{part} is not {seconds} of {end} s");
    // The axis ends 5 % above the 300 MiB that PyTorch has from the driver.
    let tallest = of_tensors.iter().max().expect("the curve has columns");
    assert!((187..=191).contains(tallest), "the peak is {tallest} pixels high");
    let words = "Tensors: 205 MiB of 300 MiB from the driver after 270 µs, the peak";
    assert_eq!(moment(&mut browser), words);
    let rows =
        browser.evaluate("[...document.querySelectorAll('#places tbody tr')].map((row) => [row.cells[0].innerText, row.cells[2].innerText, row.cells[4].innerText])");
    let expected = json!([
        ["src/model.rs:12, from src/main.rs:9", "100 MiB", "10"],
        ["no line of Python (such as in the backward pass)", "100 MiB", "10"],
        ["src/model.rs:42, from src/main.rs:9", "5 MiB", "1"]
    ]);
    assert_eq!(rows, expected);
    assert_eq!(browser.text("#blocks-title"), "Tensors");
    let (labels, width) = flame(&mut browser);
    assert!(labels.iter().any(|label| label.contains("100 MiB, 48.8 %, 10 tensors")), "{labels:?}");
    assert!((width - 100.0).abs() < 0.5, "the frames fill {width} % of the width");
    // Before the history begins, nothing is 0.
    assert!(hover(&mut browser, 0.01).ends_with(": tensors are not known"), "{}", hover(&mut browser, 0.01));
    assert!(
        hover(&mut browser, part).contains(": 205 MiB of 300 MiB from the driver\n"),
        "{}",
        hover(&mut browser, part)
    );
    browser.picture("tensors-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("tensors-400");
    // The moment stays, and the curve of the driver comes back.
    browser.size(1280, 900);
    browser.drawn();
    click_on_curve(&mut browser, 0.9);
    assert!(moment(&mut browser).starts_with("Tensors: 1"), "{}", moment(&mut browser));
    choose(&mut browser, "source", "driver");
    // The driver's newest event until then is that of its peak.
    assert_eq!(moment(&mut browser), "300 MiB live after 42 µs, the peak");
    choose(&mut browser, "source", "tensors");
    assert_eq!(moment(&mut browser), words, "from peak to peak");
    is_quiet(&mut browser);
}

#[test]
fn ranks_stand_side_by_side() {
    let ranks: Vec<String> =
        (0..8).map(|rank| format!("train.rank{rank}.gpu{rank}.pid{}.capture", 4711 + rank)).collect();
    let of_rank = |rank: u64| Made::of_job("train", rank).training(10, 6, (rank + 1) * 4 * MIB);
    let made = ranks.iter().zip(0..).map(|(name, rank)| (&**name, of_rank(rank))).collect();
    let (page, reports) = page("ranks", made);
    let mut browser = Browser::start();
    browser.open(&page);
    let peaks =
        browser.evaluate("[...document.querySelectorAll('.rank')].map((rank) => rank.innerText.split('\\n').at(-1))");
    let expected: Vec<_> = reports
        .iter()
        .map(|report| {
            let mib = report["devices"][0]["peak_bytes"].as_u64().expect("there is a peak") / MIB;
            format!("device 0: {mib} MiB")
        })
        .collect();
    assert_eq!(peaks, json!(expected));
    let names =
        browser.evaluate("[...document.querySelectorAll('.rank span:first-of-type')].map((name) => name.innerText)");
    assert_eq!((&names[0], &names[7]), (&json!("rank0.gpu0.pid4711"), &json!("rank7.gpu7.pid4718")));
    browser.picture("ranks-1280");
    let [left, top, width, height] = browser.place(".rank:nth-child(8)");
    browser.click([left + width / 2.0, top + height / 2.0]);
    browser.wait_for("document.getElementById('title').innerText.startsWith('train, rank 7: ')");
    browser.drawn();
    assert!(
        browser.text("#moment").starts_with(expected[7].trim_start_matches("device 0: ")),
        "{}",
        moment(&mut browser)
    );
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("ranks-400");
    is_quiet(&mut browser);
}

#[test]
fn recordings_with_little_in_them() {
    let mut browser = Browser::start();
    let (empty, _) = page("empty", vec![("empty.capture", Made::new("train"))]);
    browser.open(&empty);
    assert_eq!(moment(&mut browser), "Nothing was allocated");
    browser.picture("empty-1280");
    // Clicks and keys do nothing.
    click_on_curve(&mut browser, 0.5);
    browser.evaluate("document.getElementById('chart').focus()");
    for key in ["+", "-", "ArrowLeft", "ArrowRight"] {
        browser.key(key, false);
        browser.key(key, true);
    }
    browser.evaluate("document.querySelectorAll('button').forEach((button) => button.click())");

    let mut one = Made::new("train");
    one.alloc(3, MemKind::Device, 0);
    let (one, _) = page("one", vec![("one.capture", one)]);
    browser.open(&one);
    let words = moment(&mut browser);
    assert!(words.starts_with("3 B live after ") && words.ends_with(", the peak"), "{words}");
    assert!(tops(&mut browser).iter().filter(|top| **top > 0).count() >= 12, "what is live at the end is seen");
    assert_eq!(browser.evaluate("document.getElementById('by').value"), "place", "one colour says little");
    assert_eq!(browser.text("#places th"), "place");
    browser.picture("one-1280");

    // The recording has no stacks, no scopes, two devices, and host memory besides.
    let mut bare = Made::new("train");
    let second = Device { family: Family::Cuda, ordinal: 1 };
    bare.device(second, "NVIDIA H200");
    for round in 0..40 {
        bare.alloc(MIB * (1 + round % 7), MemKind::Device, 99);
        bare.alloc(MIB * 10, MemKind::PinnedHost, 99);
        bare.alloc_on(second, MIB * 3, MemKind::Pool, 99);
    }
    let (bare, _) = page("bare", vec![("bare.capture", bare)]);
    browser.open(&bare);
    let pools = browser.evaluate("[...document.getElementById('pool').options].map((option) => option.text)");
    assert_eq!(
        pools,
        json!(["device 0 (NVIDIA H200)", "device 0: managed and pinned host memory", "device 1 (NVIDIA H200)"])
    );
    assert_eq!(browser.text("#legend"), "device");
    browser.picture("bare-1280");
    is_quiet(&mut browser);
}

#[test]
fn a_place_has_one_colour_in_all_views() {
    // The places on the device have the opposite order of those on the host.
    let mut made = Made::new("train");
    for place in 0..4 {
        made.alloc(MIB * u64::from(1 + place), MemKind::Device, place);
        made.alloc(MIB * u64::from(9 - place), MemKind::PinnedHost, place);
    }
    let (page, _) = page("colours", vec![("colours.capture", made)]);
    let mut browser = Browser::start();
    browser.open(&page);
    choose(&mut browser, "by", "place");
    // The script returns the colours of the legend by name. If another view has other colours, it returns their names
    // in that view.
    let colours = "(() => {
        const colour = (element) => getComputedStyle(element).backgroundColor;
        const legend = Object.fromEntries(
            [...document.querySelectorAll('#legend span')].map((entry) => [entry.innerText, colour(entry.firstChild)]));
        const wrong = [];
        const look = (name, text, found) => {
            const place = Object.keys(legend).find((place) => text.includes(place));
            if (legend[place] !== found) wrong.push([name, text, found]);
        };
        for (const row of document.querySelectorAll('#places tbody tr')) {
            look('table', row.cells[0].innerText.split(',')[0], colour(row.querySelector('i')));
        }
        const frames = [...document.querySelectorAll('.frame')].filter((frame) => /model|adam/.test(frame.ariaLabel));
        for (const frame of frames) look('flame', frame.ariaLabel, colour(frame));
        if (!frames.length) wrong.push('no frames');
        for (const id of ['chart', 'bands']) {
            const { width, height } = document.getElementById(id);
            const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
            copy.drawImage(document.getElementById(id), 0, 0);
            const pixels = copy.getImageData(0, 0, width, height).data;
            const seen = new Set();
            for (let at = 0; at < pixels.length; at += 4) seen.add(`rgb(${pixels.slice(at, at + 3).join(', ')})`);
            for (const place of Object.keys(legend)) if (!seen.has(legend[place])) wrong.push([id, place]);
        }
        return [legend, wrong];
    })()";
    let on_device = browser.evaluate(colours);
    assert_eq!(on_device[1], json!([]));
    let different: std::collections::BTreeSet<_> =
        on_device[0].as_object().expect("it has names").values().map(Value::to_string).collect();
    assert_eq!(different.len(), 4, "{on_device}");
    choose(&mut browser, "pool", "1");
    assert_eq!(browser.evaluate(colours), on_device);
    is_quiet(&mut browser);
}

#[test]
fn names_are_text() {
    let name = format!(
        "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>{}",
        "very_long_name::".repeat(40)
    );
    let mut made = Made::new(&name);
    made.long_names(&name);
    let (page, _) = page("names", vec![("names.capture", made.training(3, 4, MIB))]);
    let mut browser = Browser::start();
    browser.open(&page);
    let title = browser.evaluate("document.title");
    assert!(title.as_str().expect("it is text").starts_with("script><img src=x"), "{title}");
    assert_eq!(browser.evaluate("document.querySelectorAll('img').length"), 0);
    browser.evaluate(
        "{ const by = document.getElementById('by'); by.value = 'place'; by.dispatchEvent(new Event('change')); }",
    );
    browser.drawn();
    fits(&mut browser);
    browser.picture("names-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("names-400");
    is_quiet(&mut browser);
}
