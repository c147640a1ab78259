//! Where blocks come from. Blocks that agree in everything but their size and their thread share one origin, so that a block
//! needs to remember nothing but its number. Threads that do the same share it too: their events are counted as one run.

use std::collections::{HashMap, HashSet};

use super::{peaks::Saved, tree::SpotId};
use crate::model::{MemKind, StackId};

/// What blocks of one origin have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Origin {
    pub(crate) spot: SpotId,
    pub(crate) stack: StackId,
    /// The meter of the device.
    pub(super) meter: u16,
    pub(crate) kind: MemKind,
    /// See [`Block::context`](crate::model::Block::context).
    pub(crate) context: u8,
}

/// The number of an origin; never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct OriginId(pub(super) u32);

/// A block has room for so many numbers.
pub(super) const MOST: usize = 1 << 24;
/// So many are not worth a sweep.
const FEW: usize = 1 << 12;

/// Origins, and what of them is live.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Origins {
    /// By number.
    all: Vec<Held>,
    known: HashMap<Origin, OriginId>,
    unused: Vec<OriginId>,
    /// When there are so many, those of which nothing is live are forgotten.
    sweep_at: usize,
}

/// What is live of an origin, but for what the newest run came to: that is ended before this is read or origins are swept.
/// One lies in one line of the cache.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(super) struct Held {
    pub(super) origin: Origin,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// What was live of it at peaks.
    pub(super) saved: Saved,
}

const _: () = assert!(size_of::<Held>() == 64);

impl Held {
    fn new(origin: Origin) -> Self {
        Self { origin, blocks: 0, bytes: 0, saved: Saved::default() }
    }
}

impl Default for Origins {
    fn default() -> Self {
        let nobody =
            Origin { spot: SpotId::NONE, stack: StackId::NONE, meter: u16::MAX, kind: MemKind::Device, context: 0 };
        let nobody = Held::new(nobody);
        Self { all: vec![nobody], known: HashMap::new(), unused: Vec::new(), sweep_at: FEW }
    }
}

impl Origins {
    /// The number of an origin. Numbers of which nothing is live may mean something else afterwards if this says so, but
    /// for those that are in use, which are asked for then, and those that a peak needs.
    pub(super) fn number(
        &mut self,
        mut origin: Origin,
        in_use: impl FnOnce() -> HashSet<OriginId>,
        is_needed: impl Fn(&Held) -> bool,
    ) -> (OriginId, bool) {
        if let Some(known) = self.known.get(&origin) {
            return (*known, false);
        }
        let full = self.known.len() >= self.sweep_at;
        if full {
            self.sweep(&in_use(), is_needed);
        }
        if self.known.len() >= MOST / 2 {
            // Better less said of it than not counted.
            origin = Origin { stack: StackId::NONE, ..origin };
            if let Some(known) = self.known.get(&origin) {
                return (*known, full);
            }
        }
        let held = Held::new(origin);
        let number = if let Some(number) = self.unused.pop() {
            self.all[number.0 as usize] = held;
            number
        } else {
            self.all.push(held);
            OriginId(u32::try_from(self.all.len() - 1).expect("there are fewer than 2^24"))
        };
        self.known.insert(origin, number);
        (number, full)
    }

    fn sweep(&mut self, in_use: &HashSet<OriginId>, is_needed: impl Fn(&Held) -> bool) {
        let Self { all, known, unused, .. } = self;
        known.retain(|_, number| {
            let held = &all[number.0 as usize];
            let keep = held.blocks > 0 || in_use.contains(number) || is_needed(held);
            if !keep {
                unused.push(*number);
            }
            keep
        });
        self.sweep_at = (self.known.len() * 2).max(FEW);
    }

    #[inline]
    pub(super) fn held(&mut self, number: OriginId) -> &mut Held {
        &mut self.all[number.0 as usize]
    }

    pub(super) fn get(&self, number: OriginId) -> &Origin {
        &self.all[number.0 as usize].origin
    }

    /// So many of all, from this number on, with what was live of them at peaks.
    pub(super) fn range(&self, first: usize, count: usize) -> Option<&[Held]> {
        self.all.get(first..).filter(|rest| !rest.is_empty()).map(|rest| &rest[..count.min(rest.len())])
    }
}
