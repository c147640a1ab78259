//! Reports at process exit: `GPUMEM_LEAKS=1` and `GPUMEM_PEAK=1`.

use crate::session::{Session, views::NewTrace};
use crate::{derive, report::Content};

/// Prints the blocks that were not freed.
pub(in crate::session) fn print_leaks(session: &'static Session) {
    if !session.settings.leaks || !session.is_started() {
        return;
    }
    let is_intercepted = NewTrace::find(session).is_intercepted(session);
    session.print(Content::Leaks(derive::leaks(&session.inbox, session, is_intercepted)));
}

/// Prints the allocations that made up each device's peak.
pub(in crate::session) fn print_peaks(session: &'static Session) {
    if !session.settings.peak || !session.is_started() {
        return;
    }
    let is_intercepted = NewTrace::find(session).is_intercepted(session);
    let peaks = derive::device_peaks(&session.inbox, session, session.next_scope(), is_intercepted);
    session.print(Content::Peaks(peaks));
}
