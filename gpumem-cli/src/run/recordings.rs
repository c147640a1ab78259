//! What is done with the recordings when the program has ended.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use gpumem_core::{
    capture::{End, Item, RecordedEvent, items_of, recover, ring_path},
    model::EventKind,
};

use super::{lock_file::LockFile, parts, place::Place, symbols, torch};
use crate::{failure::Failure, terminal};

/// The recording of a process.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) path: PathBuf,
}

/// The recordings of a run that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) recordings: Vec<Recording>,
    /// Those of processes that run on.
    pub(super) unfinished: Vec<PathBuf>,
}

/// Completes the recordings of the run, removes those of processes that allocated nothing, and gives them the names that users know.
/// If `keeps_names`, `gpumem start` and `gpumem stop` have printed the names that they have.
pub(super) fn finish(place: &Place, keeps_names: bool) -> Finished {
    let (mut recorded, mut unfinished) = (Vec::new(), Vec::new());
    for path in place.of_processes() {
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
            return Recording { path };
        }
        let named = if is_one { place.file().to_owned() } else { Place::with_devices(&path, &devices) };
        let path = if fs::rename(&path, &named).is_ok() { named } else { path };
        Recording { path }
    };
    Finished { recordings: recorded.into_iter().map(name).collect(), unfinished }
}

/// What a recording has.
enum Found {
    /// Its process allocated on these devices.
    Devices(Vec<u32>),
    /// Its process allocated nothing.
    Nothing,
    /// Its process runs still.
    Unfinished,
}

/// The devices on which the process allocated. An empty recording is removed.
fn devices_of(path: &Path, keeps_empty: bool) -> io::Result<Found> {
    let Some(items) = complete(path)? else { return Ok(Found::Unfinished) };
    let block = |item: &Item| match item {
        Item::Event(RecordedEvent { kind: EventKind::Alloc { block, .. }, .. }) => Some(*block),
        _ => None,
    };
    let blocks = || items.iter().filter_map(block);
    if blocks().next().is_none() && !keeps_empty {
        fs::remove_file(path)?;
        return Ok(Found::Nothing);
    }
    // Memory of the host has the number of a device that says nothing.
    let on_devices = blocks().filter(|block| block.kind.is_on_device());
    let mut devices: Vec<u32> = on_devices.map(|block| block.device.ordinal).collect();
    devices.sort_unstable();
    devices.dedup();
    Ok(Found::Devices(devices))
}

/// What a recording consists of is not all in its file.
pub(crate) fn is_unfinished(recording: &Path) -> bool {
    ring_path(recording).exists() || mark(recording).exists() || torch::is_there(recording)
}

/// A file beside a recording that nobody completes when its program ends: a report does.
pub(crate) fn mark(recording: &Path) -> PathBuf {
    let mut mark = recording.as_os_str().to_owned();
    mark.push(".attached");
    mark.into()
}

/// Adds what a killed process left in its ring, and the functions at the addresses of stacks. Returns the items that were there before;
/// `None` if the process runs still.
///
/// # Errors
/// Of reading and writing. The recording is readable up to where it was before.
pub(crate) fn complete(path: &Path) -> io::Result<Option<Vec<Item>>> {
    // Of all that complete it at the same time, one does it; the others wait until it is complete.
    let _turn = LockFile::wait(path, "completing")?;
    // Until all is added, no process begins a recording with this name.
    let Some(_ended) = recover(path)? else { return Ok(None) };
    parts::join(path)?;
    let (items, end) = items_of(io::BufReader::new(File::open(path)?))?;
    match end {
        End::Complete => {}
        // The disk was full. What is added has to follow a complete record.
        End::Cut { at } => File::options().write(true).open(path)?.set_len(at)?,
        End::Damaged { .. } | End::AboveLimit { .. } => return Ok(Some(items)),
    }
    if let Err(error) = symbols::add(path, &items) {
        let what = format!("`{}` lacks the functions of stacks", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    if let Err(error) = torch::add(path, &items) {
        let what = format!("`{}` lacks the history of PyTorch's allocator", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    _ = fs::remove_file(mark(path));
    Ok(Some(items))
}
