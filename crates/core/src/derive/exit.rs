//! The reports at process exit.

use super::{KeptPeak, LedgerView, Names, live_blocks};
use crate::{
    model::{Device, ScopeId},
    report::{Leaks, Peaks},
};

/// Returns the memory that was not freed, for `GPUMEM_LEAKS=1`.
pub fn leaks(view: &dyn LedgerView, names: &dyn Names, is_intercepted: bool) -> Leaks {
    let mut leaks = Leaks::of(&live_blocks(view, names, None));
    leaks.gone = view.counts().removed_with_context;
    leaks.is_intercepted = is_intercepted;
    leaks
}

/// Returns the allocations that made up each device's peak, for `GPUMEM_PEAK=1`. `under` is an unused id for a peak that is
/// kept during the call.
pub fn device_peaks(view: &dyn LedgerView, names: &dyn Names, under: ScopeId, is_intercepted: bool) -> Peaks {
    let mut devices: Vec<Device> = view.stats().iter().map(|stats| stats.device).collect();
    devices.sort_by_key(|device| device.ordinal);
    let peaks = devices.into_iter().filter_map(|device| KeptPeak::of_device(view, device, under)?.holders(names));
    Peaks::new(peaks.collect(), is_intercepted)
}
