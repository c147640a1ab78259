//! Live blocks, with the names of their origins.

use std::cmp::Reverse;

use super::{LedgerView, Names, Paths};
use crate::{
    ledger::{KnownBlock, ScopePeriod},
    model::Family,
    report::LiveBlock,
};

/// Returns live blocks with the names of their origins, the largest first: all, or those that were allocated in one
/// scope.
pub fn live_blocks(view: &dyn LedgerView, names: &dyn Names, within: Option<&ScopePeriod>) -> Vec<LiveBlock> {
    let mut known = view.blocks(within);
    // The order is the same in each run: among equal blocks, the one that was allocated first comes first.
    known.sort_by_key(|block| block.number);
    let paths = Paths::now(view, names);
    let mut blocks: Vec<_> = known.iter().map(|block| live_block(block, &paths, names)).collect();
    blocks.sort_by(|a, b| {
        let order = |block: &LiveBlock| (Reverse(block.bytes), block.time);
        order(a).cmp(&order(b)).then_with(|| a.path.cmp(&b.path))
    });
    blocks
}

fn live_block(known: &KnownBlock, paths: &Paths, names: &dyn Names) -> LiveBlock {
    let stack = names.stack(known.group.stack);
    LiveBlock {
        id: known.key.get(),
        device: known.device.ordinal,
        simulated: known.device.family == Family::Simulated,
        bytes: known.bytes,
        kind: known.group.kind,
        path: paths.names_of(known.group.node),
        scope_place: paths.place_of(known.group.node),
        library: stack.library_as_place().map(str::to_owned),
        line: stack.line,
        caller: stack.caller,
        backtrace: stack.frames,
        thread: known.thread.0,
        time: known.time,
    }
}
