//! Tests exact numbers through CUPTI: other subscribers, the search for libcupti, and the behaviour without it. `calls.rs` tests
//! the numbers themselves.

use gpumem_tests::{CONTEXT, Standin, check, each, ensure};

use super::{WITHOUT_EXACT_TRACES, with_cupti};

/// Like [`check`], but the script starts with a context and an exact trace of its device, and nothing may be printed to stderr.
#[track_caller]
fn check_exact(machine: &Standin, script: &str) {
    let outcome = check(machine, &format!("{CONTEXT}; exact = started; {script}"));
    ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
}

/// Checks that traces are sampled, that there is one notice with the reason, and that a trace that must be exact is an error.
#[track_caller]
fn check_sampled(machine: &Standin, says: &[&str]) {
    let script = format!(
        "{CONTEXT}; new; new; call cuMemAlloc_v2 &a 20971520; sleep 2; figures 0; figures 1; exact; drop; drop"
    );
    let outcome = check(machine, &script);
    for trace in ["figures 0", "figures 1"] {
        ensure(outcome.answer(trace) == "20971520 0, sampled", &format!("`{trace}` was not sampled"), &outcome);
    }
    let error = outcome.answer("exact");
    ensure(error.starts_with("error["), "a trace that had to be exact was started", &outcome);
    let notices: Vec<_> = outcome.stderr.lines().collect();
    ensure(notices.len() == 1, "not one notice", &outcome);
    for word in says {
        ensure(notices[0].contains(word), &format!("the notice does not say `{word}`"), &outcome);
        ensure(error.contains(word), &format!("the error does not say `{word}`"), &outcome);
    }
}

#[test]
fn another_tool_holds_the_subscription() {
    let nsys = with_cupti().set("subscriber=nsys");
    check_sampled(&nsys, &["nsys holds the only subscription", "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"]);
    let outcome = check(&nsys, "exact");
    ensure(outcome.answer("exact").starts_with("error[busy]"), "is not busy", &outcome);
    // With an older libcupti, gpumem cannot subscribe in addition to another tool.
    check_sampled(&nsys.clone().without_symbol("cuptiSubscribe_v2"), &["another profiler holds the only subscription"]);
    check_sampled(&nsys.clone().set("cupti=130001"), &["holds the only subscription"]);
    // If the tool allows other subscribers and CUPTI supports that, traces are exact.
    let shared = nsys.set("shared=1");
    check_exact(&shared, "call cuMemAlloc_v2 &a 1000; figures = 1000 0");
    check_sampled(&shared.without_symbol("cuptiSubscribe_v2"), &["another profiler"]);
}

#[test]
fn without_libcupti() {
    check_sampled(&Standin::new(), &["cannot load libcupti", "libcupti.so", "GPUMEM_CUPTI names the file"]);
    for symbol in
        ["cuptiSubscribe", "cuptiUnsubscribe", "cuptiEnableCallback", "cuptiGetDeviceId", "cuptiGetResultString"]
    {
        check_sampled(&with_cupti().without_symbol(symbol), &["libcupti has no", symbol]);
    }
    check_exact(&with_cupti().without_symbol("cuptiSubscribe_v2"), "call cuMemAlloc_v2 &a 1000; figures = 1000 0");
    check_exact(&with_cupti().set("cupti=130001"), "call cuMemAlloc_v2 &a 1000; figures = 1000 0");
}

#[test]
fn a_subscription_that_fails() {
    for (fault, says) in [
        ("15", "CUPTI_ERROR_NOT_INITIALIZED (15)"),
        ("35", "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (35)"),
        ("33", "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED (33)"),
        ("77", "(77)"),
    ] {
        let machine = with_cupti().fail(format!("cuptiSubscribe={fault}")).fail(format!("cuptiSubscribe_v2={fault}"));
        check_sampled(&machine, &["libcupti: cuptiSubscribe", says]);
        let machine = with_cupti().fail(format!("cuptiEnableCallback={fault}@4"));
        check_sampled(&machine, &["libcupti: cuptiEnableCallback", says]);
        // gpumem keeps no part of a subscription that failed, so another tool can subscribe.
        check(&machine, &format!("{CONTEXT}; new; tool_subscribe libcupti.so.13 = 0"));
    }
    // If the device of an event is not known, the event counts as lost. gpumem does not guess the device.
    let lost = "call cuMemAlloc_v2 &a 1000; figures = 0 0, 1 lost; call cuMemFree_v2 a";
    check(&with_cupti().fail("cuptiGetDeviceId=3"), &format!("{CONTEXT}; exact; {lost}"));
    check(&with_cupti().fail("cuptiUnsubscribe=1"), &format!("{CONTEXT}; new; unsubscribe; drop"));
}

/// A libcupti that is older than some functions of the driver does not know their ids, which gpumem accepts. A libcupti that does
/// not know one of the other functions is rejected.
#[test]
fn a_libcupti_that_does_not_know_the_latest_functions() {
    let started = |call: u32| {
        let fault = format!("cuptiEnableCallback=1@{call}..{}", call + 1);
        let outcome = with_cupti().fail(fault).env("GPUMEM_SOURCE", "cupti").run("exact");
        outcome.answer("exact") == "started"
    };
    let started: Vec<bool> = (1..70).map(started).collect();
    assert!(!started[0], "`cuMemAllocAsync` is not reported");
    // These functions are newer than CUDA 11.2: three that add a node, two that instantiate a graph, one that trims, two that
    // capture into a graph, and one for multicast.
    let last = started.iter().rposition(|started| !started).unwrap_or(0);
    assert_eq!(started[..last].iter().filter(|started| **started).count(), 9);
}

#[test]
fn two_tools_in_one_process() {
    // The other tool subscribes first, and unsubscribes.
    let script = "tool_subscribe libcupti.so.13 = 0; new; figures = 0 0, sampled; drop; tool_unsubscribe libcupti.so.13 = 0; \
                  subscribe = done; new; call cuMemAlloc_v2 &a 1000; figures 0 = 1000 0";
    check(&with_cupti(), &format!("{CONTEXT}; {script}"));
    let script = "tool_subscribe libcupti.so.13 = 0; new; drop; tool_unsubscribe libcupti.so.13 = 0; new; \
                  call cuMemAlloc_v2 &a 1000; figures 0 = 1000 0";
    check(&with_cupti(), &format!("{CONTEXT}; {script}"));
    // The other tool comes later: `unsubscribe` makes room for it, and gpumem then continues with the blocks that it already
    // knew.
    let script = "tool_subscribe libcupti.so.13 = 39; call cuMemAlloc_v2 &a 1000; call cuMemAlloc_v2 &b 50; unsubscribe; \
                  tool_subscribe libcupti.so.13 = 0; tool_unsubscribe libcupti.so.13 = 0; subscribe = done; \
                  call cuMemFree_v2 a; figures = 50 1000, 1 lost; exact; call cuMemFree_v2 b; figures 1 = -50 0";
    check(&with_cupti(), &format!("{CONTEXT}; exact; {script}"));
    let outcome = check(&with_cupti(), "subscribe; subscribe; exact; exact; unsubscribe; unsubscribe");
    let count = |call: &str| outcome.calls.iter().filter(|line| line.starts_with(call)).count();
    ensure(count("cuptiSubscribe") == 1 && count("cuptiUnsubscribe") == 1, "not once", &outcome);
}

#[test]
fn libcupti_is_found() {
    let python = |packages: &str| format!("lib/python3.12/site-packages/nvidia/{packages}");
    let mut cases = vec![
        ("CUDA_HOME", "extras/CUPTI/lib64".to_owned(), "libcupti.so.13"),
        ("CUDA_PATH", "extras/CUPTI/lib64".to_owned(), "libcupti.so.12"),
        ("CUDA_HOME", "targets/x86_64-linux/lib".to_owned(), "libcupti.so.13"),
        ("CUDA_HOME", "lib64".to_owned(), "libcupti.so.13"),
        ("VIRTUAL_ENV", python("cu13/lib"), "libcupti.so.13"),
        ("VIRTUAL_ENV", python("cuda_cupti/lib"), "libcupti.so.12"),
        ("CONDA_PREFIX", python("cu13/lib"), "libcupti.so.13"),
        ("GPUMEM_CUPTI", String::new(), "libcupti.so.13"),
    ];
    for name in ["libcupti.so.13", "libcupti.so.12"] {
        cases.push(("", String::new(), name));
    }
    each(&cases, |(variable, folder, name)| {
        let machine = match *variable {
            "" => Standin::new().cupti_named(*name),
            variable => Standin::new().cupti_under(variable, folder, name),
        };
        let script = "new; call cuMemAlloc_v2 &a 1000; figures = 1000 0; intercepted_by";
        let outcome = check(&machine, &format!("{CONTEXT}; {script}"));
        let place = if folder.is_empty() { (*name).to_owned() } else { format!("{folder}/{name}") };
        ensure(outcome.answer("intercepted_by").ends_with(&place), "was not found there", &outcome);
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    });
    // gpumem uses only the file that the user names.
    let machine = with_cupti().env("GPUMEM_CUPTI", "/nowhere/libcupti.so.13");
    check_sampled(&machine, &["cannot load libcupti", "/nowhere/libcupti.so.13"]);
    check_sampled(&with_cupti().env("GPUMEM_CUPTI", "/etc/passwd"), &["cannot load libcupti", "/etc/passwd"]);
    // The loader would wait until a process writes to the pipe.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("it is there").success());
    check_sampled(&with_cupti().env("GPUMEM_CUPTI", &pipe), &["cannot load libcupti", "/pipe is not a file"]);
}

#[test]
fn status_says_why_traces_are_not_exact() {
    let outcome = check(&with_cupti().set("subscriber=nsys"), "new; status");
    let status = outcome.answer("status");
    ensure(status.starts_with("gauge=sampled ") && status.contains("nsys"), "claims to be exact", &outcome);
    let outcome = check(&Standin::new(), "status; new");
    let status = outcome.answer("status");
    ensure(
        status.starts_with("gauge=sampled ") && status.contains("cannot load libcupti"),
        "claims to be exact",
        &outcome,
    );
}

#[test]
fn without_exact_traces_cupti_is_not_subscribed() {
    for (gauge, script) in WITHOUT_EXACT_TRACES {
        let outcome = check(&with_cupti().env("GPUMEM_GAUGE", gauge), script);
        let subscribed = outcome.calls.iter().any(|call| call.starts_with("cuptiSubscribe"));
        ensure(!subscribed && outcome.stderr.is_empty(), "subscribed, or said something", &outcome);
    }
    let outcome = check(&Standin::new().env("GPUMEM_GAUGE", "exact"), "new; figures = 0 0, off; drop");
    ensure(outcome.stderr.starts_with("gpumem: traces are off: cannot load libcupti"), "the notice", &outcome);
    let outcome = check(&with_cupti(), "new; figures = 0 0; drop");
    ensure(outcome.contexts_created() == 0, "created a context", &outcome);
    // `preload` intercepts allocations before the first trace.
    check(
        &with_cupti(),
        &format!(
            "{CONTEXT}; try_preload = done; call cuArrayCreate_v2 &a array:10:0x01:1; new; call cuArrayDestroy a; figures = -10 0"
        ),
    );
}
