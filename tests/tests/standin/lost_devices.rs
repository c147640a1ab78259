//! Tests devices that are lost, and devices that come back.

use gpumem_tests::{Standin, ensure, ensure_clean, ensure_error, ensure_unharmed};

use super::faults::ZEROS;

/// The driver has lost the device as well. gpumem does not ask the driver, because the call may hang.
#[test]
fn the_driver_is_not_asked_for_a_lost_device() {
    for fault in ["nvmlDeviceGetMemoryInfo_v2=15", "nvmlDeviceGetHandleByUUID=15", "nvmlDeviceGetMemoryInfo_v2=16"] {
        let outcome = Standin::new().fail(fault).run("context 0; get; try_get; try_get_all; new; build; threads");
        ensure_clean(&outcome);
        ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
        for command in ["try_get", "try_get_all", "build"] {
            ensure_error(&outcome, command, ["device 0", "look at dmesg for Xid messages"]);
        }
        ensure(!outcome.calls.iter().any(|call| call.starts_with("cuMemGetInfo")), "asked the driver", &outcome);
    }
}

#[test]
fn a_device_that_is_lost_between_two_calls() {
    for (fault, script, says) in [
        ("nvmlDeviceGetMemoryInfo_v2=15@2", "get 0; try_get 0", "NVML_ERROR_GPU_IS_LOST (15)"),
        ("nvmlDeviceGetMemoryInfo_v2=6@2", "get 0; try_get 0", "NVML_ERROR_NOT_FOUND (6)"),
        ("nvmlDeviceGetMemoryInfo_v2=2@2", "get 0; try_get 0", "NVML_ERROR_INVALID_ARGUMENT (2)"),
        ("nvmlDeviceGetMemoryInfo_v2=15@2", "handle; try_fast; fast", "NVML_ERROR_GPU_IS_LOST (15)"),
    ] {
        let outcome = Standin::new().fail(fault).run(script);
        ensure_unharmed(&outcome);
        if script.starts_with("get") {
            ensure(outcome.answer("get 0") == "GPUMemory(total=16384, free=15769, used=0)", "before", &outcome);
            ensure_error(&outcome, "try_get 0", ["device 0", says]);
        } else {
            ensure_error(&outcome, "try_fast", ["device 0", says]);
            ensure(outcome.answer("fast") == "0 B", "after", &outcome);
        }
    }
}

/// One GPU of two is lost, and the other one still works.
#[test]
fn one_lost_device_of_two() {
    let second = "GPUMemory(total=17408, free=16793, used=0)";
    let outcome = Standin::new()
        .devices(2)
        .fail("nvmlDeviceGetMemoryInfo_v2[0]=15")
        .run("get; get 1; try_get 1; get_all; try_get_all; max_free; try_max_free; new; build 1; data");
    ensure_unharmed(&outcome);
    for (command, answer) in [
        ("get", ZEROS),
        ("get 1", second),
        ("try_get 1", second),
        ("get_all", &format!("[{ZEROS} {second}]")),
        ("max_free", "Some(1) 16.40 GiB"),
        ("build 1", "started"),
        ("data", "device=1 used=0 peaked=0 gauge=sampled stale=false"),
    ] {
        ensure(outcome.answer(command) == answer, &format!("`{command}` is not `{answer}`"), &outcome);
    }
    for command in ["try_get_all", "try_max_free"] {
        ensure_error(&outcome, command, ["device 0", "NVML_ERROR_GPU_IS_LOST (15)", "look at dmesg"]);
    }
}

/// While the device cannot be read, a trace prints `?`, one notice gives the reason, and the sampler continues.
#[test]
fn a_device_that_is_lost_in_the_middle_of_a_trace() {
    let unknown = "\u{25b3}Used Peaked MB:      ?      ?";
    for start in ["new", "build", "build 0"] {
        for fault in
            ["nvmlDeviceGetMemoryInfo_v2=15@2", "nvmlDeviceGetMemoryInfo_v2=15@20", "nvmlDeviceGetMemoryInfo_v2=999@5"]
        {
            let script = format!(
                "context 0; {start}; pooled 1; await stale; report; data; await a_thread; drop; await no_threads"
            );
            let outcome = Standin::new().fail(fault).run(&script);
            ensure_clean(&outcome);
            ensure(outcome.reports() == [unknown, &format!("{unknown} (exit)")], "reported figures", &outcome);
            ensure(outcome.answer("data").ends_with("gauge=sampled stale=true"), "not stale", &outcome);
            let notices =
                outcome.stderr.matches("gpumem: reports show ? while device 0 cannot be read: libnvidia-ml").count();
            ensure(notices == 1, "not one notice", &outcome);
        }
    }
}

#[test]
fn a_device_that_comes_back_is_measured_again() {
    let outcome = Standin::new()
        .fail("nvmlDeviceGetMemoryInfo_v2=15@10..200")
        .run("context 0; build; await stale; report; pooled 64; await fresh; report; data");
    ensure_clean(&outcome);
    let reports = outcome.reports();
    ensure(reports[0].ends_with("     ?      ?"), "reported figures while it was away", &outcome);
    ensure(reports[1].ends_with("    64      0"), "not what is in use since the start", &outcome);
    ensure(outcome.answer("data").ends_with("used=67108864 peaked=0 gauge=sampled stale=false"), "stale", &outcome);
}

/// If the device cannot be read at a reset, the memory in use at that moment is never known. Therefore the trace must not report
/// a difference since then, neither 64 nor 0 MiB.
#[test]
fn a_reset_that_could_not_be_read_is_no_start() {
    let outcome = Standin::new()
        .fail("nvmlDeviceGetMemoryInfo_v2=15@10..200")
        .run("context 0; build; await stale; pooled 64; reset; await readable; report; reset; report");
    ensure_clean(&outcome);
    ensure(!outcome.reports()[0].ends_with("    64      0"), "reported what was allocated before the reset", &outcome);
    ensure(outcome.reports()[1].ends_with("     0      0"), "not measured from the next reset on", &outcome);
}
