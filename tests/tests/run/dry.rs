//! Tests `gpumem run --dry`, which runs programs on GPUs that do not exist, and `--limit`, which gives a GPU less memory.

use serde_json::{Value, json};

use super::*;

/// A program that allocates a large block. Its argument is the size of the block in MiB.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/dry.py");
const CARDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/cards.py");
const SHARED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/shared.py");

/// Runs a program that prints its observations. Returns them and the report of the recording, or `None` if there is no Python.
fn seen(options: &[&str], program: &[&str]) -> Option<(Value, String)> {
    seen_on(&machine(), options, program)
}

pub(super) fn seen_on(machine: &Standin, options: &[&str], program: &[&str]) -> Option<(Value, String)> {
    let Some(python) = python() else {
        gpumem_tests::skipped("no Python whose lines are recorded");
        return None;
    };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = machine
        .run_program(&built("gpumem-command"), &[&["run"], options, &["-o", &file, "--", &python], program].concat());
    assert!(outcome.succeeded(), "{outcome}");
    let seen = serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"));
    Some((seen, outcome.stderr))
}

#[test]
fn a_dry_run_has_the_card_that_it_is_asked_for() {
    let Some((seen, report)) = seen(&["--dry", "--card", "1TiB"], &[PROGRAM, "700000"]) else { return };
    let expected = json!({
        "total": 1_048_576, "free": [1_048_049, 1_048_576], "large": 0, "after": [348_049, 1_048_576], "refused": 2,
        // Dry memory reads as zeros. The content of real memory is read.
        "read": [[0, "00000000"], [0, "abababab"]],
        "launch": [[0, 0], [0, 1], [0, 0], [0, 1]], "join": [[0, 1], [0, 0]],
        "collective": [0, 0], "copied": 0, "through a table": [0, 0],
        "range": [0, true, 700_000], "kind": [0, 2], "managed": [0, 0],
        "create": 0, "map": 0, "access": 0, "retain": [0, true], "mapped": [348_027, [0, 0]],
        "shared": [801, 0], "imported": [0, 1, 0, [0, 0], 0, 0, [0, 1], 0],
        "unmap": [0, 348_047], "graph": [0, 801],
        "null": 1, "beyond": 1, "child": 7,
        "freed": [[0, 0, 0, 1], 1_048_049],
    });
    assert_eq!(seen, expected);
    assert!(report.contains("\ndry run, GPU of 1 TiB; blocks up to 160 MiB were real\n"), "{report}");
    assert!(report.contains("gpumem rejected 683.59 GiB (device)"), "{report}");
    // The stand-in's `cuMemCreate` jumps to gpumem's function, as the stubs of older drivers do. The report must not name
    // gpumem's library even then.
    assert!(!report.contains("libgpumem_inject"), "{report}");
}

/// Values that depend on skipped work are counted when the program reads them.
#[test]
fn values_that_were_not_computed_are_counted() {
    const UNKNOWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/unknown.py");

    let Some(python) = python() else { return gpumem_tests::skipped("no Python whose lines are recorded") };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let run = |options: &[&str]| {
        let words = [&["run", "--dry"], options, &["-o", &file, "--", &python, UNKNOWN]].concat();
        machine().driver_memory().run_program(&built("gpumem-command"), &words)
    };
    let outcome = run(&["--real", "64MiB"]);
    let seen: Value = serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"));
    let content = json!([0, "abababab"]);
    let expected = json!({
        "before": content, "skipped": [0, 0], "indices": [0, 0], "computed": [0, 1],
        "overwritten": [[0, 1], content, content], "before it": content,
        "table": [[0, 1], [0, 0], [0, 1], [0, 1]], "kernel": [0, 0], "other kernel": [0, 1],
        "missing": [[0, 0], [0, 1], "00000000", "00000000", "00000000", "abababab"],
        "beyond it": 1, "addresses": [[0, 0], [0, 0]], "pinned": [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1]],
    });
    assert_eq!(seen, expected, "{outcome}");
    let sentence = "11 values were read from memory that is not there, at 7 places, first at tests/run/unknown.py:25: sizes that depend on them may \
        differ. A larger --real computes more values\n";
    assert!(outcome.stderr.contains(sentence), "{outcome}");
    assert!(
        outcome
            .stderr
            .contains("\nthe process needs a GPU of 2.43 GiB; the smallest known one is RTX 4060 with 7.75 GiB\n"),
        "{outcome}"
    );
    let report = |options: &[&str]| {
        machine().run_program(&built("gpumem-command"), &[&["report"], options, &[file.as_str()]].concat())
    };
    let json: Value = serde_json::from_str(&report(&["--json"]).stdout).unwrap();
    let (dry, device) = (&json["dry_run"], &json["devices"][0]);
    assert_eq!((&dry["real_bytes"], &dry["unknown_values"]), (&json!(64 << 20), &json!(11)));
    let lines: Vec<_> =
        dry["places"].as_array().unwrap().iter().map(|place| place["place"].as_str().unwrap()).collect();
    assert_eq!(lines, [25, 27, 30, 32, 38, 60, 65].map(|line| format!("tests/run/unknown.py:{line}")));
    // The kernel was skipped, and the driver took what its launch would have taken.
    let rows = device["process_peak"]["taken_by_driver"].as_array().unwrap();
    let bytes =
        |kind: &str| rows.iter().filter(|row| row["kind"] == kind).filter_map(|row| row["bytes"].as_u64()).sum::<u64>();
    // The stream that sets new blocks to zeros may count for the context.
    assert!([518, 520].contains(&(bytes("context") >> 20)) && bytes("modules") >> 20 == 6, "{device}");
    assert_eq!(bytes("local memory"), 132 * 2048 * (8192 - 1024), "{device}");
    assert_eq!(report(&["--fail-if", "unknown"]).exit(), "exit status: 1");
    assert_eq!(run(&["--real", "64MiB", "--fail-if", "unknown"]).exit(), "exit status: 1");
    let difference = machine().run_program(&built("gpumem-command"), &["diff", &file, &file]).stdout;
    assert_eq!(difference.matches(&format!("{file}: {sentence}")).count(), 1, "{difference}");
    // The summary of several processes has the values of all.
    let twice = report(&[&file]).stdout;
    assert!(
        twice.contains(
            "\n22 values were read from memory that is not there, at 7 places, first at tests/run/unknown.py:25: "
        ),
        "{twice}"
    );
    // With a larger part of real memory, nothing is skipped.
    let all = run(&["--real", "128MiB", "--fail-if", "unknown"]);
    let sentence = "\nno value was read from memory that is not there\n";
    assert!(all.succeeded() && all.stderr.contains(sentence), "{all}");
    assert!(all.stderr.contains("\ndry run; blocks up to 128 MiB were real\n"), "{all}");
}

/// A kernel that is executed may check a value that was not computed.
#[test]
fn an_assertion_of_a_kernel_is_explained_once() {
    let folder = Folder::new();
    let ran = |code: u32, options: &[&str]| {
        let machine = machine().fail(format!("cuCtxSynchronize={code}"));
        let script = [&ALLOCATES[..], &["call cuCtxSynchronize"; 2]].concat();
        run_with(&machine, options, &folder.file("a.capture"), &script).stderr
    };
    for (code, what) in [(710, "a kernel failed an assertion"), (700, "an access of a kernel was wrong")] {
        let said = ran(code, &["--dry"]);
        assert_eq!(said.matches(&format!("gpumem: dry run: {what} (CUDA error {code}). ")).count(), 1, "{said}");
    }
    for said in [ran(2, &["--dry"]), ran(710, &["--limit", "1GiB"])] {
        assert!(!said.contains("gpumem: dry run: "), "{said}");
    }
}

/// The program has mixed up addresses. gpumem must not use these addresses, and the program must get the driver's error.
#[test]
fn a_wrong_copy_is_an_error_of_the_driver() {
    const COPIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/copies.py");

    let Some((seen, _)) = seen(&["--dry", "--real", "64MiB"], &[COPIES]) else { return };
    let buffer = |bytes: &str| format!("{bytes:1<80}");
    let expected = json!({
        "from the host": {
            "right": 0, "beyond": 1, "from a dry block": [1, 1], "from real memory": [1, 1], "from a freed block": [1, 1],
            "from nowhere": [1, 1], "from null": 1, "nothing": 0,
        },
        "to the host": {
            "right": [0, buffer("00000000")], "beyond": [1, buffer("")], "to a dry block": 1, "to real memory": 1,
            "to a freed block": [1, 1], "to nowhere": 1, "to the last address": 1, "nothing": 0,
        },
        "on the device": {
            "right": [0, 0], "beyond": [1, 1], "from the host": 1, "from a freed block": 1, "between cards": [0, 1],
        },
        "anywhere": {
            "to the host": [0, buffer("0000000000000000")], "from the host": 0, "to nowhere": 1, "to a freed block": 1, "beyond": 1,
            "of many": [0, buffer("00000000111111110000000011111111")], "of many, to a freed block": 1,
        },
        "rows": {
            "to the host": [0, buffer("0000000011111111111111111111111100000000")],
            "planes to the host": [0, buffer("0000000011111111111111111111111100000000")],
            "to unified addresses": [0, buffer("0000000011111111111111111111111100000000")],
            "from the host": 0, "to null": 1, "to a dry block": 1, "to a freed block": [1, 1, 1],
            "that overlap": [1, buffer("")], "beyond": 1, "beyond all addresses": 1, "none": 0,
        },
    });
    assert_eq!(seen, expected);
}

#[test]
fn a_dry_run_has_as_many_cards_as_it_is_asked_for() {
    let Some((seen, report)) = seen(&["--dry", "--card", "24GiB", "--cards", "4"], &[CARDS]) else { return };
    let expected = json!({
        "cards": [4, 4, ["0000:01:00.0", "0001:01:00.0", "0002:01:00.0", "0003:01:00.0"], [0, 1, 2, 3], [0, 1, 2, 3]],
        "no card": [101, 101],
        "state": [[0, 0, 0, 0], [1, 1, 1, 1], true],
        "free": [24_049, 24_049, 24_049, 24_049],
        "refused": 2, "other card": 0, "after": [24_049, 4_049, 24_049, 4_047], "ordinals": [[0, 3], [0, 3]],
        // A context of one GPU cannot use real memory of another GPU.
        "launch": [[0, 0], 0], "launch on its card": [0, 1],
        "peers": [[0, 1], [0, 0], 101], "enable": [0, 704, 0, 705],
        "create": [[0, 0], [101, 101]], "pools": [[0, 0], true], "pooled": 0, "of a pool": [24_049, 4_047, 23_963, 4_047],
        "release": [[0, 0, 0, 201], [1, 1, 0, 0]], "reset": [0, 0, 101], "again": 24_049,
    });
    assert_eq!(seen, expected);
    for part in [
        "dry run, 4 GPUs of 24 GiB; blocks up to 160 MiB were real",
        "device 3 (Stand-in GPU 0): the peak was 19.53 GiB",
        "kind     pool 64 MiB (74 %), vmm 22 MiB (26 %)",
    ] {
        assert!(report.contains(&format!("\n{part}\n")), "{part:?} is not in {report}");
    }
}

/// Each process has a context, which takes memory of the GPU. The memory of a killed process is free again.
#[test]
fn processes_share_the_card() {
    for options in [&["--dry", "--card", "2GiB"][..], &["--limit", "2GiB"]] {
        let Some((seen, report)) = seen(options, &[SHARED]) else { return };
        let expected = json!({
            "alone": [1521, 2048], "one": [[994, 2048], 0, 494], "two": [[0, 2048], 2, 0], "three": [0, 2],
            "killed": [-9, 0, 894], "alone again": 1421,
        });
        assert_eq!(seen, expected, "{options:?}");
        assert!(!report.contains("each process"), "{report}");
    }
    let options = ["--dry", "--card", "2GiB", "--card-per-process"];
    let Some((seen, _)) = seen(&options, &[SHARED]) else { return };
    assert_eq!((&seen["two"], &seen["three"]), (&json!([[1521, 2048], 0, 1021]), &json!([1521, 0])));
}

#[test]
fn processes_share_a_card_that_they_number_differently() {
    let Some((seen, _)) = seen_on(&machine().devices(2), &["--dry", "--card", "2GiB"], &[SHARED, "numbers"]) else {
        return;
    };
    // The first two processes use the second GPU. The third process uses the first GPU, as this program does.
    assert_eq!(seen, json!([[[1521, 2048], 0, 1021], [[494, 2048], 2, 494], [[994, 2048], 0, 494], [494, 2048]]));
}

#[test]
fn a_dry_run_fills_what_it_is_asked_for() {
    let Some((seen, _)) = seen(&["--dry", "--dry-fill", "one"], &[PROGRAM, "1000"]) else { return };
    assert_eq!(seen["read"], json!([[0, "01010101"], [0, "abababab"]]));
}

/// Under a limit, all memory is real, but the GPU has less of it.
#[test]
fn a_limit_rejects_and_computes() {
    let Some((seen, report)) = seen(&["--limit", "2GiB"], &[PROGRAM, "1000"]) else { return };
    assert_eq!((&seen["total"], &seen["free"], &seen["refused"]), (&json!(2048), &json!([1521, 2048]), &json!(2)));
    assert_eq!(seen["launch"], json!([[0, 1], [0, 1], [0, 1], [0, 1]]));
    assert_eq!(seen["read"], json!([[0, "abababab"], [0, "abababab"]]));
    assert_eq!(seen["freed"][1], json!(1521));
    assert!(report.contains("\nGPU limited to 2 GiB\n"), "{report}");
}

/// A program that contains gpumem reads these settings itself, without `gpumem run`.
#[test]
fn the_environment_asks_a_program_for_a_card() {
    let seen = |variable: &str, card: &str, steps: &[&str]| {
        let outcome = machine().env(variable, card).run_program(&built("probe"), steps);
        format!("{}{}", outcome.stdout, outcome.stderr)
    };
    let context = ["call cuInit 0", "call cuDevicePrimaryCtxRetain &context 0", "call cuCtxSetCurrent context"];
    let uses = ["mem_get_info 0", "call cuMemAlloc_v2 &first 1572864000", "call cuMemAlloc_v2 &second 104857600"];
    let has = |variable: &str, card: &str, steps: [&[&str]; 2], parts: [&str; 3]| {
        let seen = seen(variable, card, &steps.concat());
        for part in parts {
            assert!(seen.contains(part), "{part:?} is not in {seen}");
        }
    };
    let early = [&["new"][..], &context, &uses].concat();
    for (variable, words) in [("GPUMEM_LIMIT", "GPU limited to 2 GiB"), ("GPUMEM_DRY", "dry run, GPU of 2 GiB")] {
        let words = format!("gpumem: the program does not see the real GPU: {words}\n");
        has(variable, "2GiB", [&early, &[]], [&words, "> mem_get_info 0: 1.49 GiB 2 GiB\n", "&second 104857600: 2\n"]);
        let reads = ["call cuMemcpyDtoH_v2 &value first 4"; 2];
        let said = seen(variable, "2GiB", &[&early[..], &reads].concat());
        let count =
            said.matches("gpumem: dry run: the program has read a value from memory that is not there; ").count();
        assert_eq!(count, usize::from(variable == "GPUMEM_DRY"), "{said}");
    }
    let rejected = "gpumem: cannot use GPUMEM_DRY: it has no unit; write a size such as 2GiB; gpumem measures nothing";
    has("GPUMEM_DRY", "2", [&early, &[]], [rejected, "new: done", "&second 104857600: 0\n"]);
    let late =
        "cannot use GPUMEM_LIMIT: the program has a CUDA context already; call gpumem::intercept::subscribe(), in C";
    has("GPUMEM_LIMIT", "2GiB", [&context, &["new"]], [late, "a trace is off", "new: done"]);
}

/// The program must not use the real GPU instead.
#[test]
fn a_dry_run_that_is_not_possible_does_not_run() {
    let folder = Folder::new();
    let machine = Standin::new().env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
    let outcome = run_with(&machine, &["--dry"], &folder.file("a.capture"), &ALLOCATES);
    assert!(outcome.stderr.contains("dry run is not possible, and the program does not run without it: "), "{outcome}");
    assert_eq!((outcome.exit(), outcome.stdout.as_str()), ("exit status: 2", ""), "{outcome}");
    // With these options, the program is not started if it cannot be recorded.
    for options in [["--limit", "1GiB"], ["--dry", "--torch"]] {
        let outcome = run_with(&super::machine(), &options, "/dev/null", &ALLOCATES);
        assert_eq!((outcome.exit(), outcome.stdout.as_str()), ("exit status: 2", ""), "{outcome}");
    }
}

/// The memory that this program needs depends on its environment, as a PyTorch program's does.
const NEEDS: &str = "import ctypes, os, sys
cuda = ctypes.CDLL('libcuda.so.1')
context, address = ctypes.c_void_p(), ctypes.c_uint64()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
mib = 100 * int(os.environ.get('BATCH', 40)) - 1000 * ('expandable' in os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''))
sys.exit(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(mib << 20)))";

fn what_if(options: &[&str], program: &str) -> Option<Outcome> {
    let Some(python) = python() else {
        gpumem_tests::skipped("no Python whose lines are recorded");
        return None;
    };
    let command = [&["what-if"], options, &["--", &python, "-c", program]].concat();
    Some(machine().run_program(&built("gpumem-command"), &command))
}

#[test]
fn the_setting_that_needs_the_smallest_card_is_found() {
    let Some(outcome) = what_if(&["--json"], NEEDS) else { return };
    assert!(outcome.succeeded(), "{outcome}");
    let answer: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(answer["best"], "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True");
    let [own, best] = [0, 1].map(|at| &answer["rows"][at]);
    assert_eq!((&own["most_bytes"], &best["most_bytes"]), (&json!(4000_u64 << 20), &json!(3000_u64 << 20)));
    for (row, least) in [(own, 4527), (best, 3527)] {
        let card = row["smallest_card_bytes"].as_u64().unwrap() >> 20;
        assert!(card >= least && card <= least * 102 / 100, "{row}");
    }
    let Some(text) = what_if(&["--try", "BATCH=60", "--try", "BATCH=x"], NEEDS) else { return };
    for part in [
        "\n the program as it is ",
        "\n BATCH=60 ",
        "\n BATCH=x ",
        "  failed\n",
        "\nNone of these needs a smaller GPU ",
    ] {
        assert!(text.stdout.contains(part), "{part:?} is not in {text}");
    }
}

/// A program may catch the error and succeed. Such a card is still too small, because the program did not get all the memory that
/// it requested.
#[test]
fn a_rejection_that_a_program_survives_is_one() {
    let survives = NEEDS.replace("sys.exit(", "(");
    let Some(outcome) = what_if(&["--json", "--try", "X=1"], &survives) else { return };
    let answer: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let card = answer["rows"][1]["smallest_card_bytes"].as_u64().unwrap() >> 20;
    assert!((4527..4618).contains(&card), "{answer}");
    let Some(outcome) = what_if(&["--card", "1GiB"], &survives) else { return };
    assert!(
        outcome.exit() == "exit status: 1" && outcome.stdout.contains("does not run with any of these"),
        "{outcome}"
    );
}

/// A card must have enough memory for all processes that run at the same time.
#[test]
fn a_card_is_large_enough_for_all_processes() {
    let second = "if 'BATCH' not in os.environ:
    import subprocess
    command = [sys.executable, '-c', sys.orig_argv[2]]
    code += subprocess.run(command, env=dict(os.environ, BATCH='10')).returncode
sys.exit(code)";
    let first = NEEDS.replace("sys.exit(cuda", "code = cuda").replace("<< 20)))", "<< 20))");
    let Some(outcome) = what_if(&["--json", "--try", "X=1"], &format!("{first}\n{second}")) else { return };
    let answer: Value = serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"));
    let card = answer["rows"][0]["smallest_card_bytes"].as_u64().unwrap() >> 20;
    let all = 4000 + 1000 + 2 * 527;
    assert!((all..all * 102 / 100).contains(&card), "{answer}");
}

#[test]
fn the_largest_batch_that_fits_is_found() {
    let Some(outcome) = what_if(&["--card", "8GiB", "--largest", "BATCH"], NEEDS) else { return };
    assert_eq!(outcome.stdout, "BATCH=76 is the largest that runs on a GPU of 8 GiB.\n", "{outcome}");
    let Some(outcome) = what_if(&["--card", "1GiB", "--largest", "BATCH"], NEEDS) else { return };
    assert_eq!(outcome.stdout, "BATCH=4 is the largest that runs on a GPU of 1 GiB.\n", "{outcome}");
    // The program reads a value of its block, which is not there.
    let reading = NEEDS.replace("sys.exit(", "failed = (").replace("), ctypes.c_uint64(mib << 20)))", "), ctypes.c_uint64(mib << 20)))\nfailed or cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(4), address, ctypes.c_uint64(4))\nsys.exit(failed)");
    let Some(outcome) = what_if(&["--card", "1GiB", "--largest", "BATCH"], &reading) else { return };
    let expected = "BATCH=4 is the largest that runs on a GPU of 1 GiB.\n\
        Up to 1 value was read from memory that is not there: `gpumem run --dry` shows where, and sizes that depend on them may differ.\n";
    assert_eq!(outcome.stdout, expected, "{outcome}");
    // With values above 12, the program fails for another reason than memory.
    let few =
        format!("if int(__import__('os').environ['BATCH']) > 12: raise SystemExit('there are 12 inputs')\n{NEEDS}");
    let Some(outcome) = what_if(&["--card", "8GiB", "--largest", "BATCH"], &few) else { return };
    let expected = "BATCH=12 is the largest of the values tried that runs on a GPU of 8 GiB.\n\
        BATCH=13 fails for a reason other than memory: it ended with exit status: 1: there are 12 inputs\n";
    assert_eq!((outcome.stdout.as_str(), outcome.exit()), (expected, "exit status: 0"), "{outcome}");
    let Some(outcome) = what_if(&["--card", "8GiB", "--largest", "BATCH", "--json"], &few) else { return };
    let answer: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let other = json!({ "value": 13, "why": "it ended with exit status: 1: there are 12 inputs" });
    assert_eq!((&answer["largest"], &answer["other_failure"]), (&json!(12), &other));
    let Some(outcome) = what_if(&["--largest", "BATCH"], "raise SystemExit('no data')") else { return };
    assert!(
        outcome.stderr.contains("cannot be tried with BATCH=1: it ended with exit status: 1: no data;"),
        "{outcome}"
    );
    // Text that is not the name of a variable is rejected before a dry run starts.
    for name in ["", " ", "BATCH=", "BATCH SIZE"] {
        let Some(outcome) = what_if(&["--largest", name], NEEDS) else { return };
        assert!(outcome.stderr.contains("write the name of one variable, such as BATCH"), "{outcome}");
    }
    // An error of the program is printed.
    let Some(outcome) = what_if(&[], "raise SystemExit('no data')") else { return };
    assert_eq!(outcome.exit(), "exit status: 2", "{outcome}");
    assert!(
        outcome.stderr.contains("the program cannot be tried: it ended with exit status: 1: no data;"),
        "{outcome}"
    );
    let Some(outcome) = what_if(&["--card", "8GiB", "--largest", "OTHER"], NEEDS) else { return };
    assert!(outcome.stderr.contains("the program may not read this variable"), "{outcome}");
}
