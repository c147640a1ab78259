//! One error type for the crate, its predicates, and the causes that it keeps.
//!
//! Every message is in `message.rs`: what the error is about, why it happened, and what to do next.

mod message;
#[cfg(test)]
mod tests;

use std::{
    error::Error as StdError,
    fmt, io,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::Arc,
    time::Duration,
};

/// `Result` with the crate's [`Error`].
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// fn free_memory() -> gpumem::Result<gpumem::Bytes> {
///     Ok(gpumem::try_gpu_mem_get(0)?.free)
/// }
/// # assert_eq!(free_memory()?, gpumem::Bytes::gib(16));
/// # Ok::<(), gpumem::Error>(())
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of a query about GPU memory, or of an action that failed.
///
/// The message names the thing, the cause and the next step. It is complete: the text of [`source`](StdError::source) is part of
/// it. `Debug` prints the same text, because `main` prints the `Debug` of the error that it returns.
///
/// Programs branch on the predicates, not on the text. More than one may be true: a child of `fork` is
/// [`is_forked`](Self::is_forked) and [`is_unavailable`](Self::is_unavailable).
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// match gpumem::try_gpu_mem_get(0) {
///     Ok(memory) => println!("{memory}"),
///     Err(error) if error.is_unavailable() => println!("no numbers: {error}"), // go on without
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: Kind,
    /// The error of another library, for [`StdError::source`]. Two errors of one kind are equal whatever their causes are, because
    /// the message contains the cause's text.
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The kind of an [`Error`]. `gpumem` does not export it.
#[allow(missing_docs, reason = "the fields have plain names")]
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A driver library is missing or cannot be loaded.
    NoLibrary { library: &'static str, detail: String },
    /// A driver library lacks a function that is needed.
    NoSymbol { library: &'static str, symbol: String },
    /// A call of a driver library failed. `device` is the device that the call was about, if any. `fatal` means that no later call
    /// can succeed.
    Call { library: &'static str, call: &'static str, code: u32, name: String, device: Option<u32>, fatal: bool },
    /// There is no device with this ordinal.
    NoDevice { ordinal: u32, count: u32, simulated: bool },
    /// The driver's answer did not contain the value.
    NoMemoryInfo { source: &'static str, device: u32 },
    /// A reading would have to create a CUDA context.
    NoContext { ordinal: u32, why: Box<Error> },
    /// This build has no way to reach a GPU.
    NotBuilt { feature: &'static str },
    /// The gauge is not available on this device.
    NoGauge { gauge: &'static str, why: &'static str },
    /// The driver's dispatch table cannot be used.
    NoDispatch { detail: String },
    /// Neither source of allocations can be used.
    NoSource { dispatch: Error, cupti: Error },
    /// Allocations are already intercepted through a source other than the requested one.
    OtherSource { requested: &'static str, using: &'static str },
    /// Another tool holds CUPTI's only subscription. `holder` is its name, empty if CUPTI does not report it.
    Busy { holder: String },
    /// The process is the child of a fork.
    Forked,
    /// No known block starts at this address. `why` is the reason if no blocks are known at all.
    UnknownBlock { address: u64, why: Option<Box<Error>> },
    /// A setting has a value that cannot be used.
    BadSetting { setting: &'static str, detail: String },
    /// The file of a baseline cannot be used.
    BadBaseline { file: String, detail: String },
    /// The driver, or the thread that reads debug information, did not answer in time.
    NoAnswer { within: Duration },
    /// A custom gauge's function did not return a value.
    CustomGauge { name: String, detail: String },
    /// The operating system failed to start a thread.
    NoThread { detail: String },
    /// The simulated device is full.
    SimulatedOutOfMemory { device: u32, requested: String, free: String, total: String },
    /// A call that a simulated device does not support.
    SimulatedMisuse { device: u32, detail: &'static str },
}

/// An error never changes after its creation, so a panic cannot leave one half changed.
impl UnwindSafe for Inner {}
impl RefUnwindSafe for Inner {}

impl Error {
    /// Returns whether nothing can be measured here: there is no driver or no device, or this build cannot use one. Most programs
    /// continue without measurements.
    pub fn is_unavailable(&self) -> bool {
        match &self.0.kind {
            Kind::NoLibrary { .. }
            | Kind::NoSymbol { .. }
            | Kind::NotBuilt { .. }
            | Kind::NoMemoryInfo { .. }
            | Kind::NoContext { .. }
            | Kind::NoGauge { .. }
            | Kind::NoDispatch { .. }
            | Kind::OtherSource { .. }
            | Kind::Forked => true,
            Kind::NoSource { cupti, .. } => cupti.is_unavailable(),
            Kind::Call { fatal, .. } => *fatal,
            Kind::NoDevice { count, .. } => *count == 0,
            Kind::UnknownBlock { why, .. } => why.as_ref().is_some_and(|why| why.is_unavailable()),
            _ => false,
        }
    }

    /// Returns whether a driver library, or a function in it, is missing: the NVIDIA driver or CUPTI is not installed, too old, or
    /// not visible in this container.
    pub fn is_missing_library(&self) -> bool {
        matches!(self.0.kind, Kind::NoLibrary { .. } | Kind::NoSymbol { .. })
            || self.any_cause(Self::is_missing_library)
    }

    /// Returns whether CUPTI was requested, but another tool holds its only subscription.
    pub fn is_busy(&self) -> bool {
        matches!(self.0.kind, Kind::Busy { .. }) || self.any_cause(Self::is_busy)
    }

    /// Returns whether this process has no device with the requested ordinal.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let error = gpumem::try_gpu_mem_get(99).unwrap_err();
    /// assert!(error.is_unknown_device());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn is_unknown_device(&self) -> bool {
        matches!(self.0.kind, Kind::NoDevice { .. })
    }

    /// Returns whether a setting (an environment variable or an argument) has a value that cannot be used.
    pub fn is_invalid_setting(&self) -> bool {
        matches!(self.0.kind, Kind::BadSetting { .. })
    }

    /// Returns whether an allocation failed because the device did not have enough free memory.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let error = gpu.alloc(gpumem::Bytes::gib(17)).unwrap_err(); // of 16 GiB
    /// assert!(error.is_out_of_memory());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn is_out_of_memory(&self) -> bool {
        match &self.0.kind {
            Kind::Call { name, .. } => name == "CUDA_ERROR_OUT_OF_MEMORY",
            Kind::SimulatedOutOfMemory { .. } => true,
            _ => false,
        }
    }

    /// Returns whether this process is a fork of a process that used gpumem. CUDA does not work in it.
    pub fn is_forked(&self) -> bool {
        matches!(self.0.kind, Kind::Forked) || self.any_cause(Self::is_forked)
    }

    /// Returns whether no known block starts at the address.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let error = gpumem::tracker::label("weights", &[9], "f32", 0x1234).unwrap_err();
    /// assert!(error.is_unknown_block());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn is_unknown_block(&self) -> bool {
        matches!(self.0.kind, Kind::UnknownBlock { .. })
    }

    /// Returns the driver's own error code and name, such as `(15, "NVML_ERROR_GPU_IS_LOST")`.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// if let Err(error) = gpumem::try_gpu_mem_get(0) {
    ///     match error.code() {
    ///         Some((number, name)) => eprintln!("the driver says {name} ({number})"),
    ///         None => eprintln!("{error}"), // not an error of the driver
    ///     }
    /// }
    /// # assert_eq!(gpumem::try_gpu_mem_get(99).unwrap_err().code(), None);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn code(&self) -> Option<(u32, &str)> {
        match &self.0.kind {
            Kind::Call { code, name, .. } => Some((*code, name)),
            kind => kind.cause().and_then(Self::code),
        }
    }

    /// Sets the error of another library as the [`source`](StdError::source).
    #[doc(hidden)]
    #[must_use]
    pub fn because(mut self, cause: impl StdError + Send + Sync + 'static) -> Self {
        self.0.cause = Some(Arc::new(cause));
        self
    }

    /// Returns the error for a thread that cannot be started.
    #[doc(hidden)]
    #[must_use]
    pub fn no_thread(cause: io::Error) -> Self {
        Self::from(Kind::NoThread { detail: cause.to_string() }).because(cause)
    }

    fn any_cause(&self, holds: fn(&Self) -> bool) -> bool {
        self.0.kind.cause().is_some_and(holds)
    }
}

impl Kind {
    /// Returns the gpumem error that caused this one.
    fn cause(&self) -> Option<&Error> {
        match self {
            Self::NoContext { why, .. } | Self::UnknownBlock { why: Some(why), .. } => Some(why),
            // CUPTI is tried last. The message contains both reasons.
            Self::NoSource { cupti, .. } => Some(cupti),
            _ => None,
        }
    }
}

impl From<Kind> for Error {
    fn from(kind: Kind) -> Self {
        Self(Box::new(Inner { kind, cause: None }))
    }
}

impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        self.0.kind == other.0.kind
    }
}

impl Eq for Error {}

/// Writes the same text as `Display`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.kind, f)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.cause {
            Some(cause) => Some(cause.as_ref()),
            None => self.0.kind.cause().map(|cause| cause as &(dyn StdError + 'static)),
        }
    }
}
