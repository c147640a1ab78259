use std::{fmt, str::FromStr};

/// What the numbers of a trace come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// gpumem's own functions in the driver's dispatch table: every allocation of this process, at almost no cost, beside any
    /// profiler. Linux only.
    Dispatch,
    /// CUPTI's callbacks: every allocation of this process. Each driver call is slower from the moment CUPTI is loaded.
    Cupti,
    /// The simulated device, which reports its allocations itself.
    Simulation,
    /// The high-water mark that the driver keeps of one stream-ordered pool.
    PoolMark,
    /// Readings of the whole device, a millisecond apart (`GPUMEM_SAMPLE_MS`).
    Sampling,
    /// None: nothing is measured.
    Off,
}

impl Source {
    /// The name in JSON and, of the first two, in `GPUMEM_SOURCE`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Cupti => "cupti",
            Self::Simulation => "simulation",
            Self::PoolMark => "pool mark",
            Self::Sampling => "sampling",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no [`Source`] which can be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseSourceError(String);

impl fmt::Display for ParseSourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a source of allocations; write dispatch or cupti", self.0)
    }
}

impl std::error::Error for ParseSourceError {}

/// Of the sources that can be chosen: `dispatch` and `cupti`.
impl FromStr for Source {
    type Err = ParseSourceError;

    fn from_str(text: &str) -> Result<Self, ParseSourceError> {
        [Self::Dispatch, Self::Cupti]
            .into_iter()
            .find(|source| text.trim().eq_ignore_ascii_case(source.name()))
            .ok_or_else(|| ParseSourceError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_can_be_chosen_are_read() {
        for (text, source) in [("dispatch", Source::Dispatch), (" CUPTI ", Source::Cupti)] {
            assert_eq!(text.parse(), Ok(source));
        }
        for text in ["", "auto", "sampling", "simulation", "nsys"] {
            assert_eq!(text.parse::<Source>(), Err(ParseSourceError(text.to_owned())));
        }
    }
}
