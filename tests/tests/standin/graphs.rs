//! Tests stream capture, graphs whose nodes allocate, and memory of other processes, through the
//! dispatch table and through CUPTI.
//!
//! Each case is a script for the probe. The expected answers follow the commands; see `gpumem_tests::check`.

use gpumem_tests::{CONTEXT, Standin, each, ensure};

use super::both_sources;

const MIB: u64 = 1 << 20;
/// The driver maps memory for graphs in steps of this size.
const STEP: u64 = 32 * MIB;

/// Runs a script with a context, a stream `s` that can be captured, and an exact trace. At the end of the script, nothing may be
/// untracked or lost.
#[track_caller]
fn check(script: &str) {
    let stream = "call cuStreamCreate &s 1";
    for outcome in both_sources().check(&format!("{CONTEXT}; exact = started; {stream}; {script}; status")) {
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
        let sound = outcome.answer("status").contains(" untracked=0 lost=0 ");
        ensure(sound, "something is untracked or lost", &outcome);
    }
}

/// Returns the script of a stream capture of these calls on `s`, which creates the executable graph `e`.
fn captured(calls: &str) -> String {
    format!(
        "call cuStreamBeginCapture_v2 s 0; {calls}; call cuStreamEndCapture s &g; call cuGraphInstantiateWithFlags &e g 0"
    )
}

const LAUNCH: &str = "call cuGraphLaunch e s";

#[test]
fn a_capture_allocates_nothing() {
    for start in [
        "cuStreamBeginCapture_v2 s 0",
        "cuStreamBeginCapture_v2 s 2",
        "cuStreamBeginCapture s",
        "cuStreamBeginCapture_v2_ptsz s 1",
    ] {
        for alloc in [
            "cuMemAllocAsync &a 67108864 s",
            "cuMemAllocAsync_ptsz &a 67108864 s",
            "cuMemAllocFromPoolAsync &a 67108864 p s",
            "cuMemAllocFromPoolAsync_ptsz &a 67108864 p s",
        ] {
            check(&format!(
                "call cuDeviceGetDefaultMemPool &p 0; call {start}; call {alloc}; figures = 0 0; call cuMemFreeAsync a s; \
                 figures 0 = 0 0; call cuStreamEndCapture s &g; figures 0 = 0 0"
            ));
        }
    }
    each(
        &[
            // The thread has allocated on that stream before.
            "call cuMemAllocAsync &x 1000 s; call cuStreamBeginCapture_v2 s 0; call cuMemAllocAsync &a 67108864 s; \
             call cuStreamEndCapture s &g; figures = 1000 0; call cuMemAllocAsync &y 24 s; figures 0 = 1024 0",
            // The capture adds to an existing graph.
            "call cuGraphCreate &g 0; call cuStreamBeginCaptureToGraph s g 0 0 0 0; call cuMemAllocAsync &a 67108864 s; \
             call cuStreamEndCapture s &h; figures = 0 0",
            // The stream joins the capture of another stream, and does not belong to it afterwards.
            "call cuStreamCreate &t 1; call cuMemAllocAsync &x 1000 t; call cuEventCreate &v 2; call cuStreamBeginCapture_v2 s 2; \
             call cuMemAllocAsync &y 24 t; call cuEventRecord v s; call cuStreamWaitEvent t v 0; call cuMemAllocAsync &a 67108864 t; \
             call cuMemFreeAsync a t; call cuStreamEndCapture s &g; figures = 1024 0; call cuMemAllocAsync &z 6 t; figures 0 = 1030 0",
            // Allocations on other streams count.
            "call cuStreamCreate &t 1; call cuStreamBeginCapture_v2 s 2; call cuMemAllocAsync &x 1000 t; call cuMemAllocAsync &y 24 0; \
             call cuMemAlloc_v2 &z 6; call cuStreamEndCapture s &g; figures = 1030 0",
            // The captured free of a block that no graph allocated fails.
            "call cuMemAllocAsync &x 1000 s; call cuStreamBeginCapture_v2 s 2; call cuMemFreeAsync x s = 1; figures = 1000 0; \
             call cuStreamEndCapture s &g; call cuMemFreeAsync x s; figures 0 = 0 1000",
            // These captures go wrong: the first is broken by a call, the second is destroyed with its stream, and the third
            // cannot be started twice.
            "call cuStreamBeginCapture_v2 s 0; call cuMemAlloc_v2 &x 1000 = 900; call cuStreamEndCapture s &g = 901; \
             call cuMemAllocAsync &y 24 s; figures = 24 0",
            "call cuStreamBeginCapture_v2 s 0; call cuStreamDestroy_v2 s; call cuStreamCreate &s 1; call cuMemAllocAsync &y 24 s; \
             figures = 24 0",
            "call cuStreamEndCapture s &g = 1; call cuStreamBeginCapture_v2 s 0; call cuStreamBeginCapture_v2 s 0 = 900; \
             call cuMemAllocAsync &a 67108864 s; call cuStreamEndCapture s &g; figures = 0 0",
            // Another thread allocates on the captured stream.
            "call cuStreamBeginCapture_v2 s 2; other_thread call cuCtxSetCurrent ctx | call cuMemAllocAsync &a 67108864 s; \
             call cuStreamEndCapture s &g; figures = 0 0",
        ],
        |script| check(script),
    );
}

/// The allocations of a capture that started before the subscription may be counted.
#[test]
fn a_capture_older_than_the_subscription_is_reported() {
    let script = format!(
        "{CONTEXT}; call cuStreamCreate &s 1; call cuStreamBeginCapture_v2 s 2; exact; call cuMemAllocAsync &a 1000 s; \
         call cuStreamEndCapture s &g; figures"
    );
    for outcome in both_sources().check(&script) {
        ensure(outcome.answer("figures").ends_with(" lost"), "the figures are wrong and not marked", &outcome);
    }
}

/// gpumem does not intercept launches until it knows a graph that allocates. If a graph was built before the subscription, gpumem
/// notices it at the next reading and reports lost events. After that, gpumem intercepts launches.
#[test]
fn a_graph_older_than_the_subscription_is_reported_once() {
    let built = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    for found_out in ["figures 0", "call cuDeviceGraphMemTrim 0", "exact"] {
        let script = format!(
            "{CONTEXT}; call cuStreamCreate &s 1; {built}; exact; {LAUNCH}; {found_out}; figures 0; call cuDeviceGraphMemTrim 0; \
             exact; {LAUNCH}; figures"
        );
        for outcome in both_sources().check(&script) {
            let older = outcome.answers("figures 0");
            ensure(
                older.iter().all(|values| values.ends_with(", 1 lost")),
                "the figures are wrong and not marked",
                &outcome,
            );
            ensure(outcome.answer("figures") == "67108864 0", "a launch was not looked at", &outcome);
        }
    }
}

/// A graph is launched many times, with each way to free the memory that it allocates. `used` is the memory that the driver has
/// mapped.
#[test]
fn graphs_count_as_what_is_mapped() {
    let both = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    check(&format!("{both}; figures = 0 0{}; figures 0 = 67108864 0", format!("; {LAUNCH}").repeat(100)));
    let alone = captured("call cuMemAllocAsync &a 33554432 s");
    for free in
        ["cuMemFreeAsync a s", "cuMemFreeAsync_ptsz a s", "cuMemFreeAsync a 0", "cuMemFree_v2 a", "cuGraphLaunch f s"]
    {
        let frees =
            "call cuGraphCreate &h 0; call cuGraphAddMemFreeNode &n h 0 0 a; call cuGraphInstantiateWithFlags &f h 0";
        check(&format!(
            "{alone}; {frees}{}; figures = {STEP} 0; {LAUNCH}; {LAUNCH} = 1; figures 0 = {STEP} 0",
            format!("; {LAUNCH}; call {free}").repeat(100)
        ));
    }
    each(
        &[
            format!("{alone}; {LAUNCH}; call cuMemFreeAsync a s; call cuMemFreeAsync a s = 1; figures = {STEP} 0"),
            // The graph is built by hand, and its next launch frees its block.
            format!(
                "call cuGraphCreate &g 0; call cuGraphAddMemAllocNode &n g 0 0 node:a:{}:0; figures = 0 0; \
                 call cuGraphInstantiateWithFlags &e g 1{}; figures 0 = {} 0; call cuMemFreeAsync a s; figures 0 = {} 0; {LAUNCH}",
                48 * MIB,
                format!("; {LAUNCH}").repeat(100),
                2 * STEP,
                2 * STEP
            ),
            // The memory stays mapped when the graph is destroyed. A trim unmaps it, unless a block is live.
            format!(
                "{alone}; {LAUNCH}; call cuDeviceGraphMemTrim 0; figures = {STEP} 0; call cuGraphExecDestroy e; call cuGraphDestroy g; \
                 figures 0 = {STEP} 0; call cuMemFreeAsync a s; figures 0 = {STEP} 0; call cuDeviceGraphMemTrim 0; figures 0 = 0 {STEP}"
            ),
            // The graphs share the memory. The larger graph decides how much is mapped.
            format!(
                "{both}; let d e; call cuGraphCreate &g 0; call cuGraphAddMemAllocNode &n g 0 0 node:a:{}:0; call cuGraphAddMemFreeNode &m g 0 0 a; \
                 call cuGraphInstantiateWithFlags &e g 0; call cuGraphLaunch d s; figures = {} 0; {LAUNCH}; figures 0 = {} 0; call cuGraphLaunch d s; \
                 figures 0 = {} 0; call cuDeviceGraphMemTrim 0; figures 0 = 0 {}; call cuGraphLaunch d s; figures 0 = {} {STEP}",
                65 * MIB,
                2 * STEP,
                3 * STEP,
                3 * STEP,
                3 * STEP,
                2 * STEP
            ),
            // The memory is mapped before the graph is launched.
            format!("{both}; call cuGraphUpload e s; figures = {} 0; {LAUNCH}; figures 0 = {} 0", 2 * STEP, 2 * STEP),
            // There is other memory besides the graphs'.
            format!(
                "call cuMemAlloc_v2 &x 1000; {both}; {LAUNCH}; call cuMemFree_v2 x; figures = {} 1000; call cuDeviceGraphMemTrim 0; \
                 figures 0 = 0 {}",
                2 * STEP,
                2 * STEP + 1000
            ),
            format!("{both}; call cuGraphLaunch e 0x99 = 400; call cuGraphLaunch 0x99 s = 1; figures = 0 0"),
        ],
        |script| check(script),
    );
}

#[test]
fn graphs_are_a_kind_of_their_own() {
    let both = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    check(&format!(
        "{both}; {LAUNCH}; {LAUNCH}; memory_stats = all=67108864/67108864/67108864/0,1/1/1/0 graph=67108864/67108864/67108864/0,1/1/1/0 \
         untracked=0 lost=0; memory_reserved = 67108864; memory_snapshot = 67108864 graph; call cuDeviceGraphMemTrim 0; \
         memory_stats = all=0/67108864/67108864/67108864,0/1/1/1 graph=0/67108864/67108864/67108864,0/1/1/1 untracked=0 lost=0; \
         call cuDeviceGetGraphMemAttribute 0 0 &used; value used = 0; call cuDeviceGetGraphMemAttribute 0 1 &high; value high = 67108864"
    ));
}

/// The device is the nodes', and not the stream's. The trace of a thread counts the graphs that this thread
/// launched.
#[test]
fn graphs_of_several_devices_and_threads() {
    let script = format!(
        "{CONTEXT}; exact 0; exact 1; call cuStreamCreate &s 1; call cuGraphCreate &g 0; call cuGraphAddMemAllocNode &n g 0 0 node:a:1000:1; \
         call cuGraphInstantiateWithFlags &e g 1; {LAUNCH}; figures 0 = 0 0; figures 1 = {STEP} 0; {LAUNCH}; call cuMemFreeAsync a s; \
         call cuDeviceGraphMemTrim 1; figures 1 = 0 {STEP}"
    );
    Standin::new().devices(2).with_each_source().check(&script);
    let both = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    check(&format!(
        "of_thread; {both}; other_thread call cuCtxSetCurrent ctx | {LAUNCH}; figures 0 = {} 0; figures 1 = 0 0; \
         call cuGraphCreate &g 0; call cuGraphAddMemAllocNode &n g 0 0 node:a:{}:0; call cuGraphInstantiateWithFlags &e g 1; {LAUNCH}; \
         figures 0 = {} 0; figures 1 = {STEP} 0; call cuMemFreeAsync a s; call cuDeviceGraphMemTrim 0; figures 0 = 0 {}; figures 1 = 0 {STEP}",
        2 * STEP,
        96 * MIB,
        3 * STEP,
        3 * STEP
    ));
}

/// Graph memory from before the subscription counts as older memory, whose release lowers `used`.
#[test]
fn graphs_older_than_the_subscription() {
    let both = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    let alone = captured("call cuMemAllocAsync &b 1000 s");
    for (script, values) in [
        (
            format!("{both}; {LAUNCH}; exact; {LAUNCH}; figures = 0 0; call cuDeviceGraphMemTrim 0; figures 0"),
            "-67108864 0",
        ),
        // The graph was built and not launched, so gpumem does not know that it allocates.
        (format!("{both}; exact; figures = 0 0; {LAUNCH}; figures 0"), "67108864 0, 1 lost"),
        (
            format!(
                "{alone}; {LAUNCH}; exact; call cuMemFreeAsync b s; figures = 0 0; {LAUNCH}; call cuMemFree_v2 b; figures 0"
            ),
            "0 0",
        ),
        (
            format!(
                "{both}; {LAUNCH}; exact; unsubscribe; call cuDeviceGraphMemTrim 0; subscribe; exact; {LAUNCH}; figures"
            ),
            "67108864 0",
        ),
    ] {
        both_sources().check(&format!("{CONTEXT}; call cuStreamCreate &s 1; {script} = {values}"));
    }
}

/// A value that cannot be read is reported as lost, and not as 0.
#[test]
fn a_number_that_cannot_be_read_is_reported() {
    let both = captured("call cuMemAllocAsync &a 67108864 s; call cuMemFreeAsync a s");
    let script = format!("{CONTEXT}; exact; call cuStreamCreate &s 1; {both}; {LAUNCH}; figures");
    for outcome in Standin::new().fail("cuDeviceGetGraphMemAttribute=999@2..3").with_each_source().check(&script) {
        ensure(outcome.answer("figures").ends_with(" lost"), "the figures are wrong and not marked", &outcome);
    }
    // Drivers before 11.4 have neither the function nor such graphs.
    Standin::new()
        .without_symbol("cuDeviceGetGraphMemAttribute")
        .with_each_source()
        .check(&format!("{CONTEXT}; exact; call cuMemAlloc_v2 &a 10; figures = 10 0"));
}

#[test]
fn memory_of_somebody_else_does_not_count() {
    let mapped = "call cuMemAddressReserve &v 2097152 0 0 0; call cuMemMap v 2097152 0 h 0";
    each(
        &[
            "call cuMemImportFromShareableHandle &h 77 1; figures = 0 0; call cuMemRelease h; figures 0 = 0 0".to_owned(),
            format!("call cuMemImportFromShareableHandle &h 77 1; {mapped}; call cuMemRelease h; figures = 0 0; call cuMemUnmap v 2097152; figures 0 = 0 0"),
            format!("call cuMemImportFromShareableHandle &h 77 1; {mapped}; call cuMemUnmap v 2097152; call cuMemRelease h; figures = 0 0"),
            format!(
                "call cuMemImportFromShareableHandle &h 77 1; {mapped}; call cuMemRetainAllocationHandle &r v; call cuMemRelease h; \
                 call cuMemUnmap v 2097152; call cuMemRelease r; call cuMemRelease r = 1; figures = 0 0"
            ),
            // The program imports its own memory under another handle.
            "call cuMemCreate &c 2097152 on:0 0; call cuMemExportToShareableHandle &x c 1 0; call cuMemImportFromShareableHandle &h x 1; \
             figures = 2097152 0; call cuMemRelease h; figures 0 = 2097152 0; call cuMemRelease c; figures 0 = 0 2097152".to_owned(),
            "call cuMemPoolImportFromShareableHandle &p 77 1 0; call cuMemPoolImportPointer &a p zeros; figures = 0 0; call cuMemFreeAsync a 0; \
             figures 0 = 0 0; call cuMemPoolImportPointer &a p zeros; call cuMemFree_v2 a; call cuMemFree_v2 a = 1; figures 0 = 0 0".to_owned(),
            "call standin_ipc_open &a 1; figures = 0 0; call cuIpcCloseMemHandle a; figures 0 = 0 0".to_owned(),
            "call cuImportExternalMemory &x zeros; call cuExternalMemoryGetMappedBuffer &a x zeros; figures = 0 0; call cuMemFree_v2 a; \
             call cuDestroyExternalMemory x; figures 0 = 0 0".to_owned(),
            "call cuMulticastCreate &h zeros; call cuMemRelease h; figures = 0 0".to_owned(),
        ],
        |script| check(script),
    );
}

/// A release that fails frees nothing. The next release succeeds and frees the memory.
#[test]
fn a_release_of_somebody_elses_memory_that_fails() {
    for (free, script) in [
        (
            "cuMemRelease",
            "call cuMemImportFromShareableHandle &h 77 1; call cuMemRelease h = 999; call cuMemRelease h; figures = 0 0",
        ),
        (
            "cuMemFree_v2",
            "call cuMemPoolImportFromShareableHandle &p 77 1 0; call cuMemPoolImportPointer &a p zeros; call cuMemFree_v2 a = 999; call cuMemFree_v2 a; figures = 0 0",
        ),
    ] {
        let script = format!("{CONTEXT}; exact; {script}; status");
        // gpumem has already released one page, which it creates to learn the driver's latest block id.
        let from = if free == "cuMemRelease" { 2 } else { 1 };
        for outcome in Standin::new().fail(format!("{free}=999@{from}..{}", from + 1)).with_each_source().check(&script)
        {
            ensure(outcome.answer("status").contains(" untracked=0 lost=0 "), "something is untracked", &outcome);
        }
    }
}

/// An unknown block is older than the subscription only if its id in the driver is lower than the id of the first intercepted
/// block.
#[test]
fn frees_of_blocks_that_were_not_intercepted_lower_nothing() {
    for (script, values) in [
        ("exact; call standin_alloc &a 1000; call cuMemFree_v2 a", "0 0, 1 untracked"),
        ("exact; call cuMemAlloc_v2 &b 24; call standin_alloc &a 1000; call cuMemFree_v2 a", "24 0, 1 untracked"),
        (
            "subscribe; call cuMemAllocAsync &b 24 0; call standin_alloc &a 1000; exact; call cuMemFree_v2 a",
            "0 0, 1 untracked",
        ),
        // The block is older than the trace, so it is right that the free lowers `used`.
        ("subscribe; call standin_alloc &a 1000; exact; call cuMemFree_v2 a", "-1000 0"),
        ("call standin_alloc &a 1000; exact; call cuMemAlloc_v2 &b 24; call cuMemFree_v2 a", "-976 24"),
        (
            "unsubscribe; exact; subscribe; call cuMemAlloc_v2 &a 1000; unsubscribe; subscribe; exact; call standin_alloc &b 24; call cuMemFree_v2 b",
            "0 0, 1 untracked",
        ),
        // The age of the block is not known.
        (
            "subscribe; call cuMemAllocHost_v2 &p 10; call cuMemFreeHost p; exact; call standin_alloc &a 1000; call cuMemFree_v2 a",
            "0 0, 1 untracked",
        ),
    ] {
        both_sources().check(&format!("{CONTEXT}; {script}; figures = {values}"));
    }
    // gpumem cannot create the page from which it learns the driver's latest block id.
    let script =
        format!("{CONTEXT}; call cuMemAlloc_v2 &a 1000; exact; call cuMemFree_v2 a; figures = 0 0, 1 untracked");
    Standin::new().fail("cuMemCreate=801").with_each_source().check(&script);
}
