//! The objects of a PyTorch snapshot while its pickle is being read. Once the dictionary of an event, block or segment
//! is complete, it is reduced to a few bytes. Equal stacks are kept once.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    rc::Rc,
};

use gpumem_recording::{AllocatorAction, Symbol};
use serde_json::{Map, json};

use super::{
    history::{
        DeviceHistory, LiveBlock, LoggedEvent, SegmentAbout, TorchHistory, Trace, action_of, pool_of, settings_of,
    },
    names,
};

/// Recordings only contain blocks of less than 64 TiB.
const MOST_BYTES: u64 = (1 << 46) - 1;
/// PyTorch supports at most this many devices.
const MOST_DEVICES: u32 = 128;

/// A value of a pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Value {
    Number(i64),
    /// The id of a text.
    Text(u32),
    /// The id of a list or a dictionary.
    Object(u32),
    /// A tuple of two numbers.
    Pair(u32, u32),
    True,
    /// A value that is not needed.
    Other,
}

/// A list or a dictionary.
#[derive(Clone, Copy, Debug)]
enum Object {
    /// A list that is empty, or whose values are in [`Objects::values`].
    List,
    /// A dictionary. If it is not empty, [`Objects::values`] contains its names and values in turn.
    Dictionary,
    Frame(Option<u32>),
    /// A list of frames.
    Stack(u32),
    Record(Record, u32),
    /// A list of consecutive records, from the first number up to the second.
    Records(Record, u32, u32),
    /// An event that is not needed.
    Ignored,
}

/// A dictionary of which only the needed fields are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    Event,
    Block,
    Segment,
}

#[derive(Debug)]
struct Segment {
    device: u32,
    address: u64,
    bytes: u64,
    about: SegmentAbout,
    /// Its first block, and the one after its last.
    blocks: (u32, u32),
    /// The sums of its blocks that are allocated, and of those that are in use: also while a free is awaited. `None` if
    /// the snapshot does not contain them.
    sums: [Option<u64>; 2],
}

/// A block that is in use, or the size of an unused one.
type Block = (u64, Option<LiveBlock>);

/// The objects of a snapshot that have been read so far.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// At most this many texts, objects and other values are kept.
    most: usize,
    texts: Vec<Rc<str>>,
    text_numbers: HashMap<Rc<str>, u32>,
    all: Vec<Object>,
    /// The values of all other dictionaries and lists.
    values: HashMap<u32, Vec<Value>>,
    values_count: usize,
    /// The ids of frames, by function, file and line.
    frames: HashMap<(Option<Value>, Value, u64), u32>,
    /// The ids of libraries, by path.
    libraries: HashMap<Value, u32>,
    history: TorchHistory,
    /// The ids of stacks, starting at 1, by their frames.
    stacks: HashMap<Vec<u32>, u32>,
    events: Vec<LoggedEvent>,
    blocks: Vec<Block>,
    segments: Vec<Segment>,
}

/// The fields of a dictionary.
struct Fields<'a> {
    objects: &'a Objects,
    values: &'a [Value],
}

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<Value> {
        let pairs = self.values.chunks_exact(2);
        let is_it = |pair: &&[Value]| matches!(pair[0], Value::Text(text) if self.objects.known_text(text) == name);
        pairs.rev().find(is_it).map(|pair| pair[1])
    }

    fn number(&self, name: &str) -> u64 {
        match self.get(name) {
            Some(Value::Number(number)) => number.cast_unsigned(),
            _ => 0,
        }
    }

    /// Returns a number that must be present. A value that cannot be read must not become 0.
    fn required(&self, name: &str, missing: &'static str) -> Result<u64, &'static str> {
        match self.get(name) {
            Some(Value::Number(number)) => Ok(number.cast_unsigned()),
            _ => Err(missing),
        }
    }

    /// Checks that addresses and sizes are small enough for their sums to fit into 64 bits.
    fn check(&self) -> Result<(), &'static str> {
        let is_small = ["size", "requested_size", "total_size"].iter().all(|name| self.number(name) <= MOST_BYTES);
        if is_small && ["addr", "address"].iter().all(|name| self.number(name) < 1 << 57) {
            Ok(())
        } else {
            Err("no GPU has an address or a size as large as this one")
        }
    }

    fn object(&self, name: &str) -> Option<Object> {
        match self.get(name)? {
            Value::Object(object) => Some(self.objects.all[object as usize]),
            _ => None,
        }
    }

    fn stack(&self) -> u32 {
        match self.object("frames") {
            Some(Object::Stack(stack)) => stack,
            _ => 0,
        }
    }
}

impl Objects {
    /// Creates an empty collection for a file of this many bytes.
    pub(super) fn new(length: u64) -> Self {
        // A kept value takes at least 8 bytes in PyTorch's snapshots, and most take far more.
        let most = usize::try_from(length / 8).unwrap_or(usize::MAX).saturating_add(1 << 16);
        let mut objects = Self { most: most.min(u32::MAX as usize), ..Self::default() };
        objects.history.libraries.extend(names::LIBRARIES.map(str::to_owned));
        objects
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    pub(super) fn known_text(&self, number: u32) -> &str {
        &self.texts[number as usize]
    }

    /// Returns the id of the next value, after this many others.
    fn next(&self, count: usize) -> Result<u32, &'static str> {
        let number = u32::try_from(count).ok().filter(|_| count < self.most);
        number.ok_or("a snapshot of this size has fewer values")
    }

    pub(super) fn text(&mut self, text: &str) -> Result<Value, &'static str> {
        let text = &*names::held(text);
        if let Some(number) = self.text_numbers.get(text) {
            return Ok(Value::Text(*number));
        }
        let number = self.next(self.texts.len())?;
        let text: Rc<str> = text.into();
        self.texts.push(Rc::clone(&text));
        self.text_numbers.insert(text, number);
        Ok(Value::Text(number))
    }

    /// Adds a list.
    pub(super) fn list(&mut self) -> Result<Value, &'static str> {
        self.object(Object::List)
    }

    /// Adds a dictionary.
    pub(super) fn dictionary(&mut self) -> Result<Value, &'static str> {
        self.object(Object::Dictionary)
    }

    fn object(&mut self, object: Object) -> Result<Value, &'static str> {
        let number = self.next(self.all.len())?;
        self.all.push(object);
        Ok(Value::Object(number))
    }

    /// Adds values to a list.
    pub(super) fn append(&mut self, list: u32, values: &[Value]) -> Result<(), &'static str> {
        let object = |value: &Value| match value {
            Value::Object(number) => Some(self.all[*number as usize]),
            _ => None,
        };
        let mut made = self.all[list as usize];
        let is_empty = matches!(made, Object::List) && !self.values.contains_key(&list);
        match (made, values.first().and_then(object)) {
            // Python adds at most 1,000 values at once. Reports do not show more frames than that.
            (Object::Stack(_), _) => return Ok(()),
            (Object::List, Some(Object::Frame(_))) if is_empty => {
                let frame = |value| match object(value) {
                    Some(Object::Frame(frame)) => frame,
                    _ => None,
                };
                let frames: Vec<u32> = values.iter().filter_map(frame).collect();
                let next = u32::try_from(self.stacks.len() + 1).unwrap_or(u32::MAX);
                // Stack 0 has no frames.
                made = Object::Stack(if frames.is_empty() { 0 } else { *self.stacks.entry(frames).or_insert(next) });
            }
            (Object::List, Some(Object::Record(..) | Object::Ignored)) | (Object::Records(..), _)
                if is_empty || matches!(made, Object::Records(..)) =>
            {
                for value in values {
                    made = match (made, object(value)) {
                        (made, Some(Object::Ignored)) => made,
                        (Object::List, Some(Object::Record(record, at))) => Object::Records(record, at, at + 1),
                        (Object::Records(record, first, end), Some(Object::Record(other, at)))
                            if record == other && end == at =>
                        {
                            Object::Records(record, first, end + 1)
                        }
                        _ => return Err("a list has something twice, or events and something else"),
                    };
                }
            }
            (Object::List, _) => return self.keep(list, values),
            _ => return Err("only lists and dictionaries get values"),
        }
        self.all[list as usize] = made;
        Ok(())
    }

    /// Adds fields to a dictionary.
    pub(super) fn set(&mut self, dictionary: u32, values: &[Value]) -> Result<(), &'static str> {
        if !values.len().is_multiple_of(2) {
            return Err("a field has no value");
        }
        match self.all[dictionary as usize] {
            Object::Dictionary if !self.values.contains_key(&dictionary) => {
                if let Some(known) = self.known(values)? {
                    self.all[dictionary as usize] = known;
                    return Ok(());
                }
            }
            Object::Dictionary => {}
            _ => return Err("a complete dictionary gets more fields"),
        }
        let is_needed = |name: &Value| match name {
            Value::Text(text) => names::is_needed(self.known_text(*text)),
            _ => false,
        };
        let needed: Vec<_> = values.chunks_exact(2).filter(|field| is_needed(&field[0])).flatten().copied().collect();
        if needed.is_empty() { Ok(()) } else { self.keep(dictionary, &needed) }
    }

    fn keep(&mut self, object: u32, values: &[Value]) -> Result<(), &'static str> {
        self.values_count += values.len();
        self.next(self.values_count)?;
        self.values.entry(object).or_default().extend(values);
        Ok(())
    }

    /// Returns the event, block or segment with these fields, if the dictionary is one.
    fn known(&mut self, values: &[Value]) -> Result<Option<Object>, &'static str> {
        let fields = Fields { objects: self, values };
        if let Some(Value::Text(action)) = fields.get("action") {
            let Some((action, is_part)) = action_of(self.known_text(action)) else { return Ok(Some(Object::Ignored)) };
            // A rejected request may be of any size.
            let is_rejected = action == AllocatorAction::OutOfMemory;
            if !is_rejected {
                fields.check()?;
            }
            let (address, bytes) = if is_rejected {
                (0, fields.number("size").min(MOST_BYTES))
            } else {
                let address = fields.required("addr", "the `addr` of an event is not a whole number")?;
                (address, fields.required("size", "the `size` of an event is not a whole number")?)
            };
            let event = LoggedEvent {
                action,
                is_part,
                address,
                bytes,
                stream: fields.number("stream"),
                micros: fields.number("time_us"),
                stack: fields.stack(),
                module: 0,
            };
            let number = self.next(self.events.len())?;
            self.events.push(event);
            return Ok(Some(Object::Record(Record::Event, number)));
        }
        if let Some(file) = fields.get("filename") {
            let frame = self.frame(fields.get("name"), file, fields.number("line"));
            return Ok(Some(Object::Frame(frame)));
        }
        if let Some(Value::Text(state)) = fields.get("state") {
            fields.check()?;
            let bytes = fields.required("size", "the `size` of a block is not a whole number")?;
            let state = self.known_text(state);
            let requested =
                if fields.get("requested_size").is_some() { fields.number("requested_size") } else { bytes };
            let is_awaiting = state != "active_allocated";
            let live = LiveBlock { bytes: Some(bytes), requested, stack: fields.stack(), is_awaiting };
            let block = (bytes, (state != "inactive").then_some(live));
            let number = self.next(self.blocks.len())?;
            self.blocks.push(block);
            return Ok(Some(Object::Record(Record::Block, number)));
        }
        if fields.get("total_size").is_some() {
            fields.check()?;
            let no_device = "the `device` of a segment is not the number of a device";
            let device = fields.required("device", no_device)?;
            let segment = Segment {
                device: u32::try_from(device).ok().filter(|device| *device < MOST_DEVICES).ok_or(no_device)?,
                address: fields.required("address", "the `address` of a segment is not a whole number")?,
                bytes: fields.required("total_size", "the `total_size` of a segment is not a whole number")?,
                about: SegmentAbout {
                    is_expandable: fields.get("is_expandable") == Some(Value::True),
                    stream: fields.number("stream"),
                    pool: match fields.get("segment_pool_id") {
                        Some(Value::Pair(captured, made)) => pool_of((captured.into(), made.into())),
                        _ => 0,
                    },
                },
                blocks: match fields.object("blocks") {
                    Some(Object::Records(Record::Block, first, end)) => (first, end),
                    _ => (0, 0),
                },
                sums: ["allocated_size", "active_size"].map(|name| fields.get(name).map(|_| fields.number(name))),
            };
            let number = self.next(self.segments.len())?;
            self.segments.push(segment);
            return Ok(Some(Object::Record(Record::Segment, number)));
        }
        Ok(None)
    }

    /// Returns the id of a frame. `None` for functions that are on every stack and do not belong to the program.
    fn frame(&mut self, function: Option<Value>, file: Value, line: u64) -> Option<u32> {
        // Code without debug information is called `??`.
        let text = |value| match value {
            Some(Value::Text(text)) => Some(self.known_text(text)).filter(|text| !matches!(*text, "" | "??")),
            _ => None,
        };
        let path = text(Some(file)).unwrap_or_default();
        // If the line is not known, PyTorch writes the path of the library and an address in it.
        let is_library = names::is_library(path);
        let line = if is_library { 0 } else { line };
        if let Some(known) = self.frames.get(&(function, file, line)) {
            return Some(*known);
        }
        // A C++ function without an address has no line, and at most the name of a file such as `TensorImpl.cpp`.
        let is_native = line == 0 && !names::is_python(path);
        let name = text(function);
        if is_native && name.is_some_and(names::is_everywhere) {
            return None;
        }
        let symbol = Symbol {
            function: name.map(str::to_owned),
            file: Some(path.to_owned()).filter(|path| !path.is_empty() && !is_native),
            line: u32::try_from(line).ok().filter(|line| *line > 0),
            column: None,
        };
        let path = path.to_owned();
        let history = &mut self.history;
        let number = u32::try_from(history.frames.len()).unwrap_or(u32::MAX);
        history.frames.push(symbol);
        self.frames.insert((function, file, line), number);
        if is_library {
            let library = *self.libraries.entry(file).or_insert_with(|| {
                history.libraries.push(path);
                u32::try_from(history.libraries.len()).unwrap_or(u32::MAX)
            });
            history.frame_libraries.insert(number, library);
        } else if is_native {
            history.frame_libraries.insert(number, 2);
        }
        Some(number)
    }

    /// Returns the fields of any other dictionary.
    fn fields(&self, value: Option<Value>) -> Option<Fields<'_>> {
        let Some(Value::Object(object)) = value else { return None };
        self.values.get(&object).map(|values| Fields { objects: self, values })
    }

    /// Returns PyTorch's settings, as `torch.py` writes them.
    fn settings(&self, settings: &Fields<'_>) -> serde_json::Value {
        let divisions = self.fields(settings.get("roundup_power2_divisions"));
        let pairs = divisions.iter().flat_map(|divisions| divisions.values.chunks_exact(2));
        let divisions: Map<_, _> = pairs
            .filter_map(|pair| match *pair {
                [Value::Text(name), Value::Number(number)] => Some((self.known_text(name).to_owned(), number.into())),
                _ => None,
            })
            .collect();
        let max_split = settings.number("max_split_size").cast_signed();
        let is_expandable = settings.get("expandable_segments") == Some(Value::True);
        json!({
            "max_split_size": max_split,
            "roundup_power2_divisions": divisions,
            "expandable_segments": is_expandable,
        })
    }

    /// Returns the history in a snapshot. `snapshot` is the value of the pickle.
    pub(super) fn history(mut self, snapshot: Value) -> io::Result<TorchHistory> {
        let fields = self.fields(Some(snapshot)).filter(|fields| fields.get("segments").is_some());
        let no_snapshot =
            || invalid("it is not a PyTorch snapshot: `segments` or `device_traces` is missing".to_owned());
        let fields = fields.ok_or_else(no_snapshot)?;
        let traces = match fields.get("device_traces").ok_or_else(no_snapshot)? {
            Value::Object(traces) => self.values.get(&traces).map(Vec::as_slice).unwrap_or_default(),
            _ => &[],
        };
        let settings = self.fields(fields.get("allocator_settings")).map(|settings| self.settings(&settings));
        let mut devices: BTreeMap<u32, DeviceHistory> = BTreeMap::new();
        let mut ranges = Vec::new();
        for (ordinal, trace) in (0..).zip(traces) {
            if let Value::Object(trace) = trace
                && let Object::Records(Record::Event, first, end) = self.all[*trace as usize]
            {
                ranges.push((ordinal, first as usize, end as usize));
            }
        }
        let twice = |what| invalid(format!("{what} of the snapshot is in two lists"));
        if !ranges.is_sorted_by(|one, next| one.2 <= next.1) {
            return Err(twice("an event"));
        }
        let events = Rc::new(std::mem::take(&mut self.events));
        for (ordinal, first, end) in ranges {
            devices.entry(ordinal).or_default().trace = Trace::in_memory(Rc::clone(&events), first..end);
        }
        let mut last_block = 0;
        for segment in &self.segments {
            let Segment { device, address, bytes, about, blocks: (first, end), sums } = *segment;
            if first < last_block && first < end {
                return Err(twice("a block"));
            }
            last_block = last_block.max(end);
            let device = devices.entry(device).or_default();
            device.add_segment(address, bytes, about);
            let (mut at, mut of_blocks) = (address, [0_u64; 2]);
            for (bytes, live) in &self.blocks[first as usize..end as usize] {
                if let Some(live) = live {
                    let [allocated, active] = &mut of_blocks;
                    *allocated += if live.is_awaiting { 0 } else { *bytes };
                    *active += bytes;
                    device.add_block(at, *live);
                }
                at = at.saturating_add(*bytes);
            }
            for (sum, of_blocks) in sums.into_iter().zip(of_blocks) {
                let is_right = sum.is_none_or(|sum| sum == of_blocks);
                let what = "of blocks are in a segment with another sum of them at the end";
                device.contradictions.check(is_right, of_blocks, what);
            }
            if at != address + bytes {
                device.contradictions.add(at - address, "of blocks are in a segment with another size at the end");
            }
        }
        let mut stacks = vec![Vec::new(); self.stacks.len()];
        for (frames, number) in self.stacks {
            stacks[number as usize - 1] = frames;
        }
        Ok(TorchHistory {
            stacks,
            settings: settings.as_ref().map(settings_of),
            devices: devices.into_iter().map(|(ordinal, device)| DeviceHistory { ordinal, ..device }).collect(),
            ..self.history
        })
    }
}

/// Creates the error for a file that is not a snapshot.
pub(super) fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
