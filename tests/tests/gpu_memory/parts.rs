//! Tests that the parts of the breakdown add up to what the device has in use.

use super::{
    running_out::{free_block, take},
    *,
};

pub(super) fn parts() {
    let mut wrong = Wrong::default();
    result::init().expect("GPUMEM_DEVICE says that there is a driver");
    checked_breakdown("before the context", &mut wrong);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    checked_breakdown("after the context", &mut wrong);
    let stream = context.default_stream().cu_stream();
    subscribe().expect("allocations can be intercepted");

    let [inside, outside] = GpuMemTrace::scope("load", |_| {
        let plain = take(256 * MIB).expect("the device has room");
        // SAFETY: the null stream belongs to the current context. The memory is never read.
        let pooled = unsafe { result::malloc_async(stream, 64 * MIB + 1) }.expect("the device has room");
        let inside = GpuMemTrace::scope("step", |_| {
            let block = take(3 * MIB).expect("the device has room");
            let inside = checked_breakdown("inside both scopes", &mut wrong);
            free_block(block);
            inside
        });
        let outside = checked_breakdown("after the inner scope", &mut wrong);
        free_block(plain);
        // SAFETY: the block came from `malloc_async` and is freed once.
        unsafe { result::free_async(pooled, stream) }.expect("it was allocated");
        [inside, outside]
    });
    for (reported, expected) in [(&inside, 323 * MIB + 1), (&outside, 320 * MIB + 1)] {
        let of_scopes = of_kind(reported, PartKind::Scope);
        wrong.unless(of_scopes == expected as u64, || format!("scopes have {of_scopes} B, not {expected} B"));
    }
    let drivers = [&inside, &outside].map(|reported| of_kind(reported, PartKind::Driver));
    let is_same = drivers[0] > 0 && drivers[0].abs_diff(drivers[1]) <= 64 << 20;
    wrong.unless(is_same, || format!("the driver's part is missing or not the same: {drivers:?}"));
    let counts = status();
    wrong.unless((counts.untracked, counts.lost) == (0, 0), || format!("something was missed: {counts}"));
    wrong.end();
}
