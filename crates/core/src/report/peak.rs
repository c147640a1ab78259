//! The allocations that made a peak. Nothing is measured here.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{PoolAtPeak, path_in_words, place_in_words};
use crate::model::{ByteDelta, Bytes};

/// The allocations that made a peak. `gpumem::GpuMemTrace::peak_holders` returns them.
///
/// `Display` is a table of at most 80 columns that adds up to the peak.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeakHolders {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The peak, which the holders add up to.
    pub bytes: Bytes,
    /// True if `bytes` is the peak of a trace, above the memory in use at its start. Otherwise it is the peak of the whole process
    /// on the device, of all allocations that gpumem recorded.
    pub is_over_start: bool,
    /// The holders by scope and line, the largest first.
    pub holders: Vec<PeakHolder>,
    /// The pools that had memory at the peak of a device; empty for the peak of a trace.
    pub pools: Vec<PoolAtPeak>,
    /// The number of frees of unknown blocks, which were not counted: while the trace was open, or since the first trace.
    pub untracked: u64,
    /// Events that could not be recorded: while the trace was open, or since the first trace. If not 0, the numbers may be wrong.
    pub lost: u64,
}

/// The allocations of one scope and line that were in use at a peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeakHolder {
    /// The path of scopes, the outermost first. Empty outside all scopes.
    pub path: Vec<String>,
    /// The place where the innermost scope was opened, such as `src/train.rs:12`.
    pub scope_place: Option<String>,
    /// The library whose code allocated them (cuBLAS, PyTorch…), as [`LiveBlock::library`](super::LiveBlock::library).
    pub library: Option<String>,
    /// The line that allocated them. `None` if a library allocated them, or if the stack was not recorded: blocks below 1 MiB, unless
    /// `GPUMEM_BACKTRACE=1` is set.
    pub line: Option<String>,
    /// The line that called the function of `line`.
    pub caller: Option<String>,
    /// True if these are not allocations, but frees of blocks that are older than the first trace: `bytes` is below 0.
    pub is_older: bool,
    /// Their size at the peak. For a trace, it is below 0 if more was in use at the start than at the peak.
    pub bytes: ByteDelta,
}

impl PeakHolder {
    /// Adds up the holders that differ only in their size. The largest come first.
    #[doc(hidden)]
    pub fn largest(all: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut sums: BTreeMap<_, (Self, i64)> = BTreeMap::new();
        for holder in all {
            let Self { path, line, library, caller, scope_place, is_older, bytes } = holder.clone();
            let of = (path, line, library, caller, scope_place, is_older);
            sums.entry(of).or_insert((holder, 0)).1 += bytes.get();
        }
        let mut holders: Vec<_> =
            sums.into_values().map(|(holder, bytes)| Self { bytes: ByteDelta::new(bytes), ..holder }).collect();
        holders.retain(|holder| holder.bytes != 0);
        holders.sort_by_key(|holder| Reverse(holder.bytes.get()));
        holders
    }

    /// Returns the library, the line, or the place where the scope was opened, as text.
    #[doc(hidden)]
    pub fn who(&self) -> String {
        if self.is_older {
            return "freed, older than the first trace".to_owned();
        }
        let scope_place = self.scope_place.as_deref().filter(|_| !self.path.is_empty());
        let place = || place_in_words(self.line.as_deref(), scope_place);
        self.library.clone().or_else(place).unwrap_or_else(|| "line not known".to_owned())
    }

    #[doc(hidden)]
    pub fn scope(&self) -> String {
        if self.is_older { "before the first trace".to_owned() } else { path_in_words(&self.path) }
    }
}

impl PeakHolders {
    /// Returns the holders of each path of scopes, without those of inner scopes, and their sum. The largest come first.
    #[doc(hidden)]
    pub fn by_scope(&self) -> Vec<(String, ByteDelta, Vec<&PeakHolder>)> {
        let mut scopes: BTreeMap<String, Vec<&PeakHolder>> = BTreeMap::new();
        for holder in &self.holders {
            scopes.entry(holder.scope()).or_default().push(holder);
        }
        let sum = |holders: &[&PeakHolder]| ByteDelta::new(holders.iter().map(|holder| holder.bytes.get()).sum());
        let mut scopes: Vec<_> = scopes.into_iter().map(|(scope, holders)| (scope, sum(&holders), holders)).collect();
        scopes.sort_by_key(|(_, bytes, _)| Reverse(bytes.get()));
        scopes
    }
}
