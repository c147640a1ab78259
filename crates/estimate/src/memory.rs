//! The memory of the device during a step: an allocator, and the inbox that records its allocations.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    rc::Rc,
    time::Duration,
};

use gpumem_core::{
    inbox::{Inbox, LedgerView},
    ledger::NodeId,
    model::{
        Block, CallsiteId, Device, Event, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Source, Space, StackId,
        ThreadId,
    },
};

use crate::{
    AllocatorKind, Bytes, Class, Error, Kind, PeakPart, Result,
    allocator::{Allocator, Placement, allocator},
    recording::{Recording, stack},
};

const DEVICE: Device = Device { family: Family::Simulated, ordinal: 0 };
const THREAD: ThreadId = ThreadId(1);
/// The id under which the ledger keeps the peak for reading. No scope uses it.
const PEAK: ScopeId = ScopeId(u64::MAX);
/// Sums stay below this, because the ledger counts in `i64`.
const MOST: u64 = 1 << 62;

/// The memory of a step. Each allocation is recorded with its class and the layer that makes it.
#[derive(Debug)]
pub(crate) struct StepMemory {
    allocator: RefCell<Box<dyn Allocator>>,
    state: RefCell<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The inbox with the ledger, which knows the parts of the peak. `None` if only the peak is needed: that takes a
    /// third of the time.
    inbox: Option<Inbox>,
    /// The number of the latest event.
    number: u64,
    in_use: u64,
    /// The highest `in_use`.
    peak: u64,
    /// The limit of the allocator.
    limit: u64,
    open: Vec<OpenScope>,
    /// The result of [`StepMemory::layers`] for these open scopes.
    layers: Option<Rc<[CallsiteId]>>,
    scopes: u64,
    /// The names of scopes. The first ones belong to the ledger itself.
    names: Vec<Rc<str>>,
    numbers: HashMap<Rc<str>, CallsiteId>,
    class: Option<Class>,
    /// A recording to which the events are also written.
    recording: Option<Recording>,
    /// True after the step. Its blocks are not freed, like those of a process that ends.
    is_over: bool,
}

#[derive(Clone, Copy, Debug)]
struct OpenScope {
    scope: ScopeId,
    name: CallsiteId,
    /// The highest `in_use` since the scope was opened.
    peak: u64,
}

/// The bytes of one block of memory, which are freed when this is dropped.
#[derive(Debug)]
pub(crate) struct Storage {
    memory: Rc<StepMemory>,
    /// The block, and the requested bytes. `None` if there are no bytes.
    block: Cell<Option<(Placement, u64)>>,
}

impl Storage {
    /// Creates a storage that has no bytes yet.
    pub(crate) fn new(memory: &Rc<StepMemory>) -> Self {
        Self { memory: Rc::clone(memory), block: Cell::new(None) }
    }

    /// Allocates the bytes, if there are none: `untyped_storage().resize_()`.
    pub(crate) fn fill(&self, bytes: u64, class: Class) -> Result<()> {
        if self.block.get().is_none() && bytes > 0 {
            self.block.set(Some((self.memory.place(bytes, class)?, bytes)));
        }
        Ok(())
    }

    /// Frees the bytes. Tensors may still refer to the storage.
    pub(crate) fn free(&self) {
        if let Some((block, requested)) = self.block.take() {
            self.memory.free(block, requested);
        }
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.free();
    }
}

impl StepMemory {
    /// Creates a memory. Without `knows_parts`, it knows its peak, but not the parts of the peak.
    pub(crate) fn new(kind: AllocatorKind, limit: u64, knows_parts: bool) -> Self {
        let allocator = RefCell::new(allocator(kind, limit.min(MOST)));
        let (inbox, names) = (knows_parts.then(Inbox::new), vec!["".into(), "(other layers)".into()]);
        Self { allocator, state: RefCell::new(State { inbox, limit, names, ..State::default() }) }
    }

    /// Writes all events of the step to a recording as well.
    pub(crate) fn record(&self, model: &str) {
        let mut state = self.state.borrow_mut();
        let limit = (state.limit < MOST).then(|| Bytes::new(state.limit));
        state.recording = Some(Recording::new(model, DEVICE, limit));
    }

    /// Returns the recording, if there is one.
    pub(crate) fn finish_recording(&self) -> Option<Vec<u8>> {
        self.state.borrow_mut().recording.take().map(Recording::finish)
    }

    /// Allocates memory in the open scope. `with_class` may override the class.
    fn place(&self, bytes: u64, class: Class) -> Result<Placement> {
        let mut state = self.state.borrow_mut();
        let class = state.class.unwrap_or(class);
        let placement = self.allocator.borrow_mut().alloc(bytes);
        let in_use = placement.and_then(|placement| state.in_use.checked_add(placement.bytes));
        let (Some(placement), Some(in_use @ ..MOST)) = (placement, in_use) else {
            let has_limit = state.limit < MOST && bytes < MOST;
            let kind =
                if has_limit { Kind::OutOfMemory { requested: bytes, in_use: state.in_use } } else { Kind::TooLarge };
            drop(state);
            return Err(Error::in_layer(self.path(), kind));
        };
        state.in_use = in_use;
        state.peak = state.peak.max(in_use);
        if let Some(scope) = state.open.last_mut() {
            scope.peak = scope.peak.max(in_use);
        }
        let block =
            |class, bytes| Block { stack: stack(class), ..Block::new(DEVICE, Bytes::new(bytes), MemKind::Device) };
        state.record(EventKind::Alloc { key: Key::new(Space::Address, placement.address), block: block(class, bytes) });
        if placement.bytes > bytes {
            // The bytes that the allocator adds are a separate block with the class `Rounding`.
            let block = block(Class::Rounding, placement.bytes - bytes);
            state.record(EventKind::Alloc { key: Key::new(Space::Handle, placement.address), block });
        }
        Ok(placement)
    }

    fn free(&self, placement: Placement, requested: u64) {
        let mut state = self.state.borrow_mut();
        if state.is_over {
            return;
        }
        state.in_use -= placement.bytes;
        state.record(EventKind::Free { key: Key::new(Space::Address, placement.address), block: None });
        if placement.bytes > requested {
            state.record(EventKind::Free { key: Key::new(Space::Handle, placement.address), block: None });
        }
        self.allocator.borrow_mut().free(placement);
    }

    /// Calls `run`, whose allocations all have this class.
    pub(crate) fn with_class<R>(&self, class: Class, run: impl FnOnce() -> R) -> R {
        let before = self.state.borrow_mut().class.replace(class);
        let result = run();
        self.state.borrow_mut().class = before;
        result
    }

    /// Opens a scope inside the open ones.
    pub(crate) fn open(&self, name: &str) {
        let mut state = self.state.borrow_mut();
        let name = state.name(name);
        state.open(name);
    }

    /// Runs a function in the scope of a layer; a layer without a name has none. After an error, the scope is not closed: the message
    /// contains its path, and nothing runs afterwards. Recomputation also ends with an error, and restores the scopes itself.
    pub(crate) fn in_layer<R>(&self, name: &str, run: impl FnOnce() -> Result<R>) -> Result<R> {
        if name.is_empty() {
            return run();
        }
        self.open(name);
        let result = run()?;
        self.close();
        Ok(result)
    }

    /// Closes the innermost scope. Returns the peak of the device while it was open.
    pub(crate) fn close(&self) -> u64 {
        self.state.borrow_mut().close()
    }

    /// Returns the names of the open layers, as ids. The outermost scope is not a layer.
    pub(crate) fn layers(&self) -> Rc<[CallsiteId]> {
        let State { open, layers, .. } = &mut *self.state.borrow_mut();
        let names = || open.iter().skip(1).map(|scope| scope.name).collect();
        Rc::clone(layers.get_or_insert_with(names))
    }

    /// Closes and opens scopes so that the scopes inside the outermost one have these names.
    pub(crate) fn move_to(&self, layers: &[CallsiteId]) {
        let mut state = self.state.borrow_mut();
        let same = state.open.iter().skip(1).zip(layers).take_while(|(scope, name)| scope.name == **name).count();
        while state.open.len() > same + 1 {
            state.close();
        }
        for name in &layers[same..] {
            state.open(*name);
        }
    }

    /// Returns the path of the open layer, such as `features.0`. The outermost scope is not a layer.
    pub(crate) fn path(&self) -> String {
        self.path_of(&self.layers())
    }

    /// Returns the path of layers that were open earlier.
    pub(crate) fn path_of(&self, layers: &[CallsiteId]) -> String {
        let state = self.state.borrow();
        layers.iter().map(|layer| &*state.names[layer.0 as usize]).collect::<Vec<_>>().join(".")
    }

    /// Returns how many allocations, frees, and openings and closings of scopes there were.
    pub(crate) fn events(&self) -> u64 {
        self.state.borrow().number
    }

    pub(crate) fn reserved_peak(&self) -> u64 {
        self.allocator.borrow().reserved_peak()
    }

    /// Ends the step. Returns the highest sum of all blocks, and its parts if they are known: the largest first, and parts
    /// of the same size by layer and class.
    pub(crate) fn end(&self) -> (u64, Vec<PeakPart>) {
        let mut state = self.state.borrow_mut();
        state.is_over = true;
        let Some(inbox) = &state.inbox else { return (state.peak, Vec::new()) };
        if !inbox.keep_device_peak(DEVICE, PEAK, false) {
            return (0, Vec::new());
        }
        let kept = inbox.kept_peak(PEAK);
        inbox.release_peak(PEAK);
        let Some((total, groups)) = kept else { return (0, Vec::new()) };
        let nodes = inbox.nodes();
        let path = |mut node: NodeId| {
            let mut path = Vec::new();
            while let Some((Some(_), at)) = nodes.get(node.0 as usize)
                && at.callsite != CallsiteId::NONE
            {
                path.push(&*state.names[at.callsite.0 as usize]);
                node = at.parent;
            }
            path.reverse();
            path
        };
        let class = |StackId(stack): StackId| Class::ALL.get((stack as usize).wrapping_sub(1)).copied();
        let mut sums: BTreeMap<(u32, Class), u64> = BTreeMap::new();
        for part in &groups {
            let class = class(part.group.stack).unwrap_or(Class::Activations);
            *sums.entry((part.group.node.0, class)).or_default() += unsigned(part.bytes.get());
        }
        let parts = sums.into_iter().map(|((node, class), bytes)| {
            let path = path(NodeId(node));
            let (phase, layers) = path.split_first().unwrap_or((&"", &[]));
            PeakPart { phase: (*phase).to_owned(), layer: layers.join("."), class, bytes: Bytes::new(bytes) }
        });
        let mut parts: Vec<_> = parts.collect();
        parts.sort_by(|a, b| (b.bytes, &a.layer, a.class).cmp(&(a.bytes, &b.layer, b.class)));
        (unsigned(total.bytes.get()), parts)
    }
}

impl State {
    fn record(&mut self, kind: EventKind) {
        self.number += 1;
        let Some(inbox) = &self.inbox else { return };
        // The event number serves as the time: the n-th event comes after n nanoseconds.
        let time = Duration::from_nanos(self.number);
        inbox.replay(&Event { number: self.number, time, thread: THREAD, kind: &kind }, None, &mut ());
        if let Some(recording) = &mut self.recording {
            recording.event(self.number, THREAD, kind);
        }
    }

    fn name(&mut self, name: &str) -> CallsiteId {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = CallsiteId(u32::try_from(self.names.len()).unwrap_or(CallsiteId::OTHERS.0));
        if let Some(recording) = &mut self.recording {
            recording.define(number, name);
        }
        let name: Rc<str> = name.into();
        self.names.push(Rc::clone(&name));
        self.numbers.insert(name, number);
        number
    }

    fn open(&mut self, name: CallsiteId) {
        self.layers = None;
        self.scopes += 1;
        let scope = ScopeId(self.scopes);
        let spec = ScopeSpec { callsite: name, source: Source::Simulation, ..ScopeSpec::exact(DEVICE) };
        self.record(EventKind::Open { scope, spec });
        self.open.push(OpenScope { scope, name, peak: self.in_use });
    }

    fn close(&mut self) -> u64 {
        self.layers = None;
        let Some(OpenScope { scope, peak, .. }) = self.open.pop() else { return self.in_use };
        self.record(EventKind::Close { scope });
        if let Some(around) = self.open.last_mut() {
            around.peak = around.peak.max(peak);
        }
        peak
    }
}

fn unsigned(bytes: i64) -> u64 {
    bytes.max(0).unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::StepMemory;
    use crate::allocator::AllocatorKind;

    #[test]
    fn scopes_move_by_the_shortest_way() {
        let memory = Rc::new(StepMemory::new(AllocatorKind::Exact, u64::MAX, true));
        memory.open("forward");
        memory.open("a");
        memory.open("b");
        let inside = memory.layers();
        memory.move_to(&inside[..1]);
        assert_eq!(memory.path(), "a");
        memory.move_to(&inside);
        assert_eq!(memory.path(), "a.b");
        memory.move_to(&[]);
        assert_eq!(memory.path(), "");
    }
}
