//! The limits of a recording for its reader. A recording written by gpumem is within these limits. A damaged or hostile one must
//! not make the reader panic, use unlimited memory or run forever.

use std::collections::{HashMap, HashSet};

use super::{
    allocator::AllocatorEvents,
    budget::{Budget, Exceeded},
    event::RecordedEvent,
};
use gpumem_core::model::{
    Block, Bytes, Device, EventKind, Family, GpuMemory, Key, MemKind, PoolId, ScopeId, ScopeSpec, Space, ThreadId,
};

/// The most threads that run at the same time.
const MOST_THREADS: u32 = 1 << 16;
/// The most devices of one family.
const MOST_DEVICES: u32 = 1 << 8;
/// The most scopes that are open at the same time.
const MOST_SCOPES: usize = 1 << 17;
/// The most scopes that one thread is in at the same time.
const DEEPEST: u32 = 1 << 14;
/// The most live blocks whose keys have the same hash, in the bits that choose their slot.
const MOST_ALIKE: u32 = 1 << 12;
/// The ledger keeps 48 bits of an event number.
const MOST_EVENTS: u64 = 1 << 48;
/// The ledger keeps 28 bits of a stack id.
const MOST_STACKS: u32 = 1 << 28;
/// The most bytes of one block, or of one reading of a device: 64 TiB.
const MOST_BYTES: u64 = 1 << 46;
/// The most live bytes, and the most bytes of blocks older than the session.
const MOST_LIVE: u64 = 1 << 54;
/// The most bytes that were ever allocated.
const MOST_ALLOCATED: u64 = 1 << 62;
/// The most lost events.
const MOST_LOST: u64 = 1 << 48;
/// The most functions that the driver has.
const MOST_FUNCTIONS: u64 = 1 << 10;
/// The first scope id for peaks that the reader itself keeps.
pub(super) const FIRST_OWN_SCOPE: u64 = 1 << 62;

/// The approximate bytes of a reader and a report for each live block: an entry of the ledger, and its entries in lists.
const LIVE_BLOCK: u64 = 128;
/// The additional bytes for each change of the live memory.
const CHANGE: u64 = 32;
/// The additional bytes for each block that was ever allocated.
const BLOCK: u64 = 32;
/// The bytes for each time that a scope is opened.
const SCOPE: u64 = 64;
/// The additional bytes while a scope is open.
const OPEN_SCOPE: u64 = 640;
/// The bytes for each rejected allocation.
const REJECTION: u64 = 96;
/// The bytes for each mark.
const MARK: u64 = 48;
/// The bytes for each event of a caching allocator.
const ALLOCATOR_EVENT: u64 = 128;

/// The cost of an event, in steps.
const EVENT: u64 = 20;
/// The cost of an event about a scope, in steps.
pub(super) const SCOPE_EVENT: u64 = 400;
/// The additional cost of an allocation, in steps, for each scope that could adopt its thread.
const ADOPTER: u64 = 10;
/// The most scopes with which an allocation's thread is compared.
const MOST_COMPARED: usize = 64;
/// The cost, in steps, of an event that may hide missed frees.
pub(super) const LOST: u64 = 4_000;

/// The reason why an item is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// The item contradicts earlier items.
    Contradiction,
    /// The event is about a scope that was not opened. A recording that starts late does not have those that are older.
    UnknownScope,
    /// The item is above a limit.
    Limit,
    /// Reading this file takes more work or memory than its size allows, so reading stops.
    Exceeded(Exceeded),
}

impl From<Exceeded> for Rejection {
    fn from(limit: Exceeded) -> Self {
        Self::Exceeded(limit)
    }
}

type Result<T = ()> = std::result::Result<T, Rejection>;

/// What the checks have seen so far. It mirrors the ledger approximately, so that its size stays bounded.
#[derive(Debug)]
pub(super) struct Checks {
    number: u64,
    /// The largest thread id.
    threads: u32,
    /// The open scopes, and the thread that opened each.
    open: HashMap<ScopeId, ThreadId>,
    /// The open scopes that adopt threads.
    adopting: HashSet<ScopeId>,
    entered: HashMap<(ThreadId, ScopeId), u32>,
    depths: HashMap<ThreadId, u32>,
    blocks: u64,
    live: u64,
    allocated: u64,
    older_bytes: u64,
    /// The number of live blocks for each key hash (see [`MOST_ALIKE`]).
    blocks_per_key_hash: Vec<u32>,
    freed: HashMap<ThreadId, (Key, u64)>,
    lost: u64,
    displaced: u64,
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            number: 0,
            threads: 0,
            open: HashMap::new(),
            adopting: HashSet::new(),
            entered: HashMap::new(),
            depths: HashMap::new(),
            blocks: 0,
            live: 0,
            allocated: 0,
            older_bytes: 0,
            blocks_per_key_hash: vec![0; 1 << 16],
            freed: HashMap::new(),
            lost: 0,
            displaced: 0,
        }
    }
}

fn limit(is_within: bool) -> Result {
    if is_within { Ok(()) } else { Err(Rejection::Limit) }
}

fn ensure_consistent(holds: bool) -> Result {
    if holds { Ok(()) } else { Err(Rejection::Contradiction) }
}

fn hash(key: Key) -> usize {
    // These bits of the product choose the slot in the ledger's tables.
    (key.get().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize & 0xffff
}

fn check_device(device: Device) -> Result {
    limit(device.ordinal < MOST_DEVICES)
}

fn check_thread(thread: ThreadId) -> Result {
    limit(thread.0 < MOST_THREADS)
}

fn check_memory(memory: &GpuMemory) -> Result {
    let GpuMemory { total, free, used, reserved, .. } = *memory;
    [total, free, used, reserved.unwrap_or_default()].into_iter().try_for_each(check_bytes)
}

fn check_bytes(bytes: Bytes) -> Result {
    limit(bytes.get() < MOST_BYTES)
}

fn check_block(block: &Block) -> Result {
    check_device(block.device)?;
    ensure_consistent(block.device.family != Family::Custom)?;
    check_bytes(block.bytes)?;
    limit(block.stack.0 < MOST_STACKS)
}

/// The data that was read about a caching allocator.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AllocatorChecks {
    bytes: u64,
}

impl AllocatorChecks {
    pub(super) fn events(&mut self, events: &AllocatorEvents, budget: &mut Budget) -> Result {
        check_device(events.device)?;
        let count = events.events.len() as u64;
        budget.take(count * ALLOCATOR_EVENT)?;
        budget.work(count * EVENT)?;
        for event in &events.events {
            check_bytes(event.bytes)?;
            check_bytes(event.requested)?;
            limit(event.stack.0 < MOST_STACKS)?;
            // The end of a block must be an address as well.
            limit(event.address < 1 << 62)?;
            self.bytes += event.bytes.get() + event.requested.get();
            // The sum of the sizes must not be too large.
            limit(self.bytes < MOST_ALLOCATED)?;
        }
        Ok(())
    }
}

fn check_key(key: Key) -> Result {
    ensure_consistent(key != Key::NONE)
}

impl Checks {
    /// Checks whether the ledger can take an event. `known` returns the size of the block with a key, if it is live.
    pub(super) fn event(&mut self, event: &RecordedEvent, known: impl Fn(Key) -> Option<u64>) -> Result {
        limit(event.number < MOST_EVENTS)?;
        ensure_consistent(event.number > self.number)?;
        check_thread(event.thread)?;
        self.threads = self.threads.max(event.thread.0);
        self.kind(event, known)?;
        self.number = event.number;
        Ok(())
    }

    fn kind(&mut self, event: &RecordedEvent, known: impl Fn(Key) -> Option<u64>) -> Result {
        let thread = event.thread;
        match event.kind {
            // The ledger counts this as a wrong call and ignores the size.
            EventKind::Alloc { block: Block { device, bytes, kind: MemKind::Part, .. }, .. }
                if bytes.get() >= MOST_BYTES =>
            {
                check_device(device)?;
            }
            EventKind::Alloc { key, block } => {
                check_key(key)?;
                check_block(&block)?;
                limit(self.allocated + block.bytes.get() < MOST_ALLOCATED)?;
                self.insert(key, block.bytes.get(), known(key))?;
                self.allocated += block.bytes.get();
            }
            EventKind::Free { key, block } => {
                check_key(key)?;
                if let Some(bytes) = known(key) {
                    self.remove(key, bytes);
                    self.freed.insert(thread, (key, bytes));
                } else {
                    block.as_ref().map_or(Ok(()), |block| self.older(block))?;
                    self.freed.remove(&thread);
                }
            }
            EventKind::LateLookup { block } => self.older(&block)?,
            EventKind::FreeFailed => {
                if let Some((key, bytes)) = self.freed.remove(&thread) {
                    self.insert(key, bytes, known(key))?;
                }
            }
            EventKind::Shrink { key, bytes } => {
                check_key(key)?;
                let is_known = known(key).is_some();
                let before = known(key).unwrap_or(0);
                // Two kinds of blocks may grow: a part of a pool, and the driver's own memory, which may also have 0 bytes.
                let is_of_driver = key == Key::new(Space::Driver, key.address());
                let may_grow = key.is_part() && before > 0 || is_of_driver && is_known;
                ensure_consistent(bytes.get() <= before || may_grow)?;
                limit(self.live + bytes.get() < MOST_LIVE)?;
                self.live = (self.live + bytes.get()).saturating_sub(before);
            }
            EventKind::Sample { device, memory } => {
                check_device(device)?;
                check_memory(&memory)?;
            }
            EventKind::ReadFailed { device, .. }
            | EventKind::ResetPeaks { device }
            | EventKind::DriverMeasured { device, .. } => check_device(device)?,
            EventKind::Open { scope, spec } => self.open(scope, &spec, thread)?,
            EventKind::Enter { scope } => {
                limit(scope.0 < FIRST_OWN_SCOPE)?;
                self.enter(scope, thread)?;
            }
            EventKind::Leave { scope } => self.leave(scope, thread),
            EventKind::Read { scope } | EventKind::Reset { scope } | EventKind::ResetKeepingPeak { scope } => {
                self.ensure_open(scope)?;
            }
            EventKind::Close { scope } => {
                let opener = self.open.remove(&scope).ok_or(Rejection::UnknownScope)?;
                self.adopting.remove(&scope);
                self.leave(scope, opener);
            }
            EventKind::Lost { count } => self.lost(count)?,
            EventKind::Displaced { now, more } => {
                limit(now < MOST_FUNCTIONS && more < MOST_FUNCTIONS)?;
                ensure_consistent(now <= self.displaced + more)?;
                self.lost(more)?;
                self.displaced = now;
            }
            // The request may have any size, because nothing adds it up.
            EventKind::Rejected { device, stack, .. } => {
                device.map_or(Ok(()), check_device)?;
                limit(stack.0 < MOST_STACKS)?;
            }
            EventKind::UnknownValue { stack, .. } => limit(stack.0 < MOST_STACKS)?,
            EventKind::PoolRegistered { pool, device } => {
                check_device(device)?;
                ensure_consistent(pool != PoolId::NONE)?;
                limit(pool <= PoolId::LAST)?;
            }
            EventKind::RealBlocks { .. }
            | EventKind::PoolReserved { .. }
            | EventKind::PoolEmptied { .. }
            | EventKind::PoolsQueried
            | EventKind::ResetSummary
            | EventKind::Untracked
            | EventKind::ContextDestroyed { .. }
            | EventKind::Mark { .. }
            | EventKind::Named { .. } => {}
            EventKind::Adopt { scope, .. } => {
                self.ensure_open(scope)?;
                self.adopting.insert(scope);
            }
        }
        Ok(())
    }

    fn insert(&mut self, key: Key, bytes: u64, before: Option<u64>) -> Result {
        let live = self.live.saturating_sub(before.unwrap_or(0)) + bytes;
        limit(live < MOST_LIVE)?;
        if before.is_none() {
            let blocks = &mut self.blocks_per_key_hash[hash(key)];
            limit(*blocks < MOST_ALIKE)?;
            *blocks += 1;
            self.blocks += 1;
        }
        self.live = live;
        Ok(())
    }

    fn remove(&mut self, key: Key, bytes: u64) {
        let blocks = &mut self.blocks_per_key_hash[hash(key)];
        *blocks = blocks.saturating_sub(1);
        self.blocks = self.blocks.saturating_sub(1);
        self.live = self.live.saturating_sub(bytes);
    }

    /// Checks a freed block that is older than the session.
    fn older(&mut self, block: &Block) -> Result {
        check_block(block)?;
        limit(self.older_bytes + block.bytes.get() < MOST_LIVE)?;
        self.older_bytes += block.bytes.get();
        Ok(())
    }

    fn open(&mut self, scope: ScopeId, spec: &ScopeSpec, thread: ThreadId) -> Result {
        check_device(spec.device)?;
        limit(scope.0 < FIRST_OWN_SCOPE && self.open.len() < MOST_SCOPES)?;
        ensure_consistent(!self.open.contains_key(&scope))?;
        self.enter(scope, thread)?;
        self.open.insert(scope, thread);
        Ok(())
    }

    fn ensure_open(&self, scope: ScopeId) -> Result {
        if self.open.contains_key(&scope) { Ok(()) } else { Err(Rejection::UnknownScope) }
    }

    fn enter(&mut self, scope: ScopeId, thread: ThreadId) -> Result {
        let depth = self.depths.entry(thread).or_default();
        limit(*depth < DEEPEST && self.entered.len() < 4 * MOST_SCOPES)?;
        *depth += 1;
        *self.entered.entry((thread, scope)).or_default() += 1;
        Ok(())
    }

    fn leave(&mut self, scope: ScopeId, thread: ThreadId) {
        let Some(times) = self.entered.get_mut(&(thread, scope)) else { return };
        *times -= 1;
        if *times == 0 {
            self.entered.remove(&(thread, scope));
        }
        if let Some(depth) = self.depths.get_mut(&thread) {
            *depth = depth.saturating_sub(1);
        }
    }

    /// Notes that the thread with this id has ended, so it is no longer in any scope.
    pub(super) fn reuse(&mut self, thread: ThreadId, budget: &mut Budget) -> Result {
        check_thread(thread)?;
        budget.work(SCOPE_EVENT + 16 * self.entered.len() as u64)?;
        if self.depths.remove(&thread).is_some() {
            self.entered.retain(|(owner, _), _| *owner != thread);
        }
        self.freed.remove(&thread);
        Ok(())
    }

    pub(super) fn lost(&mut self, count: u64) -> Result {
        limit(count < MOST_LOST && self.lost + count < MOST_LOST)?;
        self.lost += count;
        Ok(())
    }

    /// Recounts the blocks after a context was destroyed with its blocks.
    pub(super) fn recount(&mut self, blocks: impl Iterator<Item = (Key, u64)>) {
        self.blocks_per_key_hash.fill(0);
        (self.blocks, self.live) = (0, 0);
        for (key, bytes) in blocks {
            self.blocks_per_key_hash[hash(key)] += 1;
            self.blocks += 1;
            self.live += bytes;
        }
    }

    /// Returns the number of the last event.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Pays for an event. Memory that the event frees is [returned](Self::released) after the event was applied.
    pub(super) fn spend(&self, event: &RecordedEvent, budget: &mut Budget) -> std::result::Result<(), Exceeded> {
        let depth = || u64::from(self.depths.get(&event.thread).copied().unwrap_or(0));
        let (memory, work) = match event.kind {
            // The thread is compared with the latest scopes that adopt threads.
            EventKind::Alloc { .. } => {
                (CHANGE + BLOCK + LIVE_BLOCK, EVENT + ADOPTER * self.adopting.len().min(MOST_COMPARED) as u64)
            }
            EventKind::FreeFailed => (CHANGE + BLOCK + LIVE_BLOCK, EVENT),
            EventKind::Free { .. } | EventKind::Shrink { .. } => (CHANGE, EVENT),
            EventKind::ContextDestroyed { .. } | EventKind::PoolRegistered { .. } | EventKind::PoolEmptied { .. } => {
                (CHANGE, EVENT + 100 * self.blocks)
            }
            EventKind::Lost { .. } | EventKind::Displaced { .. } => (0, LOST),
            EventKind::Open { .. } => (SCOPE + OPEN_SCOPE, SCOPE_EVENT),
            EventKind::Enter { .. } => (0, SCOPE_EVENT),
            EventKind::Leave { .. } | EventKind::Close { .. } => (0, SCOPE_EVENT + 8 * depth()),
            EventKind::Rejected { .. } | EventKind::UnknownValue { .. } => (REJECTION, EVENT),
            // Adopting affects all threads.
            EventKind::Adopt { .. } => (0, SCOPE_EVENT + u64::from(self.threads)),
            EventKind::Mark { .. } => (MARK, EVENT),
            _ => (0, EVENT),
        };
        budget.work(work)?;
        budget.take(memory)
    }

    /// Returns the memory that is no longer needed after an event that was paid for: the memory of removed blocks and closed
    /// scopes, and of a block or scope that was not added because the event was rejected. `before` is the earlier result of
    /// [`count`](Self::count).
    pub(super) fn released(&self, event: &RecordedEvent, before: (u64, usize)) -> u64 {
        let new_block = matches!(event.kind, EventKind::Alloc { .. } | EventKind::FreeFailed);
        let new_scope = matches!(event.kind, EventKind::Open { .. });
        let blocks = (before.0 + u64::from(new_block)).saturating_sub(self.blocks);
        let scopes = (before.1 + usize::from(new_scope)).saturating_sub(self.open.len());
        blocks * LIVE_BLOCK + scopes as u64 * OPEN_SCOPE
    }

    /// Returns the approximate bytes of live blocks and open scopes.
    pub(super) fn memory(&self) -> u64 {
        self.blocks * LIVE_BLOCK + self.open.len() as u64 * OPEN_SCOPE
    }

    /// Returns the number of live blocks, and of open scopes.
    pub(super) fn count(&self) -> (u64, usize) {
        (self.blocks, self.open.len())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use gpumem_core::model::{MemKind, StackId};

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn event(number: u64, kind: EventKind) -> RecordedEvent {
        RecordedEvent { number, ticks: number, time: Duration::ZERO, thread: ThreadId(1), kind }
    }

    fn alloc(key: u64) -> EventKind {
        let block =
            Block { device: DEVICE, bytes: Bytes::new(512), kind: MemKind::Pool, context: 1, stack: StackId::NONE };
        EventKind::Alloc { key: Key::from_raw(key), block }
    }

    /// Returns the number of events that the budget of a file with this many bytes allows.
    fn paid(bytes: u64, kind: impl Fn(u64) -> EventKind) -> u64 {
        let (mut budget, mut checks) = (Budget::new(bytes, 0), Checks::default());
        let mut live = HashMap::new();
        for number in 1.. {
            let event = event(number, kind(number));
            let before = checks.count();
            if budget.item().and_then(|()| checks.spend(&event, &mut budget)).is_err() {
                return number - 1;
            }
            checks.event(&event, |key| live.get(&key).copied()).unwrap();
            match event.kind {
                EventKind::Alloc { key, block } => _ = live.insert(key, block.bytes.get()),
                EventKind::Free { key, .. } => _ = live.remove(&key),
                _ => {}
            }
            budget.release(checks.released(&event, before));
        }
        unreachable!("the budget has an end")
    }

    #[test]
    fn the_densest_programs_are_within_their_budget() {
        let bytes = 2 << 20;
        // Each block is freed immediately: five bytes for three events.
        let key = Key::from_raw(512);
        let churn =
            paid(bytes, |number| if number % 2 == 1 { alloc(512) } else { EventKind::Free { key, block: None } });
        assert!(churn >= bytes * 3 / 5, "{churn}");
        // No block is freed: six bytes for each, four of them for the time and the address.
        let leak = paid(bytes, |number| alloc(number * 512));
        assert!(leak >= bytes / 6, "{leak}");
        // A file that is twice as large allows twice as many.
        assert!(paid(2 * bytes, |number| alloc(number * 512)).abs_diff(2 * leak) < 2);
    }

    #[test]
    fn a_small_file_pays_for_as_much_as_one_of_two_mebibytes() {
        let blocks = |bytes| paid(bytes, |number| alloc(number * 512));
        assert_eq!(blocks(100), blocks(2 << 20));
    }
}
