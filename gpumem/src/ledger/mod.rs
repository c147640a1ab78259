//! The fold of all events: bytes in use, live blocks and the peak of every open scope. Pure: no clock, no lock, no I/O,
//! so a live run and a replayed one agree by construction.

mod guests;
mod live;
mod openers;
mod origins;
mod peaks;
mod run;
mod stats;
mod tree;
mod watermark;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound,
    time::Duration,
};

use self::{
    guests::Guests,
    live::{Entry, Folded, Live, Whose, tenths},
    openers::Openers,
    origins::{OriginId, Origins},
    peaks::{Group, Peaks, Rise, Span},
    run::Run,
    stats::moved,
    tree::Tree,
    watermark::{Mark, Watermark},
};
pub(crate) use self::{
    live::PARTS,
    origins::Origin,
    stats::Stat,
    tree::{Spot, SpotId},
};
use crate::model::{
    Answer, Block, ByteDelta, Bytes, Device, Event, EventKind, Family, Gauge, GpuMemory, Key, Marks, MemKind, Sampling,
    ScopeId, SiteId, Strand, Tag, ThreadId, Time, Trace, Watch,
};

/// What each event touches comes first, in as few lines of the cache as possible: from the run to the counts.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Ledger {
    /// The newest events, not yet counted in the tree, the meters and the origins.
    run: Run,
    /// By number. There are as many as ever ran at one time.
    threads: Vec<Thread>,
    /// The time of the next allocation, in tenths of a second.
    tenths: u32,
    /// A scope looks at what one thread allocates.
    has_locals: bool,
    live: Live,
    counts: Counts,
    /// How many of the driver's functions other tools have taken over at the moment. A part of what is lost: a scope that begins
    /// now misses their calls as well.
    displaced: u64,
    /// Open ones. Ordered, so that they can be gone through in parts.
    scopes: BTreeMap<ScopeId, Scope>,
    /// What the newest question came to. Not part of the answer, which every allocation would carry about.
    told: Option<Trace>,
    tree: Tree,
    meters: Meters,
    /// The part of a meter that one thread allocated, while a scope looks at it.
    locals: HashMap<(Strand, u16), Local, Folded>,
    origins: Origins,
    /// How many strands there are.
    strands: u32,
    guests: Guests,
    /// Peaks that are asked about though their scopes are over.
    kept: HashMap<ScopeId, Kept>,
}

/// What was heard so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Allocations and frees. Runs add theirs when they end; what moves a block in a run without an event is taken off here, so
    /// that this may wrap below 0 meanwhile.
    pub(crate) heard: u64,
    /// Frees of blocks that nobody knows the size of.
    pub(crate) untracked: u64,
    /// Events that could not be taken, and functions that were found displaced.
    pub(crate) lost: u64,
    /// Blocks that went with their context, not freed by anybody.
    pub(crate) gone: u64,
}

/// What is known of a thread.
#[derive(Debug)]
#[repr(C, align(64))]
struct Thread {
    /// Its newest allocation's, for the next one, which is likely to agree.
    newest: (Tag, Whose),
    /// Should its newest free turn out to have failed.
    freed: Freed,
    /// The scope that it is in.
    spot: SpotId,
    /// On whose behalf it allocates: its own, unless it entered a scope of another thread.
    strand: Strand,
    own: Strand,
    /// The scopes that it is in, the innermost last. Programs that do not leave the last one first mostly leave the first one.
    entered: VecDeque<Entered>,
}

#[derive(Clone, Copy, Debug)]
struct Entered {
    /// Of the event that it was entered by. It rises.
    number: u64,
    scope: ScopeId,
    spot: SpotId,
    strand: Strand,
    /// By opening the scope, which is left when the scope is closed; else it was entered for itself, and is left so.
    by_opening: bool,
}

/// What the newest free of a thread took out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Freed {
    #[default]
    Nothing,
    Block(Key, Entry),
    /// A block from before the session.
    Older(Device, Bytes),
    /// A block from before the session that changes no figure: one that is not on a device, or is not looked up yet.
    Uncounted,
    /// A block that nobody knows the size of, by the event of this number.
    Untracked(u64),
}

/// One for each device and gauge; a handful, so a search beats a hash.
#[derive(Debug, Default)]
struct Meters(Vec<Meter>);

/// Bytes in use on one device as one gauge sees them.
#[derive(Debug)]
#[repr(C)]
struct Meter {
    level: Level,
    /// Where allocations are heard.
    peaks: Peaks,
    /// Of the memory that traces count, where allocations are heard.
    on_device: Stat,
    /// By the order of [`MemKind::ALL`].
    kinds: [Stat; MemKind::ALL.len()],
    device: Device,
    gauge: Gauge,
    samples: Samples,
    /// Of traces by every gauge, at the meter of what is heard on the device.
    openers: Openers,
}

#[derive(Debug, Default)]
struct Local {
    level: Level,
    /// Scopes and kept peaks that look at it.
    scopes: usize,
    /// While one of them asks which allocations made its peak.
    groups: Option<Box<LocalGroups>>,
}

/// What one thread allocated of each origin, since somebody asks.
#[derive(Debug)]
struct LocalGroups {
    peaks: Peaks,
    all: Vec<(OriginId, Group)>,
    known: HashMap<OriginId, usize, Folded>,
    /// Which one the newest change was of.
    newest: usize,
}

/// A peak that is asked about, in parts, whether its scope is over or not.
#[derive(Clone, Copy, Debug)]
struct Kept {
    meter: u16,
    of_thread: Option<Strand>,
    rise: Rise,
}

/// What one origin had more at a peak than at the start of its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AtPeak {
    pub(crate) origin: Origin,
    pub(crate) bytes: ByteDelta,
}

/// A peak, without the groups that it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeakOf {
    pub(crate) device: Device,
    /// What all groups add up to, with the next.
    pub(crate) bytes: ByteDelta,
    /// Of blocks that are older than the session; not above 0 unless a free failed.
    pub(crate) older: ByteDelta,
    /// What is added up is what groups have more than at the start of a scope.
    pub(crate) is_over_start: bool,
}

/// Bytes in use, and the most of them since any moment that an open scope began at.
#[derive(Debug, Default)]
struct Level {
    /// Signed: blocks that are older than the session may be given back, and samples count down from what is free.
    in_use: i64,
    peaks: Watermark<i64>,
}

/// How a device was sampled, of which an open scope is told its own part.
#[derive(Debug, Default)]
struct Samples {
    count: u64,
    newest: Option<Time>,
    gaps: Watermark<Duration>,
    /// The newest attempt failed.
    failed: bool,
    /// How often somebody else disturbed what is read.
    disturbed: u64,
}

/// An open scope.
#[derive(Debug)]
struct Scope {
    watch: Watch,
    meter: u16,
    /// If it counts what one thread allocates: which one.
    of_thread: Option<Strand>,
    spot: SpotId,
    /// Where it was before a scope around it was closed first.
    earlier: Vec<SpotId>,
    /// The meter of what is heard on its device.
    heard: u16,
    /// On whose behalf it was opened, by which thread, and the number of that event.
    strand: Strand,
    opener: ThreadId,
    /// The opener's own strand: its number may be another thread's by now.
    own: Strand,
    number: u64,
    start: Start,
    /// If it is asked which allocations made its peak.
    span: Option<Span>,
}

/// What a scope began with.
#[derive(Clone, Copy, Debug, Default)]
struct Start {
    /// Of the event that it began with.
    number: u64,
    in_use: i64,
    peak: Mark,
    /// Of what is heard on the device.
    heard: Mark,
    gap: Mark,
    /// Samples of the device before the one that this scope began with.
    samples_before: u64,
    disturbed_before: u64,
    /// The device could not be read when this scope began (a reset may meet that), so nobody knows what it began with.
    blind: bool,
    before: Counts,
}

/// So many scopes, paths or origins are looked at while others wait.
pub(crate) const SLICE: usize = 1 << 9;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) key: Key,
    /// Of the event that it came with, which no other block has: a key may be given out again.
    pub(crate) number: u64,
    /// Who allocated it, or on whose behalf it was.
    pub(crate) thread: Strand,
    pub(crate) bytes: Bytes,
    pub(crate) device: Device,
    pub(crate) origin: Origin,
    /// About when it was allocated.
    pub(crate) time: Time,
}

/// One time that a scope was open, to tell what was allocated in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Within {
    spot: SpotId,
    earlier: Vec<SpotId>,
    strand: Strand,
    /// The numbers of the first and the last event.
    since: u64,
    until: u64,
}

/// What is live of one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveOrigin {
    pub(crate) device: Device,
    pub(crate) origin: Origin,
    pub(crate) blocks: u64,
    pub(crate) bytes: Bytes,
}

/// The allocator's statistics of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceStats {
    pub(crate) device: Device,
    pub(crate) on_device: Stat,
    pub(crate) kinds: [Stat; MemKind::ALL.len()],
}

impl Ledger {
    /// Takes one event in.
    #[inline]
    pub(crate) fn apply(&mut self, event: &Event<'_>) -> Answer {
        match event.kind {
            EventKind::Alloc { key, block } => {
                self.set_time(event.time);
                let (bytes, tag) = (block.bytes, block.tag());
                if !self.alloc_alike(*key, bytes, tag, event.number, event.thread) {
                    self.alloc(*key, bytes, tag, event.number, event.thread);
                }
                Answer::Taken
            }
            EventKind::Free { key, .. } if self.free_alike(*key, event.thread) => Answer::Taken,
            EventKind::Free { key, block } => self.free(*key, block.as_ref(), event.thread),
            _ => {
                self.end_run();
                self.told = self.apply_rare(event);
                Answer::Taken
            }
        }
    }

    /// The time of the allocations that follow.
    pub(crate) fn set_time(&mut self, time: Time) {
        self.tenths = tenths(time);
    }

    /// Takes in an allocation that differs from the newest events in its key and size alone, as most do. Says whether it is one;
    /// if it is not, nothing is changed, and it is for [`alloc`](Self::alloc). It calls nothing and cannot panic.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub(crate) fn alloc_alike(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        let Some(Thread { newest: (newest, whose), .. }) = self.threads.get(thread.0 as usize) else { return false };
        if *newest != tag || whose.origin() != self.run.origin || self.has_locals {
            return false;
        }
        if !self.live.insert_young(key, Entry::new(bytes, number, self.tenths, *whose)) {
            return false;
        }
        self.run.add(signed(bytes));
        self.run.allocated(bytes.get());
        true
    }

    /// As [`alloc_alike`](Self::alloc_alike), of a free of a young block.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub(crate) fn free_alike(&mut self, key: Key, thread: ThreadId) -> bool {
        let Some(record) = self.threads.get_mut(thread.0 as usize) else { return false };
        if self.has_locals {
            return false;
        }
        let Some(entry) = self.live.remove_young_of(key, self.run.origin) else { return false };
        self.run.subtract(signed(entry.bytes));
        // In place: a copy that is made elsewhere and read back by wider words than it was written in waits for its stores
        // (store forwarding).
        record.freed = Freed::Block(key, entry);
        true
    }

    /// A block was allocated, by the event of this number.
    pub(crate) fn alloc(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) {
        let whose = self.whose(tag, thread);
        self.put_in(key, Entry::new(bytes, number, self.tenths, whose));
        self.run.allocated(bytes.get());
    }

    /// A block is there, for the first time or still.
    fn put_in(&mut self, key: Key, entry: Entry) {
        if let Some(missed) = self.live.insert(key, entry) {
            self.take_out_unheard(&missed);
        }
        self.count(&entry);
    }

    fn count(&mut self, entry: &Entry) {
        self.run_of(entry.origin()).add(signed(entry.bytes));
        if self.has_locals {
            self.count_locally(entry.whose(), signed(entry.bytes));
        }
    }

    /// A block is there no more, and nobody heard a free.
    #[cold]
    fn take_out_unheard(&mut self, entry: &Entry) {
        self.take_out(entry);
        self.counts.heard = self.counts.heard.wrapping_sub(1);
    }

    /// A block is there no more.
    fn take_out(&mut self, entry: &Entry) {
        self.run_of(entry.origin()).subtract(signed(entry.bytes));
        if self.has_locals {
            self.count_locally(entry.whose(), -signed(entry.bytes));
        }
    }

    /// Counts what a thread allocated for the scopes that look at it alone.
    #[cold]
    fn count_locally(&mut self, whose: Whose, bytes: i64) {
        let Origin { kind, meter, .. } = *self.origins.get(whose.origin());
        if !kind.is_on_device() {
            return;
        }
        let Self { guests, locals, .. } = self;
        guests.each(whose.strand(), |thread| {
            if let Some(local) = locals.get_mut(&(thread, meter)) {
                local.level.change(bytes);
                if let Some(groups) = &mut local.groups {
                    groups.change(whose.origin(), bytes, local.level.in_use);
                }
            }
        });
    }

    #[inline]
    fn run_of(&mut self, origin: OriginId) -> &mut Run {
        if self.run.origin != origin {
            self.begin_run(origin);
        }
        &mut self.run
    }

    #[cold]
    fn begin_run(&mut self, origin: OriginId) {
        self.end_run();
        self.run.origin = origin;
    }

    /// Counts what the newest events came to: before another origin's, and before anybody is told of anything counted.
    #[inline]
    fn end_run(&mut self) {
        let Self { run, origins, meters, tree, counts, .. } = self;
        let Some((number, sums)) = run.sums() else { return };
        counts.heard = counts.heard.wrapping_add_signed(sums.events());
        let held = origins.held(number);
        held.blocks = moved(held.blocks, sums.blocks.change);
        held.bytes = moved(held.bytes, sums.bytes.change);
        let origin = &held.origin;
        let Meter { level, peaks, on_device, kinds, .. } = &mut meters.0[usize::from(origin.meter)];
        kinds[origin.kind as usize].take(&sums);
        if origin.kind.is_on_device() {
            let high = level.in_use.saturating_add(sums.bytes.most);
            if held.saved.is_due(peaks) || peaks.is_below(high) {
                peaks.run(&mut held.saved, held.bytes.cast_signed(), sums.bytes, high);
            }
            on_device.take(&sums);
            level.take(high, sums.bytes.change);
            tree.take(origin.spot, &sums);
        }
        *run = Run::default();
    }

    /// The thread that this thread allocates for, and the origin of the allocation.
    fn whose(&mut self, tag: Tag, thread: ThreadId) -> Whose {
        let (newest, whose) = self.thread(thread).newest;
        if newest == tag { whose } else { self.find_whose(tag, thread) }
    }

    #[cold]
    fn find_whose(&mut self, tag: Tag, thread: ThreadId) -> Whose {
        self.end_run();
        let Thread { spot, strand, .. } = *self.thread(thread);
        let meter = self.meters.index(tag.device(), Gauge::Exact);
        let spot = self.tree.on(meter, spot);
        let origin = Origin { spot, stack: tag.stack(), meter, kind: tag.kind(), context: tag.context() };
        let Self { threads, locals, meters, origins, .. } = self;
        let in_use = || {
            let newest = threads.iter().map(|thread| thread.newest.1.origin());
            let freed = threads.iter().filter_map(|thread| match &thread.freed {
                Freed::Block(_, entry) => Some(entry.origin()),
                _ => None,
            });
            let groups = locals.values_mut().filter_map(|local| local.groups.as_mut());
            newest.chain(freed).chain(groups.flat_map(|groups| groups.needed())).collect()
        };
        let is_needed = |held: &origins::Held| held.saved.is_needed(&meters.0[usize::from(held.origin.meter)].peaks);
        let number = origins.number(origin, in_use, is_needed);
        let whose = Whose::new(strand, number);
        self.thread(thread).newest = (tag, whose);
        whose
    }

    #[inline]
    fn thread(&mut self, thread: ThreadId) -> &mut Thread {
        let at = thread.0 as usize;
        if at >= self.threads.len() {
            self.more_threads(at);
        }
        &mut self.threads[at]
    }

    #[cold]
    #[inline(never)]
    fn more_threads(&mut self, last: usize) {
        while self.threads.len() <= last {
            let own = next_strand(&mut self.strands);
            self.threads.push(Thread::new(own));
        }
    }

    /// How many threads it keeps a record of.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// A thread begins that has the number of one that has ended. What that one allocated is not the new one's.
    pub(crate) fn begin_thread(&mut self, thread: ThreadId) {
        let own = next_strand(&mut self.strands);
        if let Some(ended) = self.threads.get_mut(thread.0 as usize) {
            *ended = Thread::new(own);
        }
    }

    /// A block from before the session is given back: no thread's and no scope's part ever had it.
    fn change_older(&mut self, device: Device, by: i64) {
        self.end_run();
        let Meter { level, peaks, .. } = self.meters.of(device, Gauge::Exact);
        peaks.change_older(by);
        level.change(by);
        peaks.reach(level.in_use);
    }

    /// A block is given back; `older` is what the source knows of one that is older than the session.
    pub(crate) fn free(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        let Some(entry) = self.live.remove(key) else { return self.free_unknown(older, thread) };
        self.take_out(&entry);
        self.thread(thread).freed = Freed::Block(key, entry);
        Answer::Taken
    }

    #[cold]
    fn free_unknown(&mut self, older: Option<&Block>, thread: ThreadId) -> Answer {
        self.counts.heard = self.counts.heard.wrapping_add(1);
        let (freed, answer) = match older {
            Some(block) => (self.free_older(block), Answer::Taken),
            // Counted when the look-up has ended: a scope that is opened meanwhile begins before this free.
            None => (Freed::Uncounted, Answer::Untracked),
        };
        self.thread(thread).freed = freed;
        answer
    }

    fn free_older(&mut self, block: &Block) -> Freed {
        if !block.kind.is_on_device() {
            return Freed::Uncounted;
        }
        self.change_older(block.device, -signed(block.bytes));
        Freed::Older(block.device, block.bytes)
    }

    /// A free that failed is no event: it is taken off the count.
    fn unfree(&mut self, thread: ThreadId) {
        match std::mem::take(&mut self.thread(thread).freed) {
            Freed::Nothing => return,
            // The run takes it for a free that did not come, and takes it off.
            Freed::Block(key, entry) => {
                self.guests.see([entry.whose().strand()]);
                return self.put_in(key, entry);
            }
            Freed::Older(device, bytes) => self.change_older(device, signed(bytes)),
            Freed::Uncounted => {}
            Freed::Untracked(number) => {
                self.counts.untracked = self.counts.untracked.saturating_sub(1);
                // Scopes that began since then counted it among what was before them.
                for scope in self.scopes.values_mut().filter(|scope| scope.start.number > number) {
                    let before = &mut scope.start.before.untracked;
                    *before = before.saturating_sub(1);
                }
            }
        }
        self.counts.heard = self.counts.heard.wrapping_sub(1);
    }

    /// A block keeps whose it is and where it comes from, and its place: who reads the blocks in parts meets it.
    fn shrink(&mut self, key: Key, bytes: Bytes) {
        if let Some(entry) = self.live.get_mut(key) {
            let (before, now) = (*entry, entry.of(bytes));
            *entry = now;
            self.take_out(&before);
            self.count(&now);
        }
    }

    /// Everything but allocations and frees, out of their way.
    #[cold]
    fn apply_rare(&mut self, event: &Event<'_>) -> Option<Trace> {
        match *event.kind {
            EventKind::Alloc { .. } | EventKind::Free { .. } => {}
            EventKind::Unfree => self.unfree(event.thread),
            EventKind::Untracked => {
                self.counts.untracked += 1;
                self.thread(event.thread).freed = Freed::Untracked(event.number);
            }
            EventKind::Shrink { key, bytes } => self.shrink(key, bytes),
            EventKind::Found { block } => {
                let freed = self.free_older(&block);
                self.thread(event.thread).freed = freed;
            }
            EventKind::Gone { context } => (0..PARTS).for_each(|part| self.gone(context, part)),
            EventKind::Sample { device, memory } => self.meters.of(device, Gauge::Sampled).sample(event.time, &memory),
            EventKind::Marks { device, marks } => self.meters.of(device, Gauge::Pool).mark(&marks),
            EventKind::Unread { device, gauge } => self.meters.of(device, gauge).samples.failed = true,
            EventKind::Open { scope, watch } => self.open(scope, watch, event),
            EventKind::Enter { scope } => self.enter(scope, event),
            EventKind::Leave { scope } => self.thread(event.thread).leave(scope),
            EventKind::Read { scope } => {
                return self.scopes.get(&scope).map(|open| self.trace(open));
            }
            EventKind::Reset { scope } | EventKind::Next { scope } => {
                let mut open = self.scopes.remove(&scope)?;
                let trace = self.end(&open);
                open.start = self.begin(&open, event.number);
                if matches!(event.kind, EventKind::Reset { .. }) {
                    self.close_span(&mut open);
                    self.open_span(&mut open);
                }
                self.scopes.insert(scope, open);
                return Some(trace);
            }
            EventKind::Close { scope } => return self.close(scope, event.number),
            EventKind::ResetPeaks { device } => {
                let Meter { on_device, kinds, .. } = self.meters.of(device, Gauge::Exact);
                kinds.iter_mut().chain([on_device]).for_each(Stat::reset_peaks);
            }
            EventKind::MarksLost { device } => self.meters.of(device, Gauge::Pool).samples.disturbed += 1,
            EventKind::Lost { count } => self.lost(count, event.number),
            EventKind::Displaced { now, more } => {
                let before = std::mem::replace(&mut self.displaced, now);
                if more > 0 || (now > 0) != (before > 0) {
                    self.lost(more, event.number);
                }
            }
        }
        None
    }

    /// So many events were missed before the one of this number. Frees go on being missed while functions are displaced.
    fn lost(&mut self, count: u64, number: u64) {
        self.counts.lost += count;
        let until = if self.displaced > 0 { u64::MAX } else { number };
        for missed in self.live.doubt(until) {
            self.take_out_unheard(&missed);
        }
    }

    /// What the newest event came to, if it was a question to an open scope.
    pub(crate) fn take_trace(&mut self) -> Option<Trace> {
        self.told.take()
    }

    pub(crate) fn counts(&mut self) -> Counts {
        self.end_run();
        self.counts
    }

    /// The statistics of each device on which something was heard.
    pub(crate) fn stats(&mut self) -> Vec<DeviceStats> {
        self.end_run();
        let heard = self.meters.0.iter().filter(|meter| meter.gauge == Gauge::Exact);
        heard
            .map(|Meter { device, on_device, kinds, .. }| DeviceStats {
                device: *device,
                on_device: *on_device,
                kinds: *kinds,
            })
            .collect()
    }

    /// What was allocated in a context goes with it: a part of the blocks, of [`PARTS`].
    pub(crate) fn gone(&mut self, context: u8, part: usize) {
        let origins = &self.origins;
        for entry in self.live.drain(part, |entry| origins.get(entry.origin()).context == context) {
            self.counts.gone += 1;
            self.take_out_unheard(&entry);
        }
    }

    /// Has the tree know what the device had while scopes that are open were: a part of them, after the one given. Gives the last
    /// of them; `None` if there was none.
    pub(crate) fn note_device_peaks(&mut self, after: Option<ScopeId>) -> Option<ScopeId> {
        self.end_run();
        let rest = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part: Vec<_> = self.scopes.range(rest).take(SLICE).collect();
        let part: Vec<_> = part.iter().map(|(id, scope)| (**id, scope.spot, self.device_peak(scope))).collect();
        for (_, spot, in_use) in &part {
            self.tree.device_had(*spot, *in_use);
        }
        part.last().map(|(id, ..)| *id)
    }

    /// Paths of scopes by the number of their spot, from this one on, each with its device. Number 0 is nowhere and has none. A
    /// part of them; none after the last.
    pub(crate) fn spots_from(&mut self, first: usize) -> Vec<(Option<Device>, Spot)> {
        self.end_run();
        let meters = &self.meters.0;
        let with_device = |spot: &Spot| {
            let Some(Meter { device, on_device, peaks, .. }) = meters.get(usize::from(spot.meter)) else {
                return (None, *spot);
            };
            let mut spot = *spot;
            if spot.parent == SpotId::NONE {
                (spot.in_use, spot.peak) = (on_device.bytes.current.cast_signed(), peaks.record());
            }
            (Some(*device), spot)
        };
        self.tree.spots(first, SLICE).iter().map(with_device).collect()
    }

    /// The scope that a thread is in.
    #[cfg(test)]
    pub(crate) fn spot_of(&mut self, thread: ThreadId) -> SpotId {
        self.thread(thread).spot
    }

    /// The scopes that a thread is in, the outermost first.
    pub(crate) fn path_of(&mut self, thread: ThreadId) -> Vec<SiteId> {
        let spot = self.thread(thread).spot;
        self.tree.path(spot)
    }

    /// What is live, by where it comes from: of so many origins from this number on. `None` after the last.
    pub(crate) fn origins_from(&mut self, first: usize) -> Option<Vec<LiveOrigin>> {
        self.end_run();
        let live = |held: &origins::Held| LiveOrigin {
            device: self.meters.0[usize::from(held.origin.meter)].device,
            origin: held.origin,
            blocks: held.blocks,
            bytes: Bytes::new(held.bytes),
        };
        let part = self.origins.range(first, SLICE)?;
        Some(part.iter().filter(|held| held.blocks > 0).map(live).collect())
    }

    /// A part of the live blocks, of [`PARTS`]: of all, or of what was allocated within a scope.
    pub(crate) fn blocks(&self, part: usize, within: Option<&Within>) -> Vec<Held> {
        let entries = self.live.part(part);
        let within = entries.filter(|(_, entry)| within.is_none_or(|within| self.is_within(entry, within)));
        within.map(|(key, entry)| self.held(key, entry)).collect()
    }

    /// The live block of that key.
    pub(crate) fn block(&self, key: Key) -> Option<Held> {
        self.live.get(key).map(|entry| self.held(key, entry))
    }

    fn held(&self, key: Key, entry: &Entry) -> Held {
        let origin = *self.origins.get(entry.origin());
        let device = self.meters.0[usize::from(origin.meter)].device;
        let strand = entry.whose().strand();
        Held {
            key,
            number: entry.number(),
            thread: self.guests.hosts(strand).last().unwrap_or(strand),
            bytes: entry.bytes,
            device,
            origin,
            time: entry.time(),
        }
    }

    fn is_within(&self, entry: &Entry, within: &Within) -> bool {
        let allocated_in = self.origins.get(entry.origin()).spot;
        (within.since..=within.until).contains(&entry.number())
            && self.guests.hosts(entry.whose().strand()).any(|strand| strand == within.strand)
            && within.spots().any(|spot| self.tree.is_inside(allocated_in, spot))
    }

    /// What [`blocks`](Self::blocks) tells by what was allocated in an open scope until `now`.
    pub(crate) fn within(&self, scope: ScopeId, now: u64) -> Option<Within> {
        let Scope { spot, ref earlier, strand, number: since, .. } = *self.scopes.get(&scope)?;
        Some(Within { spot, earlier: earlier.clone(), strand, since, until: now })
    }

    /// Opens a scope inside the one that its thread is in.
    fn open(&mut self, scope: ScopeId, watch: Watch, event: &Event<'_>) {
        let meter = self.meters.index(watch.device, watch.gauge);
        let heard = self.meters.index(watch.device, Gauge::Exact);
        let outer = self.thread(event.thread).spot;
        let outer = self.tree.on(heard, outer);
        let spot = self.tree.inside(outer, watch.site);
        self.tree.opened(spot);
        let Thread { strand, own, .. } = *self.thread(event.thread);
        let of_thread = watch.thread.map(|thread| self.thread(thread).own);
        if let Some(thread) = of_thread {
            self.locals.entry((thread, meter)).or_default().scopes += 1;
            self.has_locals = true;
        }
        let opener = event.thread;
        let mut open = Scope {
            watch,
            meter,
            of_thread,
            spot,
            earlier: Vec::new(),
            heard,
            strand,
            opener,
            own,
            number: event.number,
            start: Start::default(),
            span: None,
        };
        self.meters.0[usize::from(heard)].openers.opened(own);
        open.start = self.begin(&open, event.number);
        self.open_span(&mut open);
        self.scopes.insert(scope, open);
        self.thread(opener).enter(Entered { number: event.number, scope, spot, strand, by_opening: true });
    }

    fn enter(&mut self, scope: ScopeId, event: &Event<'_>) {
        let open = self.scopes.get(&scope).map(|open| (open.spot, open.strand));
        let open = open.map(|(spot, host)| (spot, self.strand_in(host, event.thread)));
        let thread = self.thread(event.thread);
        // Of a scope that is closed nothing is left to be in; the thread stays where it is.
        let (spot, strand) = open.unwrap_or((thread.spot, thread.strand));
        thread.enter(Entered { number: event.number, scope, spot, strand, by_opening: false });
    }

    /// The strand of a thread that enters a scope of this strand.
    fn strand_in(&mut self, host: Strand, thread: ThreadId) -> Strand {
        let own = self.thread(thread).own;
        if own == host {
            return own;
        }
        if self.guests.are_many() {
            self.look_for_guests();
        }
        let Self { guests, strands, .. } = self;
        guests.strand(own, host, || next_strand(strands))
    }

    /// Goes on to find out which strands of guests are in use, and in the end forgets the others. A block that comes meanwhile is on
    /// a strand that its thread was on at the start, or has entered since.
    #[cold]
    fn look_for_guests(&mut self) {
        /// Parts of the blocks. A test has few guests, and comes to the end of a look all the same.
        const AT_ONCE: usize = if cfg!(test) { 64 } else { 1 };
        let Self { guests, live, threads, scopes, .. } = self;
        let of_threads = threads.iter().flat_map(|thread| {
            let freed = if let Freed::Block(_, entry) = &thread.freed { Some(entry.whose().strand()) } else { None };
            thread.entered.iter().map(|entered| entered.strand).chain(freed)
        });
        let (look, is_new) = guests.look();
        if is_new {
            return guests.see(of_threads);
        }
        if look.part < PARTS {
            let first = look.part;
            look.part = PARTS.min(first + AT_ONCE);
            let part = (first..look.part).flat_map(|part| live.part(part));
            return guests.see(part.map(|(_, entry)| entry.whose().strand()));
        }
        let rest = (look.after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part: Vec<_> = scopes.range(rest).take(SLICE).map(|(id, scope)| (*id, scope.strand)).collect();
        if let Some((last, _)) = part.last() {
            look.after = Some(*last);
            return guests.see(part.iter().map(|(_, strand)| *strand));
        }
        guests.see(of_threads);
        guests.forget();
    }

    fn begin(&mut self, scope: &Scope, number: u64) -> Start {
        let heard = &mut self.meters.0[usize::from(scope.heard)].level;
        let heard = heard.peaks.open(heard.in_use);
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        let (gap, samples_before, disturbed_before, blind) =
            (samples.gaps.open(Duration::ZERO), samples.count.saturating_sub(1), samples.disturbed, samples.failed);
        let level = match scope.of_thread {
            None => level,
            Some(thread) => &mut self.locals.entry((thread, scope.meter)).or_default().level,
        };
        let (in_use, peak) = (level.in_use, level.peaks.open(level.in_use));
        let mut before = self.counts;
        before.lost -= self.displaced;
        Start { number, in_use, peak, heard, gap, samples_before, disturbed_before, blind, before }
    }

    /// One of those that look at what a thread allocates is over.
    fn leave_local(&mut self, of_thread: Option<Strand>, meter: u16) {
        let Some(of) = of_thread else { return };
        let Some(local) = self.locals.get_mut(&(of, meter)) else { return };
        local.scopes -= 1;
        if local.scopes == 0 {
            self.locals.remove(&(of, meter));
            self.has_locals = !self.locals.is_empty();
        } else if local.groups.as_ref().is_some_and(|groups| groups.peaks.is_idle()) {
            local.groups = None;
        }
    }

    /// The peaks that a scope's is one of.
    fn peaks(&mut self, of_thread: Option<Strand>, meter: u16) -> (&mut Peaks, i64) {
        match of_thread {
            None => {
                let Meter { level, peaks, .. } = &mut self.meters.0[usize::from(meter)];
                (peaks, level.in_use)
            }
            Some(thread) => {
                let Local { level, groups, .. } = self.locals.entry((thread, meter)).or_default();
                (&mut groups.get_or_insert_default().peaks, level.in_use)
            }
        }
    }

    /// From now on it is known which allocations make the scope's peak, if that is asked.
    fn open_span(&mut self, open: &mut Scope) {
        if open.watch.at_peak && open.watch.gauge == Gauge::Exact {
            let (peaks, in_use) = self.peaks(open.of_thread, open.meter);
            open.span = Some(peaks.open(in_use));
        }
    }

    fn close_span(&mut self, open: &mut Scope) {
        if let Some(span) = open.span.take() {
            self.peaks(open.of_thread, open.meter).0.close(&span);
        }
    }

    /// Keeps what a scope's peak is made of, under a number of its own.
    fn keep(&mut self, under: ScopeId, open: &Scope) -> Option<()> {
        let Scope { of_thread, meter, .. } = *open;
        let span = open.span?;
        let (peaks, _) = self.peaks(of_thread, meter);
        let rise = peaks.of(&span);
        peaks.hold(&rise);
        if let Some(thread) = of_thread {
            self.locals.entry((thread, meter)).or_default().scopes += 1;
        }
        self.kept.insert(under, Kept { meter, of_thread, rise });
        Some(())
    }

    /// Keeps what the peak of an open scope is made of until it is [released](Self::release_peak), under a number of its own. When
    /// the scope is closed, that is done under the scope's number. `None` if nobody asked for it when it was opened.
    pub(crate) fn keep_peak(&mut self, scope: ScopeId, under: ScopeId) -> Option<()> {
        self.end_run();
        let open = self.scopes.remove(&scope)?;
        let kept = self.keep(under, &open);
        self.scopes.insert(scope, open);
        kept
    }

    /// As [`keep_peak`](Self::keep_peak), of the most that the live blocks of a device ever were.
    pub(crate) fn keep_device_peak(&mut self, device: Device, under: ScopeId) -> Option<()> {
        self.end_run();
        let meter = self.meters.index(device, Gauge::Exact);
        let peaks = &mut self.meters.0[usize::from(meter)].peaks;
        let rise = peaks.of_record()?;
        peaks.hold(&rise);
        self.kept.insert(under, Kept { meter, of_thread: None, rise });
        Some(())
    }

    /// A peak that is kept.
    pub(crate) fn kept_peak(&self, under: ScopeId) -> Option<PeakOf> {
        let Kept { meter, of_thread, rise } = self.kept.get(&under)?;
        let Meter { device, peaks, .. } = &self.meters.0[usize::from(*meter)];
        let is_of_all = of_thread.is_none() && !rise.is_record();
        let older = if is_of_all { peaks.older.at(rise) } else { 0 };
        let is_over_start = !rise.is_record();
        let [bytes, older] = [rise.bytes(), older].map(ByteDelta::new);
        Some(PeakOf { device: *device, bytes, older, is_over_start })
    }

    /// A part of the groups that a kept peak is made of; `None` after the last. What they had then does not change meanwhile.
    pub(crate) fn peak_part(&mut self, under: ScopeId, part: usize) -> Option<Vec<AtPeak>> {
        /// A thread that allocates meanwhile waits for so many.
        const GROUPS: usize = if cfg!(test) { 4 } else { 1024 };
        self.end_run();
        let Kept { meter, of_thread, rise } = self.kept.get(&under)?;
        let first = part * GROUPS;
        let at_peak = |origin: &Origin, bytes: i64| {
            (bytes != 0).then(|| AtPeak { origin: *origin, bytes: ByteDelta::new(bytes) })
        };
        if let Some(thread) = of_thread {
            let all = &self.locals.get(&(*thread, *meter))?.groups.as_ref()?.all;
            let groups = all.get(first..).filter(|rest| !rest.is_empty())?.iter().take(GROUPS);
            return Some(
                groups.filter_map(|(number, group)| at_peak(self.origins.get(*number), group.at(rise))).collect(),
            );
        }
        let groups = self.origins.range(first, GROUPS)?.iter();
        let on_meter = groups.filter(|held| held.origin.meter == *meter && held.origin.kind.is_on_device());
        Some(
            on_meter.filter_map(|held| at_peak(&held.origin, rise.of(&held.saved, held.bytes.cast_signed()))).collect(),
        )
    }

    /// Nobody asks about a kept peak any more.
    pub(crate) fn release_peak(&mut self, under: ScopeId) {
        let Some(Kept { meter, of_thread, rise }) = self.kept.remove(&under) else { return };
        self.peaks(of_thread, meter).0.release(&rise);
        self.leave_local(of_thread, meter);
    }

    fn level(&self, scope: &Scope) -> &Level {
        match scope.of_thread {
            None => &self.meters.0[usize::from(scope.meter)].level,
            Some(thread) => &self.locals[&(thread, scope.meter)].level,
        }
    }

    /// The most that the process had in use on the device since a scope began.
    fn device_peak(&self, scope: &Scope) -> i64 {
        self.meters.0[usize::from(scope.heard)].level.peaks.max_since(scope.start.heard)
    }

    fn trace(&self, scope: &Scope) -> Trace {
        let Meter { device, gauge, samples, .. } = &self.meters.0[usize::from(scope.meter)];
        let Start { in_use: start, peak, gap, samples_before, disturbed_before, blind, before, .. } = scope.start;
        let level = self.level(scope);
        let (peak, end) = (level.peaks.max_since(peak), level.in_use);
        let peaked = above(peak, start.max(end));
        debug_assert!(peaked.is_some(), "a peak of {peak} is below {start} or {end}");
        let sampled = *gauge == Gauge::Sampled;
        Trace {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            gauge: *gauge,
            source: scope.watch.source,
            used: ByteDelta::new(end - start),
            peaked: Bytes::new(peaked.unwrap_or(0)),
            sampling: sampled.then(|| Sampling {
                every: scope.watch.every,
                readings: samples.count - samples_before,
                longest_gap: samples.gaps.max_since(gap),
            }),
            stale: samples.failed || blind,
            overlapped: scope.of_thread.is_none()
                && self.meters.0[usize::from(scope.heard)].openers.others_since(scope.own, scope.start.number),
            untracked: if *gauge == Gauge::Exact { self.counts.untracked.saturating_sub(before.untracked) } else { 0 },
            // A peak that cannot be is none, and must not look like one.
            lost: u64::from(peaked.is_none())
                + match gauge {
                    Gauge::Exact => self.counts.lost - before.lost,
                    Gauge::Pool => samples.disturbed - disturbed_before,
                    // Samples are readings of the device, whatever was intercepted.
                    Gauge::Sampled | Gauge::Off => 0,
                },
        }
    }

    /// What a scope has come to. Its marks are taken back.
    fn end(&mut self, scope: &Scope) -> Trace {
        let trace = self.trace(scope);
        let device_peak = self.device_peak(scope);
        self.tree.device_had(scope.spot, device_peak);
        self.meters.0[usize::from(scope.heard)].level.peaks.close(scope.start.heard);
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(scope.meter)];
        samples.gaps.close(scope.start.gap);
        match scope.of_thread {
            None => level.peaks.close(scope.start.peak),
            Some(thread) => {
                self.locals.entry((thread, scope.meter)).or_default().level.peaks.close(scope.start.peak);
            }
        }
        trace
    }

    fn close(&mut self, scope: ScopeId, number: u64) -> Option<Trace> {
        let mut open = self.scopes.remove(&scope)?;
        let trace = self.end(&open);
        self.meters.0[usize::from(open.heard)].openers.closed(open.own, number);
        if open.span.is_some() {
            self.keep(scope, &open);
            self.close_span(&mut open);
        }
        self.leave_local(open.of_thread, open.meter);
        if let Some(at) = self.thread(open.opener).leave_opened(scope, open.number)
            && at < self.thread(open.opener).entered.len()
        {
            self.move_out(open.opener, at, open.spot);
        }
        Some(trace)
    }

    /// A scope was closed before scopes that its thread opened inside it, which stand in `entered` from `at` on. They are in the
    /// scope around it from now on: what they allocate was not allocated in the closed one. There are fewer of them than scopes
    /// nest in the tree.
    #[cold]
    fn move_out(&mut self, thread: ThreadId, at: usize, closed: SpotId) {
        let (mut left, mut outer) = (closed, self.tree.spot(closed).parent);
        let mut moved: Vec<(ScopeId, SpotId)> = Vec::new();
        for at in at..self.thread(thread).entered.len() {
            let Entered { scope, spot, by_opening, .. } = self.thread(thread).entered[at];
            let to = if let Some((_, to)) = moved.iter().find(|(moved, _)| *moved == scope) {
                *to
            } else {
                let Spot { parent, site, meter, .. } = *self.tree.spot(spot);
                // Others were opened or entered elsewhere, as was what is inside them.
                if !by_opening || site == SiteId::OTHERS || parent != self.tree.on(meter, left) {
                    break;
                }
                let to = self.tree.on(meter, outer);
                let to = self.tree.inside(to, site);
                if let Some(mut open) = self.scopes.remove(&scope) {
                    let device_peak = self.device_peak(&open);
                    self.tree.device_had(spot, device_peak);
                    open.earlier.push(std::mem::replace(&mut open.spot, to));
                    self.scopes.insert(scope, open);
                }
                self.tree.reopened(spot, to);
                moved.push((scope, to));
                to
            };
            self.thread(thread).entered[at].spot = to;
            (left, outer) = (spot, to);
        }
        self.thread(thread).settle();
    }
}

impl Within {
    fn spots(&self) -> impl Iterator<Item = SpotId> {
        self.earlier.iter().copied().chain([self.spot])
    }
}

impl Default for LocalGroups {
    fn default() -> Self {
        Self { peaks: Peaks::of_thread(), all: Vec::new(), known: HashMap::default(), newest: 0 }
    }
}

impl LocalGroups {
    /// What the thread has of an origin changes, so that it has so much in all.
    fn change(&mut self, origin: OriginId, by: i64, in_use: i64) {
        let Self { peaks, all, known, newest } = self;
        if all.get(*newest).is_none_or(|(number, _)| *number != origin) {
            *newest = *known.entry(origin).or_insert_with(|| {
                all.push((origin, Group::default()));
                all.len() - 1
            });
        }
        all[*newest].1.change(by, peaks);
        peaks.reach(in_use);
    }

    /// The origins that it knows something of; others are forgotten.
    fn needed(&mut self) -> impl Iterator<Item = OriginId> {
        let Self { peaks, all, known, newest } = self;
        // Who reads a kept peak in parts finds each group in its part.
        if !peaks.is_held() {
            all.retain(|(_, group)| group.bytes != 0 || group.saved.is_needed(peaks));
            known.clear();
            known.extend(all.iter().enumerate().map(|(at, (number, _))| (*number, at)));
            *newest = 0;
        }
        all.iter().map(|(number, _)| *number)
    }
}

impl Thread {
    fn new(own: Strand) -> Self {
        let (entered, freed) = (VecDeque::new(), Freed::Nothing);
        Self { spot: SpotId::NONE, strand: own, newest: (Tag::NONE, Whose::default()), freed, own, entered }
    }

    fn enter(&mut self, entered: Entered) {
        self.entered.push_back(entered);
        self.settle();
    }

    /// Leaves the scope, if it is in it, where it entered it last.
    fn leave(&mut self, scope: ScopeId) {
        if let Some(at) = self.entered.iter().rposition(|entered| entered.scope == scope) {
            self.leave_at(at);
        }
    }

    /// Leaves what it entered by opening it with the event of this number, if it is still there, and says where that stood. There
    /// may be many others.
    fn leave_opened(&mut self, scope: ScopeId, number: u64) -> Option<usize> {
        let at = self.entered.binary_search_by_key(&number, |entered| entered.number).ok()?;
        if (self.entered[at].scope, self.entered[at].by_opening) != (scope, true) {
            return None;
        }
        self.leave_at(at);
        Some(at)
    }

    fn leave_at(&mut self, at: usize) {
        self.entered.remove(at);
        self.settle();
    }

    /// Is where it entered last.
    fn settle(&mut self) {
        (self.spot, self.strand) =
            self.entered.back().map_or((SpotId::NONE, self.own), |Entered { spot, strand, .. }| (*spot, *strand));
        self.newest.0 = Tag::NONE;
    }
}

impl Meters {
    #[inline]
    fn index(&mut self, device: Device, gauge: Gauge) -> u16 {
        let known = self.0.iter().position(|meter| meter.device == device && meter.gauge == gauge);
        let index = known.unwrap_or_else(|| {
            self.0.push(Meter {
                level: Level::default(),
                peaks: Peaks::of_device(),
                on_device: Stat::default(),
                kinds: Default::default(),
                device,
                gauge,
                samples: Samples::default(),
                openers: Openers::default(),
            });
            self.0.len() - 1
        });
        u16::try_from(index).expect("fewer than 2^16 devices")
    }

    fn of(&mut self, device: Device, gauge: Gauge) -> &mut Meter {
        let index = self.index(device, gauge);
        &mut self.0[usize::from(index)]
    }
}

/// After 2^32 threads and guests, all that follow share one.
fn next_strand(strands: &mut u32) -> Strand {
    let next = *strands;
    *strands = next.saturating_add(1);
    Strand(next)
}

/// No block and no device has 2^63 bytes.
#[inline]
fn signed(bytes: Bytes) -> i64 {
    bytes.get().cast_signed()
}

/// How far a peak lies above what was in use when its span began and when it ended; `None` for one that lies below.
fn above(peak: i64, ends: i64) -> Option<u64> {
    peak.checked_sub(ends).and_then(|above| u64::try_from(above).ok())
}

impl Level {
    #[inline]
    fn take(&mut self, high: i64, change: i64) {
        self.peaks.raise(high);
        self.in_use = self.in_use.saturating_add(change);
    }

    fn change(&mut self, by: i64) {
        self.set(self.in_use.saturating_add(by));
    }

    fn set(&mut self, in_use: i64) {
        self.in_use = in_use;
        self.peaks.raise(in_use);
    }
}

impl Meter {
    /// In use is what is no longer free: that is the one figure which NVML in both its versions and `cuMemGetInfo`
    /// agree on.
    fn sample(&mut self, time: Time, memory: &GpuMemory) {
        self.level.set(-signed(memory.free));
        if let Some(before) = self.samples.newest.replace(time) {
            self.samples.gaps.raise(time.saturating_sub(before));
        }
        self.samples.count += 1;
        self.samples.failed = false;
    }

    /// The high mark is of the time before what is in use was read.
    fn mark(&mut self, marks: &Marks) {
        self.level.peaks.raise(signed(marks.used_high));
        self.level.set(signed(marks.used));
        self.samples.failed = false;
    }
}

#[cfg(test)]
mod tests;
