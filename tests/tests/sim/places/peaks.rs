//! Tests the allocations that made a peak.

use gpumem::{Gauge, report::PeakHolders};

use super::*;

/// Returns the scope of each holder and its bytes.
fn reported(peak: &PeakHolders) -> Vec<(String, i64)> {
    let sum: i64 = peak.holders.iter().map(|holder| holder.bytes.get()).sum();
    assert_eq!(sum, peak.bytes.get().cast_signed(), "{peak}");
    assert!(peak.to_string().lines().all(|line| line.width() <= 80), "{peak}");
    peak.holders.iter().map(|holder| (holder.path.join("/"), holder.bytes.get())).collect()
}

fn expected(holders: &[(&str, i64)]) -> Vec<(String, i64)> {
    holders.iter().map(|(path, bytes)| ((*path).to_owned(), *bytes)).collect()
}

#[test]
fn of_one_thread_and_of_nobody() {
    let gpu = simulated_gpu();
    let builder = || GpuMemTrace::builder().ctx("own");
    let mut own = builder().thread_local_only().at_peak(true).start().expect("exact");
    let others = thread::scope(|threads| threads.spawn(|| take(&gpu, 1 << 30)).join().expect("it does not panic"));
    drop(take(&gpu, 5 * MIB));
    let peak = own.peak_holders().expect("asked for");
    assert_eq!(reported(&peak), expected(&[("own", 5 << 20)]));
    let holder = &peak.holders[0];
    let line = line!() - 4;
    assert!(holder.line.as_ref().is_some_and(|line| line.contains("sim/places/mod.rs:")), "{peak:?}");
    assert!(holder.caller.as_ref().is_some_and(|at| at.contains(&format!("places/peaks.rs:{line}:"))), "{peak:?}");
    own.reset();
    assert_eq!(reported(&own.peak_holders().expect("asked for")), []);
    own.report_n_reset();
    let kept = take(&gpu, 1);
    own.stop();
    assert_eq!(reported(&own.peak_holders().expect("asked for")), expected(&[("own", 1)]));
    own.start();
    assert_eq!(reported(&own.peak_holders().expect("asked for")), []);
    drop((kept, others));
    assert_eq!(builder().start().expect("exact").peak_holders(), None, "nobody asked");
    let sampled = builder().gauge(Gauge::Sampled).at_peak(true).on_exit_report(false).start().expect("it is read");
    assert_eq!(sampled.peak_holders(), None);
}

#[test]
fn of_a_device_in_the_summary() {
    let gpu = simulated_gpu();
    let outside = take(&gpu, 1);
    let weights = GpuMemTrace::scope("load", |_| take(&gpu, 100));
    GpuMemTrace::scope("train", |_| {
        let own = take(&gpu, 10);
        GpuMemTrace::scope("forward", |_| drop(take(&gpu, 1000)));
        drop(own);
    });
    drop(weights);
    // This scope has more memory than `forward`, but the process has less than at its peak.
    GpuMemTrace::scope("check", |_| drop(take(&gpu, 1005)));
    let at_peak: Vec<_> = scopes(&gpu).into_iter().map(|(path, scope)| (path, scope.at_peak.get())).collect();
    let at_peak: Vec<_> = at_peak.iter().map(|(path, bytes)| (path.as_str(), *bytes)).collect();
    assert_eq!(at_peak, [("", 1111), ("check", 0), ("load", 100), ("train", 1010), ("train/forward", 1000)]);
    assert_eq!(scopes(&gpu)[""].peak.get(), 1111);
    drop(outside);
}

pub(super) fn peak() {
    let gpu = simulated_gpu();
    let before = take(&gpu, 3 * MIB);
    let train = GpuMemTrace::with_ctx("train");
    let step = GpuMemTrace::with_ctx("step");
    let held = take(&gpu, 20 * MIB);
    drop(take(&gpu, 2 * MIB));
    drop((held, step, train, before));
    // The report at the end is about the whole run, so this reset must not change it.
    gpumem::summary_n_reset();
    drop(take(&gpu, 24 * MIB));
}

#[test]
fn of_the_process_at_its_end() {
    let said = passes("peak", &[("GPUMEM_PEAK", "1")]);
    let lines: Vec<_> = said.stderr.lines().skip_while(|line| !line.contains(" ends. ")).collect();
    assert!(lines[0].starts_with("gpumem: process "), "{}", said.stderr);
    assert!(lines[0].ends_with(" ends. Its peaks:"), "{}", said.stderr);
    assert_eq!(lines[1], "simulated device 0: the peak was 25 MiB");
    let row = |start: &str, mib: &str| lines.iter().any(|line| line.starts_with(start) && line.contains(mib));
    for (start, mib) in [(" train  ", " 22  "), ("   step  ", " 22  "), (" outside of all scopes  ", "  3  ")] {
        assert!(row(start, mib), "{start}: {}", said.stderr);
    }
    let of_lines = |mib: &str| lines.iter().any(|line| line.contains("sim/places/mod.rs:") && line.contains(mib));
    assert!(of_lines(" 20  ") || of_lines(" 22  "), "{}", said.stderr);
    for variables in [&[][..], &[("GPUMEM_PEAK", "0")], &[("GPUMEM_PEAK", "")]] {
        assert_eq!(passes("peak", variables).stderr, "");
    }
    assert_eq!(passes("no trace", &[("GPUMEM_PEAK", "1")]).stderr, "");
    let said = run("leaks and exits", &[("GPUMEM_PEAK", "1")]);
    assert!(said.stderr.contains(" the peak was 6.00 MiB\n"), "{}", said.stderr);
}

#[test]
fn is_reported_when_memory_runs_out_if_it_was_higher() {
    // At its end, the process waits at most 5 s for the report. On a busy machine, looking up stacks takes longer, so there are
    // none.
    let said = passes("peak and refused", &[("GPUMEM_BACKTRACE", "0")]);
    assert!(
        said.stderr.contains("simulated device 0: the peak was 40 GiB\n") && said.stderr.contains("\n big  "),
        "{}",
        said.stderr
    );
}

pub(super) fn peak_and_rejected() {
    let gpu = simulated_gpu();
    GpuMemTrace::scope("big", |_| drop(take(&gpu, 40 << 30)));
    let _held = take(&gpu, 30 << 30);
    assert!(gpu.alloc(Bytes::gib(50)).is_err());
}
