//! Tests two runs at the same time that name the same file.

use gpumem_tests::built;

use super::*;

/// Starts a run that waits, and then a second run. `ends_first` decides whether the first run ends before the second one.
fn two_runs(folder: &Folder, options: &str, ends_first: bool) -> Outcome {
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let waits = in_shell(&[&ALLOCATES[..], &["await_file end"]].concat());
    let steps = [&ALLOCATES[..3], &["call cuMemAlloc_v2 &other 8388608", "await_file other"]].concat();
    let order = if ends_first {
        "> end; wait $first; > other; wait $second"
    } else {
        "> other; wait $second; > end; wait $first"
    };
    let text = format!(
        "cd {folder}; set -e
         recorded() {{ until [ $(ls | grep -c 'pid.*capture$') = $1 ]; do sleep 0.01; done; }}
         {gpumem} run {options} -- {probe} {waits} > 1.log 2> 1.err & first=$!; recorded 1
         {gpumem} run {options} -- {probe} {steps} > 2.log 2> 2.err & second=$!; recorded 2
         {order}; head -n1 2.err; echo $second; rm -f end other ?.log ?.err",
        folder = folder.0.path().display(),
        steps = in_shell(&steps),
    );
    machine().run_program("/bin/bash".as_ref(), &["-c", &text])
}

#[test]
fn the_second_run_has_a_file_of_its_own() {
    for ends_first in [true, false] {
        let folder = Folder::new();
        let outcome = two_runs(&folder, "-o a.capture", ends_first);
        assert!(outcome.succeeded(), "{outcome}");
        let (line, pid) = outcome.stdout.trim_end().rsplit_once('\n').unwrap_or_else(|| panic!("{outcome}"));
        let second = format!("a.{pid}.capture");
        assert_eq!(folder.names(), [&second, "a.capture"], "{outcome}");
        assert_eq!(recorded(&folder.file("a.capture")), of_allocates(), "{outcome}");
        assert_eq!(recorded(&folder.file(&second)).bytes, [8 << 20], "{outcome}");
        let given = folder.file(&second);
        assert_eq!(line, format!("gpumem: another `gpumem run` records to `a.capture`; this one records to `{given}`"));
    }
}

#[test]
fn names_that_nobody_gave_differ() {
    let folder = Folder::new();
    let outcome = two_runs(&folder, "", true);
    assert!(outcome.succeeded(), "{outcome}");
    assert_eq!(folder.names(), ["probe.2.capture", "probe.capture"], "{outcome}");
    assert_eq!(recorded(&folder.file("probe.capture")), of_allocates(), "{outcome}");
    assert_eq!(recorded(&folder.file("probe.2.capture")).bytes, [8 << 20], "{outcome}");
}

/// A killed run does not block its file.
#[test]
fn after_a_run_that_was_killed() {
    let folder = Folder::new();
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let text = format!(
        "cd {folder}; {gpumem} run -o a.capture -- {probe} 'await_file end' & run=$!
         until ls -A | grep -q lock; do sleep 0.01; done
         kill -9 $run; wait $run; {gpumem} run -o a.capture -- {probe} {steps} > log 2>&1; > end; rm end log",
        folder = folder.0.path().display(),
        steps = in_shell(&ALLOCATES),
    );
    let outcome = machine().run_program("/bin/bash".as_ref(), &["-c", &text]);
    assert!(outcome.succeeded(), "{outcome}");
    assert_eq!(folder.names(), ["a.capture"], "{outcome}");
    assert_eq!(recorded(&folder.file("a.capture")), of_allocates(), "{outcome}");
}
