//! Reports as JSON: one object, indented. Bytes are exact, and what was not measured is `null`.

use std::io::{self, Write};

use serde::Serialize;

pub(crate) fn write(report: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, report)?;
    writeln!(out)
}
