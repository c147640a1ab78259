//! The memory of the device during a step: an allocator and the inbox that its allocations are recorded in.

use std::{cell::RefCell, collections::HashMap, rc::Rc, time::Duration};

use gpumem_core::{
    inbox::Inbox,
    ledger::NodeId,
    model::{
        Block, Bytes, CallsiteId, Device, Event, EventKind, Family, Key, MemKind, ScopeId, ScopeSpec, Source, Space,
        StackId, ThreadId, Trace,
    },
};

use crate::{
    allocator::{Allocator, AllocatorKind, Placement},
    class::Class,
    error::{Error, Kind},
};

const DEVICE: Device = Device { family: Family::Simulated, ordinal: 0 };
const THREAD: ThreadId = ThreadId(1);
/// The number under which the ledger keeps the peak for reading. No scope has it.
const PEAK: ScopeId = ScopeId(u64::MAX);
/// The ledger counts in `i64`.
const MOST: u64 = 1 << 62;

/// Records each allocation with its class and with the layer that makes it.
#[derive(Debug)]
pub(crate) struct Memory(RefCell<State>);

#[derive(Debug)]
struct State {
    allocator: Allocator,
    inbox: Inbox,
    /// The number of the newest event.
    number: u64,
    in_use: u64,
    /// The most that the allocator may have.
    limit: u64,
    open: Vec<OpenScope>,
    scopes: u64,
    /// The names of scopes. The first ones are the ledger's own.
    names: Vec<Rc<str>>,
    numbers: HashMap<Rc<str>, CallsiteId>,
    class: Option<Class>,
}

#[derive(Clone, Copy, Debug)]
struct OpenScope {
    scope: ScopeId,
    name: CallsiteId,
    /// What was in use when it was opened.
    start: u64,
}

/// What was in use at the peak by one scope path and class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AtPeak {
    pub(crate) path: Vec<Rc<str>>,
    pub(crate) class: Class,
    pub(crate) bytes: u64,
}

/// The bytes of one block of memory. They are freed when this is dropped.
#[derive(Debug)]
pub(crate) struct Storage {
    memory: Rc<Memory>,
    /// `None` if it has no bytes.
    block: Option<Placed>,
}

/// A block and what the allocator added to it.
#[derive(Clone, Copy, Debug)]
struct Placed {
    placement: Placement,
    is_rounded: bool,
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(block) = self.block {
            self.memory.free(block);
        }
    }
}

impl Memory {
    pub(crate) fn new(kind: AllocatorKind, limit: u64) -> Self {
        Self(RefCell::new(State {
            allocator: Allocator::new(kind, limit.min(MOST)),
            limit,
            inbox: Inbox::new(),
            number: 0,
            in_use: 0,
            open: Vec::new(),
            scopes: 0,
            names: vec!["".into(), "".into()],
            numbers: HashMap::new(),
            class: None,
        }))
    }

    /// Allocates memory in the scope that is open. `set_class` may override the class.
    pub(crate) fn alloc(self: &Rc<Self>, bytes: u64, class: Class) -> Result<Storage, Error> {
        let block = if bytes == 0 { None } else { Some(self.place(bytes, class)?) };
        Ok(Storage { memory: Rc::clone(self), block })
    }

    fn place(&self, bytes: u64, class: Class) -> Result<Placed, Error> {
        let mut state = self.0.borrow_mut();
        let class = state.class.unwrap_or(class);
        let placement = state.allocator.alloc(bytes);
        let in_use = placement.and_then(|placement| state.in_use.checked_add(placement.bytes));
        let (Some(placement), Some(in_use @ ..MOST)) = (placement, in_use) else {
            let has_limit = state.limit < MOST && bytes < MOST;
            let kind =
                if has_limit { Kind::OutOfMemory { requested: bytes, in_use: state.in_use } } else { Kind::TooLarge };
            drop(state);
            return Err(Error::in_layer(self.path(), kind));
        };
        state.in_use = in_use;
        state.record(&alloc(key(placement.address), bytes, class));
        let is_rounded = placement.bytes > bytes;
        if is_rounded {
            state.record(&alloc(rounding_key(placement.address), placement.bytes - bytes, Class::Rounding));
        }
        Ok(Placed { placement, is_rounded })
    }

    fn free(&self, Placed { placement: Placement { address, bytes }, is_rounded }: Placed) {
        let mut state = self.0.borrow_mut();
        state.in_use -= bytes;
        state.record(&EventKind::Free { key: key(address), block: None });
        if is_rounded {
            state.record(&EventKind::Free { key: rounding_key(address), block: None });
        }
        state.allocator.free(address);
    }

    /// All allocations have this class until `None` is set again.
    pub(crate) fn set_class(&self, class: Option<Class>) -> Option<Class> {
        std::mem::replace(&mut self.0.borrow_mut().class, class)
    }

    /// Opens a scope inside the open ones.
    pub(crate) fn open(&self, name: &str) {
        let mut state = self.0.borrow_mut();
        let name = state.name(name);
        state.open(name);
    }

    /// Closes the innermost scope. Returns the most that the device had in use while it was open.
    pub(crate) fn close(&self) -> u64 {
        self.0.borrow_mut().close()
    }

    /// The names of the open scopes, as numbers.
    pub(crate) fn open_scopes(&self) -> Vec<CallsiteId> {
        self.0.borrow().open.iter().map(|scope| scope.name).collect()
    }

    /// Closes and opens scopes so that those inside the outermost one have these names.
    pub(crate) fn move_to(&self, layers: &[CallsiteId]) {
        let mut state = self.0.borrow_mut();
        let same = state.open.iter().skip(1).zip(layers).take_while(|(scope, name)| scope.name == **name).count();
        while state.open.len() > same + 1 {
            state.close();
        }
        for name in &layers[same..] {
            state.open(*name);
        }
    }

    /// The path of the open layer, such as `features.0`. The outermost scope is no layer.
    pub(crate) fn path(&self) -> String {
        let state = self.0.borrow();
        let names = state.open.iter().skip(1).map(|scope| &*state.names[scope.name.0 as usize]);
        names.collect::<Vec<_>>().join(".")
    }

    #[cfg(test)]
    pub(crate) fn in_use(&self) -> u64 {
        self.0.borrow().in_use
    }

    pub(crate) fn reserved_peak(&self) -> u64 {
        self.0.borrow().allocator.reserved_peak()
    }

    /// The highest sum of all blocks so far, and what it consists of.
    pub(crate) fn peak(&self) -> (u64, Vec<AtPeak>) {
        let state = self.0.borrow();
        let inbox = &state.inbox;
        if !inbox.keep_device_peak(DEVICE, PEAK) {
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
                path.push(Rc::clone(&state.names[at.callsite.0 as usize]));
                node = at.parent;
            }
            path.reverse();
            path
        };
        let at_peak = |group: &gpumem_core::ledger::GroupAtPeak| AtPeak {
            path: path(group.group.node),
            class: Class::from_stack(group.group.stack),
            bytes: unsigned(group.bytes.get()),
        };
        (unsigned(total.bytes.get()), groups.iter().map(at_peak).collect())
    }
}

impl State {
    fn record(&mut self, kind: &EventKind) -> Option<Trace> {
        self.number += 1;
        // The number is the time: the n-th event comes after n nanoseconds.
        let time = Duration::from_nanos(self.number);
        self.inbox.replay(&Event { number: self.number, time, thread: THREAD, kind })
    }

    fn name(&mut self, name: &str) -> CallsiteId {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = CallsiteId(u32::try_from(self.names.len()).unwrap_or(CallsiteId::OTHERS.0));
        let name: Rc<str> = name.into();
        self.names.push(Rc::clone(&name));
        self.numbers.insert(name, number);
        number
    }

    fn open(&mut self, name: CallsiteId) {
        self.scopes += 1;
        let scope = ScopeId(self.scopes);
        let spec = ScopeSpec { callsite: name, source: Source::Simulation, ..ScopeSpec::exact(DEVICE) };
        self.record(&EventKind::Open { scope, spec });
        self.open.push(OpenScope { scope, name, start: self.in_use });
    }

    fn close(&mut self) -> u64 {
        let Some(OpenScope { scope, start, .. }) = self.open.pop() else { return self.in_use };
        let trace = self.record(&EventKind::Close { scope });
        trace.map_or(start, |trace| start + trace.peak_over_start().get())
    }
}

fn alloc(key: Key, bytes: u64, class: Class) -> EventKind {
    let block = Block { stack: class.stack(), ..Block::new(DEVICE, Bytes::new(bytes), MemKind::Device) };
    EventKind::Alloc { key, block }
}

fn key(address: u64) -> Key {
    Key::new(Space::Address, address)
}

/// What an allocator adds to a block is a block of its own at the same address.
fn rounding_key(address: u64) -> Key {
    Key::new(Space::Handle, address)
}

fn unsigned(bytes: i64) -> u64 {
    bytes.max(0).unsigned_abs()
}

impl Class {
    /// The ledger keeps a number for each block that says where it comes from. In an estimate that is the class.
    fn stack(self) -> StackId {
        StackId(self as u32 + 1)
    }

    fn from_stack(stack: StackId) -> Self {
        Self::ALL[(stack.0 as usize).saturating_sub(1).min(Self::ALL.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::{AtPeak, Class, Memory};
    use crate::allocator::AllocatorKind;

    #[test]
    fn the_peak_has_paths_and_classes() {
        let memory = Rc::new(Memory::new(AllocatorKind::PyTorch, u64::MAX));
        memory.open("forward");
        memory.open("conv");
        let weights = memory.alloc(1000, Class::Weights).unwrap();
        let other = memory.alloc(512, Class::Activations).unwrap();
        assert_eq!((memory.path(), memory.in_use()), ("conv".to_owned(), 1536));
        drop(other);
        assert_eq!(memory.close(), 1536);
        assert_eq!(memory.close(), 1536);
        drop(weights);
        assert_eq!(memory.in_use(), 0);
        let (peak, mut parts) = memory.peak();
        parts.sort_by_key(|part| part.class);
        let part = |class, bytes| AtPeak { path: vec!["forward".into(), "conv".into()], class, bytes };
        let expected = [part(Class::Weights, 1000), part(Class::Activations, 512), part(Class::Rounding, 24)];
        assert_eq!((peak, parts.as_slice()), (1536, expected.as_slice()));
    }

    #[test]
    fn scopes_move_by_the_shortest_way() {
        let memory = Rc::new(Memory::new(AllocatorKind::Exact, u64::MAX));
        memory.open("forward");
        memory.open("a");
        memory.open("b");
        let inside: Vec<_> = memory.open_scopes()[1..].to_vec();
        memory.move_to(&inside[..1]);
        assert_eq!(memory.path(), "a");
        memory.move_to(&inside);
        assert_eq!(memory.path(), "a.b");
        memory.move_to(&[]);
        assert_eq!(memory.path(), "");
    }

    #[test]
    fn sums_beyond_the_ledger_are_errors() {
        let memory = Rc::new(Memory::new(AllocatorKind::Exact, u64::MAX));
        memory.open("forward");
        memory.open("head");
        let _half = memory.alloc(1 << 61, Class::Weights).unwrap();
        let error = memory.alloc(1 << 61, Class::Weights).unwrap_err();
        assert_eq!(error.to_string(), "layer `head`: the sizes are too large: the sum does not fit into 62 bits");
    }
}
