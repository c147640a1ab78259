//! `--max-peak`: recordings are compared with a limit.

use gpumem_core::model::Bytes;

use super::overview::{Missing, Overview};
use crate::terminal;

/// Whether a recording does not keep the limit. A line on stderr says why. What was not measured keeps no limit.
pub(crate) fn is_exceeded(overviews: &[Overview], limit: Bytes) -> bool {
    let mut lines: Vec<_> = overviews.iter().flat_map(|overview| of_one(overview, limit)).collect();
    if !overviews.iter().flat_map(|overview| &overview.devices).any(|device| device.peak_bytes.is_some()) {
        lines.push(format!("nothing was measured, so nothing is known of the limit of {limit}"));
    }
    lines.iter().for_each(terminal::error);
    !lines.is_empty()
}

fn of_one(overview: &Overview, limit: Bytes) -> Vec<String> {
    let Overview { file, devices, missing, .. } = overview;
    let above = devices.iter().filter_map(|device| {
        let peak = Bytes::new(device.peak_bytes.filter(|peak| *peak > limit.get())?);
        let more = Bytes::new(peak.get() - limit.get());
        Some(format!("{file}: the peak of device {} was {peak}, {more} above the limit of {limit}", device.device))
    });
    let above: Vec<_> = above.collect();
    if !above.is_empty() || !may_be_higher(missing) {
        return above;
    }
    let reasons = missing.in_words().join(" ");
    vec![format!("{file}: the peak may have been above the limit of {limit}. {reasons}")]
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
