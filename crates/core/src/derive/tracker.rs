//! The blocks on a device, grouped by their common properties.

use std::{collections::HashMap, sync::Arc};

use super::{LedgerView, Names, Paths, Stack};
use crate::{
    ledger::{AllocGroup, KnownBlock},
    model::{Device, Label},
    report::{AllocatedAt, Groups, Sort, What, place_of},
};

/// Returns the live blocks of a device, grouped. `labels` returns the labels of the blocks that it gets.
pub fn tracked_groups(
    view: &dyn LedgerView,
    names: &dyn Names,
    device: Device,
    labels: impl FnOnce(&[KnownBlock]) -> Vec<Option<Arc<Label>>>,
) -> Groups {
    let blocks = view.blocks(None);
    let paths = Paths::now(view, names);
    let labels = labels(&blocks);
    let mut known = HashMap::new();
    let mut groups = Groups::new();
    for (block, label) in blocks.iter().zip(labels).filter(|(block, _)| block.device == device) {
        let AllocGroup { node, stack, kind, .. } = block.group;
        let what = match label {
            Some(label) => What::Labelled(label),
            // No lock is held here, because resolving a stack reads files.
            None => What::Unlabelled(Arc::clone(known.entry((node, stack)).or_insert_with(|| {
                let Stack { line, library, .. } = names.stack(stack);
                Arc::new(AllocatedAt { path: paths.full_names_of(node), line, library })
            }))),
        };
        let sort = Sort { each: block.bytes, kind: place_of(kind), what };
        *groups.entry(sort).or_default() += 1;
    }
    groups
}
