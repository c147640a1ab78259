//! Writers of reports, one format a file. They only write: what is said is settled before.

#[cfg(feature = "json")]
mod json;
mod memory_stats;
mod places;
mod table;
mod text;

use std::io;

use crate::report::Report;

/// A way to write a report.
pub(crate) struct Format {
    write: fn(&Report, &mut dyn io::Write) -> io::Result<()>,
}

pub(crate) const TEXT: Format = Format { write: text::write };
#[cfg(feature = "json")]
pub(crate) const JSON: Format = Format { write: json::write };

impl Format {
    /// The report as one piece of text, so that lines of several threads do not mix.
    pub(crate) fn line(&self, report: &Report) -> String {
        let mut bytes = Vec::with_capacity(64);
        // A Vec takes everything.
        let _ = (self.write)(report, &mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
