//! The layers that run again in the backward pass.

use std::collections::{HashMap, HashSet};

/// The layers that run again in the backward pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    /// Each block runs again by itself.
    pub(crate) blocks: bool,
    /// The paths of layers that run again.
    pub(crate) layers: HashSet<String>,
    /// The paths of sequences, with the lengths of their groups and whether a group runs again.
    pub(crate) groups: HashMap<String, Vec<(usize, bool)>>,
}

impl Segments {
    /// The layers at this path are in groups.
    pub(crate) fn groups_at(&self, path: &str) -> bool {
        self.groups.contains_key(path)
    }
}
