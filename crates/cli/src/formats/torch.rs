//! Writes a snapshot as `torch.cuda.memory._snapshot()` makes it. A driver block becomes a segment with one block. If
//! the recording contains the blocks of PyTorch's own allocator, its segments contain these blocks.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io::{self, Write},
};

use gpumem_recording::AllocatorAction as Action;

use super::{frames::functions, pickle::Pickle};
use crate::history::{
    BlockLife, Change, History, Moment, Origin,
    tensors::{AllocatorStep, Piece},
};

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let mut snapshot = Snapshot {
        history,
        pickle: Pickle::new(out)?,
        frames: HashMap::new(),
        of_allocator: segments_of_allocator(history),
        has_tensors: has_tensors(history),
    };
    snapshot.pickle.start_dictionary()?;
    snapshot.pickle.text("segments")?;
    snapshot.segments()?;
    snapshot.pickle.text("device_traces")?;
    snapshot.traces()?;
    snapshot.pickle.text("allocator_settings")?;
    snapshot.pickle.empty_dictionary()?;
    snapshot.pickle.set()?;
    snapshot.pickle.end()
}

/// Returns the address to write for a block. Keys that are not addresses store their kind in bits 58 and above. The
/// kind is moved to bits 48 and above, because the numbers of the web viewer have 53 bits.
const fn address(key: u64) -> u64 {
    key & ((1 << 48) - 1) | (key >> 58) << 48
}

struct Snapshot<'a> {
    history: &'a History,
    pickle: Pickle<'a>,
    /// The memo numbers of the lists of frames that were already written, by origin.
    frames: HashMap<EventOrigin, u32>,
    /// The addresses and sizes of the segments that PyTorch's allocator reports.
    of_allocator: HashSet<(u64, u64)>,
    /// For each device, true if the history of its tensors is known.
    has_tensors: Vec<bool>,
}

/// The origin of a block of the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum EventOrigin {
    /// An index into [`History::origins`].
    Block(u32),
    /// An index into the origins of tensors.
    Tensor(u32),
    Nowhere,
}

fn segments_of_allocator(history: &History) -> HashSet<(u64, u64)> {
    let steps = history.tensors.iter().flat_map(|tensors| &tensors.devices).flat_map(|device| &device.steps);
    steps.filter(|step| step.action == Action::SegmentAlloc).map(|step| (step.address, step.bytes)).collect()
}

fn has_tensors(history: &History) -> Vec<bool> {
    let all = || history.tensors.iter().flat_map(|tensors| &tensors.devices);
    let known: HashSet<_> = all().filter(|of| !of.steps.is_empty()).map(|of| of.about.device.ordinal).collect();
    history.devices.iter().map(|device| known.contains(&device.device.ordinal)).collect()
}

impl Snapshot<'_> {
    /// Returns whether a block is in the memory of a device and is not a segment. Segments are shown as the blocks
    /// inside them instead.
    fn is_shown(&self, block: &BlockLife) -> bool {
        let origin = self.history.origin(block);
        // The keys of parts of expandable segments are not addresses.
        let is_known = || self.of_allocator.contains(&(block.key, block.bytes)) || origin.is_expandable_segment();
        origin.kind.is_on_device() && !(self.has_tensors[usize::from(block.device)] && is_known())
    }

    /// Writes the blocks that are live at the end.
    fn segments(&mut self) -> io::Result<()> {
        let history = self.history;
        self.pickle.start_list()?;
        let mut written = 0;
        for (block, bytes) in history.live_blocks(&history.changes_at(Moment::End)) {
            if !self.is_shown(&block) {
                continue;
            }
            self.pickle.append_part(written)?;
            written += 1;
            let device = history.devices[usize::from(block.device)].device.ordinal;
            let from = EventOrigin::Block(block.origin);
            let only =
                SegmentPart { address: address(block.key), bytes, requested: bytes, state: "active_allocated", from };
            // The stream of the call is not recorded.
            self.segment((device, 0), (only.address, bytes), from, &[only])?;
        }
        for tensors in history.tensors.iter().flat_map(|tensors| &tensors.devices) {
            let state = tensors.state(tensors.steps.len());
            for segment in state.segments(tensors.is_expandable) {
                self.pickle.append_part(written)?;
                written += 1;
                let parts: Vec<_> = state.pieces(&segment).iter().map(SegmentPart::of).collect();
                let place = (tensors.about.device.ordinal, segment.of.stream);
                self.segment(place, (segment.address, segment.bytes), EventOrigin::Nowhere, &parts)?;
            }
        }
        self.pickle.append()
    }

    fn segment(
        &mut self,
        (device, stream): (u32, u64),
        (start, bytes): (u64, u64),
        from: EventOrigin,
        parts: &[SegmentPart],
    ) -> io::Result<()> {
        let sum = |state: &[&str], value: fn(&SegmentPart) -> u64| {
            parts.iter().filter(|part| state.contains(&part.state)).map(value).sum::<u64>()
        };
        let in_use = ["active_allocated", "active_awaiting_free"];
        self.pickle.start_dictionary()?;
        for (name, value) in [
            ("device", device.into()),
            ("address", start),
            ("total_size", bytes),
            ("allocated_size", sum(&in_use[..1], |part| part.bytes)),
            ("active_size", sum(&in_use, |part| part.bytes)),
            ("requested_size", sum(&in_use, |part| part.requested)),
            ("stream", stream),
        ] {
            self.entry(name, value)?;
        }
        self.pickle.word("segment_type")?;
        self.pickle.word("large")?;
        self.frames(from)?;
        self.pickle.word("blocks")?;
        self.pickle.start_list()?;
        for (written, part) in parts.iter().enumerate() {
            self.pickle.append_part(written)?;
            self.pickle.start_dictionary()?;
            let SegmentPart { address, bytes, requested, state, from } = *part;
            for (name, value) in [("address", address), ("size", bytes), ("requested_size", requested)] {
                self.entry(name, value)?;
            }
            self.pickle.word("state")?;
            self.pickle.word(state)?;
            self.frames(from)?;
            self.pickle.set()?;
        }
        self.pickle.append()?;
        self.pickle.set()
    }

    /// Writes the events of each device.
    fn traces(&mut self) -> io::Result<()> {
        let devices = self.history.devices.iter().map(|device| device.device.ordinal + 1).max().unwrap_or(0);
        self.pickle.start_list()?;
        let history = self.history;
        let mut changes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        // The viewer derives the blocks that are live when the events start from those at the end, as for PyTorch's
        // snapshots.
        let first = history.complete_from().unwrap_or(history.lives.change_count());
        for (at, change) in (0_u32..).zip(history.lives.changes()).skip(first) {
            let device = history.lives.block(change.block).device;
            changes.entry(history.devices[usize::from(device)].device.ordinal).or_default().push(at);
        }
        (0..devices).try_for_each(|device| self.trace(device, &changes.remove(&device).unwrap_or_default()))?;
        self.pickle.append()
    }

    fn trace(&mut self, device: u32, changes: &[u32]) -> io::Result<()> {
        let history = self.history;
        self.pickle.start_list()?;
        let tensors = history.tensors.iter().flat_map(|tensors| &tensors.devices);
        let tensors = tensors.filter(|tensors| tensors.about.device.ordinal == device);
        // The first steps are the blocks that are live when the history starts. The viewer derives them from those at
        // the end, as for PyTorch's snapshots.
        let steps = tensors
            .flat_map(|tensors| tensors.steps.iter().skip(usize::try_from(tensors.about.older).unwrap_or(usize::MAX)));
        let (mut steps, mut sizes) = (steps.peekable(), HashMap::new());
        let mut written = 0;
        for at in changes {
            let change = history.lives.change(*at);
            while let Some(step) = steps.next_if(|step| step.time < change.time) {
                self.step(step, &mut sizes, &mut written)?;
            }
            let block = history.lives.block(change.block);
            if self.is_shown(&block) {
                self.change(&change, &block, &mut written)?;
            }
        }
        for step in steps {
            self.step(step, &mut sizes, &mut written)?;
        }
        self.pickle.append()
    }

    /// Writes a change of a driver block.
    fn change(&mut self, change: &Change, block: &BlockLife, written: &mut usize) -> io::Result<()> {
        let actions: &[&'static str] = match change.kind.blocks() {
            1.. => &["segment_alloc", "alloc"],
            // The block shrinks, but the format has no event that frees a part of a block.
            0 => &[],
            _ => &["free_requested", "free_completed", "segment_free"],
        };
        let from = EventOrigin::Block(block.origin);
        let about = (address(block.key), block.bytes, 0, change.time);
        actions.iter().try_for_each(|action| self.event(action, about, from, written))
    }

    /// Writes the events of PyTorch's allocator.
    fn step(&mut self, step: &AllocatorStep, sizes: &mut HashMap<u64, u64>, written: &mut usize) -> io::Result<()> {
        let mut bytes = step.requested;
        let action = match step.action {
            Action::SegmentAlloc => "segment_alloc",
            Action::SegmentFree => "segment_free",
            Action::Alloc => {
                sizes.insert(step.address, bytes);
                "alloc"
            }
            Action::FreeRequested => {
                bytes = sizes.get(&step.address).copied().unwrap_or(0);
                "free_requested"
            }
            Action::FreeCompleted => {
                bytes = sizes.remove(&step.address).unwrap_or(0);
                "free_completed"
            }
            // A rejected request has other fields than other events.
            Action::OutOfMemory => return Ok(()),
        };
        self.event(action, (step.address, bytes, step.stream, step.time), EventOrigin::Tensor(step.origin), written)
    }

    fn event(
        &mut self,
        action: &'static str,
        (address, bytes, stream, nanos): (u64, u64, u64, u64),
        from: EventOrigin,
        written: &mut usize,
    ) -> io::Result<()> {
        // The time is in microseconds since 1970, as in PyTorch.
        let started = u64::try_from(self.history.definitions().process().started.as_micros()).unwrap_or(0);
        self.pickle.append_part(*written)?;
        *written += 1;
        self.pickle.start_dictionary()?;
        self.pickle.word("action")?;
        self.pickle.word(action)?;
        for (name, value) in
            [("addr", address), ("size", bytes), ("stream", stream), ("time_us", started + nanos / 1000)]
        {
            self.entry(name, value)?;
        }
        self.frames(from)?;
        self.pickle.set()
    }

    fn entry(&mut self, name: &'static str, value: u64) -> io::Result<()> {
        self.pickle.word(name)?;
        self.pickle.number(value)
    }

    /// Writes the stack, the innermost function first, followed by the scopes.
    fn frames(&mut self, from: EventOrigin) -> io::Result<()> {
        self.pickle.word("frames")?;
        if let Some(number) = self.frames.get(&from) {
            return self.pickle.get(*number);
        }
        let known: Option<&Origin> = match from {
            EventOrigin::Block(origin) => self.history.origins.get(origin as usize),
            // Without a stack, PyTorch writes no frames.
            EventOrigin::Tensor(origin) => {
                let known = self.history.tensors.as_ref().and_then(|tensors| tensors.origins.get(origin as usize));
                known.filter(|known| !self.history.definitions().frames(known.stack).is_empty())
            }
            EventOrigin::Nowhere => None,
        };
        self.pickle.start_list()?;
        let scopes = known.into_iter().flat_map(|known| known.path.iter().rev());
        let scopes = scopes.map(|scope| (scope.clone(), "scope".to_owned(), 0));
        let functions = known.map(|known| functions(self.history, known)).unwrap_or_default();
        let functions = functions.into_iter().map(|frame| (frame.function, frame.file, frame.line));
        for (name, file, line) in functions.chain(scopes) {
            self.pickle.start_dictionary()?;
            self.pickle.word("name")?;
            self.pickle.text(&name)?;
            self.pickle.word("filename")?;
            self.pickle.text(&file)?;
            self.entry("line", line.into())?;
            self.pickle.set()?;
        }
        self.pickle.append()?;
        let number = self.pickle.memoize()?;
        self.frames.insert(from, number);
        Ok(())
    }
}

/// A block in a segment.
#[derive(Clone, Copy, Debug)]
struct SegmentPart {
    address: u64,
    bytes: u64,
    requested: u64,
    state: &'static str,
    from: EventOrigin,
}

impl SegmentPart {
    fn of(piece: &Piece<'_>) -> Self {
        let (state, requested, from) = match piece.tensor {
            None => ("inactive", 0, EventOrigin::Nowhere),
            Some(tensor) => {
                let state = if tensor.is_awaiting { "active_awaiting_free" } else { "active_allocated" };
                (state, tensor.requested, EventOrigin::Tensor(tensor.origin))
            }
        };
        Self { address: piece.address, bytes: piece.bytes, requested, state, from }
    }
}
