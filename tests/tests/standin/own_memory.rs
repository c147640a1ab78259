//! Tests that each byte that the driver takes by itself has a name, with the stand-in driver.
//!
//! Each case is a script for the probe; see `gpumem_tests::check_answers`. `taken` answers with what a breakdown shows for the driver. Its
//! parts add up to the memory of the process by NVML, so that a part without a name would be in the answer.

use gpumem_tests::{Standin, check_answers, each, ensure};

/// Returns a machine on which the driver takes memory by itself.
fn machine() -> Standin {
    Standin::new().dispatch().driver_memory()
}

/// Runs a script with an exact trace that starts before the first context.
#[track_caller]
fn check(script: &str) {
    check_answers(&machine(), &format!("call cuInit 0; exact = started; {script}"));
}

const CONTEXT: &str = "call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx";

const MODULE: &str = "call cuModuleLoadData &m text:module:6291456/flat:0:0/deep:2097152:8192/deeper:0:16384; \
    call cuModuleGetFunction &flat m text:flat; call cuModuleGetFunction &deep m text:deep; \
    call cuModuleGetFunction &deeper m text:deeper";

fn launch(function: &str) -> String {
    format!("call cuLaunchKernel {function} 1 1 1 32 1 1 0 0 0 0")
}

#[test]
fn a_program_of_all_kinds() {
    check(
        "driver_memory = done; taken = local memory of deep, 8 KiB per thread 811008 + context 530432 + modules 8192 + \
         executable graphs 8192 + streams 2048 + rest of 2 MiB pages 1024",
    );
}

#[test]
fn local_memory_grows_by_kernel_and_is_given_back() {
    let context = format!("{CONTEXT}; {MODULE}");
    let [flat, deep, deeper] = ["flat", "deep", "deeper"].map(launch);
    // 132 processors with 2,048 threads each, which have 1 KiB in the context.
    check(&format!(
        "{context}; {flat}; taken = context 530432 + modules 8192; \
         {deep}; taken = local memory of deep, 8 KiB per thread 1892352 + context 530432 + modules 8192; \
         {deeper}; taken = local memory of deeper, 16 KiB per thread 2162688 + local memory of deep, 8 KiB per thread 1892352 + \
         context 530432 + modules 8192; \
         call cuCtxSetLimit 0 4096; \
         taken = local memory of deep, 8 KiB per thread 811008 + context 530432 + modules 8192; \
         {deep}; {deep}; taken = local memory of deep, 8 KiB per thread 1892352 + context 530432 + modules 8192"
    ));
}

#[test]
fn a_trace_has_what_the_driver_took_inside_it() {
    let [deep, deeper] = ["deep", "deeper"].map(launch);
    check(&format!(
        "taken_inside = nothing; {CONTEXT}; taken_inside = context 530432; {MODULE}; exact = started; taken_inside = nothing; \
         {deep}; taken_inside = local memory of deep, 8 KiB per thread 1892352; figures = 0 0; \
         stop; {deeper}; taken_inside = local memory of deep, 8 KiB per thread 1892352; \
         drop; exact = started; taken_inside = nothing; figures 0 = 0 0"
    ));
}

/// The runtime launches `CUkernel`s. A `CUkernel` has the same handle on all devices.
#[test]
fn a_kernel_has_a_first_launch_on_each_device() {
    let rows = "local memory of deep, 8 KiB per thread 1892352 + context 530432 + modules of compiled kernel deep 6144";
    let launch = launch("k");
    check_answers(
        &machine().set("devices=2"),
        &format!(
            "call cuInit 0; exact = started; call cuLibraryLoadData &l text:module:6291456/deep:2097152:8192 0 0 0 0 0 0; \
             call cuLibraryGetKernel &k l text:deep; {CONTEXT}; {launch}; {launch}; taken 0 = {rows}; \
             call cuDevicePrimaryCtxRetain &other 1; call cuCtxSetCurrent other; taken 1 = context 530432; {launch}; {launch}; \
             taken 1 = {rows}; call cuCtxSetCurrent ctx; {launch}; taken 0 = {rows}"
        ),
    );
}

/// A breakdown compares the process's memory with all recorded rows. The row of a running call is not recorded yet.
#[test]
fn a_breakdown_during_a_call_does_not_take_its_memory() {
    let machine = machine().set("slow=cuGraphInstantiateWithFlags:400");
    check_answers(
        &machine,
        &format!(
            "call cuInit 0; exact = started; {CONTEXT}; call cuGraphCreate &g 0; call cuGraphAddKernelNode &n g 0 0 zeros; \
             behind call cuCtxSetCurrent ctx | call cuGraphInstantiateWithFlags &x g 0; sleep 150; breakdown 0; sleep 600; \
             taken = context 530432 + executable graphs 2048"
        ),
    );
}

/// The thread is cancelled inside of the call.
#[test]
fn a_call_that_never_returns_is_not_shared_with_later_ones() {
    check_answers(
        &machine().set("blocks=cuStreamCreate"),
        &format!(
            "call cuInit 0; exact = started; {CONTEXT}; {MODULE}; cancelled cuStreamCreate &s 1; {}; \
             taken = local memory of deep, 8 KiB per thread 1892352 + context 530432 + modules 8192",
            launch("deep")
        ),
    );
}

#[test]
fn limits_streams_and_modules() {
    each(
        &[
            "call cuCtxSetLimit 2 276824064; taken = context 530432 + limits (device heap) 262144",
            "call cuStreamCreate &a 1; call cuStreamCreate &b 1; call cuStreamDestroy_v2 a; taken = context 530432 + streams 2048",
            &format!("{MODULE}; call cuModuleUnload m; taken = context 530432"),
            "call cuMemAlloc_v2 &a 3145728; call cuMemAlloc_v2 &b 1000; call cuMemFree_v2 a; \
             taken = context 530432 + rest of 2 MiB pages 2047",
        ],
        |script| check(&format!("{CONTEXT}; {script}")),
    );
}

#[test]
fn destroyed_graphs_keep_their_memory() {
    let nodes = "call cuGraphAddKernelNode &n g 0 0 zeros; ".repeat(10);
    let graph = |name: &str| format!("call cuGraphInstantiateWithFlags &{name} g 0; ");
    check(&format!(
        "{CONTEXT}; call cuGraphCreate &g 0; {nodes}{}{}call cuGraphExecDestroy x; \
         taken = context 530432 + executable graphs of destroyed graphs 2048; \
         call cuGraphExecDestroy y; {}taken = context 530432 + executable graphs of destroyed graphs 2048",
        graph("x"),
        graph("y"),
        graph("z")
    ));
}

#[test]
fn the_end_of_a_context_ends_all_rows() {
    check(&format!(
        "{CONTEXT}; {MODULE}; {}; call cuStreamCreate &s 1; call cuCtxSetCurrent 0; call cuDevicePrimaryCtxRelease_v2 0; taken = nothing; \
         call cuDevicePrimaryCtxRetain &ctx 0; taken = context 530432",
        launch("deep")
    ));
}

#[test]
fn what_is_older_than_the_first_trace() {
    check_answers(
        &machine(),
        &format!(
            "call cuInit 0; {CONTEXT}; call cuStreamCreate &s 1; call cuMemAlloc_v2 &a 4194304; exact = started; \
             taken = taken by the driver before the first trace 536576; call cuMemFree_v2 a; taken = taken by the driver before the first trace 532480"
        ),
    );
}

/// NVML shows the change of the other process in the memory of the device, at the same time as this process makes its calls.
#[test]
fn memory_of_other_processes_is_not_ours() {
    let machine = machine().set("compute=4242:300MiB:python,used=1GiB,others_grow=cuModuleGetFunction:64MiB");
    check_answers(
        &machine,
        &format!(
            "call cuInit 0; exact = started; {CONTEXT}; {MODULE}; {}; \
             taken = local memory of deep, 8 KiB per thread 1892352 + context 530432 + modules 8192",
            launch("deep")
        ),
    );
}

#[test]
fn without_the_list_of_processes() {
    for list in ["processes=empty", "processes=renamed", "processes=unavailable"] {
        let script = format!("call cuInit 0; exact = started; {CONTEXT}; {MODULE}; {}; traces", launch("deep"));
        let outcome = machine().set(list).run(&script);
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
}

#[test]
fn readings_that_fail_lose_nothing() {
    for fault in ["nvmlInit_v2=999", "nvmlDeviceGetMemoryInfo_v2=999", "nvmlDeviceGetComputeRunningProcesses_v3=999"] {
        check_answers(
            &machine().fail(fault),
            &format!(
                "call cuInit 0; exact = started; {CONTEXT}; {MODULE}; {}; call cuMemAlloc_v2 &a 1048576; figures = 1048576 0",
                launch("deep")
            ),
        );
    }
}

/// What is not recorded as a call's is the memory of an array's padding, or of a call that is not intercepted.
#[test]
fn memory_without_a_call_has_no_cause() {
    // The driver's function is called past its slot, as by a tool that noted the function before.
    let script = "slot_note cuStreamCreate; exact = started; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; \
                  slot_replace_past cuStreamCreate; call cuStreamCreate &s 1; \
                  taken = context 530432 + taken by the driver, cause not known 2048";
    check_answers(&machine(), &format!("call cuInit 0; {script}"));
}
