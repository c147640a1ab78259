//! Tests NVML in programs whose GPUs are not the real ones.

use serde_json::json;

use super::{dry::seen_on, *};

/// A program that allocates 1000 MiB on the device that its argument names.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/nvml.py");

/// NVML agrees with CUDA before and after the program initialises CUDA, and in processes without CUDA. NVML shows the real values
/// of a GPU that the program does not use.
#[test]
fn nvml_shows_the_card() {
    let machine = machine().devices(3).env("CUDA_VISIBLE_DEVICES", "2,0");
    // The numbers are the total, reserved, free and used memory. The first version of the call does not return the reserved
    // memory.
    let card = |used: u64| json!([[2048, 2048 - used, used], [2048, 0, 2048 - used, used]]);
    for options in
        [&["--dry", "--card", "2GiB"][..], &["--limit", "2GiB"], &["--dry", "--card", "2GiB", "--card-per-process"]]
    {
        let Some((seen, _)) = seen_on(&machine, options, &[PROGRAM, "0"]) else { return };
        let real = seen["before"][1].clone();
        assert_eq!(real[1][0], json!(17 << 10), "{seen}");
        assert_eq!(seen["before"], json!([card(0), real, card(0)]), "{options:?}");
        assert_eq!(seen["cuInit"], card(0)[1]);
        assert_eq!(
            (&seen["cuda"], &seen["after"]),
            (&json!([521, 2048]), &json!([card(0), real, card(1527)])),
            "{options:?}"
        );
        let elsewhere = if options.contains(&"--card-per-process") { 0 } else { 1527 };
        assert_eq!(seen["child"], json!([card(0)[1], real[1], card(elsewhere)[1]]), "{options:?}");
        assert_eq!(seen["others"][2], json!(["Stand-in GPU 2", 0]));
        assert_eq!((&seen["uninitialised"], &seen["error"]), (&json!([1, 1]), &json!(25)));
    }
    // If the GPU keeps its real size, only the used memory differs. As on the real GPU, a part of the memory is reserved.
    for options in [&["--dry"][..], &["--limit", "1TiB"]] {
        let Some((seen, _)) = seen_on(&machine, options, &[PROGRAM, "1"]) else { return };
        let (first, second) = (&seen["after"][0][0], &seen["after"][0][1]);
        let values: Vec<u64> = serde_json::from_value(second.clone()).unwrap();
        let [total, reserved, free, used] = values[..] else { panic!("{seen}") };
        assert_eq!((total, used, free + used + reserved), (18 << 10, 1527, total), "{seen}");
        assert_eq!(first, &json!([total, free, used + reserved]));
        assert_eq!(seen["cuda"], json!([free, total - reserved]));
    }
}

#[test]
fn nvml_shows_as_many_cards_as_cuda() {
    let machine = machine().devices(2).env("CUDA_VISIBLE_DEVICES", "1");
    let options = ["--dry", "--card", "24GiB", "--cards", "4"];
    let Some((seen, _)) = seen_on(&machine, &options, &[PROGRAM, "2", "names"]) else { return };
    let card = |used: u64| json!([24576, 0, 24576 - used, used]);
    assert_eq!(seen["count"], json!(4));
    assert_eq!(seen["child"], json!([card(0), card(0), card(1527), card(0)]));
    assert_eq!(seen["cuda"], json!([24576 - 1527, 24576]));
    // All other values describe the real GPU.
    assert_eq!(
        seen["others"],
        json!([["Stand-in GPU 1", 0], ["Stand-in GPU 1", 0], ["Stand-in GPU 1", 0], ["Stand-in GPU 1", 0]])
    );
    let (all, same) = ([true; 4], [[true; 3]; 4]);
    assert_eq!(seen["names"], json!([all, all, [0, 1, 2, 3], [0, 1, 2, 3], same, 4]));
    assert_eq!(seen["no card"], json!([2, 6, 6]));
    assert_eq!((&seen["uninitialised"], &seen["error"]), (&json!([1, 1]), &json!(25)));
}

#[test]
fn a_machine_without_nvml_has_dry_runs() {
    let program = "import ctypes, json, os
try:
    ctypes.CDLL('libnvidia-ml.so.1')
except OSError:
    print(json.dumps('no NVML'))
cuda = ctypes.CDLL('libcuda.so.1')
assert cuda.cuInit(0) == 0";
    let machine = machine().without(Library::Nvml);
    let Some((seen, errors)) = seen_on(&machine, &["--dry", "--cards", "2"], &["-c", program]) else { return };
    assert_eq!(seen, json!("no NVML"), "{errors}");
    assert!(!errors.contains("NVML"), "{errors}");
}

/// Each run of a machine uses a new copy of the driver, which is removed when the run ends. The library in front of that driver
/// is then useless.
#[test]
fn what_stood_before_a_driver_that_is_gone_is_removed() {
    let temporary = Folder::new();
    let no_home = temporary.0.path().join("none");
    fs::write(&no_home, "").expect("a file");
    let machine = machine().env("TMPDIR", temporary.0.path()).env("XDG_CACHE_HOME", &no_home).env("HOME", &no_home);
    let folder = Folder::new();
    let file = folder.file("a.capture");
    for _ in 0..3 {
        let (command, steps) = (built("gpumem-command"), in_shell(&ALLOCATES));
        let run = format!("'{}' run --limit 4GiB -o '{file}' -- '{}'{steps}", command.display(), probe());
        assert!(machine.run_program(Path::new("/bin/sh"), &["-c", &run]).succeeded());
    }
    let folders =
        |path: &Path| -> Vec<_> { fs::read_dir(path).expect("a folder").flatten().map(|entry| entry.path()).collect() };
    let of_user =
        folders(temporary.0.path()).into_iter().find(|path| path.to_string_lossy().contains("gpumem-library-"));
    let all = folders(&of_user.expect("it was unpacked there"));
    let of_nvml =
        all.iter().filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvml-")));
    assert_eq!(of_nvml.count(), 1, "{all:?}");
}

/// All runs share the library in front of NVML, so a run that is killed leaves nothing behind.
#[test]
fn what_stands_before_nvml_is_made_once() {
    let cache = Folder::new();
    let machine = machine().env("XDG_CACHE_HOME", cache.0.path());
    let made = || {
        let entries = fs::read_dir(cache.0.path().join("gpumem")).expect("it was unpacked").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.retain(|name| name.starts_with("nvml-"));
        names
    };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let (command, steps) = (built("gpumem-command"), in_shell(&ALLOCATES));
    let run = format!("'{}' run --limit 4GiB -o '{file}' -- '{}'{steps}", command.display(), probe());
    let outcome = machine.run_program(Path::new("/bin/sh"), &["-c", &format!("{run} && {run}")]);
    assert!(outcome.succeeded(), "{outcome}");
    assert_eq!(made().len(), 1);
    let inner = fs::read_dir(cache.0.path().join("gpumem").join(&made()[0])).expect("it is a folder");
    assert_eq!(inner.count(), 1);
    // If the program uses the real GPUs, no library is loaded in front of NVML.
    let plain = Folder::new();
    assert!(run_probe(&machine.env("XDG_CACHE_HOME", plain.0.path()), &file, &ALLOCATES).succeeded());
    assert_eq!(fs::read_dir(plain.0.path().join("gpumem")).expect("it was unpacked").count(), 1);
}
