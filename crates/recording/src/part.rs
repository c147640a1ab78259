//! Chooses the events of a shortened recording (`--max-size`, `--only-peak`): the allocations of live blocks with their scopes,
//! the open scopes, and the blocks at the peaks.

use std::collections::{BTreeMap, HashMap};

use super::{
    event::RecordedEvent,
    item::{Item, PartDefinition, PoolBlock},
    totals::{Tally, Totals},
};
use gpumem_core::{
    ledger::{BlockChange, BlockChangeKind, Ledger, NodeId},
    model::{Block, CallsiteId, Device, Event, EventKind, PoolId, ScopeId, ThreadId},
};

/// The largest number of kept events that mean that numbers may be wrong.
const MOST_WARNINGS: usize = 1 << 10;

/// The largest number of kept rejected allocations.
const MOST_REJECTIONS: usize = 1 << 14;

/// The kept events of a program.
#[derive(Debug)]
pub struct Part {
    /// The ledger, for the effects of events on blocks and the scopes of allocations.
    ledger: Ledger,
    tally: Tally,
    /// The effects of the last event on blocks.
    changes: Vec<BlockChange>,
    /// The live blocks, by the numbers of the events that allocated them.
    live: HashMap<u64, Kept>,
    /// The scope paths of these blocks.
    paths: HashMap<u64, NodeId>,
    scopes: OpenScopes,
    /// The last change of the size of each live block that the driver took by itself.
    resized: HashMap<u64, RecordedEvent>,
    /// How the driver's memory was measured on each device.
    measured: HashMap<Device, RecordedEvent>,
    /// The last free of each thread.
    freed_last: HashMap<ThreadId, Kept>,
    /// The peaks, if they are kept.
    peaks: Option<HashMap<Device, Peak>>,
    /// The events that report that events were lost or not understood.
    warnings: Vec<RecordedEvent>,
    /// The rejected allocations.
    rejections: Vec<RecordedEvent>,
    /// The values of a dry run that were not computed.
    unknown: Vec<RecordedEvent>,
    /// The registered pools, and the last report of each.
    pools: HashMap<PoolId, RecordedEvent>,
    reserved: HashMap<PoolId, RecordedEvent>,
    latest: u64,
}

/// An event that allocated a block, or ended one.
#[derive(Clone, Copy, Debug)]
struct Kept {
    event: RecordedEvent,
    /// The pool that the block of the driver belongs to.
    pool: PoolId,
    /// True if the program's view contains the block.
    is_in_program: bool,
}

/// The open scopes, and closed ones that threads may still be in.
#[derive(Debug, Default)]
struct OpenScopes {
    /// The events that opened them.
    opened: HashMap<ScopeId, RecordedEvent>,
    /// The events by which threads entered scopes that they did not open and have not left.
    entered: HashMap<ThreadId, Vec<(ScopeId, RecordedEvent)>>,
    /// The events of scopes that adopt threads.
    adopting: HashMap<ScopeId, RecordedEvent>,
    /// The names of threads.
    named: HashMap<ThreadId, RecordedEvent>,
    /// The thread ids that another thread has reused, and the last event number before that.
    reused: HashMap<ThreadId, u64>,
    /// True if a scope was opened.
    is_used: bool,
}

/// The peak of one device.
#[derive(Debug, Default)]
struct Peak {
    in_use: u64,
    bytes: u64,
    /// The number of the event that set the peak.
    at: u64,
    /// The blocks that were live at the peak and ended since, with the events that ended them.
    since: Vec<Kept>,
}

impl Part {
    /// Keeps the live blocks.
    pub fn latest() -> Self {
        Self::new(None)
    }

    /// Keeps the live blocks, and those that were live at the peak of each device.
    pub fn peaks() -> Self {
        Self::new(Some(HashMap::new()))
    }

    fn new(peaks: Option<HashMap<Device, Peak>>) -> Self {
        let (live, freed_last) = (HashMap::new(), HashMap::new());
        Self {
            ledger: Ledger::default(),
            tally: Tally::default(),
            changes: Vec::new(),
            live,
            paths: HashMap::new(),
            scopes: OpenScopes::default(),
            resized: HashMap::new(),
            measured: HashMap::new(),
            freed_last,
            peaks,
            warnings: Vec::new(),
            rejections: Vec::new(),
            unknown: Vec::new(),
            pools: HashMap::new(),
            reserved: HashMap::new(),
            latest: 0,
        }
    }

    /// Applies an event. Events must come in the order of their numbers.
    pub fn apply(&mut self, event: &RecordedEvent) {
        self.latest = event.number;
        let RecordedEvent { number, time, thread, ref kind, .. } = *event;
        match kind {
            EventKind::Lost { .. } | EventKind::Displaced { .. } | EventKind::Untracked
                if self.warnings.len() < MOST_WARNINGS =>
            {
                self.warnings.push(*event);
            }
            EventKind::PoolRegistered { pool, .. } => {
                self.pools.insert(*pool, *event);
                self.reserved.remove(pool);
            }
            EventKind::PoolReserved { pool, .. } => _ = self.reserved.insert(*pool, *event),
            EventKind::PoolEmptied { pool } => _ = self.reserved.remove(pool),
            EventKind::DriverMeasured { device, .. } => _ = self.measured.insert(*device, *event),
            EventKind::Rejected { .. } if self.rejections.len() < MOST_REJECTIONS => self.rejections.push(*event),
            EventKind::RealBlocks { .. } | EventKind::UnknownValue { .. } if self.unknown.len() < MOST_REJECTIONS => {
                self.unknown.push(*event);
            }
            _ => {}
        }
        self.scopes.apply(event);
        // Peaks of scopes and results of scopes are not needed here. A report covers the whole recording, whatever the program
        // has reset.
        let kind = match *kind {
            EventKind::Open { scope, mut spec } => {
                spec.at_peak = false;
                &EventKind::Open { scope, spec }
            }
            EventKind::Read { .. }
            | EventKind::Reset { .. }
            | EventKind::ResetKeepingPeak { .. }
            | EventKind::ResetPeaks { .. }
            | EventKind::ResetSummary => {
                if !self.ledger.has_undecided() {
                    return;
                }
                &EventKind::PoolsQueried
            }
            _ => kind,
        };
        let mut changes = std::mem::take(&mut self.changes);
        self.ledger.set_time(time);
        self.ledger.apply_observed(&Event { number, time, thread, kind }, &mut changes);
        self.tally.add(event, &changes);
        changes.drain(..).for_each(|change| self.change(event, &change));
        self.changes = changes;
    }

    /// Notes that a thread reuses the id of an ended thread.
    pub fn start_thread(&mut self, thread: ThreadId) {
        self.ledger.start_thread(thread);
        self.scopes.start_thread(thread, self.latest);
    }

    /// Notes the number of missing events.
    pub fn miss(&mut self, count: u64) {
        self.tally.lose(count);
    }

    /// Notes the effect of an event on a block.
    fn change(&mut self, event: &RecordedEvent, change: &BlockChange) {
        let number = change.number;
        match change.kind {
            BlockChangeKind::Allocated => {
                let is_in_program = change.group.is_in_program();
                let kept = Kept { event: *event, pool: PoolId::NONE, is_in_program };
                self.live.insert(number, kept);
                self.is_inside(number, change.group.node);
                self.came(number, &kept);
            }
            // What pools do not use depends on the blocks that were live at the event. Therefore this event is kept, and the
            // allocation is not changed.
            BlockChangeKind::Shrunk if change.group.kind.is_taken_by_driver() => {
                if let Some(block) = self.live.get(&number).copied() {
                    self.keep_size(number, &block);
                    self.resized.insert(number, *event);
                }
            }
            BlockChangeKind::Freed => {
                if let Some(freed) = self.remove(number) {
                    self.freed_last.insert(event.thread, freed);
                    self.gone(&freed, Some(event));
                }
            }
            BlockChangeKind::FreeFailed => {
                if let Some(still) = self.freed_last.remove(&event.thread) {
                    self.live.insert(number, still);
                    self.is_inside(number, change.group.node);
                    self.came_back(&still, event.number);
                }
            }
            BlockChangeKind::Shrunk => {
                if let Some(whole) = self.live.get(&number).copied()
                    && let EventKind::Alloc { key, block } = whole.event.kind
                {
                    let block = Block { bytes: change.after, ..block };
                    self.gone(&whole, Some(event));
                    let alloc = RecordedEvent { kind: EventKind::Alloc { key, block }, ..whole.event };
                    let kept = Kept { event: alloc, ..whole };
                    self.live.insert(number, kept);
                    self.came(event.number, &kept);
                }
            }
            BlockChangeKind::RemovedWithContext => {
                if let Some(gone) = self.remove(number) {
                    self.gone(&gone, Some(event));
                }
            }
            BlockChangeKind::TakenByPool | BlockChangeKind::GivenToProgram => {
                if let Some(block) = self.live.get_mut(&number) {
                    let before = *block;
                    (block.pool, block.is_in_program) = (change.group.pool, change.group.is_in_program());
                    let now = *block;
                    self.subtract(&before);
                    self.came(event.number, &now);
                }
            }
            // No recorded event ended the block.
            BlockChangeKind::FreeMissed => {
                if let Some(missed) = self.remove(number) {
                    self.gone(&missed, None);
                }
            }
        }
    }

    fn is_inside(&mut self, number: u64, node: NodeId) {
        if self.scopes.is_used {
            self.paths.insert(number, node);
        }
    }

    fn remove(&mut self, number: u64) -> Option<Kept> {
        self.paths.remove(&number);
        let removed = self.live.remove(&number)?;
        if self.resized.contains_key(&number) {
            self.keep_size(number, &removed);
            self.resized.remove(&number);
        }
        Some(removed)
    }

    /// Keeps the size that a block of the driver had at the peak, if it had it until now.
    fn keep_size(&mut self, number: u64, of: &Kept) {
        let resized = self.resized.get(&number).copied();
        if let Some((peak, _)) = self.peak_of(of)
            && number.max(resized.map_or(0, |resized| resized.number)) <= peak.at
        {
            peak.since.push(*of);
            peak.since.extend(resized.map(|event| Kept { event, pool: PoolId::NONE, is_in_program: false }));
        }
    }

    /// Returns the peak of a block's device, and the bytes of the block in the program's view: 0 if the view does not contain
    /// it.
    fn peak_of(&mut self, of: &Kept) -> Option<(&mut Peak, u64)> {
        let EventKind::Alloc { block, .. } = of.event.kind else { return None };
        let is_kept = block.kind.is_on_device() || block.kind.is_taken_by_driver();
        let peaks = self.peaks.as_mut().filter(|_| is_kept)?;
        let bytes = if of.is_in_program { block.bytes.get() } else { 0 };
        Some((peaks.entry(block.device).or_default(), bytes))
    }

    fn came(&mut self, number: u64, of: &Kept) {
        let Some((peak, bytes)) = self.peak_of(of) else { return };
        peak.in_use += bytes;
        if peak.in_use > peak.bytes {
            (peak.bytes, peak.at) = (peak.in_use, number);
            peak.since.clear();
        }
    }

    fn subtract(&mut self, of: &Kept) {
        if let Some((peak, bytes)) = self.peak_of(of) {
            peak.in_use = peak.in_use.saturating_sub(bytes);
        }
    }

    /// Notes that a block ended.
    fn gone(&mut self, of: &Kept, end: Option<&RecordedEvent>) {
        self.subtract(of);
        if let Some((peak, _)) = self.peak_of(of)
            && of.event.number <= peak.at
        {
            peak.since.push(*of);
            peak.since.extend(end.map(|end| Kept { event: *end, pool: PoolId::NONE, is_in_program: false }));
        }
    }

    /// Notes that the free of a block failed.
    fn came_back(&mut self, of: &Kept, number: u64) {
        self.came(number, of);
        let Some((peak, _)) = self.peak_of(of) else { return };
        if let Some(at) = peak.since.iter().rposition(|kept| kept.event.number == of.event.number) {
            peak.since.remove(at);
            // Also removes the free that ended it.
            if at < peak.since.len() {
                peak.since.remove(at);
            }
        }
    }

    /// Returns the kept events in the order of their numbers, each with the pool that the new block of the driver belongs to.
    fn events(&self) -> Vec<(RecordedEvent, PoolId)> {
        let mut events: BTreeMap<u64, (RecordedEvent, PoolId)> = BTreeMap::new();
        // A block that has shrunk since the peak occurs several times, first with its size at the peak.
        let since = self.peaks.iter().flat_map(HashMap::values).flat_map(|peak| &peak.since);
        for Kept { event, pool, .. } in since.chain(self.live.values()) {
            events.entry(event.number).or_insert((*event, *pool));
        }
        let of_driver = self.measured.values().chain(self.resized.values());
        let others = self.warnings.iter().chain(&self.rejections).chain(&self.unknown).chain(of_driver);
        for event in others.chain(self.pools.values()).chain(self.reserved.values()) {
            events.entry(event.number).or_insert((*event, PoolId::NONE));
        }
        events.into_values().collect()
    }

    /// Returns the start of a recording: the kept events, with their scopes.
    pub fn items(&self) -> Vec<Item> {
        let events = self.events().into_iter().map(|(event, pool)| (event.number, (event, pool)));
        let mut events: BTreeMap<u64, (RecordedEvent, PoolId)> = events.collect();
        // A recording of peaks has no scopes.
        let has_scopes = self.peaks.is_none() && self.scopes.is_used;
        if has_scopes {
            events.extend(self.scopes.events().map(|event| (event.number, (event, PoolId::NONE))));
        }
        let mut reused: Vec<_> = self.scopes.reused.iter().filter(|_| has_scopes).collect();
        reused.sort_by_key(|(_, since)| **since);
        let (mut reused, mut items) = (reused.into_iter().peekable(), Vec::new());
        for (event, pool) in events.into_values() {
            while let Some((thread, _)) = reused.next_if(|(_, since)| **since < event.number) {
                items.push(Item::ThreadReused(*thread));
            }
            if pool != PoolId::NONE {
                items.push(Item::PoolBlock(PoolBlock { number: event.number, pool }));
            }
            if has_scopes && let Some(path) = self.path_of(&event) {
                items.push(Item::Inside(path));
            }
            items.push(Item::Event(event));
        }
        items.extend(reused.map(|(thread, _)| Item::ThreadReused(*thread)));
        items.push(Item::Totals(self.totals().clone()));
        items
    }

    /// Returns the scopes that the thread of an event was in, or the path of the scope that it entered.
    fn path_of(&self, event: &RecordedEvent) -> Option<Vec<CallsiteId>> {
        match event.kind {
            EventKind::Alloc { .. } => {
                Some(self.paths.get(&event.number).map(|node| self.ledger.path(*node)).unwrap_or_default())
            }
            EventKind::Open { scope, .. } => {
                let period = self.ledger.scope_period(scope, event.number)?;
                Some(self.ledger.scopes_around(&period))
            }
            EventKind::Enter { .. } => self.ledger.path_entered(event.thread, event.number),
            _ => None,
        }
    }

    /// Returns the totals up to the last event.
    pub fn totals(&self) -> &Totals {
        self.tally.totals()
    }

    /// Returns the definition for a recording that starts with these events.
    pub fn definition(&self) -> PartDefinition {
        PartDefinition { is_peaks: self.peaks.is_some(), after: self.latest }
    }
}

impl OpenScopes {
    fn apply(&mut self, event: &RecordedEvent) {
        match event.kind {
            EventKind::Open { scope, mut spec } => {
                self.is_used = true;
                // The allocations of its peak are not known, because events are missing.
                spec.at_peak = false;
                self.opened.insert(scope, RecordedEvent { kind: EventKind::Open { scope, spec }, ..*event });
            }
            EventKind::Close { scope } => {
                self.opened.remove(&scope);
                self.adopting.remove(&scope);
            }
            EventKind::Enter { scope } => self.entered.entry(event.thread).or_default().push((scope, *event)),
            EventKind::Leave { scope } => {
                if let Some(entered) = self.entered.get_mut(&event.thread)
                    && let Some(at) = entered.iter().rposition(|(of, _)| *of == scope)
                {
                    entered.remove(at);
                }
            }
            EventKind::Adopt { scope, .. } => _ = self.adopting.insert(scope, *event),
            EventKind::Named { .. } => _ = self.named.insert(event.thread, *event),
            _ => {}
        }
    }

    fn start_thread(&mut self, thread: ThreadId, latest: u64) {
        self.entered.remove(&thread);
        self.named.remove(&thread);
        self.reused.insert(thread, latest);
    }

    /// Returns the events that the reader needs, including those of closed scopes that threads are still in.
    fn events(&self) -> impl Iterator<Item = RecordedEvent> {
        let entered = self.entered.values().flatten().map(|(_, event)| event);
        let events = self.opened.values().chain(self.adopting.values()).chain(self.named.values());
        events.chain(entered).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use fastrand::Rng;

    use super::*;
    use gpumem_core::{
        ledger::{BLOCK_PARTS, KnownPool},
        model::{Bytes, DriverGauge, Family, Key, MemKind},
    };

    /// The peak of each device, the live blocks, and the pools.
    type LedgerState = (Vec<(Device, u64)>, Vec<(Key, Bytes)>, Vec<KnownPool>);

    /// Returns the state of a ledger after these events.
    fn ledger_state(events: &[RecordedEvent]) -> LedgerState {
        ledger_state_of(&events.iter().map(|event| (*event, None)).collect::<Vec<_>>())
    }

    /// Like `ledger_state`, for kept events with their pools.
    fn ledger_state_of(events: &[(RecordedEvent, Option<PoolId>)]) -> LedgerState {
        let mut ledger = Ledger::default();
        for (RecordedEvent { number, time, thread, kind, .. }, pool) in events {
            ledger.apply(&Event { number: *number, time: *time, thread: *thread, kind });
            if let Some(pool) = pool {
                ledger.decide_shortened(kind, *pool, &mut ());
            }
        }
        let end = EventKind::PoolsQueried;
        ledger.apply(&Event { number: 1 << 40, time: Duration::ZERO, thread: ThreadId(0), kind: &end });
        let stats = ledger.sums().stats();
        let mut peaks: Vec<_> = stats.iter().map(|stats| (stats.device, stats.on_device.bytes.peak)).collect();
        peaks.sort_by_key(|(device, _)| device.ordinal);
        let blocks = (0..BLOCK_PARTS).flat_map(|part| ledger.blocks(part, None));
        let mut live: Vec<_> = blocks.map(|block| (block.key, block.bytes)).collect();
        live.sort_by_key(|(key, _)| key.get());
        (peaks, live, ledger.pools())
    }

    fn without_pools(part: &Part) -> Vec<RecordedEvent> {
        part.events().into_iter().map(|(event, _)| event).collect()
    }

    /// Creates a program with three threads, a pool without wrong calls, and blocks of its own.
    fn program_with_pool(seed: u64) -> Vec<RecordedEvent> {
        // Blocks below this address belong to the pool.
        const POOL_END: u64 = 1_600;
        let mut numbers = Rng::with_seed(seed);
        let mut random = |below: u64| numbers.u64(..below);
        let (device, pool) = (Device { family: Family::Cuda, ordinal: 0 }, PoolId(1));
        let mut kinds = vec![(1, EventKind::PoolRegistered { pool, device })];
        let (mut blocks, mut parts) = (BTreeSet::new(), BTreeSet::new());
        let alloc = |key, bytes, kind, context| {
            let block = Block { context, ..Block::new(device, Bytes::new(bytes), kind) };
            EventKind::Alloc { key, block }
        };
        for _ in 0..200 {
            let thread = 1 + u32::try_from(random(3)).unwrap();
            let address = 1_000 + random(12) * 100;
            let at = address + random(4) * 20;
            let (block, part) = (Key::from_raw(address), Key::of_part(pool, at));
            let (is_of_pool, is_used) = (address < POOL_END, parts.range(address..address + 100).next().is_some());
            let kind = if blocks.insert(address) {
                alloc(block, 100, MemKind::Device, 0)
            } else if is_of_pool && parts.remove(&at) {
                EventKind::Free { key: part, block: None }
            } else if is_of_pool && (is_used || random(3) > 0) {
                parts.insert(at);
                alloc(part, 1 + random(20), MemKind::Part, pool.0)
            } else {
                blocks.remove(&address);
                EventKind::Free { key: block, block: None }
            };
            kinds.push((thread, kind));
            if !is_of_pool {
                // The peak includes the block immediately.
                kinds.push((thread, EventKind::PoolsQueried));
            }
            let is_block = matches!(kind, EventKind::Alloc { key, .. } | EventKind::Free { key, .. } if key == block);
            if is_of_pool && is_block {
                let bytes = Bytes::new(100 * blocks.range(..POOL_END).count() as u64);
                kinds.push((thread, EventKind::PoolReserved { pool, bytes }));
            }
        }
        let event = |(number, (thread, kind))| RecordedEvent {
            number,
            ticks: number,
            time: Duration::ZERO,
            thread: ThreadId(thread),
            kind,
        };
        (1..).zip(kinds).map(event).collect()
    }

    /// The owner of each block is known, although the events that decided it are not kept.
    #[test]
    fn the_peak_of_the_programs_view_is_kept_and_what_pools_have() {
        for seed in 1..=300 {
            let events = program_with_pool(seed);
            let (mut peaks, mut latest) = (Part::peaks(), Part::latest());
            for event in &events {
                peaks.apply(event);
                latest.apply(event);
            }
            let expected = ledger_state(&events);
            let totals = [&peaks, &latest].map(|part| part.totals().clone());
            let [peaks, latest] = [peaks, latest]
                .map(|part| part.events().into_iter().map(|(event, pool)| (event, Some(pool))).collect::<Vec<_>>());
            assert_eq!(ledger_state_of(&peaks), expected, "seed {seed}");
            assert_eq!(
                (ledger_state_of(&latest).1, ledger_state_of(&latest).2),
                (expected.1, expected.2),
                "seed {seed}"
            );
            assert!(peaks.len() < events.len() && latest.len() < events.len());
            // The driver's blocks have their own peak, at another time. Each block has 100 bytes.
            let (mut now, mut most) = (0_u64, 0);
            for RecordedEvent { kind, .. } in &events {
                match kind {
                    EventKind::Alloc { key, block } if !key.is_part() => now += block.bytes.get(),
                    EventKind::Free { key, .. } if !key.is_part() => now -= 100,
                    _ => {}
                }
                most = most.max(now);
            }
            assert_eq!(totals.each_ref().map(|totals| totals.driver_peaks[0].bytes), [most; 2], "seed {seed}");
        }
    }

    /// What the driver took has the size that it had at the peak, and later the size at the end.
    #[test]
    fn the_memory_that_the_driver_took_is_kept_for_the_peak_and_the_end() {
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let event = |number, kind| RecordedEvent { number, ticks: 0, time: Duration::ZERO, thread: ThreadId(1), kind };
        let alloc = |number, bytes, kind| {
            let block = Block::new(device, Bytes::new(bytes), kind);
            event(number, EventKind::Alloc { key: Key::from_raw(number), block })
        };
        let resize =
            |number, key, bytes| event(number, EventKind::Shrink { key: Key::from_raw(key), bytes: Bytes::new(bytes) });
        let free = |number, key| event(number, EventKind::Free { key: Key::from_raw(key), block: None });
        let measured = event(1, EventKind::DriverMeasured { device, by: DriverGauge::Process });
        let start = [
            measured,
            alloc(2, 500, MemKind::Context),
            alloc(3, 10, MemKind::PoolCache),
            alloc(4, 7, MemKind::Limits),
            resize(5, 3, 20),
            resize(6, 3, 30),
        ];
        let at_peak = [start[0], start[1], start[2], start[3], start[5], alloc(7, 100, MemKind::Device)];
        let rest = [resize(8, 3, 40), resize(9, 3, 50), free(10, 4), free(11, 7), resize(12, 2, 600)];
        let mut part = Part::peaks();
        start.iter().chain(&at_peak[5..]).chain(&rest).for_each(|event| part.apply(event));
        assert_eq!(without_pools(&part), [&at_peak[..], &rest[1..]].concat());
        // It is no allocation.
        assert_eq!((part.totals().allocations, part.totals().frees), (1, 1));
        let mut part = Part::latest();
        start.iter().chain(&at_peak[5..]).chain(&rest).for_each(|event| part.apply(event));
        assert_eq!(without_pools(&part), [start[0], start[1], start[2], rest[1], rest[4]]);
    }

    /// Creates a program that allocates, frees, fails to free and shrinks blocks on three devices.
    fn program(seed: u64) -> Vec<RecordedEvent> {
        let mut numbers = Rng::with_seed(seed);
        let mut random = |below: u64| numbers.u64(..below);
        let (mut events, mut live) = (Vec::new(), Vec::<(u64, u64)>::new());
        let mut next = 0;
        for number in 1..=400 {
            // First there are more allocations than frees, then fewer.
            let requested = if number < 250 { 6 } else { 3 };
            let kind = match random(10) {
                chance if chance < requested || live.is_empty() => {
                    next += 1;
                    let bytes = 1 + random(1_000);
                    live.push((next, bytes));
                    let ordinal = u32::try_from(random(3)).unwrap();
                    let device = Device { family: Family::Cuda, ordinal };
                    let kind =
                        [MemKind::Device, MemKind::Pool, MemKind::PinnedHost][usize::try_from(random(3)).unwrap()];
                    EventKind::Alloc { key: Key::from_raw(next), block: Block::new(device, Bytes::new(bytes), kind) }
                }
                9 if !live.is_empty() && number % 3 == 0 => {
                    let at = usize::try_from(random(live.len() as u64)).unwrap();
                    let (key, bytes) = &mut live[at];
                    *bytes = bytes.div_ceil(2);
                    EventKind::Shrink { key: Key::from_raw(*key), bytes: Bytes::new(*bytes) }
                }
                _ => {
                    let (key, _) = live.swap_remove(usize::try_from(random(live.len() as u64)).unwrap());
                    EventKind::Free { key: Key::from_raw(key), block: None }
                }
            };
            events.push(RecordedEvent { number, ticks: number, time: Duration::ZERO, thread: ThreadId(1), kind });
            if let EventKind::Free { key, .. } = kind
                && random(8) == 0
            {
                let bytes = events.iter().rev().find_map(|event| match event.kind {
                    EventKind::Alloc { key: of, block } if of == key => Some(block.bytes.get()),
                    EventKind::Shrink { key: of, bytes } if of == key => Some(bytes.get()),
                    _ => None,
                });
                live.push((key.get(), bytes.unwrap()));
                let failed = RecordedEvent { kind: EventKind::FreeFailed, ..events[events.len() - 1] };
                events.push(failed);
            }
        }
        for (number, event) in (1..).zip(&mut events) {
            event.number = number;
        }
        events
    }

    #[test]
    fn the_peaks_and_what_is_live_are_those_of_all_events() {
        for seed in 0..200 {
            let events = program(seed);
            let expected = ledger_state(&events);
            let (mut peaks, mut latest) = (Part::peaks(), Part::latest());
            for event in &events {
                peaks.apply(event);
                latest.apply(event);
            }
            let kept = without_pools(&peaks);
            assert_eq!(ledger_state(&kept), expected, "seed {seed}");
            assert!(kept.len() < events.len() && kept.is_sorted_by_key(|event| event.number));
            let live = without_pools(&latest);
            assert_eq!(ledger_state(&live).1, expected.1, "seed {seed}");
            assert!(live.iter().all(|event| matches!(event.kind, EventKind::Alloc { .. })));
            let definitions = [peaks.definition(), latest.definition()];
            assert_eq!(
                definitions.map(|part| (part.is_peaks, part.after)),
                [true, false].map(|is| (is, events.last().unwrap().number))
            );
        }
    }

    #[test]
    fn the_blocks_of_a_context_are_gone_with_it_and_losses_are_kept() {
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let alloc = |number, context| {
            let block = Block { context, ..Block::new(device, Bytes::new(100), MemKind::Device) };
            let kind = EventKind::Alloc { key: Key::from_raw(number), block };
            RecordedEvent { number, ticks: 0, time: Duration::ZERO, thread: ThreadId(1), kind }
        };
        let mut part = Part::peaks();
        let lost = RecordedEvent { kind: EventKind::Lost { count: 3 }, ..alloc(3, 0) };
        let gone = RecordedEvent { kind: EventKind::ContextDestroyed { context: 1 }, ..alloc(4, 0) };
        for event in [alloc(1, 1), alloc(2, 2), lost, gone, alloc(5, 3)] {
            part.apply(&event);
        }
        // The second event set the peak; the last one only equals it.
        assert_eq!(without_pools(&part), [alloc(1, 1), alloc(2, 2), lost, gone, alloc(5, 3)]);
        part.apply(&alloc(6, 3));
        assert_eq!(without_pools(&part), [alloc(2, 2), lost, alloc(5, 3), alloc(6, 3)]);
    }
}
