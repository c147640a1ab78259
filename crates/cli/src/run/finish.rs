//! Completes and names the recordings after the program has ended.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{closings::Closings, destination::Destination};
use crate::recording::complete;

/// The recordings of a run that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) recordings: Vec<PathBuf>,
    /// The recordings of processes that are still running.
    pub(super) unfinished: Vec<PathBuf>,
    /// The recordings whose names do not contain their process, each with the error if it cannot be completed.
    pub(super) lost: Vec<(PathBuf, Option<io::Error>)>,
}

/// Why a recording that can be completed contains nothing.
pub(super) const LOST: &str =
    "its process could not be recorded or was killed before, or the file was made shorter, replaced, moved or removed";

/// Completes the recordings of the run, removes those of processes that requested no memory, and renames the others to
/// the names that users know. With `keeps_names`, names stay, because `gpumem start` and `gpumem stop` have printed
/// them.
pub(super) fn finish(destination: &Destination, closings: Option<&Closings>, keeps_names: bool) -> Finished {
    let (mut recorded, mut unfinished) = (Vec::new(), Vec::new());
    // This must come first, because the recordings of processes that requested no memory are removed below.
    let mut lost: Vec<_> = destination.removed().into_iter().map(|path| (path, None)).collect();
    for path in destination.of_processes() {
        let ended = closings.and_then(|closings| closings.of(&path));
        match devices_of(&path, destination.process_of(&path), ended, keeps_names) {
            Ok(Found::Devices(devices)) => recorded.push((path, devices)),
            Ok(Found::Nothing) => {}
            Ok(Found::Unfinished) => unfinished.push(path),
            Ok(Found::Lost) => lost.push((path, None)),
            Err(error) => lost.push((path, Some(error))),
        }
    }
    let is_one = recorded.len() == 1;
    let name = |(path, devices): (PathBuf, Vec<u32>)| {
        if keeps_names {
            return path;
        }
        let named = if is_one { destination.file().to_owned() } else { Destination::with_devices(&path, &devices) };
        if fs::rename(&path, &named).is_ok() { named } else { path }
    };
    Finished { recordings: recorded.into_iter().map(name).collect(), unfinished, lost }
}

/// The content of a recording.
enum Found {
    /// The process allocated on these devices.
    Devices(Vec<u32>),
    /// The process requested no memory.
    Nothing,
    /// The process is still running.
    Unfinished,
    /// The process may have requested memory without writing about it. The file stays, so that a limit checked later
    /// cannot pass by ignoring it.
    Lost,
}

/// Finds out on which devices the process allocated. The recording of a process that requested no memory is removed,
/// unless `keeps_empty`.
fn devices_of(path: &Path, process: Option<u32>, ended: Option<Duration>, keeps_empty: bool) -> io::Result<Found> {
    if path.metadata()?.len() == 0 {
        return Ok(Found::Lost);
    }
    let Some(content) = complete(path, ended)? else { return Ok(Found::Unfinished) };
    // Another process has replaced the recording.
    if content.pid != process {
        return Ok(Found::Lost);
    }
    if !content.has_requests && !keeps_empty {
        if !content.is_finished {
            return Ok(Found::Lost);
        }
        fs::remove_file(path)?;
        return Ok(Found::Nothing);
    }
    Ok(Found::Devices(content.devices.into_iter().collect()))
}
