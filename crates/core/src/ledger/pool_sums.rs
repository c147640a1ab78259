//! The sums of each pool.

use super::{delta::GroupDelta, groups::AllocGroup, meters::UsageLevel, stats::add_signed};
use crate::model::{MemKind, PoolId};

/// The sums of all pools, indexed by pool id. They outlive a pool: its id is reused after its last block was freed, and if that
/// free was missed, the block still counts for the id.
#[derive(Debug, Default)]
pub(super) struct PoolSums(Vec<PoolSum>);

/// The sums of one pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PoolSum {
    pub(super) parts: u64,
    pub(super) part_bytes: u64,
    pub(super) block_bytes: u64,
}

impl PoolSums {
    /// Returns the sums of a pool.
    pub(super) fn of(&self, pool: PoolId) -> PoolSum {
        self.0.get(usize::from(pool.0)).copied().unwrap_or_default()
    }

    /// Returns the number of parts of all pools.
    pub(super) fn parts(&self) -> u64 {
        self.0.iter().map(|pool| pool.parts).sum()
    }

    /// Applies the delta of a group to the driver's view and to its pool. Returns whether the program's view includes the group, too.
    #[cold]
    pub(super) fn count_for_views(&mut self, driver: &mut UsageLevel, group: &AllocGroup, delta: &GroupDelta) -> bool {
        if group.kind != MemKind::Part {
            driver.apply(driver.in_use.saturating_add(delta.bytes.high), delta.bytes.net);
        }
        if group.has_pool() {
            let at = usize::from(group.pool.0);
            if at >= self.0.len() {
                self.0.resize(at + 1, PoolSum::default());
            }
            let PoolSum { parts, part_bytes, block_bytes } = &mut self.0[at];
            if group.kind == MemKind::Part {
                *parts = add_signed(*parts, delta.blocks.net);
                *part_bytes = add_signed(*part_bytes, delta.bytes.net);
            } else {
                *block_bytes = add_signed(*block_bytes, delta.bytes.net);
            }
        }
        group.is_in_program()
    }
}
