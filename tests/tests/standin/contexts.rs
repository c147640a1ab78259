//! Tests that no query creates a context, and that gpumem undoes each call of the driver that must be undone.

use gpumem_tests::{Library, Standin, each, ensure, ensure_clean, ensure_error, ensure_unharmed};

use super::faults::{QUERIES, required_of_cuda};

/// If NVML fails, gpumem asks the driver, provided that there is a context.
#[test]
fn the_driver_answers_for_nvml_where_there_is_a_context() {
    let memory = "GPUMemory(total=15769, free=15242, used=527)";
    each(
        &[
            Standin::new().without(Library::Nvml),
            Standin::new().damaged(Library::Nvml),
            Standin::new().without_symbol("nvmlInit_v2"),
            Standin::new().without_symbol("nvmlDeviceGetHandleByUUID"),
            Standin::new().without_symbol("nvmlDeviceGetMemoryInfo_v2").without_symbol("nvmlDeviceGetMemoryInfo"),
            Standin::new().fail("nvmlInit_v2=9"),
            Standin::new().fail("nvmlInit_v2=18"),
            Standin::new().fail("nvmlInit_v2=4"),
            Standin::new().fail("nvmlDeviceGetHandleByUUID=6"),
            Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=3"),
            Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=4"),
        ],
        |machine| {
            let outcome = machine.run(
            "context 0; try_get; try_get 0; try_free_no_cache; other_thread try_get; other_thread current; new; pooled 20; \
             sleep 20; data; report; drop; sleep 5; current",
        );
            ensure_clean(&outcome);
            for command in ["try_get", "try_get 0", "other_thread try_get"] {
                ensure(outcome.answer(command) == memory, &format!("`{command}` is not `{memory}`"), &outcome);
            }
            // The pool grows by 32 MiB.
            let data = "device=0 used=33554432 peaked=0 gauge=sampled stale=false";
            ensure(outcome.answer("data") == data, &format!("`data` is not `{data}`"), &outcome);
            ensure(outcome.contexts_created() == 1, "created a context", &outcome);
            let tries = outcome.calls.iter().filter(|call| call.starts_with("nvmlInit_v2=")).count();
            ensure(tries <= 1, "initialises a broken NVML again for each reading", &outcome);
        },
    );
}

/// The driver, NVML and CUPTI set exit handlers when they start, which may be after gpumem has set its handler.
#[test]
fn nobody_calls_a_library_that_was_torn_down() {
    for (machine, script) in [
        (Standin::new(), "context 0; sampled; forget; sleep 5"),
        (Standin::new(), "subscribe; sampled; forget; sleep 5"),
        (Standin::new().cupti(), "summary; sampled; exact; forget; forget; sleep 5"),
        (Standin::new().cupti(), "context 0; exact; call cuMemAlloc_v2 &a 1000; forget"),
    ] {
        let outcome = machine.set("teardown=1").env("GPUMEM_LEAKS", "1").run(script);
        ensure_clean(&outcome);
        let first = outcome.calls.iter().position(|call| call.starts_with("teardown"));
        let first = first.unwrap_or_else(|| panic!("nothing was torn down\n{outcome}"));
        let late = outcome.calls[first..].iter().find(|call| !call.starts_with("teardown"));
        ensure(late.is_none(), "called after that", &outcome);
    }
}

/// Without faults, no query and no trace creates a context, on any thread, and the current context stays the same.
#[test]
fn only_preload_creates_a_context() {
    let queries: Vec<String> = QUERIES.iter().map(|(plain, _, twin)| format!("{plain}; {twin}")).collect();
    let queries = format!("{}; handle 1; fast; name 1; new; report; drop; build 1; sleep 5; drop", queries.join("; "));
    let outcome = Standin::new().devices(2).run(&queries);
    ensure_unharmed(&outcome);
    for (_, _, twin) in QUERIES {
        ensure(!outcome.answer(twin).starts_with("error"), &format!("`{twin}` failed"), &outcome);
    }
    ensure(!outcome.calls.iter().any(|call| call.starts_with("cuDevicePrimaryCtxRetain")), "retained one", &outcome);

    let outcome = Standin::new().devices(2).run(&format!("context 1; {queries}; current; other_thread used_no_cache"));
    ensure(outcome.is_clean() && outcome.contexts_created() == 1, "created a context", &outcome);
    ensure(outcome.answer("current") == "1", "the current device changed", &outcome);
    ensure(outcome.answer("try_get") == "GPUMemory(total=17408, free=16266, used=527)", "not the current", &outcome);

    let outcome = Standin::new().devices(2).run("preload; preload; try_preload; current; get_all");
    ensure(outcome.is_clean() && outcome.contexts_created() == 1, "not one context", &outcome);
    ensure(outcome.answer("get_all").starts_with("[GPUMemory(total=16384, free=15242, used=527) "), "unread", &outcome);
}

/// Each call that retains or pushes a context has a call that releases or pops it. gpumem calls only functions that it looked up
/// before.
#[test]
fn calls_are_balanced_and_were_asked_for() {
    let queries: Vec<&str> = QUERIES.iter().map(|(.., twin)| *twin).collect();
    let script = format!("{0}; try_preload; {0}; name; new; sleep 5; report", queries.join("; "));
    for machine in [Standin::new(), Standin::new().without(Library::Nvml)] {
        let outcome = machine.run(&script);
        ensure_clean(&outcome);
        let count = |call: &str| outcome.calls.iter().filter(|made| made.starts_with(call)).count();
        ensure(count("cuMemPoolTrimTo") > 0, "never trimmed", &outcome);
        ensure(count("cuCtxPushCurrent_v2") == count("cuCtxPopCurrent_v2"), "left a context current", &outcome);
        let kept = count("cuDevicePrimaryCtxRetain") - count("cuDevicePrimaryCtxRelease");
        ensure(kept == 1, "kept a context beyond the one that preload keeps", &outcome);
        let required = required_of_cuda();
        for call in outcome.calls.iter().filter(|call| call.starts_with("cu")) {
            let function = call.split(['[', '=']).next().unwrap_or_default();
            ensure(required.contains(&function), &format!("{function} is called and not asked for"), &outcome);
        }
    }
}

/// The `no_cache` functions wait for the device, then trim its pool. If that fails, the `try_` function returns an error and the
/// other one returns zero.
#[test]
fn emptying_the_cache() {
    let pooled = "context 0; pooled 100; give_back; pooled 1; pooled 64";
    let outcome = Standin::new().run(&format!("{pooled}; used; used_no_cache; other_thread used"));
    ensure_clean(&outcome);
    let calls: Vec<_> =
        outcome.calls.iter().filter(|call| call.contains("Synchronize") || call.contains("Trim")).collect();
    ensure(calls.last().is_some_and(|call| call.starts_with("cuMemPoolTrimTo")), "did not trim last", &outcome);
    for (fault, script, says) in [
        ("cuCtxSynchronize=999", pooled, ["cuCtxSynchronize for device 0", "CUDA_ERROR_UNKNOWN (999)"]),
        ("cuMemPoolTrimTo=1", pooled, ["cuMemPoolTrimTo for device 0", "CUDA_ERROR_INVALID_VALUE (1)"]),
        ("cuDeviceGetDefaultMemPool=999", pooled, ["MemPool for device 0", "CUDA_ERROR_UNKNOWN (999)"]),
        ("nvmlDeviceGetMemoryInfo_v2=15", pooled, ["for device 0", "NVML_ERROR_GPU_IS_LOST (15)"]),
    ] {
        let script = format!("{script}; try_free_no_cache; free_no_cache; try_used_no_cache; used_no_cache; current");
        let outcome = Standin::new().fail(fault).run(&script);
        ensure(outcome.is_clean() && outcome.contexts_created() == 1, "panicked or did not end well", &outcome);
        ensure_error(&outcome, "try_free_no_cache", says);
        ensure_error(&outcome, "try_used_no_cache", says);
        ensure(outcome.answer("free_no_cache") == "0 B", "`free_no_cache`", &outcome);
        ensure(outcome.answer("used_no_cache") == "0 B", "`used_no_cache`", &outcome);
        ensure(outcome.answer("current") == "0", "the context changed", &outcome);
    }
    // The queries do not break a stream capture.
    let script =
        "context 0; capture; try_free_no_cache; free_no_cache; try_used_no_cache; try_used; new; data; end_capture";
    let outcome = Standin::new().run(script);
    ensure_clean(&outcome);
    for command in ["try_free_no_cache", "try_used_no_cache"] {
        let says = ["for device 0", "a stream is being captured: call this before or after the capture"];
        ensure_error(&outcome, command, says);
    }
    ensure(outcome.answer("free_no_cache") == "0 B", "`free_no_cache`", &outcome);
    ensure(outcome.answer("try_used") == "527 MiB", "could not be read", &outcome);
    ensure(outcome.answer("end_capture") == "whole", "broke the capture", &outcome);
    // Devices without pools have no cache.
    let outcome = Standin::new().set("pools=0").run("context 0; pooled 100; try_used_no_cache");
    ensure(outcome.answer("try_used_no_cache") == "627 MiB", "no pools", &outcome);
}
