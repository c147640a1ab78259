//! The rows of the driver's memory on one device. Each is a block in the ledger.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    super::recorder::{label, record},
    events::cuda_device,
};
use crate::model::{Answer, Block, Bytes, EventKind, Key, Label, MemKind, Space, StackId};

/// The id of the next row. Ids are never reused.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What a row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The device as a whole.
    Device,
    /// An executable graph.
    Graph(u64),
    /// Graphs that were destroyed. The driver keeps their memory for later graphs.
    DestroyedGraphs,
    /// A stream-ordered pool.
    Pool(u64),
}

#[derive(Clone, Copy, Debug)]
struct Row {
    id: u64,
    kind: MemKind,
    owner: Owner,
    bytes: u64,
    /// The bytes that a pool has reserved.
    reserved: u64,
}

impl Row {
    fn key(&self) -> Key {
        Key::new(Space::Driver, self.id)
    }
}

/// The rows, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Rows(Vec<Row>);

impl Rows {
    /// Returns the bytes of all rows except those of pools, whose memory counts as reserved by the pools.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().filter(|row| row.kind != MemKind::PoolCache).map(|row| row.bytes).sum()
    }

    /// Returns the bytes of the rows whose cause is known, without pools. A row without a cause may be an allocation that was not recorded yet.
    pub(super) fn known_bytes(&self) -> u64 {
        self.bytes() - self.0.iter().filter(|row| row.kind == MemKind::NotKnown).map(|row| row.bytes).sum::<u64>()
    }

    /// Returns whether a context was created, or existed before the recording.
    pub(super) fn have_context(&self) -> bool {
        self.0.iter().any(|row| matches!(row.kind, MemKind::Context | MemKind::Earlier))
    }

    /// Adds a row, unless it has no bytes.
    pub(super) fn grow(&mut self, ordinal: u32, kind: MemKind, bytes: u64, stack: StackId, name: Option<&Label>) {
        if bytes > 0 {
            self.add(ordinal, (kind, Owner::Device), bytes, stack, name);
        }
    }

    /// Adds an executable graph. The driver takes whole pages for several graphs, so `bytes` may be 0.
    pub(super) fn add_graph(&mut self, ordinal: u32, graph: u64, bytes: u64, stack: StackId) {
        self.add(ordinal, (MemKind::ExecutableGraphs, Owner::Graph(graph)), bytes, stack, None);
    }

    /// Removes an executable graph. What the driver keeps of its memory belongs to destroyed graphs from now on.
    pub(super) fn destroy_graph(&mut self, ordinal: u32, graph: u64, returned: u64) {
        let Some(at) = self.0.iter().position(|row| row.owner == Owner::Graph(graph)) else {
            return self.shrink(MemKind::ExecutableGraphs, returned);
        };
        let row = self.0.remove(at);
        record_free(&row);
        let kept = row.bytes.saturating_sub(returned);
        self.shrink(MemKind::ExecutableGraphs, returned - (row.bytes - kept));
        let of_destroyed = (MemKind::ExecutableGraphs, Owner::DestroyedGraphs);
        let before = self.0.iter().position(|row| row.owner == Owner::DestroyedGraphs);
        match before {
            Some(at) => self.resize(at, self.0[at].bytes + kept),
            None if kept > 0 => {
                self.add(ordinal, of_destroyed, kept, StackId::NONE, Some(&Label::named("of destroyed graphs")));
            }
            None => {}
        }
    }

    /// Sets the unused memory of a pool. A reader of the recording finds out how much is reserved from the unused memory and the live blocks
    /// at this event, so that there is an event also if only the reserved memory has changed.
    pub(super) fn set_pool(
        &mut self,
        ordinal: u32,
        (pool, reserved): (u64, u64),
        bytes: u64,
        name: impl FnOnce() -> Label,
    ) {
        let find = |rows: &Self| rows.0.iter().position(|row| row.owner == Owner::Pool(pool));
        let Some(at) = find(self) else {
            if reserved > 0 {
                self.add(ordinal, (MemKind::PoolCache, Owner::Pool(pool)), bytes, StackId::NONE, Some(&name()));
                if let Some(at) = find(self) {
                    self.0[at].reserved = reserved;
                }
            }
            return;
        };
        let row = &mut self.0[at];
        if (row.bytes, row.reserved) != (bytes, reserved) {
            (row.bytes, row.reserved) = (bytes, reserved);
            record(&EventKind::Shrink { key: row.key(), bytes: Bytes::new(bytes) });
        }
    }

    /// Removes the pools that do not exist any more.
    pub(super) fn keep_pools(&mut self, exists: impl Fn(u64) -> bool) {
        for at in (0..self.0.len()).rev() {
            if let Owner::Pool(pool) = self.0[at].owner
                && !exists(pool)
            {
                record_free(&self.0.remove(at));
            }
        }
    }

    /// Removes this many bytes: first from rows of this kind, then from any. A row of exactly this size is removed first, then the latest
    /// rows.
    pub(super) fn shrink(&mut self, preferred: MemKind, mut bytes: u64) {
        while bytes > 0 {
            let is_candidate = |row: &Row| row.bytes > 0 && row.kind != MemKind::PoolCache;
            let found = [true, false].into_iter().find_map(|only_preferred| {
                let fits = |row: &Row| is_candidate(row) && (!only_preferred || row.kind == preferred);
                let alike = self.0.iter().rposition(|row| fits(row) && row.bytes == bytes);
                alike.or_else(|| self.0.iter().rposition(fits))
            });
            let Some(at) = found else { return };
            let taken = self.0[at].bytes.min(bytes);
            bytes -= taken;
            self.resize(at, self.0[at].bytes - taken);
        }
    }

    fn add(&mut self, ordinal: u32, (kind, owner): (MemKind, Owner), bytes: u64, stack: StackId, name: Option<&Label>) {
        let row = Row { id: NEXT_ID.fetch_add(1, Relaxed), kind, owner, bytes, reserved: 0 };
        let block = Block { stack, ..Block::new(cuda_device(ordinal), Bytes::new(bytes), kind) };
        record(&EventKind::Alloc { key: row.key(), block });
        if let Some(name) = name {
            // The block is live, and the label is only a name: the error would be that the ledger is not used.
            let _ = label(row.key(), name, 0);
        }
        self.0.push(row);
    }

    /// Changes the size of a row. A row without bytes ends, unless it is a graph, which exists until it is destroyed.
    fn resize(&mut self, at: usize, bytes: u64) {
        if self.0[at].bytes == bytes {
            return;
        }
        self.0[at].bytes = bytes;
        let row = self.0[at];
        if bytes == 0 && !matches!(row.owner, Owner::Graph(_)) {
            self.0.remove(at);
            return record_free(&row);
        }
        record(&EventKind::Shrink { key: row.key(), bytes: Bytes::new(bytes) });
    }
}

fn record_free(row: &Row) {
    if record(&EventKind::Free { key: row.key(), block: None }) == Answer::Untracked {
        record(&EventKind::FreeFailed);
    }
}
