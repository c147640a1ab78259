//! Tests exact numbers through the dispatch table and through CUPTI, to the byte, for each way to allocate.
//!
//! Each case is a machine and a script for the probe. The expected answers follow the commands; see `gpumem_tests::check`.

use gpumem_tests::{CONTEXT, Machines, Outcome, Standin, each, ensure};

use super::both_sources;

#[track_caller]
fn check(machines: &Machines, script: &str) -> Vec<Outcome> {
    machines.check(script)
}

/// Like [`check`], but the script starts with a context and an exact trace of its device, and nothing may be printed to stderr.
#[track_caller]
fn check_exact(machines: &Machines, script: &str) {
    for outcome in check(machines, &format!("{CONTEXT}; exact = started; {script}")) {
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
}

#[test]
fn every_way_to_allocate_is_counted_to_the_byte() {
    each(
        &[
            "call cuMemAlloc_v2 &a 1000; figures = 1000 0; call cuMemFree_v2 a; figures = 0 1000",
            "call cuMemAlloc_v2 &a 1; call cuMemAlloc_v2 &b 2097153; call cuMemFree_v2 a; figures = 2097153 1",
            // Rows of a pitched block start at multiples of 512.
            "call cuMemAllocPitch_v2 &a &pitch 1000 10 4; figures = 10240 0; call cuMemFree_v2 a; figures = 0 10240",
            // The block is in a pool, and is freed in stream order or not.
            "call cuMemAllocAsync &a 1000 0; figures = 1000 0; call cuMemFreeAsync a 0; figures = 0 1000",
            "call cuMemAllocAsync_ptsz &a 1000 0; figures = 1000 0; call cuMemFreeAsync_ptsz a 0; figures = 0 1000",
            "call cuMemAllocAsync &a 1000 0; call cuMemFree_v2 a; figures = 0 1000",
            "call cuStreamCreate &s 0; call cuMemAllocAsync &a 1000 s; call cuMemFreeAsync a s; figures = 0 1000",
            "call cuStreamCreateWithPriority &s 1 0; call cuMemAllocAsync &a 7 s; call cuMemFreeAsync a 0; figures = 0 7",
            "call cuDeviceGetDefaultMemPool &p 0; call cuMemAllocFromPoolAsync &a 9 p 0; figures = 9 0; call cuMemFreeAsync a 0; figures = 0 9",
            "call cuMemPoolCreate &p on:0; call cuMemAllocFromPoolAsync_ptsz &a 9 p 0; figures = 9 0; call cuMemFreeAsync a 0; figures = 0 9",
            // A destroyed pool keeps its blocks until they are freed. Blocks of a pool that was made the current one count as
            // well.
            "call cuMemPoolCreate &p on:0; call cuMemAllocFromPoolAsync &a 9 p 0; call cuMemPoolDestroy p; figures = 9 0; call cuMemFreeAsync a 0; figures = 0 9",
            "call cuMemPoolCreate &p on:0; call cuDeviceSetMemPool 0 p; call cuMemAllocAsync &a 9 0; figures = 9 0; call cuMemFreeAsync a 0; figures = 0 9",
            // Physical memory exists until all its handles are released and it is mapped nowhere.
            "call cuMemCreate &h 2097152 on:0 0; figures = 2097152 0; call cuMemRelease h; figures = 0 2097152",
            "call cuMemCreate &h 2097152 on:0 0; call cuMemAddressReserve &v 4194304 0 0 0; call cuMemMap v 2097152 0 h 0; \
             call cuMemMap v+2097152 2097152 0 h 0; call cuMemRelease h; figures = 2097152 0; call cuMemUnmap v 2097152; \
             figures 0 = 2097152 0; call cuMemUnmap v+2097152 2097152; figures = 0 2097152; call cuMemAddressFree v 4194304",
            "call cuMemCreate &h 2097152 on:0 0; call cuMemAddressReserve &v 2097152 0 0 0; call cuMemMap v 2097152 0 h 0; \
             call cuMemSetAccess v 2097152 0 1; call cuMemUnmap v 2097152; figures = 2097152 0; call cuMemRelease h; figures = 0 2097152",
            "call cuMemCreate &h 2097152 on:0 0; call cuMemAddressReserve &v 2097152 0 0 0; call cuMemMap v 2097152 0 h 0; \
             call cuMemRetainAllocationHandle &again v; call cuMemRelease h; call cuMemUnmap v 2097152; figures = 2097152 0; \
             call cuMemRelease again; figures = 0 2097152",
            // An array has the size of its elements.
            "call cuArrayCreate_v2 &a array:10:0x20:4; figures = 160 0; call cuArrayDestroy a; figures = 0 160",
            "call cuArrayCreate_v2 &a array:10x3:0x10:2; figures = 120 0; call cuArrayDestroy a; figures = 0 120",
            "call cuArray3DCreate_v2 &a array3d:8x4x2:0x01:1; figures = 64 0; call cuArrayDestroy a; figures = 0 64",
            "call cuMipmappedArrayCreate &a array3d:8x8x0:0x20:1 4; figures = 340 0; call cuMipmappedArrayDestroy a; figures = 0 340",
            // Memory that is not on the device is listed separately.
            "call cuMemAllocManaged &a 1000 1; figures = 0 0; call cuMemFree_v2 a; figures = 0 0",
            "call cuMemAllocHost_v2 &a 1000; call cuMemHostAlloc &b 1000 0; figures = 0 0; call cuMemFreeHost a; call cuMemFreeHost b; figures = 0 0",
            "let mine 0x10000; call cuMemHostRegister_v2 mine 1000 0; figures = 0 0; call cuMemHostUnregister mine; figures = 0 0",
            "call cuMemCreate &h 2097152 on:host 0; figures = 0 0; call cuMemRelease h; figures = 0 0",
            // A device address and a host address may be the same number.
            "call cuMemAlloc_v2 &a 1000; call cuMemHostRegister_v2 a 50 0; figures = 1000 0; call cuMemHostUnregister a; \
             figures = 1000 0; call cuMemFree_v2 a; figures = 0 1000",
            // The driver reuses freed addresses and handles.
            "call cuMemAlloc_v2 &a 4096; call cuMemFree_v2 a; call cuMemAlloc_v2 &b 4000; figures = 4000 96; call cuMemFree_v2 a; figures = 0 4096",
            "call cuMemCreate &h 2097152 on:0 0; call cuMemRelease h; call cuMemCreate &h 4194304 on:0 0; call cuMemRelease h; figures = 0 4194304",
            "call cuArrayCreate_v2 &a array:10:0x01:1; call cuArrayDestroy a; call cuMipmappedArrayCreate &a array3d:20:0x01:1 1; figures = 20 0",
        ],
        |script| check_exact(&both_sources(), script),
    );
}

#[test]
fn live_memory_is_listed_by_kind() {
    let script = "call cuMemAlloc_v2 &a 1; call cuMemAllocAsync &b 20 0; call cuMemAllocManaged &c 300 1; \
                  call cuMemAllocHost_v2 &d 4000; call cuMemCreate &e 2097152 on:0 0; call cuMemHostRegister_v2 0x10000 50 0; \
                  call cuArrayCreate_v2 &f array:2:0x01:1; figures = 2097175 0; \
                  status = gauge=exact source=SOURCE events=7 untracked=0 lost=0 device=3/2 pool=20/1 managed=300/1 pinned host=4050/2 \
                  vmm=2097152/1 by=LIBRARY why=none";
    check_exact(&both_sources(), script);
    // Freed memory is not live any more.
    let freed = "call cuMemFree_v2 a; call cuMemFreeAsync b 0; call cuMemFree_v2 c; call cuMemFreeHost d; call cuMemRelease e; \
                 call cuMemHostUnregister 0x10000; call cuArrayDestroy f; figures 0 = 0 2097175; \
                 status = gauge=exact source=SOURCE events=14 untracked=0 lost=0 by=LIBRARY why=none";
    let (allocated, _) = script.split_once("figures").unwrap_or((script, ""));
    check_exact(&both_sources(), &format!("{allocated}{freed}"));
}

/// gpumem must read the result of a call first, because the out-parameters of a failed call may have any value.
#[test]
fn an_allocation_that_fails_counts_nothing() {
    let allocations = [
        ("cuMemAlloc_v2", "&a 500"),
        ("cuMemAllocPitch_v2", "&a &pitch 1000 10 4"),
        ("cuMemAllocManaged", "&a 500 1"),
        ("cuMemAllocAsync", "&a 500 0"),
        ("cuMemAllocAsync_ptsz", "&a 500 0"),
        ("cuMemAllocFromPoolAsync", "&a 500 pool 0"),
        ("cuMemAllocFromPoolAsync_ptsz", "&a 500 pool 0"),
        ("cuMemAllocHost_v2", "&a 500"),
        ("cuMemHostAlloc", "&a 500 0"),
        ("cuMemHostRegister_v2", "a 500 0"),
        ("cuMemCreate", "&a 2097152 on:0 0"),
        ("cuArrayCreate_v2", "&a array:10:0x20:4"),
        ("cuArray3DCreate_v2", "&a array3d:8x4x2:0x01:1"),
        ("cuMipmappedArrayCreate", "&a array3d:8x8x0:0x20:1 4"),
    ];
    each(&allocations, |(function, arguments)| {
        // In the first call, `a` is the address of a live block. In the second call, the pointers to the out-parameters are null.
        let nowhere = arguments.replace("&a", "0").replace("&pitch", "0");
        let live = "gauge=exact source=SOURCE events=1 untracked=0 lost=0 device=1000/1 by=LIBRARY why=none";
        let script = format!(
            "call cuDeviceGetDefaultMemPool &pool 0; call cuMemAlloc_v2 &live 1000; let a live; \
             call {function} {arguments} = 2; call {function} {nowhere} = 2; figures = 1000 0; status = {live}; \
             call cuMemFree_v2 live; figures = 0 1000"
        );
        // These two functions have been called once before: by the script for `live`, and by gpumem, which creates a page to
        // learn the driver's latest block id.
        let from = if ["cuMemAlloc_v2", "cuMemCreate"].contains(function) { 2 } else { 1 };
        // Another test checks the notice, so reports are off.
        let machine = Standin::new()
            .fail(format!("{function}=2@{from}..{}", from + 2))
            .env("GPUMEM_REPORT", "off")
            .with_each_source();
        check_exact(&machine, &script);
    });
    each(
        &[
            "call cuMemAlloc_v2 &a 99999999999999 = 2; figures = 0 0",
            "call cuMemAlloc_v2 &a 0 = 1; call cuMemAlloc_v2 0 1000 = 1; figures = 0 0",
            "call cuMemAllocAsync &a 1000 0x99 = 400; figures = 0 0",
            "call cuMemCreate &a 1000 on:0 0 = 1; call cuMemCreate &a 2097152 on:7 0 = 101; figures = 0 0",
        ],
        |script| check_exact(&Standin::new().env("GPUMEM_REPORT", "off").with_each_source(), script),
    );
}

#[test]
fn a_free_that_fails_gives_nothing_back() {
    each(
        &[
            ("cuMemFree_v2", "cuMemAlloc_v2 &a 1000", "a", 1000),
            ("cuMemFree_v2", "cuMemAllocAsync &a 1000 0", "a", 1000),
            ("cuMemFreeAsync", "cuMemAllocAsync &a 1000 0", "a 0", 1000),
            ("cuMemFreeAsync_ptsz", "cuMemAllocAsync_ptsz &a 1000 0", "a 0", 1000),
            ("cuMemRelease", "cuMemCreate &a 2097152 on:0 0", "a", 2_097_152),
            ("cuArrayDestroy", "cuArrayCreate_v2 &a array:10:0x20:4", "a", 160),
            ("cuMipmappedArrayDestroy", "cuMipmappedArrayCreate &a array3d:8x8x0:0x20:1 4", "a", 340),
        ],
        |(free, alloc, arguments, bytes)| {
            let script = format!(
                "call {alloc}; call {free} {arguments} = 999; figures = {bytes} 0; call {free} {arguments} = 999; \
                 figures = {bytes} 0; call {free} {arguments}; figures = 0 {bytes}; call {free} {arguments} = 999; \
                 figures = 0 {bytes}"
            );
            // gpumem has already released one page, which it creates to learn the driver's latest block id.
            let from = if *free == "cuMemRelease" { 2 } else { 1 };
            // The second fault counts only the calls that the first one does not fail.
            let fault = |calls: String| format!("{free}=999@{calls}");
            let machine = Standin::new()
                .fail(fault(format!("{from}..{}", from + 2)))
                .fail(fault((from + 1).to_string()))
                .with_each_source();
            check_exact(&machine, &script);
        },
    );
    // A free that fails on another thread has no effect either.
    let script = "of_thread; call cuMemAlloc_v2 &a 7; other_thread call cuCtxSetCurrent ctx | call cuMemFree_v2 a = 999; \
                  figures 0 = 7 0; figures 1 = 7 0";
    check_exact(&Standin::new().fail("cuMemFree_v2=999").with_each_source(), script);
    let mapped = "call cuMemCreate &h 2097152 on:0 0; call cuMemAddressReserve &v 2097152 0 0 0; call cuMemMap v 2097152 0 h 0; \
                  call cuMemRelease h; call cuMemUnmap v 2097152 = 999; figures 0 = 2097152 0; call cuMemUnmap v 2097152; \
                  figures = 0 2097152";
    check_exact(&Standin::new().fail("cuMemUnmap=999@2..3").with_each_source(), mapped);
    let unmapped = "call cuMemCreate &h 2097152 on:0 0; call cuMemAddressReserve &v 2097152 0 0 0; \
                    call cuMemMap v 2097152 0 h 0 = 2; figures = 2097152 0; call cuMemRelease h; figures 0 = 0 2097152";
    check_exact(&Standin::new().fail("cuMemMap=2@2").with_each_source(), unmapped);
    let pinned = "call cuMemAllocHost_v2 &a 1000; call cuMemFreeHost a = 999; \
                  call cuMemFree_v2 0; status = gauge=exact source=SOURCE events=1 untracked=0 lost=0 pinned host=1000/1 by=LIBRARY why=none";
    check_exact(&Standin::new().fail("cuMemFreeHost=999").with_each_source(), pinned);
}

#[test]
fn frees_of_unknown_blocks() {
    // Blocks older than the subscription are looked up if the driver knows them.
    each(
        &[
            ("cuMemAlloc_v2 &a 1000", "cuMemFree_v2 a", "-1000 0"),
            ("cuMemAllocAsync &a 1000 0", "cuMemFreeAsync a 0", "-1000 0"),
            ("cuMemAllocAsync &a 1000 0", "cuMemFree_v2 a", "-1000 0"),
            ("cuMemAllocPitch_v2 &a &pitch 1000 10 4", "cuMemFree_v2 a", "-10240 0"),
            ("cuMemAllocManaged &a 1000 1", "cuMemFree_v2 a", "0 0"),
            ("cuArrayCreate_v2 &a array:10:0x20:4", "cuArrayDestroy a", "0 0, 1 untracked"),
            ("cuMemCreate &a 2097152 on:0 0", "cuMemRelease a", "0 0, 1 untracked"),
        ],
        |(alloc, free, values)| {
            let script =
                format!("{CONTEXT}; call {alloc}; exact; call {free}; figures = {values}; figures 0 = {values}");
            check(&both_sources(), &script);
            // A free that fails has no effect.
            let function = free.split(' ').next().unwrap_or_default();
            let script = format!("{CONTEXT}; call {alloc}; exact; call {free} = 999; figures = 0 0");
            check(&Standin::new().fail(format!("{function}=999")).with_each_source(), &script);
        },
    );
    each(
        &[
            "call cuMemFree_v2 0x1234 = 1; figures = 0 0",
            "call cuMemFree_v2 0x700000001000 = 1; figures = 0 0",
            "call cuMemFree_v2 0; call cuMemFreeAsync 0 0 = 1; figures = 0 0",
            "call cuMemAlloc_v2 &a 1000; call cuMemFree_v2 a; call cuMemFree_v2 a = 1; figures = 0 1000",
            "call cuMemAlloc_v2 &a 1000; call cuMemFree_v2 a+512 = 1; figures = 1000 0",
            "call cuMemAllocAsync &a 1000 0; call cuMemFreeAsync a 0; call cuMemFreeAsync a 0 = 1; figures = 0 1000",
            "call cuMemCreate &h 2097152 on:0 0; call cuMemRelease h; call cuMemRelease h = 1; figures = 0 2097152",
            "call cuArrayDestroy 0x77 = 400; call cuMemFreeHost 0x77 = 1; call cuMemHostUnregister 0x77 = 713; figures = 0 0",
            // The block is freed by another thread, and in another context.
            "call cuMemAlloc_v2 &a 1000; other_thread call cuCtxSetCurrent ctx | call cuMemFree_v2 a; figures = 0 1000",
            "call cuMemAlloc_v2 &a 1000; call cuCtxCreate_v2 &other 0 0; call cuMemFree_v2 a; figures = 0 1000",
        ],
        |script| check_exact(&both_sources(), script),
    );
}

#[test]
fn a_second_subscription_has_no_effect() {
    check_exact(&both_sources(), "subscribe = done; subscribe = done; call cuMemAlloc_v2 &a 1000; figures = 1000 0");
    for _ in 0..5 {
        for outcome in check(&Standin::new().set("yields=1").with_each_source(), "rush 16 = done") {
            let subscribed = outcome.calls.iter().filter(|call| call.starts_with("cuptiSubscribe")).count();
            ensure(subscribed <= 1, "not once", &outcome);
        }
    }
}

#[test]
fn while_the_process_ends() {
    each(
        &[
            // An exit handler frees the block. The code below sets this handler after gpumem's handler and before it.
            "call cuMemAlloc_v2 &a 1000; at_exit call cuMemFree_v2 a",
            "call cuMemAlloc_v2 &a 1000; at_exit call cuMemFree_v2 a | call cuMemAlloc_v2 &b 1000 | status",
            // The block is freed while a thread's locals are destroyed.
            "call cuMemAlloc_v2 &a 1000; at_thread_exit call cuCtxSetCurrent ctx | call cuMemFree_v2 a; figures = 0 1000",
            "at_thread_exit call cuCtxSetCurrent ctx | call cuMemAlloc_v2 &a 1000; figures = 1000 0",
            "at_exit call cuDevicePrimaryCtxReset_v2 0 | call cuDevicePrimaryCtxRelease_v2 0",
        ],
        |script| {
            check_exact(&both_sources(), script);
            let (before, after) = script.split_once("at_").unwrap_or((script, ""));
            if let Some(handler) = after.strip_prefix("exit ") {
                check(&both_sources(), &format!("{CONTEXT}; at_exit {handler}; exact; {before}"));
            }
        },
    );
}

#[test]
fn a_forked_process_counts_nothing_and_does_not_hang() {
    // CUDA does not work in the child, no matter which function it calls.
    let child = "fork figures | status | new | call cuMemAlloc_v2 &b 1000 = 3 | call cuMemFree_v2 a = 3 | exact | drop";
    let script =
        format!("call cuMemAlloc_v2 &a 1000; {child}; figures 0 = 1000 0; call cuMemFree_v2 a = 0; figures 0 = 0 1000");
    let script = script.replace("call cuMemFree_v2 a = 0", "call cuMemFree_v2 a+0");
    for outcome in check(&both_sources(), &format!("{CONTEXT}; exact; {script}")) {
        ensure(outcome.stdout.contains(": the child ended with 0"), "the child did not end well", &outcome);
        ensure(outcome.answer("exact") == "started", "no trace", &outcome);
        let of_child: Vec<_> = outcome.answers("figures");
        ensure(of_child == ["0 0, stale"], "the child measured something", &outcome);
    }
    // A thread of the parent may be inside gpumem or the driver at the fork.
    let busy = "fork status | new | drop";
    check(&both_sources(), &format!("{CONTEXT}; sampled; exact; {busy}; {busy}; {busy}; drop; drop"));
}

#[test]
fn a_trace_that_was_open_at_a_fork_reports_in_the_parent_alone() {
    for outcome in check(&both_sources(), &format!("{CONTEXT}; new; fork report | drop; report; drop")) {
        ensure(outcome.stdout.contains(": the child ended with 0"), "the child did not end well", &outcome);
        ensure(outcome.reports().len() == 2, "not the parent's two reports", &outcome);
    }
}

/// The threads of the parent may do anything at the fork, such as hold the lock of stderr. Each source is tested with 300
/// children.
#[test]
fn no_child_of_a_fork_hangs_or_prints() {
    let machines = Standin::new().env("GPUMEM_LEAKS", "1").with_each_source();
    for outcome in machines.check("forks 300 = none hung, none printed") {
        let children = outcome.stderr.matches("gpumem: process ").count();
        ensure(children == 1, "not the parent alone reported leaks", &outcome);
    }
}

const TWO: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &c0 0; call cuDevicePrimaryCtxRetain &c1 1";

#[test]
fn events_are_of_the_right_device() {
    let trace = "exact 0; exact 1";
    each(
        &[
            "call cuCtxSetCurrent c1; call cuMemAlloc_v2 &a 1000; figures 0 = 0 0; figures 1 = 1000 0; \
             call cuCtxSetCurrent c0; call cuMemFree_v2 a; figures 0 = 0 0; figures 1 = 0 1000",
            // The device is the stream's, and not the current context's.
            "call cuCtxSetCurrent c1; call cuStreamCreate &s 0; call cuCtxSetCurrent c0; call cuMemAllocAsync &a 1000 s; \
             figures 0 = 0 0; figures 1 = 1000 0; call cuMemFreeAsync a 0; figures 1 = 0 1000",
            "call cuCtxSetCurrent c0; call cuStreamCreate &s 0; call cuMemAllocAsync &a 7 s; call cuCtxSetCurrent c1; \
             call cuMemAllocAsync &b 20 s; call cuMemAllocAsync &d 300 0; figures 0 = 27 0; figures 1 = 300 0",
            // The driver reuses a handle on the other device.
            "call cuCtxSetCurrent c0; call cuStreamCreate &s 0; call cuMemAllocAsync &a 7 s; call cuStreamDestroy_v2 s; \
             call cuCtxSetCurrent c1; call cuStreamCreate &t 0; call cuMemAllocAsync &b 20 t; figures 0 = 7 0; figures 1 = 20 0",
            "call cuMemPoolCreate &p on:0; call cuMemPoolDestroy p; call cuMemPoolCreate &q on:1; call cuCtxSetCurrent c0; \
             call cuMemAllocFromPoolAsync &a 7 q 0; figures 0 = 0 0; figures 1 = 7 0",
            // The device is the pool's, and not the stream's.
            "call cuDeviceGetDefaultMemPool &p 1; call cuCtxSetCurrent c0; call cuMemAllocFromPoolAsync &a 1000 p 0; \
             figures 0 = 0 0; figures 1 = 1000 0; call cuMemFreeAsync a 0; figures 1 = 0 1000",
            "call cuMemPoolCreate &p on:1; call cuCtxSetCurrent c0; call cuMemAllocFromPoolAsync &a 1000 p 0; \
             figures 0 = 0 0; figures 1 = 1000 0",
            "call cuDeviceGetMemPool &p 1; call cuCtxSetCurrent c0; call cuMemAllocFromPoolAsync_ptsz &a 1000 p 0; \
             figures 0 = 0 0; figures 1 = 1000 0",
            "call cuCtxSetCurrent c1; call cuStreamCreateWithPriority &s 1 0; call cuCtxSetCurrent c0; \
             call cuMemAllocAsync_ptsz &a 1000 s; figures 0 = 0 0; figures 1 = 1000 0",
            // The device is the one in the properties, even without a current context.
            "call cuMemCreate &h 2097152 on:1 0; figures 0 = 0 0; figures 1 = 2097152 0; call cuMemRelease h; figures 1 = 0 2097152",
            "call cuCtxCreate_v2 &x 0 1; call cuMemAlloc_v2 &a 7; call cuCtxSetCurrent c0; call cuMemAlloc_v2 &b 20; \
             call cuArrayCreate_v2 &d array:10:0x01:1; figures 0 = 30 0; figures 1 = 7 0",
            // A context gets the handle of an earlier context.
            "call cuCtxCreate_v2 &x 0 0; call cuMemAlloc_v2 &a 7; call cuMemFree_v2 a; call cuCtxDestroy_v2 x; \
             call cuCtxCreate_v3 &y 0 0 0 1; call cuMemAlloc_v2 &a 20; figures 1 = 20 0",
            "other_thread call cuCtxSetCurrent c1 | call cuMemAlloc_v2 &a 7; other_thread call cuCtxSetCurrent c0 | call cuMemAlloc_v2 &b 20; \
             figures 0 = 20 0; figures 1 = 7 0",
        ],
        |script| {
            let (machine, script) = (Standin::new().devices(2), format!("{TWO}; {trace}; {script}"));
            // CUDA and NVML number the devices differently.
            let other = machine.clone().env("CUDA_VISIBLE_DEVICES", "1,0");
            for machine in [machine, other] {
                check(&machine.with_each_source(), &script);
            }
        },
    );
}

/// The streams and pools are older than the subscription, or were created between two subscriptions.
#[test]
fn streams_and_pools_from_before() {
    each(
        &[
            "call cuCtxSetCurrent c1; call cuStreamCreate &s 0; call cuCtxSetCurrent c0; TRACE; call cuMemAllocAsync &a 1000 s; \
             figures 0 = 0 0; figures 1 = 1000 0",
            "call cuMemPoolCreate &p on:1; call cuCtxSetCurrent c0; TRACE; call cuMemAllocFromPoolAsync &a 1000 p 0; \
             figures 0 = 0 0; figures 1 = 1000 0",
            "call cuCtxSetCurrent c0; subscribe = done; call cuStreamCreate &s 0; unsubscribe; call cuStreamDestroy_v2 s; \
             call cuCtxSetCurrent c1; call cuStreamCreate &t 0; call cuCtxSetCurrent c0; subscribe = done; TRACE; call cuMemAllocAsync &a 1000 t; \
             figures 0 = 0 0; figures 1 = 1000 0",
            "call cuDeviceGetDefaultMemPool &p 1; call cuCtxSetCurrent c0; TRACE; call cuMemAllocFromPoolAsync &a 1000 p 0; \
             figures 0 = 0 0; figures 1 = 1000 0",
        ],
        |script| {
            check(
                &Standin::new().devices(2).with_each_source(),
                &format!("{TWO}; {}", script.replace("TRACE", "exact 0; exact 1")),
            );
        },
    );
}

#[test]
fn a_context_that_ends_gives_back_everything_but_pools() {
    let made = "call cuMemAlloc_v2 &a 1000; call cuMemAllocAsync &b 20 0; call cuArrayCreate_v2 &d array:10:0x01:1; figures 0 = 1030 0";
    each(
        &[
            format!("{made}; call cuDevicePrimaryCtxReset_v2 0; figures = 20 1010"),
            format!("{made}; call cuDevicePrimaryCtxRelease_v2 0; figures = 20 1010"),
            format!("{made}; call cuDevicePrimaryCtxReset_v2 0; call cuMemAlloc_v2 &e 7; figures = 27 1003"),
            // Physical memory belongs to no context.
            "call cuMemCreate &h 2097152 on:0 0; call cuMemAlloc_v2 &a 8; call cuDevicePrimaryCtxReset_v2 0; figures = 2097152 8"
                .to_owned(),
            // A block that the reset has freed cannot be freed again. A release frees no blocks while the context is still
            // retained.
            "call cuMemAlloc_v2 &a 8; call cuDevicePrimaryCtxReset_v2 0; call cuMemFree_v2 a = 1; figures = 0 8".to_owned(),
            "call cuDevicePrimaryCtxRetain &ctx 0; call cuMemAlloc_v2 &a 8; call cuDevicePrimaryCtxRelease_v2 0; figures = 8 0"
                .to_owned(),
            "call cuMemAllocManaged &a 8 1; call cuDevicePrimaryCtxReset_v2 0; \
             status = gauge=exact source=SOURCE events=1 untracked=0 lost=0 by=LIBRARY why=none"
                .to_owned(),
            // The destroyed context has no blocks.
            "call cuMemAlloc_v2 &a 8; call cuCtxCreate_v2 &x 0 0; call cuCtxDestroy_v2 x; figures = 8 0".to_owned(),
        ],
        |script| check_exact(&both_sources(), script),
    );
    // A reset of one device does not change the other device.
    let script = "call cuCtxSetCurrent c0; call cuMemAlloc_v2 &a 7; call cuCtxSetCurrent c1; call cuMemAlloc_v2 &b 20; \
                  call cuDevicePrimaryCtxReset_v2 1; figures 0 = 7 0; figures 1 = 0 20";
    check(&Standin::new().devices(2).with_each_source(), &format!("{TWO}; exact 0; exact 1; {script}"));
}

/// One of two contexts of a device ends: the numbers are exact, or marked as possibly wrong. Pools belong to the device.
#[test]
fn one_context_of_two_ends() {
    let pool = "call cuMemPoolCreate &p on:0; call cuMemAllocFromPoolAsync &a 1000 p 0; call cuCtxCreate_v2 &x 0 0";
    for made in ["call cuMemAlloc_v2 &a 1000; call cuCtxCreate_v4 &x 0 0 0", pool] {
        let script = format!("{made}; call cuMemAlloc_v2 &b 20; call cuCtxDestroy_v2 x; figures");
        for outcome in check(&both_sources(), &format!("{CONTEXT}; exact; {script}")) {
            let values = outcome.answer("figures");
            ensure(values == "1000 20" || values.ends_with("lost"), "the figures are wrong and not marked", &outcome);
        }
    }
}

/// Programs in Rust usually call the driver through cudarc.
#[test]
fn allocations_of_cudarc_are_counted() {
    let mib = 1 << 20;
    let script = format!(
        "new; context 0; pooled 10; figures = {} 0; pooled 15; figures 0 = {} 0; give_back; figures = 0 {}",
        10 * mib,
        25 * mib,
        25 * mib
    );
    for outcome in check(&both_sources(), &script) {
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
    // This device has no pools.
    check(&Standin::new().set("pools=0").with_each_source(), &script);
    let script =
        format!("exact 0; exact 1; context 0; context 1; pooled 10; figures 0 = 0 0; figures 1 = {} 0", 10 * mib);
    check(&Standin::new().devices(2).with_each_source(), &script);
}

/// The trace counts only its own thread.
#[test]
fn traces_of_one_thread() {
    each(
        &[
            "of_thread; call cuMemAlloc_v2 &a 7; other_thread call cuCtxSetCurrent ctx | call cuMemAlloc_v2 &b 20; figures 1 = 7 0; figures 0 = 27 0",
            "of_thread; call cuMemAlloc_v2 &a 7; other_thread call cuCtxSetCurrent ctx | call cuMemFree_v2 a; figures 1 = 0 7",
            "of_thread; other_thread call cuCtxSetCurrent ctx | call cuMemAlloc_v2 &b 20; call cuMemFree_v2 b; figures 1 = 0 0; figures 0 = 0 20",
        ],
        |script| check_exact(&both_sources(), script),
    );
    let outcome = gpumem_tests::check(&Standin::new(), &format!("{CONTEXT}; of_thread"));
    ensure(outcome.answer("of_thread").starts_with("error[unavailable]"), "a sampled trace of one thread", &outcome);
}

/// Exit handlers that were set before gpumem's handler run after gpumem has ended.
#[test]
fn traces_while_the_process_ends() {
    let late = "at_exit new | call cuMemAlloc_v2 &b 1000 | figures | report | drop | status | try_get";
    for script in
        [format!("{late}; exact; exact"), format!("exact; {late}"), late.to_owned(), format!("sampled; {late}")]
    {
        check(&both_sources(), &format!("{CONTEXT}; {script}"));
        gpumem_tests::check(&Standin::new(), &format!("{CONTEXT}; {script}"));
    }
}

#[test]
fn subscribing_again_and_again_under_load() {
    let script = "call cuInit 0; toggling 8 300; exact; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; \
                  call cuMemAlloc_v2 &a 1000; figures = 1000 0; call cuMemFree_v2 a; figures 0 = 0 1000";
    check(&both_sources(), script);
}

/// Interception does not break a stream capture, and a call that fails during the capture does not count.
#[test]
fn while_a_stream_is_captured() {
    check(&both_sources(), "context 0; capture; new; figures = 0 0; report; status; drop; end_capture = whole");
    check(
        &both_sources(),
        "context 0; capture; exact; figures = 0 0; reset; figures = 0 0; drop; memory_stats; end_capture = whole",
    );
    let script = "context 0; capture; new; call cuMemAllocAsync &a 1000 0 = 900; figures = 0 0; end_capture";
    check(&both_sources(), script);
    let script = "context 0; capture; new; call cuMemAlloc_v2 &a 1000 = 900; figures = 0 0; end_capture";
    check(&both_sources(), script);
}

#[test]
fn allocations_on_mig_slices_are_counted() {
    check_exact(
        &Standin::new().set("mig=1").with_each_source(),
        "call cuMemAlloc_v2 &a 1000; figures = 1000 0; call cuMemFree_v2 a; figures = 0 1000",
    );
}
