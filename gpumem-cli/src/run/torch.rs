//! `--torch`: what `torch.py` in the program wrote becomes a part of the recording.
//!
//! PyTorch logs how much the program asked for. How much a block takes, which is what `torch.cuda.memory_allocated()` counts, follows from
//! where it lies: PyTorch rounds up, and does not split off what is too small to be of use.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader, Seek, SeekFrom},
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem_core::{
    capture::{
        AllocatorAction as Action, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents,
        AllocatorFigures, CodeAddress, Item, StackDefinition, Symbol, SymbolsDefinition, Writer,
    },
    model::{Bytes, Device, Family, StackId},
};
use gpumem_inject::variable;
use serde_json::Value;

use super::recordings::Content;
use crate::{files, history::tensors::remove_range};

/// Lines of Python have addresses from here on: no code has such ones, nor have the lines of the recording.
const LINES: u64 = 0b11 << 62;

/// PyTorch's blocks are multiples of this.
const MIN_BLOCK: u64 = 512;
/// Blocks of this size or less have segments of their own, in which each rest is split off. In others a rest is, if it is larger.
const SMALL: u64 = 1 << 20;

/// The file of the history, and the unfinished one.
fn files(recording: &Path) -> [PathBuf; 2] {
    let file = variable::torch_file(recording);
    let mut part = file.clone().into_os_string();
    part.push(variable::UNFINISHED);
    [file, part.into()]
}

/// There is something to add.
pub(super) fn is_there(recording: &Path) -> bool {
    files(recording).iter().any(|file| file.exists())
}

/// Adds the history to a complete recording, which has this.
pub(super) fn add(recording: &Path, content: &Content) -> io::Result<()> {
    let [file, part] = files(recording);
    let is_complete = file.exists();
    let from = if is_complete { &file } else { &part };
    if !from.exists() {
        return Ok(());
    }
    if !content.has_allocator {
        let dump = Dump::read(BufReader::new(files::open_to_read(from)?), is_complete)?;
        let mut to = files::open(recording, File::options().append(true))?;
        let end = to.seek(SeekFrom::End(0))?;
        let mut writer = Writer::append(&to, end);
        write(&dump, content, &mut writer)?;
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

/// What PyTorch said at the end of the program.
#[derive(Debug, Default)]
struct Dump {
    version: String,
    /// Why there is no history.
    missing: Option<String>,
    /// So many events are kept of each device.
    most: u64,
    frames: Vec<Symbol>,
    /// Innermost first.
    stacks: Vec<Vec<u32>>,
    settings: Settings,
    devices: Vec<DeviceDump>,
}

#[derive(Debug, Default)]
struct DeviceDump {
    ordinal: u32,
    said: Option<AllocatorFigures>,
    trace: Vec<Step>,
    /// At the end.
    segments: Segments,
    blocks: BTreeMap<u64, Live>,
}

/// An event as PyTorch logs it.
#[derive(Clone, Copy, Debug)]
struct Step {
    action: Action,
    /// Of an expandable segment, of which parts come and go.
    is_part: bool,
    address: u64,
    /// What the program asked for.
    bytes: u64,
    stream: u64,
    micros: u64,
    stack: u32,
}

/// Where segments begin, their sizes, and whether they are expandable.
type Segments = BTreeMap<u64, (u64, bool)>;

/// A block that is in use.
#[derive(Clone, Copy, Debug)]
struct Live {
    /// `None` if it is not known yet.
    bytes: Option<u64>,
    requested: u64,
    stack: u32,
    /// Its free was requested.
    is_awaiting: bool,
}

/// The settings of the allocator that decide how large a block is.
#[derive(Debug)]
struct Settings {
    /// Blocks of this size or more are not split.
    max_split: u64,
    /// Into how many parts the room between two powers of 2 is divided, from 1 MiB on. Empty or 1: sizes are not rounded in this way.
    divisions: Vec<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_split: u64::MAX, divisions: Vec::new() }
    }
}

impl Settings {
    fn of(value: &Value) -> Self {
        let of_megabytes = value["roundup_power2_divisions"].as_object();
        let mut divisions: Vec<(u64, u64)> = of_megabytes
            .into_iter()
            .flatten()
            .filter_map(|(megabytes, divisions)| Some((megabytes.parse().ok()?, divisions.as_u64()?)))
            .collect();
        divisions.sort_unstable();
        Self {
            // PyTorch writes the largest number as -1.
            max_split: value["max_split_size"].as_u64().unwrap_or(u64::MAX),
            divisions: divisions.into_iter().map(|(_, divisions)| divisions).collect(),
        }
    }

    /// The size of a block for so many bytes.
    fn rounded(&self, bytes: u64) -> u64 {
        let index = (bytes.max(1).ilog2().saturating_sub(20) as usize).min(self.divisions.len().saturating_sub(1));
        let divisions = self.divisions.get(index).copied().unwrap_or(0);
        if bytes < MIN_BLOCK {
            MIN_BLOCK
        } else if divisions > 1 && bytes > MIN_BLOCK * divisions && !bytes.is_power_of_two() {
            let floor = 1 << bytes.ilog2();
            let part = floor >> divisions.ilog2();
            if part == 0 { floor << 1 } else { bytes.next_multiple_of(part) }
        } else {
            bytes.checked_next_multiple_of(MIN_BLOCK).unwrap_or(bytes)
        }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn number(value: &Value) -> u32 {
    value.as_u64().and_then(|number| number.try_into().ok()).unwrap_or(0)
}

/// An event is `["alloc",140000,512,0,1700000000,3]`: the action, and numbers. PyTorch's numbers are signed.
fn event(line: &str) -> Option<(&str, Vec<u64>)> {
    let (action, numbers) = line.strip_prefix("[\"")?.strip_suffix(']')?.split_once("\",")?;
    let number = |text: &str| text.parse::<i64>().map(i64::cast_unsigned).or_else(|_| text.parse()).ok();
    Some((action, numbers.split(',').map(number).collect::<Option<_>>()?))
}

impl Dump {
    /// Reads the lines. A history that is not complete is of no use: what is live is at its end.
    fn read(from: impl BufRead, is_complete: bool) -> io::Result<Self> {
        let mut dump = Self::default();
        let malformed =
            |line: usize| io::Error::new(io::ErrorKind::InvalidData, format!("line {line} of PyTorch's history"));
        let mut ended = false;
        for (number_of_line, line) in from.lines().enumerate() {
            let line = line?;
            if let Some((action, numbers)) = event(&line) {
                let device = dump.devices.last_mut().ok_or_else(|| malformed(number_of_line))?;
                device.event(action, &numbers).ok_or_else(|| malformed(number_of_line))?;
                continue;
            }
            let Ok(value) = serde_json::from_str::<Value>(&line) else {
                // It was killed while it wrote.
                if is_complete {
                    return Err(malformed(number_of_line));
                }
                break;
            };
            ended |= value.get("end").is_some();
            dump.line(&value);
        }
        if !ended && dump.missing.is_none() {
            let cause = if is_complete {
                "it was not written to its end"
            } else {
                "the process ended without Python's exit handlers (it was killed, or called os._exit or exec)"
            };
            dump.missing = Some(cause.to_owned());
        }
        if dump.missing.is_some() {
            dump.devices.clear();
        }
        Ok(dump)
    }

    fn line(&mut self, value: &Value) {
        if let Some(version) = text(&value["torch"]) {
            self.version = version;
            self.missing = text(&value["why"]);
            if value["is_enabled"] == false {
                self.missing = Some("the program itself has switched the history off".to_owned());
            }
            self.most = value["most"].as_u64().unwrap_or(0);
        } else if value.get("frame").is_some() {
            self.frames.push(Symbol {
                function: text(&value["name"]),
                file: text(&value["file"]),
                line: Some(number(&value["line"])).filter(|line| *line > 0),
                column: None,
            });
        } else if value.get("stack").is_some() {
            self.stacks.push(value["frames"].as_array().into_iter().flatten().map(number).collect());
        } else if let Some(settings) = value.get("settings") {
            self.settings = Settings::of(settings);
        } else if value.get("device").is_some() {
            let figure = |at: usize| value["said"][at].as_u64().map(Bytes::new);
            let said = || {
                Some(AllocatorFigures {
                    allocated: figure(0)?,
                    allocated_high: figure(1)?,
                    reserved: figure(2)?,
                    reserved_high: figure(3)?,
                })
            };
            self.devices.push(DeviceDump { ordinal: number(&value["device"]), said: said(), ..DeviceDump::default() });
        } else if let (Some(segment), Some(device)) = (value["segment"].as_u64(), self.devices.last_mut()) {
            let bytes = value["bytes"].as_u64().unwrap_or(0);
            device.segments.insert(segment, (bytes, value["is_expandable"] == true));
        }
    }
}

impl DeviceDump {
    fn event(&mut self, action: &str, numbers: &[u64]) -> Option<()> {
        let (action, is_part) = match action {
            "alloc" => (Action::Alloc, false),
            "free_requested" => (Action::FreeRequested, false),
            "free_completed" => (Action::FreeCompleted, false),
            "segment_alloc" => (Action::SegmentAlloc, false),
            "segment_free" => (Action::SegmentFree, false),
            "segment_map" => (Action::SegmentAlloc, true),
            "segment_unmap" => (Action::SegmentFree, true),
            "oom" => (Action::OutOfMemory, false),
            "active_allocated" | "active_awaiting_free" | "active_pending_free" => {
                let [address, bytes, requested, stack] = *numbers else { return None };
                let is_awaiting = action != "active_allocated";
                let stack = stack.try_into().ok()?;
                self.blocks.insert(address, Live { bytes: Some(bytes), requested, stack, is_awaiting });
                return Some(());
            }
            // "inactive", "snapshot", and what later versions may log.
            _ => return Some(()),
        };
        let [address, bytes, stream, micros, stack] = *numbers else { return None };
        self.trace.push(Step { action, is_part, address, bytes, stream, micros, stack: stack.try_into().ok()? });
        Some(())
    }

    /// What was live before the first event of the trace, by going back from the end.
    fn before(&self) -> (Segments, BTreeMap<u64, Live>) {
        let (mut segments, mut blocks) = (self.segments.clone(), self.blocks.clone());
        for step in self.trace.iter().rev() {
            let Step { address, bytes, stack, .. } = *step;
            match step.action {
                Action::SegmentAlloc => remove(&mut segments, address, bytes),
                Action::SegmentFree => _ = segments.insert(address, (bytes, step.is_part)),
                Action::Alloc => _ = blocks.remove(&address),
                Action::FreeRequested => {
                    let known = Live { bytes: None, requested: bytes, stack, is_awaiting: false };
                    blocks.entry(address).or_insert(known).is_awaiting = false;
                }
                Action::FreeCompleted => {
                    let known = Live { bytes: None, requested: bytes, stack, is_awaiting: true };
                    _ = blocks.insert(address, known);
                }
                Action::OutOfMemory => {}
            }
        }
        (segments, blocks)
    }

    /// The events of this device, with the sizes of blocks. `time` is the time of an event of PyTorch's, `stack` the number of its stack in
    /// the recording.
    fn events(
        &self,
        settings: &Settings,
        time: impl Fn(u64) -> Duration,
        stack: impl Fn(u32) -> StackId,
    ) -> (Vec<AllocatorEvent>, u64) {
        let (mut segments, mut blocks) = self.before();
        let first = self.trace.first().map_or(0, |step| step.micros);
        let mut events = Vec::new();
        let mut add = |action, address, bytes, requested, (stream, micros, of): (u64, u64, u32)| {
            let (time, stack) = (time(micros), stack(of));
            let [bytes, requested] = [bytes, requested].map(Bytes::new);
            events.push(AllocatorEvent { time, action, address, bytes, requested, stream, stack });
        };
        for (address, (bytes, _)) in &segments {
            add(Action::SegmentAlloc, *address, *bytes, *bytes, (0, first, 0));
        }
        let mut occupied: BTreeMap<u64, u64> = blocks.iter().map(|(at, live)| (*at, live.bytes.unwrap_or(1))).collect();
        for (address, live) in &mut blocks {
            let bytes = live.bytes.unwrap_or_else(|| size(&segments, &occupied, settings, *address, live.requested));
            occupied.insert(*address, bytes);
            add(Action::Alloc, *address, bytes, live.requested, (0, first, live.stack));
            if live.is_awaiting {
                add(Action::FreeRequested, *address, 0, 0, (0, first, live.stack));
            }
        }
        let older = segments.len() as u64 + blocks.values().map(|live| 1 + u64::from(live.is_awaiting)).sum::<u64>();
        for step in &self.trace {
            let Step { action, is_part, address, bytes, stream, micros, stack } = *step;
            let about = (stream, micros, stack);
            match action {
                Action::SegmentAlloc => {
                    segments.insert(address, (bytes, is_part));
                    add(action, address, bytes, bytes, about);
                }
                Action::SegmentFree => {
                    remove(&mut segments, address, bytes);
                    add(action, address, bytes, bytes, about);
                }
                Action::Alloc => {
                    let size = size(&segments, &occupied, settings, address, bytes);
                    occupied.insert(address, size);
                    add(action, address, size, bytes, about);
                }
                Action::FreeRequested => add(action, address, 0, 0, about),
                Action::FreeCompleted => {
                    occupied.remove(&address);
                    add(action, address, 0, 0, about);
                }
                Action::OutOfMemory => add(action, 0, 0, bytes, about),
            }
        }
        (events, older)
    }
}

/// Removes a part of the segments.
fn remove(segments: &mut Segments, address: u64, bytes: u64) {
    remove_range(segments, address, bytes, |_, _| {});
}

/// The size of a new block: the rest of the room where it lies is a part of it, unless PyTorch splits that off.
fn size(segments: &Segments, occupied: &BTreeMap<u64, u64>, settings: &Settings, address: u64, requested: u64) -> u64 {
    let rounded = settings.rounded(requested);
    let segment = segments.range(..=address).next_back().filter(|(begin, (length, _))| address - **begin < *length);
    let Some((begin, (length, is_expandable))) = segment else { return rounded };
    if *is_expandable || rounded <= SMALL {
        return rounded;
    }
    let end = begin + length;
    let next = occupied.range(address + 1..).next().map_or(end, |(next, _)| end.min(*next));
    let room = next - address;
    let is_split = rounded < settings.max_split && room.saturating_sub(rounded) > SMALL;
    if is_split || room < rounded { rounded } else { room }
}

/// Writes the history as items.
fn write(dump: &Dump, content: &Content, writer: &mut Writer<&File>) -> io::Result<()> {
    let began = content.began.unwrap_or_default();
    let time = |micros: u64| Duration::from_micros(micros).saturating_sub(began);
    let first = content.last_stack.saturating_add(1);
    let stack = |number: u32| if number == 0 { StackId::NONE } else { StackId(first.saturating_add(number - 1)) };
    let address = |frame: u32| CodeAddress { module: 0, offset: LINES | u64::from(frame) };
    for (number, symbol) in (0..).zip(&dump.frames) {
        writer.write(&Item::Symbols(SymbolsDefinition { address: address(number), symbols: vec![symbol.clone()] }))?;
    }
    for (number, frames) in (1..).zip(&dump.stacks) {
        let addresses = frames.iter().copied().map(address).collect();
        writer.write(&Item::Stack(StackDefinition { id: stack(number), addresses }))?;
    }
    let mut devices = Vec::new();
    for of_device in &dump.devices {
        let device = Device { family: Family::Cuda, ordinal: of_device.ordinal };
        let (events, older) = of_device.events(&dump.settings, time, stack);
        for events in events.chunks(AllocatorEvents::MOST) {
            writer.write(&Item::AllocatorEvents(AllocatorEvents { device, events: events.to_vec() }))?;
        }
        let is_full = dump.most > 0 && of_device.trace.len() as u64 >= dump.most;
        let known_from = of_device.trace.first().filter(|_| is_full || older > 0).map(|step| time(step.micros));
        devices.push(AllocatorDevice { device, older, known_from, said: of_device.said });
    }
    let name = if dump.version.is_empty() { "PyTorch".to_owned() } else { format!("PyTorch {}", dump.version) };
    writer.write(&Item::Allocator(AllocatorDefinition { name, missing: dump.missing.clone(), devices }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn dump(lines: &[String]) -> Dump {
        let head =
            [r#"{"torch": "2.11.0", "is_enabled": true, "most": 1000}"#, r#"{"settings": {"max_split_size": -1}}"#];
        let text = head.iter().map(ToString::to_string).chain(lines.iter().cloned()).collect::<Vec<_>>().join("\n");
        Dump::read(text.as_bytes(), true).unwrap()
    }

    /// What blocks come to, in order.
    fn sizes(lines: &[String]) -> Vec<(u64, u64)> {
        let dump = dump(lines);
        assert_eq!(dump.missing, None);
        let (events, _) = dump.devices[0].events(&dump.settings, Duration::from_micros, StackId);
        let allocated = events.iter().filter(|event| event.action == Action::Alloc);
        allocated.map(|event| (event.address, event.bytes.get())).collect()
    }

    fn lines(steps: &[(&str, u64, u64)], end: &[&str]) -> Vec<String> {
        let step = |(action, address, bytes): &(&str, u64, u64)| format!("[\"{action}\",{address},{bytes},0,5,0]");
        let head = r#"{"device": 0, "said": [1, 2, 3, 4]}"#.to_owned();
        let end = end.iter().map(ToString::to_string).chain([r#"{"end": true}"#.to_owned()]);
        [head].into_iter().chain(steps.iter().map(step)).chain(end).collect()
    }

    #[test]
    fn a_rest_that_is_not_split_off_is_part_of_a_block() {
        let base = 1 << 30;
        let steps = [
            ("segment_alloc", base, 20 * MIB),
            // The rest has more than 1 MiB.
            ("alloc", base, 10 * MIB + 1),
            // The rest has 1 MiB less 512 bytes.
            ("alloc", base + 10 * MIB + 512, 9 * MIB - 511),
            ("free_requested", base, 10 * MIB + 1),
            ("free_completed", base, 10 * MIB + 1),
            // There is room for 10 MiB and 512 bytes up to the next block, of which 512 bytes are no rest.
            ("alloc", base, 10 * MIB),
        ];
        let expected = [(base, 10 * MIB + 512), (base + 10 * MIB + 512, 10 * MIB - 512), (base, 10 * MIB + 512)];
        let live = format!("[\"active_allocated\",{base},{},{},0]", 10 * MIB + 512, 10 * MIB);
        let other = format!("[\"active_allocated\",{},{},5,0]", base + 10 * MIB + 512, 10 * MIB - 512);
        let segment = format!("{{\"segment\": {base}, \"bytes\": {}, \"is_expandable\": false}}", 20 * MIB);
        assert_eq!(sizes(&lines(&steps, &[&segment, &live, &other])), expected);
    }

    #[test]
    fn what_was_live_before_the_history_is_known_from_its_end() {
        let base = 1 << 30;
        let steps = [
            // Of a block whose allocation is not in the history.
            ("free_requested", base, 700),
            ("free_completed", base, 700),
            ("alloc", base, 100),
        ];
        let segment = format!("{{\"segment\": {base}, \"bytes\": {}, \"is_expandable\": false}}", 2 * MIB);
        let kept = format!("[\"active_allocated\",{},{},1000,0]", base + MIB, 1024);
        let new = format!("[\"active_allocated\",{base},512,100,0]");
        let all = lines(&steps, &[&segment, &new, &kept]);
        assert_eq!(sizes(&all), [(base, 1024), (base + MIB, 1024), (base, 512)]);
        let dump = dump(&all);
        let (events, older) = dump.devices[0].events(&dump.settings, Duration::from_micros, StackId);
        // A segment and two blocks.
        assert_eq!((older, events.len()), (3, 6));
        assert_eq!(events[0].bytes, Bytes::new(2 * MIB));
    }

    #[test]
    fn parts_of_an_expandable_segment_come_and_go() {
        let mut segments = Segments::new();
        segments.insert(0, (60, true));
        remove(&mut segments, 20, 20);
        assert_eq!(segments, [(0, (20, true)), (40, (20, true))].into());
        remove(&mut segments, 10, 40);
        assert_eq!(segments, [(0, (10, true)), (50, (10, true))].into());
        remove(&mut segments, 0, 100);
        assert!(segments.is_empty());
    }

    #[test]
    fn sizes_are_rounded_as_pytorch_does() {
        let plain = Settings::default();
        for (bytes, rounded) in [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)] {
            assert_eq!(plain.rounded(bytes), rounded, "{bytes}");
        }
        let divided = Settings::of(&serde_json::json!({ "roundup_power2_divisions": { "1": 4, "2": 4, "4": 1 } }));
        // PyTorch's own example: 1200 with 4 divisions is 1280; below 4 times 512 bytes nothing is divided.
        for (bytes, rounded) in [(1200, 1536), (1200 << 10, 1280 << 10), (MIB, MIB), (5 * MIB + 1, 5 * MIB + 512)] {
            assert_eq!(divided.rounded(bytes), rounded, "{bytes}");
        }
    }

    #[test]
    fn why_there_is_no_history_is_kept() {
        let missing = |text: &str, is_complete| Dump::read(text.as_bytes(), is_complete).unwrap().missing.unwrap();
        assert_eq!(missing("{\"torch\": \"1.13\", \"why\": \"it is old\"}\n", true), "it is old");
        assert!(
            missing("{\"torch\": \"2.11\", \"is_own\": false}\n", false).contains("without Python's exit handlers")
        );
        assert!(missing("{\"torch\": \"2.11\"}\n{\"device\": 0}\n[\"alloc\",1,2,", false).contains("exit handlers"));
        assert!(missing("{\"torch\": \"2.11\", \"is_enabled\": false}\n{\"end\": true}", true).contains("itself"));
        assert!(Dump::read(&b"[\"alloc\",1,2,3,4,5]"[..], true).is_err());
    }
}
