//! A reading of a machine at one moment, as plain data. `metrics.rs` gives the values their names.

use gpumem_core::model::DriverGauge;

use crate::machine::Memory;

/// One reading. A value that could not be read is `None` or missing, and never 0.
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
    /// The GPU that this slice belongs to.
    pub(super) parent: Option<String>,
    pub(super) model: Option<String>,
    pub(super) memory: Memory,
}

/// The identity of a GPU. If the driver does not list the device here, only the number that it has in the program is
/// known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuId {
    /// NVML's index, such as `0`, or a slice's index, such as `0:1`.
    pub(super) id: Option<String>,
    pub(super) uuid: Option<String>,
    /// CUDA's ordinal in the program, if there is no UUID.
    pub(super) ordinal: Option<u32>,
}

/// The identity of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct ProcessId {
    pub(super) pid: Option<u32>,
    pub(super) command: Option<String>,
    pub(super) owner: Option<String>,
    pub(super) container: Option<String>,
    pub(super) pod: Option<String>,
}

/// The values that the driver reports for a process on a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct UsageSample {
    pub(super) process: ProcessId,
    pub(super) gpu: GpuId,
    pub(super) used: Option<u64>,
    pub(super) accounted_peak: Option<u64>,
}

/// The values of a recording of a process.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RecordingSample {
    pub(super) process: ProcessId,
    pub(super) counts: Counts,
    pub(super) devices: Vec<DeviceSample>,
}

/// Event counts. They never fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) rejected: u64,
    pub(super) retried: u64,
    pub(super) lost: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: Self) {
        self.rejected += other.rejected;
        self.retried += other.retried;
        self.lost += other.lost;
    }
}

/// The values of a recording on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DeviceSample {
    pub(super) gpu: GpuId,
    pub(super) peak: Option<u64>,
    /// `None` if the recording contains only the peaks.
    pub(super) interval_peak: Option<u64>,
    /// `None` after the process has ended.
    pub(super) live: Option<LiveSample>,
}

/// The memory of a process on a device.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LiveSample {
    pub(super) kinds: Vec<(&'static str, u64)>,
    pub(super) libraries: Vec<(String, u64)>,
    pub(super) scopes: Vec<(String, u64)>,
    /// The sums by place and scope.
    pub(super) places: Vec<((String, String), u64)>,
    pub(super) pools: Vec<PoolSample>,
    /// What the driver took by itself; `None` if it was not measured.
    pub(super) driver: Option<DriverSample>,
}

/// The memory that the driver took by itself on a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DriverSample {
    pub(super) measured_by: DriverGauge,
    pub(super) kinds: Vec<(&'static str, u64)>,
}

/// A registered pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolSample {
    pub(super) name: String,
    /// The bytes that the pool has handed out.
    pub(super) used: u64,
    /// The bytes that the pool got from the driver.
    pub(super) reserved: u64,
    /// The largest piece that the pool could hand out. `None` if the positions of its parts are not known.
    pub(super) largest_hole: Option<u64>,
}

/// How much this process cannot see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hidden {
    /// Processes that the driver lists but that are not visible here.
    pub(super) processes: usize,
    /// Processes that may or may not be recorded: this process cannot find out.
    pub(super) unknown: usize,
    /// Processes that wait for `gpumem start`, for the first time or after `gpumem stop`.
    pub(super) dormant: usize,
    /// Recordings that are not read, or not read yet.
    pub(super) recordings: usize,
    /// Readings of the driver that failed.
    pub(super) readings: usize,
}
