//! Adds PyTorch's history to a recording. It comes from the file that `torch.py` wrote in the program (`--torch`), or
//! from a snapshot that the program saved.

mod before;
mod calls;
mod contradictions;
mod groups;
mod history;
mod names;
mod objects;
mod passes;
mod pickle;
mod sizes;
mod snapshot;

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem_core::model::{Device, Family, StackId};
use gpumem_inject::variable;
use gpumem_recording::{
    AllocatorContradiction, AllocatorDefinition, AllocatorDevice, AllocatorEvents, CodeAddress, Item, ModuleDefinition,
    StackDefinition, SymbolsDefinition, TensorHolder, Writer,
};

pub(crate) use self::snapshot::{is_snapshot, recording_of};
use self::{groups::Groups, history::TorchHistory, passes::Stacks};
use super::content::Content;
use crate::files;

/// Addresses from here on represent Python lines in the history. No code has such addresses, and the Python lines that
/// the recorder wrote have lower ones.
const LINES: u64 = 0b11 << 62;

/// Returns the address that represents a frame of the history.
fn address(history: &TorchHistory, frame: u32) -> CodeAddress {
    let module = history.frame_libraries.get(&frame).copied().unwrap_or(0);
    CodeAddress { module, offset: LINES | u64::from(frame) }
}

/// Returns the paths of the history's file and of the unfinished file.
fn history_files(recording: &Path) -> [PathBuf; 2] {
    let file = variable::torch_file(recording);
    let mut part = file.clone().into_os_string();
    part.push(variable::UNFINISHED);
    [file, part.into()]
}

/// Returns whether there is a history next to the recording.
pub(super) fn has_history(recording: &Path) -> bool {
    history_files(recording).iter().any(|file| file.exists())
}

/// Adds the history to a complete recording. `content` is the recording's content.
pub(super) fn add(recording: &Path, content: &Content) -> io::Result<()> {
    let [file, part] = history_files(recording);
    let is_complete = file.exists();
    let from = if is_complete { &file } else { &part };
    if !from.exists() {
        return Ok(());
    }
    if !content.has_allocator {
        let mut from = BufReader::new(files::open_to_read(from)?);
        let history = TorchHistory::read(&mut from, is_complete)?;
        let mut to = files::open(recording, File::options().append(true))?;
        let end = to.seek(SeekFrom::End(0))?;
        let mut writer = Writer::append(&to, end);
        write(&history, &mut from, content, &mut writer)?;
        writer.flush()?;
    }
    for file in [file, part] {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Writes the history as items.
fn write(
    history: &TorchHistory,
    from: &mut (impl BufRead + Seek),
    content: &Content,
    writer: &mut Writer<impl Write>,
) -> io::Result<()> {
    let started = content.started.unwrap_or_default();
    let time = |micros: u64| Duration::from_micros(micros).saturating_sub(started);
    let first = content.last_stack.saturating_add(1);
    let stack = |number: u32| if number == 0 { StackId::NONE } else { StackId(first.saturating_add(number - 1)) };
    for (id, path) in (1..).zip(&history.libraries) {
        let path = path.clone();
        writer.write(&Item::Module(ModuleDefinition { id, path, build_id: Vec::new(), base: 0 }))?;
    }
    for (number, symbol) in (0..).zip(&history.frames) {
        let address = address(history, number);
        writer.write(&Item::Symbols(SymbolsDefinition { address, symbols: vec![symbol.clone()] }))?;
    }
    let mut stacks = Stacks::new(&history.frames, &history.stacks, &history.passes);
    let definition = |(number, frames): (u32, &Vec<u32>)| {
        let addresses = frames.iter().map(|frame| address(history, *frame)).collect();
        Item::Stack(StackDefinition { id: stack(number), addresses })
    };
    (1..).zip(&history.stacks).try_for_each(|of_stack| writer.write(&definition(of_stack)))?;
    let (mut devices, mut contradictions, mut groups) = (Vec::new(), Vec::new(), Groups::default());
    for of_device in &history.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        let mut events = Vec::new();
        let mut put = |events: Vec<_>| writer.write(&Item::AllocatorEvents(AllocatorEvents { device, events }));
        let (older, wrong) = of_device.events(history, (&mut groups, &mut stacks), from, time, stack, |event| {
            events.push(event);
            if events.len() == AllocatorEvents::MOST { put(std::mem::take(&mut events)) } else { Ok(()) }
        })?;
        if !events.is_empty() {
            put(events)?;
        }
        let is_full = history.most > 0 && of_device.trace.count() >= history.most;
        let known_from = of_device.trace.first().filter(|_| is_full || older > 0).map(time);
        contradictions.extend(wrong.in_words().map(|words| AllocatorContradiction { device, words }));
        devices.push(AllocatorDevice { device, older, known_from, reported: of_device.reported });
    }
    stacks.made().try_for_each(|(number, frames)| writer.write(&definition((number, &frames))))?;
    for (ordinal, address, holder) in &history.holders {
        let device = Device { family: Family::Cuda, ordinal: *ordinal };
        let holder = holder.clone();
        writer.write(&Item::TensorHolder(TensorHolder { device, address: *address, holder }))?;
    }
    groups.definitions().try_for_each(|group| writer.write(&Item::TensorGroup(group)))?;
    let name = if history.version.is_empty() { "PyTorch".to_owned() } else { format!("PyTorch {}", history.version) };
    let (missing, missing_modules) = (history.missing.clone(), history.missing_modules.clone());
    let settings = history.settings.clone();
    writer.write(&Item::Allocator(AllocatorDefinition {
        name,
        missing,
        devices,
        missing_modules,
        settings,
        contradictions,
    }))
}
