//! Registered pools.

use super::{LedgerView, Names};
use crate::{
    ledger::{KnownPool, WrongCalls},
    report::RegisteredPool,
};

/// Returns all pools that have memory, or that were called wrongly.
pub fn pools(view: &dyn LedgerView, names: &dyn Names) -> Vec<RegisteredPool> {
    let pools = view.pools().into_iter().map(|known| registered_pool(&known, names));
    pools.filter(|pool| !pool.is_empty()).collect()
}

/// Returns a pool as reports have it.
pub fn registered_pool(known: &KnownPool, names: &dyn Names) -> RegisteredPool {
    let KnownPool { pool, device, parts, part_bytes, reserved, reported, wrong, read_early, .. } = *known;
    let WrongCalls { unknown, doubled, outside, late } = wrong;
    RegisteredPool {
        name: names.pool(pool),
        device: device.ordinal,
        parts,
        used: part_bytes,
        reserved,
        reported,
        unknown_frees: unknown,
        doubled,
        outside,
        late,
        read_early,
    }
}
