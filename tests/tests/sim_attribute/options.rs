//! Tests each option.

use super::*;

#[gpu_mem_trace(ctx = "step")]
fn named() {}

#[gpu_mem_trace(silent)]
fn silent() {}

#[gpu_mem_trace(silent = true)]
fn silent_true() {}

#[gpu_mem_trace(silent = false)]
fn silent_false() {}

#[gpu_mem_trace(on_exit_report = false)]
fn no_exit() {}

#[gpu_mem_trace(on_exit_report)]
fn on_exit() {}

#[gpu_mem_trace(stats)]
fn counted() {}

#[gpu_mem_trace(stats = false)]
fn not_counted() {}

#[gpu_mem_trace(skip)]
fn skipped() {}

#[gpu_mem_trace(thread_local, gauge = "exact")]
fn of_one_thread() -> SimBlock {
    let take = || gpus()[0].alloc(Bytes::mib(5)).expect("there is room");
    drop(std::thread::scope(|threads| threads.spawn(take).join().expect("it runs")));
    take()
}

#[gpu_mem_trace(thread_local = false)]
fn of_all_threads() {
    drop(std::thread::scope(|threads| threads.spawn(|| gpus()[0].alloc(Bytes::mib(5))).join().expect("it runs")));
}

#[gpu_mem_trace(gauge = "off")]
fn unmeasured() {}

#[gpu_mem_trace(gauge = "sampled")]
fn sampled() {}

#[gpu_mem_trace()]
fn empty() {}

#[gpu_mem_trace(ctx = "all", silent = false, on_exit_report = true, device = 0, gauge = "exact", crate = gpumem)]
fn all() {}

#[gpu_mem_trace(crate = super::gpumem_here::renamed)]
fn renamed() {}

#[test]
fn do_what_they_say() {
    check(named, ["step"]);
    check(silent, []);
    check(silent_true, []);
    check(silent_false, ["silent_false"]);
    check(no_exit, []);
    check(on_exit, ["on_exit"]);
    check(counted, []);
    check(not_counted, ["not_counted"]);
    let names: Vec<_> = gpumem::stats().names.into_iter().map(|name| (name.name, name.calls)).collect();
    assert_eq!(names, [("counted".to_owned(), 1)]);
    check(skipped, []);
    check(empty, ["empty"]);
    check(unmeasured, []);
    check(sampled, ["sampled"]);
    assert_eq!(reports(sampled)[0].trace.gauge, Gauge::Sampled);
    assert_eq!(reports(all)[0].trace.gauge, Gauge::Exact);
    check(all, ["all"]);
    check(renamed, ["renamed"]);
    assert_eq!(lines(of_one_thread), ["△Used Peaked MB:      5      0 (of_one_thread: exit)"]);
    assert_eq!(lines(of_all_threads), ["△Used Peaked MB:      0      5 (of_all_threads: exit)"]);
}
