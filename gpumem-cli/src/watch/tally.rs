//! What is counted of the events of a recording and stays when its file is begun again: peaks, also between two collections, and
//! how often memory was refused.

use std::time::Duration;

use gpumem_core::{
    ledger::{BlockChange, BlockChangeKind},
    model::{Block, Device, EventKind, MemKind, ThreadId, Time},
    recording::{Follower, RecordedEvent},
};

/// How soon a thread that was refused memory has to obtain it, as in a report.
pub(crate) const SOON: Duration = Duration::from_secs(1);

/// At most this many refusals wait for memory that their thread may still obtain.
const MOST_PENDING: usize = 64;

/// Everything is of one process: a recording of another one in the same file is counted from the start.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    process: Option<(u32, Duration)>,
    /// The number of the newest event that was counted.
    newest: u64,
    /// The file was begun again, and no event after `newest` was read since.
    is_begun_again: bool,
    levels: Vec<(Device, Level)>,
    refusals: Vec<Refusal>,
    pub(crate) refused: u64,
    /// How many of the refusals were followed by success.
    pub(crate) retried: u64,
    /// The losses of earlier files, less those that the present one has repeated.
    lost_before: i64,
    /// The losses that were known when the earlier file was left.
    lost_in_earlier: u64,
}

/// An allocation that was refused, and whose thread may still obtain it.
#[derive(Debug)]
struct Refusal {
    thread: ThreadId,
    device: Option<Device>,
    kind: MemKind,
    bytes: u64,
    time: Time,
}

/// What is live on a device.
#[derive(Debug, Default)]
struct Level {
    live: u64,
    /// The most since anybody has collected.
    highest: u64,
    /// The most since the start.
    peak: u64,
}

impl Tally {
    /// From now on, events come from a new file.
    pub(super) fn begin_again(&mut self, follower: &Follower) {
        self.lost_in_earlier = follower.ledger().counts().lost;
        self.is_begun_again = true;
        for (_, level) in &mut self.levels {
            level.live = 0;
        }
    }

    /// Counts an event that was applied.
    pub(super) fn event(&mut self, follower: &Follower, event: &RecordedEvent, changes: &mut Vec<BlockChange>) {
        let process = follower.definitions().process();
        if self.process != Some((process.pid, process.began)) {
            *self = Self { process: Some((process.pid, process.began)), ..Self::default() };
        }
        let is_new = event.number > self.newest;
        if is_new && std::mem::take(&mut self.is_begun_again) {
            self.go_on(follower, event);
        }
        for change in changes.drain(..) {
            let BlockChange { kind, before, after, device, group, .. } = change;
            let is_of_program =
                matches!(kind, BlockChangeKind::GivenToProgram | BlockChangeKind::TakenByPool) || group.is_in_program();
            if is_of_program && group.kind.is_on_device() {
                let level = self.level(device);
                level.live = level.live.saturating_add(after.get()).saturating_sub(before.get());
                if is_new {
                    level.highest = level.highest.max(level.live);
                    level.peak = level.peak.max(level.live);
                }
            }
        }
        if !is_new {
            return;
        }
        self.newest = event.number;
        match event.kind {
            EventKind::Refused { device, bytes, kind, .. } => {
                self.refused += 1;
                let (thread, bytes, time) = (event.thread, bytes.get(), event.time);
                if self.refusals.len() == MOST_PENDING {
                    self.refusals.remove(0);
                }
                self.refusals.push(Refusal { thread, device, kind, bytes, time });
            }
            EventKind::Alloc { block, .. } if !self.refusals.is_empty() => self.obtained(event, &block),
            _ => {}
        }
    }

    /// The first event of a new file that was not in the earlier one. What was between both was not read.
    fn go_on(&mut self, follower: &Follower, event: &RecordedEvent) {
        let repeated = match event.kind {
            EventKind::Lost { count } => follower.ledger().counts().lost - count,
            _ => follower.ledger().counts().lost,
        };
        self.lost_before += self.lost_in_earlier.cast_signed() - repeated.cast_signed();
        let part = follower.definitions().part().filter(|part| !part.is_peaks);
        let missing = part.map_or(0, |part| part.after.saturating_sub(self.newest));
        self.lost_before += missing.cast_signed();
    }

    fn obtained(&mut self, event: &RecordedEvent, block: &Block) {
        self.refusals.retain(|refusal| event.time.saturating_sub(refusal.time) <= SOON);
        let is_it = |refusal: &Refusal| {
            let is_there = match refusal.device {
                Some(device) => device == block.device && block.kind != MemKind::PinnedHost,
                None => refusal.kind == block.kind,
            };
            refusal.thread == event.thread && is_there && refusal.bytes <= block.bytes.get()
        };
        let before = self.refusals.len();
        self.refusals.retain(|refusal| !is_it(refusal));
        self.retried += (before - self.refusals.len()) as u64;
    }

    fn level(&mut self, device: Device) -> &mut Level {
        let at = self.levels.iter().position(|(known, _)| *known == device).unwrap_or_else(|| {
            self.levels.push((device, Level::default()));
            self.levels.len() - 1
        });
        &mut self.levels[at].1
    }

    /// The events that were lost, and those that were in a file that was replaced before it was read.
    pub(crate) fn lost(&self, follower: &Follower) -> u64 {
        let now = if self.is_begun_again { self.lost_in_earlier } else { follower.ledger().counts().lost };
        now.saturating_add_signed(self.lost_before)
    }

    /// The most that was live on a device since the start.
    pub(crate) fn peak(&self, device: Device) -> u64 {
        self.levels.iter().find(|(known, _)| *known == device).map_or(0, |(_, level)| level.peak)
    }

    /// The most that was live on a device since the last call.
    pub(crate) fn take_recent_peak(&mut self, device: Device) -> u64 {
        let level = self.level(device);
        std::mem::replace(&mut level.highest, level.live)
    }
}
