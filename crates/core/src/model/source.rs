/// The source of the numbers of a trace.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::intercept::Source;
/// let trace = gpumem::GpuMemTrace::new();
/// assert_eq!(trace.data().source, Source::Simulation); // with a GPU: Source::Dispatch
/// assert_eq!("cupti".parse(), Ok(Source::Cupti)); // as in GPUMEM_SOURCE
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    // The discriminants are the values in recordings.
    /// gpumem's hooks in the driver's dispatch table. They observe each allocation of this process, cost almost nothing, and
    /// work while a profiler runs. Linux only.
    Dispatch = 0,
    /// CUPTI's callbacks. They observe each allocation of this process. After CUPTI is loaded, each driver call is slower.
    Cupti = 1,
    /// The simulated device, which reports its allocations itself.
    Simulation = 2,
    /// Samples of the whole device, one in each millisecond (`GPUMEM_SAMPLE_MS`).
    Sampling = 4,
    /// A function of the program, which is called at the same interval: see
    /// [`Gauge::custom`](crate::model::Gauge::custom).
    Custom = 6,
    /// Nothing is measured.
    Off = 5,
}

impl Source {
    /// Returns the name in JSON. For the first two, it is also the name in `GPUMEM_SOURCE`.
    ///
    /// ```
    /// assert_eq!(gpumem::intercept::Source::Dispatch.name(), "dispatch");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Cupti => "cupti",
            Self::Simulation => "simulation",
            Self::Sampling => "sampling",
            Self::Custom => "custom",
            Self::Off => "off",
        }
    }
}

parse_error! {
    /// The error for a text that is not the name of a [`Source`] that can be chosen.
    ///
    /// ```
    /// let error = "strace".parse::<gpumem::intercept::Source>().unwrap_err();
    /// assert!(error.to_string().starts_with("`strace` is not a source"));
    /// ```
    ParseSourceError: "is not a source of allocations; write dispatch or cupti"
}

named!(Source from Dispatch, Cupti else ParseSourceError);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_that_can_be_chosen_are_read() {
        for (text, source) in [("dispatch", Source::Dispatch), (" CUPTI ", Source::Cupti)] {
            assert_eq!(text.parse(), Ok(source));
        }
        for text in ["", "auto", "sampling", "custom", "simulation", "nsys"] {
            assert_eq!(text.parse::<Source>(), Err(ParseSourceError(text.to_owned())));
        }
    }
}
