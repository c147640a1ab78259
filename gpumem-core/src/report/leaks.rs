//! What was not freed.

use super::{LiveBlock, Place, path_in_words, place_in_words};
use crate::model::Bytes;

/// Blocks that are still there when nothing should be.
///
/// `Display` is a table of at most 80 columns.
///
/// Example: see `gpumem::sink::Content`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Leaks {
    /// How many blocks.
    pub blocks: u64,
    /// How much they add up to.
    pub bytes: Bytes,
    /// By the place and the scope that they were allocated in, the largest first.
    pub places: Vec<Place>,
    /// How many other blocks went with their CUDA context: nobody freed them.
    pub gone: u64,
    /// Allocations are intercepted. If not, there may be more.
    pub is_intercepted: bool,
}

impl Leaks {
    /// Blocks by the place and the scope that they were allocated in, the largest first.
    #[doc(hidden)]
    pub fn of(blocks: &[LiveBlock]) -> Self {
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        Self { blocks: blocks.len() as u64, bytes, places: by_place(blocks), gone: 0, is_intercepted: true }
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
        Place { name, caller, blocks: 1, bytes: block.bytes, each: Some(block.bytes) }
    };
    Place::largest(blocks.iter().map(place))
}
