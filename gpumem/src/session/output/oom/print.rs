//! Prints reports of rejected allocations.

use std::{
    mem,
    sync::{PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use super::pending::{PendingReport, Reporter};
use crate::{report::Content, session::Session};

/// The largest number of printed reports: a program that retries forever would fill the screen.
pub(super) const MAX_PRINTED: u64 = 3;

/// The longest wait for reports at exit. Large programs have much debug information to read.
const EXIT_WAIT: Duration = Duration::from_secs(5);

pub(super) fn print(session: &Session, pending: PendingReport) {
    if session.is_silent() {
        return;
    }
    let before = session.rejections.printed.fetch_add(1, Relaxed);
    if before < MAX_PRINTED {
        session.print(Content::OutOfMemory(Box::new(pending.oom)));
    }
    if before + 1 == MAX_PRINTED {
        session.print(Content::Notice("further failed allocations are not reported".to_owned()));
    }
}

/// Turns the reports off.
#[cfg(feature = "capture")]
pub(in crate::session) fn print_none(session: &Session) {
    session.rejections.printed.store(MAX_PRINTED, Relaxed);
}

/// Prints the pending reports at exit, because no thread can obtain memory any more.
pub(in crate::session) fn print_pending(session: &Session) {
    let changed = &session.rejections.changed;
    let mut reporter = session.rejections.reporter();
    reporter.is_exiting = true;
    changed.notify_all();
    let will_print = |reporter: &mut Reporter| reporter.will_print();
    (reporter, _) = changed.wait_timeout_while(reporter, EXIT_WAIT, will_print).unwrap_or_else(PoisonError::into_inner);
    let rest = mem::take(&mut reporter.pending);
    drop(reporter);
    rest.into_iter().filter(|pending| pending.due.is_some()).for_each(|pending| print(session, pending));
}
