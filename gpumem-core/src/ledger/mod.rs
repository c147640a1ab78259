//! The fold of all events: bytes in use, live blocks and the peak of every open scope. Pure: no clock, no lock, no I/O,
//! so a live pending and a replayed one agree by construction.

mod groups;
mod guests;
mod live;
mod openers;
mod peaks;
mod pending;
mod stats;
mod tree;
mod watermark;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    ops::Bound,
    time::Duration,
};

pub use self::{
    groups::AllocGroup,
    live::PARTS,
    stats::Stat,
    tree::{NodeId, ScopeNode},
};
use self::{
    groups::{AllocGroups, GroupId},
    guests::Guests,
    live::{Attribution, Entry, Folded, Live, tenths},
    openers::Openers,
    peaks::{Group, Peaks, Rise, Span},
    pending::PendingDelta,
    stats::moved,
    tree::Tree,
    watermark::{Mark, Watermark},
};
use crate::model::{
    Answer, Block, ByteDelta, Bytes, CallsiteId, Device, Event, EventKind, Family, Gauge, GpuMemory, Key, MemKind,
    OwnerThread, PoolUsage, Sampling, ScopeId, ScopeSpec, Tag, ThreadId, Time, Trace,
};

/// What each event touches comes first, in as few lines of the cache as possible: from the pending to the counts.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Ledger {
    /// The newest events, not yet counted in the tree, the meters and the groups.
    pending: PendingDelta,
    /// By number. There are as many as ever ran at one time.
    threads: Vec<Thread>,
    /// The time of the next allocation, in tenths of a second.
    tenths: u32,
    /// A scope looks at what one thread allocates.
    has_locals: bool,
    /// Events are passed to a tap as well. The inbox sets it; it is here because each event reads this cache line anyway.
    pub(crate) is_tapped: bool,
    live: Live,
    counts: Counts,
    /// How many of the driver's functions other tools have taken over at the moment. A part of what is lost: a scope that begins
    /// now misses their calls as well.
    displaced: u64,
    /// Open ones. Ordered, so that they can be gone through in parts.
    scopes: BTreeMap<ScopeId, Scope>,
    /// What the newest question came to. Not part of the answer, which every allocation would carry about.
    last_query: Option<Trace>,
    tree: Tree,
    meters: Meters,
    /// The part of a meter that one thread allocated, while a scope looks at it.
    locals: HashMap<(OwnerThread, u16), Local, Folded>,
    groups: AllocGroups,
    /// How many owner threads there are.
    owners: u32,
    guests: Guests,
    /// Peaks that are asked about though their scopes are over.
    kept: HashMap<ScopeId, Kept>,
}

/// What was heard so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations and frees. Runs add theirs when they end; what moves a block in a pending without an event is taken off here, so
    /// that this may wrap below 0 meanwhile.
    pub heard: u64,
    /// Frees of blocks that nobody knows the size of.
    pub untracked: u64,
    /// Events that could not be taken, and functions that were found displaced.
    pub lost: u64,
    /// Blocks that went with their context, not freed by anybody.
    pub gone: u64,
}

/// What is known of a thread.
#[derive(Debug)]
#[repr(C, align(64))]
struct Thread {
    /// Its newest allocation's, for the next one, which is likely to agree.
    newest: (Tag, Attribution),
    /// Should its newest free turn out to have failed.
    freed: Freed,
    /// The scope that it is in.
    node: NodeId,
    /// On whose behalf it allocates: its own, unless it entered a scope of another thread.
    owner: OwnerThread,
    own: OwnerThread,
    /// The scopes that it is in, the innermost last. Programs that do not leave the last one first mostly leave the first one.
    entered: VecDeque<Entered>,
}

#[derive(Clone, Copy, Debug)]
struct Entered {
    /// Of the event that it was entered by. It rises.
    number: u64,
    scope: ScopeId,
    node: NodeId,
    owner: OwnerThread,
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

/// What one thread allocated of each group, since somebody asks.
#[derive(Debug)]
struct LocalGroups {
    peaks: Peaks,
    all: Vec<(GroupId, Group)>,
    known: HashMap<GroupId, usize, Folded>,
    /// Which one the newest change was of.
    newest: usize,
}

/// A peak that is asked about, in parts, whether its scope is over or not.
#[derive(Clone, Copy, Debug)]
struct Kept {
    meter: u16,
    of_thread: Option<OwnerThread>,
    rise: Rise,
}

/// What one group had more at a peak than at the start of its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtPeak {
    pub group: AllocGroup,
    pub bytes: ByteDelta,
}

/// A peak, without the groups that it is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakOf {
    pub device: Device,
    /// What all groups add up to, with the next.
    pub bytes: ByteDelta,
    /// Of blocks that are older than the session; not above 0 unless a free failed.
    pub older: ByteDelta,
    /// What is added up is what groups have more than at the start of a scope.
    pub is_over_start: bool,
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
    spec: ScopeSpec,
    meter: u16,
    /// If it counts what one thread allocates: which one.
    of_thread: Option<OwnerThread>,
    node: NodeId,
    /// Where it was before a scope around it was closed first.
    earlier: Vec<NodeId>,
    /// The meter of what is heard on its device.
    heard: u16,
    /// On whose behalf it was opened, by which thread, and the number of that event.
    owner: OwnerThread,
    opener: ThreadId,
    /// The opener's own owner thread: its number may be another thread's by now.
    own: OwnerThread,
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

/// So many scopes, paths or groups are looked at while others wait.
pub const SLICE: usize = 1 << 9;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownBlock {
    pub key: Key,
    /// Of the event that it came with, which no other block has: a key may be given out again.
    pub number: u64,
    /// Who allocated it, or on whose behalf it was.
    pub thread: OwnerThread,
    pub bytes: Bytes,
    pub device: Device,
    pub group: AllocGroup,
    /// About when it was allocated.
    pub time: Time,
}

/// One time that a scope was open, to tell what was allocated in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Within {
    node: NodeId,
    earlier: Vec<NodeId>,
    owner: OwnerThread,
    /// The numbers of the first and the last event.
    since: u64,
    until: u64,
}

/// What is live of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupUsage {
    pub device: Device,
    pub group: AllocGroup,
    pub blocks: u64,
    pub bytes: Bytes,
}

/// The allocator's statistics of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStats {
    pub device: Device,
    pub on_device: Stat,
    pub kinds: [Stat; MemKind::ALL.len()],
}

impl Ledger {
    /// Takes one event in.
    #[inline]
    pub fn apply(&mut self, event: &Event<'_>) -> Answer {
        match event.kind {
            EventKind::Alloc { key, block } => {
                self.set_time(event.time);
                let (bytes, tag) = (block.bytes, block.tag());
                if !self.alloc_like_newest(*key, bytes, tag, event.number, event.thread) {
                    self.alloc(*key, bytes, tag, event.number, event.thread);
                }
                Answer::Applied
            }
            EventKind::Free { key, .. } if self.free_like_newest(*key, event.thread) => Answer::Applied,
            EventKind::Free { key, block } => self.free(*key, block.as_ref(), event.thread),
            _ => {
                self.flush_pending();
                self.last_query = self.apply_rare(event);
                Answer::Applied
            }
        }
    }

    /// The time of the allocations that follow.
    pub fn set_time(&mut self, time: Time) {
        self.tenths = tenths(time);
    }

    /// Takes in an allocation that differs from the newest events in its key and size alone, as most do. Says whether it is one;
    /// if it is not, nothing is changed, and it is for [`alloc`](Self::alloc). It calls nothing and cannot panic.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn alloc_like_newest(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) -> bool {
        let Some(Thread { newest: (newest, attribution), .. }) = self.threads.get(thread.0 as usize) else {
            return false;
        };
        if *newest != tag || attribution.group() != self.pending.group || self.has_locals {
            return false;
        }
        if !self.live.insert_in_front(key, Entry::new(bytes, number, self.tenths, *attribution)) {
            return false;
        }
        self.pending.add(signed(bytes));
        self.pending.allocated(bytes.get());
        true
    }

    /// As [`alloc_like_newest`](Self::alloc_like_newest), of a free of a young block.
    #[allow(clippy::inline_always, reason = "one function without calls takes fewer lines of the instruction cache")]
    #[inline(always)]
    pub fn free_like_newest(&mut self, key: Key, thread: ThreadId) -> bool {
        let Some(record) = self.threads.get_mut(thread.0 as usize) else { return false };
        if self.has_locals {
            return false;
        }
        let Some(entry) = self.live.remove_from_front(key, self.pending.group) else { return false };
        self.pending.subtract(signed(entry.bytes));
        // In place: a copy that is made elsewhere and read back by wider words than it was written in waits for its stores
        // (store forwarding).
        record.freed = Freed::Block(key, entry);
        true
    }

    /// A block was allocated, by the event of this number.
    pub fn alloc(&mut self, key: Key, bytes: Bytes, tag: Tag, number: u64, thread: ThreadId) {
        let attribution = self.attribution(tag, thread);
        self.insert_block(key, Entry::new(bytes, number, self.tenths, attribution));
        self.pending.allocated(bytes.get());
    }

    /// A block is there, for the first time or still.
    fn insert_block(&mut self, key: Key, entry: Entry) {
        if let Some(missed) = self.live.insert(key, entry) {
            self.remove_without_free(&missed);
        }
        self.count(&entry);
    }

    fn count(&mut self, entry: &Entry) {
        self.pending_of(entry.group()).add(signed(entry.bytes));
        if self.has_locals {
            self.count_for_thread_scopes(entry.attribution(), signed(entry.bytes));
        }
    }

    /// A block is there no more, and nobody heard a free.
    #[cold]
    fn remove_without_free(&mut self, entry: &Entry) {
        self.remove_block(entry);
        self.counts.heard = self.counts.heard.wrapping_sub(1);
    }

    /// A block is there no more.
    fn remove_block(&mut self, entry: &Entry) {
        self.pending_of(entry.group()).subtract(signed(entry.bytes));
        if self.has_locals {
            self.count_for_thread_scopes(entry.attribution(), -signed(entry.bytes));
        }
    }

    /// Counts what a thread allocated for the scopes that look at it alone.
    #[cold]
    fn count_for_thread_scopes(&mut self, attribution: Attribution, bytes: i64) {
        let AllocGroup { kind, meter, .. } = *self.groups.get(attribution.group());
        if !kind.is_on_device() {
            return;
        }
        let Self { guests, locals, .. } = self;
        guests.each(attribution.owner(), |thread| {
            if let Some(local) = locals.get_mut(&(thread, meter)) {
                local.level.change(bytes);
                if let Some(groups) = &mut local.groups {
                    groups.change(attribution.group(), bytes, local.level.in_use);
                }
            }
        });
    }

    #[inline]
    fn pending_of(&mut self, group: GroupId) -> &mut PendingDelta {
        if self.pending.group != group {
            self.start_pending(group);
        }
        &mut self.pending
    }

    #[cold]
    fn start_pending(&mut self, group: GroupId) {
        self.flush_pending();
        self.pending.group = group;
    }

    /// Counts what the newest events came to: before another group's, and before anybody is told of anything counted.
    #[inline]
    fn flush_pending(&mut self) {
        let Self { pending, groups, meters, tree, counts, .. } = self;
        let Some((number, delta)) = pending.delta() else { return };
        counts.heard = counts.heard.wrapping_add_signed(delta.events());
        let held = groups.held(number);
        held.blocks = moved(held.blocks, delta.blocks.net);
        held.bytes = moved(held.bytes, delta.bytes.net);
        let group = &held.group;
        let Meter { level, peaks, on_device, kinds, .. } = &mut meters.0[usize::from(group.meter)];
        kinds[group.kind as usize].apply(&delta);
        if group.kind.is_on_device() {
            let high = level.in_use.saturating_add(delta.bytes.high);
            if held.saved.is_due(peaks) || peaks.is_below(high) {
                peaks.apply(&mut held.saved, held.bytes.cast_signed(), delta.bytes, high);
            }
            on_device.apply(&delta);
            level.take(high, delta.bytes.net);
            tree.apply(group.node, &delta);
        }
        *pending = PendingDelta::default();
    }

    /// The thread that this thread allocates for, and the group of the allocation.
    fn attribution(&mut self, tag: Tag, thread: ThreadId) -> Attribution {
        let (newest, attribution) = self.thread(thread).newest;
        if newest == tag { attribution } else { self.find_attribution(tag, thread) }
    }

    #[cold]
    fn find_attribution(&mut self, tag: Tag, thread: ThreadId) -> Attribution {
        self.flush_pending();
        let Thread { node, owner, .. } = *self.thread(thread);
        let meter = self.meters.index(tag.device(), Gauge::Exact);
        let node = self.tree.on(meter, node);
        let group = AllocGroup { node, stack: tag.stack(), meter, kind: tag.kind(), context: tag.context() };
        let Self { threads, locals, meters, groups, .. } = self;
        let in_use = || {
            let newest = threads.iter().map(|thread| thread.newest.1.group());
            let freed = threads.iter().filter_map(|thread| match &thread.freed {
                Freed::Block(_, entry) => Some(entry.group()),
                _ => None,
            });
            let groups = locals.values_mut().filter_map(|local| local.groups.as_mut());
            newest.chain(freed).chain(groups.flat_map(|groups| groups.needed())).collect()
        };
        let is_needed =
            |held: &groups::GroupState| held.saved.is_needed(&meters.0[usize::from(held.group.meter)].peaks);
        let number = groups.number(group, in_use, is_needed);
        let attribution = Attribution::new(owner, number);
        self.thread(thread).newest = (tag, attribution);
        attribution
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
            let own = next_owner(&mut self.owners);
            self.threads.push(Thread::new(own));
        }
    }

    /// How many threads it keeps a record of.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// A thread begins that has the number of one that has ended. What that one allocated is not the new one's.
    pub fn begin_thread(&mut self, thread: ThreadId) {
        let own = next_owner(&mut self.owners);
        if let Some(ended) = self.threads.get_mut(thread.0 as usize) {
            *ended = Thread::new(own);
        }
    }

    /// A block from before the session is given back: no thread's and no scope's part ever had it.
    fn change_older(&mut self, device: Device, by: i64) {
        self.flush_pending();
        let Meter { level, peaks, .. } = self.meters.of(device, Gauge::Exact);
        peaks.change_older(by);
        level.change(by);
        peaks.reach(level.in_use);
    }

    /// A block is given back; `older` is what the source knows of one that is older than the session.
    pub fn free(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        let Some(entry) = self.live.remove(key) else { return self.free_unknown(older, thread) };
        self.remove_block(&entry);
        self.thread(thread).freed = Freed::Block(key, entry);
        Answer::Applied
    }

    #[cold]
    fn free_unknown(&mut self, older: Option<&Block>, thread: ThreadId) -> Answer {
        self.counts.heard = self.counts.heard.wrapping_add(1);
        let (freed, answer) = match older {
            Some(block) => (self.free_older(block), Answer::Applied),
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
    fn free_failed(&mut self, thread: ThreadId) {
        match std::mem::take(&mut self.thread(thread).freed) {
            Freed::Nothing => return,
            // The pending takes it for a free that did not come, and takes it off.
            Freed::Block(key, entry) => {
                self.guests.see([entry.attribution().owner()]);
                return self.insert_block(key, entry);
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
            self.remove_block(&before);
            self.count(&now);
        }
    }

    /// Everything but allocations and frees, out of their way.
    #[cold]
    fn apply_rare(&mut self, event: &Event<'_>) -> Option<Trace> {
        match *event.kind {
            EventKind::Alloc { .. } | EventKind::Free { .. } => {}
            EventKind::FreeFailed => self.free_failed(event.thread),
            EventKind::Untracked => {
                self.counts.untracked += 1;
                self.thread(event.thread).freed = Freed::Untracked(event.number);
            }
            EventKind::Shrink { key, bytes } => self.shrink(key, bytes),
            EventKind::LateLookup { block } => {
                let freed = self.free_older(&block);
                self.thread(event.thread).freed = freed;
            }
            EventKind::ContextDestroyed { context } => (0..PARTS).for_each(|part| self.gone(context, part)),
            EventKind::Sample { device, memory } => self.meters.of(device, Gauge::Sampled).sample(event.time, &memory),
            EventKind::PoolUsage { device, usage } => self.meters.of(device, Gauge::Pool).mark(&usage),
            EventKind::ReadFailed { device, gauge } => self.meters.of(device, gauge).samples.failed = true,
            EventKind::Open { scope, spec } => self.open(scope, spec, event),
            EventKind::Enter { scope } => self.enter(scope, event),
            EventKind::Leave { scope } => self.thread(event.thread).leave(scope),
            EventKind::Read { scope } => {
                return self.scopes.get(&scope).map(|open| self.trace(open));
            }
            EventKind::Reset { scope } | EventKind::ResetKeepingPeak { scope } => {
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
            EventKind::PoolMarkDisturbed { device } => self.meters.of(device, Gauge::Pool).samples.disturbed += 1,
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
        for missed in self.live.suspect_until(until) {
            self.remove_without_free(&missed);
        }
    }

    /// What the newest event came to, if it was a question to an open scope.
    pub fn last_trace(&mut self) -> Option<Trace> {
        self.last_query.take()
    }

    pub fn counts(&mut self) -> Counts {
        self.flush_pending();
        self.counts
    }

    /// The statistics of each device on which something was heard.
    pub fn stats(&mut self) -> Vec<DeviceStats> {
        self.flush_pending();
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
    pub fn gone(&mut self, context: u8, part: usize) {
        let groups = &self.groups;
        for entry in self.live.drain(part, |entry| groups.get(entry.group()).context == context) {
            self.counts.gone += 1;
            self.remove_without_free(&entry);
        }
    }

    /// Has the tree know what the device had while scopes that are open were: a part of them, after the one given. Gives the last
    /// of them; `None` if there was none.
    pub fn note_device_peaks(&mut self, after: Option<ScopeId>) -> Option<ScopeId> {
        self.flush_pending();
        let rest = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part: Vec<_> = self.scopes.range(rest).take(SLICE).collect();
        let part: Vec<_> = part.iter().map(|(id, scope)| (**id, scope.node, self.device_peak(scope))).collect();
        for (_, node, in_use) in &part {
            self.tree.device_had(*node, *in_use);
        }
        part.last().map(|(id, ..)| *id)
    }

    /// Paths of scopes by the number of their node, from this one on, each with its device. Number 0 is nowhere and has none. A
    /// part of them; none after the last.
    pub fn nodes_from(&mut self, first: usize) -> Vec<(Option<Device>, ScopeNode)> {
        self.flush_pending();
        let meters = &self.meters.0;
        let with_device = |node: &ScopeNode| {
            let Some(Meter { device, on_device, peaks, .. }) = meters.get(usize::from(node.meter)) else {
                return (None, *node);
            };
            let mut node = *node;
            if node.parent == NodeId::NONE {
                (node.in_use, node.peak) = (on_device.bytes.current.cast_signed(), peaks.record());
            }
            (Some(*device), node)
        };
        self.tree.nodes(first, SLICE).iter().map(with_device).collect()
    }

    /// The scope that a thread is in.
    #[cfg(test)]
    pub fn node_of(&mut self, thread: ThreadId) -> NodeId {
        self.thread(thread).node
    }

    /// The scopes that a thread is in, the outermost first.
    pub fn path_of(&mut self, thread: ThreadId) -> Vec<CallsiteId> {
        let node = self.thread(thread).node;
        self.tree.path(node)
    }

    /// What is live, by where it comes from: of so many groups from this number on. `None` after the last.
    pub fn groups_from(&mut self, first: usize) -> Option<Vec<GroupUsage>> {
        self.flush_pending();
        let live = |held: &groups::GroupState| GroupUsage {
            device: self.meters.0[usize::from(held.group.meter)].device,
            group: held.group,
            blocks: held.blocks,
            bytes: Bytes::new(held.bytes),
        };
        let part = self.groups.range(first, SLICE)?;
        Some(part.iter().filter(|held| held.blocks > 0).map(live).collect())
    }

    /// A part of the live blocks, of [`PARTS`]: of all, or of what was allocated within a scope.
    pub fn blocks(&self, part: usize, within: Option<&Within>) -> Vec<KnownBlock> {
        let entries = self.live.part(part);
        let within = entries.filter(|(_, entry)| within.is_none_or(|within| self.is_within(entry, within)));
        within.map(|(key, entry)| self.held(key, entry)).collect()
    }

    /// The live block of that key.
    pub fn block(&self, key: Key) -> Option<KnownBlock> {
        self.live.get(key).map(|entry| self.held(key, entry))
    }

    fn held(&self, key: Key, entry: &Entry) -> KnownBlock {
        let group = *self.groups.get(entry.group());
        let device = self.meters.0[usize::from(group.meter)].device;
        let owner = entry.attribution().owner();
        KnownBlock {
            key,
            number: entry.number(),
            thread: self.guests.hosts(owner).last().unwrap_or(owner),
            bytes: entry.bytes,
            device,
            group,
            time: entry.time(),
        }
    }

    fn is_within(&self, entry: &Entry, within: &Within) -> bool {
        let allocated_in = self.groups.get(entry.group()).node;
        (within.since..=within.until).contains(&entry.number())
            && self.guests.hosts(entry.attribution().owner()).any(|owner| owner == within.owner)
            && within.nodes().any(|node| self.tree.is_inside(allocated_in, node))
    }

    /// What [`blocks`](Self::blocks) tells by what was allocated in an open scope until `now`.
    pub fn within(&self, scope: ScopeId, now: u64) -> Option<Within> {
        let Scope { node, ref earlier, owner, number: since, .. } = *self.scopes.get(&scope)?;
        Some(Within { node, earlier: earlier.clone(), owner, since, until: now })
    }

    /// Opens a scope inside the one that its thread is in.
    fn open(&mut self, scope: ScopeId, spec: ScopeSpec, event: &Event<'_>) {
        let meter = self.meters.index(spec.device, spec.gauge);
        let heard = self.meters.index(spec.device, Gauge::Exact);
        let outer = self.thread(event.thread).node;
        let outer = self.tree.on(heard, outer);
        let node = self.tree.inside(outer, spec.callsite);
        self.tree.opened(node);
        let Thread { owner, own, .. } = *self.thread(event.thread);
        let of_thread = spec.thread.map(|thread| self.thread(thread).own);
        if let Some(thread) = of_thread {
            self.locals.entry((thread, meter)).or_default().scopes += 1;
            self.has_locals = true;
        }
        let opener = event.thread;
        let mut open = Scope {
            spec,
            meter,
            of_thread,
            node,
            earlier: Vec::new(),
            heard,
            owner,
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
        self.thread(opener).enter(Entered { number: event.number, scope, node, owner, by_opening: true });
    }

    fn enter(&mut self, scope: ScopeId, event: &Event<'_>) {
        let open = self.scopes.get(&scope).map(|open| (open.node, open.owner));
        let open = open.map(|(node, host)| (node, self.owner_in(host, event.thread)));
        let thread = self.thread(event.thread);
        // Of a scope that is closed nothing is left to be in; the thread stays where it is.
        let (node, owner) = open.unwrap_or((thread.node, thread.owner));
        thread.enter(Entered { number: event.number, scope, node, owner, by_opening: false });
    }

    /// The owner thread of a thread that enters a scope of this owner thread.
    fn owner_in(&mut self, host: OwnerThread, thread: ThreadId) -> OwnerThread {
        let own = self.thread(thread).own;
        if own == host {
            return own;
        }
        if self.guests.are_many() {
            self.look_for_guests();
        }
        let Self { guests, owners, .. } = self;
        guests.owner(own, host, || next_owner(owners))
    }

    /// Goes on to find out which owner threads of guests are in use, and in the end forgets the others. A block that comes meanwhile is on
    /// a owner thread that its thread was on at the start, or has entered since.
    #[cold]
    fn look_for_guests(&mut self) {
        /// Parts of the blocks. A test has few guests, and comes to the end of a look all the same.
        const AT_ONCE: usize = if cfg!(test) { 64 } else { 1 };
        let Self { guests, live, threads, scopes, .. } = self;
        let of_threads = threads.iter().flat_map(|thread| {
            let freed =
                if let Freed::Block(_, entry) = &thread.freed { Some(entry.attribution().owner()) } else { None };
            thread.entered.iter().map(|entered| entered.owner).chain(freed)
        });
        let (look, is_new) = guests.look();
        if is_new {
            return guests.see(of_threads);
        }
        if look.part < PARTS {
            let first = look.part;
            look.part = PARTS.min(first + AT_ONCE);
            let part = (first..look.part).flat_map(|part| live.part(part));
            return guests.see(part.map(|(_, entry)| entry.attribution().owner()));
        }
        let rest = (look.after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let part: Vec<_> = scopes.range(rest).take(SLICE).map(|(id, scope)| (*id, scope.owner)).collect();
        if let Some((last, _)) = part.last() {
            look.after = Some(*last);
            return guests.see(part.iter().map(|(_, owner)| *owner));
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
    fn leave_local(&mut self, of_thread: Option<OwnerThread>, meter: u16) {
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
    fn peaks(&mut self, of_thread: Option<OwnerThread>, meter: u16) -> (&mut Peaks, i64) {
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
        if open.spec.at_peak && open.spec.gauge == Gauge::Exact {
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
    pub fn keep_peak(&mut self, scope: ScopeId, under: ScopeId) -> Option<()> {
        self.flush_pending();
        let open = self.scopes.remove(&scope)?;
        let kept = self.keep(under, &open);
        self.scopes.insert(scope, open);
        kept
    }

    /// As [`keep_peak`](Self::keep_peak), of the most that the live blocks of a device ever were.
    pub fn keep_device_peak(&mut self, device: Device, under: ScopeId) -> Option<()> {
        self.flush_pending();
        let meter = self.meters.index(device, Gauge::Exact);
        let peaks = &mut self.meters.0[usize::from(meter)].peaks;
        let rise = peaks.of_record()?;
        peaks.hold(&rise);
        self.kept.insert(under, Kept { meter, of_thread: None, rise });
        Some(())
    }

    /// A peak that is kept.
    pub fn kept_peak(&self, under: ScopeId) -> Option<PeakOf> {
        let Kept { meter, of_thread, rise } = self.kept.get(&under)?;
        let Meter { device, peaks, .. } = &self.meters.0[usize::from(*meter)];
        let is_of_all = of_thread.is_none() && !rise.is_record();
        let older = if is_of_all { peaks.older.at(rise) } else { 0 };
        let is_over_start = !rise.is_record();
        let [bytes, older] = [rise.bytes(), older].map(ByteDelta::new);
        Some(PeakOf { device: *device, bytes, older, is_over_start })
    }

    /// A part of the groups that a kept peak is made of; `None` after the last. What they had then does not change meanwhile.
    pub fn peak_part(&mut self, under: ScopeId, part: usize) -> Option<Vec<AtPeak>> {
        /// A thread that allocates meanwhile waits for so many.
        const GROUPS: usize = if cfg!(test) { 4 } else { 1024 };
        self.flush_pending();
        let Kept { meter, of_thread, rise } = self.kept.get(&under)?;
        let first = part * GROUPS;
        let at_peak = |group: &AllocGroup, bytes: i64| {
            (bytes != 0).then(|| AtPeak { group: *group, bytes: ByteDelta::new(bytes) })
        };
        if let Some(thread) = of_thread {
            let all = &self.locals.get(&(*thread, *meter))?.groups.as_ref()?.all;
            let groups = all.get(first..).filter(|rest| !rest.is_empty())?.iter().take(GROUPS);
            return Some(
                groups.filter_map(|(number, group)| at_peak(self.groups.get(*number), group.at(rise))).collect(),
            );
        }
        let groups = self.groups.range(first, GROUPS)?.iter();
        let on_meter = groups.filter(|held| held.group.meter == *meter && held.group.kind.is_on_device());
        Some(on_meter.filter_map(|held| at_peak(&held.group, rise.of(&held.saved, held.bytes.cast_signed()))).collect())
    }

    /// Nobody asks about a kept peak any more.
    pub fn release_peak(&mut self, under: ScopeId) {
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
            source: scope.spec.source,
            used: ByteDelta::new(end - start),
            peaked: Bytes::new(peaked.unwrap_or(0)),
            sampling: sampled.then(|| Sampling {
                every: scope.spec.every,
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
        self.tree.device_had(scope.node, device_peak);
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
            self.move_out(open.opener, at, open.node);
        }
        Some(trace)
    }

    /// A scope was closed before scopes that its thread opened inside it, which stand in `entered` from `at` on. They are in the
    /// scope around it from now on: what they allocate was not allocated in the closed one. There are fewer of them than scopes
    /// nest in the tree.
    #[cold]
    fn move_out(&mut self, thread: ThreadId, at: usize, closed: NodeId) {
        let (mut left, mut outer) = (closed, self.tree.node(closed).parent);
        let mut moved: Vec<(ScopeId, NodeId)> = Vec::new();
        for at in at..self.thread(thread).entered.len() {
            let Entered { scope, node, by_opening, .. } = self.thread(thread).entered[at];
            let to = if let Some((_, to)) = moved.iter().find(|(moved, _)| *moved == scope) {
                *to
            } else {
                let ScopeNode { parent, callsite, meter, .. } = *self.tree.node(node);
                // Others were opened or entered elsewhere, as was what is inside them.
                if !by_opening || callsite == CallsiteId::OTHERS || parent != self.tree.on(meter, left) {
                    break;
                }
                let to = self.tree.on(meter, outer);
                let to = self.tree.inside(to, callsite);
                if let Some(mut open) = self.scopes.remove(&scope) {
                    let device_peak = self.device_peak(&open);
                    self.tree.device_had(node, device_peak);
                    open.earlier.push(std::mem::replace(&mut open.node, to));
                    self.scopes.insert(scope, open);
                }
                self.tree.reopened(node, to);
                moved.push((scope, to));
                to
            };
            self.thread(thread).entered[at].node = to;
            (left, outer) = (node, to);
        }
        self.thread(thread).settle();
    }
}

impl Within {
    fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.earlier.iter().copied().chain([self.node])
    }
}

impl Default for LocalGroups {
    fn default() -> Self {
        Self { peaks: Peaks::of_thread(), all: Vec::new(), known: HashMap::default(), newest: 0 }
    }
}

impl LocalGroups {
    /// What the thread has of a group changes, so that it has so much in all.
    fn change(&mut self, group: GroupId, by: i64, in_use: i64) {
        let Self { peaks, all, known, newest } = self;
        if all.get(*newest).is_none_or(|(number, _)| *number != group) {
            *newest = *known.entry(group).or_insert_with(|| {
                all.push((group, Group::default()));
                all.len() - 1
            });
        }
        all[*newest].1.change(by, peaks);
        peaks.reach(in_use);
    }

    /// The groups that it knows something of; others are forgotten.
    fn needed(&mut self) -> impl Iterator<Item = GroupId> {
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
    fn new(own: OwnerThread) -> Self {
        let (entered, freed) = (VecDeque::new(), Freed::Nothing);
        Self { node: NodeId::NONE, owner: own, newest: (Tag::NONE, Attribution::default()), freed, own, entered }
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
        (self.node, self.owner) =
            self.entered.back().map_or((NodeId::NONE, self.own), |Entered { node, owner, .. }| (*node, *owner));
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
fn next_owner(owners: &mut u32) -> OwnerThread {
    let next = *owners;
    *owners = next.saturating_add(1);
    OwnerThread(next)
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
    fn mark(&mut self, usage: &PoolUsage) {
        self.level.peaks.raise(signed(usage.used_high));
        self.level.set(signed(usage.used));
        self.samples.failed = false;
    }
}

#[cfg(test)]
mod tests;
