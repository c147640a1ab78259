//! What is done with the recordings when the program has ended.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem::__private::{LockFile, SharedMemory};
use gpumem_core::{
    capture::{CodeAddress, End, Item, ModuleDefinition, RecordedEvent, for_each_item, has_ring, recover},
    model::EventKind,
};

use super::{
    parts,
    place::{self, Place},
    symbols, torch,
};
use crate::{failure::Failure, files, terminal};

/// To complete a large recording takes some seconds. Who has its lock for longer hangs, or has put it there to stop others.
const PATIENCE: Duration = Duration::from_secs(20);

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
    let Some(content) = complete(path)? else { return Ok(Found::Unfinished) };
    if !content.has_blocks && !keeps_empty {
        fs::remove_file(path)?;
        return Ok(Found::Nothing);
    }
    Ok(Found::Devices(content.devices.into_iter().collect()))
}

/// What a recording consists of is not all in its file.
pub(crate) fn is_unfinished(recording: &Path) -> bool {
    has_ring(recording, &SharedMemory) || mark(recording).exists() || torch::is_there(recording)
}

/// A file beside a recording that nobody completes when its program ends: a report does.
pub(crate) fn mark(recording: &Path) -> PathBuf {
    let mut mark = recording.as_os_str().to_owned();
    mark.push(".attached");
    mark.into()
}

/// What has to be known of a recording to complete it.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// When its session began, since 1970.
    pub(super) began: Option<Duration>,
    pub(super) modules: HashMap<u32, ModuleDefinition>,
    /// The addresses of its stacks that stand for nothing yet.
    pub(super) addresses: BTreeSet<CodeAddress>,
    /// The largest number of a stack.
    pub(super) last_stack: u32,
    /// The history of a caching allocator is there.
    pub(super) has_allocator: bool,
    has_blocks: bool,
    devices: BTreeSet<u32>,
}

/// So many addresses are looked up.
const MOST_ADDRESSES: usize = 1 << 20;

impl Content {
    fn add(&mut self, item: Item, known: &mut HashSet<CodeAddress>) {
        match item {
            Item::Process(process) => _ = self.began.get_or_insert(process.began),
            Item::Module(module) => _ = self.modules.insert(module.id, module),
            Item::Stack(stack) => {
                self.last_stack = self.last_stack.max(stack.id.0);
                let room = MOST_ADDRESSES.saturating_sub(self.addresses.len());
                self.addresses.extend(stack.addresses.into_iter().take(room));
            }
            Item::Symbols(symbols) => _ = known.insert(symbols.address),
            Item::Allocator(_) => self.has_allocator = true,
            Item::Event(RecordedEvent { kind: EventKind::Alloc { block, .. }, .. }) => {
                self.has_blocks = true;
                // Memory of the host has the number of a device that says nothing.
                if block.kind.is_on_device() {
                    self.devices.insert(block.device.ordinal);
                }
            }
            _ => {}
        }
    }
}

/// Adds what a killed process left in its ring, and the functions at the addresses of stacks. Returns what was there before;
/// `None` if the process runs still.
///
/// # Errors
/// Of reading and writing. The recording is readable up to where it was before.
pub(crate) fn complete(path: &Path) -> io::Result<Option<Content>> {
    // Of all that complete it at the same time, one does it; the others wait until it is complete.
    let lock = place::lock_file(path, "completing");
    let _turn = LockFile::wait(&lock, PATIENCE, || {
        let (path, lock) = (path.display(), lock.display());
        terminal::error(&format_args!("waiting for another process, which completes `{path}` and has locked `{lock}`"));
    })?;
    // Until all is added, no process begins a recording with this name.
    let Some(_ended) = recover(path, &SharedMemory)? else { return Ok(None) };
    parts::join(path)?;
    let (mut content, mut known) = (Content::default(), HashSet::new());
    let end = for_each_item(io::BufReader::new(files::open_to_read(path)?), |item| {
        content.add(item, &mut known);
        Ok(())
    })?;
    content.addresses.retain(|address| !known.contains(address));
    match end {
        End::Complete => {}
        // The disk was full. What is added has to follow a complete record.
        End::Cut { at } => files::open(path, File::options().write(true))?.set_len(at)?,
        End::Damaged { .. } | End::AboveLimit { .. } => return Ok(Some(content)),
    }
    if let Err(error) = symbols::add(path, &content) {
        let what = format!("`{}` lacks the functions of stacks", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    if let Err(error) = torch::add(path, &content) {
        let what = format!("`{}` lacks the history of PyTorch's allocator", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    _ = fs::remove_file(mark(path));
    Ok(Some(content))
}
