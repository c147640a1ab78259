//! The pool's own high-water mark on the stand-in driver: the right peaks without libcupti, and what happens where the mark
//! cannot be read or is not ours alone.

use gpumem_tests::{CONTEXT, Outcome, Standin, check_answers, ensure};

/// Somebody else's reset of the mark.
const RESET: &str = "call cuDeviceGetMemPool &pool 0; call cuMemPoolSetAttribute pool 8 &zero";
const NOTICE: &str =
    "gpumem: the high-water mark of device 0's pool was reset by other code, or another pool was made current";

/// A driver and no libcupti.
fn without_cupti() -> Standin {
    Standin::new()
}

/// With a context of device 0.
#[track_caller]
fn check(machine: &Standin, script: &str) -> Outcome {
    check_answers(machine, &format!("{CONTEXT}; {script}"))
}

#[test]
fn each_of_several_traces_has_the_right_peak() {
    let outcome = check(
        &without_cupti(),
        "call cuMemAllocAsync &older 7 0; call cuMemAllocAsync &x 9000 0; call cuMemFreeAsync x 0
         ; pool = started; call cuMemAllocAsync &kept 10 0
         ; pool = started; call cuMemAllocAsync &x 500 0; call cuMemFreeAsync x 0
         ; pool = started; call cuMemAllocAsync &x 30 0; call cuMemFreeAsync x 0
         ; figures 0 = 10 500, pool; figures 1 = 0 500, pool; figures 2 = 0 30, pool
         ; reset; figures 2 = 0 0, pool; figures 1 = 0 500, pool
         ; call cuMemAllocAsync &x 900 0; call cuMemFreeAsync x 0; drop; figures 1 = 0 900, pool
         ; call cuMemFreeAsync kept 0; call cuMemAlloc_v2 &plain 5000; figures 0 = 0 910, pool; figures 1 = -10 900, pool",
    );
    ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
}

/// cuMemAllocAsync takes from the pool that is current on the device, so that one counts.
#[test]
fn the_current_pool_counts_and_a_change_is_reported() {
    let outcome = check(
        &without_cupti(),
        "call cuMemPoolCreate &other on:0; pool = started; call cuMemAllocAsync &a 100 0; figures = 100 0, pool
         ; call cuMemAllocFromPoolAsync &b 1000 other 0; figures = 100 0, pool
         ; call cuDeviceSetMemPool 0 other; figures = 1000 0, pool, 1 lost
         ; figures = 1000 0, pool, 1 lost; call cuMemAllocAsync &c 5 0; figures = 1005 0, pool, 1 lost
         ; reset; figures = 0 0, pool; call cuMemFreeAsync c 0; call cuMemFreeAsync b 0; figures = -1005 0, pool",
    );
    ensure(outcome.stderr.matches(NOTICE).count() == 1, "not one notice", &outcome);
}

#[test]
fn a_reset_by_others_is_reported_by_the_open_traces() {
    let blip = "call cuMemAllocAsync &x 500 0; call cuMemFreeAsync x 0";
    // After a reading; by the reading of a reset; below what was in use when the trace began.
    for script in [
        format!("pool; {blip}; figures = 0 500, pool; {RESET}; figures = 0 500, pool, 1 lost"),
        format!("pool; {blip}; figures; {RESET}; reset; figures = 0 0, pool; drop"),
        format!(
            "call cuMemAllocAsync &x 500 0; pool; call cuMemFreeAsync x 0; {RESET}; figures = -500 0, pool, 1 lost"
        ),
        format!("pool; {blip}; figures; {RESET}; pool; figures = 0 0, pool; figures 0 = 0 500, pool, 1 lost"),
    ] {
        let outcome = check(&without_cupti(), &script);
        ensure(outcome.stderr.matches(NOTICE).count() == 1, "not one notice", &outcome);
        ensure(outcome.stderr.contains("or use GPUMEM_GAUGE=exact"), "no next step", &outcome);
    }
    // No trace is open, or nothing is lost by it.
    for script in [
        format!("pool; {blip}; figures; drop; {RESET}; pool; figures = 0 0, pool"),
        format!("pool; {RESET}; {blip}; figures = 0 500, pool"),
        format!("pool; call cuMemAllocAsync &x 500 0; figures = 500 0, pool; {RESET}; figures = 500 0, pool"),
    ] {
        let outcome = check(&without_cupti(), &script);
        ensure(outcome.stderr.matches(NOTICE).count() == 0, "said something in vain", &outcome);
    }
}

#[test]
fn chosen_by_the_environment_it_asks_for_no_cupti_and_creates_no_context() {
    let machine = without_cupti().devices(2).env("GPUMEM_GAUGE", "pool").env("GPUMEM_REPORT", "json");
    let outcome = machine.run("status; new; build 1; pool 1; data; report; of_thread; status");
    ensure(outcome.is_clean() && outcome.contexts_created() == 0, "created a context", &outcome);
    ensure(outcome.answer("data") == "device=1 used=0 peaked=0 gauge=pool stale=false", "not of the pool", &outcome);
    let status = "gauge=pool source=pool mark events=0 untracked=0 lost=0 by=nothing why=the gauge `exact` is not available: GPUMEM_GAUGE is pool";
    ensure(outcome.answers("status").iter().all(|answer| *answer == status), "status", &outcome);
    ensure(outcome.reports()[0].contains(r#""gauge":"pool","source":"pool mark","used":0"#), "json", &outcome);
    // It is exact whatever the environment says, and cannot be had here.
    let refused = "error[unavailable] ";
    ensure(outcome.answer("of_thread").starts_with(refused), "counts one thread", &outcome);
    ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    let outcome = check(
        &without_cupti(),
        "other_thread pool; pool = started; call cuCtxGetCurrent &now; call cuCtxGetDevice &on",
    );
    ensure(outcome.contexts_created() == 1, "created a context", &outcome);
    // Reset as soon as the high marks are read; what is in use is read after that.
    let first: Vec<_> = outcome.calls.iter().filter_map(|call| call.strip_prefix("cuMemPool")).take(5).collect();
    let [get, set] = ["GetAttribute[0]=0", "SetAttribute[0]=0"];
    ensure(first == [get, get, set, get, get], "another order", &outcome);
}

#[test]
fn a_device_without_pools_is_an_error() {
    let outcome = without_cupti().set("pools=0").env("GPUMEM_GAUGE", "pool").run("build; new; data; report");
    let says = "the gauge `pool` is not available: the device has no stream-ordered pools; use another gauge";
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    ensure(outcome.answer("build") == format!("error[unavailable] {says}"), "no clear error", &outcome);
    ensure(outcome.answer("data").contains("gauge=off"), "not off", &outcome);
    ensure(outcome.stderr == format!("gpumem: traces are off: {says}\n"), "not one notice", &outcome);
}

#[test]
fn a_mark_that_cannot_be_read_or_reset_at_the_start_is_an_error() {
    for (fault, call) in [
        ("cuDeviceGetMemPool=999", "cuDeviceGetMemPool"),
        ("cuMemPoolGetAttribute=999", "cuMemPoolGetAttribute"),
        ("cuMemPoolGetAttribute=999@3", "cuMemPoolGetAttribute"),
        ("cuMemPoolSetAttribute=999", "cuMemPoolSetAttribute"),
    ] {
        let outcome = without_cupti().fail(fault).run("pool");
        ensure(outcome.is_clean() && outcome.contexts_created() == 0, "panicked or did not end well", &outcome);
        let says = format!("error[unavailable, 999 CUDA_ERROR_UNKNOWN] libcuda: {call} for device 0 failed with");
        ensure(outcome.answer("pool").starts_with(&says), "no error, or another", &outcome);
    }
}

/// A reading is four calls of cuMemPoolGetAttribute.
#[test]
fn a_mark_that_cannot_be_read_for_a_while_is_no_number() {
    let machine = without_cupti().fail("cuMemPoolGetAttribute=999@9..13");
    let outcome = check(
        &machine,
        "pool; call cuMemAllocAsync &a 10 0; figures = 10 0, pool; call cuMemAllocAsync &b 20 0; call cuMemFreeAsync b 0
         ; figures = 10 0, pool, stale; report; report; report; report; figures = 10 20, pool",
    );
    let notices = outcome.stderr.matches("gpumem: reports show ? while device 0 cannot be read: libcuda: cuMemPoolGet");
    ensure(notices.count() == 1, "not one notice", &outcome);
    ensure(outcome.reports()[0].ends_with("     ?      ?"), "reported figures", &outcome);
    // The reset that fails is blind, until the next one.
    let machine = without_cupti().fail("cuMemPoolSetAttribute=999@2..3");
    check(
        &machine,
        "pool; call cuMemAllocAsync &a 10 0; reset; figures = 10 0, pool, stale; call cuMemAllocAsync &b 5 0
         ; figures = 15 0, pool, stale; reset; call cuMemFreeAsync b 0; figures = -5 0, pool",
    );
}

#[test]
fn the_child_of_a_fork_gets_no_number() {
    let outcome = without_cupti().run("pool; fork figures | pool; figures");
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    ensure(outcome.answers("figures") == ["0 0, pool, stale", "0 0, pool"], "a number in the child", &outcome);
    ensure(outcome.answers("pool")[1].starts_with("error[unavailable] this process was forked"), "a trace", &outcome);
}
