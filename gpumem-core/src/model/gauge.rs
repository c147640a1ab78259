use std::{fmt, str::FromStr, time::Duration};

/// How far the numbers of a trace can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gauge {
    /// Every allocation of this process on the device was intercepted, through the driver's dispatch table or CUPTI (see
    /// [`Source`](super::Source)), or reported by the simulated device: used and peaked are right to the byte.
    Exact,
    /// The driver's own high-water mark of one stream-ordered pool: what this process has in the device's current pool
    /// (cudarc's `alloc`, `cudaMallocAsync`) and the most of it, however short a block's life. Allocations are
    /// not intercepted for it. Only where it is asked for, because **all other memory is not in it**: `cuMemAlloc`, other pools,
    /// other processes.
    ///
    /// There is one mark for each pool, so it is reset when a trace starts and when one is reset; what was read before is kept
    /// for the traces that are open. A program that reads `CU_MEMPOOL_ATTR_USED_MEM_HIGH` itself sees these resets. Not seen
    /// is memory that other threads take *and* give back between the reading and the reset: some 30 ns, longer if the thread
    /// loses its processor just there. A reset by others, or another pool made current, is told by
    /// [`Trace::lost`](super::Trace::lost) where it shows: when the mark reads lower than it is known to have been.
    Pool,
    /// The whole device was polled, all processes on it: a peak between two readings is missed.
    Sampled,
    /// Nothing was measured: there is no GPU, or it cannot be read. The numbers are zeros and mean nothing.
    Off,
}

impl Gauge {
    /// The name in JSON, in `GPUMEM_GAUGE` and in `#[gpu_mem_trace(gauge = "…")]`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Pool => "pool",
            Self::Sampled => "sampled",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Gauge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no [`Gauge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseGaugeError(String);

impl fmt::Display for ParseGaugeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a gauge; write exact, pool, sampled or off", self.0)
    }
}

impl std::error::Error for ParseGaugeError {}

impl FromStr for Gauge {
    type Err = ParseGaugeError;

    fn from_str(text: &str) -> Result<Self, ParseGaugeError> {
        [Self::Exact, Self::Pool, Self::Sampled, Self::Off]
            .into_iter()
            .find(|gauge| text.trim().eq_ignore_ascii_case(gauge.name()))
            .ok_or_else(|| ParseGaugeError(text.to_owned()))
    }
}

/// How well a [`Gauge::Sampled`] trace was sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// The wanted time between two readings (`GPUMEM_SAMPLE_MS`, 1 ms unless told otherwise).
    pub every: Duration,
    /// Readings taken between start and end, both included.
    pub readings: u64,
    /// The longest time between two neighbouring readings: a peak shorter than this can have been missed.
    pub longest_gap: Duration,
}
