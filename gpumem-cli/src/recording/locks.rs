//! Files that keep other processes away from a recording.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// The lock of `train.capture` is `.train.capture.PURPOSE`. The recording itself is not locked: children that outlive their process hold
/// its lock.
pub(crate) fn lock_file(recording: &Path, purpose: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(recording.file_name().unwrap_or_default());
    name.push(".");
    name.push(purpose);
    recording.with_file_name(name)
}
