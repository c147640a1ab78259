//! The fold of all events: bytes in use, live blocks and the peak of every open scope. Pure: no clock, no lock, no I/O,
//! so a live run and a replayed one agree by construction.

mod live;
mod watermark;

use std::{collections::HashMap, time::Duration};

pub(crate) use self::live::Tally;
use self::{
    live::{Entry, Live},
    watermark::{Mark, Watermark},
};
use crate::model::{
    Answer, Block, ByteDelta, Bytes, Device, Event, EventKind, Family, Gauge, GpuMemory, Key, Marks, MemKind, Sampling,
    ScopeId, ThreadId, Time, Trace, Watch,
};

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    live: Live,
    meters: Meters,
    /// The part of a meter that one thread allocated, while a scope looks at it.
    locals: HashMap<(ThreadId, u16), Local>,
    scopes: HashMap<ScopeId, Scope>,
    /// By thread, should a free turn out to have failed.
    freed: Vec<Freed>,
    /// What the newest question came to. Not part of the answer, which every allocation would carry about.
    told: Option<Trace>,
    counts: Counts,
}

/// What was heard so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Allocations and frees.
    pub(crate) heard: u64,
    /// Frees of blocks that nobody knows the size of.
    pub(crate) untracked: u64,
    /// Events that could not be taken.
    pub(crate) lost: u64,
}

/// What the newest free of a thread took out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Freed {
    #[default]
    Nothing,
    Block(Key, Entry),
    /// A block from before the session.
    Older(Block),
    Untracked,
}

/// One for each device and gauge; a handful, so a search beats a hash.
#[derive(Debug, Default)]
struct Meters(Vec<Meter>);

/// Bytes in use on one device as one gauge sees them.
#[derive(Debug)]
struct Meter {
    device: Device,
    gauge: Gauge,
    level: Level,
    samples: Samples,
}

#[derive(Debug)]
struct Local {
    level: Level,
    scopes: usize,
}

/// Bytes in use, and the most of them since any moment that an open scope began at.
#[derive(Debug)]
struct Level {
    /// Signed: blocks that are older than the session may be given back, and samples count down from what is free.
    in_use: i64,
    peaks: Watermark<i64>,
}

/// How a device was sampled, of which an open scope is told its own part.
#[derive(Debug)]
struct Samples {
    count: u64,
    newest: Option<Time>,
    gaps: Watermark<Duration>,
    /// The newest attempt failed.
    failed: bool,
}

/// An open scope.
#[derive(Debug)]
struct Scope {
    meter: u16,
    thread: Option<ThreadId>,
    every: Duration,
    start: i64,
    peak: Mark,
    gap: Mark,
    /// Samples of the device before the one that this scope began with.
    samples_before: u64,
    /// The device could not be read when this scope began (a reset may meet that), so nobody knows what it began with.
    blind: bool,
    before: Counts,
}

impl Ledger {
    /// Takes one event in.
    #[inline]
    pub(crate) fn apply(&mut self, event: &Event<'_>) -> Answer {
        match event.kind {
            EventKind::Alloc { key, block } => {
                self.alloc(*key, block, event.thread);
                Answer::Taken
            }
            EventKind::Free { key, block } => self.free(*key, block.as_ref(), event.thread),
            _ => {
                self.told = self.apply_rare(event);
                Answer::Taken
            }
        }
    }

    #[inline]
    fn alloc(&mut self, key: Key, block: &Block, thread: ThreadId) {
        self.counts.heard += 1;
        let meter = self.meters.index(block.device, Gauge::Exact);
        let Block { bytes, kind, context, .. } = *block;
        self.enter(key, Entry { bytes, thread, meter, kind, context });
    }

    #[inline]
    fn enter(&mut self, key: Key, entry: Entry) {
        if let Some(replaced) = self.live.insert(key, entry) {
            self.change(&replaced, -signed(replaced.bytes));
        }
        self.change(&entry, signed(entry.bytes));
    }

    #[inline]
    fn free(&mut self, key: Key, older: Option<&Block>, thread: ThreadId) -> Answer {
        self.counts.heard += 1;
        let (freed, answer) = if let Some(entry) = self.live.remove(key) {
            self.change(&entry, -signed(entry.bytes));
            (Freed::Block(key, entry), Answer::Taken)
        } else if let Some(block) = older {
            self.change_older(block, -signed(block.bytes));
            (Freed::Older(*block), Answer::Taken)
        } else {
            self.counts.untracked += 1;
            (Freed::Untracked, Answer::Untracked)
        };
        *self.freed_by(thread) = freed;
        answer
    }

    #[inline]
    fn freed_by(&mut self, thread: ThreadId) -> &mut Freed {
        let thread = thread.0 as usize;
        if thread >= self.freed.len() {
            self.freed.resize(thread + 1, Freed::Nothing);
        }
        &mut self.freed[thread]
    }

    fn unfree(&mut self, thread: ThreadId) {
        match std::mem::take(self.freed_by(thread)) {
            Freed::Nothing => {}
            Freed::Block(key, entry) => self.enter(key, entry),
            Freed::Older(block) => self.change_older(&block, signed(block.bytes)),
            Freed::Untracked => self.counts.untracked = self.counts.untracked.saturating_sub(1),
        }
    }

    /// Everything but allocations and frees, out of their way.
    #[cold]
    fn apply_rare(&mut self, event: &Event<'_>) -> Option<Trace> {
        match *event.kind {
            EventKind::Alloc { .. } | EventKind::Free { .. } => {}
            EventKind::Unfree => self.unfree(event.thread),
            EventKind::Found { block } => {
                self.counts.untracked = self.counts.untracked.saturating_sub(1);
                self.change_older(&block, -signed(block.bytes));
                *self.freed_by(event.thread) = Freed::Older(block);
            }
            EventKind::Gone { context } => {
                for entry in self.live.drain(|entry| entry.context == context) {
                    self.change(&entry, -signed(entry.bytes));
                }
            }
            EventKind::Sample { device, memory } => self.meters.of(device, Gauge::Sampled).sample(event.time, &memory),
            EventKind::Marks { device, marks } => self.meters.of(device, Gauge::Pool).mark(&marks),
            EventKind::Unread { device, gauge } => self.meters.of(device, gauge).samples.failed = true,
            EventKind::Open { scope, watch } => self.open(scope, watch),
            EventKind::Read { scope } => {
                return self.scopes.get(&scope).map(|open| self.trace(open));
            }
            EventKind::Reset { scope } => {
                let open = self.scopes.get(&scope)?;
                let Meter { device, gauge, .. } = self.meters.0[usize::from(open.meter)];
                let watch = Watch { device, gauge, every: open.every, thread: open.thread };
                let trace = self.close(scope);
                self.open(scope, watch);
                return trace;
            }
            EventKind::Close { scope } => return self.close(scope),
            EventKind::Lost { count } => self.counts.lost += count,
        }
        None
    }

    /// What the newest event came to, if it was a question to an open scope.
    pub(crate) fn take_trace(&mut self) -> Option<Trace> {
        self.told.take()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// What is live, by the order of [`MemKind::ALL`].
    pub(crate) fn live(&self) -> [Tally; MemKind::ALL.len()] {
        self.live.by_kind()
    }

    #[inline]
    fn change(&mut self, of: &Entry, by: i64) {
        if !of.kind.is_on_device() {
            return;
        }
        self.meters.0[usize::from(of.meter)].level.change(by);
        if !self.locals.is_empty()
            && let Some(local) = self.locals.get_mut(&(of.thread, of.meter))
        {
            local.level.change(by);
        }
    }

    /// As `change`, for a block from before the session: no thread's part ever had it.
    fn change_older(&mut self, block: &Block, by: i64) {
        if block.kind.is_on_device() {
            self.meters.of(block.device, Gauge::Exact).level.change(by);
        }
    }

    fn open(&mut self, scope: ScopeId, watch: Watch) {
        let meter = self.meters.index(watch.device, watch.gauge);
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(meter)];
        let level = match watch.thread {
            None => level,
            Some(thread) => {
                let local =
                    self.locals.entry((thread, meter)).or_insert_with(|| Local { level: Level::new(), scopes: 0 });
                local.scopes += 1;
                &mut local.level
            }
        };
        let opened = Scope {
            meter,
            thread: watch.thread,
            every: watch.every,
            start: level.in_use,
            peak: level.peaks.open(level.in_use),
            gap: samples.gaps.open(Duration::ZERO),
            samples_before: samples.count.saturating_sub(1),
            blind: samples.failed,
            before: self.counts,
        };
        self.scopes.insert(scope, opened);
    }

    fn level(&self, scope: &Scope) -> &Level {
        match scope.thread {
            None => &self.meters.0[usize::from(scope.meter)].level,
            Some(thread) => &self.locals[&(thread, scope.meter)].level,
        }
    }

    fn trace(&self, scope: &Scope) -> Trace {
        let Meter { device, gauge, samples, .. } = &self.meters.0[usize::from(scope.meter)];
        let level = self.level(scope);
        let (peak, end) = (level.peaks.max_since(scope.peak), level.in_use);
        let sampled = *gauge == Gauge::Sampled;
        Trace {
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            gauge: *gauge,
            used: ByteDelta::new(end - scope.start),
            peaked: Bytes::new(peak.abs_diff(scope.start.max(end))),
            sampling: sampled.then(|| Sampling {
                every: scope.every,
                readings: samples.count - scope.samples_before,
                longest_gap: samples.gaps.max_since(scope.gap),
            }),
            stale: samples.failed || scope.blind,
            untracked: if *gauge == Gauge::Exact {
                self.counts.untracked.saturating_sub(scope.before.untracked)
            } else {
                0
            },
            lost: self.counts.lost - scope.before.lost,
        }
    }

    fn close(&mut self, scope: ScopeId) -> Option<Trace> {
        let open = self.scopes.remove(&scope)?;
        let trace = self.trace(&open);
        let Meter { level, samples, .. } = &mut self.meters.0[usize::from(open.meter)];
        samples.gaps.close(open.gap);
        let Some(thread) = open.thread else {
            level.peaks.close(open.peak);
            return Some(trace);
        };
        if let Some(local) = self.locals.get_mut(&(thread, open.meter)) {
            local.level.peaks.close(open.peak);
            local.scopes -= 1;
            if local.scopes == 0 {
                self.locals.remove(&(thread, open.meter));
            }
        }
        Some(trace)
    }
}

impl Meters {
    #[inline]
    fn index(&mut self, device: Device, gauge: Gauge) -> u16 {
        let known = self.0.iter().position(|meter| meter.device == device && meter.gauge == gauge);
        let index = known.unwrap_or_else(|| {
            let samples = Samples { count: 0, newest: None, gaps: Watermark::new(), failed: false };
            self.0.push(Meter { device, gauge, level: Level::new(), samples });
            self.0.len() - 1
        });
        u16::try_from(index).expect("fewer than 2^16 devices")
    }

    fn of(&mut self, device: Device, gauge: Gauge) -> &mut Meter {
        let index = self.index(device, gauge);
        &mut self.0[usize::from(index)]
    }
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.get()).unwrap_or(i64::MAX)
}

impl Level {
    const fn new() -> Self {
        Self { in_use: 0, peaks: Watermark::new() }
    }

    #[inline]
    fn change(&mut self, by: i64) {
        self.set(self.in_use.saturating_add(by));
    }

    #[inline]
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
