//! An allocation that was rejected, and the holders of the memory. Nothing is measured here.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{Breakdown, Group, PeakHolders, SharedNames, path_in_words};
use crate::{
    error::Error,
    model::{Bytes, MemKind},
};

/// The number of scopes and of places in a report.
const MOST: usize = 10;

/// An allocation that was rejected because memory ran out, and the holders of the memory. The hook of `gpumem::oom::on_oom`
/// receives this.
///
/// `Display` is the report that goes to stderr.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemory {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// The size of the rejected allocation.
    pub requested: Bytes,
    /// The kind of memory that was requested.
    pub kind: MemKind,
    /// The path of scopes in which it was requested, the outermost first. Empty outside all scopes.
    pub path: Vec<String>,
    /// The line that requested it, if it is known.
    pub line: Option<String>,
    /// The breakdown of the device's memory, or the reason why it is not known.
    pub breakdown: Result<Breakdown, Error>,
    /// The paths of scopes with the most live memory, at most ten. Each amount excludes inner scopes.
    pub scopes: Vec<Place>,
    /// The places in the code with the most live memory, at most ten.
    pub places: Vec<Place>,
    /// The allocations that made up the device's peak, if gpumem recorded any.
    pub peak: Option<PeakHolders>,
}

/// A place in the code or a path of scopes, and its live memory.
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
#[non_exhaustive]
pub struct Place {
    /// The line, the library or the path of scopes, as text.
    pub name: String,
    /// The line that called the function of a line.
    pub caller: Option<String>,
    /// The number of allocations.
    pub blocks: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The size of each allocation, if all have the same known size.
    pub each: Option<Bytes>,
}

impl Place {
    /// Creates a place with its blocks, and the size of each if all have the same.
    #[doc(hidden)]
    pub fn new(name: String, caller: Option<String>, blocks: u64, bytes: Bytes, each: Option<Bytes>) -> Self {
        Self { name, caller, blocks, bytes, each }
    }

    /// Adds up the places with the same name and caller. The largest come first.
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
    /// Fills in the scopes and places with the most live memory.
    #[doc(hidden)]
    #[must_use]
    pub fn with_holders(self, groups: &[Group]) -> Self {
        let of = |place: &dyn Fn(&Group) -> (String, Option<String>), is_shown: fn(&Group) -> bool| {
            let all = groups.iter().filter(|group| is_shown(group)).map(|group| {
                let (name, caller) = place(group);
                let each = (group.blocks == 1).then_some(group.bytes);
                Place { name, caller, blocks: group.blocks, bytes: group.bytes, each }
            });
            let mut largest = Place::largest(all);
            largest.truncate(MOST);
            largest
        };
        let names = SharedNames::of(groups.iter().map(|group| &*group.path));
        let scope = |group: &Group| (path_in_words(&names.path(&group.path)), None);
        let place = |group: &Group| match (&group.library, &group.place) {
            (Some(library), _) => (library.clone(), None),
            (None, Some(place)) => (place.clone(), group.caller.clone()),
            (None, None) => ("(not known)".to_owned(), None),
        };
        Self {
            scopes: of(&scope, |group| !group.is_cache),
            places: of(&place, |group| !group.is_cache || group.bytes > Bytes::ZERO),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_pool_that_keeps_nothing_is_no_place() {
        let cache = |name: &str, bytes| Group {
            path: Vec::new(),
            library: Some(name.to_owned()),
            place: None,
            caller: None,
            blocks: 0,
            bytes,
            is_cache: true,
        };
        let report = OutOfMemory {
            device: 0,
            requested: Bytes::mib(1),
            kind: MemKind::Device,
            path: Vec::new(),
            line: None,
            breakdown: Err(Kind::BadSetting { setting: "test", detail: String::new() }.into()),
            scopes: Vec::new(),
            places: Vec::new(),
            peak: None,
        }
        .with_holders(&[cache("empty", Bytes::ZERO), cache("full", Bytes::mib(2))]);
        let names: Vec<_> = report.places.iter().map(|place| place.name.as_str()).collect();
        assert_eq!(names, ["full"]);
    }
}
