//! Equal lines of traces, one after the other, which are printed once and counted.

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

    /// Returns whether this is the line that the thread wrote last. It is counted then. Any other line is the last one from now on, and
    /// the number of lines that were equal to the one before is written.
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

    /// Writes the number of lines that were equal to the last one.
    pub(in crate::session) fn print_repeats(&self) {
        let last = self.last_line().take();
        self.print_more(last);
    }

    /// Writes the number of equal lines, and the line: another thread, another process or the program may have written in
    /// between. The lock is not held, because the program may hold that of stdout.
    fn print_more(&self, last: Option<LastLine>) {
        if let Some(LastLine { more: more @ 1.., text, .. }) = last {
            let line = text.lines().next().unwrap_or_default();
            self.write_text(&self.sink(), &format!("… {more} more: {line}\n"), true);
        }
    }
}
