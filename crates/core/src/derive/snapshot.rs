//! The live memory of a device at one moment.

use super::{LedgerView, Names, Paths, Stack};
use crate::{
    ledger::GroupUsage,
    model::{Bytes, Device, StackId},
    report::{Group, place_in_words},
};

/// The live memory of a device at one moment, and the scope paths.
#[derive(Clone, Debug)]
pub struct Snapshot {
    live: Vec<GroupUsage>,
    paths: Paths,
    /// The unused memory of the device's pools, by their names.
    caches: Vec<(String, Bytes)>,
}

impl Snapshot {
    /// Reads the current live memory.
    pub fn now(view: &dyn LedgerView, names: &dyn Names, device: Device) -> Self {
        // The groups are read first, so that each belongs to a known path.
        let mut live = view.groups();
        live.retain(|live| live.device == device && live.group.kind.is_on_device());
        let pools = view.pools().into_iter().filter(|pool| pool.device == device);
        let caches = pools.map(|pool| (names.pool(pool.pool), pool.unused().unwrap_or_default())).collect();
        Self { live, paths: Paths::now(view, names), caches }
    }

    /// Returns the live memory by its origin, and the unused memory of pools.
    pub fn groups(&self, stack: impl Fn(StackId) -> Stack) -> Vec<Group> {
        let group = |live: &GroupUsage| {
            let stack = stack(live.group.stack);
            Group {
                path: self.paths.names_of(live.group.node),
                library: stack.library_as_place().map(str::to_owned),
                place: place_in_words(stack.line.as_deref(), self.paths.place_of(live.group.node).as_deref()),
                caller: stack.caller,
                blocks: live.blocks,
                bytes: live.bytes,
                is_cache: false,
            }
        };
        let cache = |(name, bytes): &(String, Bytes)| Group {
            path: Vec::new(),
            library: Some(format!("cache of {name}")),
            place: None,
            caller: None,
            blocks: 0,
            bytes: *bytes,
            is_cache: true,
        };
        self.live.iter().map(group).chain(self.caches.iter().map(cache)).collect()
    }

    /// Returns the stacks of the live memory.
    pub fn stacks(&self) -> impl Iterator<Item = StackId> {
        self.live.iter().map(|live| live.group.stack)
    }
}
