//! Memory by scope. It is derived from the tree of scopes; nothing is measured here.

use std::{borrow::Cow, cmp::Reverse, collections::HashMap};

use super::{RegisteredPool, SharedNames};
use crate::model::Bytes;

/// The memory in use of each path of nested scopes, and its peak. `gpumem::summary` returns it.
///
/// `Display` is a tree of at most 80 columns, the highest peaks first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The statistics of each path on each device. A scope comes after its outer scope; scopes in the same scope are ordered by
    /// peak, the highest first.
    pub scopes: Vec<ScopeSummary>,
    /// The pools that the program registered (`gpumem::pool`), with their unused memory. The numbers of scopes include their
    /// parts.
    pub pools: Vec<RegisteredPool>,
    /// The number of frees of unknown blocks whose size is not known. Most of these blocks are older than the first trace; a block that
    /// was allocated by a call that is not intercepted was never counted.
    pub untracked: u64,
    /// Events that could not be recorded, wrong calls of pools, and live parts of pools that overlap. If not 0, the numbers may be wrong.
    pub lost: u64,
    /// The reason why allocations are not intercepted now. The amounts are then from the last moment at which allocations were
    /// intercepted. If there was no such moment, they have no meaning.
    pub not_intercepted: Option<String>,
}

/// The statistics of one path of nested scopes, over all its openings.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScopeSummary {
    /// The names of the scopes, the outermost first. A scope without a name is shown as the place where it was opened. Empty for
    /// the whole process.
    pub path: Vec<String>,
    /// The place where the innermost scope was opened, such as `src/train.rs:12`.
    pub place: Option<String>,
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The number of times that the scope was opened.
    pub calls: u64,
    /// The bytes of its allocations that are in use now.
    pub used: Bytes,
    /// The peak of its allocations.
    pub peak: Bytes,
    /// The bytes of its allocations at the peak of the whole process on the device. The outermost scopes and the allocations
    /// outside all scopes add up to that peak. For the whole process this is the same as `peak`.
    pub at_peak: Bytes,
    /// The peak of the whole process on the device while the scope was open. On a device for which it was not opened, only `peak` is
    /// known.
    pub device_peak: Bytes,
    /// The sum of all its allocations, freed or not.
    pub allocated: Bytes,
    /// The number of these allocations.
    pub allocations: u64,
}

/// The statistics of a path in the ledger. `at_peak`, `allocated` and `allocations` exclude inner scopes.
#[derive(Clone, Debug)]
pub struct Path {
    /// The index of its outer path in the list of all paths. `None` for the whole process on a device.
    pub parent: Option<usize>,
    /// The statistics of the path itself.
    pub own: ScopeSummary,
}

impl Summary {
    /// Creates a summary. Each path must come after its parent.
    #[doc(hidden)]
    pub fn of(mut paths: Vec<Path>, untracked: u64, lost: u64, not_intercepted: Option<String>) -> Self {
        let mut has_row: Vec<bool> = paths
            .iter()
            .map(|Path { own, .. }| own.calls > 0 || own.allocations > 0 || own.used > Bytes::ZERO)
            .collect();
        for at in (0..paths.len()).rev() {
            let Path { parent, ref own } = paths[at];
            let (allocated, allocations, at_peak) = (own.allocated, own.allocations, own.at_peak);
            if let Some(parent) = parent {
                let outer = &mut paths[parent].own;
                outer.at_peak = outer.at_peak + at_peak;
                outer.allocated = outer.allocated + allocated;
                outer.allocations += allocations;
                has_row[parent] |= has_row[at];
            }
        }
        // The peak of the process may have risen after the peaks of scopes were read.
        for Path { own, .. } in &mut paths {
            own.peak = own.peak.max(own.at_peak);
        }
        // A scope sorts by the peaks of its outer scopes, the outermost first. This way each scope comes below its outer scope.
        let mut order: Vec<Vec<(Reverse<Bytes>, usize)>> = Vec::with_capacity(paths.len());
        for (at, Path { parent, own }) in paths.iter().enumerate() {
            let around = parent.map(|parent| order[parent].clone()).unwrap_or_default();
            order.push(around.into_iter().chain([(Reverse(own.peak), at)]).collect());
        }
        let mut scopes: Vec<_> = paths.into_iter().map(|path| path.own).zip(order).zip(has_row).collect();
        scopes.retain(|(_, has_row)| *has_row);
        scopes.sort_by(|((a, of_a), _), ((b, of_b), _)| (a.device, of_a).cmp(&(b.device, of_b)));
        let scopes = scopes.into_iter().map(|((scope, _), _)| scope).collect();
        Self { scopes, pools: Vec::new(), untracked, lost, not_intercepted }
    }

    /// Returns the rows of a table, and whether any of them has several names. Such a row has the sums of its names. Its peak is at least
    /// the highest of their peaks, and at least the sum of all of them at a known moment.
    pub(crate) fn rows(&self) -> (Cow<'_, [ScopeSummary]>, bool) {
        let names = SharedNames::of(self.scopes.iter().map(|scope| &*scope.path));
        if !names.has_any() {
            return (Cow::Borrowed(&self.scopes), false);
        }
        let mut rows: Vec<ScopeSummary> = Vec::new();
        let mut known: HashMap<(u32, Vec<String>), usize> = HashMap::new();
        for scope in &self.scopes {
            let path = names.path(&scope.path).into_owned();
            let at = *known.entry((scope.device, path.clone())).or_insert(rows.len());
            let Some(row) = rows.get_mut(at) else {
                rows.push(ScopeSummary { path, ..scope.clone() });
                continue;
            };
            row.calls += scope.calls;
            row.used = row.used + scope.used;
            row.at_peak = row.at_peak + scope.at_peak;
            row.peak = row.peak.max(scope.peak).max(row.used).max(row.at_peak);
            row.device_peak = row.device_peak.max(scope.device_peak);
            row.allocated = row.allocated + scope.allocated;
            row.allocations += scope.allocations;
        }
        let peaks: Vec<_> = rows.iter().map(|row| row.peak).collect();
        // Each row is below its outer scope, as in `of`.
        rows.sort_by_cached_key(|row| {
            let outer = |length| {
                let at = known.get(&(row.device, row.path[..length].to_vec()));
                (at.map(|at| Reverse(peaks[*at])), row.path[..length].last().cloned())
            };
            (row.device, (1..=row.path.len()).map(outer).collect::<Vec<_>>())
        });
        (Cow::Owned(rows), true)
    }
}
