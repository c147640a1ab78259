//! The text of every error.

use std::fmt;

use super::Kind;

const NO_DISPATCH: &str = "cannot use the dispatch table of libcuda";

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { library: library @ "libcupti", detail } => write!(
                f,
                "cannot load {library}: {detail}; it comes with the CUDA toolkit (extras/CUPTI/lib64) and with the PyPI \
                 package nvidia-cuda-cupti; GPUMEM_CUPTI names the file or its folder"
            ),
            Self::NoLibrary { library, detail } => write!(
                f,
                "cannot load {library}: {detail}; is the NVIDIA driver installed, and in a container, was it started \
                 with GPU access (--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)?"
            ),
            Self::NoSymbol { library: library @ "libcupti", symbol } => {
                write!(f, "{library} has no {symbol}: it is too old or damaged; GPUMEM_CUPTI names another")
            }
            Self::NoSymbol { library, symbol } => {
                write!(f, "{library} has no {symbol}: the NVIDIA driver is too old or damaged; update the driver")
            }
            Self::Call { library, call, code, name, device, .. } => {
                write!(f, "{library}: {call}")?;
                if let Some(device) = device {
                    write!(f, " for device {device}")?;
                }
                write!(f, " failed with {name} ({code}); {}", next_step(name))
            }
            Self::NoDevice { ordinal, count, simulated } => no_device(f, *ordinal, *count, *simulated),
            Self::NoMemoryInfo { source, device } => write!(
                f,
                "{source} reports no memory values for device {device}: virtual GPUs and WSL may not have them; compare \
                 nvidia-smi"
            ),
            Self::NoContext { ordinal, why } => write!(
                f,
                "cannot read device {ordinal} without creating a CUDA context (about half a GiB), since NVML cannot be \
                 used: {why}; or create the context first, for example with gpumem::preload()"
            ),
            Self::NotBuilt { feature } => {
                write!(
                    f,
                    "gpumem was built without the feature `{feature}`; add it to gpumem's features in the Cargo.toml of the \
                     program (cargo add gpumem --features {feature})"
                )
            }
            Self::NoGauge { gauge, why } => write!(f, "the gauge `{gauge}` is not available: {why}"),
            Self::NoDispatch { detail } => {
                write!(f, "{NO_DISPATCH}: {detail}; gpumem uses CUPTI instead, if it is installed")
            }
            Self::NoSource { dispatch, cupti } => match &dispatch.0.kind {
                // The message without its last part, which is about CUPTI.
                Self::NoDispatch { detail } => write!(f, "{cupti}; and {NO_DISPATCH}: {detail}"),
                _ => write!(f, "{cupti}; and {dispatch}"),
            },
            Self::OtherSource { requested, using } => write!(
                f,
                "cannot use the source `{requested}`: allocations are already intercepted through `{using}`; leave \
                 the source out, or start the program with GPUMEM_SOURCE={requested}"
            ),
            Self::Busy { holder } => {
                let holder = if holder.is_empty() { "another profiler" } else { holder };
                write!(
                    f,
                    "cannot subscribe to CUPTI: {holder} holds the only subscription \
                     (CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED); end it, or use GPUMEM_GAUGE=sampled"
                )
            }
            Self::Forked => f.write_str(
                "this process was forked from one that used gpumem, and CUDA does not work in it; start it \
                 as a program of its own, or use gpumem in the child only",
            ),
            Self::UnknownBlock { address, why: None } => write!(
                f,
                "no known block starts at {address:#x}: gpumem knows the blocks that were allocated since the first trace \
                 or gpumem::intercept::subscribe(), by their first address"
            ),
            Self::UnknownBlock { address, why: Some(why) } => {
                write!(f, "the block at {address:#x} is not known: {why}")
            }
            Self::BadSetting { setting, detail } => write!(f, "cannot use {setting}: {detail}"),
            Self::BadBaseline { file, detail } => write!(f, "cannot use the baseline {file}: {detail}"),
            Self::NoAnswer { within } => {
                write!(f, "no answer within {within:?}; ask gpumem::breakdown() or nvidia-smi later")
            }
            Self::CustomGauge { name, detail } => write!(f, "the gauge `{name}` returned no value: {detail}"),
            Self::NoThread { detail } => {
                write!(f, "cannot start a thread: {detail}; raise the limit on threads (ulimit -u)")
            }
            Self::SimulatedOutOfMemory { device, requested, free, total } => write!(
                f,
                "simulated device {device} is out of memory: {requested} were requested, {free} of {total} are free; free blocks \
                 or simulate a larger device"
            ),
            Self::SimulatedMisuse { device, detail } => write!(f, "simulated device {device}: {detail}"),
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

/// Returns the next step for an error of the driver, if there is a more specific one than looking it up.
fn next_step(name: &str) -> &'static str {
    match name {
        "NVML_ERROR_DRIVER_NOT_LOADED" => "load the NVIDIA kernel module (modprobe nvidia) or reinstall the driver",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH" | "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" => {
            "the driver was updated while in use: reboot, or reload the NVIDIA kernel modules"
        }
        "NVML_ERROR_NO_PERMISSION" | "CUDA_ERROR_NOT_PERMITTED" => {
            "this user may not access the GPU: look at the permissions of /dev/nvidia*"
        }
        "NVML_ERROR_GPU_IS_LOST" | "NVML_ERROR_RESET_REQUIRED" | "CUDA_ERROR_DEVICE_UNAVAILABLE" => {
            "the GPU has fallen off the bus or needs a reset: look at dmesg for Xid messages"
        }
        "NVML_ERROR_NOT_SUPPORTED" => "this GPU does not support the call (virtual GPUs and WSL may not)",
        "NVML_ERROR_NOT_FOUND" => "the device is gone, or not visible to NVML in this container: compare nvidia-smi -L",
        "CUDA_ERROR_NO_DEVICE" => "no CUDA device is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" | "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT" => {
            "a stream is being captured: call this before or after the capture"
        }
        "CUDA_ERROR_STUB_LIBRARY" => {
            "the toolkit's stub of libcuda was loaded: remove the stubs folder from LD_LIBRARY_PATH"
        }
        "CUDA_ERROR_OUT_OF_MEMORY" => "the device is full: see which processes hold it with nvidia-smi",
        _ => "look the name up in NVIDIA's documentation, and see dmesg and nvidia-smi",
    }
}
