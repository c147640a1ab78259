//! `GPUMEM_PEAK=1`: which allocations made the peak of each device.

use std::process;

use super::{begun, notice::say, places::SessionNames, settings, status::Now};
use crate::derive;

/// Reports it at the end of the process.
pub(super) fn report_at_exit() {
    let Some(session) = begun().filter(|_| settings().peak) else { return };
    let is_intercepted = Now::find().is_intercepted();
    let under = session.next_scope();
    say(&derive::device_peaks(&session.inbox, &SessionNames, under, process::id(), is_intercepted));
}
