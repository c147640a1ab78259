//! The live memory of one device, and its peak.

use gpumem_core::{
    ledger::KnownPool,
    model::{Device, GpuMemory},
};

/// The memory of one device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceHistory {
    pub(crate) device: Device,
    /// The bytes that are live in the device's memory at the end.
    pub(crate) live: u64,
    /// The highest number of bytes that were live in the device's memory.
    pub(crate) peak: u64,
    /// The change that reached the peak; `None` if nothing was allocated.
    pub(crate) peak_at: Option<u32>,
    /// The first change after the peak that lowered the live memory.
    pub(crate) less_at: Option<u32>,
    /// The registered pools after the event that set the peak.
    pub(crate) pools: Vec<KnownPool>,
    /// The live bytes of driver blocks. They are why the driver rejects a request, however much memory the pools leave
    /// unused.
    pub(super) driver_live: u64,
    /// The highest value of `driver_live`, whether or not pools divided the blocks.
    pub(crate) driver_peak: u64,
    /// The highest reading of the whole device, with its time.
    pub(crate) highest_sample: Option<(u64, GpuMemory)>,
    pub(crate) samples: u64,
}

impl DeviceHistory {
    pub(super) fn new(device: Device) -> Self {
        Self {
            device,
            live: 0,
            peak: 0,
            peak_at: None,
            less_at: None,
            pools: Vec::new(),
            driver_live: 0,
            driver_peak: 0,
            highest_sample: None,
            samples: 0,
        }
    }

    /// Counts a change of a driver block from one size to another.
    pub(super) fn count_driver(&mut self, before: u64, after: u64) {
        self.driver_live = self.driver_live.saturating_add(after).saturating_sub(before);
        self.driver_peak = self.driver_peak.max(self.driver_live);
    }

    /// Counts a change of a block from one size to another. Returns whether this is a new peak.
    pub(super) fn count(&mut self, at: u32, before: u64, after: u64) -> bool {
        self.live = self.live.saturating_add(after).saturating_sub(before);
        if self.live > self.peak {
            (self.peak, self.peak_at, self.less_at) = (self.live, Some(at), None);
            return true;
        }
        if after < before && self.peak_at.is_some() {
            self.less_at.get_or_insert(at);
        }
        false
    }
}
