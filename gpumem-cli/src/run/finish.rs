//! Completes and names the recordings when the program has ended.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::destination::Destination;
use crate::{failure::Failure, recording::complete, terminal};

/// The recordings of a run that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) recordings: Vec<PathBuf>,
    /// The recordings of processes that run on.
    pub(super) unfinished: Vec<PathBuf>,
}

/// Completes the recordings of the run, removes those of processes that asked for nothing, and gives them the names that users know.
/// With `keeps_names`, names stay, because `gpumem start` and `gpumem stop` have printed them.
pub(super) fn finish(destination: &Destination, keeps_names: bool) -> Finished {
    let (mut recorded, mut unfinished) = (Vec::new(), Vec::new());
    for path in destination.of_processes() {
        match devices_of(&path, keeps_names) {
            Ok(Found::Devices(devices)) => recorded.push((path, devices)),
            Ok(Found::Nothing) => {}
            Ok(Found::Unfinished) => unfinished.push(path),
            Err(error) => {
                let what = format!("the recording `{}`", path.display());
                terminal::error(&Failure::new(what, error, ""));
            }
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
    Finished { recordings: recorded.into_iter().map(name).collect(), unfinished }
}

/// The content of a recording.
enum Found {
    /// Its process allocated on these devices.
    Devices(Vec<u32>),
    /// Its process asked for nothing.
    Nothing,
    /// Its process still runs.
    Unfinished,
}

/// Returns the devices on which the process allocated. An empty recording is removed.
fn devices_of(path: &Path, keeps_empty: bool) -> io::Result<Found> {
    let Some(content) = complete(path)? else { return Ok(Found::Unfinished) };
    if !content.has_requests && !keeps_empty {
        fs::remove_file(path)?;
        return Ok(Found::Nothing);
    }
    Ok(Found::Devices(content.devices.into_iter().collect()))
}
