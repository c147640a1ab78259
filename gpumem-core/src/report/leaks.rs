//! What was not freed.

use super::{LiveBlock, Place, path_in_words, place_in_words};
use crate::model::Bytes;

/// Blocks that are still there when nothing should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaks {
    pub blocks: u64,
    pub bytes: Bytes,
    /// The largest first.
    pub places: Vec<Place>,
}

impl Leaks {
    pub fn of(blocks: &[LiveBlock]) -> Self {
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        Self { blocks: blocks.len() as u64, bytes, places: by_place(blocks) }
    }
}

/// Blocks by the place and the scope that they were asked for in, the largest first.
pub fn by_place(blocks: &[LiveBlock]) -> Vec<Place> {
    let place = |block: &LiveBlock| {
        let scope_place = block.scope_place.as_deref().filter(|_| !block.path.is_empty());
        let place = || place_in_words(block.line.as_deref(), scope_place);
        let who = block.library.clone().or_else(place).unwrap_or_else(|| "place not known".to_owned());
        let name = format!("{who}, {}{}", if block.path.is_empty() { "" } else { "in " }, path_in_words(&block.path));
        let caller = block.caller.clone().filter(|_| block.library.is_none());
        Place { name, caller, blocks: 1, bytes: block.bytes }
    };
    Place::largest(blocks.iter().map(place))
}
