//! `kill -9` loses nothing that was recorded.

use gpumem_tests::{Random, built};

use super::*;

/// Calls that have returned when the program is killed are in the recording, at 100 moments.
#[test]
fn a_killed_program_loses_no_event() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let mut random = Random::new(20);
    let (mut most, mut all) = (0, 0);
    for round in 0..100 {
        // A slow machine makes few calls until it is killed, so some rounds wait for many calls first.
        let (micros, after) = if round % 2 == 0 { (3_000, 0) } else { (200_000, random.below(5_000_u64)) };
        let until = format!("until_killed {} {after}", random.below(micros));
        let outcome = run_probe(&machine(), &file, &[&ALLOCATES[..3], &[until.as_str()]].concat());
        assert_eq!(outcome.exit(), "exit status: 137", "{outcome}");
        let returned: usize = outcome.stdout.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0);
        all += returned;
        if !Path::new(&file).exists() {
            // Nothing is kept of a process that allocated nothing.
            assert_eq!(returned, 0, "{outcome}");
            continue;
        }
        let recorded = recorded(&file);
        let events = recorded.bytes.len() + recorded.frees;
        // The last call may be recorded although it has not returned.
        assert!((returned..=returned + 1).contains(&events), "{events} of {returned} events\n{}", outcome.stderr);
        assert!(recorded.bytes.iter().zip(1..).all(|(bytes, number)| *bytes == 512 * number));
        assert_eq!(folder.names(), ["a.capture"]);
        fs::remove_file(&file).expect("it is there");
        most = most.max(returned);
    }
    assert!(most > 1_000 && all > most, "{most} {all}");
}

/// Without the command, which would do that, the next report adds what is in the ring.
#[test]
fn a_report_has_what_a_killed_program_recorded_last() {
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let steps = in_shell(&[&ALLOCATES[..3], &["until_killed 50000 1000"]].concat());
    let gpumem = built("gpumem-command");
    let pid = folder.file("pid");
    // `kill` is not built into all shells, and the command is to be gone before the program is.
    let kill = format!("kill -9 $PPID; echo $$ > {pid}; exec {}{steps} > {}", probe(), folder.file("calls"));
    let until_gone = format!(
        "while ! read pid < {pid}; do sleep 0.01; done; \
         while grep -q '^State:.[^ZX]' /proc/$pid/status; do sleep 0.01; done"
    );
    let script = format!(
        "{} run -o {file} -- sh -c \"{}\"; {{ {until_gone}; }} 2> /dev/null; true",
        gpumem.display(),
        kill.replace('$', "\\$")
    );
    let outcome = machine().run_program("/bin/sh".as_ref(), &["-c", &script]);
    let find = |end: &str| folder.names().into_iter().find(|name| name.starts_with("a.pid") && name.contains(end));
    let ring = find(".ring").unwrap_or_else(|| panic!("{:?}\n{outcome}", folder.names()));
    let recording = folder.file(ring.strip_suffix(".ring").unwrap());
    let report = machine().run_program(&gpumem, &["report", &recording]);
    assert!(report.is_clean() && report.stderr.is_empty(), "{report}");
    assert!(find(".ring").is_none());
    let recorded = recorded(&recording);
    let returned: usize =
        fs::read_to_string(folder.file("calls")).unwrap().lines().filter_map(|line| line.parse().ok()).max().unwrap();
    let events = recorded.bytes.len() + recorded.frees;
    assert!((returned..=returned + 1).contains(&events) && returned > 100, "{events} of {returned}");
    assert!(report.stdout.contains(&format!(": {} allocations", recorded.bytes.len())), "{report}");
}
