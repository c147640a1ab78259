//! The memory of graphs: what each device has mapped for nodes that allocate.
//!
//! The driver says one figure of each device. It rises when a graph is launched that needs more than what is mapped, within the
//! call, and falls when it is trimmed. To free a block of a graph or to destroy a graph changes nothing: what was mapped for it
//! stays for the next launch. So the figure is read where it can have changed, and a rise is a block.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use once_cell::sync::Lazy;

use super::{
    driver::{cuda, lost},
    stacks, tell,
};
use crate::{
    model::{Answer, Block, Bytes, EventKind, Key, MemKind, Space, StackId},
    sys::{calls, cuda},
};

/// What a device has mapped, as the fold was told.
#[derive(Debug)]
struct Mapped {
    /// Nobody has read it since somebody listens.
    unread: bool,
    /// What was mapped when nobody listened.
    older: u64,
    /// The rises of which something is left, each with its name.
    rises: Vec<(u64, u64)>,
}

static GRAPHS: Lazy<Mutex<BTreeMap<u32, Mapped>>> = Lazy::new(Mutex::default);

/// A call was heard that can change what is mapped.
static AT_WORK: AtomicBool = AtomicBool::new(false);

/// The next rise's name. None is given out again.
static NEXT_NAME: AtomicU64 = AtomicU64::new(1);

/// Locked from a reading until the fold was told of it, so that readings are told in their order.
fn graphs() -> MutexGuard<'static, BTreeMap<u32, Mapped>> {
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nobody listens for a while.
pub(super) fn forget() {
    graphs().values_mut().for_each(|mapped| mapped.unread = true);
}

/// Some graph has a node that allocates, so that each launch has to be looked at.
pub(super) fn allocate() {
    calls::record_graph_launches();
}

/// A call can change what is mapped, on the device of its context or on those of a graph's nodes; it is about to be made, or done.
#[cold]
pub(super) fn launched(here: Option<u32>, done: bool) {
    AT_WORK.store(true, Relaxed);
    let mut graphs = graphs();
    if let Some(ordinal) = here
        && let Entry::Vacant(entry) = graphs.entry(ordinal)
    {
        entry.insert(Mapped::UNREAD);
    }
    let first = !done && calls::launches_are_unrecorded();
    for (ordinal, mapped) in graphs.iter_mut().filter(|(_, mapped)| done || mapped.unread || first) {
        mapped.read(*ordinal, stacks::here);
    }
}

/// A trace of that device is about to begin, or to be read.
pub(super) fn look_at(ordinal: u32) {
    let mut graphs = graphs();
    let mapped = graphs.entry(ordinal).or_insert(Mapped::UNREAD);
    if mapped.unread || AT_WORK.load(Relaxed) || calls::launches_are_unrecorded() {
        mapped.read(ordinal, |_| StackId::NONE);
    }
}

impl Mapped {
    const UNREAD: Self = Self { unread: true, older: 0, rises: Vec::new() };

    fn read(&mut self, ordinal: u32, stack: impl FnOnce(u64) -> StackId) {
        let Ok(used) = cuda::graph_memory(ordinal) else { return lost() };
        let (was_unread, used) = (self.unread, used.unwrap_or(0));
        // A graph that was built when nobody listened allocates after all. A launch that nobody looked at did this, at some
        // moment.
        if used > self.told() && !calls::record_graph_launches() && !was_unread {
            lost();
        }
        for fact in self.take(ordinal, used, stack) {
            if tell(&fact) == Answer::Untracked {
                tell(&EventKind::Untracked);
            }
        }
    }

    /// What is to be told of a reading.
    fn take(&mut self, ordinal: u32, used: u64, stack: impl FnOnce(u64) -> StackId) -> Vec<EventKind> {
        if mem::take(&mut self.unread) {
            self.older += used.saturating_sub(self.told());
        }
        let told = self.told();
        if used <= told {
            return self.fall(ordinal, told - used);
        }
        let (name, rise) = (NEXT_NAME.fetch_add(1, Relaxed), used - told);
        self.rises.push((name, rise));
        let block = Block { stack: stack(rise), ..Block::new(cuda(ordinal), Bytes::new(rise), MemKind::Graph) };
        vec![EventKind::Alloc { key: Key::new(Space::Graph, name), block }]
    }

    fn told(&self) -> u64 {
        self.older + self.rises.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// So much is not mapped any more. The driver does not say for which graph it was: a rise of that size is taken to be what
    /// went, else the newest ones are.
    fn fall(&mut self, ordinal: u32, mut bytes: u64) -> Vec<EventKind> {
        let mut facts = Vec::new();
        while bytes > 0 {
            let alike = self.rises.iter().rposition(|(_, rise)| *rise == bytes);
            let Some(at) = alike.or_else(|| self.rises.len().checked_sub(1)) else { break };
            let (name, rise) = &mut self.rises[at];
            let key = Key::new(Space::Graph, *name);
            if *rise > bytes {
                *rise -= bytes;
                facts.push(EventKind::Shrink { key, bytes: Bytes::new(*rise) });
                return facts;
            }
            bytes -= *rise;
            self.rises.remove(at);
            facts.push(EventKind::Free { key, block: None });
        }
        if bytes > 0 {
            self.older = self.older.saturating_sub(bytes);
            let block = Some(Block::new(cuda(ordinal), Bytes::new(bytes), MemKind::Graph));
            facts.push(EventKind::Free { key: Key::new(Space::Graph, 0), block });
        }
        facts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is told of a row of readings, in bytes: a rise, a fall, what is left of a rise, what is older.
    fn told(mapped: &mut Mapped, readings: &[u64]) -> Vec<String> {
        let of = |used: &u64| mapped.take(0, *used, |_| StackId::NONE);
        let facts: Vec<_> = readings.iter().flat_map(of).collect();
        facts
            .iter()
            .map(|fact| match fact {
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
        let mut mapped = Mapped::UNREAD;
        assert_eq!(told(&mut mapped, &[0, 0, 64, 64, 0]), ["+64", "-"]);
        assert_eq!(told(&mut mapped, &[32, 96, 128, 64]), ["+32", "+64", "+32", "-"], "a rise of 64 went");
        assert_eq!(mapped.rises.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>(), [32, 32]);
        assert_eq!(told(&mut mapped, &[48, 16, 0]), ["=16", "-", "-"], "the newest first, then one of that size");
        assert!(mapped.rises.is_empty());
    }

    #[test]
    fn what_was_mapped_before_is_older() {
        let mut mapped = Mapped::UNREAD;
        assert_eq!(told(&mut mapped, &[64, 96, 80, 32]), ["+32", "=16", "-", "older -32"]);
        mapped.unread = true;
        assert_eq!(told(&mut mapped, &[64, 0]), ["older -64"], "nobody listened when it rose");
        assert_eq!(told(&mut mapped, &[32]), ["+32"]);
        mapped.unread = true;
        assert_eq!(told(&mut mapped, &[0]), ["-"], "nobody listened when it fell");
    }
}
