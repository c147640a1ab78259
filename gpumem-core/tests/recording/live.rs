//! A session in small: an inbox with a tap, names, and the reports that a program asks for. Everything goes into a recording as
//! well.

use std::time::{Duration, UNIX_EPOCH};

use gpumem_core::{
    derive::{self, Callsite, KeptPeak, Labels, Names, Refusal, Snapshot, Stack},
    error::Error,
    inbox::{Inbox, LedgerView, Tap},
    ledger::ScopePeriod,
    model::{
        Block, Bytes, CallsiteId, Counted, Device, Event, EventKind, Family, Frame, Gauge, GpuMemory, Key, Label,
        MemKind, PoolId, PoolUsage, ScopeId, ScopeSpec, Source, Space, StackId, ThreadId, Threads, Trace,
    },
    recording::{
        BlockLabel, CallsiteDefinition, CodeAddress, Item, ModuleDefinition, Process, RecordedEvent, ReplayedReport,
        Request, StackDefinition, Symbol, SymbolsDefinition,
    },
    report::{self, Breakdown, Content, DeviceReading, Groups, Report, SourceLine, Tracked, difference, live},
};

use crate::Random;

/// Keeps all events.
#[derive(Debug, Default)]
pub(crate) struct Collect(Vec<Item>);

impl Tap for Collect {
    fn record(&mut self, event: &Event<'_>) {
        let Event { number, time, thread, kind } = *event;
        self.0.push(Item::Event(RecordedEvent { number, ticks: number * 1_000, time, thread, kind: *kind }));
    }

    fn begin_thread(&mut self, thread: ThreadId, is_reused: bool) {
        if is_reused {
            self.0.push(Item::ThreadReused(thread));
        }
    }

    fn release_peak(&mut self, kept: ScopeId) {
        self.0.push(Item::PeakReleased(kept));
    }
}

const PID: u32 = 4711;
const FOLDER: &str = "/home/me/app";
const CALLSITES: u32 = 12;
const STACKS: u32 = 9;

/// Names as a session has them.
pub(crate) struct SessionNames;

fn callsite(id: u32) -> CallsiteDefinition {
    let name = (!id.is_multiple_of(3)).then(|| format!("scope {id}"));
    let file = "src/train.rs".to_owned();
    CallsiteDefinition { id: CallsiteId(id), name, file, line: 10 * id, column: 5, module_path: None }
}

const MODULES: [&str; 3] = ["/home/me/app/target/app", "/usr/lib/libcublas.so.12", "/usr/lib/libcuda.so.1"];

fn address(stack: u32, at: u32) -> CodeAddress {
    CodeAddress { module: 1 + (stack + at) % 3, offset: u64::from(0x1000 * stack + 16 * at) }
}

fn addresses(stack: u32) -> Vec<CodeAddress> {
    (0..=stack % 4).map(|at| address(stack, at)).collect()
}

fn symbols(address: CodeAddress) -> Vec<Symbol> {
    let CodeAddress { module, offset } = address;
    let line = Some(u32::try_from(offset % 1_000).unwrap());
    let symbol = |function: &str, file: Option<&str>| Symbol {
        function: Some(format!("{function}_{offset:x}")),
        file: file.map(str::to_owned),
        line: line.filter(|_| file.is_some()),
        column: None,
    };
    match (module, offset % 5) {
        (1, 0) => vec![symbol("core::mem::swap", None), symbol("app::step", Some("/home/me/app/src/step.rs"))],
        (1, _) => vec![symbol("app::train", Some("/home/me/app/src/train.rs"))],
        (_, 1) => Vec::new(),
        _ => vec![symbol("cublasCreate", None)],
    }
}

impl Names for SessionNames {
    fn callsite(&self, id: CallsiteId) -> Callsite {
        Callsite::built_in(id).unwrap_or_else(|| {
            let CallsiteDefinition { name, file, line, .. } = callsite(id.0);
            Callsite { name: name.map(Into::into), file: file.into(), line }
        })
    }

    fn pool(&self, id: PoolId) -> String {
        format!("pool {}", id.0)
    }

    fn stack(&self, id: StackId) -> Stack {
        if id == StackId::NONE {
            return Stack::default();
        }
        let frames = addresses(id.0).into_iter().flat_map(|address| {
            let module = Some(MODULES[address.module as usize - 1].to_owned());
            let frame = |symbol: Symbol| {
                let Symbol { function, file, line, column } = symbol;
                Frame { function, file, line, column, module: module.clone() }
            };
            let symbols = symbols(address);
            if symbols.is_empty() { vec![frame(Symbol::default())] } else { symbols.into_iter().map(frame).collect() }
        });
        Stack::new(&frames.collect::<Vec<_>>(), FOLDER, Some("app"))
    }
}

/// What a session defines. Symbols come last: they are found out when somebody asks.
fn definitions() -> (Vec<Item>, Vec<Item>) {
    let process = Process {
        pid: PID,
        executable: MODULES[0].to_owned(),
        folder: FOLDER.to_owned(),
        own_module: Some("app".to_owned()),
        version: "0.1.0".to_owned(),
        ..Process::default()
    };
    let modules = (1..).zip(MODULES).map(|(id, path)| {
        Item::Module(ModuleDefinition { id, path: path.to_owned(), build_id: vec![1, 2, 3], base: 0x5000_0000 })
    });
    let callsites = (2..2 + CALLSITES).map(|id| Item::Callsite(callsite(id)));
    let stacks = (1..=STACKS).map(|id| Item::Stack(StackDefinition { id: StackId(id), addresses: addresses(id) }));
    let symbols = (1..=STACKS).flat_map(addresses);
    let symbols =
        symbols.map(|address| Item::Symbols(SymbolsDefinition { address, symbols: symbols_of(address) })).collect();
    ([Item::Process(process)].into_iter().chain(modules).chain(callsites).chain(stacks).collect(), symbols)
}

fn symbols_of(address: CodeAddress) -> Vec<Symbol> {
    symbols(address)
}

struct OpenScope {
    id: ScopeId,
    at_peak: bool,
}

struct ClosedScope {
    id: ScopeId,
    trace: Trace,
    within: Option<ScopePeriod>,
    at_peak: bool,
}

struct Tracking {
    number: u64,
    device: Device,
    groups: Groups,
    lost: u64,
    is_first: bool,
}

/// A program that does this and that with GPU memory.
pub(crate) struct Live {
    random: Random,
    inbox: Inbox<Collect>,
    labels: Labels,
    blocks: Vec<(Key, Bytes)>,
    open: Vec<OpenScope>,
    closed: Vec<ClosedScope>,
    trackers: Vec<Tracking>,
    displaced: u64,
    next: u64,
    /// The reports that the program got.
    pub(crate) outputs: Vec<ReplayedReport>,
}

fn device(random: &mut Random) -> Device {
    Device { family: if random.is(4) { Family::Simulated } else { Family::Cuda }, ordinal: u32::from(random.is(3)) }
}

fn block(random: &mut Random) -> Block {
    let largest = 1 << random.below(16);
    Block {
        device: device(random),
        bytes: Bytes::new(512 * (1 + random.below(largest))),
        kind: MemKind::ALL[random.index(MemKind::ALL.len())],
        context: u8::try_from(random.below(3)).unwrap(),
        stack: StackId(u32::try_from(random.below(u64::from(STACKS) + 1)).unwrap()),
    }
}

fn key(random: &mut Random) -> Key {
    Key::new(Space::Address, 0x7f00_0000_0000 + 512 * random.below(4_096))
}

fn memory(random: &mut Random) -> GpuMemory {
    let used = 1_000 + random.below(3_000);
    let [free, used] = [16_000 - used, used].map(Bytes::mib);
    GpuMemory::new(Bytes::mib(16_000), free, used, None)
}

fn usage(random: &mut Random) -> PoolUsage {
    let (used, more) = (Bytes::mib(random.below(100)), Bytes::mib(random.below(100)));
    PoolUsage { pool: 1, used, used_high: used + more, reserved: used + more, reserved_high: used + more + more }
}

impl Live {
    pub(crate) fn new(seed: u64) -> Self {
        let this = Self {
            random: Random::new(seed),
            inbox: Inbox::tapped(Collect::default()),
            labels: Labels::default(),
            blocks: Vec::new(),
            open: Vec::new(),
            closed: Vec::new(),
            trackers: Vec::new(),
            displaced: 0,
            next: 0,
            outputs: Vec::new(),
        };
        definitions().0.into_iter().for_each(|item| this.push(item));
        this
    }

    /// What was recorded.
    pub(crate) fn finish(self) -> (Vec<Item>, Vec<ReplayedReport>) {
        definitions().1.into_iter().for_each(|item| this_push(&self.inbox, item));
        let items = self.inbox.with_tap(|tap| (false, std::mem::take(&mut tap.0))).expect("nobody is inside");
        (items, self.outputs)
    }

    fn push(&self, item: Item) {
        this_push(&self.inbox, item);
    }

    fn ask(&mut self, request: Request, output: ReplayedReport) {
        self.push(Item::Request(request));
        self.outputs.push(output);
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn steps(&mut self, count: usize) {
        for _ in 0..count {
            if self.random.is(8) {
                // Another thread, which ends; the next one has its number.
                std::thread::scope(|threads| {
                    threads.spawn(|| (0..=self.random.below(6)).for_each(|_| self.step())).join().unwrap();
                });
            } else {
                self.step();
            }
        }
    }

    fn post(&self, kind: EventKind) {
        self.inbox.post(&kind);
    }

    fn step(&mut self) {
        match self.random.below(60) {
            0..=3 => self.open(),
            4..=6 => self.close(),
            7..=9 => self.query(),
            10 => self.enter(),
            11..=14 => self.rare(),
            15..=16 => self.report(),
            17..=36 => self.alloc(),
            _ => self.free(),
        }
    }

    fn alloc(&mut self) {
        let (key, block) = (key(&mut self.random), block(&mut self.random));
        // An address that is live is given out again where its free was missed.
        if self.blocks.iter().any(|(live, _)| *live == key) && !self.random.is(20) {
            return;
        }
        if block.kind == MemKind::Pool {
            self.inbox.alloc(key, block.bytes, block.tag());
        } else {
            self.post(EventKind::Alloc { key, block });
        }
        self.blocks.retain(|(live, _)| *live != key);
        self.blocks.push((key, block.bytes));
        if self.random.is(6) {
            let name = format!("weight {}", self.random.below(4));
            let label = Label { name, shape: vec![3, 3], dtype: "f32".to_owned() };
            if let Some(block) = self.labels.set(&self.inbox, key, label.clone()) {
                self.push(Item::Label(BlockLabel { key, number: block.number, label }));
            }
        }
    }

    fn free(&mut self) {
        if self.blocks.is_empty() || self.random.is(20) {
            let (key, older) = (key(&mut self.random), block(&mut self.random));
            if self.blocks.iter().any(|(live, _)| *live == key) {
                return;
            }
            let block = self.random.option(|_| older);
            self.post(EventKind::Free { key, block });
            match (block, self.random.below(3)) {
                (None, 0) => self.post(EventKind::LateLookup { block: older }),
                (None, 1) => self.post(EventKind::Untracked),
                _ => {}
            }
            if self.random.is(3) {
                self.post(EventKind::FreeFailed);
            }
            return;
        }
        let at = self.random.index(self.blocks.len());
        let (key, bytes) = self.blocks.swap_remove(at);
        if self.random.is(2) {
            self.inbox.free(key);
        } else {
            self.post(EventKind::Free { key, block: None });
        }
        if self.random.is(20) {
            self.post(EventKind::FreeFailed);
            self.blocks.push((key, bytes));
        }
    }

    fn open(&mut self) {
        if self.open.len() > 12 {
            return self.close();
        }
        let gauge = [Gauge::Exact, Gauge::Exact, Gauge::Exact, Gauge::Sampled][self.random.index(4)];
        let id = ScopeId(self.next());
        let at_peak = self.random.is(2);
        let counts = match self.random.index(5) {
            0 if gauge == Gauge::Exact => Counted::Thread(self.inbox.this_thread()),
            1 if gauge == Gauge::Exact => Counted::Task,
            _ => Counted::Process,
        };
        let spec = ScopeSpec {
            device: device(&mut self.random),
            gauge,
            every: if gauge == Gauge::Sampled { Duration::from_millis(1) } else { Duration::ZERO },
            counts,
            callsite: CallsiteId(2 + u32::try_from(self.random.below(u64::from(CALLSITES))).unwrap()),
            source: Source::Dispatch,
            at_peak,
        };
        let open = EventKind::Open { scope: id, spec };
        let device = spec.device;
        match gauge {
            Gauge::Sampled => {
                let reading = EventKind::Sample { device, memory: memory(&mut self.random) };
                self.inbox.ask(Some(&reading), &open);
            }
            _ => self.post(open),
        }
        self.open.push(OpenScope { id, at_peak: at_peak && gauge == Gauge::Exact });
    }

    fn report_trace(&mut self, scope: ScopeId, trace: Trace) {
        let ctx = self.random.option(|_| "step".to_owned());
        let subctx = self.random.option(|_| "exit".to_owned());
        let report = Report::new(trace, ctx.as_deref(), subctx.as_deref());
        self.ask(Request::Report { scope, ctx, subctx, lines: None }, ReplayedReport::Report(report));
    }

    fn close(&mut self) {
        if self.open.is_empty() {
            return;
        }
        // The innermost one mostly.
        let at = if self.random.is(4) { self.random.index(self.open.len()) } else { self.open.len() - 1 };
        let OpenScope { id, at_peak } = self.open.remove(at);
        let within = self.inbox.scope_period(id);
        let trace = self.inbox.ask(None, &EventKind::Close { scope: id }).expect("it is open");
        self.closed.push(ClosedScope { id, trace, within, at_peak });
        self.report_trace(id, trace);
        if self.closed.len() > 5 {
            let at = self.random.index(self.closed.len());
            let ClosedScope { id, at_peak, .. } = self.closed.swap_remove(at);
            if at_peak {
                drop(KeptPeak::of_closed(&self.inbox, id));
            }
        }
    }

    fn query(&mut self) {
        let Some(at) = self.open.len().checked_sub(1).map(|last| self.random.index(last + 1)) else { return };
        let scope = self.open[at].id;
        let query = match self.random.below(4) {
            0 => EventKind::Reset { scope },
            1 => EventKind::ResetKeepingPeak { scope },
            _ => EventKind::Read { scope },
        };
        let trace = self.inbox.ask(None, &query).expect("it is open");
        if self.random.is(2) {
            self.report_trace(scope, trace);
        }
    }

    fn enter(&mut self) {
        let Some(last) = self.open.len().checked_sub(1) else { return };
        let scope = self.open[self.random.index(last + 1)].id;
        if self.random.is(4) {
            let threads = if self.random.is(2) { Threads::Unscoped } else { Threads::named("worker") };
            self.post(EventKind::Adopt { scope, threads });
        }
        self.post(EventKind::Enter { scope });
        (0..self.random.below(4)).for_each(|_| self.alloc());
        if !self.random.is(10) {
            self.post(EventKind::Leave { scope });
        }
    }

    fn rare(&mut self) {
        let device = device(&mut self.random);
        let (memory, count) = (memory(&mut self.random), self.random.below(3));
        match self.random.below(9) {
            0 => self.post(EventKind::Sample { device, memory }),
            1 => self.post(EventKind::ReadFailed { device, gauge: Gauge::Sampled }),
            2 => self.post(EventKind::ResetPeaks { device }),
            3 => {
                let (kind, stack) = (MemKind::Vmm, StackId::NONE);
                self.post(EventKind::Refused { device: Some(device), bytes: memory.used, kind, stack });
            }
            4 if self.random.is(4) => self.post(EventKind::Lost { count }),
            5 if self.random.is(4) => {
                let now = self.random.below(3);
                self.post(EventKind::Displaced { now, more: now.saturating_sub(self.displaced) });
                self.displaced = now;
            }
            6 if self.random.is(4) => {
                let context = u8::try_from(self.random.below(3)).unwrap();
                self.post(EventKind::ContextDestroyed { context });
                let inbox = &self.inbox;
                self.blocks.retain(|(key, _)| inbox.block(*key).is_some());
            }
            7 => {
                let last = self.blocks.len();
                if let Some((key, bytes)) =
                    last.checked_sub(1).map(|last| self.random.index(last + 1)).map(|at| self.blocks[at])
                {
                    self.post(EventKind::Shrink { key, bytes: Bytes::new(bytes.get() / 2) });
                }
            }
            _ => {}
        }
    }

    fn under(&mut self) -> ScopeId {
        ScopeId(1 << 40 | self.next())
    }

    fn reading(&mut self, device: Device) -> DeviceReading {
        DeviceReading {
            device,
            name: Some("NVIDIA H200".to_owned()),
            memory: memory(&mut self.random),
            processes: None,
            pool: Some(usage(&mut self.random)),
        }
    }

    fn report(&mut self) {
        let (under, is_intercepted) = (self.under(), self.random.is(2));
        let device = device(&mut self.random);
        match self.random.below(9) {
            0 => {
                let not_intercepted = self.random.option(|_| "it was asked for".to_owned());
                let summary = derive::summary(&self.inbox, &SessionNames, under, not_intercepted.clone());
                self.ask(Request::Summary { not_intercepted }, ReplayedReport::Summary(summary));
            }
            1 => {
                let reading = self.reading(device);
                let snapshot = Snapshot::now(&self.inbox, &SessionNames, device);
                let live = snapshot.groups(|stack| SessionNames.stack(stack));
                let breakdown = Breakdown::of(&reading, PID, &live);
                self.ask(Request::Breakdown(reading), ReplayedReport::Breakdown(breakdown));
            }
            2 => {
                let (since, pool) = (self.inbox.age(), self.random.option(|random| random.option(usage)));
                let by = "libcuda.so.1".to_owned();
                let stats = derive::memory_stats(&self.inbox, device, by.clone(), since, pool);
                self.ask(
                    Request::MemoryStats { device, intercepted_by: by, since, pool },
                    ReplayedReport::MemoryStats(Box::new(stats)),
                );
            }
            3 => {
                let closed = self.random.index(self.closed.len() + 1);
                let (scope, within) = match (self.closed.get(closed), self.open.last()) {
                    (Some(closed), _) => (Some(closed.id), closed.within.clone()),
                    (None, Some(open)) => (Some(open.id), self.inbox.scope_period(open.id)),
                    (None, None) => (None, None),
                };
                let blocks = derive::live_blocks(&self.inbox, &SessionNames, within.as_ref());
                self.ask(Request::LiveBlocks { scope }, ReplayedReport::LiveBlocks(blocks));
            }
            4 => {
                let leaks = derive::leaks(&self.inbox, &SessionNames, is_intercepted);
                self.ask(Request::Leaks { is_intercepted }, at_exit(Content::Leaks(leaks)));
            }
            5 => {
                let peaks = derive::device_peaks(&self.inbox, &SessionNames, under, is_intercepted);
                self.ask(Request::Peaks { is_intercepted }, at_exit(Content::Peaks(peaks)));
            }
            6 => self.peak_holders(under),
            7 => self.track(device, is_intercepted),
            _ => self.refused(device, under),
        }
    }

    fn peak_holders(&mut self, under: ScopeId) {
        let (scope, peak, trace) = if let Some(open) = self.open.iter().find(|open| open.at_peak) {
            let peak = KeptPeak::of_open(&self.inbox, open.id, under).expect("it was asked for");
            let peak = peak.holders(&SessionNames);
            (open.id, peak, self.inbox.ask(None, &EventKind::Read { scope: open.id }))
        } else if let Some(closed) = self.closed.iter().find(|closed| closed.at_peak) {
            (closed.id, derive::peak_holders(&self.inbox, &SessionNames, closed.id), Some(closed.trace))
        } else {
            return;
        };
        let (mut peak, trace) = (peak.expect("it is kept"), trace.expect("it was answered"));
        (peak.untracked, peak.lost) = (trace.untracked, trace.lost);
        self.ask(Request::PeakHolders { scope }, ReplayedReport::PeakHolders(peak));
    }

    fn track(&mut self, device: Device, is_intercepted: bool) {
        if self.trackers.len() < 3 {
            let number = self.next();
            let lost = self.inbox.counts().lost;
            self.trackers.push(Tracking { number, device, groups: Groups::new(), lost, is_first: true });
            return self.push(Item::Request(Request::TrackerStarted { tracker: number, device }));
        }
        let at = self.random.index(3);
        if self.random.is(6) {
            let tracker = self.trackers.swap_remove(at).number;
            return self.push(Item::Request(Request::TrackerEnded { tracker }));
        }
        let Self { inbox, labels, trackers, random, .. } = self;
        let tracking = &mut trackers[at];
        let (file, line, column) = ("src/main.rs", 12, 9);
        let ctx = random.option(|_| "train::step".to_owned());
        let used = random.option(|_| Bytes::mib(70));
        let time = Duration::from_secs(random.index(1 << 30) as u64);
        let at = SourceLine::new(file, line, column);
        let mut tracked = Tracked::at(UNIX_EPOCH + time, at, ctx.clone(), tracking.device);
        tracked.is_first = std::mem::replace(&mut tracking.is_first, false);
        tracked.used = used;
        if is_intercepted {
            let lost = inbox.counts().lost;
            let groups = derive::tracked_groups(&*inbox, &SessionNames, tracking.device, |blocks| {
                labels.of_blocks(&*inbox, blocks)
            });
            tracked.live = Some(live(&groups));
            tracked.changes = Some(difference(&tracking.groups, &groups));
            tracked.lost = lost - tracking.lost;
            (tracking.groups, tracking.lost) = (groups, lost);
        }
        let (number, file) = (tracking.number, file.to_owned());
        let request = Request::Tracked { tracker: number, time, file, line, column, ctx, used, is_intercepted };
        self.ask(request, ReplayedReport::Tracked(tracked));
    }

    fn refused(&mut self, device: Device, under: ScopeId) {
        let path = self.inbox.path_of_this_thread();
        let path: Vec<_> = path.into_iter().map(|id| SessionNames.callsite(id).to_string()).collect();
        let (requested, kind, stack) = (Bytes::gib(7), MemKind::Device, StackId(1));
        let refusal = Refusal { device, requested, kind, stack, path: path.clone() };
        let number = self.next();
        self.push(Item::Request(Request::Refused { refusal: number, device, requested, kind, stack, path }));
        let snapshot = Snapshot::now(&self.inbox, &SessionNames, device);
        let peak = self.inbox.keep_device_peak(device, under);
        // The report comes later.
        (0..self.random.below(5)).for_each(|_| self.alloc());
        let reading =
            if self.random.is(3) { Err("the driver did not answer".to_owned()) } else { Ok(self.reading(device)) };
        let known = reading.clone().map_err(Error::recorded);
        let holders = if peak { derive::peak_holders(&self.inbox, &SessionNames, under) } else { None };
        if peak {
            self.inbox.release_peak(under);
        }
        let oom = refusal.resolved(&snapshot, holders, known, PID, &SessionNames);
        self.ask(Request::OutOfMemory { refusal: number, reading }, ReplayedReport::OutOfMemory(oom));
    }
}

fn this_push(inbox: &Inbox<Collect>, item: Item) {
    inbox.with_tap(|tap| (true, tap.0.push(item)));
}

/// A recording, and the reports that the program got.
pub(crate) fn recording(seed: u64, steps: usize) -> (Vec<Item>, Vec<ReplayedReport>) {
    let mut live = Live::new(seed);
    live.steps(steps);
    live.finish()
}

fn at_exit(content: Content) -> ReplayedReport {
    ReplayedReport::AtExit(Box::new(report::Output::new(content, UNIX_EPOCH, PID)))
}

/// A report as text: all its fields, and what is printed. Two reports that differ have different texts.
pub(crate) fn words(output: &ReplayedReport) -> String {
    format!("{output:?}\n{output}")
}
