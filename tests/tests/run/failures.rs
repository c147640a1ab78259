//! Tests failures of recording: the program continues, and one line gives the reason.

use gpumem_tests::{Library, built};

use super::*;

/// Checks that the program succeeded, and that stderr is one gpumem line with this text.
#[track_caller]
fn one_line(outcome: &Outcome, text: &str) {
    assert!(outcome.succeeded(), "{outcome}");
    let lines: Vec<_> = outcome.stderr.lines().collect();
    assert!(lines.len() == 1 && lines[0].starts_with("gpumem: ") && lines[0].contains(text), "{outcome}");
}

/// The program is recorded without the tool, which the driver could not load either.
#[test]
fn another_tool_that_cannot_be_loaded() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run_probe(&machine().env("CUDA_INJECTION64_PATH", "/nowhere/tool.so"), &file, &ALLOCATES);
    let line = "CUDA_INJECTION64_PATH named /nowhere/tool.so, which is not used: ";
    assert!(outcome.succeeded() && outcome.stderr.contains(line), "{outcome}");
    assert_eq!(recorded(&file), of_allocates());
}

#[test]
fn a_program_that_names_another_tool_itself() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome =
        run(&machine(), &file, &[&["env", "CUDA_INJECTION64_PATH=/nowhere/x.so", &probe()], &ALLOCATES[..]].concat());
    one_line(&outcome, "nothing was recorded");
}

#[test]
fn a_file_that_cannot_be_written() {
    let folder = Folder::new();
    for file in
        [folder.file("no such folder/a.capture"), folder.0.path().to_str().unwrap().to_owned(), "/proc/a".to_owned()]
    {
        let outcome = run_probe(&machine(), &file, &ALLOCATES);
        one_line(&outcome, &format!("cannot record to `{file}`: "));
        assert_eq!(outcome.stdout, machine().run(&ALLOCATES.join("; ")).stdout);
    }
}

/// `gpumem run` replaces an existing file only if the file is a recording.
#[test]
fn what_is_no_recording_is_kept() {
    let folder = Folder::new();
    let file = folder.file("train.py");
    fs::write(&file, "print('train')\n").unwrap();
    for (file, why) in [(file.as_str(), "it exists and is not a recording"), ("/dev/null", "it is not a regular file")]
    {
        let outcome = run_probe(&machine(), file, &ALLOCATES);
        one_line(&outcome, &format!("cannot record to `{file}`: {why}"));
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "print('train')\n");
    assert_eq!(folder.names(), ["train.py"]);
}

#[test]
fn a_program_without_cuda() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    for command in [&["echo", "text"][..], &[&probe(), "call cuInit 0"]] {
        let outcome = run(&machine(), &file, command);
        one_line(&outcome, "nothing was recorded");
        one_line(&outcome, "started with another environment (`sudo`, `env -i`, a profiler");
    }
    let outcome = run_probe(&machine().without(Library::Cuda), &file, &["try_count"]);
    one_line(&outcome, "nothing was recorded");
    one_line(&outcome, "libcuda");
    one_line(&outcome, "`gpumem doctor` shows what is missing");
    assert_eq!(folder.names(), [""; 0]);
    // An earlier recording stays, and must not be mistaken for the recording of this run.
    assert!(run_probe(&machine(), &file, &ALLOCATES).succeeded());
    let outcome = run(&machine(), &file, &["echo", "text"]);
    let line = format!("the file `{file}` is from before this run");
    assert!(outcome.succeeded() && outcome.stderr.lines().any(|printed| printed.ends_with(&line)), "{outcome}");
    assert_eq!(recorded(&file), of_allocates());
}

/// Runs a program that starts another program and ends when the shell command `when` succeeds. The other program ends later. Also
/// returns its process id.
fn leaves_behind(folder: &Folder, steps: &[&str], when: &str) -> (Outcome, String) {
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let text = format!(
        "cd {folder}; {gpumem} run -o a.capture -- sh -c \"{probe}{steps} > log & echo \\$! > pid; until {when}; do sleep 0.01; done\"
         > end; while grep -q '^State:.[^ZX]' /proc/$(cat pid)/status; do sleep 0.01; done; cat pid; rm pid end log",
        folder = folder.0.path().display(),
        steps = in_shell(steps),
    );
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
    let pid = outcome.stdout.trim_end().to_owned();
    (outcome, pid)
}

#[test]
fn a_program_that_leaves_a_process_behind() {
    let folder = Folder::new();
    let steps = [&ALLOCATES[..], &["await_file end"]].concat();
    let (outcome, pid) = leaves_behind(&folder, &steps, "grep -qs freed: log");
    let recording = folder.file(&format!("a.pid{pid}.capture"));
    one_line(
        &outcome,
        &format!(
            "the recording `{recording}` is not finished: process {pid}, which the program started, is still running"
        ),
    );
    assert!(
        outcome.stderr.ends_with(&format!("; `gpumem report a.pid{pid}.capture` shows its contents so far\n")),
        "{outcome}"
    );
    assert_eq!(recorded(&recording), of_allocates(), "{outcome}");
    // The other program has not yet called `cuInit` when the first program ends.
    let folder = Folder::new();
    let steps = [&["await_file end"], &ALLOCATES[..]].concat();
    let (outcome, pid) = leaves_behind(&folder, &steps, "[ -e log ]");
    let recording = folder.file(&format!("a.pid{pid}.capture"));
    let text = format!(
        ": process {pid}, which the program started, is still running; its allocations will be in `{recording}`"
    );
    one_line(&outcome, &text);
    assert_eq!(recorded(&recording), of_allocates(), "{outcome}");
}

#[test]
fn a_name_that_is_not_text() {
    let folder = Folder::new();
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let (run, steps) = (format!("{gpumem} run -o $'n\\xff.capture' -- {probe}"), in_shell(&ALLOCATES));
    let text = format!("cd {}; {run}{steps} && ls -b && mv $'n\\xff.capture' n.capture", folder.0.path().display());
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
    assert!(outcome.succeeded() && outcome.stdout.ends_with("\nn\\377.capture\n"), "{outcome}");
    assert!(outcome.stderr.contains(": 2 allocations"), "{outcome}");
    assert_eq!(recorded(&folder.file("n.capture")), of_allocates(), "{outcome}");
}

/// Another process holds the lock for longer than gpumem waits.
#[test]
fn a_lock_that_another_process_holds() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let locks = format!(
        "{}; exec 9> .a.pid$$.capture.completing; flock 9; sleep 100 & echo $! > pid; exec {}{}",
        format_args!("cd {}", folder.0.path().display()),
        probe(),
        in_shell(&ALLOCATES)
    );
    let outcome = run(&machine(), &file, &["sh", "-c", &locks]);
    let pid = fs::read_to_string(folder.file("pid")).unwrap();
    _ = std::process::Command::new("kill").arg(pid.trim()).status();
    assert!(outcome.is_clean(), "{outcome}");
    for part in
        ["gpumem: waiting for another process, which completes `", "has locked `", " for 20 s; remove that file"]
    {
        assert!(outcome.stderr.contains(part), "{part}\n{outcome}");
    }
    // A symbolic link at the path of the other lock file is not followed, so its target is not created.
    let kept = folder.file("kept");
    std::os::unix::fs::symlink(&kept, folder.file(".b.capture.lock")).unwrap();
    let outcome = run_probe(&machine(), &folder.file("b.capture"), &ALLOCATES);
    one_line(&outcome, "its lock file `");
    assert!(!Path::new(&kept).exists());
}

/// gpumem cannot recognise the dispatch table of this driver, and there is no libcupti.
#[test]
fn a_driver_that_cannot_be_intercepted() {
    let folder = Folder::new();
    let machine = Standin::new().env("XDG_CACHE_HOME", folder.0.path().join("cache"));
    let outcome = run_probe(&machine, &folder.file("a.capture"), &ALLOCATES);
    assert!(outcome.is_clean(), "{outcome}");
    let lines: Vec<_> = outcome.stderr.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].starts_with("gpumem: process ") && lines[0].contains(" is not recorded: "),
        "{outcome}"
    );
    assert!(lines[1].contains("nothing is recorded in `"), "{outcome}");
    assert_eq!(outcome.stdout, self::machine().run(&ALLOCATES.join("; ")).stdout);
    assert_eq!(folder.names(), ["cache"]);
}

/// No file may become longer than 8 KiB, which has the same effect as a full disk.
#[test]
fn a_full_disk() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    // The program waits until the first block is in the file, which must happen before the disk is full, even on a slow machine.
    let first = format!("await_recorded {}", folder.0.path().display());
    let steps = in_shell(&[&ALLOCATES[..4], &[&first, "until_killed stderr"]].concat());
    let script = format!(
        "trap '' XFSZ; ulimit -f 8; unset GPUMEM_STANDIN_LOG; exec {} run -o {file} -- {}{steps} > /dev/null",
        built("gpumem-command").display(),
        probe()
    );
    // The injected library is unpacked before the size of files is limited.
    let unpacks = machine().run_program(&built("gpumem-command"), &["run", "--", "/bin/true"]);
    assert_eq!(unpacks.exit(), "exit status: 0", "{unpacks}");
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &script]);
    // The program ran until it was killed, which happened after gpumem had printed its line.
    assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
    assert!(outcome.stderr.contains(": cannot write the recording "), "{outcome}");
    // The recording contains the data from before the disk was full.
    let recorded = recorded(&file);
    let (kept, later) = recorded.bytes.split_first().expect("the first block is there");
    assert_eq!(*kept, 4 << 20);
    let expected: Vec<u64> = (1..).map(|number| 512 * number).take(later.len()).collect();
    assert_eq!(later, expected);
    assert_eq!(folder.names(), ["a.capture"]);
}

/// The disk is full before the second process starts. The program continues, but a limit fails, because the memory of that
/// process is not known.
#[test]
fn a_disk_that_is_full_from_the_start() {
    for (options, exit) in [(&[][..], 0), (&["--max-peak", "1GiB"], 1)] {
        let folder = Folder::new();
        let file = folder.file("a.capture");
        let (probe, steps) = (probe(), in_shell(&ALLOCATES));
        // After `ulimit`, no file can become longer, so the stderr of the second process must not be a file.
        let script = format!(
            "{probe}{steps}; trap '' XFSZ; ulimit -f 0; RANK=1 {probe}{steps} 2>&1 | grep gpumem: >&2; exit ${{PIPESTATUS[0]}}"
        );
        let words = [&["run", "-o", &file], options, &["--", "bash", "-c", &script]].concat();
        let outcome = machine().run_program(&built("gpumem-command"), &words);
        assert_eq!(outcome.exit(), format!("exit status: {exit}"), "{outcome}");
        let names = folder.names();
        let lost = names.iter().find(|name| name.starts_with("a.rank1.pid")).unwrap_or_else(|| panic!("{names:?}"));
        assert!(names.len() == 2 && fs::read(folder.file(lost)).unwrap().is_empty(), "{names:?}");
        let lines: Vec<_> = outcome.stderr.lines().filter(|line| line.contains(lost)).collect();
        let why = ": its process could not be recorded or was killed before, or the file was made shorter, replaced, moved or removed";
        let next = format!(
            "`{why}; see the output of its process, or run it again with room on the disk or with another --output"
        );
        assert!(lines.iter().any(|line| line.ends_with(&next)), "{outcome}");
        let limit = format!(": its limits cannot be checked{why}");
        assert_eq!(
            lines.iter().filter(|line| line.ends_with(&limit)).count(),
            usize::try_from(exit).unwrap(),
            "{outcome}"
        );
    }
}

#[test]
fn a_run_in_a_run() {
    let folder = Folder::new();
    let [file, inner] = ["a.capture", "b.capture"].map(|name| folder.file(name));
    let gpumem = built("gpumem-command").display().to_string();
    let outcome = run(&machine(), &file, &[&[&gpumem, "run", "-o", &inner, "--", &probe()], &ALLOCATES[..]].concat());
    let text = format!("gpumem: this `gpumem run` records nothing: the `gpumem run` around it records to `{file}`\n");
    assert!(outcome.is_clean() && outcome.stderr.starts_with(&text), "{outcome}");
    assert_eq!(folder.names(), ["a.capture"]);
    assert_eq!(recorded(&file), of_allocates(), "{outcome}");
}
