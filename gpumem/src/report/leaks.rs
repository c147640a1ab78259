//! What was not freed.

use super::{LiveBlock, Place, path_in_words};
use crate::model::Bytes;

/// Blocks that are still there when nothing should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaks {
    pub(crate) blocks: u64,
    pub(crate) bytes: Bytes,
    /// The largest first.
    pub(crate) places: Vec<Place>,
}

impl Leaks {
    pub(crate) fn of(blocks: &[LiveBlock]) -> Self {
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        Self { blocks: blocks.len() as u64, bytes, places: by_place(blocks) }
    }
}

/// Blocks by the place and the scope that they were asked for in, the largest first.
pub(crate) fn by_place(blocks: &[LiveBlock]) -> Vec<Place> {
    let name = |block: &LiveBlock| {
        let who = block.library.as_deref().or(block.place()).unwrap_or("place not known");
        format!("{who}, {}{}", if block.path.is_empty() { "" } else { "in " }, path_in_words(&block.path))
    };
    Place::largest(blocks.iter().map(|block| Place::new(name(block), 1, block.bytes)))
}
