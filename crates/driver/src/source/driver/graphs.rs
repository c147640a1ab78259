//! The memory that each device has mapped for graph nodes that allocate.
//!
//! The driver reports one number for each device. It rises during a launch whose graph needs more memory than is mapped, and it falls when
//! the memory is trimmed. Freeing a graph's block or destroying a graph changes nothing: the memory stays mapped for the next launch.
//! Therefore the number is read whenever it may have changed, and each rise is recorded as one block.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    mem,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use once_cell::sync::Lazy;

use super::{
    super::{recorder::record, stacks},
    events::{cuda_device, record_lost},
};
use crate::{
    model::{Answer, Block, Bytes, EventKind, Key, MemKind, Space, StackId},
    sys::{calls, cuda},
};

/// The graph memory of a device that has been recorded.
#[derive(Debug)]
struct GraphMemory {
    /// True if the driver's number has not been read since the subscription started.
    unread: bool,
    /// True if the number may have risen since it was read.
    may_have_risen: bool,
    /// The bytes that were mapped while nothing was intercepted.
    older: u64,
    /// The recorded rises that are still mapped: the id and the bytes of each.
    rises: Vec<(u64, u64)>,
}

static GRAPHS: Lazy<Mutex<BTreeMap<u32, GraphMemory>>> = Lazy::new(Mutex::default);

/// The id of the next rise. Ids are never reused.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A bit mask of the devices that need not be read, for the first 64 devices. Each reading of a trace checks it, and the bit is nearly
/// always set.
static QUIET: AtomicU64 = AtomicU64::new(0);

/// Runs `change` under the lock. The lock is held from a reading until its events are recorded, so that the events have the order of the
/// readings.
fn with_graphs(change: impl FnOnce(&mut BTreeMap<u32, GraphMemory>)) {
    let mut graphs = GRAPHS.lock().unwrap_or_else(PoisonError::into_inner);
    // A thread that sees that another one took the launches waits here until they are recorded.
    QUIET.store(0, Relaxed);
    change(&mut graphs);
    let quiet = graphs.iter().filter(|(_, memory)| !memory.must_be_read()).map(|(ordinal, _)| bit(*ordinal));
    QUIET.store(quiet.fold(0, |all, bit| all | bit), Relaxed);
}

fn bit(ordinal: u32) -> u64 {
    1_u64.checked_shl(ordinal).unwrap_or(0)
}

/// Marks all numbers as unread, because a new subscription starts. They may have changed while nothing was intercepted.
pub(super) fn forget() {
    with_graphs(|graphs| {
        for memory in graphs.values_mut() {
            memory.unread = true;
        }
    });
}

/// Notes that a call that can change the mapped memory is about to be made, or has been made (`done`). The call may change the device of
/// its context and the devices of the graph's nodes.
#[cold]
pub(super) fn launched(current: Option<u32>, done: bool) {
    with_graphs(|graphs| {
        if let Some(ordinal) = current
            && let Entry::Vacant(entry) = graphs.entry(ordinal)
        {
            entry.insert(GraphMemory::UNREAD);
        }
        let first = calls::take_unrecorded_launches();
        for (ordinal, memory) in graphs.iter_mut() {
            if done || memory.unread || first {
                memory.read(*ordinal, stacks::stack_for);
            }
            // The number may change until the call has returned.
            memory.may_have_risen = !done;
        }
    });
}

/// Updates the graph memory of a device before a trace on it starts or is read. The driver is queried only if the number may have changed:
/// it rises during launches, and mapped memory may fall at any time.
pub(super) fn poll(ordinal: u32) {
    if !calls::has_unrecorded_launches() && QUIET.load(Relaxed) & bit(ordinal) != 0 {
        return;
    }
    with_graphs(|graphs| {
        if calls::take_unrecorded_launches() {
            for memory in graphs.values_mut() {
                memory.may_have_risen = true;
            }
        }
        let memory = graphs.entry(ordinal).or_insert(GraphMemory::UNREAD);
        if memory.must_be_read() {
            memory.read(ordinal, |_| StackId::NONE);
        }
    });
}

impl GraphMemory {
    const UNREAD: Self = Self { unread: true, may_have_risen: false, older: 0, rises: Vec::new() };

    fn must_be_read(&self) -> bool {
        self.unread || self.may_have_risen || self.recorded() > 0
    }

    fn read(&mut self, ordinal: u32, stack: impl FnOnce(u64) -> StackId) {
        self.may_have_risen = false;
        let Ok(used) = cuda::graph_memory(ordinal) else { return record_lost() };
        let (was_unread, used) = (self.unread, used.unwrap_or(0));
        // The number rose in a launch that was not recorded: the graph was built before the subscription, so it was not known to allocate.
        // The time of the rise is not known.
        if used > self.recorded() && !calls::record_graph_launches() && !was_unread {
            record_lost();
        }
        for event in self.events_of_reading(ordinal, used, stack) {
            if record(&event) == Answer::Untracked {
                record(&EventKind::Untracked);
            }
        }
    }

    /// Returns the events of a reading.
    fn events_of_reading(&mut self, ordinal: u32, used: u64, stack: impl FnOnce(u64) -> StackId) -> Vec<EventKind> {
        if mem::take(&mut self.unread) {
            self.older += used.saturating_sub(self.recorded());
        }
        let recorded = self.recorded();
        if used <= recorded {
            return self.fall(ordinal, recorded - used);
        }
        let (id, rise) = (NEXT_ID.fetch_add(1, Relaxed), used - recorded);
        self.rises.push((id, rise));
        let block = Block { stack: stack(rise), ..Block::new(cuda_device(ordinal), Bytes::new(rise), MemKind::Graph) };
        vec![EventKind::Alloc { key: Key::new(Space::Graph, id), block }]
    }

    /// Returns the bytes that are recorded as mapped.
    fn recorded(&self) -> u64 {
        self.older + self.rises.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Removes this many mapped bytes. The driver does not report for which graph they were mapped, so a rise of exactly this size is
    /// removed, or else the latest rises.
    fn fall(&mut self, ordinal: u32, mut bytes: u64) -> Vec<EventKind> {
        let mut events = Vec::new();
        while bytes > 0 {
            let alike = self.rises.iter().rposition(|(_, rise)| *rise == bytes);
            let Some(at) = alike.or_else(|| self.rises.len().checked_sub(1)) else { break };
            let (id, rise) = &mut self.rises[at];
            let key = Key::new(Space::Graph, *id);
            if *rise > bytes {
                *rise -= bytes;
                events.push(EventKind::Shrink { key, bytes: Bytes::new(*rise) });
                return events;
            }
            bytes -= *rise;
            self.rises.remove(at);
            events.push(EventKind::Free { key, block: None });
        }
        if bytes > 0 {
            self.older = self.older.saturating_sub(bytes);
            let block = Some(Block::new(cuda_device(ordinal), Bytes::new(bytes), MemKind::Graph));
            events.push(EventKind::Free { key: Key::new(Space::Graph, 0), block });
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the events of several readings, in bytes: a rise, a fall, the rest of a rise, a fall of older memory.
    fn events(memory: &mut GraphMemory, readings: &[u64]) -> Vec<String> {
        let of = |used: &u64| memory.events_of_reading(0, *used, |_| StackId::NONE);
        let events: Vec<_> = readings.iter().flat_map(of).collect();
        events
            .iter()
            .map(|event| match event {
                EventKind::Alloc { block, .. } => format!("+{}", block.bytes.get()),
                EventKind::Free { block: None, .. } => "-".to_owned(),
                EventKind::Free { block: Some(older), .. } => format!("older -{}", older.bytes.get()),
                EventKind::Shrink { bytes, .. } => format!("={}", bytes.get()),
                other => format!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn readings_become_rises_and_falls() {
        let mut memory = GraphMemory::UNREAD;
        assert_eq!(events(&mut memory, &[0, 0, 64, 64, 0]), ["+64", "-"]);
        assert_eq!(events(&mut memory, &[32, 96, 128, 64]), ["+32", "+64", "+32", "-"], "a rise of 64 went");
        assert_eq!(memory.rises.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>(), [32, 32]);
        assert_eq!(events(&mut memory, &[48, 16, 0]), ["=16", "-", "-"], "the newest first, then one of that size");
        assert!(memory.rises.is_empty());
    }

    #[test]
    fn memory_mapped_before_the_subscription_is_older() {
        let mut memory = GraphMemory::UNREAD;
        assert_eq!(events(&mut memory, &[64, 96, 80, 32]), ["+32", "=16", "-", "older -32"]);
        memory.unread = true;
        assert_eq!(events(&mut memory, &[64, 0]), ["older -64"], "it rose before the subscription");
        assert_eq!(events(&mut memory, &[32]), ["+32"]);
        memory.unread = true;
        assert_eq!(events(&mut memory, &[0]), ["-"], "it fell before the subscription");
    }
}
