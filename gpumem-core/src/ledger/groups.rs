//! Where blocks come from. Blocks that agree in everything but their size and their thread share one group, so that a block
//! needs to remember nothing but its number. Threads that do the same share it too: their events are counted as one pending.

use std::collections::{HashMap, HashSet};

use super::{peaks::Saved, tree::NodeId};
use crate::model::{MemKind, StackId};

/// What blocks of one group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AllocGroup {
    pub node: NodeId,
    pub stack: StackId,
    /// The meter of the device.
    pub(super) meter: u16,
    pub kind: MemKind,
    /// See [`Block::context`](crate::model::Block::context).
    pub context: u8,
}

/// The number of a group; never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct GroupId(pub(super) u32);

/// A block has room for so many numbers.
pub(super) const MOST: usize = 1 << 24;
/// So many are not worth a sweep.
const FEW: usize = 1 << 12;
/// So many are looked at in one go, for half as many new ones.
const PART: usize = 1 << 8;

/// All allocation groups, and what of them is live.
#[derive(Debug)]
#[repr(C)]
pub(super) struct AllocGroups {
    /// By number.
    all: Vec<GroupState>,
    known: HashMap<AllocGroup, GroupId>,
    unused: Vec<GroupId>,
    /// The group that was looked at last, whether it can be forgotten.
    looked_at: usize,
    /// New ones since then.
    new: usize,
}

/// What is live of a group, but for what the newest pending came to: that is ended before this is read or groups are swept.
/// One lies in one line of the cache.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct GroupState {
    pub(super) group: AllocGroup,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// What was live of it at peaks.
    pub(super) saved: Saved,
}

const _: () = assert!(size_of::<GroupState>() == 64);

impl GroupState {
    fn new(group: AllocGroup) -> Self {
        Self { group, blocks: 0, bytes: 0, saved: Saved::default() }
    }
}

impl Default for AllocGroups {
    fn default() -> Self {
        let nobody =
            AllocGroup { node: NodeId::NONE, stack: StackId::NONE, meter: u16::MAX, kind: MemKind::Device, context: 0 };
        let nobody = GroupState::new(nobody);
        Self { all: vec![nobody], known: HashMap::new(), unused: Vec::new(), looked_at: 0, new: 0 }
    }
}

impl AllocGroups {
    /// The number of a group. A number of which nothing is live may mean something else afterwards, but for those that are in
    /// use, which are asked for then, and those that a peak needs.
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
        if self.unused.is_empty() && self.all.len() > FEW && self.new >= PART / 2 {
            self.sweep(&in_use(), is_needed);
        }
        if self.known.len() >= MOST / 2 {
            // Better less said of it than not counted.
            group = AllocGroup { stack: StackId::NONE, ..group };
            if let Some(known) = self.known.get(&group) {
                return *known;
            }
        }
        let held = GroupState::new(group);
        let number = if let Some(number) = self.unused.pop() {
            self.all[number.0 as usize] = held;
            number
        } else {
            self.all.push(held);
            GroupId(u32::try_from(self.all.len() - 1).expect("there are fewer than 2^24"))
        };
        self.known.insert(group, number);
        number
    }

    /// Forgets those of the next groups of which nothing is live, when all numbers are given out. Others wait meanwhile, so these
    /// are few; there are never more than about twice as many groups as are needed, since two are looked at for each new one.
    fn sweep(&mut self, in_use: &HashSet<GroupId>, is_needed: impl Fn(&GroupState) -> bool) {
        self.new = 0;
        let Self { all, known, unused, looked_at, .. } = self;
        for _ in 0..PART {
            // Number 0 is none.
            *looked_at = *looked_at % (all.len() - 1) + 1;
            let (held, number) = (&all[*looked_at], GroupId(u32::try_from(*looked_at).unwrap_or(0)));
            if held.blocks == 0 && !in_use.contains(&number) && !is_needed(held) {
                known.remove(&held.group);
                unused.push(number);
            }
        }
    }

    /// How many numbers were given out, to groups that are known or forgotten.
    #[cfg(test)]
    pub(super) fn numbers(&self) -> usize {
        self.all.len()
    }

    #[inline]
    pub(super) fn held(&mut self, number: GroupId) -> &mut GroupState {
        &mut self.all[number.0 as usize]
    }

    pub(super) fn get(&self, number: GroupId) -> &AllocGroup {
        &self.all[number.0 as usize].group
    }

    /// So many of all, from this number on, with what was live of them at peaks.
    pub(super) fn range(&self, first: usize, count: usize) -> Option<&[GroupState]> {
        self.all.get(first..).filter(|rest| !rest.is_empty()).map(|rest| &rest[..count.min(rest.len())])
    }
}
