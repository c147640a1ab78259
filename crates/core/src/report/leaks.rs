//! The blocks that were not freed.

use super::{LiveBlock, Place, SharedNames, path_in_words, place_in_words};
use crate::model::Bytes;

/// Blocks that were not freed by the end of the process.
///
/// `Display` is a table of at most 80 columns.
///
/// Example: see `gpumem::sink::Content`.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// True if allocations were intercepted to the end. If not, there may be more leaks.
    pub is_intercepted: bool,
}

impl Leaks {
    /// Returns the leaks of these blocks.
    #[doc(hidden)]
    pub fn of(blocks: &[LiveBlock]) -> Self {
        Self::at(by_place(blocks))
    }

    /// Returns the leaks of these places, which must be in the order of [`Place::largest`].
    #[doc(hidden)]
    pub fn at(places: Vec<Place>) -> Self {
        let blocks = places.iter().map(|place| place.blocks).sum();
        let bytes = places.iter().map(|place| place.bytes).sum();
        Self { blocks, bytes, places, gone: 0, is_intercepted: true }
    }
}

/// Returns the places and scopes that allocated the blocks, the largest first. If there are no scopes, only the places.
pub fn by_place(blocks: &[LiveBlock]) -> Vec<Place> {
    let has_scopes = blocks.iter().any(|block| !block.path.is_empty());
    let names = SharedNames::of(blocks.iter().map(|block| &*block.path));
    let place = |block: &LiveBlock| {
        let LiveBlock { path, library, line, scope_place, .. } = block;
        let name =
            leak_in_words(&names.path(path), library.as_deref(), line.as_deref(), scope_place.as_deref(), has_scopes);
        let caller = block.caller.clone().filter(|_| block.library.is_none());
        Place { name, caller, blocks: 1, bytes: block.bytes, each: Some(block.bytes) }
    };
    Place::largest(blocks.iter().map(place))
}

/// Returns the origin of a block that was not freed: the library or the line, and the scopes if `has_scopes`.
#[doc(hidden)]
pub fn leak_in_words(
    path: &[String],
    library: Option<&str>,
    line: Option<&str>,
    scope_place: Option<&str>,
    has_scopes: bool,
) -> String {
    let place = || place_in_words(line, scope_place.filter(|_| !path.is_empty()));
    let who = library.map(str::to_owned).or_else(place).unwrap_or_else(|| "place not known".to_owned());
    let within = if path.is_empty() { "" } else { "in " };
    if has_scopes { format!("{who}, {within}{}", path_in_words(path)) } else { who }
}
