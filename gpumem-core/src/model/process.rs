use std::fmt;

use super::Bytes;

/// A process that uses a device, as the driver tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// As the driver numbers it: in a container it may be the number that the process has outside.
    pub pid: u32,
    /// What it was started as, or its short name. `None` where neither can be read.
    pub name: Option<String>,
    /// What it holds on the device. `None` where the driver does not tell (virtual GPUs, WSL).
    pub used: Option<Bytes>,
    /// What it uses the device for.
    pub kind: ProcessKind,
}

/// What a process uses a device for. `Display` is the letter that `nvidia-smi` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProcessKind {
    /// It computes: `C`.
    Compute,
    /// It draws: `G`.
    Graphics,
    /// Both: `C+G`.
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
