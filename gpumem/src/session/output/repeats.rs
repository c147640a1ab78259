//! Prints equal consecutive lines of traces once, with a count.

use std::{
    sync::{MutexGuard, PoisonError},
    thread,
};

use super::sink_state::LastLine;
use crate::session::Session;

impl Session {
    fn last_line(&self) -> MutexGuard<'_, Option<LastLine>> {
        self.sink.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the line if the thread's last line is equal, and returns whether it is. Otherwise writes the number of repeats of the
    /// last line, and makes this one the last line.
    pub(super) fn is_repeated(&self, text: &str) -> bool {
        let thread = thread::current().id();
        let mut last = self.last_line();
        if let Some(last) = last.as_mut().filter(|last| last.text == text && last.thread == thread) {
            last.more += 1;
            return true;
        }
        let before = last.replace(LastLine { text: text.to_owned(), thread, more: 0 });
        drop(last);
        self.print_more(before);
        false
    }

    /// Writes the number of repeats of the last line.
    pub(in crate::session) fn print_repeats(&self) {
        let last = self.last_line().take();
        self.print_more(last);
    }

    /// Writes the number of repeats, and the line itself, because something else may have been written in between. The lock is not
    /// held, because the program may hold stdout's lock.
    fn print_more(&self, last: Option<LastLine>) {
        if let Some(LastLine { more: more @ 1.., text, .. }) = last {
            let line = text.lines().next().unwrap_or_default();
            self.write_text(&self.sink(), &format!("… {more} more: {line}\n"), true);
        }
    }
}
