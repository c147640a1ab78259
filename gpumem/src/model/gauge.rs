use std::{fmt, str::FromStr, time::Duration};

/// How far the numbers of a trace can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gauge {
    /// Every allocation of this process on the device was heard: used and peaked are right to the byte.
    Exact,
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
        write!(f, "`{}` is not a gauge; write exact, sampled or off", self.0)
    }
}

impl std::error::Error for ParseGaugeError {}

impl FromStr for Gauge {
    type Err = ParseGaugeError;

    fn from_str(text: &str) -> Result<Self, ParseGaugeError> {
        [Self::Exact, Self::Sampled, Self::Off]
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
