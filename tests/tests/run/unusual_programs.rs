//! Tests programs that behave in unusual ways. They must run as they do without gpumem.

use super::*;

/// Daemons close all descriptors when they start.
#[test]
fn a_program_that_closes_all_descriptors() {
    for options in [&[][..], &["--dormant"]] {
        let folder = Folder::new();
        let [file, own] = ["a.capture", "own"].map(|name| folder.file(name));
        let closes = format!("close_descriptors {own}");
        let steps = [&ALLOCATES[..5], &[&closes, "sleep 300", ALLOCATES[5], "sleep 300"]].concat();
        let outcome = run_with(&machine().env("XDG_RUNTIME_DIR", folder.0.path()), options, &file, &steps);
        assert!(outcome.is_clean(), "{outcome}");
        // The stand-in driver writes its log, which is text, to a descriptor of this file. gpumem must write nothing to the file.
        let own = String::from_utf8(fs::read(&own).unwrap()).unwrap_or_else(|error| panic!("{error}\n{outcome}"));
        assert!(own.lines().all(|line| line.starts_with("cu") || line.starts_with("nvml")), "{own}\n{outcome}");
        if options.is_empty() {
            assert_eq!(recorded(&file), of_allocates(), "{outcome}");
        }
    }
}

/// The C library ends a process when its last thread ends. gpumem's threads must not keep the process alive.
#[test]
fn a_program_whose_main_thread_ends() {
    for options in [&[][..], &["--dormant"]] {
        let folder = Folder::new();
        let file = folder.file("a.capture");
        let steps = [&ALLOCATES[..], &["end_main_thread"]].concat();
        let outcome = run_with(&machine().env("XDG_RUNTIME_DIR", folder.0.path()), options, &file, &steps);
        assert!(outcome.is_clean(), "{outcome}");
        if options.is_empty() {
            // The program can no longer read `/proc/self/exe`.
            assert!(outcome.stderr.contains("raw.rs:"), "{outcome}");
            assert_eq!(recorded(&file), of_allocates(), "{outcome}");
        }
    }
}

/// If the recording grew beyond the limit, SIGXFSZ would end the program.
#[test]
fn a_program_whose_files_are_limited() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run_probe(&machine(), &file, &[&["limit_files 1000000"], &ALLOCATES[..]].concat());
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(recorded(&file), of_allocates(), "{outcome}");
}

/// In spite of its umask, the program must leave files that their owner can read. Otherwise the command could read them only as
/// root.
#[test]
fn a_program_that_leaves_files_without_access() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    // The shell looks at the files while the program waits until the name `end` exists in the folder.
    let until = "until ls a.pid*.capture > log 2>&1; do sleep 0.01; done; stat -c '%A %n' a.*";
    let steps = in_shell(&[&ALLOCATES[..], &["await_file end"]].concat());
    let (folder_name, probe) = (folder.0.path().display(), probe());
    let text = format!("cd {folder_name}; umask 0777; {probe} {steps} > /dev/null & {until}; mkdir end; wait");
    fs::write(folder.file("log"), "").unwrap();
    let outcome = run(&machine(), &file, &["sh", "-c", &text]);
    assert!(outcome.is_clean(), "{outcome}");
    let modes: Vec<_> = outcome.stdout.lines().filter(|line| line.contains(" a.pid")).collect();
    assert!(modes.len() == 1 && modes.iter().all(|mode| mode.starts_with("-rw------- ")), "{outcome}");
    assert_eq!(recorded(&file), of_allocates(), "{outcome}");
}
