//! The bytes in use on each device: the sum of allocations, and the samples.

use std::time::Duration;

use super::{counts::signed, peaks::PeakHistory, stats::Stat, watermark::Watermark};
use crate::model::{Device, DriverGauge, Family, Gauge, GpuMemory, MemKind, Time};

/// One meter for each device and gauge. There are few, so a linear search is faster than a hash table.
#[derive(Debug, Default)]
pub(super) struct Meters(pub(super) Vec<Meter>);

/// Bytes in use on one device as one gauge measures them.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Meter {
    pub(super) level: UsageLevel,
    /// Only [`Gauge::Exact`] uses this field, `on_device` and `kinds`.
    pub(super) peaks: PeakHistory,
    /// The memory that traces count.
    pub(super) on_device: Stat,
    /// The statistics of each kind of memory, in the order of [`MemKind::ALL`].
    pub(super) kinds: [Stat; MemKind::ALL.len()],
    pub(super) device: Device,
    pub(super) gauge: Gauge,
    pub(super) samples: Samples,
    /// The driver's view, if a pool was registered on the device; `level` is then the program's view. The driver's view is exact
    /// for every gauge.
    pub(super) driver: Option<UsageLevel>,
    /// How the memory that the driver takes by itself is measured; `None` if it is not.
    pub(super) driver_measured_by: Option<DriverGauge>,
}

/// The bytes in use, and their highest value since each open scope started.
#[derive(Clone, Debug, Default)]
pub(super) struct UsageLevel {
    /// The bytes in use. Negative if blocks older than the session were freed, or, for samples, because they count down from the
    /// free memory.
    pub(super) in_use: i64,
    pub(super) peaks: Watermark<i64>,
}

/// The readings of a device. A scope reports the readings since its start.
#[derive(Debug, Default)]
pub(super) struct Samples {
    pub(super) count: u64,
    pub(super) latest: Option<Time>,
    pub(super) gaps: Watermark<Duration>,
    /// True if the last reading failed.
    pub(super) failed: bool,
}

/// The allocator's statistics of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStats {
    /// The device.
    pub device: Device,
    /// The memory that is certainly on the device, as traces count it.
    pub on_device: Stat,
    /// Each kind of memory, in the order of [`MemKind::ALL`].
    pub kinds: [Stat; MemKind::ALL.len()],
    /// How the memory that the driver takes by itself is measured; `None` if it is not.
    pub driver_measured_by: Option<DriverGauge>,
}

impl Meters {
    #[inline]
    pub(super) fn index(&mut self, device: Device, gauge: Gauge) -> u16 {
        let known = self.0.iter().position(|meter| meter.device == device && meter.gauge == gauge);
        let index = known.unwrap_or_else(|| {
            self.0.push(Meter {
                level: UsageLevel::default(),
                peaks: PeakHistory::of_device(),
                on_device: Stat::default(),
                kinds: Default::default(),
                device,
                gauge,
                samples: Samples::default(),
                driver: None,
                driver_measured_by: None,
            });
            self.0.len() - 1
        });
        u16::try_from(index).expect("fewer than 2^16 devices")
    }

    pub(super) fn of(&mut self, device: Device, gauge: Gauge) -> &mut Meter {
        let index = self.index(device, gauge);
        &mut self.0[usize::from(index)]
    }
}

impl UsageLevel {
    /// Changes the bytes by `net`. `high` is the highest level on the way.
    #[inline]
    pub(super) fn apply(&mut self, high: i64, net: i64) {
        self.peaks.raise(high);
        self.in_use = self.in_use.saturating_add(net);
    }

    pub(super) fn change(&mut self, by: i64) {
        self.set(self.in_use.saturating_add(by));
    }

    fn set(&mut self, in_use: i64) {
        self.in_use = in_use;
        self.peaks.raise(in_use);
    }
}

impl Meter {
    /// Applies a sample. It counts the bytes that are not free, because both versions of NVML and `cuMemGetInfo` agree only on
    /// free memory. The program's own gauges know only the bytes in use.
    pub(super) fn apply_sample(&mut self, time: Time, memory: &GpuMemory) {
        let is_custom = self.device.family == Family::Custom;
        self.level.set(if is_custom { signed(memory.used) } else { -signed(memory.free) });
        if let Some(before) = self.samples.latest.replace(time) {
            self.samples.gaps.raise(time.saturating_sub(before));
        }
        self.samples.count += 1;
        self.samples.failed = false;
    }
}
