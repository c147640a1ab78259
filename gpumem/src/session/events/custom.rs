//! A custom gauge of the program.

use crate::{
    model::CustomGauge,
    source::{self, ask_for_each_trace},
};

/// Sets the gauge of traces that request no other, unless `GPUMEM_GAUGE` does: guards, attributes, lines and budgets. Use this
/// for memory that gpumem cannot see, such as the memory of wgpu and Metal. `used` comes from the gauge's readings, and `peaked` from
/// the highest one; it is read every millisecond (`GPUMEM_SAMPLE_MS`). A gauge of the same name replaces the earlier one.
///
/// A trace that names a gauge, a device or a source does not use it. With such a gauge there are no blocks, no scopes in
/// `summary` and the like.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
///
/// use gpumem::{Gauge, GpuMemTrace};
///
/// static IN_USE: AtomicU64 = AtomicU64::new(0); // what an allocator of the program counts
///
/// gpumem::gauge::set_gauge(Gauge::custom("pool", || IN_USE.load(Relaxed)));
/// let trace = GpuMemTrace::with_ctx("load");
/// IN_USE.fetch_add(20 << 20, Relaxed);
/// assert_eq!(trace.data().used.mb(), 20);
/// drop(trace); // △Used Peaked MB:     20      0 (load: exit)
/// ```
pub fn set_gauge(gauge: CustomGauge) {
    source::set_gauge(gauge);
    // Traces may be off because there is no GPU.
    ask_for_each_trace();
}
