//! `GPUMEM_PEAK=1`: which allocations made the peak of each device.

use std::process;

use super::say;
use crate::derive;
use crate::session::{Session, views::Now};

/// Prints, at the end of the process, what the peak of each device was made of.
pub(in crate::session) fn report_at_exit(session: &'static Session) {
    if !session.settings.peak || !session.is_begun() {
        return;
    }
    let is_intercepted = Now::find(session).is_intercepted(session);
    record_request!(session, Peaks { is_intercepted });
    say(&derive::device_peaks(&session.inbox, session, session.next_scope(), process::id(), is_intercepted));
}
