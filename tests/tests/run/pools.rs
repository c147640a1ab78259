//! Tests that pools are recorded with their parts if the program registers them in its own gpumem.

use gpumem_core::{derive::pools, model::Bytes, report::RegisteredPool};
use gpumem_tests::{CONTEXT, built};

use super::*;

/// Returns the peak of the device, for which parts count instead of the blocks of pools, and the pools at the end.
fn peak_and_pools(file: &str) -> (Bytes, Vec<RegisteredPool>) {
    let mut reader = Reader::new(File::open(file).expect("it is there")).expect("it can be read");
    while reader.step().expect("it can be read").is_some() {}
    let device = reader.ledger().stats()[0].device;
    let peak = reader.device_peak(device).expect("something was allocated").bytes;
    (peak, pools(reader.ledger(), reader.definitions()))
}

/// Compiles the program in C, which is linked with `libgpumem_c.so`, and returns its path.
fn program(folder: &Folder) -> String {
    let (program, library) = (folder.file("program"), built("libgpumem_c.so"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.args(["-g", "-Wall", "-Wextra", "-Werror", "-std=c11"]).arg(root.join("tests/run/pools/program.c"));
    cc.arg("-I").arg(root.join("../crates/c/include")).args(["-o", &program]).arg(&library).arg("-ldl");
    cc.arg(format!("-Wl,-rpath,{}", library.parent().expect("it is in a folder").display()));
    let output = cc.output().expect("there is a compiler of C");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// When the program ends, its pool still has a live part.
#[test]
fn parts_of_a_program_in_c_are_recorded() {
    let folder = Folder::new();
    let (file, program) = (folder.file("a.capture"), program(&folder));
    let outcome = run(&machine(), &file, &[&program]);
    assert!(outcome.is_clean() && outcome.stdout == "registered\n", "{outcome}");
    let (peak, pools) = peak_and_pools(&file);
    let [pool] = &pools[..] else { panic!("{pools:?}") };
    assert_eq!((peak, pool.used, pool.wrong_calls()), (Bytes::mib(44), Bytes::mib(4), 0), "{outcome}");
    for part in ["the peak was 44 MiB", "\ncache of arena: 28 MiB of 64 MiB\n", "program.c:29"] {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
    // The main thread does nothing after it has allocated its block of 8 MiB. Another thread uses the pool.
    let beside = run(&machine(), &file, &[&program, "beside"]);
    for part in ["the peak was 44 MiB", "\ncache of arena: 28 MiB of 64 MiB\n"] {
        assert!(beside.is_clean() && beside.stderr.contains(part), "{part}\n{beside}");
    }
    assert_eq!(peak_and_pools(&file), (peak, pools.clone()), "{beside}");
    let settings = machine().env("GPUMEM_CAPTURE", &file).env("GPUMEM_PEAK", "1");
    let own = settings.run_program(program.as_ref(), &["beside"]);
    for part in [": the peak was 44 MiB\n", "\ncache of arena: 28 MiB of 64 MiB\n"] {
        assert!(own.succeeded() && own.stderr.contains(part), "{part}\n{own}");
    }
    assert_eq!(peak_and_pools(&file), (peak, pools.clone()), "{own}");
    // The program's own gpumem records the same.
    let outcome = machine().env("GPUMEM_CAPTURE", &file).run_program(program.as_ref(), &[]);
    assert!(outcome.is_clean() && outcome.stdout == "registered\n", "{outcome}");
    let (own_peak, own_pools) = peak_and_pools(&file);
    assert_eq!((own_peak, &own_pools), (peak, &pools), "{outcome}");
    let words = ["report", &file];
    let report = machine().run_program(&built("gpumem-command"), &words);
    let lines = [28, 29, 21].map(|line| format!("program.c:{line}:"));
    assert!(lines.iter().all(|line| report.stdout.contains(line)), "{report}");
}

/// The report names the program's mistakes with pools.
#[test]
fn what_goes_wrong_in_a_pool_is_reported() {
    let folder = Folder::new();
    let (file, program) = (folder.file("a.capture"), program(&folder));
    for (wrong, parts) in [
        ("exit", &["the peak was 44 MiB", "\ncache of arena: 28 MiB of 64 MiB\n"][..]),
        ("undecided", &["capture: 1 allocation\n", "the peak was 64 MiB"]),
        (
            "no part",
            &["nothing was allocated except blocks of pools\n", "\nat the end, cache of arena: 64 MiB of 64 MiB\n"],
        ),
        ("late", &["the peak was 64 MiB", "\nat the end, cache of arena: 60 MiB of 64 MiB\n"]),
        ("more", &["\ncache of arena: 28 MiB of 64 MiB; it reports 32768 MiB, more than its blocks\n"]),
        (
            "overlap",
            &[
                "\ncache of arena: not known, because parts overlap: 2 MiB count twice; wrong calls: 1 part that overlaps another one\n",
                "\n1 event was lost: some numbers may be wrong.\n",
            ],
        ),
        (
            "overlapped",
            &[
                "\ncache of arena: not known, because parts overlapped; wrong calls: 1 part that overlaps another one\n",
                "\n1 event was lost: some numbers may be wrong.\n",
            ],
        ),
        ("others", &["\ncache of arena: 28 MiB of 64 MiB; it reports 70 MiB, more than its blocks\n"]),
        (
            "less",
            &[
                "\ncache of arena: 28 MiB of 64 MiB; wrong calls: 1 report of less memory than its parts\n",
                "1 event was lost",
            ],
        ),
        (
            "unknown",
            &["\ncache of arena: 28 MiB of 64 MiB; wrong calls: 1 free of an unknown part\n", "1 event was lost"],
        ),
        ("twins", &["\ncache of arena: 28 MiB of 64 MiB\nat the end, cache of arena #2: 10 MiB of 16 MiB\ndevice "]),
        (
            "too much",
            &[
                "; wrong calls: 1 part or size outside of its blocks\n",
                "\n1 event was lost: some numbers may be wrong.\n",
            ],
        ),
    ] {
        let outcome = run(&machine(), &file, &[&program, wrong]);
        for part in parts {
            assert!(outcome.stderr.contains(part), "{wrong}: {part}\n{outcome}");
        }
        for part in ["not intercepted", "left out"] {
            assert!(!outcome.stderr.contains(part), "{wrong}: {part}\n{outcome}");
        }
    }
}

/// Calls for a pool that is not there do nothing, and the program continues if the notice about it cannot be written.
#[test]
fn a_pool_on_no_device_is_not_measured() {
    let folder = Folder::new();
    let program = program(&folder);
    for case in ["no device", "no device, full", "no device, nobody reads"] {
        let outcome = machine().run_program(program.as_ref(), &[case]);
        let is_reported = outcome.stderr.contains("gpumem: the pool is not measured: ");
        assert!(outcome.is_clean() && is_reported == (case == "no device"), "{outcome}");
    }
}

/// A recording with `--only-peak` does not contain the event that decides who owns a block.
#[test]
fn a_shortened_recording_knows_whose_a_block_is() {
    let folder = Folder::new();
    let (file, program) = (folder.file("a.capture"), program(&folder));
    let words = ["run", "--only-peak", "-o", &file, "--", &program, "unused"];
    let outcome = machine().run_program(&built("gpumem-command"), &words);
    for part in ["the peak was 8 MiB", "\ncache of arena: 64 MiB of 64 MiB\n", "\n1 block (8 MiB) not freed"] {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
}

/// The injected library already intercepts the program. The program's own gpumem would have to use CUPTI, which costs more.
#[test]
fn a_recorded_pool_needs_no_second_source() {
    let folder = Folder::new();
    let program = program(&folder);
    let outcome = run(&machine().cupti(), &folder.file("a.capture"), &[&program, "many"]);
    assert!(outcome.succeeded() && outcome.stdout == "registered\n", "{outcome}");
    assert!(!outcome.calls.iter().any(|call| call.starts_with("cupti")), "{outcome}");
    let why = "gpumem: the pool is not measured: cannot use another pool: there are 54 pools already, the most that a process can have, so `more` is not measured; ";
    let of_pools: Vec<_> = outcome.stderr.lines().filter(|line| line.contains("pools already")).collect();
    assert!(matches!(of_pools[..], [line] if line.starts_with(why)), "{outcome}");
}

/// The unused memory of a pool must also fit on the GPU.
#[test]
fn a_limit_is_compared_with_the_drivers_blocks() {
    let folder = Folder::new();
    let (file, program) = (folder.file("a.capture"), program(&folder));
    let command = |options: &[&str]| {
        let words = [&["run", "-o", &file], options, &["--", &program]].concat();
        machine().run_program(&built("gpumem-command"), &words)
    };
    for kept in [&[][..], &["--only-peak"]] {
        let limited = |limit| command(&[kept, &["--max-peak", limit]].concat());
        let kept = limited("72MiB");
        assert!(kept.is_clean(), "{kept}");
        let above = limited("71MiB");
        let words = "the peak of the driver's blocks on device 0 was 72 MiB, 1 MiB above the limit of 71 MiB";
        assert!(above.exit() == "exit status: 1" && above.stderr.contains(words), "{above}");
    }
}

/// Because the injected library uses the dispatch table, a Rust program with the crate `gpumem` can intercept allocations only
/// through CUPTI.
#[test]
fn parts_of_a_program_in_rust_are_recorded() {
    let steps = ["pool arena", "exact", "call cuMemAlloc_v2 &block 67108864", "reserved 67108864"];
    let steps = [&steps[..], &["part block 33554432", "part_freed block", "part block+4194304 8388608"]].concat();
    for (machine, values) in [(machine(), None), (machine().cupti(), Some("8388608 25165824"))] {
        let folder = Folder::new();
        let file = folder.file("a.capture");
        let context: Vec<_> = CONTEXT.split("; ").collect();
        let ends = if values.is_some() { &["figures"][..] } else { &[] };
        let outcome = run_probe(&machine, &file, &[&context[..], &steps, ends].concat());
        assert!(outcome.succeeded() && outcome.answer("pool arena") == "registered", "{outcome}");
        assert_eq!(values.map(|_| outcome.answer("figures")), values, "{outcome}");
        let (peak, pools) = peak_and_pools(&file);
        let [pool] = &pools[..] else { panic!("{pools:?}\n{outcome}") };
        let known = (peak, &*pool.name, pool.used, pool.reserved, pool.wrong_calls());
        // When the program ends, it drops the pool.
        assert_eq!(known, (Bytes::mib(32), "arena", Bytes::ZERO, Bytes::mib(64), 0), "{outcome}");
    }
}

/// The program registers pools one after another, more of them than a process can have at the same time.
#[test]
fn a_pool_that_ends_leaves_its_place_to_another() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let context: Vec<_> = CONTEXT.split("; ").collect();
    let again = ["pool arena", "call cuMemAlloc_v2 &block 4194304", "reserved 4194304", "part block 1048576"];
    let again = [&again[..], &["pool_dropped", "call cuMemFree_v2 block"]].concat();
    let outcome = run_probe(&machine(), &file, &[&context[..], &again.repeat(60)].concat());
    assert!(outcome.is_clean(), "{outcome}");
    let (peak, pools) = peak_and_pools(&file);
    assert_eq!((peak, pools.len()), (Bytes::mib(1), 0), "{pools:?}\n{outcome}");
}

/// While nothing is recorded, the injected library leaves the dispatch table to the program, which measures its pool itself.
#[test]
fn a_dormant_library_does_not_take_pools() {
    let folder = Folder::new();
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let steps = ["pool arena", "exact", "call cuMemAlloc_v2 &block 4194304", "part block 1048576", "figures"];
    let context: Vec<_> = CONTEXT.split("; ").collect();
    let outcome = run_with(&machine, &["--dormant"], &folder.file("a.capture"), &[&context[..], &steps].concat());
    assert_eq!((outcome.answer("pool arena"), outcome.answer("figures")), ("registered", "1048576 0"), "{outcome}");
}
