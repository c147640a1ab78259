//! Tests hostile names in everything that the command prints and writes. Text shows them on one line, as escapes. JSON contains
//! them unchanged, in JSON's own escapes. Formats of other tools are data: they contain the names unchanged, and can be read.
//!
//! The formats are those in the help of the command. A new format fails a test until it is listed here. Names from the driver and
//! from other processes are tested in `tests/tests/machine/names.rs`.

use std::{
    ffi::{OsStr, OsString},
    fs,
    io::Read,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use gpumem_core::model::{Bytes, CallsiteId, Label, MemKind, Source, StackId, ThreadId};
use gpumem_core::testing::{assert_printable, has};
use gpumem_recording::{
    AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvents, AllocatorStats, BlockLabel,
    CallsiteDefinition, CodeAddress, DeviceDefinition, Interception, Item, ModuleDefinition, Process, StackDefinition,
    Symbol, SymbolsDefinition, ThreadDefinition,
};
use serde_json::Value;

use crate::{
    Ran, VIEWS, file,
    formats::{Fields, rows, unpickled},
    gpumem, output_of,
    recording_builder::{DEVICE, MIB, RecordingBuilder, allocator_event},
    report::written,
};

/// A name with characters that a terminal obeys, that reverse text or that are invisible, and with the delimiters of
/// tables, Markdown, HTML and stacks.
const NAME: &str = "x\u{1b}[31m\u{7}\r\t\u{7f}\u{85}\u{9b}2J\u{200b}\u{200e}\u{2028}\u{2029}\u{202e}\u{2066}\u{61c}\u{feff}\u{e0041}\
                    |`;<script>\"'\\\nFORGED: y\u{ffff}";

/// Checks that the text is JSON that a terminal can show. If the text contains the name, a reader must find the name unchanged.
#[track_caller]
fn assert_json(text: &str, has_name: bool) -> Value {
    assert_printable(text);
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(has_name, has(&value, NAME), "{text}");
    value
}

/// Returns the path of a file in a folder. The names of both are hostile, and they are not UTF-8 either.
fn path(name: &str) -> PathBuf {
    let folder = file("names").join(OsString::from_vec([NAME.as_bytes(), b"\xff"].concat()));
    fs::create_dir_all(&folder).expect("Linux takes such names");
    folder.join(OsString::from_vec([NAME.as_bytes(), b"\xff", name.as_bytes()].concat()))
}

/// Runs the command. Returns its output for a terminal with this number of columns, or for a file.
fn ran(arguments: &[&OsStr], columns: Option<&str>) -> Ran {
    let mut command = gpumem(&[]);
    command.args(arguments).env("GPUMEM_GAUGE", NAME).env("GPUMEM_CUPTI", NAME).env("CUDA_INJECTION64_PATH", NAME);
    command.env("XDG_RUNTIME_DIR", path("runtime"));
    let command = columns.into_iter().fold(&mut command, |command, columns| command.env("COLUMNS", columns));
    Ran::of(&command.output().expect("the command starts"))
}

fn words<'a>(words: &'a str, files: &[&'a Path]) -> Vec<&'a OsStr> {
    words.split_whitespace().map(OsStr::new).chain(files.iter().map(|file| file.as_os_str())).collect()
}

/// Checks that both outputs are text.
#[track_caller]
fn prints_text(arguments: &[&OsStr]) {
    for columns in [None, Some("60")] {
        let Ran { stdout, stderr, .. } = ran(arguments, columns);
        assert!(!stdout.is_empty() || !stderr.is_empty(), "{arguments:?}");
        assert_printable(&stdout);
        assert_printable(&stderr);
    }
}

#[track_caller]
fn prints_json(arguments: &[&OsStr], has_name: bool) -> Value {
    let Ran { stdout, stderr, .. } = ran(arguments, None);
    assert_printable(&stderr);
    assert_json(&stdout, has_name)
}

/// Defines stack 50, of a function with a line that another function called, and stack 51, of a function without a line in a
/// library.
fn define_stacks(made: &mut RecordingBuilder) {
    let name = || NAME.to_owned();
    made.item(&Item::Module(ModuleDefinition {
        id: 9,
        path: format!("/usr/lib/lib{NAME}.so"),
        build_id: vec![1],
        base: 0,
    }));
    let address = |offset| CodeAddress { module: 9, offset };
    for (offset, file) in [(1, Some(name())), (2, Some(name())), (3, None)] {
        let symbol = Symbol { function: Some(name()), line: file.as_ref().map(|_| 7), file, column: None };
        made.item(&Item::Symbols(SymbolsDefinition { address: address(offset), symbols: vec![symbol] }));
    }
    made.item(&Item::Stack(StackDefinition { id: StackId(50), addresses: vec![address(1), address(2)] }));
    made.item(&Item::Stack(StackDefinition { id: StackId(51), addresses: vec![address(3)] }));
}

/// Makes a recording in which all names are hostile.
fn made() -> RecordingBuilder {
    let name = || NAME.to_owned();
    let mut made = RecordingBuilder::new(NAME);
    made.item(&Item::Process(Process {
        pid: 4711,
        executable: format!("/{NAME}/{NAME}"),
        arguments: vec![name(); 3],
        folder: format!("/{NAME}"),
        own_module: Some(name()),
        version: name(),
        ..Process::default()
    }));
    made.item(&Item::Interception(Interception { source: Source::Dispatch, library: format!("/{NAME}/{NAME}") }));
    made.item(&Item::Device(DeviceDefinition {
        device: DEVICE,
        name: Some(name()),
        total: Some(Bytes::gib(141)),
        uuid: Some(name()),
    }));
    made.item(&Item::Thread(ThreadDefinition { thread: ThreadId(1), os_id: 4711, name: Some(name()) }));
    define_stacks(&mut made);
    made.item(&Item::Callsite(CallsiteDefinition {
        id: CallsiteId(50),
        name: Some(name()),
        file: name(),
        line: 1,
        column: 1,
        module_path: Some(name()),
    }));
    let scope = made.open(48);
    // The scope is event 1.
    for (number, place) in (2..).zip([49, 50, 90]) {
        let key = made.alloc(20 * MIB, MemKind::Pool, place);
        let label = Label { name: name(), shape: vec![2], dtype: name() };
        made.item(&Item::Label(BlockLabel { key, number, label }));
    }
    made.close(scope);
    made.alloc(8 * MIB, MemKind::PinnedHost, 49);
    made.rejected(1 << 40, MemKind::Device, 49);
    made
}

/// Returns a recording with tensors, one with an allocator whose history is missing, and one with neither.
fn recordings() -> [PathBuf; 3] {
    // The files are written once, because tests that run at the same time read the same files.
    static FILES: OnceLock<[PathBuf; 3]> = OnceLock::new();
    FILES.get_or_init(written_recordings).clone()
}

fn written_recordings() -> [PathBuf; 3] {
    let device = |said: u64| AllocatorDevice {
        device: DEVICE,
        older: 0,
        known_from: None,
        reported: Some(AllocatorStats { allocated: Bytes::new(said), ..AllocatorStats::default() }),
    };
    let mut tensors = made();
    let address = 0x7e00_0000_0000;
    tensors.item(&Item::AllocatorEvents(AllocatorEvents {
        device: DEVICE,
        events: vec![
            allocator_event(Duration::from_micros(5), AllocatorAction::SegmentAlloc, address, 20 * MIB, 50),
            allocator_event(Duration::from_micros(6), AllocatorAction::Alloc, address, MIB, 50),
        ],
    }));
    tensors.item(&Item::Allocator(AllocatorDefinition {
        name: NAME.to_owned(),
        devices: vec![device(7)],
        missing_modules: Some(NAME.to_owned()),
        ..AllocatorDefinition::default()
    }));
    let mut missing = made();
    missing.alloc(MIB, MemKind::Pool, 49);
    missing.item(&Item::Allocator(AllocatorDefinition {
        name: NAME.to_owned(),
        missing: Some(NAME.to_owned()),
        ..AllocatorDefinition::default()
    }));
    [("a.capture", tensors), ("b.capture", missing), ("c.capture", made())].map(|(name, made)| {
        let path = path(name);
        fs::write(&path, made.file()).expect("the file can be written");
        path
    })
}

#[test]
fn reports() {
    let [tensors, missing, plain] = recordings();
    for view in VIEWS.into_iter().chain([&["--calls", "--inside", "e"][..], &["--at", "oom"]]) {
        let view = view.join(" ");
        for files in [&[&*tensors][..], &[&missing], &[&plain], &[&tensors, &missing, &plain]] {
            prints_text(&words(&format!("report {view}"), files));
            prints_json(&words(&format!("report {view} --json"), files), true);
        }
    }
}

#[test]
fn differences() {
    let [tensors, missing, plain] = recordings();
    let other = written("names-other.capture", &RecordingBuilder::new("train").training(2, 4, MIB).file());
    let other = Path::new(&other);
    for files in [[&*tensors, &tensors], [&tensors, other], [other, &missing], [&plain, &tensors], [&missing, &plain]] {
        prints_text(&words("diff --fail-on-increase 5%", files.as_slice()));
        prints_json(&words("diff --json", &files), true);
        prints_text(&words("diff --markdown", &files));
        let markdown = ran(&words("diff --markdown", &files), None).stdout;
        for line in markdown.lines().filter(|line| line.starts_with("| ") || line.starts_with("> ")) {
            // Characters outside of code have no meaning, and a row has four cells.
            let outside: String = line.split('`').step_by(2).collect();
            assert!(!outside.replace("<code>", "").replace("</code>", "").contains('<'), "{line}");
            assert!(!line.starts_with('|') || line.matches('|').count() == 5, "{line}");
        }
    }
    let tables = ran(&words("diff --markdown", &[&tensors, other]), None).stdout;
    assert!(tables.contains("| tensors at |") || tables.contains("<code>x&#92;u&#123;1b&#125;"), "{tables}");
}

/// The test uses two folders of recordings, their baselines, and the files for CI.
#[test]
fn what_ci_reads() {
    let [tensors, _, plain] = recordings();
    let [before, after] = ["before", "after"].map(path);
    for (folder, bytes) in [(&before, MIB), (&after, 2 * MIB)] {
        fs::create_dir_all(folder).expect("it can be made");
        // Nothing is missing from these recordings.
        for file in ["0.capture", "1.capture"] {
            let mut made = RecordingBuilder::new("train");
            define_stacks(&mut made);
            made.alloc(bytes, MemKind::Pool, 49);
            fs::write(folder.join(file), made.file()).expect("it can be written");
        }
    }
    for view in ["", "--markdown", "--fail-on-increase 1% --annotations github"] {
        prints_text(&words(&format!("diff {view}"), &[&before, &after]));
    }
    prints_json(&words("diff --json", &[&before, &after]), true);
    let peaks = path("peaks.json");
    let written = ran(&words("baseline write", &[&peaks, &before]), None);
    assert_eq!(written.code, Some(0), "{written:?}");
    assert_printable(&fs::read_to_string(&peaks).expect("it was written"));
    for recordings in [&before, &after, &plain] {
        for view in ["", "--markdown", "--annotations github"] {
            prints_text(&words(&format!("baseline check {view}"), &[&peaks, recordings]));
        }
    }
    prints_json(&words("baseline check --json", &[&peaks, &after]), true);
    let limit = format!("--max-peak={NAME}=1MiB");
    prints_text(&[&[OsStr::new("report"), limit.as_ref()], &words("", &[&plain])[..]].concat());
    let junit = file("names-junit.xml");
    let annotations = format!("--annotations=junit={}", junit.display());
    for annotations in ["--annotations=github", &annotations] {
        let limits = ["report", "--max-peak=1MiB", "--fail-if=lost", annotations].map(OsStr::new);
        prints_text(&[&limits[..], &words("", &[&tensors])].concat());
    }
    assert_printable(&fs::read_to_string(junit).expect("it was written"));
}

#[test]
fn pages() {
    let page = path("page.html");
    let [tensors, missing, plain] = recordings();
    let ran = ran(&[&words("report --html", &[&page])[..], &words("", &[&tensors, &missing, &plain])].concat(), None);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{ran:?}");
    let page = fs::read_to_string(page).expect("the page is text");
    let about = page.split_once("id=\"about-data\">").and_then(|(_, rest)| rest.split_once("</script>"));
    let (about, _) = about.expect("the page has its data");
    assert_json(about, false);
    assert!(!about.contains('<') && about.contains("FORGED"), "names do not end the script");
}

/// Returns the formats that the help lists.
fn formats() -> Vec<String> {
    let stderr = crate::ran(&["report", "--format", "?", "x"]).stderr;
    let (_, list) = stderr.split_once("[possible values: ").unwrap_or_else(|| panic!("{stderr}"));
    let (list, _) = list.split_once(']').expect("the list ends");
    list.split(", ").map(str::to_owned).collect()
}

#[test]
fn formats_of_other_tools() {
    let files = recordings();
    assert!(formats().len() > 5, "{:?}", formats());
    for format in formats() {
        for (number, recording) in files.iter().enumerate() {
            let out = path(&format!("{number}.{format}"));
            let arguments = [OsStr::new("report"), "--format".as_ref(), format.as_ref(), "-o".as_ref(), out.as_ref()];
            let ran = ran(&[&arguments[..], &[recording.as_os_str()]].concat(), None);
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{format}: {ran:?}");
            let text = || fs::read_to_string(&out).unwrap_or_else(|error| panic!("{format} is text: {error}"));
            match format.as_str() {
                // The format is text.
                "folded" => {
                    let text = text();
                    assert_printable(&text);
                    assert!(
                        text.lines().all(|line| line.rsplit_once(' ').is_some_and(|(_, n)| n.parse::<i64>().is_ok()))
                    );
                    assert!(text.contains("x\\u{1b}[31m"), "{text}");
                }
                // The format is JSON that a terminal can print.
                "json" => text().lines().for_each(|line| drop(assert_json(line, line.contains("x\\u001b")))),
                // The format is data, with the names as they are.
                "pprof" => {
                    let mut plain = Vec::new();
                    flate2::read::GzDecoder::new(fs::File::open(&out).unwrap()).read_to_end(&mut plain).unwrap();
                    let texts = Fields::of(&plain).bytes(6).into_iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
                    assert!(texts.iter().all(|text| std::str::from_utf8(text).is_ok()));
                    assert!(texts.contains(&NAME.as_bytes().to_vec()), "{texts:?}");
                }
                "perfetto" => {
                    let tracks = Fields::of(&fs::read(&out).unwrap()).messages(1);
                    let events = tracks.iter().flat_map(|packet| packet.messages(11));
                    assert!(events.filter_map(|event| event.text(23)).any(|name| name == NAME));
                }
                "torch" => assert!(unpickled(&out).is_none_or(|snapshot| has(&snapshot, NAME))),
                "parquet" => {
                    let tables: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path()).collect();
                    assert!(tables.len() >= 2, "{tables:?}");
                    let has_name = |table: &PathBuf| rows(table).iter().any(|row| row.to_string().contains(NAME));
                    assert!(tables.iter().all(|table| !rows(table).is_empty()) && tables.iter().all(has_name));
                }
                // The format is a picture for people.
                "svg" => {
                    let text = text();
                    assert_printable(&text);
                    assert!(text.contains("x\\u{1b}[31m") && !text.contains("<script"), "{text}");
                    assert!(!text.contains(">FORGED"), "a name forges a line: {text}");
                    let script = "import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])";
                    let parsed = output_of("python3", &["-c".as_ref(), script.as_ref(), out.as_os_str()]);
                    assert!(parsed.is_none_or(|parsed| parsed.status.success()), "{text}");
                }
                other => panic!("the format {other} has no test of its names"),
            }
        }
    }
}

#[test]
fn estimates() {
    let folder = path("model");
    fs::create_dir_all(&folder).expect("it can be made");
    let quoted = serde_json::to_string(NAME).unwrap();
    let header = format!(r#"{{{quoted}:{{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}}}}"#);
    let weights = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 32]].concat();
    let unknown = format!(r#"{{"architectures": [{quoted}], "model_type": {quoted}}}"#);
    let wrong = format!(r#"{{"model_type": "gpt2", "n_layer": {quoted}}}"#);
    let gpt2 = format!(r#"{{"model_type": "gpt2", "n_layer": 1, "_name_or_path": {quoted}, {quoted}: 1}}"#);
    for (name, bytes) in [
        ("weights.safetensors", weights.as_slice()),
        ("unknown.json", unknown.as_bytes()),
        ("wrong.json", wrong.as_bytes()),
        ("gpt2.json", gpt2.as_bytes()),
        ("none.toml", NAME.as_bytes()),
        ("none.gguf", NAME.as_bytes()),
    ] {
        let file = folder.join(name);
        fs::write(&file, bytes).expect("it can be written");
        prints_text(&words("estimate --savings --fit 80GiB", &[&file]));
        let json = ran(&words("estimate --savings --fit 80GiB --json", &[&file]), None);
        assert_printable(&json.stderr);
        if !json.stdout.is_empty() {
            assert_json(&json.stdout, name.starts_with("weights"));
        }
    }
    let (gpt2, step) = (folder.join("gpt2.json"), folder.join("step.json"));
    fs::write(&step, format!(r#"{{"optimizer": {quoted}}}"#)).expect("it can be written");
    prints_text(&words("estimate --step", &[&step, &gpt2]));
    let record = path("estimated.capture");
    prints_text(&words("estimate --record", &[&record, &gpt2]));
    prints_text(&words("report", &[&record]));
    prints_text(&words("estimate --record", &[&gpt2, &gpt2]));
}

#[test]
fn the_machine() {
    for command in ["doctor", "info", "ps"] {
        prints_text(&words(command, &[]));
    }
    prints_json(&words("doctor --json", &[]), true);
    let [tensors, ..] = recordings();
    let ran = ran(&words("watch --json --count 1", &[&tensors]), None);
    assert_printable(&ran.stderr);
    let reading = assert_json(&ran.stdout, true);
    assert!(reading["recordings"].as_array().is_some_and(|all| !all.is_empty()), "{reading}");
}

/// An error is text, whatever the arguments are.
#[test]
fn errors() {
    let none = path("none");
    let option = format!("--{NAME}");
    for arguments in [
        [OsStr::new("report"), option.as_ref(), none.as_ref()],
        [OsStr::new("report"), OsStr::from_bytes(b"--\xff\x1b"), none.as_ref()],
        [OsStr::new("report"), OsStr::new("--at"), NAME.as_ref()],
        [OsStr::new("run"), OsStr::new("--"), none.as_ref()],
    ] {
        prints_text(&arguments);
    }
}
