//! Writers of reports, one format a file. They only write: what is said is settled before.

#[cfg(feature = "json")]
mod json;
mod memory_stats;
mod places;
#[cfg(feature = "json")]
mod places_json;
mod table;
mod text;
mod tracked;

use std::io;

use crate::report::{Report, Tracked};

/// A way to write what is told.
pub struct Format {
    write: fn(&Report, &mut dyn io::Write) -> io::Result<()>,
    tracked: fn(&Tracked, &mut dyn io::Write) -> io::Result<()>,
}

pub const TEXT: Format = Format { write: text::write, tracked: tracked::write };
#[cfg(feature = "json")]
pub const JSON: Format = Format { write: json::write, tracked: json::write_tracked };

impl Format {
    /// The report as one piece of text, so that lines of several threads do not mix.
    pub fn line(&self, report: &Report) -> String {
        piece(|bytes| (self.write)(report, bytes))
    }

    /// As [`line`](Self::line), of what a tracker saw.
    pub fn tracked(&self, tracked: &Tracked) -> String {
        piece(|bytes| (self.tracked)(tracked, bytes))
    }
}

fn piece(write: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
    let mut bytes = Vec::with_capacity(64);
    // A Vec takes everything.
    let _ = write(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}
