use std::fmt;

use super::Bytes;

/// A process that uses a device, as the driver reports it.
///
/// Example: see `gpumem::torch::list_gpu_processes`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuProcess {
    /// The process id that the driver reports. In a container this may be the id outside the container.
    pub pid: u32,
    /// The command that started the process, or its short name. `None` if neither can be read.
    pub name: Option<String>,
    /// The memory of the process on the device. `None` if the driver does not report it (virtual GPUs, WSL).
    pub used: Option<Bytes>,
    /// The use of the device.
    pub kind: ProcessKind,
}

impl GpuProcess {
    /// Creates a process with only these two fields known.
    #[doc(hidden)]
    pub const fn new(pid: u32, kind: ProcessKind) -> Self {
        Self { pid, name: None, used: None, kind }
    }
}

/// The use of a device by a process. `Display` is the letter that `nvidia-smi` shows.
///
/// ```
/// assert_eq!(gpumem::report::ProcessKind::Compute.to_string(), "C");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProcessKind {
    /// The process computes: `C`.
    Compute,
    /// The process uses graphics: `G`.
    Graphics,
    /// The process does both: `C+G`.
    Both,
}

impl fmt::Display for ProcessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Compute => "C",
            Self::Graphics => "G",
            Self::Both => "C+G",
        })
    }
}
