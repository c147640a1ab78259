//! Tests `gpumem run --dormant`, `gpumem start` and `gpumem stop`.

use std::{
    os::unix::net::UnixStream,
    thread,
    time::{Duration, Instant},
};

use gpumem_tests::built;

use super::*;

#[test]
fn a_dormant_program_is_recorded_from_start_to_stop() {
    let folder = Folder::new();
    let [file, started, ended, again] = ["a.capture", "began", "ended", "again"].map(|name| folder.file(name));
    let gpumem = built("gpumem-command").display().to_string();
    let until = [&started, &ended, &again].map(|file| format!("await_file {file}"));
    let steps = [
        &ALLOCATES[..4],
        &[&until[0], "call cuMemAlloc_v2 &second 8388608", "call cuMemFree_v2 kept", &until[1]],
        &["call cuMemAlloc_v2 &third 16777216", &until[2], "call cuMemAlloc_v2 &fourth 1024"],
        &["call cuMemFree_v2 third"],
    ]
    .concat();
    let log = folder.file("log");
    let script = format!(
        "{gpumem} run --dormant -o {file} -- sh -c 'echo $$ > {log}.pid; exec \"$@\"' sh {}{} > {log} & \
         while ! grep -q '&kept' {log}; do sleep 0.01; done; pid=$(cat {log}.pid); \
         {gpumem} stop $pid; {gpumem} start $pid; {gpumem} start $pid; echo > {started}; \
         while ! grep -q 'v2 kept:' {log}; do sleep 0.01; done; {gpumem} stop $pid; echo > {ended}; \
         while ! grep -q '&third' {log}; do sleep 0.01; done; {gpumem} start $pid; echo > {again}; wait; echo all",
        probe(),
        in_shell(&steps),
    );
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
    assert!(outcome.is_clean() && outcome.stdout.ends_with("all\n"), "{outcome}");
    assert!(outcome.stderr.contains(": it is not recorded\n"), "{outcome}");
    assert!(outcome.stderr.contains(": it is recorded already, to "), "{outcome}");
    let mut recordings: Vec<_> = folder.names().into_iter().filter(|name| name.starts_with("a.pid")).collect();
    recordings.sort_by_key(String::len);
    assert_eq!(recordings.len(), 2, "{:?}\n{outcome}", folder.names());
    // `gpumem start` and `gpumem stop` have printed the names of the recordings.
    let printed: Vec<_> = outcome.stdout.lines().filter(|line| line.ends_with(".capture")).collect();
    assert!(printed.len() == 3 && printed.iter().all(|name| Path::new(name).exists()), "{outcome}");
    // The first block is older than the first recording, and the third block is older than the second recording.
    assert_eq!(
        recorded(&folder.file(&recordings[0])),
        RecordingContent { bytes: vec![8 << 20], frees: 1 },
        "{outcome}"
    );
    assert_eq!(recorded(&folder.file(&recordings[1])), RecordingContent { bytes: vec![1024], frees: 1 }, "{outcome}");
}

/// Such a recording contains no device, but the report must still say that allocations were intercepted.
#[test]
fn a_program_that_allocates_nothing_is_recorded() {
    let folder = Folder::new();
    let [file, ended, log] = ["a.capture", "ended", "log"].map(|name| folder.file(name));
    let gpumem = built("gpumem-command").display().to_string();
    let until = format!("await_file {ended}");
    let steps = [&ALLOCATES[..4], &[&until]].concat();
    for keep in ["", "--only-peak"] {
        let script = format!(
            "rm -f {log}* {ended}; {gpumem} run --dormant {keep} -o {file} -- sh -c 'echo $$ > {log}.pid; exec \"$@\"' sh {}{} > {log} & \
             while ! grep -q '&kept' {log}; do sleep 0.01; done; pid=$(cat {log}.pid); \
             {gpumem} start $pid > {log}.file; {gpumem} stop $pid > {log}.stop; echo > {ended}; wait; \
             {gpumem} report $(tail -1 {log}.stop)",
            probe(),
            in_shell(&steps),
        );
        let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
        let outcome = machine.run_program("/bin/sh".as_ref(), &["-c", &script]);
        assert!(outcome.is_clean() && outcome.stdout.contains("recorded by dispatch"), "{outcome}");
        assert!(!outcome.stdout.contains("not intercepted"), "{outcome}");
    }
}

#[test]
fn a_program_that_is_never_started_is_not_recorded() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
    let outcome = run_with(&machine, &["--dormant"], &file, &ALLOCATES);
    assert!(outcome.is_clean() && outcome.stderr.contains("nothing was recorded"), "{outcome}");
    // There is only the folder for sockets, and no recording.
    let names = folder.names();
    assert_eq!(names, ["gpumem"]);
}

/// A program that closes all its descriptors must not close gpumem's socket, and a connection must not take a number that the
/// program expects for its own descriptor.
#[test]
fn the_socket_and_its_connections_are_not_among_the_descriptors_of_the_program() {
    let folder = Folder::new();
    let (file, connected) = (folder.file("a.capture"), folder.file("connected"));
    let sockets = folder.0.path().join("gpumem");
    thread::scope(|threads| {
        threads.spawn(|| {
            let until = Instant::now() + Duration::from_secs(60);
            let connection = loop {
                let mut entries = fs::read_dir(&sockets).into_iter().flatten().flatten();
                let stream = entries.find_map(|entry| UnixStream::connect(entry.path()).ok());
                match stream {
                    Some(stream) => break stream,
                    None if Instant::now() > until => return,
                    None => thread::sleep(Duration::from_millis(5)),
                }
            };
            // After this pause, the program has accepted the connection and waits for a command.
            thread::sleep(Duration::from_millis(100));
            fs::write(&connected, "").unwrap();
            thread::sleep(Duration::from_millis(300));
            drop(connection);
        });
        let awaits = format!("await_file {connected}");
        let steps = [&ALLOCATES[..], &[&awaits, "sockets"]].concat();
        let machine = machine().env("XDG_RUNTIME_DIR", folder.0.path());
        let outcome = run_with(&machine, &["--dormant"], &file, &steps);
        assert!(outcome.is_clean(), "{outcome}");
        assert_eq!(outcome.answer("sockets"), "0", "{outcome}");
    });
}

#[test]
fn other_processes_cannot_be_started() {
    let gpumem = built("gpumem-command");
    for (pid, why) in [("4294967295", "it is not running"), ("self", "invalid value"), ("1", "")] {
        let outcome = machine().run_program(&gpumem, &["start", pid]);
        assert_eq!(outcome.exit(), "exit status: 2", "{outcome}");
        assert!(outcome.stderr.contains(why), "{outcome}");
    }
    let script = format!("sleep 300 & {} start $!; kill $!", gpumem.display());
    let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
    assert!(outcome.stderr.contains("no gpumem library waits in it; start the program with"), "{outcome}");
}

/// All users may read the library, but only this user may use the sockets. Therefore they are in different folders.
#[test]
fn the_sockets_are_not_beside_the_library_in_the_folder_for_temporary_files() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let machine = machine().env("XDG_CACHE_HOME", "/proc/cache").env("XDG_RUNTIME_DIR", "");
    for _ in 0..2 {
        let outcome = run_with(&machine, &["--dormant"], &file, &ALLOCATES);
        assert!(outcome.is_clean() && outcome.stderr.contains(" is not recorded until `gpumem start "), "{outcome}");
        assert!(!outcome.stderr.contains("open to others"), "{outcome}");
    }
}

#[test]
fn a_program_that_is_stopped() {
    let gpumem = built("gpumem-command").display().to_string();
    let text = format!(
        "sleep 100 & kill -STOP $!; while ! grep -q '^State:.T' /proc/$!/status; do sleep 0.01; done
         {gpumem} stop $!; echo $? $!; kill -9 $!"
    );
    let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &text]);
    let (code, pid) = outcome.stdout.trim_end().split_once(' ').unwrap_or_else(|| panic!("{outcome}"));
    let text = format!("gpumem: process {pid}: it is stopped, and cannot answer; continue it: kill -CONT {pid}\n");
    assert_eq!((code, &outcome.stderr), ("2", &text), "{outcome}");
}
