//! Tests the rules that all commands share.

use std::{fs, process::Command};

use crate::{file, folder, gpumem, output_of, ran, within};

#[test]
fn wrong_arguments_end_with_2() {
    for arguments in [&["no-such-command"][..], &["report"], &["report", "--no-such-option", "x"], &[]] {
        let ran = ran(arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(ran.stderr.contains("Usage: gpumem"), "{}", ran.stderr);
    }
}

#[test]
fn help_and_version_end_with_0() {
    for (argument, text) in [("--help", "Exit codes:"), ("--version", env!("CARGO_PKG_VERSION"))] {
        let ran = ran(&[argument]);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{argument}");
        assert!(ran.stdout.contains(text), "{}", ran.stdout);
    }
}

#[test]
fn an_error_is_one_line() {
    let ran = ran(&["report", "no\nsuch file"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""));
    assert!(ran.stderr.starts_with("gpumem: `no such file`"), "{}", ran.stderr);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
}

#[test]
fn an_error_is_not_as_long_as_the_names_in_it() {
    let ran = ran(&["report", &"x".repeat(5000)]);
    assert!(ran.stderr.starts_with("gpumem: `xxx") && ran.stderr.contains("x…x"), "{}", ran.stderr);
    assert!(ran.stderr.contains("` cannot be read: File name too long"), "{}", ran.stderr);
    assert!(ran.stderr.chars().count() < 1100, "{}", ran.stderr);
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error() {
    let full = fs::File::options().write(true).open("/dev/full").expect("Linux has it");
    for arguments in [&["completions", "bash"][..], &["--help"], &["run", "-h"], &["--version"]] {
        let full = full.try_clone().expect("it is open");
        let ran = crate::Ran::of(&gpumem(arguments).stdout(full).output().expect("it starts"));
        assert_eq!(ran.code, Some(2), "{arguments:?}");
        assert!(ran.stderr.starts_with("gpumem: the output cannot be written: "), "{arguments:?}: {}", ran.stderr);
    }
}

/// The kernel ends a program that writes more than `ulimit -f` allows, unless the program handles the signal.
#[test]
fn a_file_that_becomes_too_long_is_an_error() {
    let page = file("too-long.html");
    let script = format!(
        "ulimit -f 1; exec {} report --html {} {}",
        env!("CARGO_BIN_EXE_gpumem"),
        page.display(),
        crate::golden::data("training.capture")
    );
    let ran = crate::Ran::of(&Command::new("sh").args(["-c", &script]).output().expect("there is a shell"));
    assert!(ran.code == Some(2) && ran.stderr.contains("File too large"), "{ran:?}");
    assert!(!page.exists());
}

#[test]
fn completions_are_those_of_each_shell() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let ran = ran(&["completions", shell]);
        assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
        assert!(ran.stdout.contains("report"), "{shell}: {}", ran.stdout);
    }
    // Bash parses the completions.
    let script = file("gpumem.bash");
    fs::write(&script, ran(&["completions", "bash"]).stdout).expect("it is written");
    if let Some(checked) = output_of("bash", &["-n", script.to_str().expect("the name is text")]) {
        assert!(checked.status.success());
    }
}

#[test]
fn each_command_has_a_manual_page() {
    let folder = file("man");
    assert_eq!(ran(&["man", "--folder", folder.to_str().expect("it is text")]).code, Some(0));
    for page in ["gpumem.1", "gpumem-report.1", "gpumem-diff.1", "gpumem-completions.1", "gpumem-man.1"] {
        let text = fs::read_to_string(folder.join(page)).expect("the page is there");
        assert!(text.contains(".SH NAME") && text.contains("Examples:"), "{page}: {text}");
    }
    let ran = ran(&["man", "--folder", "/dev/null/x"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.starts_with("gpumem: manual pages cannot be written to `/dev/null/x`: "), "{}", ran.stderr);
}

/// A word that starts with a dash is the value of the option before it, unless that value is a path. The option reports the error
/// in the value.
#[test]
fn a_value_that_starts_with_a_dash() {
    for (arguments, why) in [
        (
            &["report", "--at", "-5s", "x"][..],
            "invalid value '-5s' for '--at <MOMENT>': write start, peak, process-peak, end, oom",
        ),
        (&["estimate", "--batch", "-1", "x"], "invalid value '-1' for '--batch <N>'"),
        (&["diff", "--fail-on-increase", "-5%", "x", "y"], "invalid value '-5%' for '--fail-on-increase <LIMIT>'"),
        (&["report", "--html", "--json", "x"], "a value is required for '--html <OUT>'"),
    ] {
        let ran = ran(arguments);
        assert!(
            ran.code == Some(2) && ran.stderr.contains(why) && !ran.stderr.contains("tip:"),
            "{arguments:?}: {ran:?}"
        );
    }
}

/// A word with a dash before the program is an option of `gpumem run`.
#[test]
fn an_unknown_option_of_run_is_no_program() {
    let unknown = ran(&["run", "--outptu", "x", "--", "true"]);
    assert_eq!(unknown.code, Some(2), "{unknown:?}");
    for part in ["unexpected argument '--outptu'", "--output", "Usage: gpumem run [OPTIONS] <COMMAND>..."] {
        assert!(unknown.stderr.contains(part), "{part}: {unknown:?}");
    }
    let program = ran(&["run", "-x"]);
    assert!(program.code == Some(2) && program.stderr.contains("use '-- -x'"), "{program:?}");
    let none = ran(&["run"]);
    assert!(none.stderr.contains("Usage: gpumem run [OPTIONS] <COMMAND>..."), "{none:?}");
    let help = ran(&["run", "--help"]);
    assert!(help.stdout.contains("Usage: gpumem run [OPTIONS] <COMMAND>..."), "{help:?}");
}

/// `gpumem run` names what it cannot do, the cause, and the next step. The program still runs.
#[test]
fn run_says_why_it_records_nothing() {
    let folder = folder("run-nothing");
    let run = |output: &str, devices: &str| {
        let mut command = gpumem(&["run", "-o", output, "--", "sh", "-c", "exit $0", "7"]);
        command.current_dir(&folder).env("XDG_CACHE_HOME", &folder).env("GPUMEM_SIM", devices);
        crate::Ran::of(&command.output().expect("the command starts"))
    };
    let folderless = run("nodir/x.capture", "");
    let why = "/nodir`; create it, or use another --output; the program runs without being recorded\n";
    assert!(folderless.code == Some(7) && folderless.stderr.ends_with(why), "{folderless:?}");
    assert!(folderless.stderr.contains("x.capture`: there is no folder `"), "{folderless:?}");
    let simulated = run("x.capture", "16GiB");
    let why = "GPUMEM_SIM is set; a program with simulated devices records itself with GPUMEM_CAPTURE=FILE\n";
    assert!(simulated.code == Some(7) && simulated.stderr.ends_with(why), "{simulated:?}");
    assert!(!run("x.capture", "").stderr.contains("GPUMEM_SIM"));
}

/// `-` is stdout, as in other commands. A recording cannot be written to stdout, and the tables of Parquet are several files.
#[test]
fn a_dash_is_stdout() {
    let folder = folder("dash");
    let recording = crate::report::training("dash.capture");
    let in_folder = |arguments: &[&str]| within(&folder, arguments);
    let format = ["report", "--format", "folded", &recording];
    assert_eq!(in_folder(&[&format[..], &["-o", "-"]].concat()).stdout, in_folder(&format).stdout);
    let page = in_folder(&["report", "--html", "-", &recording]);
    assert!(page.code == Some(0) && page.stdout.starts_with("<!DOCTYPE html>"), "{page:?}");
    for arguments in [
        &["report", "--format", "parquet", "-o", "-", &recording][..],
        &["run", "-o", "-", "--", "true"],
        &["attach", "-o", "-", "1"],
        &["estimate", "--record", "-", "config.json"],
    ] {
        assert_eq!(in_folder(arguments).code, Some(2), "{arguments:?}");
    }
    assert_eq!(fs::read_dir(&folder).expect("it is there").count(), 0, "no file is named `-`");
}

/// An option that would do nothing is an error.
#[test]
fn options_of_another_report_are_rejected() {
    for (arguments, what) in [
        (&["--depth", "3", "--tree"][..], "'--depth <ROWS>' cannot be used with '--tree'"),
        (&["--min", "1%", "--leaks"], "'--min <LIMIT>' cannot be used with '--leaks'"),
        (&["--inside", "x", "--at", "peak"], "'--inside <NAME>' cannot be used with '--at <MOMENT>'"),
        (&["--depth", "3", "--html", "x.html"], "'--depth <ROWS>' cannot be used with '--html <OUT>'"),
        (&["-o", "x", "--html", "x.html"], "'--output <OUT>' cannot be used with '--html <OUT>'"),
    ] {
        let rejected = ran(&[&["report"], arguments, &["x.capture"]].concat());
        assert!(rejected.code == Some(2) && rejected.stderr.contains(what), "{arguments:?}: {rejected:?}");
    }
}
