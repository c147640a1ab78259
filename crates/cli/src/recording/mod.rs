//! The files of recordings. `history` is built on top of them.
//!
//! A program that ends normally writes its recording to the end. Data that a killed program left behind, and data that
//! would delay the end of a program, is added later: [`complete`] joins the parts of `--max-size`, and adds the ring,
//! the functions at the addresses of stacks, and PyTorch's history. Recordings are read as streams, so the memory
//! needed does not grow with the number of events.

mod complete;
mod content;
mod parts;
mod ranges;
mod symbols;
mod torch;

use std::path::Path;

pub(crate) use self::{
    complete::{complete, complete_for_report, unattended_marker},
    ranges::remove_range,
    symbols::of_module,
    torch::{is_snapshot, recording_of},
};
use crate::files::is_recording;

/// Returns why this existing file must not be replaced: only recordings and empty files may be. `None` if it may be
/// replaced, or if there is no file.
pub(crate) fn why_not_replaceable(file: &Path) -> Option<&'static str> {
    let known = file.metadata().ok()?;
    if known.is_dir() {
        return Some("it is a folder");
    }
    if !known.is_file() {
        return Some("it is not a regular file");
    }
    let may_go = known.len() == 0 || is_recording(file);
    (!may_go).then_some("it exists and is not a recording")
}
