//! The memory that the driver takes for itself, with the names of its causes.

use std::{cmp::Reverse, sync::Arc};

use super::{LedgerView, Names, Paths};
use crate::{
    ledger::{KnownBlock, ScopePeriod},
    model::{Bytes, Device, Label},
    report::DriverMemory,
};

/// Returns what the driver took for itself and has not returned, the largest first: all, or what it took in one scope. `labels` returns the
/// labels of the blocks that it gets.
pub fn driver_memory(
    view: &dyn LedgerView,
    names: &dyn Names,
    device: Option<Device>,
    within: Option<&ScopePeriod>,
    labels: impl FnOnce(&[KnownBlock]) -> Vec<Option<Arc<Label>>>,
) -> Vec<DriverMemory> {
    let mut blocks = view.taken_by_driver(within);
    blocks.retain(|block| device.is_none_or(|device| block.device == device));
    blocks.sort_by_key(|block| block.number);
    let (paths, labels) = (Paths::now(view, names), labels(&blocks));
    let mut rows: Vec<DriverMemory> = Vec::new();
    for (block, label) in blocks.iter().zip(labels) {
        let (line, path) = (names.stack(block.group.stack).line, paths.names_of(block.group.node));
        let row = DriverMemory::new(block.group.kind, label.as_deref(), line, path, block.bytes);
        match rows.iter_mut().find(|known| known.is_alike(&row)) {
            Some(known) => (known.bytes, known.count) = (known.bytes + row.bytes, known.count + 1),
            None => rows.push(row),
        }
    }
    rows.retain(|row| row.bytes > Bytes::ZERO);
    rows.sort_by_key(|row| Reverse(row.bytes));
    rows
}
