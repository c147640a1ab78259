//! Tests the page of `gpumem report --html` in Chromium. `cargo test` leaves these tests out, because not every machine has
//! Chromium:
//!
//! ```text
//! cargo test -p gpumem-cli --test browser
//! ```
//!
//! They leave pictures in `target/browser`.

mod devtools;
#[path = "../command/recording_builder.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod recording_builder;

use std::{
    fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use self::{
    devtools::Browser,
    recording_builder::{MIB, RecordingBuilder},
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
fn page(name: &str, recordings: Vec<(&str, RecordingBuilder)>) -> (PathBuf, Vec<Value>) {
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

/// Checks that the page is not wider than the window, so that it does not scroll from side to side.
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

/// Returns the heading of the selected moment: its memory and its time.
fn moment(browser: &mut Browser) -> String {
    browser.text("#moment")
}

fn choose(browser: &mut Browser, id: &str, value: &str) {
    browser.evaluate(&format!(
        "{{ const choice = document.getElementById('{id}'); choice.value = '{value}'; choice.dispatchEvent(new Event('change')); }}"
    ));
    browser.wait_for("document.body.getAttribute('aria-busy') === 'false'");
    browser.drawn();
}

/// The first screen shows which rank differs from the others, and at which place.
#[test]
fn many_ranks() {
    let (folder, page) = (file("ranks"), file("ranks.html"));
    fs::create_dir_all(&folder).expect("the folder can be created");
    for rank in 0..100 {
        let recording = folder.join(format!("train.rank{rank}.gpu0.pid{rank}.capture"));
        fs::write(recording, RecordingBuilder::of_rank(rank).file()).expect("the recording can be written");
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

    // If rows are ordered by peaks, the highest peak is in the first row.
    choose(&mut browser, "fleet-order", "peak");
    let [left, top, width, height] = browser.place("#fleet-map");
    browser.hover([left + width / 4.0, top + 1.0]);
    assert!(browser.text("#tip").starts_with("rank 17: 17.2 GiB at most\nafter "), "{}", browser.text("#tip"));
    // A recording without events has only its curve and its places.
    browser.click([left + width / 4.0, top + height / 3.0]);
    assert!(browser.text("#fleet-selected").ends_with(" at its peak, compared with the median of all"));
    assert_eq!(browser.evaluate("document.getElementById('events').hidden"), json!(true));
    assert_eq!(browser.evaluate("document.body.getAttribute('aria-busy')"), json!("false"));
    browser.evaluate("document.querySelector('.rank').click()");
    browser.drawn();
    for width in ["0px", "100px", ""] {
        browser.evaluate(&format!("document.getElementById('fleet-map').style.width = '{width}'"));
        browser.drawn();
    }
    is_quiet(&mut browser);
}

#[test]
fn a_million_events() {
    let (page, _) = page("million", vec![("million.capture", RecordingBuilder::new("train").varied(1_000_000))]);
    let mut browser = Browser::start();
    let started = Instant::now();
    browser.open(&page);
    println!("the page of a million events was drawn after {:.1} s", started.elapsed().as_secs_f64());
    assert_eq!(moment(&mut browser), "80.7 GiB live after 8.068 s, the peak");
    browser.picture("million-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("million-400");
    is_quiet(&mut browser);
}

#[test]
fn a_training_run() {
    let (page, reports) =
        page("training", vec![("train.capture", RecordingBuilder::new("train").training(12, 10, 10 * MIB))]);
    let mut browser = Browser::start();
    browser.open(&page);
    assert_eq!(browser.text("#title"), "train: 437 MiB at most");
    let summary = browser.text("#summary");
    assert!(
        summary.starts_with("device 0: the peak was 437 MiB, after ")
            && summary.ends_with("src/adam.rs:30 in train > step, called from src/main.rs:9, holds 46 % of the peak."),
        "{summary}"
    );
    // The rows of the table add up to the peak.
    let rows =
        browser.evaluate("[...document.querySelectorAll('#places tbody tr')].map((row) => row.cells[2].innerText)");
    assert_eq!(rows, json!(["200 MiB", "100 MiB", "100 MiB", "32 MiB", "5 MiB"]));
    assert_eq!(reports[0]["devices"][0]["peak_bytes"], 437 * MIB);
    // A click on a frame shows only this frame. A click on the path shows all frames again.
    let frames = "document.querySelectorAll('.frame').length";
    let all = browser.number(frames);
    let [left, top, width, height] = browser.place(".frame");
    browser.hover([left + width / 2.0, top + height / 2.0]);
    assert_eq!(browser.text("#tip"), "train\n305 MiB, 69.8 %, 21 blocks");
    browser.click([left + width / 2.0, top + height / 2.0]);
    assert!(browser.number(frames) < all);
    assert_eq!(browser.text("#path"), "all\ntrain");
    let [left, top, width, height] = browser.place("#path button");
    browser.click([left + width / 2.0, top + height / 2.0]);
    assert!((browser.number(frames) - all).abs() < 0.5);
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
fn tensors_are_shown_in_place_of_the_memory_from_the_driver() {
    let known_from = Duration::from_micros(60);
    let made = RecordingBuilder::new("train").tensors(6, 10, 10 * MIB, Some(known_from));
    let (page, reports) = page("tensors", vec![("tensors.capture", made)]);
    let peak = &reports[0]["torch"]["devices"][0]["peak"];
    assert_eq!(peak["allocated_bytes"], 205 * MIB);
    let mut browser = Browser::start();
    browser.open(&page);
    let summary = browser.text("#summary");
    assert!(summary.ends_with("\nPyTorch 2.11.0, device 0: tensors had 205 MiB at most, after 270 µs."), "{summary}");
    // The page opens on the tensors.
    let words = "Tensors: 205 MiB of 300 MiB from the driver after 270 µs, the peak";
    assert_eq!(moment(&mut browser), words);
    choose(&mut browser, "source", "driver");
    assert!(moment(&mut browser).starts_with("300 MiB live after "), "{}", moment(&mut browser));
    choose(&mut browser, "source", "tensors");
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
    browser.picture("tensors-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("tensors-400");
    is_quiet(&mut browser);
}

#[test]
fn names_are_text() {
    let name = format!(
        "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>{}",
        "very_long_name::".repeat(40)
    );
    let mut made = RecordingBuilder::new(&name);
    made.long_names(&name);
    let (page, _) = page("names", vec![("names.capture", made.training(3, 4, MIB))]);
    let mut browser = Browser::start();
    browser.open(&page);
    let title = browser.evaluate("document.title");
    assert!(title.as_str().expect("it is text").starts_with("script><img src=x"), "{title}");
    assert_eq!(browser.evaluate("document.querySelectorAll('img').length"), 0);
    choose(&mut browser, "by", "place");
    fits(&mut browser);
    browser.picture("names-1280");
    browser.size(400, 800);
    browser.drawn();
    fits(&mut browser);
    browser.picture("names-400");
    is_quiet(&mut browser);
}
