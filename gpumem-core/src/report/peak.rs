//! Which allocations made a peak. Derived, never measured here.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{path_in_words, place_in_words};
use crate::model::{ByteDelta, Bytes};

/// Which allocations made a peak: the answer of `gpumem::GpuMemTrace::peak_holders`.
///
/// `Display` is a table of at most 80 columns that adds up to the peak.
///
/// Example: see `gpumem::GpuMemTrace::peak_holders`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PeakHolders {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// The device is a simulated one.
    pub simulated: bool,
    /// The peak, which the holders add up to.
    pub bytes: Bytes,
    /// The peak of a trace, over what was in use at its start. Else that of the whole process on the device: the most that was in use
    /// at one time of what gpumem saw allocated.
    pub is_over_start: bool,
    /// One for each scope and line, the largest first.
    pub holders: Vec<PeakHolder>,
    /// Frees of blocks that are not known and were not counted, while the trace was open, or since the first one.
    pub untracked: u64,
    /// Events that could not be counted, while the trace was open, or since the first one. Not 0: the numbers may be wrong.
    pub lost: u64,
}

/// What was in use at a peak of the allocations of one scope and line.
///
/// Example: see `gpumem::GpuMemTrace::peak_holders`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PeakHolder {
    /// The path of scopes, the outermost first. Empty: outside of all scopes.
    pub path: Vec<String>,
    /// Where the innermost of them was opened, such as `src/train.rs:12`.
    pub scope_place: Option<String>,
    /// The library that allocated it by itself (cuBLAS, cuDNN, NCCL…).
    pub library: Option<String>,
    /// The line that allocated it. `None` where its stack was not recorded: blocks below 1 MiB, unless `GPUMEM_BACKTRACE=1` is
    /// set; or a library did.
    pub line: Option<String>,
    /// The line that called that one's function.
    pub caller: Option<String>,
    /// No allocation, but what was freed of blocks that are older than the first trace: `bytes` is below 0.
    pub is_older: bool,
    /// How much. Of a trace, below 0 if more was in use at the start than at the peak.
    pub bytes: ByteDelta,
}

impl PeakHolder {
    /// Those that have all in common put together, the largest first.
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

    /// Attribution it is, without its scope: the line, the library, else where the scope was opened.
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
    /// By path of scopes, those without the scopes inside, the largest first.
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
