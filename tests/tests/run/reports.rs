//! Tests reports of a recording while its process runs, while it ends, or after it was killed. Several reports run at the same
//! time.

use gpumem_tests::built;

use super::*;

/// Records a program that continues after `gpumem run` has ended, while several loops of `gpumem report` read its recording. The
/// program allocates `second` before it ends. After its end, one last report runs.
fn reports_beside(folder: &Folder, last: &[&str]) -> Outcome {
    let [gpumem, probe] = ["gpumem-command", "probe"].map(|name| built(name).display().to_string());
    let steps = in_shell(&[&ALLOCATES[..4], &["await_file end", "call cuMemAlloc_v2 &second 8388608"], last].concat());
    let text = format!(
        "cd {folder}
         {gpumem} run -o a.capture -- sh -c \"{probe}{steps} > /dev/null & echo \\$! > pid\" 2> /dev/null
         pid=$(cat pid); recording=a.pid$pid.capture
         for loop in 1 2 3; do
             while grep -q '^State:.[^ZX]' /proc/$pid/task/*/status; do {gpumem} report $recording; done &
         done > reports 2>&1
         until grep -q 'still records' reports; do sleep 0.01; done; > end
         wait; rm pid end; {gpumem} report $recording > last 2>&1; echo $recording",
        folder = folder.0.path().display(),
    );
    machine().run_program("/bin/bash".as_ref(), &["-c", &text])
}

/// The recording is complete in the end, no matter when the reports run.
#[test]
fn a_report_loses_nothing_of_a_process_that_ends() {
    for round in 0..6 {
        let folder = Folder::new();
        let outcome = reports_beside(&folder, if round % 2 == 0 { &[] } else { &["until_killed 0 0"] });
        assert!(outcome.succeeded(), "{outcome}");
        let recording = outcome.stdout.trim_end();
        let [reports, last] = ["reports", "last"].map(|name| fs::read_to_string(folder.file(name)).unwrap());
        let about = format!("round {round}\n{last}\n{reports}\n{outcome}");
        assert!(!reports.contains("cannot be added"), "{about}");
        let bytes = recorded(&folder.file(recording)).bytes;
        assert_eq!(bytes[..2], [4 << 20, 8 << 20], "{about}");
        assert!(last.contains(&format!(": {} allocations", bytes.len())), "{about}");
        assert_eq!(folder.names(), [recording, "last", "reports"], "{about}");
    }
}

/// Pinned host memory is reported with its own peak, even if that is later than the peak of the device. Registered memory is
/// pinned as well.
#[test]
fn pinned_memory_after_the_peak_is_reported() {
    let device = "call cuMemAlloc_v2 &a 10485760";
    let allocated = "call cuMemAllocHost_v2 &b 67108864";
    let registered = "call cuMemHostRegister_v2 65536 33554432 0";
    for order in [[allocated, registered, device], [device, allocated, registered], [allocated, device, registered]] {
        let folder = Folder::new();
        let file = folder.file("a.gpumem");
        let last = ["call cuMemHostUnregister 65536"];
        run_probe(&machine(), &file, &[&ALLOCATES[..3], &order, &last].concat());
        let report = machine().run_program(&built("gpumem-command"), &["report", &file]);
        assert!(report.stdout.contains("peak was 10 MiB"), "{report}");
        assert!(report.stdout.contains("\nbesides  pinned host at most 96 MiB,"), "{order:?}: {report}");
    }
}
