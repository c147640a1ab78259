//! Reads the file that `torch.py` wrote: PyTorch's history of each device, and its live memory at the end.
//!
//! Only the positions of events in the file are kept in memory. The events are read three times: to find them,
//! backwards to compute the memory that was live before the first one, and for the recording.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, Seek, SeekFrom},
    ops::Range,
    rc::Rc,
};

use gpumem_core::model::Bytes;
use gpumem_recording::{AllocatorAction as Action, AllocatorSettings, AllocatorStats, Symbol, TensorClass};
use serde_json::Value;

use super::{contradictions::Contradictions, passes::BackwardPass};

/// PyTorch's data at the end of the program.
#[derive(Debug, Default)]
pub(super) struct TorchHistory {
    pub(super) version: String,
    /// Why there is no history.
    pub(super) missing: Option<String>,
    /// Why there are no modules, if they were requested.
    pub(super) missing_modules: Option<String>,
    /// PyTorch keeps at most this many events of each device.
    pub(super) most: u64,
    pub(super) frames: Vec<Symbol>,
    /// The paths of the libraries of frames.
    pub(super) libraries: Vec<String>,
    /// For each frame in a library, the number of that library, starting at 1.
    pub(super) frame_libraries: HashMap<u32, u32>,
    /// Stacks of frames, the innermost first.
    pub(super) stacks: Vec<Vec<u32>>,
    pub(super) passes: Vec<BackwardPass>,
    /// `None` if they are not known.
    pub(super) settings: Option<AllocatorSettings>,
    pub(super) devices: Vec<DeviceHistory>,
    /// The paths of modules. Events refer to them by number, starting at 1.
    pub(super) modules: Vec<String>,
    /// The tensors that were seen with a class at some times.
    pub(super) marks: Vec<ModuleMark>,
    /// For each tensor, its device, an address in it, and the objects that refer to it at the end.
    pub(super) holders: Vec<(u32, u64, String)>,
}

/// A tensor that `modules.py` found, perhaps several times.
#[derive(Debug)]
pub(super) struct ModuleMark {
    /// The times in microseconds, ascending.
    pub(super) times: Vec<u64>,
    pub(super) tensors: Vec<MarkedTensor>,
}

#[derive(Debug)]
pub(super) struct MarkedTensor {
    pub(super) class: TensorClass,
    pub(super) device: u32,
    /// An address inside the tensor.
    pub(super) address: u64,
    /// The path of its module, as in [`TorchHistory::modules`]. Empty if it is not known.
    pub(super) module: String,
    /// True if autocast casts the tensor: it is a 32-bit weight.
    pub(super) is_cast_by_autocast: bool,
}

/// PyTorch's data of one device.
#[derive(Debug, Default)]
pub(super) struct DeviceHistory {
    pub(super) ordinal: u32,
    pub(super) reported: Option<AllocatorStats>,
    pub(super) trace: Trace,
    /// The segments that the allocator held at the end.
    pub(super) segments: Segments,
    /// The blocks that were live at the end.
    pub(super) blocks: BTreeMap<u64, LiveBlock>,
    /// Contradictions in the memory at the end.
    pub(super) contradictions: Contradictions,
}

/// An event as PyTorch logs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoggedEvent {
    pub(super) action: Action,
    /// True if the segment is expandable. Parts of such a segment are mapped and unmapped.
    pub(super) is_part: bool,
    pub(super) address: u64,
    /// The bytes that the program requested.
    pub(super) bytes: u64,
    pub(super) stream: u64,
    pub(super) micros: u64,
    pub(super) stack: u32,
    /// The number of the module that the thread was in; 0 if it was in none.
    pub(super) module: u32,
}

/// The segments by address.
pub(super) type Segments = BTreeMap<u64, (u64, SegmentAbout)>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SegmentAbout {
    pub(super) is_expandable: bool,
    pub(super) stream: u64,
    /// See [`AllocatorEvent::group`](gpumem_recording::AllocatorEvent::group).
    pub(super) pool: u32,
}

/// Returns the number of a pool for PyTorch's pair of numbers. The first one is for private pools of captured graphs,
/// the second for pools that a program creates.
pub(super) fn pool_of(id: (u64, u64)) -> u32 {
    let number = match id {
        (0, 0) => 1,
        (0, made) => made.saturating_mul(2),
        (captured, _) => captured.saturating_mul(2).saturating_add(1),
    };
    number.try_into().unwrap_or(u32::MAX)
}

/// A block that is in use.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveBlock {
    /// `None` if it is not known yet.
    pub(super) bytes: Option<u64>,
    pub(super) requested: u64,
    pub(super) stack: u32,
    /// True if a free of the block was requested.
    pub(super) is_awaiting: bool,
}

/// The events of a device.
#[derive(Debug, Default)]
pub(super) struct Trace {
    count: usize,
    /// The time of the first event.
    first: Option<u64>,
    events: TraceEvents,
}

/// Where the events of a device are.
#[derive(Debug)]
enum TraceEvents {
    /// In the file. The numbers are the offsets at which each piece of [`PIECE`] events starts.
    InFile(Vec<u64>),
    /// In memory. The number is the index of the first event.
    InMemory(Rc<Vec<LoggedEvent>>, usize),
}

impl Default for TraceEvents {
    fn default() -> Self {
        Self::InFile(Vec::new())
    }
}

/// The number of events that are in memory at the same time.
const PIECE: usize = 4096;

impl Trace {
    /// Creates a trace from a range of the events that are in memory.
    pub(super) fn in_memory(events: Rc<Vec<LoggedEvent>>, range: Range<usize>) -> Self {
        let (count, first) = (range.len(), events[range.clone()].first().map(|event| event.micros));
        Self { count, first, events: TraceEvents::InMemory(events, range.start) }
    }

    pub(super) fn count(&self) -> u64 {
        self.count as u64
    }

    /// Returns the time of the first event, in microseconds.
    pub(super) fn first(&self) -> Option<u64> {
        self.first
    }

    /// Returns the highest time of the events that are in memory, in microseconds.
    pub(super) fn last(&self) -> Option<u64> {
        let TraceEvents::InMemory(events, first) = &self.events else { return None };
        events[*first..][..self.count].iter().map(|event| event.micros).max()
    }

    fn add(&mut self, at: u64, event: &LoggedEvent) {
        self.first.get_or_insert(event.micros);
        if let TraceEvents::InFile(pieces) = &mut self.events
            && self.count.is_multiple_of(PIECE)
        {
            pieces.push(at);
        }
        self.count += 1;
    }

    /// Returns the events in pieces, the first piece first.
    pub(super) fn pieces<'a, R: BufRead + Seek>(
        &'a self,
        from: &'a mut R,
    ) -> impl DoubleEndedIterator<Item = io::Result<Vec<LoggedEvent>>> {
        (0..self.count.div_ceil(PIECE)).map(|number| {
            let before = number * PIECE;
            let count = (self.count - before).min(PIECE);
            match &self.events {
                TraceEvents::InFile(pieces) => piece(from, pieces[number], count),
                TraceEvents::InMemory(events, first) => Ok(events[first + before..][..count].to_vec()),
            }
        })
    }
}

/// Reads the events from this offset of the file on. Other lines may be between them.
fn piece(from: &mut (impl BufRead + Seek), at: u64, count: usize) -> io::Result<Vec<LoggedEvent>> {
    from.seek(SeekFrom::Start(at))?;
    let mut events = Vec::new();
    let mut line = String::new();
    while events.len() < count {
        line.clear();
        if from.read_line(&mut line)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "PyTorch's history was changed while it was read",
            ));
        }
        events.extend(event(line.trim_end()).and_then(|(name, numbers)| LoggedEvent::of(action_of(name)?, &numbers)));
    }
    Ok(events)
}

pub(super) fn settings_of(value: &Value) -> AllocatorSettings {
    let of_megabytes = value["roundup_power2_divisions"].as_object();
    let mut divisions: Vec<(u64, u64)> = of_megabytes
        .into_iter()
        .flatten()
        .filter_map(|(megabytes, divisions)| Some((megabytes.parse().ok()?, divisions.as_u64()?)))
        .collect();
    divisions.sort_unstable();
    if divisions.iter().all(|(_, divisions)| *divisions < 2) {
        divisions.clear();
    }
    AllocatorSettings {
        is_expandable: value["expandable_segments"] == true,
        // PyTorch writes the largest number as -1.
        max_split: value["max_split_size"].as_u64().unwrap_or(u64::MAX),
        divisions: divisions.into_iter().map(|(_, divisions)| divisions).collect(),
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn number(value: &Value) -> u32 {
    value.as_u64().and_then(|number| number.try_into().ok()).unwrap_or(0)
}

/// Reads an event such as `["alloc",140000,512,0,1700000000,3,0]`: the action, and numbers. PyTorch's numbers are signed.
fn event(line: &str) -> Option<(&str, Vec<u64>)> {
    let (action, numbers) = line.strip_prefix("[\"")?.strip_suffix(']')?.split_once("\",")?;
    let number = |text: &str| text.parse::<i64>().map(i64::cast_unsigned).or_else(|_| text.parse()).ok();
    Some((action, numbers.split(',').map(number).collect::<Option<_>>()?))
}

/// Returns the action of an event, and whether the event concerns a part of an expandable segment. `None` for other
/// actions, such as "inactive", "snapshot", and those of later versions.
pub(super) fn action_of(name: &str) -> Option<(Action, bool)> {
    Some(match name {
        "alloc" => (Action::Alloc, false),
        "free_requested" => (Action::FreeRequested, false),
        "free_completed" => (Action::FreeCompleted, false),
        "segment_alloc" => (Action::SegmentAlloc, false),
        "segment_free" => (Action::SegmentFree, false),
        "segment_map" => (Action::SegmentAlloc, true),
        "segment_unmap" => (Action::SegmentFree, true),
        "oom" => (Action::OutOfMemory, false),
        _ => return None,
    })
}

impl LoggedEvent {
    /// Creates an event from a line. `None` if it is malformed.
    fn of((action, is_part): (Action, bool), numbers: &[u64]) -> Option<Self> {
        let &[address, bytes, stream, micros, stack, module] = numbers else { return None };
        let [stack, module] = [stack.try_into().ok()?, module.try_into().ok()?];
        Some(Self { action, is_part, address, bytes, stream, micros, stack, module })
    }
}

impl TorchHistory {
    /// Reads the lines. An incomplete history is useless, because the live blocks are at its end.
    pub(super) fn read(from: &mut impl BufRead, is_complete: bool) -> io::Result<Self> {
        let mut history = Self::default();
        let malformed =
            |line: usize| io::Error::new(io::ErrorKind::InvalidData, format!("line {line} of PyTorch's history"));
        let (mut ended, mut at, mut line) = (false, 0, String::new());
        for number_of_line in 0.. {
            line.clear();
            let length = from.read_line(&mut line)?;
            if length == 0 {
                break;
            }
            let (start, line) = (at, line.trim_end());
            at += length as u64;
            if let Some((action, numbers)) = event(line) {
                let device = history.devices.last_mut().ok_or_else(|| malformed(number_of_line))?;
                device.event(start, action, &numbers).ok_or_else(|| malformed(number_of_line))?;
                continue;
            }
            let Ok(value) = serde_json::from_str::<Value>(line) else {
                // The process was killed while it wrote the file.
                if is_complete {
                    return Err(malformed(number_of_line));
                }
                break;
            };
            ended |= value.get("end").is_some();
            history.line(&value);
        }
        if !ended && history.missing.is_none() {
            let cause = if is_complete {
                "it was not written to its end"
            } else {
                "the process ended without Python's exit handlers (it was killed, or called os._exit or exec)"
            };
            history.missing = Some(cause.to_owned());
        }
        if history.missing.is_some() {
            history.devices.clear();
        }
        Ok(history)
    }

    fn line(&mut self, value: &Value) {
        if let Some(version) = text(&value["torch"]) {
            self.version = version;
            self.missing = text(&value["why"]);
            self.missing_modules = text(&value["missing_modules"]);
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
        } else if let Some(times) = value["passes"].as_array() {
            let stack = number(&value["from"]);
            let pass = |times: &Value| Some(BackwardPass { times: (times[0].as_u64()?, times[1].as_u64()?), stack });
            self.passes.extend(times.iter().filter_map(pass));
        } else if value.get("module").is_some() {
            self.modules.push(text(&value["path"]).unwrap_or_default());
        } else if value.get("mark").is_some() {
            let times = value["mark"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
            let tensors = value["tensors"].as_array().into_iter().flatten().filter_map(MarkedTensor::of).collect();
            self.marks.push(ModuleMark { times, tensors });
        } else if let Some(address) = value["held"].as_u64() {
            self.holders.push((number(&value["on"]), address, text(&value["by"]).unwrap_or_default()));
        } else if let Some(settings) = value.get("settings") {
            self.settings = settings.get("max_split_size").map(|_| settings_of(settings));
        } else if value.get("device").is_some() {
            let bytes_at = |at: usize| value["said"][at].as_u64().map(Bytes::new);
            let reported = || {
                Some(AllocatorStats {
                    allocated: bytes_at(0)?,
                    allocated_high: bytes_at(1)?,
                    reserved: bytes_at(2)?,
                    reserved_high: bytes_at(3)?,
                })
            };
            let ordinal = number(&value["device"]);
            self.devices.push(DeviceHistory { ordinal, reported: reported(), ..DeviceHistory::default() });
        } else if let (Some(segment), Some(device)) = (value["segment"].as_u64(), self.devices.last_mut()) {
            let bytes = value["bytes"].as_u64().unwrap_or(0);
            // Old PyTorch versions do not number pools.
            let id = value["pool"][0].as_u64().zip(value["pool"][1].as_u64());
            let stream = value["stream"].as_i64().map_or(0, i64::cast_unsigned);
            let is_expandable = value["is_expandable"] == true;
            let about = SegmentAbout { is_expandable, stream, pool: id.map_or(0, pool_of) };
            device.add_segment(segment, bytes, about);
        }
    }
}

impl MarkedTensor {
    /// Reads a tensor such as `["weights", 0, 140000, "Net.conv"]`, or `["weights", 0, 140000, "Net.conv", true]`.
    fn of(value: &Value) -> Option<Self> {
        let class = TensorClass::ALL.into_iter().find(|class| value[0] == class.name())?;
        let module = text(&value[3]).unwrap_or_default();
        let is_cast_by_autocast = value[4] == true;
        Some(Self { class, device: number(&value[1]), address: value[2].as_u64()?, module, is_cast_by_autocast })
    }
}

impl DeviceHistory {
    /// Adds an event from the line at this offset of the file. `None` if it is malformed.
    fn event(&mut self, at: u64, action: &str, numbers: &[u64]) -> Option<()> {
        if let "active_allocated" | "active_awaiting_free" | "active_pending_free" = action {
            let [address, bytes, requested, stack] = *numbers else { return None };
            let is_awaiting = action != "active_allocated";
            let stack = stack.try_into().ok()?;
            self.add_block(address, LiveBlock { bytes: Some(bytes), requested, stack, is_awaiting });
        } else if let Some(action) = action_of(action) {
            self.trace.add(at, &LoggedEvent::of(action, numbers)?);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    #[test]
    fn events_are_read_in_pieces() {
        let count = 2 * PIECE as u64 + 5;
        let mut text = "{\"torch\": \"2.11.0\"}\n{\"device\": 0}\n".to_owned();
        for number in 0..count {
            _ = writeln!(text, "[\"alloc\",{number},1,0,{},0,0]", 100 + number);
            text += if number % 7 == 0 { "{\"frame\": 0, \"name\": \"f\"}\n[\"inactive\",1,2,3]\n" } else { "" };
        }
        text += "{\"end\": true}\n";
        let mut from = io::Cursor::new(text);
        let history = TorchHistory::read(&mut from, true).unwrap();
        let trace = &history.devices[0].trace;
        assert_eq!((trace.count(), trace.first()), (count, Some(100)));
        assert!(matches!(&trace.events, TraceEvents::InFile(pieces) if pieces.len() == 3));
        let addresses = |pieces: Vec<io::Result<Vec<LoggedEvent>>>| {
            pieces.into_iter().flat_map(Result::unwrap).map(|event| event.address).collect::<Vec<_>>()
        };
        assert_eq!(addresses(trace.pieces(&mut from).collect()), (0..count).collect::<Vec<_>>());
        let last = trace.pieces(&mut from).next_back().unwrap().unwrap();
        assert_eq!((last.len(), last[0].address), (5, count - 5));
        from.get_mut().truncate(5_000);
        assert!(trace.pieces(&mut from).next().unwrap().is_err());
    }

    #[test]
    fn divisions_are_those_of_each_power_of_two() {
        let settings = settings_of(&serde_json::json!({ "roundup_power2_divisions": { "4": 1, "1": 4, "2": 8 } }));
        assert_eq!((settings.divisions, settings.max_split), (vec![4, 8, 1], u64::MAX));
    }

    #[test]
    fn why_there_is_no_history_is_kept() {
        let read = |text: &str, is_complete| TorchHistory::read(&mut text.as_bytes(), is_complete);
        let missing = |text: &str, is_complete| read(text, is_complete).unwrap().missing.unwrap();
        assert_eq!(missing("{\"torch\": \"1.13\", \"why\": \"it is old\"}\n", true), "it is old");
        assert!(
            missing("{\"torch\": \"2.11\", \"is_own\": false}\n", false).contains("without Python's exit handlers")
        );
        assert!(missing("{\"torch\": \"2.11\"}\n{\"device\": 0}\n[\"alloc\",1,2,", false).contains("exit handlers"));
        assert!(missing("{\"torch\": \"2.11\", \"is_enabled\": false}\n{\"end\": true}", true).contains("itself"));
        assert!(read("[\"alloc\",1,2,3,4,5,0]", true).is_err());
    }
}
