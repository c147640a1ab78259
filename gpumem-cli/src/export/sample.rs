//! What is known of a machine at one moment, as plain data. `metrics.rs` names it.

use crate::machine::Memory;

/// One reading. What could not be read is `None` or missing, and never 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sample {
    pub(super) gpus: Vec<GpuSample>,
    pub(super) usages: Vec<UsageSample>,
    pub(super) recordings: Vec<RecordingSample>,
    pub(super) hidden: Hidden,
}

/// A GPU, or a MIG slice of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GpuSample {
    pub(super) gpu: GpuId,
    /// The GPU of which it is a slice.
    pub(super) parent: Option<String>,
    pub(super) model: Option<String>,
    pub(super) memory: Memory,
}

/// Which GPU it is. Nothing is known of a device that the driver does not list here, but its number in the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuId {
    /// NVML's number, `0`, and that of a slice, `0:1`.
    pub(super) id: Option<String>,
    pub(super) uuid: Option<String>,
    /// CUDA's number in the program, if there is no UUID.
    pub(super) ordinal: Option<u32>,
}

/// Which process it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessId {
    pub(super) pid: Option<u32>,
    pub(super) command: Option<String>,
    pub(super) owner: Option<String>,
    pub(super) container: Option<String>,
    pub(super) pod: Option<String>,
}

/// What the driver says of a process on a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct UsageSample {
    pub(super) process: ProcessId,
    pub(super) gpu: GpuId,
    pub(super) used: Option<u64>,
    pub(super) accounted_peak: Option<u64>,
}

/// What a process has recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RecordingSample {
    pub(super) process: ProcessId,
    pub(super) refused: u64,
    pub(super) retried: u64,
    pub(super) lost: u64,
    pub(super) devices: Vec<DeviceSample>,
}

/// What a process has recorded of one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DeviceSample {
    pub(super) gpu: GpuId,
    pub(super) peak: Option<u64>,
    /// `None` if the recording has only the peaks.
    pub(super) interval_peak: Option<u64>,
    /// `None` after the end of the process.
    pub(super) live: Option<LiveSample>,
}

/// What a process has on a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LiveSample {
    pub(super) kinds: Vec<(&'static str, u64)>,
    pub(super) libraries: Vec<(String, u64)>,
    pub(super) scopes: Vec<(String, u64)>,
    /// By place and scope.
    pub(super) places: Vec<((String, String), u64)>,
    pub(super) pools: Vec<PoolSample>,
}

/// A registered pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolSample {
    pub(super) name: String,
    /// What it has given out.
    pub(super) used: u64,
    /// What it has from the driver.
    pub(super) reserved: u64,
    /// The largest piece that it could give out. `None` if it is not known where its parts lie.
    pub(super) largest_hole: Option<u64>,
}

/// How much cannot be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hidden {
    /// Processes that the driver lists and that are not visible here.
    pub(super) processes: usize,
    /// Processes of which it cannot be found out whether they are recorded.
    pub(super) unknown: usize,
    /// Recordings that are not read, or not yet.
    pub(super) recordings: usize,
    /// Readings of the driver that failed.
    pub(super) readings: usize,
}
