//! The live memory of a recording, by name.

use std::{cmp::Reverse, collections::HashMap, ops::Range};

use gpumem_core::{
    derive::{LedgerView, Names, Paths},
    export::shortened,
    ledger::{GroupUsage, KnownPool},
    model::{Device, MemKind, PoolId},
};
use gpumem_metrics::schema::{OTHER, largest};
use gpumem_recording::Follower;

use super::sample::{LiveSample, PoolSample};
use crate::history::{Origin, pay};

/// At most this many groups of blocks get names: the largest ones. The others are added up.
const MOST_GROUPS: usize = 1_000;
/// With more blocks than this, finding the room between them takes too long.
const MOST_BLOCKS: u64 = 100_000;
/// Label values are cut to this many columns.
pub(super) const WIDEST: usize = 128;

/// Returns the live memory of each device. Names cost time, so only the largest groups get them.
pub(super) fn live_memory(follower: &Follower, places: usize, mut most_text: u64) -> HashMap<Device, LiveSample> {
    #[derive(Default)]
    struct Sums {
        kinds: [u64; MemKind::ALL.len()],
        libraries: HashMap<String, u64>,
        scopes: HashMap<String, u64>,
        places: HashMap<(String, String), u64>,
    }
    let (ledger, definitions) = (follower.ledger(), follower.definitions());
    let mut groups = ledger.groups();
    groups.sort_by_key(|of| Reverse(of.bytes));
    let paths = Paths::now(ledger, definitions);
    let mut sums: HashMap<Device, Sums> = HashMap::new();
    for (at, GroupUsage { device, group, bytes, .. }) in groups.into_iter().enumerate() {
        // The driver took this by itself: nothing allocated it.
        if group.kind.is_taken_by_driver() {
            continue;
        }
        let (sums, bytes) = (sums.entry(device).or_default(), bytes.get());
        sums.kinds[group.kind as usize] += bytes;
        let length = || paths.length_of(group.node) as u64 + definitions.length_of(group.stack);
        let [library, scope, place] = if at < MOST_GROUPS && pay(&mut most_text, length()) {
            let origin = Origin::of(&group, &paths, definitions);
            [origin.library_or_program(), origin.scope(), origin.place()].map(|name| shortened(&name, WIDEST))
        } else {
            [OTHER, OTHER, OTHER].map(str::to_owned)
        };
        *sums.libraries.entry(library).or_default() += bytes;
        *sums.scopes.entry(scope.clone()).or_default() += bytes;
        *sums.places.entry((place, scope)).or_default() += bytes;
    }
    let holes = largest_holes(ledger);
    let mut pools: HashMap<Device, Vec<PoolSample>> = HashMap::new();
    for KnownPool { pool, device, part_bytes, reserved, .. } in ledger.pools() {
        pools.entry(device).or_default().push(PoolSample {
            name: shortened(&definitions.pool(pool), WIDEST),
            used: part_bytes.get(),
            reserved: reserved.get(),
            largest_hole: holes.get(&pool).copied(),
        });
    }
    let mut lives: HashMap<Device, LiveSample> = HashMap::new();
    for (device, sums) in sums {
        let kinds = MemKind::ALL.iter().zip(sums.kinds).filter(|(_, bytes)| *bytes > 0);
        let other = || OTHER.to_owned();
        lives.insert(
            device,
            LiveSample {
                kinds: kinds.map(|(kind, bytes)| (kind.name(), bytes)).collect(),
                libraries: largest(sums.libraries, places, other),
                scopes: largest(sums.scopes, places, other),
                places: largest(sums.places, places, || (other(), other())),
                pools: Vec::new(),
                driver: None,
            },
        );
    }
    for (device, mut pools) in pools {
        // If several pools have the same name, use the largest one.
        pools.sort_by_key(|pool| Reverse(pool.reserved));
        pools.truncate(places);
        lives.entry(device).or_default().pools = pools;
    }
    lives
}

/// Returns the largest unused range in the blocks of each pool whose block addresses are all known.
fn largest_holes(ledger: &dyn LedgerView) -> HashMap<PoolId, u64> {
    let mut pools = ledger.pools();
    let blocks = ledger.stats().iter().map(|stats| stats.on_device.blocks.current).sum::<u64>();
    if pools.is_empty() || blocks > MOST_BLOCKS {
        return HashMap::new();
    }
    let mut parts: Vec<(u64, u64)> = Vec::new();
    parts.extend(
        ledger.blocks(None).iter().filter(|block| block.key.is_part()).map(|of| (of.key.address(), of.bytes.get())),
    );
    parts.sort_unstable();
    let (mut holes, mut known): (HashMap<PoolId, u64>, HashMap<PoolId, u64>) = Default::default();
    for (pool, Range { start, end }) in ledger.pool_blocks() {
        *known.entry(pool).or_default() += end - start;
        let first = parts.partition_point(|(address, _)| *address < start);
        let inside = parts[first..].iter().take_while(|(address, _)| *address < end);
        let hole = holes.entry(pool).or_default();
        let rest = inside.fold(start, |at, (address, bytes)| {
            *hole = (*hole).max(address.saturating_sub(at));
            at.max(address.saturating_add(*bytes))
        });
        *hole = (*hole).max(end.saturating_sub(rest));
    }
    pools.retain(|pool| known.get(&pool.pool) == Some(&pool.block_bytes.get()));
    holes.retain(|pool, _| pools.iter().any(|of| of.pool == *pool));
    holes
}
