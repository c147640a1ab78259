//! Tests the effects of the injected library on the program's driver and libraries.

use gpumem_inject::{
    options::{Keep, Options},
    variable,
};

use super::*;

/// Returns the path of the library that `gpumem run` has unpacked into this folder.
fn unpacked(cache: &Path) -> PathBuf {
    let entries = fs::read_dir(cache.join("gpumem")).expect("it was unpacked").flatten();
    let is_library = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "so");
    entries.map(|entry| entry.path()).find(is_library).expect("it was unpacked")
}

/// The driver loads the library inside `cuInit`, where calls of the driver may wait or fail. Later, the library does not call
/// CUPTI, which a profiler may be using. The script has an allocation that fails, because the library then looks for the device's
/// free memory.
#[test]
fn the_driver_is_not_called_while_it_initialises_itself_and_cupti_never() {
    let steps = [&ALLOCATES[..], &["call cuMemAlloc_v2 &refused 99999999999999"]].concat();
    for machine in [machine(), machine().cupti(), machine().cupti().env("GPUMEM_SOURCE", "cupti")] {
        let folder = Folder::new();
        let file = folder.file("a.gpumem");
        let plain = machine.run_program(&built("probe"), &steps);
        let traced = run_probe(&machine, &file, &steps);
        assert!(plain.succeeded() && traced.succeeded(), "{plain}\n{traced}");
        assert_eq!(traced.stdout, plain.stdout);
        let at = |line: &str| traced.calls.iter().position(|call| call == line).unwrap_or_else(|| panic!("{traced}"));
        let mut within = traced.calls[at("injection_begins=0") + 1..at("injection_ends=1")].to_vec();
        // The thread of the recording opens NVML meanwhile.
        within.retain(|call| !call.starts_with("nvml"));
        assert!(within.is_empty(), "{within:?}\n{traced}");
        let of_others =
            |calls: &[String]| calls.iter().filter(|call| call.starts_with("cupti")).cloned().collect::<Vec<_>>();
        assert_eq!(of_others(&traced.calls), of_others(&plain.calls), "{traced}");
        assert_eq!(recorded(&folder.file(&folder.names()[0])), of_allocates());
    }
}

/// The library's hooks stay in the driver, so its code must stay in the process.
#[test]
fn a_library_with_gpumem_in_it_is_closed() {
    let (folder, cache) = (Folder::new(), Folder::new());
    let machine = machine().env("XDG_CACHE_HOME", cache.0.path());
    assert!(run_probe(&machine, &folder.file("first.gpumem"), &ALLOCATES).succeeded());
    let library = unpacked(cache.0.path());
    let file = folder.file("closed.gpumem");
    let load = format!("load_and_close {}", library.display());
    let steps = [&[load.as_str(), "slot_is cuMemAlloc_v2"], &ALLOCATES[..]].concat();
    let options = Options { backtrace: "auto".to_owned(), keep: Keep::All, torch: None, cards: None };
    let machine = machine.env(variable::FILE, &file).env(variable::OPTIONS, options.to_text());
    let outcome = machine.run_program(&built("probe"), &steps);
    assert!(outcome.succeeded(), "{outcome}");
    assert_eq!(outcome.answer(&load), "1", "{outcome}");
    assert_eq!(outcome.answer("slot_is cuMemAlloc_v2"), "other", "{outcome}");
    let name = folder.names().into_iter().find(|name| name.starts_with("closed.")).expect("it was recorded");
    assert_eq!(recorded(&folder.file(&name)), of_allocates());
}
