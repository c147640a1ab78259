//! Statistics of traces, with a row for each name.

use std::time::Duration;

use super::counted;
use crate::model::{ByteDelta, Bytes};

/// Statistics of the traces that ended, by name. `gpumem::stats` returns this.
///
/// `Display` is a table of at most 80 columns, with the largest needs first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The statistics by device, then by the need of the worst call.
    pub names: Vec<NameStats>,
}

/// The calls of one name on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NameStats {
    /// The name. A `#` replaces numbers if more than 16 names differ only in them.
    pub name: String,
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The number of traces that ended.
    pub calls: u64,
    /// The results of the measured calls. `None` if there are none.
    pub measured: Option<MeasuredCalls>,
    /// The number of calls that could not be measured. The results exclude them.
    pub unmeasured: u64,
    /// The number of calls that were sampled: they may have peaked higher.
    pub sampled: u64,
    /// The number of calls during which events were lost, or older blocks of unknown size were freed. Their results may be wrong.
    pub doubtful: u64,
    /// The number of calls with memory of threads in no scope that also counts in traces of other threads
    /// ([`Trace::shared`](crate::model::Trace::shared)).
    pub shared: u64,
}

/// The results of the calls of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MeasuredCalls {
    /// The values of [`Trace::used`](crate::model::Trace::used).
    pub used: Spread<ByteDelta>,
    /// The sum of `used`.
    pub sum: ByteDelta,
    /// The values of [`Trace::peaked`](crate::model::Trace::peaked).
    pub peaked: Spread<Bytes>,
    /// The call that needed the most.
    pub worst: WorstCall,
}

/// The spread of a value over the calls. Each of the four is the value of a real call. The minimum and the maximum are exact;
/// with up to 1,000 different values, so are the other two. With more values, these may be 1 % too high, or a few percent if the
/// values differ by more than a factor of 200.
///
/// Example: see `gpumem::stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Spread<T> {
    /// The minimum.
    pub min: T,
    /// The median: the smallest value that at least half of the calls do not exceed.
    pub median: T,
    /// The 99th percentile: the smallest value that at least 99 of 100 calls do not exceed.
    pub p99: T,
    /// The maximum.
    pub max: T,
}

/// The call with the highest [`Trace::peak_over_start`](crate::model::Trace::peak_over_start), the first one of a tie.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorstCall {
    /// The index of the call among the calls of the row, starting at 1.
    pub call: u64,
    /// The name of the call, if the row has several names.
    pub name: Option<String>,
    /// The time when the call ended, since counting of memory started.
    pub time: Duration,
    /// The need of the call: its peak above the memory in use at its start.
    pub needed: Bytes,
}

impl<T> Spread<T> {
    /// Creates a spread of these values.
    #[doc(hidden)]
    pub fn new(min: T, median: T, p99: T, max: T) -> Self {
        Self { min, median, p99, max }
    }

    /// Converts the values to another type.
    #[doc(hidden)]
    pub fn map<U>(self, convert: impl Fn(T) -> U) -> Spread<U> {
        let Self { min, median, p99, max } = self;
        Spread::new(convert(min), convert(median), convert(p99), convert(max))
    }
}

impl MeasuredCalls {
    /// Creates the results from these values.
    #[doc(hidden)]
    pub fn new(used: Spread<ByteDelta>, sum: ByteDelta, peaked: Spread<Bytes>, worst: WorstCall) -> Self {
        Self { used, sum, peaked, worst }
    }
}

impl WorstCall {
    /// Creates a call with these values.
    #[doc(hidden)]
    pub fn new(call: u64, name: Option<String>, time: Duration, needed: Bytes) -> Self {
        Self { call, name, time, needed }
    }
}

impl NameStats {
    /// Creates the row of a name without calls.
    #[doc(hidden)]
    pub fn new(name: String, device: u32, simulated: bool) -> Self {
        Self { name, device, simulated, calls: 0, measured: None, unmeasured: 0, sampled: 0, doubtful: 0, shared: 0 }
    }

    /// Returns the reasons why the results of some calls may be wrong or are missing.
    pub(crate) fn doubts(&self) -> Vec<String> {
        let reasons = [
            (self.unmeasured, "not measured"),
            (self.sampled, "sampled: shorter peaks are missed"),
            (self.doubtful, "with lost or unknown events: may be wrong"),
            (self.shared, "with memory of threads in no scope, which counts in traces of several threads"),
        ];
        let reason = |(calls, why): &(u64, &str)| format!("{calls} of {} {why}", counted(self.calls, "call", "calls"));
        reasons.iter().filter(|(calls, _)| *calls > 0).map(reason).collect()
    }
}

impl Stats {
    /// Creates statistics with these rows, sorted.
    #[doc(hidden)]
    pub fn of(mut names: Vec<NameStats>) -> Self {
        let needed = |name: &NameStats| name.measured.as_ref().map(|measured| measured.worst.needed);
        names.sort_by(|a, b| (a.device, needed(b), &a.name).cmp(&(b.device, needed(a), &b.name)));
        Self { names }
    }
}
