//! Recordings for tests, written as a session writes them.

use std::time::Duration;

use fastrand::Rng;
use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, DriverGauge, EventKind, Family, Key, Label, MemKind, ScopeId, ScopeSpec, Source,
    Space, StackId, ThreadId,
};
use gpumem_recording::{
    AllocatorAction, AllocatorDefinition, AllocatorDevice, AllocatorEvent, AllocatorEvents, AllocatorStats, BlockLabel,
    CallsiteDefinition, ClockPair, CodeAddress, DeviceDefinition, Interception, Item, ModuleDefinition, Process,
    RecordedEvent, StackDefinition, Symbol, SymbolsDefinition, TensorClass, TensorGroup, ThreadDefinition, Writer,
};

pub(crate) const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };
pub(crate) const MIB: u64 = 1 << 20;

/// A recording that is being made. Its clock advances by a microsecond with each event.
pub(crate) struct RecordingBuilder {
    writer: Writer<Vec<u8>>,
    number: u64,
    micros: u64,
    thread: ThreadId,
    next_key: u64,
    next_scope: u64,
    /// The id of the latest stack.
    last_stack: u32,
}

/// The places of [`RecordingBuilder::training`]: function, file, line, module.
const PLACES: [(&str, &str, u32, u32); 6] = [
    ("train::Model::new", "/home/ada/train/src/model.rs", 12, 1),
    ("train::forward", "/home/ada/train/src/model.rs", 42, 1),
    ("train::backward", "/home/ada/train/src/model.rs", 77, 1),
    ("train::Adam::step", "/home/ada/train/src/adam.rs", 30, 1),
    ("cublasCreate_v2", "", 0, 2),
    ("train::main", "/home/ada/train/src/main.rs", 9, 1),
];

/// Makes an event of PyTorch's allocator that belongs to no module.
pub(crate) fn allocator_event(
    time: Duration,
    action: AllocatorAction,
    address: u64,
    bytes: u64,
    stack: u32,
) -> AllocatorEvent {
    let (bytes, stack) = (Bytes::new(bytes), StackId(stack));
    AllocatorEvent { time, action, address, bytes, requested: bytes, stream: 0, stack, group: 0 }
}

/// Makes the definition of a callsite.
pub(crate) fn callsite(id: u32, name: &str, file: &str, line: u32) -> CallsiteDefinition {
    let (id, name, file) = (CallsiteId(id), Some(name.to_owned()), file.to_owned());
    CallsiteDefinition { id, name, file, line, column: 5, module_path: None }
}

impl RecordingBuilder {
    pub(crate) fn new(name: &str) -> Self {
        Self::started(name, true, None)
    }

    /// Starts a recording without symbols, as a program leaves it before its end. A program writes its symbols last.
    pub(crate) fn without_symbols(name: &str) -> Self {
        Self::started(name, false, None)
    }

    /// Makes the recording of a rank of a run that trains 50 layers in Python, with about 2,000 events. Rank 17 keeps 6 GiB more
    /// than the others in the forward pass of layer 30. An allocation of rank 29 fails in the driver, and this rank ends before
    /// the others.
    pub(crate) fn of_rank(rank: u64) -> Self {
        const LAYERS: u32 = 50;
        let mut made = Self::started("train", true, Some(rank));
        made.python();
        let mut random = Rng::with_seed(rank);
        let outer: Vec<_> = (0..18).map(|depth| format!("Module{depth}._call_impl")).collect();
        let mut stacks_in = |function: &str, line: u32| -> Vec<u32> {
            let stack = |layer: u32| {
                let file = format!("/home/ada/train/block_{}.py", layer / 10);
                let mut frames = vec![(3, "at::detail::empty_cuda", "", 0), (0, function, &*file, line + layer % 10)];
                frames.extend(outer.iter().map(|name| (0, &**name, "/home/ada/venv/torch/nn/modules/module.py", 1773)));
                frames.push((0, "<module>", "/home/ada/train/train.py", 40));
                made.stack(&frames).0 - 1
            };
            (0..LAYERS).map(stack).collect()
        };
        let [weights, forward, backward] =
            [("__init__", 10), ("forward", 30), ("backward", 50)].map(|(name, line)| stacks_in(name, line));
        let size = |random: &mut Rng| (300 + random.u64(..10)) << 18;
        for place in weights {
            made.alloc(2 * size(&mut random), MemKind::Device, place);
        }
        for step in 0..10 {
            let scope = made.open(1);
            made.wait(20_000 + random.u64(..2_000));
            let mut activations: Vec<_> =
                forward.iter().map(|place| made.alloc(size(&mut random), MemKind::Pool, *place)).collect();
            if rank == 17 && step > 3 {
                made.alloc(1 << 30, MemKind::Pool, forward[30]);
            }
            if rank == 29 && step == 6 {
                made.rejected(64 << 30, MemKind::Device, backward[0]);
                return made;
            }
            for place in backward.iter().rev() {
                let gradient = made.alloc(size(&mut random), MemKind::Pool, *place);
                made.free(activations.pop().expect("each layer has some"));
                made.free(gradient);
            }
            made.close(scope);
        }
        made
    }

    /// Starts the recording of a process of a job.
    pub(crate) fn of_job(name: &str, rank: u64) -> Self {
        Self::started(name, true, Some(rank))
    }

    fn started(name: &str, has_symbols: bool, rank: Option<u64>) -> Self {
        let process = Process {
            pid: 4711,
            executable: format!("/home/ada/train/target/release/{name}"),
            arguments: vec![name.to_owned(), "--epochs".to_owned(), "3".to_owned()],
            folder: "/home/ada/train".to_owned(),
            own_module: Some("train".to_owned()),
            started: Duration::from_secs(1_790_000_000),
            version: "0.1.0".to_owned(),
            ran_before: None,
            cards: None,
            host: Some("node-1".to_owned()),
            rank,
        };
        Self::of(process, has_symbols)
    }

    /// Starts a recording with the items that a process writes first.
    pub(crate) fn of(process: Process, has_symbols: bool) -> Self {
        let writer = Writer::new(Vec::new()).expect("memory takes all");
        let mut made = Self {
            writer,
            number: 0,
            micros: 0,
            thread: ThreadId(1),
            next_key: 0x7f00_0000_0000,
            next_scope: 0,
            last_stack: u32::try_from(PLACES.len()).expect("there are few"),
        };
        made.item(&Item::Process(process));
        made.item(&Item::Interception(Interception {
            source: Source::Dispatch,
            library: "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06".to_owned(),
        }));
        made.device(DEVICE, "NVIDIA H200");
        made.item(&Item::Thread(ThreadDefinition { thread: ThreadId(1), os_id: 4711, name: Some("main".to_owned()) }));
        for (id, path) in [(1, "/home/ada/train/target/release/train"), (2, "/usr/lib/libcublas.so.12")] {
            made.item(&Item::Module(ModuleDefinition { id, path: path.to_owned(), build_id: vec![1, 2, 3], base: 0 }));
        }
        for (at, (function, file, line, module)) in (1_u32..).zip(PLACES) {
            let address = CodeAddress { module, offset: u64::from(at) * 16 };
            let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
            let symbol = Symbol {
                function: text(function),
                file: text(file),
                line: Some(line).filter(|line| *line > 0),
                column: None,
            };
            if has_symbols {
                made.item(&Item::Symbols(SymbolsDefinition { address, symbols: vec![symbol] }));
            }
            // The last place calls each of the others.
            let last = CodeAddress { module: 1, offset: PLACES.len() as u64 * 16 };
            made.item(&Item::Stack(StackDefinition { id: StackId(at), addresses: vec![address, last] }));
        }
        for (at, name) in (2_u32..).zip(["load", "train", "forward", "backward", "step"]) {
            made.item(&Item::Callsite(callsite(at, name, "src/main.rs", at * 10)));
        }
        made.clock();
        made
    }

    pub(crate) fn item(&mut self, item: &Item) {
        self.writer.write(item).expect("memory takes all");
    }

    pub(crate) fn device(&mut self, device: Device, name: &str) {
        self.item(&Item::Device(DeviceDefinition {
            device,
            name: Some(name.to_owned()),
            total: Some(Bytes::gib(141)),
            uuid: Some("GPU-f3a9".to_owned()),
        }));
    }

    fn clock(&mut self) {
        let pair = ClockPair { ticks: self.micros * 2000, time: Duration::from_micros(self.micros) };
        self.item(&Item::Clock(pair));
    }

    /// Advances the clock by this time.
    pub(crate) fn wait(&mut self, micros: u64) {
        self.micros += micros;
        self.clock();
    }

    /// Advances the clock to this time.
    pub(crate) fn wait_until(&mut self, micros: u64) {
        self.wait(micros - self.micros);
    }

    /// The next events belong to this thread.
    pub(crate) fn on_thread(&mut self, thread: u32) {
        self.thread = ThreadId(thread);
    }

    pub(crate) fn event(&mut self, kind: EventKind) {
        self.number += 1;
        self.micros += 1;
        // As in a session, the clock is not read for each event. An event then has the time of an earlier event.
        let time = Duration::from_micros(self.micros / 100 * 100);
        let event = RecordedEvent { number: self.number, ticks: self.micros * 2000, time, thread: self.thread, kind };
        self.writer.write_event(&event).expect("memory takes all");
    }

    /// Opens a scope with the callsite at this index, from 0 on: load, train, forward, backward, step.
    pub(crate) fn open(&mut self, callsite: u32) -> ScopeId {
        let scope = ScopeId(self.next_scope);
        self.next_scope += 1;
        let spec = ScopeSpec { callsite: CallsiteId(callsite + 2), ..ScopeSpec::exact(DEVICE) };
        self.event(EventKind::Open { scope, spec });
        scope
    }

    pub(crate) fn close(&mut self, scope: ScopeId) {
        self.event(EventKind::Close { scope });
    }

    /// Allocates on the device of the tests, at the place of [`PLACES`] with this index.
    pub(crate) fn alloc(&mut self, bytes: u64, kind: MemKind, place: u32) -> Key {
        self.alloc_on(DEVICE, bytes, kind, place)
    }

    pub(crate) fn alloc_on(&mut self, device: Device, bytes: u64, kind: MemKind, place: u32) -> Key {
        let key = Key::from_raw(self.next_key);
        self.next_key += bytes.div_ceil(512) * 512;
        self.alloc_at(key, Block { device, bytes: Bytes::new(bytes), kind, context: 1, stack: StackId(place + 1) });
        key
    }

    pub(crate) fn alloc_at(&mut self, key: Key, block: Block) {
        self.event(EventKind::Alloc { key, block });
    }

    /// Adds an allocation on the device of the tests that the driver rejected.
    pub(crate) fn rejected(&mut self, bytes: u64, kind: MemKind, place: u32) {
        let (device, stack) = (Some(DEVICE), StackId(place + 1));
        self.event(EventKind::Rejected { device, bytes: Bytes::new(bytes), kind, stack });
    }

    pub(crate) fn free(&mut self, key: Key) {
        self.event(EventKind::Free { key, block: None });
    }

    /// Adds memory that the driver takes by itself, at the place of [`PLACES`] with this index. Returns its key.
    pub(crate) fn taken(&mut self, bytes: u64, kind: MemKind, place: u32, name: &str) -> Key {
        let key = Key::new(Space::Driver, self.number + 1);
        let bytes = Bytes::new(bytes);
        self.alloc_at(key, Block { device: DEVICE, bytes, kind, context: 1, stack: StackId(place + 1) });
        if !name.is_empty() {
            let (shape, dtype) = match kind {
                MemKind::LocalMemory => (vec![16384], "B for each thread".to_owned()),
                _ => (Vec::new(), String::new()),
            };
            let label = Label { name: name.to_owned(), shape, dtype };
            self.item(&Item::Label(BlockLabel { key, number: self.number, label }));
        }
        key
    }

    /// Changes the size of memory that the driver took.
    pub(crate) fn resize(&mut self, key: Key, bytes: u64) {
        self.event(EventKind::Shrink { key, bytes: Bytes::new(bytes) });
    }

    /// Adds a program whose driver takes far more than the program allocates. Its kernel `deep` needs 3 GiB of local memory, 200
    /// graphs are executable at the end. A pool keeps 48 MiB when it is read, and 16 MiB of them are allocated later.
    pub(crate) fn with_driver_memory(mut self, by: DriverGauge) -> Self {
        self.event(EventKind::DriverMeasured { device: DEVICE, by });
        self.taken(526 * MIB, MemKind::Context, 5, "");
        let modules = self.taken(100 * MIB, MemKind::Modules, 4, "libcublasLt.so.13");
        self.alloc(63 * MIB, MemKind::Device, 0);
        self.resize(modules, 140 * MIB);
        let first = self.alloc(32 * MIB, MemKind::Pool, 1);
        self.free(first);
        self.taken(48 * MIB, MemKind::PoolCache, 1, "0x5000 (release threshold 1 GiB)");
        self.wait(1_000_000);
        self.taken(3 << 30, MemKind::LocalMemory, 2, "deep");
        for graph in 0..200 {
            self.taken(if graph % 4 == 0 { 2 * MIB } else { 0 }, MemKind::ExecutableGraphs, 3, "");
        }
        self.alloc(16 * MIB, MemKind::Pool, 1);
        self
    }

    /// Adds a PyTorch stack below two Python lines. Returns its index as a place, which comes after those of [`PLACES`].
    pub(crate) fn python(&mut self) -> u32 {
        let path = "/home/ada/venv/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so".to_owned();
        self.item(&Item::Module(ModuleDefinition { id: 3, path, build_id: vec![4], base: 0 }));
        let stack = self.stack(&[
            (3, "at::detail::empty_cuda", "", 0),
            (0, "forward", "/home/ada/train/model.py", 12),
            (0, "<module>", "/home/ada/train/train.py", 40),
        ]);
        stack.0 - 1
    }

    /// Adds a stack of these functions, the innermost first. Each has its module, which is 0 for Python, its name, its file and
    /// its line.
    pub(crate) fn stack(&mut self, frames: &[(u32, &str, &str, u32)]) -> StackId {
        self.last_stack += 1;
        let mut addresses = Vec::new();
        for (module, function, file, line) in frames {
            let address =
                CodeAddress { module: *module, offset: u64::from(self.last_stack) << 16 | addresses.len() as u64 };
            let file = Some((*file).to_owned()).filter(|file| !file.is_empty());
            let line = Some(*line).filter(|line| *line > 0);
            let symbols = vec![Symbol { function: Some((*function).to_owned()), file, line, column: None }];
            self.item(&Item::Symbols(SymbolsDefinition { address, symbols }));
            addresses.push(address);
        }
        let id = StackId(self.last_stack);
        self.item(&Item::Stack(StackDefinition { id, addresses }));
        id
    }

    /// Adds allocations at other places and in other scopes than those of [`PLACES`]. Their names contain this text.
    pub(crate) fn long_names(&mut self, name: &str) {
        for at in 1..=u32::try_from(PLACES.len()).expect("there are few") {
            let address = CodeAddress { module: 1, offset: 0x10_0000 + u64::from(at) };
            let symbol = Symbol {
                function: Some(format!("{name}::{at}")),
                file: Some(format!("/home/ada/train/{name}.rs")),
                line: Some(at),
                column: None,
            };
            self.item(&Item::Symbols(SymbolsDefinition { address, symbols: vec![symbol] }));
            let id = StackId(u32::try_from(PLACES.len()).expect("there are few") + at);
            self.item(&Item::Stack(StackDefinition { id, addresses: vec![address; 3] }));
        }
        self.item(&Item::Callsite(callsite(7, name, name, 1)));
        for at in 0..u32::try_from(PLACES.len()).expect("there are few") {
            let scope = self.open(5);
            self.alloc(50 * MIB, MemKind::Device, u32::try_from(PLACES.len()).expect("there are few") + at);
            self.close(scope);
        }
    }

    /// Adds this number of steps of a training run. Weights and gradients are `layers` blocks of `bytes` each, activations have
    /// half of that, and the state of the optimizer has twice as much. With at least two steps, the peak is at the end of the
    /// second backward pass: weights, gradients, the state of the optimizer and the last activation. One block of cuBLAS is never
    /// freed.
    pub(crate) fn training(mut self, steps: u64, layers: u64, bytes: u64) -> Self {
        let load = self.open(0);
        let weights: Vec<Key> = (0..layers).map(|_| self.alloc(bytes, MemKind::Pool, 0)).collect();
        self.alloc(32 * MIB, MemKind::Device, 4);
        self.close(load);
        let train = self.open(1);
        let mut state: Vec<Key> = Vec::new();
        for _ in 0..steps {
            self.wait(50);
            let forward = self.open(2);
            let mut activations: Vec<Key> = (0..layers).map(|_| self.alloc(bytes / 2, MemKind::Pool, 1)).collect();
            self.close(forward);
            let backward = self.open(3);
            let mut gradients = Vec::new();
            while let Some(activation) = activations.pop() {
                gradients.push(self.alloc(bytes, MemKind::Pool, 2));
                self.free(activation);
            }
            self.close(backward);
            let step = self.open(4);
            if state.is_empty() {
                state = (0..layers).map(|_| self.alloc(2 * bytes, MemKind::Vmm, 3)).collect();
            }
            for gradient in gradients {
                self.free(gradient);
            }
            self.close(step);
        }
        self.close(train);
        for block in state.into_iter().chain(weights) {
            self.free(block);
        }
        self
    }

    /// Adds a PyTorch training run with this number of steps. Weights and gradients are `layers` tensors of `bytes` each, and
    /// activations have half of that. The peak is at the end of each backward pass: weights, gradients and the last activation.
    /// There are two segments, and the second one is returned to the driver at the end. With `known_from`, the events of PyTorch
    /// before that time are not known.
    pub(crate) fn tensors(mut self, steps: u64, layers: u64, bytes: u64, known_from: Option<Duration>) -> Self {
        use AllocatorAction as Action;
        let python = self.python();
        let sizes = [layers * bytes, 2 * layers * bytes];
        let segments = sizes.map(|size| {
            self.wait(20);
            (self.alloc(size, MemKind::Device, python), self.micros)
        });
        let [weights, rest] = segments.map(|(key, _)| key.get());
        let mut events = Vec::new();
        let mut add = |micros: u64, action, address, bytes, stack| {
            events.push(allocator_event(Duration::from_micros(micros), action, address, bytes, stack));
        };
        for ((key, micros), size) in segments.iter().zip(sizes) {
            add(*micros, Action::SegmentAlloc, key.get(), size, python + 1);
        }
        self.micros = known_from.map_or(self.micros, |from| u64::try_from(from.as_micros()).expect("it is small"));
        for at in 0..layers {
            add(self.micros, Action::Alloc, weights + at * bytes, bytes, 1);
        }
        for _ in 0..steps {
            self.wait(10);
            let (gradient, activation) = (|at| rest + at * bytes, |at| rest + layers * bytes + at * bytes / 2);
            for at in 0..layers {
                self.micros += 10;
                add(self.micros, Action::Alloc, activation(at), bytes / 2, 2);
            }
            for at in (0..layers).rev() {
                self.micros += 10;
                // No line is known in the backward pass.
                add(self.micros, Action::Alloc, gradient(at), bytes, 0);
                add(self.micros + 1, Action::FreeRequested, activation(at), 0, 0);
                add(self.micros + 1, Action::FreeCompleted, activation(at), 0, 0);
            }
            for at in 0..layers {
                self.micros += 10;
                add(self.micros, Action::FreeRequested, gradient(at), 0, 0);
                add(self.micros, Action::FreeCompleted, gradient(at), 0, 0);
            }
        }
        self.wait(100);
        add(self.micros, Action::SegmentFree, rest, sizes[1], 0);
        self.free(segments[1].0);
        for events in events.chunks(AllocatorEvents::MOST) {
            self.item(&Item::AllocatorEvents(AllocatorEvents { device: DEVICE, events: events.to_vec() }));
        }
        // Segments and weights exist when the history starts.
        let older = if known_from.is_some() { 2 + layers } else { 0 };
        let [all, most] = [layers * bytes, 2 * layers * bytes + bytes / 2].map(Bytes::new);
        let [reserved, reserved_high] = [sizes[0], sizes[0] + sizes[1]].map(Bytes::new);
        let reported = AllocatorStats { allocated: all, allocated_high: most, reserved, reserved_high };
        let device = AllocatorDevice { device: DEVICE, older, known_from, reported: Some(reported) };
        self.allocator(device);
        self
    }

    fn allocator(&mut self, device: AllocatorDevice) {
        self.item(&Item::Allocator(AllocatorDefinition {
            name: "PyTorch 2.11.0".to_owned(),
            devices: vec![device],
            ..AllocatorDefinition::default()
        }));
    }

    /// Adds blocks that PyTorch got from the driver, each with its address, its size and PyTorch's stack.
    pub(crate) fn segments(&mut self, blocks: &[(u64, Bytes, StackId)]) {
        let time = Duration::from_micros(self.micros);
        let event = |(address, bytes, stack): &(u64, Bytes, StackId)| {
            allocator_event(time, AllocatorAction::SegmentAlloc, *address, bytes.get(), stack.0)
        };
        let events = blocks.iter().map(event).collect();
        self.item(&Item::AllocatorEvents(AllocatorEvents { device: DEVICE, events }));
        self.allocator(AllocatorDevice { device: DEVICE, older: 0, known_from: None, reported: None });
    }

    /// Adds a tensor that is never freed. Each tensor needs a separate group, from 1 on.
    pub(crate) fn tensor(&mut self, group: u32, module: &str, class: TensorClass, [bytes, requested]: [u64; 2]) {
        self.item(&Item::TensorGroup(TensorGroup { id: group, module: Some(module.to_owned()), class: Some(class) }));
        self.wait(1);
        let (time, address) = (Duration::from_micros(self.micros), u64::from(group) << 50);
        let event = allocator_event(time, AllocatorAction::Alloc, address, bytes, 0);
        let events = vec![AllocatorEvent { requested: Bytes::new(requested), group, ..event }];
        self.item(&Item::AllocatorEvents(AllocatorEvents { device: DEVICE, events }));
    }

    /// Adds this many allocations and frees in nested scopes, with sizes, times and lifetimes that do not repeat.
    pub(crate) fn varied(mut self, events: u64) -> Self {
        let mut random = Rng::with_seed(1);
        let mut live: Vec<Key> = Vec::new();
        let mut open: Vec<ScopeId> = Vec::new();
        for event in 0..events {
            if event % 50 == 0 {
                if open.len() == 3 || random.u64(..3) == 0 {
                    for scope in open.drain(..).rev().collect::<Vec<_>>() {
                        self.close(scope);
                    }
                }
                let scope = self.open(random.u32(..5));
                open.push(scope);
            }
            self.micros += random.u64(..40);
            if live.len() < 200 || live.len() < 4000 && random.u64(..2) == 0 {
                let kind = [MemKind::Pool, MemKind::Device, MemKind::Vmm][random.usize(..3)];
                let bytes = (1 + random.u64(..4096)) << (8 + random.u64(..10));
                live.push(self.alloc(bytes, kind, random.u32(..6)));
            } else {
                let at = random.usize(..live.len());
                let key = live.swap_remove(at);
                self.free(key);
            }
        }
        for scope in open.into_iter().rev() {
            self.close(scope);
        }
        self
    }

    /// Returns the bytes of the file.
    pub(crate) fn file(mut self) -> Vec<u8> {
        // Adds a last pair of clock values, which is later than the one before it.
        self.wait(1);
        self.writer.finish().expect("memory takes all")
    }
}
