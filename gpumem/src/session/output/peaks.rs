//! `GPUMEM_PEAK=1`: which allocations made the peak of each device.

use crate::session::{Session, views::Now};
use crate::{derive, report::Content};

/// Prints, at the end of the process, what the peak of each device was made of.
pub(in crate::session) fn report_at_exit(session: &'static Session) {
    if !session.settings.peak || !session.is_begun() {
        return;
    }
    let is_intercepted = Now::find(session).is_intercepted(session);
    record_request!(session, Peaks { is_intercepted });
    let peaks = derive::device_peaks(&session.inbox, session, session.next_scope(), is_intercepted);
    session.print(Content::Peaks(peaks));
}
