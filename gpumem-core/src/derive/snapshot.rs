//! What is live in a device's memory at one moment.

use super::{LedgerView, Names, Paths, Stack};
use crate::{
    ledger::GroupUsage,
    model::{Device, StackId},
    report::{Group, place_in_words},
};

/// What is live in a device's memory at one moment, and the paths of scopes.
#[derive(Clone, Debug)]
pub struct Snapshot {
    live: Vec<GroupUsage>,
    paths: Paths,
}

impl Snapshot {
    /// As it is now.
    pub fn now(view: &dyn LedgerView, names: &dyn Names, device: Device) -> Self {
        // First, so that none is of a path that is newer.
        let mut live = view.groups();
        live.retain(|live| live.device == device && live.group.kind.is_on_device());
        Self { live, paths: Paths::now(view, names) }
    }

    /// What is live, by where it comes from.
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
            }
        };
        self.live.iter().map(group).collect()
    }

    /// The stacks of what is live.
    pub fn stacks(&self) -> impl Iterator<Item = StackId> {
        self.live.iter().map(|live| live.group.stack)
    }
}
