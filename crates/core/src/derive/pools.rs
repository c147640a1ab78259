//! Registered pools.

use std::collections::HashMap;

use super::{LedgerView, Names};
use crate::{
    ledger::{KnownBlock, KnownPool, WrongCalls},
    model::{Bytes, Key, MemKind, PoolId},
    report::RegisteredPool,
};

/// The largest number of live blocks in a search for overlapping parts.
const MOST_BLOCKS: u64 = 1 << 18;

/// Returns all pools that have memory, or wrong calls.
pub fn pools(view: &dyn LedgerView, names: &dyn Names) -> Vec<RegisteredPool> {
    let known = view.pools();
    let overlaps = Overlaps::of(view, &known);
    let pools = known.iter().map(|known| registered_pool(known, &overlaps, names));
    pools.filter(|pool| !pool.is_empty()).collect()
}

/// Returns a pool as reports show it.
pub fn registered_pool(known: &KnownPool, overlaps: &Overlaps, names: &dyn Names) -> RegisteredPool {
    let KnownPool { pool, device, parts, part_bytes, reserved, reported, wrong, read_early, .. } = *known;
    let WrongCalls { unknown, doubled, outside, late, below } = wrong;
    let (overlapping, counted_twice) = overlaps.0.get(&pool).copied().unwrap_or_default();
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
        below,
        overlapping,
        counted_twice: Bytes::new(counted_twice),
    }
}

/// The live parts of each pool that start inside another part of it: their number, and the bytes that are in more than one part.
///
/// The ledger finds blocks by their keys and does not sort them, because that would make a part several times as expensive. Overlaps are
/// therefore found when a report is made.
#[derive(Clone, Debug, Default)]
pub struct Overlaps(HashMap<PoolId, (u64, u64)>);

impl Overlaps {
    /// Finds the overlapping parts of these pools.
    pub fn of(view: &dyn LedgerView, pools: &[KnownPool]) -> Self {
        let mut overlaps = Self::default();
        let blocks = || view.stats().iter().flat_map(|stats| &stats.kinds).map(|kind| kind.blocks.current).sum::<u64>();
        if pools.iter().all(|pool| pool.parts < 2) || blocks() > MOST_BLOCKS {
            return overlaps;
        }
        let mut parts = view.blocks(None);
        parts.retain(|block| block.group.kind == MemKind::Part && block.bytes > Bytes::ZERO);
        parts.sort_unstable_by_key(|part| (part.group.pool, part.key.address(), part.number));
        // The part that reaches farthest.
        let mut farthest: Option<(&KnownBlock, u64)> = None;
        for part in &parts {
            let (address, pool) = (part.key.address(), part.group.pool);
            let end = address.saturating_add(part.bytes.get());
            if let Some((other, reach)) = farthest.filter(|(other, _)| other.group.pool == pool)
                && address < reach
                // Other threads may have freed the one and allocated the other since the list was started.
                && [other, part, other].iter().all(|of| is_live(view, of.key, of.number))
            {
                let (count, bytes) = overlaps.0.entry(pool).or_default();
                *count += 1;
                *bytes += reach.min(end) - address;
            }
            if farthest.is_none_or(|(other, reach)| other.group.pool != pool || reach < end) {
                farthest = Some((part, end));
            }
        }
        overlaps
    }

    /// Notes that this many parts of a pool overlapped another one. Some of them may be freed.
    pub fn note(&mut self, pool: PoolId, found: u64) {
        if found > 0 {
            let (count, _) = self.0.entry(pool).or_default();
            *count = found.max(*count);
        }
    }
}

fn is_live(view: &dyn LedgerView, key: Key, number: u64) -> bool {
    view.block(key).is_some_and(|block| block.number == number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        inbox::Inbox,
        model::{Block, Device, EventKind, Family},
    };

    /// Random parts of two pools, compared with a list of the pools of each byte.
    #[test]
    fn bytes_in_several_parts_are_found() {
        for seed in 1..=if cfg!(miri) { 5 } else { 500_u64 } {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut random = |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % below
            };
            let inbox: Inbox = Inbox::new();
            let device = Device { family: Family::Cuda, ordinal: 0 };
            for pool in [1, 2].map(PoolId) {
                inbox.post(&EventKind::PoolRegistered { pool, device });
            }
            let mut live = HashMap::<(u8, u64), u64>::new();
            for _ in 0..40 {
                let (pool, address, bytes) = (1 + u8::from(random(2) > 0), random(100), random(12));
                let key = Key::of_part(PoolId(pool), address);
                if random(3) == 0 {
                    live.remove(&(pool, address));
                    inbox.post(&EventKind::Free { key, block: None });
                } else {
                    live.insert((pool, address), bytes);
                    let block = Block { context: pool, ..Block::new(device, Bytes::new(bytes), MemKind::Part) };
                    inbox.post(&EventKind::Alloc { key, block });
                }
            }
            let overlaps = Overlaps::of(&inbox, &inbox.pools());
            for pool in [1, 2] {
                let parts = || live.iter().filter(|((of, _), bytes)| *of == pool && **bytes > 0);
                let in_part =
                    |byte: u64| parts().filter(|((_, at), bytes)| (*at..at + **bytes).contains(&byte)).count();
                let twice = (0..112).map(|byte| in_part(byte).saturating_sub(1) as u64).sum::<u64>();
                let starts_inside = parts().filter(|((_, address), _)| in_part(*address) > 1).count() as u64;
                let expected = (twice > 0).then_some((starts_inside, twice));
                assert_eq!(overlaps.0.get(&PoolId(pool)).copied(), expected, "seed {seed}, pool {pool}");
            }
        }
    }
}
