//! `--max-peak`: recordings are compared with a limit.

use gpumem_core::model::Bytes;

use super::overview::{DeviceOverview, Missing, Overview};
use crate::terminal;

/// Whether a recording does not keep the limit. A line on stderr says why. What was not measured keeps no limit.
pub(crate) fn is_exceeded(overviews: &[Overview], limit: Bytes) -> bool {
    let mut lines: Vec<_> = overviews.iter().flat_map(|overview| of_one(overview, limit)).collect();
    if !overviews.iter().flat_map(|overview| &overview.devices).any(|device| highest(device).is_some()) {
        lines.push(format!("nothing was measured, so nothing is known of the limit of {limit}"));
    }
    lines.iter().for_each(terminal::error);
    !lines.is_empty()
}

fn of_one(overview: &Overview, limit: Bytes) -> Vec<String> {
    let Overview { file, devices, missing, .. } = overview;
    let above = devices.iter().filter_map(|device| {
        let peak = Bytes::new(highest(device).filter(|peak| *peak > limit.get())?);
        let more = Bytes::new(peak.get() - limit.get());
        let of = if device.driver_peak_bytes.is_some() { "the driver's blocks on device" } else { "device" };
        Some(format!("{file}: the peak of {of} {} was {peak}, {more} above the limit of {limit}", device.device))
    });
    let above: Vec<_> = above.collect();
    // A recording of the peaks has the driver's blocks as they were at the peak of the program's view.
    let is_other_peak = missing.has_only_peaks && devices.iter().any(|device| device.driver_peak_bytes.is_some());
    if !above.is_empty() || !may_be_higher(missing) && !is_other_peak {
        return above;
    }
    let reasons = missing.in_words().join(" ");
    vec![format!("{file}: the peak may have been above the limit of {limit}. {reasons}")]
}

/// The peak that has to fit on the card: what a pool keeps unused is in it.
fn highest(device: &DeviceOverview) -> Option<u64> {
    device.driver_peak_bytes.filter(|peak| *peak > 0).or(device.peak_bytes)
}

/// The peak may have been higher than the recording says.
fn may_be_higher(missing: &Missing) -> bool {
    missing.incomplete.is_some()
        || missing.not_intercepted
        || missing.contradictory
        || missing.lost_events > 0
        || missing.unreadable_items > 0
        || missing.begins_after_event.is_some()
        || missing.begins_after_seconds.is_some()
}
