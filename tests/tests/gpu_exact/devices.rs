//! Compares the device for which gpumem counts each block with the device that the driver reports.

use super::*;

/// Two devices and a trace of each.
struct Two {
    contexts: [Context; 2],
    traces: [GpuMemTrace; 2],
    live: [i64; 2],
    mismatches: Mismatches,
}

impl Two {
    /// Records where the driver put the block and where gpumem counts it.
    fn allocated(&mut self, what: &str, expected: usize, bytes: i64, at: Option<u64>) {
        const DEVICE_ORDINAL: u64 = 9;
        let driver = at.map(|at| {
            call_for_output("cuPointerGetAttribute", |ordinal| vec![ordinal, DEVICE_ORDINAL, at]).to_string()
        });
        self.changed(&format!("{what} (the driver says device {})", driver.unwrap_or("?".to_owned())), expected, bytes);
    }

    fn changed(&mut self, what: &str, on: usize, by: i64) {
        self.live[on] += by;
        let data = [0, 1].map(|device: usize| self.traces[device].data());
        let (used, missed) = (data.map(|data| data.used.get()), data.map(|data| data.lost + data.untracked));
        let message = format!("used on 0 and 1: {}, {}: {what}", mib(used[0]), mib(used[1]));
        println!("{message}");
        if (used, missed) != (self.live, [0, 0]) {
            self.mismatches.record(Err(format!("{message}; expected {:?}, lost or untracked {missed:?}", self.live)));
            // Each error is reported once.
            self.traces.iter_mut().for_each(GpuMemTrace::reset);
            self.live = [0, 0];
        }
    }
}

#[test]
fn two_devices_are_counted_separately() {
    let Some(_guard) = device() else { return };
    if device::count().is_ok_and(|count| count < 2) {
        gpumem_tests::skipped("no second GPU");
        return;
    }
    let contexts = [0, 1].map(Context::primary);
    let mut two = Two { contexts, traces: [0, 1].map(exact_on), live: [0, 0], mismatches: Mismatches::default() };
    let size = |mib: usize| mib * MIB;

    two.contexts[0].make_current();
    let zero = allocate(Way::Plain, size(10));
    two.allocated("cuMemAlloc with 0 current", 0, in_mib(10), Some(zero.name()));
    two.contexts[1].make_current();
    let one = allocate(Way::Plain, size(20));
    two.allocated("cuMemAlloc with 1 current", 1, in_mib(20), Some(one.name()));
    let stream_one = cu::stream();
    let pooled = allocate(Way::Async, size(3));
    two.allocated("cuMemAllocAsync with 1 current, null stream", 1, in_mib(3), Some(pooled.name()));
    free_block(pooled);
    two.changed("freed", 1, in_mib(-3));

    two.contexts[0].make_current();
    let stream_zero = cu::stream();
    match try_call_for_output("cuMemAllocAsync", |at| vec![at, size(4) as u64, stream_one]) {
        (0, at) => {
            two.allocated("cuMemAllocAsync on a stream of 1 with 0 current", 1, in_mib(4), Some(at));
            call_ok("cuMemFreeAsync", &[at, stream_one]);
            two.changed("cuMemFreeAsync on a stream of 1 with 0 current", 1, in_mib(-4));
        }
        (error, _) => println!("cuMemAllocAsync on a stream of 1 with 0 current is refused: {error}"),
    }

    let both = [[0, 1], [1, 0]].map(|[from, to]| call_for_output("cuDeviceCanAccessPeer", |can| vec![can, from, to]))
        == [1, 1];
    println!("peer access: {both}");
    for (what, pool, own) in
        [("a pool made on 1", cu::pool_create(1), true), ("the default pool of 1", cu::default_pool(1), false)]
    {
        if both {
            call_ok("cuMemPoolSetAccess", &[pool, cu::address(&cu::access_of(0)), 1]);
        }
        match try_call_for_output("cuMemAllocFromPoolAsync", |at| vec![at, size(5) as u64, pool, stream_zero]) {
            (0, at) => {
                two.allocated(&format!("cuMemAllocFromPoolAsync from {what}, stream of 0"), 1, in_mib(5), Some(at));
                call_ok("cuMemFreeAsync", &[at, stream_zero]);
                two.changed("cuMemFreeAsync on a stream of 0", 1, in_mib(-5));
            }
            (error, _) => println!("cuMemAllocFromPoolAsync from {what} on a stream of 0 is refused: {error}"),
        }
        call_ok("cuStreamSynchronize", &[stream_zero]);
        if own {
            call_ok("cuMemPoolDestroy", &[pool]);
        }
    }

    let (bytes, properties) = (cu::granularity(1), cu::properties_on(1));
    let handle = call_for_output("cuMemCreate", |handle| vec![handle, bytes, cu::address(&properties), 0]);
    let by = bytes.cast_signed();
    two.allocated("cuMemCreate located on 1 with 0 current", 1, by, None);
    call_ok("cuMemRelease", &[handle]);
    two.changed("cuMemRelease", 1, -by);

    if both {
        for [from, to] in [two.contexts, [two.contexts[1], two.contexts[0]]] {
            from.make_current();
            call_ok("cuCtxEnablePeerAccess", &[to.0, 0]);
        }
        two.changed("peer access enabled", 1, 0);
    }
    two.contexts[0].make_current();
    let [from, to] = two.contexts.map(|context| context.0);
    call_ok("cuMemcpyPeer", &[one.name(), to, zero.name(), from, size(10) as u64]);
    two.changed("cuMemcpyPeer", 1, 0);
    free_block(one);
    two.changed("cuMemFree of 1's with 0 current", 1, in_mib(-20));
    free_block(zero);
    two.changed("cuMemFree of 0's", 0, in_mib(-10));
    for (context, stream) in two.contexts.into_iter().zip([stream_zero, stream_one]) {
        context.make_current();
        call_ok("cuStreamDestroy_v2", &[stream]);
    }
    two.contexts[0].make_current();
    two.mismatches.assert_none();
}
