//! Writes JSON. Bytes are exact, and a value that was not measured is `null`.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use gpumem_core::export::{JsonEscapes, json_line};
use serde::{Serialize, Serializer};

/// Writes a report as one indented object.
pub(crate) fn write(report: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(JsonEscapes(&mut *out), report)?;
    writeln!(out)
}

/// Writes a value on one line.
pub(crate) fn write_line(value: &impl Serialize, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}", json_line(value))
}

/// Writes a path. JSON must be UTF-8, so other bytes are replaced.
pub(crate) fn path<S: Serializer>(path: &impl AsRef<Path>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.as_ref().to_string_lossy())
}

/// Writes several paths, like [`path`].
pub(crate) fn paths<S: Serializer>(paths: &impl AsRef<[PathBuf]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.as_ref().iter().map(|path| path.to_string_lossy()))
}
