//! Tests `gpumem attach`.

use gpumem_inject::options::{Keep, Options};
use gpumem_tests::{built, interpreters};

use super::*;

/// The code that Python runs on request. The command writes assignments of values before it.
const CODE: &str = include_str!("../../../crates/cli/src/run/attach.py");

/// Allocates 64 MiB, runs the code in the file `request` if there is one, and waits for the file `begun`. Then it allocates and
/// frees 8 MiB, waits for the file `stopped`, and allocates 1 MiB.
const SERVER: &str = "\
import ctypes, os, sys, time
cuda = ctypes.CDLL('libcuda.so.1')
def allocate(size):
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    return address
context = ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
cuda.cuCtxSetCurrent(context)
allocate(64 << 20)
folder, request = sys.argv[1:]
def wait(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
open(os.path.join(folder, 'ready'), 'w').close()
if request:
    exec(open(request).read())
    assert 'attach' not in globals()
    open(os.path.join(folder, 'loaded'), 'w').close()
wait('begun')
kept = allocate(8 << 20)
cuda.cuMemFree_v2(kept)
open(os.path.join(folder, 'done'), 'w').close()
wait('stopped')
allocate(1 << 20)
print('ended')
";

const LATE: &str = "The recording started when the process had run for ";

/// Returns the path of the library that the command has unpacked.
fn library(folder: &Folder) -> String {
    let cache = folder.0.path().join("cache");
    let outcome = machine().env("XDG_CACHE_HOME", &cache).run_program(&built("gpumem-command"), &["run", "--", "true"]);
    assert_eq!(outcome.exit(), "exit status: 0", "{outcome}");
    let entries = fs::read_dir(cache.join("gpumem")).expect("it was unpacked").flatten();
    let paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    assert_eq!(paths.len(), 1, "{paths:?}");
    paths[0].to_str().unwrap().to_owned()
}

fn until(folder: &Folder, name: &str) -> String {
    format!("i=0; while [ ! -e {} ]; do sleep 0.01; i=$((i + 1)); [ $i -lt 3000 ] || exit 9; done;", folder.file(name))
}

#[track_caller]
fn check(folder: &Folder, outcome: &Outcome) {
    assert!(outcome.is_clean() && outcome.stdout.contains("ended\n"), "{outcome}");
    let recordings: Vec<_> = folder.names().into_iter().filter(|name| name.ends_with(".capture")).collect();
    assert_eq!(recordings.len(), 1, "{:?}\n{outcome}", folder.names());
    let recording = folder.file(&recordings[0]);
    assert_eq!(recorded(&recording), RecordingContent { bytes: vec![8 << 20], frees: 1 }, "{outcome}");
    let report = machine().run_program(&built("gpumem-command"), &["report", &recording]);
    assert!(report.is_clean() && report.stdout.contains(LATE), "{report}");
    assert!(report.stdout.contains("server.py:5, called from "), "{report}");
    let json = machine().run_program(&built("gpumem-command"), &["report", "--json", &recording]);
    assert!(json.stdout.contains("\"begins_after_seconds\": "), "{json}");
    // No other file of the recording is left next to it.
    assert!(!folder.names().iter().any(|name| name.contains(".capture.")), "{:?}", folder.names());
}

/// The oldest Python runs the code directly. Python 3.14 and later run the same code on request.
#[test]
fn the_code_that_python_runs_makes_the_library_wait() {
    let Some(python) = interpreters().into_values().next() else { return };
    let folder = Folder::new();
    let names = ["server.py", "request.py", "answer", "a.capture", "loaded", "begun", "stopped"];
    let [server, request, answer, file, _, started, stopped] = names.map(|name| folder.file(name));
    fs::write(&server, SERVER).unwrap();
    // The folder for sockets has the name and the rights that the command gives it.
    let sockets = folder.0.path().join("gpumem");
    fs::create_dir(&sockets).unwrap();
    fs::set_permissions(&sockets, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let library = library(&folder);
    let backtrace = "python".to_owned();
    let options = Options { backtrace, keep: Keep::All, torch: None, cards: None }.to_text();
    fs::write(
        &request,
        format!(
            "LIBRARY = b'{library}'\nARGUMENTS = [b'{}', b'{file}', b'{options}']\nANSWER = b'{answer}'\n\
             SCRIPT = b'{request}'\n{CODE}",
            sockets.display()
        ),
    )
    .unwrap();
    let gpumem = built("gpumem-command").display().to_string();
    let script = format!(
        "{} {server} {} {request} & pid=$!; {} {gpumem} start $pid; echo > {started}; {} {gpumem} stop --json $pid; \
         echo > {stopped}; wait $pid",
        python.display(),
        folder.0.path().display(),
        until(&folder, "loaded"),
        until(&folder, "done"),
    );
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
    assert_eq!(fs::read(&answer).ok(), Some(Vec::new()), "{outcome}");
    assert!(outcome.stdout.contains("{\"file\":\"") && outcome.stdout.contains("\"pid\":"), "{outcome}");
    assert!(!Path::new(&request).exists());
    check(&folder, &outcome);
}

/// Only Python 3.14 and later run code on request.
#[test]
fn a_program_in_a_new_python_is_recorded_from_now_on() {
    let Some(python) = interpreters().remove(&(3, 14, 0)) else {
        gpumem_tests::skipped("no Python 3.14");
        return;
    };
    for ends_by_itself in [false, true] {
        let folder = Folder::new();
        let [server, file, started, stopped] =
            ["server.py", "a.capture", "begun", "stopped"].map(|name| folder.file(name));
        fs::write(&server, SERVER).unwrap();
        let gpumem = built("gpumem-command").display().to_string();
        let stop = if ends_by_itself { "true".to_owned() } else { format!("{gpumem} stop $pid") };
        let script = format!(
            "{} {server} {} '' & pid=$!; {} {gpumem} attach -o {file} $pid; {gpumem} attach -o {file} $pid; echo > {started}; {} \
             {stop}; echo > {stopped}; wait $pid",
            python.display(),
            folder.0.path().display(),
            until(&folder, "ready"),
            until(&folder, "done"),
        );
        let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
        let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
        assert!(outcome.stderr.contains(": it is recorded already, to "), "{outcome}");
        if ends_by_itself {
            let report = machine.run_program(&built("gpumem-command"), &["report", &recording(&folder)]);
            assert!(report.is_clean() && report.stdout.contains("2 allocations"), "{report}");
            assert!(!folder.names().iter().any(|name| name.ends_with(".attached")), "{:?}", folder.names());
        } else {
            check(&folder, &outcome);
        }
    }
}

fn recording(folder: &Folder) -> String {
    let names = folder.names();
    let name = names.iter().find(|name| name.ends_with(".capture")).unwrap_or_else(|| panic!("{names:?}"));
    folder.file(name)
}

#[test]
fn other_programs_are_rejected_with_a_reason() {
    let gpumem = built("gpumem-command").display().to_string();
    let folder = Folder::new();
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let dormant = "start the program with `gpumem run --dormant`, then `gpumem start`";
    let rejected = |program: &str, parts: &[&str]| {
        let script = format!("{program} & pid=$!; sleep 0.2; {gpumem} attach $pid; code=$?; kill $pid; exit $code");
        let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
        assert_eq!(outcome.exit(), "exit status: 2", "{outcome}");
        let lines: Vec<_> = outcome.stderr.lines().filter(|line| line.starts_with("gpumem: ")).collect();
        assert!(lines.len() == 1 && parts.iter().all(|part| lines[0].contains(part)), "{parts:?}\n{outcome}");
    };
    rejected("sleep 5", &["it runs `", dormant]);
    rejected("GPUMEM_RUN_FILE=/a sleep 5", &["`gpumem run` records it already"]);
    rejected("GPUMEM_RUN_FILE=/a GPUMEM_RUN_CONTROL=/b sleep 5", &["use `gpumem start "]);
    let old = interpreters().into_iter().find(|(version, _)| *version < (3, 14, 0));
    if let Some(((major, minor, _), python)) = old {
        let program = format!("{} -c 'import time; time.sleep(5)'", python.display());
        let cause = format!("its Python {major}.{minor} runs no code on request: 3.14 and later do");
        rejected(&program, &[&cause, dormant]);
    }
    if let Some(python) = interpreters().remove(&(3, 14, 0)) {
        let program = format!("{} -X disable-remote-debug -c 'import time; time.sleep(5)'", python.display());
        rejected(&program, &["-X disable-remote-debug forbids", dormant]);
        let program = format!("PYTHON_DISABLE_REMOTE_DEBUG=1 {} -c 'import time; time.sleep(5)'", python.display());
        rejected(&program, &["PYTHON_DISABLE_REMOTE_DEBUG forbids", dormant]);
    }
    let nobody =
        Command::new(&gpumem).args(["attach", "4294967295"]).env("XDG_RUNTIME_DIR", folder.0.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&nobody.stderr), "gpumem: process 4294967295: it is not running\n");
    assert_eq!(nobody.status.code(), Some(2));
}
