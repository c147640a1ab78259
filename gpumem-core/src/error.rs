//! The one error of the crate, and every message in one place: what it is about, why, and what to do next.

use std::{fmt, time::Duration};

/// `Result` with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why something about GPU memory could not be said or done.
///
/// The message names the thing, the cause and the next step. Programs branch on the predicates, not on the text.
#[derive(Clone, PartialEq, Eq)]
pub struct Error(Box<Kind>);

/// What an [`Error`] is about. `gpumem` does not export it.
#[allow(missing_docs, reason = "the fields have plain names")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A driver library is not there or cannot be loaded.
    NoLibrary { library: &'static str, detail: String },
    /// A driver library lacks a function that is needed.
    NoSymbol { library: &'static str, symbol: String },
    /// A call of a driver library failed. `device` is said where it was about one.
    Call { library: &'static str, call: &'static str, code: u32, name: String, device: Option<u32>, fatal: bool },
    /// There is no device of that number.
    NoDevice { ordinal: u32, count: u32, simulated: bool },
    /// The source answered without a figure.
    NoFigure { source: &'static str, device: u32 },
    /// Reading would have to create a CUDA context.
    NoContext { ordinal: u32, why: Box<Error> },
    /// This build has no way to reach a GPU.
    NotBuilt { feature: &'static str },
    /// The gauge is not available on this device.
    NoGauge { gauge: &'static str, why: &'static str },
    /// The driver's dispatch table cannot be used.
    NoDispatch { detail: String },
    /// Neither of the sources of allocations can be used.
    NoSource { dispatch: Error, cupti: Error },
    /// Allocations are intercepted through another source than the one that was asked for.
    OtherSource { asked: &'static str, using: &'static str },
    /// Another tool holds what only one can hold; its name, if CUPTI tells it.
    Busy { holder: String },
    /// The process is the child of a fork.
    Forked,
    /// No block that is known begins at an address; why none is known, where that is so.
    UnknownBlock { address: u64, why: Option<Box<Error>> },
    /// A setting that cannot be understood.
    BadSetting { setting: &'static str, detail: String },
    /// The file of a baseline cannot be used.
    BadBaseline { file: String, detail: String },
    /// The driver, or who reads debug information, did not answer in time.
    NoAnswer { within: Duration },
    /// The error of a recorded program, as it was written there.
    Recorded { message: String },
    /// The operating system gave no thread.
    NoThread { detail: String },
    /// The simulated device is full.
    SimulatedOutOfMemory { device: u32, asked: String, free: String, total: String },
    /// Something that is not available from a simulated device.
    SimulatedMisuse { device: u32, detail: &'static str },
}

impl Error {
    /// The error of a recorded program.
    pub fn recorded(message: String) -> Self {
        Kind::Recorded { message }.into()
    }

    /// There is nothing to measure here: no driver, no device, or a build without them. Most programs go on.
    pub fn is_unavailable(&self) -> bool {
        match &*self.0 {
            Kind::NoLibrary { .. }
            | Kind::NoSymbol { .. }
            | Kind::NotBuilt { .. }
            | Kind::NoFigure { .. }
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

    /// CUPTI was requested, but another tool holds its only subscription.
    pub fn is_busy(&self) -> bool {
        match &*self.0 {
            Kind::Busy { .. } => true,
            Kind::NoSource { cupti, .. } => cupti.is_busy(),
            _ => false,
        }
    }

    /// This gauge is not available on the device.
    pub fn is_no_gauge(&self, asked: &str) -> bool {
        matches!(*self.0, Kind::NoGauge { gauge, .. } if gauge == asked)
    }

    /// The number names no device of this process.
    pub fn is_unknown_device(&self) -> bool {
        matches!(*self.0, Kind::NoDevice { .. })
    }

    /// A setting (an environment variable, an argument) cannot be understood.
    pub fn is_invalid_setting(&self) -> bool {
        matches!(*self.0, Kind::BadSetting { .. })
    }

    /// Memory was asked for and there was not enough.
    pub fn is_out_of_memory(&self) -> bool {
        match &*self.0 {
            Kind::Call { name, .. } => name == "CUDA_ERROR_OUT_OF_MEMORY",
            Kind::SimulatedOutOfMemory { .. } => true,
            _ => false,
        }
    }

    /// The driver's own error number and name, such as `(15, "NVML_ERROR_GPU_IS_LOST")`.
    pub fn code(&self) -> Option<(u32, &str)> {
        match &*self.0 {
            Kind::Call { code, name, .. } => Some((*code, name)),
            Kind::NoContext { why, .. } | Kind::UnknownBlock { why: Some(why), .. } => why.code(),
            Kind::NoSource { cupti, .. } => cupti.code(),
            _ => None,
        }
    }
}

impl From<Kind> for Error {
    fn from(kind: Kind) -> Self {
        Self(Box::new(kind))
    }
}

/// The same words as `Display`: `main` prints the error that it returns by its `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Kind::NoLibrary { library: library @ "libcupti", detail } => write!(
                f,
                "cannot load {library}: {detail}; it comes with the CUDA toolkit (extras/CUPTI/lib64) and with the PyPI \
                 package nvidia-cuda-cupti; GPUMEM_CUPTI names the file or its folder"
            ),
            Kind::NoLibrary { library, detail } => write!(
                f,
                "cannot load {library}: {detail}; is the NVIDIA driver installed, and in a container, was it started \
                 with GPU access (--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)?"
            ),
            Kind::NoSymbol { library: library @ "libcupti", symbol } => {
                write!(f, "{library} has no {symbol}: it is too old or damaged; GPUMEM_CUPTI names another")
            }
            Kind::NoSymbol { library, symbol } => {
                write!(f, "{library} has no {symbol}: the NVIDIA driver is too old or damaged; update the driver")
            }
            Kind::Call { library, call, code, name, device, .. } => {
                write!(f, "{library}: {call}")?;
                if let Some(device) = device {
                    write!(f, " for device {device}")?;
                }
                write!(f, " failed with {name} ({code}); {}", next_step(name))
            }
            Kind::NoDevice { ordinal, count, simulated } => no_device(f, *ordinal, *count, *simulated),
            Kind::NoFigure { source, device } => write!(
                f,
                "{source} gives no memory figures for device {device}: virtual GPUs and WSL may not report them; compare \
                 nvidia-smi"
            ),
            Kind::NoContext { ordinal, why } => write!(
                f,
                "cannot read device {ordinal} without creating a CUDA context (about half a GiB), since NVML cannot be \
                 used: {why}; or create the context first, for example with gpumem::preload()"
            ),
            Kind::NotBuilt { feature } => {
                write!(f, "gpumem was built without the feature `{feature}`; enable it in Cargo.toml")
            }
            Kind::NoGauge { gauge, why } => write!(f, "the gauge `{gauge}` is not available: {why}"),
            Kind::NoDispatch { detail } => write!(
                f,
                "cannot use the dispatch table of libcuda: {detail}; without it allocations are intercepted through CUPTI, \
                 where that is installed"
            ),
            Kind::NoSource { dispatch, cupti } => write!(f, "{cupti}; and {dispatch}"),
            Kind::OtherSource { asked, using } => write!(
                f,
                "cannot use the source `{asked}`: allocations are intercepted through `{using}` already; leave \
                 the source out, or start the program with GPUMEM_SOURCE={asked}"
            ),
            Kind::Busy { holder } => {
                let holder = if holder.is_empty() { "another profiler" } else { holder };
                write!(
                    f,
                    "cannot subscribe to CUPTI: {holder} holds the only subscription \
                     (CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED); end it, or use GPUMEM_GAUGE=sampled"
                )
            }
            Kind::Forked => f.write_str(
                "this process was forked from one that used gpumem, and CUDA does not work in it; start it with \
                 std::process::Command, or trace in it alone",
            ),
            Kind::UnknownBlock { address, why: None } => write!(
                f,
                "no block that is known begins at {address:#x}: those are known that were allocated since the first trace \
                 (or gpumem::subscribe()), by the address at which they begin"
            ),
            Kind::UnknownBlock { address, why: Some(why) } => {
                write!(f, "the block at {address:#x} is not known, because {why}")
            }
            Kind::BadSetting { setting, detail } => write!(f, "cannot use {setting}: {detail}"),
            Kind::BadBaseline { file, detail } => write!(f, "cannot use the baseline {file}: {detail}"),
            Kind::NoAnswer { within } => {
                write!(f, "that was not found out within {within:?}; ask gpumem::breakdown() or nvidia-smi later")
            }
            Kind::Recorded { message } => f.write_str(message),
            Kind::NoThread { detail } => {
                write!(f, "cannot start a thread: {detail}; raise the limit on threads (ulimit -u)")
            }
            Kind::SimulatedOutOfMemory { device, asked, free, total } => write!(
                f,
                "simulated device {device} is out of memory: asked for {asked}, {free} of {total} are free; free blocks \
                 or simulate a larger device"
            ),
            Kind::SimulatedMisuse { device, detail } => write!(f, "simulated device {device}: {detail}"),
        }
    }
}

fn no_device(f: &mut fmt::Formatter<'_>, ordinal: u32, count: u32, simulated: bool) -> fmt::Result {
    let last = count.saturating_sub(1);
    match (simulated, count) {
        (true, _) => {
            write!(f, "no simulated device {ordinal}: there are 0 to {last}; see GPUMEM_SIM and SimGpu::install")
        }
        (false, 0) => {
            write!(f, "no device {ordinal}: no CUDA device is visible; look at CUDA_VISIBLE_DEVICES and nvidia-smi")
        }
        (false, _) => {
            write!(f, "no device {ordinal}: this process sees CUDA devices 0 to {last}; look at CUDA_VISIBLE_DEVICES")
        }
    }
}

/// What to do about an error of the driver, where there is more to say than "look it up".
fn next_step(name: &str) -> &'static str {
    match name {
        "NVML_ERROR_DRIVER_NOT_LOADED" => "load the NVIDIA kernel module (modprobe nvidia) or reinstall the driver",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH" | "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" => {
            "the driver was updated while in use: reboot, or reload the NVIDIA kernel modules"
        }
        "NVML_ERROR_NO_PERMISSION" | "CUDA_ERROR_NOT_PERMITTED" => {
            "the user may not talk to the GPU: look at the permissions of /dev/nvidia*"
        }
        "NVML_ERROR_GPU_IS_LOST" | "NVML_ERROR_RESET_REQUIRED" | "CUDA_ERROR_DEVICE_UNAVAILABLE" => {
            "the GPU has fallen off the bus or needs a reset: look at dmesg for Xid messages"
        }
        "NVML_ERROR_NOT_SUPPORTED" => "this GPU does not offer it (virtual GPUs and WSL may not)",
        "NVML_ERROR_NOT_FOUND" => "the device is gone, or not visible to NVML in this container: compare nvidia-smi -L",
        "CUDA_ERROR_NO_DEVICE" => "no CUDA device is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" | "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" => {
            "a stream is being captured: call this before or after the capture"
        }
        "CUDA_ERROR_STUB_LIBRARY" => {
            "the toolkit's stub of libcuda was loaded: take the stubs folder out of LD_LIBRARY_PATH"
        }
        "CUDA_ERROR_OUT_OF_MEMORY" => "the device is full: see which processes hold it with nvidia-smi",
        _ => "look the name up in NVIDIA's documentation, and see dmesg and nvidia-smi",
    }
}
