//! The definitions of the ids in a recording.

use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
};

use super::item::{
    CallsiteDefinition, ClockPair, CodeAddress, ContextDefinition, DeviceDefinition, Finished, Interception, Item,
    ModuleDefinition, PartDefinition, Process, ProcessEnd, RingDefinition, Symbol, ThreadDefinition,
};
use super::{
    allocator::{AllocatorDefinition, TensorGroup, TensorHolder},
    budget::Budget,
};
use gpumem_core::{
    derive::{Callsite, Names, Stack},
    model::{CallsiteId, Device, Frame, PoolId, StackId, ThreadId, Time},
};

/// The approximate memory of a definition in addition to its own bytes.
const OVERHEAD: u64 = 128;

/// The largest number of bytes in the cache of stack texts. A full cache is emptied.
const MOST_BYTES_IN_WORDS: u64 = 1 << 24;

/// The largest number of functions of a stack that are shown, starting with the innermost.
const MOST_FRAMES: usize = 1 << 10;

/// The largest number of addresses that are appended from a caller's stack.
pub(super) const MOST_CALLERS: usize = 128;

/// A cache of stack texts and of their lengths.
#[derive(Debug, Default)]
struct InWords {
    stacks: HashMap<StackId, Stack>,
    /// The bytes of these stacks.
    bytes: u64,
    /// The lengths of stack texts in bytes.
    lengths: HashMap<StackId, u64>,
}

/// Returns the approximate memory of a definition that takes `bytes` bytes in the file. `None` if the item is not a definition.
fn memory_of(item: &Item, bytes: u64) -> Option<u64> {
    let lists = match item {
        Item::Stack(stack) => size_of_val(&*stack.addresses),
        Item::Symbols(symbols) => size_of_val(&*symbols.symbols),
        Item::Process(process) => size_of_val(&*process.arguments),
        Item::Allocator(AllocatorDefinition { devices, settings, contradictions, .. }) => {
            let divisions = settings.as_ref().map_or(0, |settings| size_of_val(&*settings.divisions));
            size_of_val(&**devices) + divisions + size_of_val(&**contradictions)
        }
        Item::Label(_)
        | Item::Event(_)
        | Item::ThreadReused(_)
        | Item::Missed(_)
        | Item::Totals(_)
        | Item::Inside(_)
        | Item::AllocatorEvents(_) => return None,
        _ => 0,
    };
    // A list may reserve memory for twice its length, so its bytes count twice.
    Some(OVERHEAD + bytes + 2 * lists as u64)
}

/// The definitions of a recording. The first definition of an id counts; a different one for the same id is a contradiction.
#[derive(Debug, Default)]
pub struct Definitions {
    process: Process,
    clocks: Vec<ClockPair>,
    threads: HashMap<ThreadId, ThreadDefinition>,
    callsites: HashMap<CallsiteId, CallsiteDefinition>,
    modules: HashMap<u32, ModuleDefinition>,
    stacks: HashMap<StackId, Vec<CodeAddress>>,
    symbols: HashMap<CodeAddress, Vec<Symbol>>,
    devices: HashMap<Device, DeviceDefinition>,
    contexts: HashMap<u8, ContextDefinition>,
    pools: HashMap<PoolId, String>,
    /// The pools by the event number of the block.
    pool_blocks: HashMap<u64, PoolId>,
    interceptions: Vec<Interception>,
    part: Option<PartDefinition>,
    allocator: Option<AllocatorDefinition>,
    tensor_groups: HashMap<u32, TensorGroup>,
    tensor_holders: Vec<TensorHolder>,
    ring: Option<RingDefinition>,
    finished: Option<Finished>,
    in_words: RefCell<InWords>,
    pub(super) left_out: u64,
    pub(super) contradictions: u64,
}

impl Definitions {
    /// Adds a definition that takes `bytes` bytes in the file. If the budget is exhausted, the definition is left out.
    pub(super) fn add(&mut self, item: Item, bytes: u64, budget: &mut Budget) {
        let Some(memory) = memory_of(&item, bytes) else { return };
        if budget.take(memory).is_err() {
            self.left_out += 1;
            return;
        }
        let agrees = match item {
            Item::Process(process) => {
                let agrees = self.process == Process::default() || self.process == process;
                self.process = process;
                agrees
            }
            Item::Clock(pair) => {
                let is_later = self.clocks.last().is_none_or(|last| last.ticks < pair.ticks && last.time <= pair.time);
                if is_later {
                    self.clocks.push(pair);
                }
                is_later
            }
            // Ids of threads and contexts are reused.
            Item::Thread(thread) => {
                self.threads.insert(thread.thread, thread);
                true
            }
            Item::Context(context) => {
                self.contexts.insert(context.context, context);
                true
            }
            Item::Pool(pool) => {
                self.pools.insert(pool.pool, pool.name);
                true
            }
            Item::PoolBlock(block) => add_first(&mut self.pool_blocks, block.number, block.pool),
            Item::Interception(interception) => {
                self.interceptions.push(interception);
                true
            }
            Item::Part(part) => {
                let agrees = self.part.is_none();
                self.part.get_or_insert(part);
                agrees
            }
            Item::Allocator(allocator) => {
                let agrees = self.allocator.as_ref().is_none_or(|known| *known == allocator);
                self.allocator.get_or_insert(allocator);
                agrees
            }
            Item::Ring(ring) => {
                self.ring = Some(ring);
                true
            }
            Item::Finished(finished) => {
                self.finished = Some(finished);
                true
            }
            Item::Callsite(callsite) => add_first(&mut self.callsites, callsite.id, callsite),
            Item::Module(module) => add_first(&mut self.modules, module.id, module),
            Item::Stack(stack) => add_first(&mut self.stacks, stack.id, stack.addresses),
            Item::Symbols(symbols) => {
                // Cached texts may be of stacks with this address.
                *self.in_words.get_mut() = InWords::default();
                add_first(&mut self.symbols, symbols.address, symbols.symbols)
            }
            Item::TensorHolder(holder) => {
                self.tensor_holders.push(holder);
                true
            }
            Item::TensorGroup(group) => add_first(&mut self.tensor_groups, group.id, group),
            Item::Device(device) => add_first(&mut self.devices, device.device, device),
            _ => true,
        };
        self.contradictions += u64::from(!agrees);
    }

    /// Prepares for a new file of the same recording, which repeats its definitions.
    pub(super) fn start_file(&mut self) {
        self.clocks.clear();
        self.interceptions.clear();
        self.part = None;
    }

    /// Returns the recorded process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Returns the last thread with this id.
    pub fn thread(&self, thread: ThreadId) -> Option<&ThreadDefinition> {
        self.threads.get(&thread)
    }

    /// Returns a device.
    pub fn device(&self, device: Device) -> Option<&DeviceDefinition> {
        self.devices.get(&device)
    }

    /// Returns all devices.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceDefinition> {
        self.devices.values()
    }

    /// Returns all modules.
    pub fn modules(&self) -> impl Iterator<Item = &ModuleDefinition> {
        self.modules.values()
    }

    /// Returns the last CUDA context with this id.
    pub fn context(&self, context: u8) -> Option<&ContextDefinition> {
        self.contexts.get(&context)
    }

    /// Returns the sources that intercepted allocations, in order.
    pub fn interceptions(&self) -> &[Interception] {
        &self.interceptions
    }

    /// Returns the part of the events that the recording contains; `None` if it contains all of them.
    pub fn part(&self) -> Option<PartDefinition> {
        self.part
    }

    /// Returns the pool that a block of a shortened recording belongs to, by the event number of the block.
    pub(super) fn pool_of(&self, number: u64) -> PoolId {
        self.pool_blocks.get(&number).copied().unwrap_or(PoolId::NONE)
    }

    /// Returns the place where the process keeps data that is not in its recording yet.
    pub fn ring(&self) -> Option<RingDefinition> {
        self.ring
    }

    /// Returns the caching allocator of the program, if its history was requested.
    pub fn allocator(&self) -> Option<&AllocatorDefinition> {
        self.allocator.as_ref()
    }

    /// Returns the group of tensors with this id.
    pub fn tensor_group(&self, id: u32) -> Option<&TensorGroup> {
        self.tensor_groups.get(&id)
    }

    /// Returns the objects that refer to tensors at the end.
    pub fn tensor_holders(&self) -> &[TensorHolder] {
        &self.tensor_holders
    }

    /// Returns whether the process still runs or ended without writing everything that it recorded. A snapshot has no ring and is
    /// always complete.
    pub fn lacks_end(&self) -> bool {
        self.ring.is_some() && self.finished.is_none()
    }

    /// Returns whether there are modules, but no function or line is known for any address in them. Python frames belong to no
    /// module.
    pub fn lacks_symbols(&self) -> bool {
        !self.modules.is_empty() && self.symbols.keys().all(|address| address.module == 0)
    }

    /// Returns the addresses of a stack.
    pub fn addresses(&self, stack: StackId) -> &[CodeAddress] {
        self.stacks.get(&stack).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the time of a value of the processor's counter. It is interpolated between two pairs of the clocks, and
    /// extrapolated from the nearest two before and after all pairs. `None` if there are fewer than two pairs.
    pub fn time(&self, ticks: u64) -> Option<Time> {
        let after = self.clocks.partition_point(|pair| pair.ticks < ticks).clamp(1, self.clocks.len().max(1));
        let at = after.min(self.clocks.len().checked_sub(1)?);
        let [first, second] = [self.clocks.get(at.checked_sub(1)?)?, self.clocks.get(at)?];
        let signed = |ticks: u64| i128::from(ticks) - i128::from(first.ticks);
        let (first_time, second_time) = (first.time.as_nanos().cast_signed(), second.time.as_nanos().cast_signed());
        // In a hostile file, both may use 64 bits.
        let since = signed(ticks).saturating_mul(second_time - first_time) / signed(second.ticks).max(1);
        let nanoseconds = first_time.saturating_add(since);
        Some(Time::from_nanos(nanoseconds.try_into().unwrap_or(0)))
    }

    /// Returns the time of the writer's last clock reading; the program ran at least until then.
    pub fn last_clock(&self) -> Option<Time> {
        self.clocks.last().map(|pair| pair.time)
    }

    /// Returns when a process that could not write its end has ended.
    pub fn ended(&self) -> Option<ProcessEnd> {
        self.finished?.ended
    }

    /// Returns the functions on a stack, the innermost first: the 1,024 innermost ones, if there are more.
    pub fn frames(&self, stack: StackId) -> Vec<Frame> {
        self.addresses(stack).iter().flat_map(|address| self.frames_at(*address)).take(MOST_FRAMES).collect()
    }

    /// Notes that the innermost frames of `callers` called those of `stack`, if they include Python lines and `stack` has none.
    pub(super) fn add_callers(&mut self, stack: StackId, callers: StackId) {
        let has_python = |stack| self.frames(stack).iter().any(Frame::is_python);
        if has_python(stack) || !has_python(callers) {
            return;
        }
        let callers: Vec<_> = self.addresses(callers).iter().take(MOST_CALLERS).copied().collect();
        if let Some(stack) = self.stacks.get_mut(&stack) {
            stack.extend(callers);
            *self.in_words.get_mut() = InWords::default();
        }
    }

    /// Returns the approximate length of a stack's text in bytes.
    pub fn length_of(&self, stack: StackId) -> u64 {
        let Some(addresses) = self.stacks.get(&stack) else { return 0 };
        *self.in_words.borrow_mut().lengths.entry(stack).or_insert_with(|| {
            let text = |text: &Option<String>| text.as_ref().map_or(0, String::len) as u64;
            let of_symbol = |symbol: &Symbol| text(&symbol.function) + text(&symbol.file);
            let at = |address: &CodeAddress| {
                let module = self.modules.get(&address.module).map_or(0, |module| module.path.len() as u64);
                let symbols = self.symbols.get(address).map(Vec::as_slice).unwrap_or_default();
                let lengths = symbols.iter().map(move |symbol| 64 + module + of_symbol(symbol));
                // A function without a name is shown by its module.
                lengths.chain(symbols.is_empty().then_some(64 + module)).collect::<Vec<_>>()
            };
            addresses.iter().flat_map(at).take(MOST_FRAMES).sum()
        })
    }

    fn frames_at(&self, address: CodeAddress) -> Vec<Frame> {
        let module = || self.modules.get(&address.module).map(|module| module.path.clone());
        let frame = |symbol: &Symbol| {
            let Symbol { function, file, line, column } = symbol.clone();
            Frame { function, file, line, column, module: module() }
        };
        match self.symbols.get(&address).map(Vec::as_slice) {
            None | Some([]) => vec![frame(&Symbol::default())],
            Some(symbols) => symbols.iter().map(frame).collect(),
        }
    }
}

/// Adds a definition. Returns false if this id already has a different one.
fn add_first<K: Eq + Hash, T: PartialEq>(known: &mut HashMap<K, T>, id: K, definition: T) -> bool {
    match known.entry(id) {
        Entry::Vacant(vacant) => {
            vacant.insert(definition);
            true
        }
        Entry::Occupied(known) => *known.get() == definition,
    }
}

impl Names for Definitions {
    fn callsite(&self, id: CallsiteId) -> Callsite {
        let defined = || {
            let CallsiteDefinition { name, file, line, .. } = self.callsites.get(&id)?.clone();
            Some(Callsite { name: name.map(Into::into), file: file.into(), line })
        };
        let missing =
            || Callsite { name: Some(format!("(scope {}, not in the recording)", id.0).into()), ..Callsite::default() };
        Callsite::built_in(id).or_else(defined).unwrap_or_else(missing)
    }

    fn pool(&self, id: PoolId) -> String {
        self.pools.get(&id).cloned().unwrap_or_else(|| format!("pool {}", id.0))
    }

    fn stack(&self, id: StackId) -> Stack {
        if id == StackId::NONE || !self.stacks.contains_key(&id) {
            return Stack::default();
        }
        if let Some(stack) = self.in_words.borrow().stacks.get(&id) {
            return stack.clone();
        }
        let length = self.length_of(id);
        let own_module = self.process.own_module.as_deref();
        let file = match self.addresses(id) {
            [CodeAddress { module, offset: 0 }] => self.modules.get(module),
            _ => None,
        };
        let of_frames = || Stack::new(&self.frames(id), &self.process.folder, own_module);
        let stack = file.map_or_else(of_frames, |file| Stack::of_file(file.path.clone(), own_module));
        let mut in_words = self.in_words.borrow_mut();
        if in_words.bytes + length > MOST_BYTES_IN_WORDS {
            in_words.stacks.clear();
            in_words.bytes = 0;
        }
        in_words.bytes += length;
        in_words.stacks.insert(id, stack.clone());
        stack
    }
}
