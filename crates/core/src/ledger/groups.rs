//! Allocation groups. Blocks that agree in everything but size and thread share a group, so that a block stores only the group's
//! id. Threads that allocate in the same scope with the same stack share a group as well, so that their events share one pending
//! delta.

use std::collections::{HashMap, HashSet};

use super::{peaks::GroupHistory, tree::NodeId};
use crate::model::{MemKind, NumberHashBuilder, PoolId, StackId};

/// The common properties of the blocks of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocGroup {
    /// The scope path.
    pub node: NodeId,
    /// The stack; [`StackId::NONE`] if it was not recorded.
    pub stack: StackId,
    /// The meter of the device.
    pub(super) meter: u16,
    /// The kind of memory.
    pub kind: MemKind,
    /// See [`Block::context`](crate::model::Block::context).
    pub context: u8,
    /// The pool of parts, or the pool that blocks of the driver belong to; [`PoolId::NONE`] if they belong to none.
    pub pool: PoolId,
}

/// The id of a group; never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct GroupId(pub(super) u32);

/// A block has 24 bits for its group id.
pub(super) const MOST_GROUPS: usize = 1 << 24;
/// No sweep runs while there are at most this many groups.
const NO_SWEEP: usize = 1 << 12;
/// The number of groups that one sweep checks. A sweep starts after half as many new groups.
const SWEEP: usize = 1 << 8;

/// All allocation groups and the sums of their live blocks.
#[derive(Debug)]
#[repr(C)]
pub(super) struct AllocGroups {
    /// Group numbers are its indices.
    all: Vec<GroupState>,
    known: HashMap<AllocGroup, GroupId, NumberHashBuilder>,
    unused: Vec<GroupId>,
    /// The last group that a sweep looked at.
    swept: usize,
    /// New groups since that sweep.
    new: usize,
}

/// The live blocks of a group, without the pending delta: that is applied before this is read and before a sweep. The
/// alignment keeps it within one cache line.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct GroupState {
    pub(super) group: AllocGroup,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// Its bytes at peaks.
    pub(super) history: GroupHistory,
}

const _: () = assert!(size_of::<GroupState>() == 64);

impl GroupState {
    fn new(group: AllocGroup) -> Self {
        Self { group, blocks: 0, bytes: 0, history: GroupHistory::default() }
    }
}

impl Default for AllocGroups {
    fn default() -> Self {
        let no_group = AllocGroup {
            node: NodeId::NONE,
            stack: StackId::NONE,
            meter: u16::MAX,
            kind: MemKind::Device,
            context: 0,
            pool: PoolId::NONE,
        };
        let no_group = GroupState::new(no_group);
        Self { all: vec![no_group], known: HashMap::default(), unused: Vec::new(), swept: 0, new: 0 }
    }
}

impl AllocGroups {
    /// Returns the id of a group, and creates the group if it is new. This may start a sweep, which frees the ids of groups
    /// without live blocks. The sweep keeps the groups in `in_use`, which is called only then, and the groups that a peak needs
    /// (`is_needed`).
    pub(super) fn number(
        &mut self,
        mut group: AllocGroup,
        in_use: impl FnOnce() -> HashSet<GroupId>,
        is_needed: impl Fn(&GroupState) -> bool,
    ) -> GroupId {
        if let Some(known) = self.known.get(&group) {
            return *known;
        }
        self.new += 1;
        if self.unused.is_empty() && self.all.len() > NO_SWEEP && self.new >= SWEEP / 2 {
            self.sweep(&in_use(), is_needed);
        }
        if self.known.len() >= MOST_GROUPS / 2 {
            // There are too many groups. Those without a stack are few, and the block is still counted.
            group = AllocGroup { stack: StackId::NONE, ..group };
            if let Some(known) = self.known.get(&group) {
                return *known;
            }
        }
        let state = GroupState::new(group);
        let number = if let Some(number) = self.unused.pop() {
            self.all[number.0 as usize] = state;
            number
        } else {
            self.all.push(state);
            GroupId(u32::try_from(self.all.len() - 1).expect("there are fewer than 2^24"))
        };
        self.known.insert(group, number);
        number
    }

    /// Checks the next groups and forgets those that have no live blocks and are not needed. Other threads wait for a sweep, so
    /// each one checks only a few groups. There are two checks for each new group, so at most about twice as many groups exist as
    /// are needed.
    fn sweep(&mut self, in_use: &HashSet<GroupId>, is_needed: impl Fn(&GroupState) -> bool) {
        self.new = 0;
        let Self { all, known, unused, swept, .. } = self;
        for _ in 0..SWEEP {
            // Id 0 is not a group.
            *swept = *swept % (all.len() - 1) + 1;
            let (state, number) = (&all[*swept], GroupId(u32::try_from(*swept).unwrap_or(0)));
            if state.blocks == 0 && !in_use.contains(&number) && !is_needed(state) {
                known.remove(&state.group);
                unused.push(number);
            }
        }
    }

    /// Returns the number of groups, including forgotten ones.
    #[cfg(test)]
    pub(super) fn numbers(&self) -> usize {
        self.all.len()
    }

    #[inline]
    pub(super) fn state(&mut self, number: GroupId) -> &mut GroupState {
        &mut self.all[number.0 as usize]
    }

    pub(super) fn get(&self, number: GroupId) -> &AllocGroup {
        &self.all[number.0 as usize].group
    }

    /// Returns at most `count` groups starting at this number. `None` after the last.
    pub(super) fn range(&self, first: usize, count: usize) -> Option<&[GroupState]> {
        self.all.get(first..).filter(|rest| !rest.is_empty()).map(|rest| &rest[..count.min(rest.len())])
    }
}
