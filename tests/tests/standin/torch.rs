//! Tests functions with PyTorch's names on the stand-in driver: the processes that NVML lists for a device, and queries about
//! devices.

use gpumem_tests::{Library, Outcome, Standin, ensure_answer, ensure_clean};

#[track_caller]
fn ensure(outcome: &Outcome, command: &str, answer: &str) {
    ensure_answer(outcome, command, answer);
    ensure_clean(outcome);
}

#[track_caller]
fn ensure_error(outcome: &Outcome, command: &str, says: &[&str]) {
    gpumem_tests::ensure_error(outcome, command, says.iter().copied());
    ensure_clean(outcome);
}

/// No process of this machine has these ids, so only NVML has names for them.
const OTHER: u32 = 4_000_000_001;
const DRAWS: u32 = 4_000_000_002;

fn crowded() -> Standin {
    Standin::new()
        .set(format!("compute={OTHER}:300MiB:python train.py"))
        .set(format!("graphics={DRAWS}:45MiB:/usr/lib/xorg/Xorg"))
}

#[test]
fn processes_are_listed_with_what_they_hold() {
    let outcome = crowded().run("processes; list_processes; context 0; pooled 64; processes 0; list_processes");
    let others = format!("{OTHER} python train.py C 300 MiB, {DRAWS} /usr/lib/xorg/Xorg G 45 MiB");
    ensure(&outcome, "processes", &format!("0: {others}"));
    ensure(&outcome, "processes 0", &format!("0: own ./probe --of-nvml C 582 MiB, {others}"));
    let [before, after] = outcome.answers("list_processes")[..] else { panic!("two answers\n{outcome}") };
    assert_eq!(before, format!("GPU:0|process {OTHER} uses      300.000 MB GPU memory"));
    let own = after.strip_prefix("GPU:0|process ").and_then(|rest| rest.split_once('|'));
    let (own, rest) = own.unwrap_or_else(|| panic!("no lines\n{outcome}"));
    assert!(own.ends_with(" uses      582.000 MB GPU memory") && before.ends_with(rest), "{outcome}");
}

/// The lists are empty, as in many containers, or the memory of a process is not available, as under WSL.
#[test]
fn what_is_not_known_is_not_zero() {
    let outcome = Standin::new().set("processes=empty").run("context 0; processes; list_processes");
    ensure(&outcome, "processes", "0: ");
    ensure(&outcome, "list_processes", "GPU:0|no processes are running");
    let outcome = Standin::new()
        .set("processes=unavailable")
        .set(format!("compute={OTHER}:na"))
        .run("context 0; processes; list_processes");
    ensure(&outcome, "processes", &format!("0: own ./probe --of-nvml C ?, {OTHER} ? C ?"));
    assert!(outcome.answer("list_processes").ends_with(&format!("|process {OTHER} uses          N/A MB GPU memory")));
}

#[test]
fn a_process_on_several_lists_is_one() {
    let outcome = Standin::new()
        .set(format!("compute={OTHER}:300MiB:blender"))
        .set(format!("graphics={OTHER}:300MiB:blender"))
        .set(format!("compute={DRAWS}:na:client"))
        .set(format!("mps={DRAWS}:20MiB:client"))
        .run("processes; context 0");
    ensure(&outcome, "processes", &format!("0: {OTHER} blender C+G 300 MiB, {DRAWS} client C 20 MiB"));
}

/// NVML may not know the name of another user's process. The system knows the name of this process.
#[test]
fn names_that_nvml_does_not_know() {
    for machine in [crowded().fail("nvmlSystemGetProcessName=4"), crowded().without_symbol("nvmlSystemGetProcessName")]
    {
        let outcome = machine.run("context 0; processes");
        let others = format!("{OTHER} ? C 300 MiB, {DRAWS} ? G 45 MiB");
        ensure(&outcome, "processes", &format!("0: own probe C 518 MiB, {others}"));
    }
}

/// Drivers older than 510 have the second version of the lists, and no list of MPS processes.
#[test]
fn older_drivers() {
    let mut machine = crowded();
    for list in ["Compute", "Graphics", "MPSCompute"] {
        machine = machine.without_symbol(format!("nvmlDeviceGet{list}RunningProcesses_v3"));
    }
    let outcome = machine.run("processes");
    ensure(&outcome, "processes", crowded().run("processes").answer("processes"));
    let outcome = machine.without_symbol("nvmlDeviceGetComputeRunningProcesses_v2").run("processes");
    ensure_error(&outcome, "processes", &["nvmlDeviceGetComputeRunningProcesses_v3", "update the driver"]);
}

#[test]
fn lists_that_cannot_be_read() {
    for (fault, says) in [
        ("nvmlDeviceGetComputeRunningProcesses_v3=15", "NVML_ERROR_GPU_IS_LOST (15)"),
        ("nvmlDeviceGetComputeRunningProcesses_v3=3", "NVML_ERROR_NOT_SUPPORTED (3)"),
        ("nvmlDeviceGetComputeRunningProcesses_v3=999@2", "NVML_ERROR_UNKNOWN (999)"),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3=15", "NVML_ERROR_GPU_IS_LOST (15)"),
        ("nvmlDeviceGetMPSComputeRunningProcesses_v3=999", "NVML_ERROR_UNKNOWN (999)"),
        ("nvmlDeviceGetHandleByUUID=6", "NVML_ERROR_NOT_FOUND (6)"),
    ] {
        let outcome = crowded().fail(fault).run("processes; list_processes; processes 1");
        let call = fault.split('=').next().expect("a fault has a function");
        for command in ["processes", "list_processes"] {
            ensure_error(&outcome, command, &[call, "for device 0", says]);
        }
        ensure_error(&outcome, "processes 1", &["no device 1"]);
    }
    // A device that only computes has no list of graphics processes.
    let outcome = crowded().fail("nvmlDeviceGetGraphicsRunningProcesses_v3=3").run("processes");
    ensure(&outcome, "processes", &format!("0: {OTHER} python train.py C 300 MiB"));
    let outcome = crowded().without(Library::Nvml).run("context 0; processes");
    ensure_error(&outcome, "processes", &["cannot load libnvidia-ml", "is the NVIDIA driver installed"]);
}

/// The process list belongs to the GPU with this CUDA ordinal, which may have another index in NVML.
#[test]
fn the_device_is_the_one_that_cuda_means() {
    let outcome = Standin::new().devices(2).set("fastest=reversed").run("context 0; processes 0; processes 1");
    ensure(&outcome, "processes 0", "0: own ./probe --of-nvml C 518 MiB");
    ensure(&outcome, "processes 1", "1: ");
}

/// These are the values that the driver would return, but gpumem creates no context. The total excludes the memory that the
/// driver keeps for itself.
#[test]
fn free_and_total() {
    let outcome = Standin::new().set("used=1GiB").run("mem_get_info; mem_get_info 0; mem_get_info 1");
    ensure(&outcome, "mem_get_info", "14.40 GiB 15.40 GiB");
    ensure(&outcome, "mem_get_info 0", "14.40 GiB 15.40 GiB");
    ensure_error(&outcome, "mem_get_info 1", &["no device 1"]);
    assert_eq!(outcome.contexts_created(), 0, "created a context\n{outcome}");
    let outcome = Standin::new().without(Library::Nvml).set("used=1GiB,context=0B").run("context 0; mem_get_info");
    ensure(&outcome, "mem_get_info", "14.40 GiB 15.40 GiB");
    let outcome = Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=15").run("mem_get_info");
    ensure_error(&outcome, "mem_get_info", &["NVML_ERROR_GPU_IS_LOST (15)", "look at dmesg"]);
}

#[test]
fn the_cache_is_emptied_on_every_device() {
    let fill = "context 0; pooled 64; context 1; pooled 64; give_back; used";
    let outcome =
        Standin::new().devices(2).run("context 0; pooled 64; empty_cache; give_back; empty_cache; get_device_name");
    ensure(&outcome, "empty_cache", "done");
    assert!(outcome.answer("get_device_name").len() > 3, "{outcome}");
    let calls = |outcome: &Outcome, card: u32| {
        outcome.calls.iter().filter(|call| **call == format!("cuMemPoolTrimTo[{card}]=0")).count()
    };
    assert!(calls(&outcome, 0) >= 2 && calls(&outcome, 1) == 0, "{outcome}");
    assert_eq!(outcome.contexts_created(), 1, "created a context\n{outcome}");
    let outcome = Standin::new().devices(2).run(&format!("{fill}; empty_cache"));
    ensure(&outcome, "empty_cache", "done");
    assert!(calls(&outcome, 0) > 0 && calls(&outcome, 1) > 0, "{outcome}");
}

#[test]
fn the_cache_is_not_emptied_while_a_stream_is_captured() {
    let outcome = Standin::new().run("context 0; capture; empty_cache; end_capture");
    ensure_error(&outcome, "empty_cache", &["device 0", "a stream is being captured"]);
    ensure(&outcome, "end_capture", "whole");
    let outcome = Standin::new().fail("cuCtxSynchronize=719").run("context 0; empty_cache");
    ensure_error(&outcome, "empty_cache", &["cuCtxSynchronize for device 0", "719"]);
}

#[test]
fn without_a_driver_all_are_errors() {
    let outcome = Standin::new()
        .without(Library::Cuda)
        .run("mem_get_info; empty_cache; get_device_name; processes; list_processes");
    for command in ["mem_get_info", "empty_cache", "get_device_name", "processes", "list_processes"] {
        ensure_error(&outcome, command, &["unavailable", "cannot load libcuda"]);
    }
}

#[test]
fn a_simulated_device_has_this_process_alone() {
    let outcome = Standin::new()
        .env("GPUMEM_SIM", "1GiB")
        .run("processes; processes 1; list_processes; mem_get_info; empty_cache; get_device_name");
    let answer = outcome.answer("processes");
    assert!(answer.starts_with("0: own /") && answer.ends_with("/probe C 0 B"), "{outcome}");
    ensure_error(&outcome, "processes 1", &["no simulated device 1"]);
    assert!(outcome.answer("list_processes").ends_with(" uses        0.000 MB GPU memory"), "{outcome}");
    ensure(&outcome, "mem_get_info", "1 GiB 1 GiB");
    ensure(&outcome, "empty_cache", "done");
    ensure(&outcome, "get_device_name", "simulated GPU (1 GiB)");
}
