use std::time::Duration;

/// The kind of measurement, which determines how far the numbers of a trace can be trusted.
///
/// ```
/// use gpumem::Gauge;
///
/// assert_eq!("sampled".parse(), Ok(Gauge::Sampled));
/// assert_eq!(Gauge::Exact.to_string(), "exact");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gauge {
    // The discriminants are the values in recordings.
    /// Each allocation of this process on the device is intercepted, by the driver's dispatch table or CUPTI (see
    /// [`Source`](super::Source)), or reported by the simulated device. The numbers are exact to the byte.
    Exact = 0,
    /// The whole device is sampled, with all its processes. A peak between two samples is missed.
    Sampled = 2,
    /// Nothing is measured, because there is no GPU or it cannot be read. All numbers are 0 and have no meaning.
    Off = 3,
}

impl Gauge {
    /// Returns the name in JSON, in `GPUMEM_GAUGE` and in `#[gpu_mem_trace(gauge = "…")]`.
    ///
    /// ```
    /// assert_eq!(gpumem::Gauge::Sampled.name(), "sampled");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Sampled => "sampled",
            Self::Off => "off",
        }
    }
}

/// How the memory that the driver takes by itself is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverGauge {
    /// By NVML, which lists this process with its memory.
    Process,
    /// By the memory of the device, which no other process used when this one started.
    Device,
    /// By the memory of the device, which other processes may use. The values are upper bounds.
    AtMost,
}

impl DriverGauge {
    /// Returns the name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Device => "device",
            Self::AtMost => "at most",
        }
    }
}

named!(DriverGauge);

parse_error! {
    /// The error for a text that is not the name of a [`Gauge`].
    ///
    /// ```
    /// let error = "fast".parse::<gpumem::Gauge>().unwrap_err();
    /// assert!(error.to_string().starts_with("`fast` is not a gauge"));
    /// ```
    ParseGaugeError: "is not a gauge; write exact, sampled or off"
}

named!(Gauge from Exact, Sampled, Off else ParseGaugeError);

/// The number of samples of a trace with [`Gauge::Sampled`].
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Gauge, GpuMemTrace};
/// let trace = GpuMemTrace::builder().gauge(Gauge::Sampled).start()?;
/// let sampling = trace.data().sampling.unwrap();
/// println!("{} readings, {:?} apart at most", sampling.readings, sampling.longest_gap);
/// # assert!(sampling.readings > 0);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sampling {
    /// The requested time between two samples (`GPUMEM_SAMPLE_MS`, 1 ms by default).
    pub every: Duration,
    /// The number of samples, including those at the start and at the end.
    pub readings: u64,
    /// The longest time between two samples. A peak that was shorter may have been missed.
    pub longest_gap: Duration,
}
