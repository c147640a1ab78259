use super::{ByteDelta, Bytes, Gauge, Sampling, Source};

/// The numbers of a trace at one reading.
///
/// S is the memory in use at the start (or at the last reset), E at the reading, and P the most in between, S and E included.
/// Then `used = E − S` and `peaked = P − max(S, E)`. Thus `peaked` is the memory that was needed for some time in addition to the
/// larger of S and E. `peaked` is never negative, and `P − S = max(used, 0) + peaked`.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, GpuMemTrace};
/// let trace = GpuMemTrace::new();
/// let kept = gpu.alloc(Bytes::mib(20))?;
/// drop(gpu.alloc(Bytes::mib(100))?);
/// assert_eq!(trace.data().used.mb(), 20); // more in use than at the start
/// assert_eq!(trace.data().peaked.mb(), 100); // needed for some time, on top of these 20
/// # drop(kept);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trace {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The kind of measurement, which determines how far the numbers can be trusted.
    pub gauge: Gauge,
    /// The source of the numbers.
    pub source: Source,
    /// The change of the memory in use since the start. Negative if more was freed than allocated.
    pub used: ByteDelta,
    /// The memory that was needed at the peak above the memory in use at the start or now, whichever is larger.
    pub peaked: Bytes,
    /// The number of samples of the device. `None` unless the gauge is [`Gauge::Sampled`].
    pub sampling: Option<Sampling>,
    /// True if the device could not be read now, or at the start; then the numbers are from the last readings that succeeded. Also
    /// true if the scope itself could not be read, as in the child of a fork; then they are 0. Reports print `?`.
    pub stale: bool,
    /// The memory that threads in no scope allocated or freed while traces of several threads were open, in bytes, and such memory
    /// from before the trace that was freed in it. This memory counts in each of these traces, unless the thread is
    /// [adopted](https://docs.rs/gpumem/latest/gpumem/struct.GpuMemTraceBuilder.html#method.adopt): then it counts for the thread
    /// whose scope was opened last. The memory may belong to another trace. Reports show this number if it is not 0.
    pub shared: Bytes,
    /// The device on which the thread that opened this trace, or the threads in its task, allocated since the start, if they
    /// allocated nothing on `device`. The trace then probably measures the wrong device, and reports show this. Also `None` if
    /// this is not known.
    pub allocated_on: Option<u32>,
    /// Frees of unknown blocks whose size is not known, in the whole process, while the trace was open. Most of these blocks are
    /// older than the first trace, and `used` may then be too high; a block that was allocated by a call that is not intercepted
    /// was never counted.
    pub untracked: u64,
    /// Events of the whole process that were not recorded while the trace was open, plus functions of the driver that
    /// another tool replaced, so that their calls are missed, plus calls of registered pools that cannot be right. If this is not 0, the
    /// numbers may be wrong.
    pub lost: u64,
    /// The numbers for the driver's blocks of the whole process on the device, if a pool was registered there (`gpumem::pool`).
    /// The other numbers count the parts of the pool instead of its blocks.
    pub driver: Option<DriverUsage>,
}

/// The numbers for only the driver's blocks, on a device with a registered pool. The fields have the same meaning as in
/// [`Trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverUsage {
    /// The change since the start.
    pub used: ByteDelta,
    /// The memory that was needed at the peak above the memory in use at the start or now, whichever is larger.
    pub peaked: Bytes,
}

impl DriverUsage {
    #[doc(hidden)]
    pub const fn new(used: ByteDelta, peaked: Bytes) -> Self {
        Self { used, peaked }
    }
}

/// Joins the numbers of a span with those of a second span that started at its end.
fn joined(first: (ByteDelta, Bytes), next: (ByteDelta, Bytes)) -> (ByteDelta, Bytes) {
    let over_start = |(used, peaked): (ByteDelta, Bytes)| used.get().max(0) + peaked.get().cast_signed();
    let used = first.0.get().saturating_add(next.0.get());
    let peak = over_start(first).max(first.0.get().saturating_add(over_start(next)));
    (ByteDelta::new(used), Bytes::new((peak - used.max(0)).unsigned_abs()))
}

impl Trace {
    /// Returns `P − S`: how far the peak was above the memory in use at the start.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{Bytes, GpuMemTrace};
    /// # let trace = GpuMemTrace::new();
    /// let kept = gpu.alloc(Bytes::mib(20))?;
    /// drop(gpu.alloc(Bytes::mib(100))?);
    /// assert_eq!(trace.data().peak_over_start().mb(), 120);
    /// # drop(kept);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn peak_over_start(&self) -> Bytes {
        Bytes::new(self.used.get().max(0).unsigned_abs()) + self.peaked
    }

    /// Returns whether the numbers are valid: the gauge is not `Off`, and the readings succeeded.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let trace = gpumem::GpuMemTrace::new();
    /// let data = trace.data();
    /// if !data.is_measured() {
    ///     println!("the numbers mean nothing: gauge {}", data.gauge);
    /// }
    /// # assert!(data.is_measured());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn is_measured(&self) -> bool {
        self.gauge != Gauge::Off && !self.stale
    }

    /// Joins this trace with one that started at its last reading.
    #[doc(hidden)]
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let (used, peaked) = joined((self.used, self.peaked), (next.used, next.peaked));
        let driver = self.driver.or(next.driver).map(|_| {
            let [first, next] = [&self, &next]
                .map(|trace| trace.driver.map_or((trace.used, trace.peaked), |driver| (driver.used, driver.peaked)));
            let (used, peaked) = joined(first, next);
            DriverUsage { used, peaked }
        });
        let sampling = self.sampling.zip(next.sampling).map(|(first, second)| Sampling {
            every: first.every,
            readings: first.readings + second.readings - 1,
            longest_gap: first.longest_gap.max(second.longest_gap),
        });
        Self {
            used,
            peaked,
            sampling,
            stale: self.stale || next.stale,
            shared: self.shared + next.shared,
            // This already concerns both parts.
            allocated_on: next.allocated_on,
            untracked: self.untracked.saturating_add(next.untracked),
            lost: self.lost.saturating_add(next.lost),
            driver,
            ..self
        }
    }

    /// Returns a trace whose scope could not be read, for example in the child of a fork.
    #[doc(hidden)]
    pub fn stale(device: u32, gauge: Gauge) -> Self {
        Self { stale: true, gauge, ..Self::off(device) }
    }

    /// Returns a trace that measures nothing.
    #[doc(hidden)]
    pub fn off(device: u32) -> Self {
        Self {
            device,
            simulated: false,
            gauge: Gauge::Off,
            source: Source::Off,
            used: ByteDelta::ZERO,
            peaked: Bytes::ZERO,
            sampling: None,
            stale: false,
            shared: Bytes::ZERO,
            allocated_on: None,
            untracked: 0,
            lost: 0,
            driver: None,
        }
    }
}
