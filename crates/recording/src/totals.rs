//! The totals since the start of a program, for a reader that does not read its events from the first one.

use std::time::Duration;

use super::{event::RecordedEvent, wire::fields};
use gpumem_core::{
    ledger::{BlockChange, BlockChangeKind},
    model::{Block, Bytes, Device, EventKind, MemKind, ThreadId, Time},
};

/// If the thread of a rejected allocation obtains as much memory within this time, its allocator has freed some, and the allocation counts
/// as obtained.
const SOON: Duration = Duration::from_secs(1);

/// The largest number of rejected allocations whose thread may still obtain the memory.
const MOST_WAITING: usize = 1 << 10;

/// The largest number of peaks that are read from a file.
const MOST_PEAKS: usize = 1 << 10;

/// The totals of a program since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The number of observed allocations, without the driver's blocks of registered pools.
    pub allocations: u64,
    /// The number of blocks that ended.
    pub frees: u64,
    /// The number of allocations that were rejected because there was not enough memory.
    pub rejected: u64,
    /// The number of rejected allocations after which the same thread obtained as much memory within a second.
    pub obtained: u64,
    /// The number of lost events.
    pub lost: u64,
    /// The peak of each device.
    pub peaks: Vec<DevicePeak>,
    /// The rejected allocations whose thread may still obtain the memory.
    pub waiting: Vec<Waiting>,
    /// The peak of the driver's blocks of each device with a registered pool.
    pub driver_peaks: Vec<DevicePeak>,
}

/// The peak of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePeak {
    /// The device.
    pub device: Device,
    /// The sum of its live blocks at the peak.
    pub bytes: u64,
    /// The time when the peak was first reached.
    pub time: Time,
}

fields!(Totals { allocations, frees, rejected, obtained, lost, peaks, waiting, driver_peaks });
fields!(Waiting { thread, device, bytes, kind, since });
fields!(DevicePeak { device, bytes, time });

fn raise(peaks: &mut Vec<DevicePeak>, now: DevicePeak) {
    match peaks.iter_mut().find(|peak| peak.device == now.device) {
        Some(peak) if now.bytes > peak.bytes => *peak = now,
        Some(_) => {}
        None => peaks.push(now),
    }
}

/// Adds up events.
#[derive(Debug, Default)]
pub(super) struct Tally {
    totals: Totals,
    levels: Vec<Level>,
}

/// The bytes in use on a device.
#[derive(Debug)]
struct Level {
    device: Device,
    in_use: u64,
    /// The bytes of the driver's blocks. Before the first pool is registered, their peak equals the peak of the program's view, and is not
    /// kept.
    driver: u64,
    has_pool: bool,
    /// The highest value since the last call of `take_recent`.
    recent: u64,
}

/// A rejected allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The thread that requested the memory.
    pub thread: ThreadId,
    /// The device. `None` if it is not known, or if the memory is on the host.
    pub device: Option<Device>,
    /// Its size.
    pub bytes: Bytes,
    /// Its kind.
    pub kind: MemKind,
    /// The time of the rejection.
    pub since: Time,
}

impl Tally {
    /// Adds an event, and its effects on blocks.
    pub(super) fn add(&mut self, event: &RecordedEvent, changes: &[BlockChange]) {
        let RecordedEvent { time, thread, .. } = *event;
        for change in changes {
            self.change(change, time);
        }
        match event.kind {
            EventKind::Alloc { block, .. } if !self.totals.waiting.is_empty() => self.obtained(thread, &block, time),
            EventKind::Rejected { device, bytes, kind, .. } => {
                self.totals.rejected = self.totals.rejected.saturating_add(1);
                let waiting = &mut self.totals.waiting;
                waiting.retain(|waiting| time.saturating_sub(waiting.since) <= SOON);
                if waiting.len() < MOST_WAITING {
                    waiting.push(Waiting { thread, device, bytes, kind, since: time });
                }
            }
            EventKind::PoolRegistered { device, .. } => {
                let is_first = !std::mem::replace(&mut self.level(device).has_pool, true);
                let Totals { peaks, driver_peaks, .. } = &mut self.totals;
                driver_peaks.extend(peaks.iter().find(|peak| is_first && peak.device == device));
            }
            EventKind::Lost { count } => self.lose(count),
            EventKind::Displaced { more, .. } => self.lose(more),
            _ => {}
        }
    }

    /// Notes the number of lost events.
    pub(super) fn lose(&mut self, count: u64) {
        self.totals.lost = self.totals.lost.saturating_add(count);
    }

    fn change(&mut self, change: &BlockChange, time: Time) {
        let BlockChange { kind, before, after, device, ref group, .. } = *change;
        // The driver took this by itself: it is no allocation.
        if group.kind.is_taken_by_driver() {
            return;
        }
        let is_on_device = group.kind.is_on_device();
        let is_of_driver = is_on_device && group.kind != MemKind::Part;
        if is_of_driver && !matches!(kind, BlockChangeKind::GivenToProgram | BlockChangeKind::TakenByPool) {
            let level = self.level(device);
            level.driver = (level.driver + after.get()).saturating_sub(before.get());
            let (bytes, has_pool) = (level.driver, level.has_pool);
            if has_pool {
                raise(&mut self.totals.driver_peaks, DevicePeak { device, bytes, time });
            }
        }
        // A pool has taken a block whose owner was unknown.
        if kind == BlockChangeKind::TakenByPool || is_on_device && !group.is_in_program() {
            return;
        }
        match kind {
            BlockChangeKind::Allocated | BlockChangeKind::GivenToProgram => {
                self.totals.allocations = self.totals.allocations.saturating_add(1);
            }
            BlockChangeKind::FreeFailed => self.totals.frees = self.totals.frees.saturating_sub(1),
            BlockChangeKind::Shrunk | BlockChangeKind::TakenByPool => {}
            BlockChangeKind::Freed | BlockChangeKind::RemovedWithContext | BlockChangeKind::FreeMissed => {
                self.totals.frees = self.totals.frees.saturating_add(1);
            }
        }
        if !is_on_device {
            return;
        }
        let level = self.level(device);
        level.in_use = (level.in_use + after.get()).saturating_sub(before.get());
        level.recent = level.recent.max(level.in_use);
        let bytes = level.in_use;
        raise(&mut self.totals.peaks, DevicePeak { device, bytes, time });
    }

    fn level(&mut self, device: Device) -> &mut Level {
        let at = self.levels.iter().position(|level| level.device == device).unwrap_or_else(|| {
            self.levels.push(Level { device, in_use: 0, driver: 0, has_pool: false, recent: 0 });
            self.levels.len() - 1
        });
        &mut self.levels[at]
    }

    #[cold]
    fn obtained(&mut self, thread: ThreadId, block: &Block, time: Time) {
        let Totals { waiting, obtained, .. } = &mut self.totals;
        waiting.retain(|waiting| {
            let is_soon = time.saturating_sub(waiting.since) <= SOON;
            let is_there = waiting.device.map_or(waiting.kind == block.kind, |device| device == block.device);
            let has_it = waiting.thread == thread && is_there && waiting.bytes <= block.bytes;
            *obtained = obtained.saturating_add(u64::from(is_soon && has_it));
            is_soon && !has_it
        });
    }

    pub(super) fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Continues from these totals, after the initial live blocks.
    pub(super) fn continue_from(&mut self, totals: Totals) {
        self.totals = totals;
        // A file from an unknown source may have any number of them.
        self.totals.peaks.truncate(MOST_PEAKS);
        self.totals.driver_peaks.truncate(MOST_PEAKS);
        self.totals.waiting.truncate(MOST_WAITING);
        self.levels.iter_mut().for_each(|level| level.recent = level.in_use);
    }

    /// Returns the peak of a device since the last call.
    pub(super) fn take_recent(&mut self, device: Device) -> u64 {
        let level = self.levels.iter_mut().find(|level| level.device == device);
        level.map_or(0, |level| std::mem::replace(&mut level.recent, level.in_use))
    }
}
