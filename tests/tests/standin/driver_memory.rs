//! Tests the memory that the stand-in driver takes by itself, with the setting for it. The numbers were measured on an H200.
//!
//! Each case is a script for the probe; see `gpumem_tests::check_answers`. `took` answers with how much more KiB the device and the
//! process have than at the `took` before.

use gpumem_tests::{CONTEXT, Standin, check_answers, each, ensure};

const MIB: u64 = 1 << 20;
/// The local memory of each byte that a thread has, in KiB: 132 processors with 2,048 threads.
const LOCAL: u64 = 132 * 2048 / 1024;

/// Runs a script with a context.
#[track_caller]
fn check(script: &str) {
    check_answers(&Standin::new().driver_memory(), &format!("{CONTEXT}; took; {script}"));
}

/// Returns the script that loads a module and gets its functions `flat`, `deep` and `deeper`. `deep` takes 2 MiB more.
fn module() -> String {
    "call cuModuleLoadData &m text:module:6291456/flat:0:0/deep:2097152:8192/deeper:0:16384; \
     call cuModuleGetFunction &flat m text:flat; call cuModuleGetFunction &deep m text:deep; \
     call cuModuleGetFunction &deeper m text:deeper; took = 8192 8192"
        .to_owned()
}

fn launch(function: &str) -> String {
    format!("call cuLaunchKernel {function} 1 1 1 32 1 1 0 0 0 0")
}

#[test]
fn initialisation_and_contexts() {
    let init = "took = 0 ?; call cuInit 0; took = 3328 ?; call cuInit 0; took = 0 ?";
    let (first, second) = ((527 * 1024) - 3328, 518 * 1024);
    for script in [
        // The figure of the device is 9 MiB higher than that of the process.
        format!(
            "call cuDevicePrimaryCtxRetain &ctx 0; took = {first} {second}; call cuDevicePrimaryCtxRetain &ctx 0; took = 0 0"
        ),
        format!("call cuCtxCreate_v2 &ctx 0 0; took = {first} {second}; call cuCtxDestroy_v2 ctx; took = -{first} ?"),
        format!("call cuCtxCreate_v3 &ctx 0 0 0 0; took = {first} {second}"),
        format!("call cuCtxCreate_v4 &ctx 0 0 0; took = {first} {second}"),
        format!(
            "call cuDevicePrimaryCtxRetain &ctx 0; took = {first} {second}; call cuCtxCreate_v2 &c 0 0; took = {second} {second}; \
             call cuDevicePrimaryCtxRelease_v2 0; took = -{second} -{second}; call cuCtxDestroy_v2 c; took = -{first} ?"
        ),
    ] {
        check_answers(&Standin::new().driver_memory(), &format!("{init}; {script}"));
    }
    // CUDA and NVML count the same.
    let free = (16 * 1024 - 615 - 527) * MIB;
    check(&format!("call cuMemGetInfo_v2 &free &all; value free = {free}"));
}

#[test]
fn the_end_of_a_context_gives_everything_back() {
    let took = format!(
        "call cuStreamCreate &s 1; {}; {}; call cuCtxSetLimit 2 {}; call cuMemAlloc_v2 &a 1000; call cuMemAllocAsync &b 1000 0; \
         call cuMemAllocManaged &c 1000 1; call cuMemPrefetchAsync c 1000 0 0; {}; let kept {}; call cuDeviceGetDefaultMemPool &p 0; \
         call cuMemPoolSetAttribute p 4 &kept; call cuMemFreeAsync b 0",
        module().replace("took = 8192 8192", ""),
        launch("deeper"),
        9 * MIB,
        graphs(5),
        64 * MIB
    );
    let process = 2048 + 8192 + LOCAL * 15 * 1024 + 1024 + 2048 + 32 * 1024 + 2048;
    let device = process + 2048;
    let of_context = 527 * 1024 - 3328;
    for ending in [
        "call cuDevicePrimaryCtxRelease_v2 0",
        "call cuDevicePrimaryCtxReset_v2 0; call cuDevicePrimaryCtxRelease_v2 0",
    ] {
        check(&format!(
            "{took}; took = {device} {process}; {ending}; took = -{} ?; call cuDevicePrimaryCtxRetain &ctx 0; \
             took = {of_context} {}; call cuModuleUnload m = 400; call cuCtxGetLimit &heap 2; value heap = {}; call cuStreamCreate &s 1; \
             took = 2048 2048; call cuGraphInstantiateWithFlags &x g 0; took = 2048 2048",
            device + of_context,
            518 * 1024,
            8 * MIB
        ));
    }
    // Memory that is mapped for a graph.
    let capture = format!(
        "call cuStreamBeginCapture_v2 s 0; call cuMemAllocAsync &a {} s; call cuStreamEndCapture s &g; call cuGraphInstantiateWithFlags &e g 0",
        32 * MIB
    );
    let mapped = 32 * 1024 + 2048;
    check(&format!(
        "call cuStreamCreate &s 1; took = 2048 2048; {capture}; call cuGraphLaunch e s; took = {mapped} {mapped}; \
         call cuDevicePrimaryCtxRelease_v2 0; took = -{} ?",
        2048 + mapped + of_context
    ));
}

#[test]
fn a_module_takes_memory_when_its_first_function_is_loaded() {
    const IMAGE: &str = "text:module:6291456/flat:0:0/deep:2097152:8192";
    for load in [
        format!("call cuModuleLoadData &m {IMAGE}"),
        format!("call cuModuleLoadDataEx &m {IMAGE} 0 0 0"),
        format!("call cuModuleLoadFatBinary &m {IMAGE}"),
    ] {
        check(&format!(
            "{load}; took = 0 0; call cuModuleGetFunction &f m text:flat; took = 6144 6144; call cuModuleGetFunction &f m text:flat; \
             {}; took = 0 0; call cuModuleGetFunction &g m text:deep; took = 2048 2048; call cuModuleUnload m; took = -8192 -8192; \
             call cuModuleUnload m = 400",
            launch("f")
        ));
        let eager = Standin::new().driver_memory().env("CUDA_MODULE_LOADING", "EAGER");
        check_answers(
            &eager,
            &format!(
                "{CONTEXT}; took; {load}; took = 8192 8192; call cuModuleGetFunction &f m text:deep; took = 0 0; \
                 call cuModuleUnload m; took = -8192 -8192"
            ),
        );
    }
    check(
        "call cuModuleLoadData &m text:ELF = 200; call cuModuleLoadData &m text:module:1/f:0:0; call cuModuleGetFunction &f m text:g = 500",
    );
    // What is not free cannot be taken.
    check(&format!(
        "call cuModuleLoadData &m text:module:{}/f:0:0; call cuModuleGetFunction &f m text:f = 2; took = 0 0; \
         call cuModuleLoadData &n text:module:2097152/g:0:0; call cuModuleGetFunction &g n text:g; took = 2048 2048",
        16_u64 << 30
    ));
}

/// Each context loads the kernels of a library that it uses.
#[test]
fn a_library_takes_memory_in_each_context_that_uses_it() {
    let load = "call cuLibraryLoadData &l text:module:6291456/flat:0:0/deep:2097152:0 0 0 0 0 0 0; took = 0 0; \
                call cuLibraryGetKernel &k l text:flat; took = 0 0";
    for (first, then) in [
        ("call cuKernelGetFunction &f k".to_owned(), launch("f")),
        (launch("k"), launch("k")),
        ("call cuLaunchKernelEx config:0 k 0 0".to_owned(), "call cuLaunchKernelEx config:0 k 0 0".to_owned()),
        ("call cuLaunchCooperativeKernel k 1 1 1 32 1 1 0 0 0".to_owned(), launch("k")),
    ] {
        check(&format!(
            "{load}; {first}; took = 6144 6144; {then}; took = 0 0; call cuCtxCreate_v2 &c 0 0; took; {first}; took = 6144 6144; \
             call cuCtxDestroy_v2 c; took = {0} {0}; call cuLibraryUnload l; took = -6144 -6144",
            -(518 * 1024 + 6144)
        ));
    }
    let eager = Standin::new().driver_memory().env("CUDA_MODULE_LOADING", "EAGER");
    let script = load.replacen("took = 0 0", "took = 8192 8192", 1);
    check_answers(&eager, &format!("{CONTEXT}; took; {script}; call cuLibraryUnload l; took = -8192 -8192"));
}

#[test]
fn a_launch_takes_local_memory_up_to_what_its_function_needs() {
    let (deep, deeper) = (LOCAL * 7 * 1024, LOCAL * 15 * 1024);
    let module = module();
    each(
        &[
            format!("{}; took = 0 0; {}; took = {deep} {deep}; {}; took = 0 0", launch("flat"), launch("deep"), launch("deep")),
            format!("{}; took = {deeper} {deeper}; {}; took = 0 0", launch("deeper"), launch("deep")),
            // The limit of the stack gives memory back. A larger one takes none.
            format!(
                "{deep}; took = {0} {0}; call cuCtxSetLimit 0 65536; took = 0 0; call cuCtxSetLimit 0 4096; took = -{1} -{1}; \
                 call cuCtxGetLimit &limit 0; value limit = 4096; {deep}; took = {1} {1}; call cuCtxSetLimit 0 512; took = -{0} -{0}",
                LOCAL * 7 * 1024,
                LOCAL * 4 * 1024,
                deep = launch("deep"),
            ),
            "call cuFuncGetAttribute &local 3 deep; value local = 8192; call cuDeviceGetAttribute &n 16 0; value n = 132; \
             call cuDeviceGetAttribute &n 39 0; value n = 2048"
                .to_owned(),
        ],
        |script| check(&format!("{module}; {script}")),
    );
}

#[test]
fn a_larger_heap_takes_memory_at_once() {
    check(&format!(
        "call cuCtxGetLimit &heap 2; value heap = {}; call cuCtxSetLimit 2 {}; took = 57344 57344; call cuCtxGetLimit &heap 2; \
         value heap = {}; call cuCtxSetLimit 2 1024; took = -57344 -57344; call cuCtxSetLimit 1 1024 = 215",
        8 * MIB,
        64 * MIB,
        64 * MIB
    ));
}

#[test]
fn four_streams_share_memory_that_later_ones_reuse() {
    let create = |name: &str| format!("call cuStreamCreate &{name} 1; ");
    check(&format!(
        "{}took = 2048 2048; {}{}call cuStreamCreateWithPriority &d 1 0; took = 0 0; {}took = 2048 2048; call cuStreamDestroy_v2 a; \
         call cuStreamDestroy_v2 b; took = 0 0; {}{}took = 0 0; {}{}{}took = 0 0; {}took = 2048 2048",
        create("a"),
        create("b"),
        create("c"),
        create("e"),
        create("a"),
        create("b"),
        create("f"),
        create("g"),
        create("h"),
        create("i"),
    ));
}

/// Returns the script that makes the executable graphs `e0`, `e1` and so on, of 100 nodes each.
fn graphs(count: usize) -> String {
    let node = "; call cuGraphAddKernelNode &n g 0 0 zeros".repeat(100);
    let instantiated: Vec<_> = (0..count).map(|at| format!("; call cuGraphInstantiateWithFlags &e{at} g 0")).collect();
    format!("call cuGraphCreate &g 0{node}{}", instantiated.concat())
}

#[test]
fn graphs_take_memory_for_each_500_nodes_that_later_ones_reuse() {
    check(&format!(
        "{}; took = 2048 2048; call cuGraphInstantiate_v2 &x g 0 0 0; took = 2048 2048; call cuGraphExecDestroy x; \
         call cuGraphExecDestroy e0; took = 0 0; call cuGraphInstantiateWithParams &x g instantiate:0; \
         call cuGraphInstantiate_v2 &y g 0 0 0; took = 0 0",
        graphs(5)
    ));
    // Captured launches are nodes.
    let launches = format!("; {}", "call cuLaunchKernel 1 1 1 1 1 1 1 0 s 0 0").repeat(501);
    check(&format!(
        "call cuStreamCreate &s 1; took = 2048 2048; call cuStreamBeginCapture_v2 s 0{launches}; call cuStreamEndCapture s &g; took = 0 0; \
         call cuGraphInstantiateWithFlags &x g 0; took = 4096 4096"
    ));
}

#[test]
fn blocks_take_whole_pages_by_address() {
    let alloc = |name: &str, bytes: u64| format!("call cuMemAlloc_v2 &{name} {bytes}; ");
    let free = |name: &str| format!("call cuMemFree_v2 {name}; ");
    each(
        &[
            format!("{}took = 4096 4096; {}took = -4096 -4096", alloc("a", 3 * MIB), free("a")),
            format!("{}took = 4096 4096", alloc("a", 2_100_000)),
            format!("{}{}took = 4096 4096", alloc("a", MIB + 1), alloc("b", 1000)),
            // The first two blocks share a page, and the third, which is in the next page, does not move when they are freed.
            format!(
                "{}{}took = 2048 2048; {}took = 2048 2048; {}took = 0 0; {}took = -2048 -2048; {}took = -2048 -2048",
                alloc("a", MIB),
                alloc("b", MIB),
                alloc("c", 1000),
                free("a"),
                free("b"),
                free("c")
            ),
            // A later block takes the room of a freed one.
            format!("{}{}{}{}took = 2048 2048", alloc("a", MIB), alloc("b", MIB), free("a"), alloc("c", 1000)),
            // The address of a block and its size are found from within.
            format!(
                "{}{}call cuMemGetAddressRange_v2 &start &bytes b+999; value bytes = 1000; call cuMemGetAddressRange_v2 &start &bytes b+1000 = 1",
                alloc("a", 1000),
                alloc("b", 1000)
            ),
        ],
        |script| check(script),
    );
}

#[test]
fn pools_keep_what_their_threshold_allows() {
    let alloc = format!("call cuStreamCreate &s 1; took; call cuMemAllocAsync &a {} s; took = 65536 65536", 33 * MIB);
    let free = "call cuMemFreeAsync a s; took = 0 0; call cuStreamSynchronize s";
    let reserved = |bytes: u64| format!("call cuMemPoolGetAttribute p 5 &reserved; value reserved = {bytes}");
    let created = "call cuMemPoolCreate &p on:0; call cuDeviceSetMemPool 0 p";
    for pool in ["call cuDeviceGetDefaultMemPool &p 0", created] {
        check(&format!(
            "{pool}; {alloc}; call cuMemPoolGetAttribute p 7 &used; value used = {}; {free}; took = -65536 -65536; {}",
            33 * MIB,
            reserved(0)
        ));
        check(&format!(
            "{pool}; let kept {}; call cuMemPoolSetAttribute p 4 &kept; {alloc}; {free}; took = 0 0; {}; call cuMemPoolTrimTo p {}; \
             took = -32768 -32768; {}",
            64 * MIB,
            reserved(64 * MIB),
            MIB,
            reserved(32 * MIB)
        ));
    }
    check(&format!(
        "{created}; let kept {}; call cuMemPoolSetAttribute p 4 &kept; {alloc}; {free}; took = 0 0; call cuMemPoolDestroy p; \
         took = -65536 -65536",
        64 * MIB
    ));
}

#[test]
fn managed_memory_on_the_device_is_not_the_processs() {
    check(&format!(
        "call cuMemAllocManaged &a {} 1; took = 0 0; call cuMemPrefetchAsync a {} 0 0; took = 4096 0; call cuMemPrefetchAsync a 1 4294967295 0; \
         took = -4096 0; call cuMemPrefetchAsync a 1 0 0; took = 4096 0; call cuMemFree_v2 a; took = -4096 0",
        3 * MIB,
        3 * MIB
    ));
}

#[test]
fn other_processes_change_only_the_figure_of_the_device() {
    check(&format!(
        "call standin_set_others 0 {}; took = 65536 0; call standin_set_others 0 {}; took = -32768 0; call standin_set_others 7 0 = 2; \
         call standin_set_others 0 99999999999999 = 7; took = 0 0",
        64 * MIB,
        32 * MIB
    ));
    // They take memory while a call of this process runs.
    let machine = Standin::new().driver_memory().set("used=1GiB,others_grow=cuModuleGetFunction:64MiB");
    check_answers(
        &machine,
        &format!(
            "{CONTEXT}; took = {} {}; call cuModuleLoadData &m text:module:2097152/f:0:0; took = 0 0; \
             call cuModuleGetFunction &f m text:f; took = {} 2048; call cuModuleGetFunction &f m text:f; took = 65536 0",
            (1024 + 527) * 1024,
            518 * 1024,
            65536 + 2048
        ),
    );
}

/// NVML may not tell the memory of this process, or of the device.
#[test]
fn readings_fail() {
    let took = |machine: &Standin| {
        let outcome = machine.run(&format!("{CONTEXT}; took"));
        outcome.answer("took").to_owned()
    };
    let machine = Standin::new().driver_memory();
    let device = 527 * 1024;
    assert_eq!(took(&machine), format!("{device} {}", 518 * 1024));
    for setting in
        ["processes=empty", "processes=unavailable", "processes=renamed", "processes=empty,compute=4242:300MiB:python"]
    {
        assert_eq!(took(&machine.clone().set(setting)), format!("{device} ?"), "{setting}");
    }
    let listed = machine.clone().set("processes=renamed").run(&format!("{CONTEXT}; processes 0"));
    ensure(listed.answer("processes 0") == "0: 4194303 ? C 518 MiB", "another list", &listed);
    for function in ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"] {
        assert_eq!(took(&machine.clone().fail(format!("{function}=15"))), "no answer: NVML: 15", "{function}");
    }
}

/// Without the setting, only contexts take memory.
#[test]
fn the_setting_is_off_by_default() {
    let script = format!(
        "took = 0 ?; {CONTEXT}; took = {} {}; call cuStreamCreate &s 1; {}; {}; call cuCtxSetLimit 2 99999999; {}; took = 0 0",
        527 * 1024,
        518 * 1024,
        module().replace("took = 8192 8192", ""),
        launch("deeper"),
        graphs(1)
    );
    check_answers(&Standin::new(), &script);
}

/// The numbers of the program that other tests use.
#[test]
fn a_program_for_which_the_driver_takes_memory() {
    let kib = 518 * 1024 // the context
        + 2048 // a stream
        + 8192 // the module
        + LOCAL * 3 * 1024 // local memory
        + 4 * 2048 // 2,000 nodes of graphs
        + 3072 * 1024 // the pool
        + 4096; // the block
    let outcome = Standin::new().driver_memory().run("driver_memory; took");
    ensure(outcome.answer("driver_memory") == "done", "a call failed", &outcome);
    ensure(outcome.answer("took") == format!("{} {kib}", kib + 9 * 1024), "other numbers", &outcome);
}
