//! What is reported when a process ends.

use super::{KeptPeak, LedgerView, Names, live_blocks};
use crate::{
    model::{Device, ScopeId},
    report::Leaks,
};

/// What was not freed: `GPUMEM_LEAKS=1`.
pub fn leaks(view: &dyn LedgerView, names: &dyn Names, pid: u32, is_intercepted: bool) -> String {
    let leaks = Leaks::of(&live_blocks(view, names, None));
    let gone = match view.counts().removed_with_context {
        0 => String::new(),
        count => format!("gpumem: blocks that went with their CUDA context, freed by nobody: {count}\n"),
    };
    let doubt = if is_intercepted { "" } else { "gpumem: allocations were not heard; there may be more\n" };
    format!("gpumem: process {pid} ends, and {leaks}{gone}{doubt}")
}

/// Which allocations made the peak of each device: `GPUMEM_PEAK=1`. `under` is a number for a peak that is kept meanwhile.
pub fn device_peaks(
    view: &dyn LedgerView,
    names: &dyn Names,
    under: ScopeId,
    pid: u32,
    is_intercepted: bool,
) -> String {
    let mut devices: Vec<Device> = view.stats().iter().map(|stats| stats.device).collect();
    devices.sort_by_key(|device| device.ordinal);
    let peaks = devices.into_iter().filter_map(|device| KeptPeak::of_device(view, device, under)?.holders(names));
    let mut text: String = peaks.map(|peak| peak.to_string()).collect();
    if text.is_empty() {
        text.push_str("no allocation was seen\n");
    }
    if !is_intercepted {
        text.push_str("gpumem: allocations are not intercepted; there may have been more\n");
    }
    format!("gpumem: process {pid} ends. {text}")
}
