//! Tests `gpumem report`.

use std::{collections::BTreeSet, fs, path::PathBuf};

use gpumem_core::model::{EventKind, MemKind, StackId};
use gpumem_recording::{CodeAddress, Item, ModuleDefinition, Process, StackDefinition};
use serde_json::Value;

use crate::{
    Ran, VIEWS, file,
    page::page,
    ran,
    recording_builder::{MIB, RecordingBuilder, callsite},
};

/// Writes a recording to a file of this name.
pub(crate) fn recorded(name: &str, made: RecordingBuilder) -> String {
    written(name, &made.file())
}

pub(crate) fn written(name: &str, bytes: &[u8]) -> String {
    let file = file(name);
    fs::write(&file, bytes).expect("the file can be written");
    text(file)
}

fn text(file: PathBuf) -> String {
    file.into_os_string().into_string().expect("the name is text")
}

pub(crate) fn training(name: &str) -> String {
    recorded(name, RecordingBuilder::new("train").training(3, 10, 10 * MIB))
}

#[track_caller]
pub(crate) fn printed(arguments: &[&str]) -> String {
    let Ran { code, stdout, stderr } = ran(arguments);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{arguments:?}: {stdout}");
    stdout
}

#[track_caller]
pub(crate) fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(arguments)).expect("it is JSON")
}

/// A new option of the command fails this test until it is in one of the two lists. Other tests try each of [`VIEWS`].
#[test]
fn each_view_is_in_the_list_of_views() {
    const OTHERS: [&str; 13] = [
        "--inside",
        "--depth",
        "--min",
        "--html",
        "--rank",
        "--format",
        "--fold",
        "--output",
        "--json",
        "--max-peak",
        "--fail-if",
        "--annotations",
        "--help",
    ];
    let help = printed(&["report", "--help"]);
    // An option is indented by less than its description, and may have a short form before it: `  -o, --output <OUT>`.
    let options = help.lines().filter_map(|line| {
        let (short, long) = line.split_at_checked(6)?;
        let is_option = long.starts_with("--") && (short.trim().is_empty() || short.ends_with(", "));
        long.split_whitespace().next().filter(|_| is_option)
    });
    let options: BTreeSet<&str> = options.collect();
    let views = VIEWS.into_iter().filter_map(|view| view.first().copied());
    let listed: BTreeSet<&str> = views.chain(OTHERS).collect();
    assert_eq!(options, listed, "{help}");
}

/// The program resets its summary, but the report is about the whole recording.
#[test]
fn a_reset_summary_lowers_no_peak_of_the_report() {
    let mut made = RecordingBuilder::new("epochs");
    let scope = made.open(3);
    for mib in [100, 10] {
        let block = made.alloc(mib * MIB, MemKind::Device, 2);
        made.free(block);
        made.event(EventKind::ResetSummary);
    }
    made.close(scope);
    let file = recorded("epochs.capture", made);
    let text = printed(&["report", &file]);
    assert!(text.contains("the peak was 100 MiB\n") && !text.contains("10 MiB"), "{text}");
    assert_eq!(json(&["report", "--json", &file])["devices"][0]["peak_bytes"], 100 * MIB);
    for scope in json(&["report", "--tree", "--json", &file])["scopes"].as_array().unwrap() {
        assert_eq!((&scope["peak_bytes"], &scope["allocations"]), (&(100 * MIB).into(), &2.into()), "{scope}");
    }
}

/// Weights have 100 MiB, cuBLAS 32, the state of the optimizer 200, gradients 100, and the last activation 5.
const PEAK: u64 = 437 * MIB;

/// Returns the exit code, and stderr without the name of the file.
fn compared(limit: &str, file: &str) -> (Option<i32>, String) {
    let Ran { code, stdout, stderr } = ran(&["report", "--max-peak", limit, file]);
    assert!(stdout.contains("allocation"), "{stdout}");
    (code, stderr.replace(file, "FILE"))
}

#[test]
fn a_peak_above_the_limit_ends_with_1() {
    let file = training("limit.capture");
    assert_eq!(compared("437MiB", &file), (Some(0), String::new()));
    let above = "gpumem: FILE: the peak of device 0 was 437 MiB, 1 MiB above the limit of 436 MiB\n";
    assert_eq!(compared("436MiB", &file), (Some(1), above.to_owned()));
    assert_eq!(ran(&["report", "--json", "--max-peak", "436MiB", &file]).code, Some(1));
    // A value that was not measured does not keep a limit.
    let bytes = fs::read(&file).expect("it is there");
    let cut = written("limit-cut.capture", &bytes[..bytes.len() - 10]);
    let (code, stderr) = compared("1TiB", &cut);
    assert!(
        code == Some(2)
            && stderr
                .starts_with("gpumem: FILE: the peak may have been above the limit of 1 TiB. The file has no end: "),
        "{stderr}"
    );
    let nothing = "gpumem: nothing was measured, so nothing is known of the limit of 1 TiB\n";
    assert_eq!(
        compared("1TiB", &recorded("limit-idle.capture", RecordingBuilder::new("idle"))),
        (Some(1), nothing.to_owned())
    );
}

#[test]
fn a_recording_is_not_replaced_by_its_page() {
    let files = [training("kept-0.capture"), training("kept-1.capture")];
    for arguments in [&["report", "--html"][..], &["report", "--format", "torch", "--output"]] {
        let ran = ran(&[arguments, &[&*files[0], &*files[1]]].concat());
        assert_eq!(ran.code, Some(2));
        assert!(ran.stderr.contains("it is a recording, which would be lost"), "{}", ran.stderr);
        printed(&["report", &files[0]]);
    }
}

/// The arguments are the most useful part of a command line, and the folder of an interpreter the least. The program lasts longer
/// than its events.
#[test]
fn a_command_line_keeps_its_arguments() {
    let mut made = RecordingBuilder::new("long");
    made.item(&Item::Process(Process {
        pid: 4711,
        arguments: ["/opt/conda/envs/train-with-a-long-name/bin/python3.12", "train.py", "--epochs", "3"]
            .map(str::to_owned)
            .into(),
        ..Process::default()
    }));
    made.alloc(MIB, MemKind::Pool, 0);
    made.wait(2_000_000);
    let text = printed(&["report", &recorded("long-command.capture", made)]);
    assert!(text.contains("\n…/python3.12 train.py --epochs 3; process 4711, 2 s, 0 frees\n"), "{text}");
}

#[test]
fn json_has_the_exact_numbers() {
    let overview = json(&["report", "--json", &training("json.capture")]);
    let device = &overview["devices"][0];
    assert_eq!(device["peak_bytes"], PEAK);
    assert_eq!(device["total_bytes"], 141_u64 << 30);
    assert_eq!(device["live_at_end_bytes"], 32 * MIB);
    assert_eq!((&overview["allocations"], &overview["frees"]), (&81.into(), &80.into()));
    for by in ["peak_by_kind", "peak_by_library", "peak_by_scope", "peak_by_place"] {
        let sums = device[by].as_array().expect("it is a list");
        let sum: u64 = sums.iter().map(|sum| sum["bytes"].as_u64().expect("it is an amount")).sum();
        assert_eq!(sum, PEAK, "{by} adds up to the peak");
    }
    assert_eq!(device["highest_sample_bytes"], Value::Null, "what was not measured is null");
    assert_eq!(overview["refused"], Value::Null);
    assert_eq!(overview["missing"]["lost_events"], 0);
}

#[test]
fn a_moment_shows_what_was_live_then() {
    let file = training("at.capture");
    let bytes = |moment: &str| json(&["report", "--json", "--at", moment, &file])["devices"][0]["bytes"].clone();
    assert_eq!((bytes("peak"), bytes("start"), bytes("end")), (PEAK.into(), 0.into(), (32 * MIB).into()));
    // The clock advances by a microsecond with each event: the scope, then five weights.
    assert_eq!(
        (bytes("6us"), bytes("0.006ms"), bytes("0.0069 ms")),
        ((50 * MIB).into(), (50 * MIB).into(), (50 * MIB).into())
    );
    let text = printed(&["report", "--at", "12s", &file]);
    let words = "device 0 (NVIDIA H200): 32 MiB in use at 12 s, which is after the end of the recording (";
    assert!(text.starts_with(words), "{text}");
    for (arguments, why) in [
        (&["--at", "soon"][..], "write start, peak, process-peak, end, oom, or a time such as 12.5s"),
        (&["--at", "oom"], "the driver rejected no allocation"),
        (&["--between", "start", "oom"], "the driver rejected no allocation"),
    ] {
        let ran = ran(&[&["report"], arguments, &[&file]].concat());
        assert!(ran.code == Some(2) && ran.stderr.contains(why), "{arguments:?}: {ran:?}");
    }
}

#[test]
fn between_two_moments_is_what_came_and_went() {
    let file = training("between.capture");
    let difference =
        |from: &str, to: &str| json(&["report", "--json", "--between", from, to, &file])["devices"][0].clone();
    assert_eq!(difference("start", "peak")["bytes"], PEAK);
    assert_eq!(difference("peak", "end")["bytes"], -(405 * MIB.cast_signed()));
    assert_eq!(difference("start", "end")["blocks"], 1);
    let text = printed(&["report", "--between", "peak", "end", &file]);
    assert!(text.starts_with("device 0 (NVIDIA H200): -405 MiB (less) between the peak, after "), "{text}");
    // From a later moment to an earlier one, the sign is reversed.
    let text = printed(&["report", "--between", "peak", "start", &file]);
    let words = "device 0 (NVIDIA H200): -437 MiB (less) between the peak, after 202 µs and the start\n";
    assert!(text.starts_with(words), "{text}");
}

#[test]
fn tree_table_and_leaks_have_the_exact_numbers() {
    let file = training("views.capture");
    let places = json(&["report", "--table", "--json", &file]);
    let allocated: u64 =
        places["places"].as_array().unwrap().iter().map(|place| place["allocated_bytes"].as_u64().unwrap()).sum();
    // The blocks are weights, cuBLAS, the state, and activations and gradients of three steps.
    assert_eq!(allocated, (100 + 32 + 200 + 3 * 150) * MIB);
    assert_eq!(json(&["report", "--tree", "--json", &file])["scopes"][0]["peak_bytes"], PEAK);
    assert_eq!(json(&["report", "--leaks", "--json", &file])["not_freed"]["blocks"], 1);
    assert_eq!(ran(&["report", "--tree", "--table", &file]).code, Some(2), "one at a time");
}

#[test]
fn many_ranks_share_two_columns() {
    let files: Vec<String> = (0..6_u64)
        .map(|rank| {
            recorded(&format!("rank-{rank}.capture"), RecordingBuilder::new("train").training(2, 10, (10 + rank) * MIB))
        })
        .collect();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let text = printed(&[&["report"][..], &files].concat());
    assert!(text.contains("\n train > step: src/adam.rs:30       200.0  300.0  rank-5\n"), "{text}");
    assert!(text.contains("\n load: cuBLAS                        32.0   32.0  all\n"), "{text}");
    let words = "rank-5 differs most in train > step: src/adam.rs:30: it has 300 MiB there, and the median is 240 MiB.";
    assert!(text.contains("\nThe peaks are from 437 MiB (rank-0) to ") && text.contains(words), "{text}");
    let all = json(&[&["report", "--json"][..], &files].concat());
    assert_eq!(all.as_array().map(Vec::len), Some(6));
}

#[test]
fn a_line_of_python_stands_before_its_library() {
    let mut made = RecordingBuilder::new("python");
    let place = made.python();
    made.alloc(6 * MIB, MemKind::Device, place);
    made.alloc(4 * MIB, MemKind::Device, 4);
    // A few bytes that are in no peak do not make the table appear.
    made.alloc(4, MemKind::PinnedHost, place);
    let file = recorded("python.capture", made);
    let text = printed(&["report", &file]);
    for line in [
        " allocated at  MiB\n",
        " model.py:12     6  ████████\n   from train.py:40\n cuBLAS ",
        "library  PyTorch 6 MiB (60 %), cuBLAS 4 MiB (40 %)\n",
        "most     model.py:12, called from train.py:40, holds 60 % of the peak\n",
        "\n\n3 blocks (10.00 MiB) not freed at the end: as much as at the peak (--leaks shows them)\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text:?}");
    }
    let folded = printed(&["report", "--format", "folded", &file]);
    let stack = "<module> (train.py:40);forward (model.py:12);at::detail::empty_cuda (/home/ada/venv/";
    assert!(folded.contains(stack), "{folded}");
}

#[test]
fn what_has_no_stack_is_said() {
    let mut made = RecordingBuilder::new("small");
    let scope = made.open(2);
    for _ in 0..8 {
        // No stack has this id.
        made.alloc(MIB / 2, MemKind::Pool, 90);
    }
    made.close(scope);
    made.alloc(20 * MIB, MemKind::Pool, 0);
    let text = printed(&["report", &recorded("small.capture", made)]);
    let line = "no line  17 % of the peak has no stack: stacks are recorded for blocks of 1 MiB or more, and for none with --stacks none\n";
    assert!(text.contains(line) && text.contains("scope of src/main.rs:40"), "{text}");
    assert!(text.contains("library  the program 20 MiB (83 %), not known 4 MiB (17 %)\n"), "{text}");
}

#[test]
fn blocks_without_a_stack_have_a_library() {
    let mut made = RecordingBuilder::new("files");
    let path = "/venv/lib/python3.12/site-packages/cupy/cuda/memory.cpython-312-x86_64-linux-gnu.so".to_owned();
    made.item(&Item::Module(ModuleDefinition { id: 9, path, build_id: vec![4], base: 0 }));
    for (id, module) in [(60, 1), (61, 9)] {
        let addresses = vec![CodeAddress { module, offset: 0 }];
        made.item(&Item::Stack(StackDefinition { id: StackId(id), addresses }));
    }
    made.alloc(2 * MIB, MemKind::Pool, 59);
    made.alloc(MIB, MemKind::Pool, 60);
    made.alloc(MIB, MemKind::Pool, 0);
    let text = printed(&["report", &recorded("files.capture", made)]);
    for line in [
        "library  the program 3 MiB (75 %), CuPy 1 MiB (25 %)\n",
        "no line  50 % of the peak has no stack: ",
        "\n train (no stack)    2  ████",
        "\n CuPy                1  ██",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[test]
fn a_program_without_debug_information_is_said() {
    let mut made = RecordingBuilder::new("stripped");
    let addresses = vec![CodeAddress { module: 1, offset: 0x9999 }];
    made.item(&Item::Stack(StackDefinition { id: StackId(50), addresses }));
    made.alloc(3 * MIB, MemKind::Pool, 49);
    made.alloc(MIB, MemKind::Pool, 0);
    let text = printed(&["report", &recorded("stripped.capture", made)]);
    let line = "no line  75 % of the peak is from code without debug information: build it with -g, ";
    assert!(text.contains(line) && text.contains("\n train (no symbols)    3  ████"), "{text}");
    assert!(text.contains("library  the program 4 MiB (100 %)\n"), "{text}");
}

/// The memory of 22 requests is live at the same time: together they have more at the peak of the process than each of them had
/// at its own peak.
#[test]
fn names_that_differ_in_numbers_are_one_in_each_report() {
    let mut made = RecordingBuilder::new("serve");
    let requests: u32 = 22;
    for request in 0..requests {
        made.item(&Item::Callsite(callsite(10 + request, &format!("request {request}"), "src/serve.rs", 7)));
        let scope = made.open(8 + request);
        made.alloc((1 + u64::from(request)) * MIB, MemKind::Device, 1);
        made.close(scope);
    }
    let file = recorded("requests.capture", made);
    let other = recorded("requests-other.capture", RecordingBuilder::new("serve").training(1, 1, MIB));
    // The tree of calls has a row for each scope.
    for view in VIEWS.into_iter().filter(|view| *view != ["--calls"]) {
        let text = printed(&[&["report"], view, &[&*file]].concat());
        assert!(text.contains("request #") && !text.contains("request 2"), "{view:?}: {text}");
        assert!(text.matches("src/model.rs:42").count() <= 2, "{view:?}: {text}");
    }
    let most = "most     src/model.rs:42 in request #, called from src/main.rs:9, holds 100 % of the peak\n";
    assert!(printed(&["report", &file]).contains(most));
    for several in [&["report", &*file, &*other][..], &["diff", &*other, &*file]] {
        let text = printed(several);
        assert!(text.contains("request #") && !text.contains("request 2"), "{text}");
    }
    // The memory of a row at the peak is never above the row's own peak.
    let tree = printed(&["report", "--tree", &file]);
    let words = tree.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(" request # 253 253 253 253 22 22 "), "{tree}");
    assert!(tree.ends_with("#: names that differ only in numbers; their peak is at least this.\n"), "{tree}");
    // JSON contains each name.
    assert_eq!(json(&["report", "--json", "--tree", &file])["scopes"].as_array().unwrap().len(), 23);
}

/// The symbols of a program come at the end of its recording.
#[test]
fn a_recording_without_an_end_has_no_symbols() {
    let bytes = RecordingBuilder::without_symbols("endless").training(200, 100, MIB).file();
    let cut = written("endless.capture", &bytes[..bytes.len() * 2 / 3]);
    let missing_symbols = |file: &str| {
        let json: Value = serde_json::from_str(&ran(&["report", "--json", file]).stdout).expect("it is JSON");
        json["missing"]["symbols"].clone()
    };
    let why = "symbols are written at the end of the recording, which is missing; a process that still records writes them when it ends";
    // Stdout and stderr each report only once what is missing.
    let Ran { stdout, stderr, .. } = ran(&["report", &cut]);
    let text = ". The report covers the data before that, without lines and functions, which are written at the end.\n";
    assert!(stdout.contains(text) && !stdout.contains("-g") && stderr.lines().count() == 1, "{stdout}{stderr}");
    assert_eq!(stdout.matches(" end").count(), 2, "{stdout}");
    assert_eq!(missing_symbols(&cut), why);
    // A place without a name does not count as a new place.
    let whole = training("endless-whole.capture");
    assert_eq!(missing_symbols(&whole), Value::Null);
    for [before, after] in [[&cut, &whole], [&whole, &cut]] {
        let Ran { stdout, stderr, .. } = ran(&["diff", before, after]);
        assert!(!stdout.contains("no symbols") && stdout.contains(", without lines and functions"), "{stdout}{stderr}");
        assert!(stdout.contains("\n scope "), "what is known is compared: {stdout}");
    }
}

#[test]
fn pinned_memory_of_pytorch_says_what_it_was_rounded_from() {
    let mut made = RecordingBuilder::new("pinned");
    let python = made.python();
    let first = made.alloc(1024 * MIB, MemKind::PinnedHost, python);
    made.alloc(512 * MIB, MemKind::PinnedHost, python);
    // The next block is not PyTorch's, and the one after it is not rounded.
    made.alloc(64 * MIB, MemKind::PinnedHost, 0);
    made.alloc(3 * MIB, MemKind::PinnedHost, python);
    made.free(first);
    made.alloc(MIB, MemKind::Pool, 0);
    let file = recorded("pinned.capture", made);
    let text = printed(&["report", &file]);
    let line = "pinned   1536 MiB for requests of more than 768 MiB, because PyTorch rounds each one up to a power of two: \
                model.py:12 has 1536 MiB\n";
    assert!(text.contains("besides  pinned host at most 1.57 GiB") && text.contains(line), "{text}");
    let device = &json(&["report", "--json", &file])["devices"][0];
    assert_eq!(device["pinned_by_pytorch"][0]["bytes"], 1536 * MIB, "{device:#}");
    let none = &json(&["report", "--json", &training("pinned-none.capture")])["devices"][0]["pinned_by_pytorch"];
    assert_eq!(none.as_array().map(Vec::len), Some(0));
}

#[test]
fn what_is_no_recording_is_rejected() {
    for (name, bytes, why) in [
        ("empty", &b""[..], "the file is empty: "),
        ("text", b"hello, world: this is long enough for a header", "this is not a gpumem recording; pass a file that"),
        ("header", b"\x89gpumem\n\x01\0", "this recording is cut within its header"),
        (
            "newer",
            b"\x89gpumem\n\x63\0\0\0\0\0\0\0",
            "this recording is of version 99, and this gpumem reads version 1",
        ),
    ] {
        for command in [&["report"][..], &["report", "--json"], &["report", "--tree"]] {
            let file = written(name, bytes);
            let ran = ran(&[command, &[&file]].concat());
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{name}");
            assert!(ran.stderr.starts_with("gpumem: `") && ran.stderr.contains(why), "{}", ran.stderr);
            assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
        }
    }
}

/// No process writes to the pipe, `/dev/zero` has no end, and `/proc/kmsg` is a regular file that has nothing to read for hours.
#[test]
fn what_is_not_a_file_with_a_size_is_not_waited_for() {
    let pipe = |name: &str| {
        let pipe = file(name);
        let _ = std::fs::remove_file(&pipe);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo starts").success());
        pipe.to_str().expect("UTF-8").to_owned()
    };
    let (recording, unread) = (written("beside.capture", &RecordingBuilder::new("train").file()), pipe("pipe"));
    for wrong in ["/no/such/file", "/", &unread, "/dev/zero", "/proc/kmsg"] {
        for command in [
            &["report", wrong][..],
            &["report", "--json", wrong],
            &["diff", wrong, &recording],
            &["diff", &recording, wrong],
            &["baseline", "write", "/dev/null/none", wrong],
            &["baseline", "check", wrong, &recording],
            &["what-if", wrong],
            &["estimate", wrong],
        ] {
            let ran = ran(command);
            assert_eq!(ran.code, Some(2), "{command:?}: {}", ran.stderr);
            assert!(ran.stderr.starts_with("gpumem: "), "{command:?}: {}", ran.stderr);
        }
        let ran = ran(&["report", wrong]);
        assert!(ran.stderr.starts_with(&format!("gpumem: `{wrong}` cannot be read: ")), "{}", ran.stderr);
    }
    // The same applies to files next to a recording.
    let beside = [pipe("beside.capture.old"), written("beside.capture.torch", b"")];
    let ran = ran(&["report", &recording]);
    for file in beside {
        std::fs::remove_file(file).expect("it is there");
    }
    assert!(ran.stderr.contains(" cannot be added: it is not a regular file; the report covers"), "{}", ran.stderr);
}

#[test]
fn a_cut_file_is_reported_up_to_its_last_record() {
    // The recording has several records: each has some 64 KiB before compression.
    let bytes = RecordingBuilder::new("train").training(200, 100, MIB).file();
    let cut = written("cut.capture", &bytes[..bytes.len() * 2 / 3]);
    let Ran { code, stdout, stderr } = ran(&["report", &cut]);
    assert_eq!(code, Some(2));
    assert!(
        stderr.starts_with(&format!("gpumem: `{cut}` has no end: it is cut within the record at byte ")),
        "{stderr}"
    );
    assert!(
        stdout.contains("device 0: the peak was 432.50 MiB") && stdout.contains("The file has no end: "),
        "{stdout}"
    );
    let mut damaged = bytes;
    let last = damaged.len() - 20;
    damaged[last] ^= 1;
    let damaged = written("damaged.capture", &damaged);
    let Ran { code, stdout, stderr } = ran(&["report", "--at", "peak", &damaged]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains("it is damaged at byte ") && stdout.contains("432.50 MiB in use"), "{stderr}{stdout}");
}

/// The functions come after the last event.
#[test]
fn a_file_that_was_cut_after_its_last_event_says_so() {
    let mut made = RecordingBuilder::without_symbols("train");
    made.alloc(MIB, MemKind::Device, 0);
    let text = printed(&["report", &recorded("no-functions.capture", made)]);
    assert!(text.contains("No function of a stack is in the recording: it was cut after its last event, or"), "{text}");
    assert!(!text.contains("build it with -g"), "{text}");
}

/// Nothing was intercepted, which is not the same as a program that frees everything.
#[test]
fn a_recording_of_nothing_says_nothing_about_memory() {
    const WHY: &str = "Allocations were not intercepted: the allocated memory is not known.\n";
    let nothing = gpumem_recording::Writer::new(Vec::new()).unwrap().finish().unwrap();
    let file = written("nothing.capture", &nothing);
    for view in
        [&["--leaks"][..], &["--calls"], &["--table"], &["--tree"], &["--at", "end"], &["--between", "start", "end"]]
    {
        assert_eq!(printed(&[&["report"], view, &[&file]].concat()), WHY, "{view:?}");
    }
    let text = printed(&["report", &file]);
    assert!(text.contains("nothing.capture: ? allocations\n") && !text.contains("freed"), "{text}");
    let object = json(&["report", "--json", &file]);
    assert_eq!([&object["allocations"], &object["frees"], &object["not_freed"]], [&Value::Null; 3]);
}

#[test]
fn the_summary_starts_with_the_allocation_that_was_rejected() {
    let mut made = RecordingBuilder::new("oom");
    made.alloc(100 * MIB, MemKind::Device, 0);
    // The thread empties its cache and tries again.
    let cache = made.alloc(300 * MIB, MemKind::Device, 1);
    made.rejected(200 * MIB, MemKind::Device, 2);
    made.free(cache);
    made.alloc(200 * MIB, MemKind::Device, 2);
    let without = recorded("short.capture", made);
    let text = printed(&["report", &without]);
    let short = "Memory was short: the driver rejected 1 allocation; the last: 200 MiB (device) after 3 µs, at src/model.rs:77, called \
                 from src/main.rs:9, while the process had 400 MiB of device 0 in use.\nEach time the same thread obtained as much \
                 within a second, as allocators with a cache do that empty it and try again.\nThe memory at that time: ";
    assert!(text.starts_with(short), "{text}");
    let mut made = RecordingBuilder::new("oom");
    made.alloc(100 * MIB, MemKind::Device, 0);
    made.rejected(200 * MIB, MemKind::Device, 2);
    // An allocation by another thread, of another size, or too late is not a second try of the failed one.
    made.on_thread(2);
    made.alloc(200 * MIB, MemKind::Device, 1);
    made.on_thread(1);
    made.alloc(100 * MIB, MemKind::Device, 1);
    made.rejected(3 << 30, MemKind::Pool, 2);
    made.wait(1_100_000);
    made.alloc(4 << 30, MemKind::Pool, 2);
    let file = recorded("oom.capture", made);
    let text = printed(&["report", &file]);
    let lines: Vec<_> = text.lines().take(5).collect();
    assert!(lines[0].starts_with("Out of memory: the driver rejected 3 GiB (pool) after 5 µs, at "), "{text}");
    assert!(
        lines[0].ends_with(
            "while the process had 400 MiB of device 0 in use. The thread did not obtain as much within a second."
        ),
        "{text}"
    );
    assert_eq!(lines[1], "Device 0 has 141 GiB.");
    assert_eq!(lines[2], "In total, 2 allocations were rejected, the largest of 3 GiB.");
    assert_eq!(lines[3..], [&format!("The memory at that time: `gpumem report --at oom {file}`"), ""]);
    let at = printed(&["report", "--at", "oom", &file]);
    assert!(
        at.starts_with("device 0 (NVIDIA H200): 400 MiB in use at the rejected allocation of 3 GiB, after 5 µs\n"),
        "{at}"
    );
    let rejected = &json(&["report", "--json", &file])["refused"];
    assert_eq!((&rejected["count"], &rejected["obtained_soon"]), (&2.into(), &0.into()), "{rejected}");
    assert_eq!(rejected["largest_bytes"], 3_u64 << 30);
    assert_eq!(rejected["main"]["live_bytes"], 400 * MIB);
    assert_eq!((&rejected["main"]["kind"], &rejected["newest"][0]["bytes"]), (&"pool".into(), &(200 * MIB).into()));
    // Each of several recordings has a line.
    let ranks = printed(&["report", &file, &without]);
    assert!(ranks.starts_with("oom: Out of memory: ") && ranks.contains("\nshort: Memory was short: "), "{ranks}");
    let (_, page) = page("oom", &[&file]);
    assert!(page.contains("Out of memory: the driver rejected 3 GiB"), "the page says so as well");
}
