//! What was not freed.

use super::{LiveBlock, Place, path_in_words, place_in_words};
use crate::model::Bytes;

/// Blocks that were not freed at the end of the process.
///
/// `Display` is a table of at most 80 columns.
///
/// Example: see `gpumem::sink::Content`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Leaks {
    /// The number of blocks.
    pub blocks: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The places and scopes that allocated them, the largest first.
    pub places: Vec<Place>,
    /// The number of other blocks whose CUDA context was destroyed before they were freed.
    pub gone: u64,
    /// Whether allocations were intercepted to the end. If not, there may be more leaks.
    pub is_intercepted: bool,
}

impl Leaks {
    /// The leaks of these blocks.
    #[doc(hidden)]
    pub fn of(blocks: &[LiveBlock]) -> Self {
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        Self { blocks: blocks.len() as u64, bytes, places: by_place(blocks), gone: 0, is_intercepted: true }
    }
}

/// The places and scopes that allocated the blocks, the largest first. Without any scope, the places alone.
pub fn by_place(blocks: &[LiveBlock]) -> Vec<Place> {
    let has_scopes = blocks.iter().any(|block| !block.path.is_empty());
    let place = |block: &LiveBlock| {
        let scope_place = block.scope_place.as_deref().filter(|_| !block.path.is_empty());
        let place = || place_in_words(block.line.as_deref(), scope_place);
        let who = block.library.clone().or_else(place).unwrap_or_else(|| "place not known".to_owned());
        let within = if block.path.is_empty() { "" } else { "in " };
        let name = if has_scopes { format!("{who}, {within}{}", path_in_words(&block.path)) } else { who };
        let caller = block.caller.clone().filter(|_| block.library.is_none());
        Place { name, caller, blocks: 1, bytes: block.bytes, each: Some(block.bytes) }
    };
    Place::largest(blocks.iter().map(place))
}
