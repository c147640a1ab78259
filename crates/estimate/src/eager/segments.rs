//! The layers that run again in the backward pass.

use std::collections::{HashMap, HashSet};

/// The layers that run again in the backward pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Segments {
    /// True if each block runs again by itself.
    pub(crate) blocks: bool,
    /// The paths of layers that run again.
    pub(crate) layers: HashSet<String>,
    /// The paths of sequences, with the lengths of their groups and whether each group runs again.
    pub(crate) groups: HashMap<String, Vec<(usize, bool)>>,
}

impl Segments {
    /// Returns whether the layers at this path are in groups.
    pub(crate) fn groups_at(&self, path: &str) -> bool {
        self.groups.contains_key(path)
    }
}
