//! An allocation that was refused, and who holds the memory. Derived, never measured here.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{Breakdown, Group, PeakHolders, path_in_words};
use crate::{
    error::Error,
    model::{Bytes, MemKind},
};

/// So many are told of.
const MOST: usize = 10;

/// An allocation that was refused for want of memory, and who holds the memory: what `gpumem::oom::on_oom` is told.
///
/// `Display` is the report that goes to stderr.
///
/// Example: see `gpumem::oom::on_oom`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// How much was asked for.
    pub asked: Bytes,
    /// What sort of memory was asked for.
    pub kind: MemKind,
    /// In which path of scopes.
    pub path: Vec<String>,
    /// On which line, where that can be found out.
    pub line: Option<String>,
    /// Where the device's memory is, or why that is not known.
    pub breakdown: Result<Breakdown, Error>,
    /// The paths of scopes that hold most, at most ten: what was allocated in each, without the scopes inside.
    pub scopes: Vec<Place>,
    /// The places in the code that hold most, at most ten.
    pub places: Vec<Place>,
    /// Which allocations made the peak of the device, if gpumem saw any.
    pub peak: Option<PeakHolders>,
}

/// A place, in the code or among the scopes, and what of it is live.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::Bytes;
/// # let trace = gpumem::GpuMemTrace::new();
/// gpumem::oom::on_oom(|oom| {
///     let Some(largest) = oom.places.first() else { return };
///     eprintln!("{} at {}", largest.bytes, largest.name); // 10 GiB at src/main.rs:7
/// });
/// let weights = gpu.alloc(Bytes::gib(10))?;
/// assert!(gpu.alloc(Bytes::gib(10)).unwrap_err().is_out_of_memory());
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Place {
    /// In words.
    pub name: String,
    /// Of a line: where its function was called.
    pub caller: Option<String>,
    /// How many allocations.
    pub blocks: u64,
    /// How much they add up to.
    pub bytes: Bytes,
    /// How large each of them is, if all are of one size and that is known.
    pub each: Option<Bytes>,
}

impl Place {
    /// Those of one name and caller put together, the largest first.
    #[doc(hidden)]
    pub fn largest(all: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut sums: BTreeMap<(String, Option<String>), Self> = BTreeMap::new();
        for place in all {
            let sum = sums.entry((place.name.clone(), place.caller.clone())).or_insert_with(|| Self {
                blocks: 0,
                bytes: Bytes::ZERO,
                ..place.clone()
            });
            sum.blocks += place.blocks;
            sum.bytes = sum.bytes + place.bytes;
            sum.each = sum.each.filter(|each| place.each == Some(*each));
        }
        let mut places: Vec<_> = sums.into_values().collect();
        places.sort_by_key(|place| Reverse(place.bytes));
        places
    }
}

impl OutOfMemory {
    /// A refusal of which only this is known.
    #[doc(hidden)]
    pub fn new(device: u32, asked: Bytes, kind: MemKind, path: Vec<String>, why_unknown: Error) -> Self {
        let breakdown = Err(why_unknown);
        Self { device, asked, kind, path, line: None, breakdown, scopes: Vec::new(), places: Vec::new(), peak: None }
    }

    /// Fills in who holds the memory.
    #[doc(hidden)]
    #[must_use]
    pub fn with_holders(self, groups: &[Group]) -> Self {
        let of = |place: &dyn Fn(&Group) -> (String, Option<String>)| {
            let all = groups.iter().map(|group| {
                let (name, caller) = place(group);
                let each = (group.blocks == 1).then_some(group.bytes);
                Place { name, caller, blocks: group.blocks, bytes: group.bytes, each }
            });
            let mut largest = Place::largest(all);
            largest.truncate(MOST);
            largest
        };
        let scope = |group: &Group| (path_in_words(&group.path), None);
        let place = |group: &Group| match (&group.library, &group.place) {
            (Some(library), _) => (library.clone(), None),
            (None, Some(place)) => (place.clone(), group.caller.clone()),
            (None, None) => ("(not known)".to_owned(), None),
        };
        Self { scopes: of(&scope), places: of(&place), ..self }
    }
}
