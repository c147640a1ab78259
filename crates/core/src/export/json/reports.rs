//! Writes summaries, breakdowns, statistics, blocks, and points of trackers as JSON. Bytes are exact. The names are part of the public
//! interface.

use serde_core::{Serialize, Serializer};

use super::{
    json_line,
    object::{micros, object},
};
use crate::report::{
    Breakdown, Change, InUse, LargestOfDriver, Leaks, LiveBlock, MemoryStats, NameStats, OutOfMemory, Part, PeakHolder,
    PeakHolders, Peaks, Place, PoolAtPeak, RegisteredPool, ReservedStats, ScopeSummary, Spread, Stats, Summary, Tally,
    Tracked, WorstCall,
};

object!(OutOfMemory as oom {
    requested, kind,
    scopes: oom.path,
    in_use: oom.breakdown.as_ref().ok().map(|breakdown| &breakdown.in_use),
    breakdown: oom.breakdown.as_ref().ok(),
    why_no_breakdown: oom.breakdown.as_ref().err().map(ToString::to_string),
    largest_scopes: oom.scopes,
    largest_places: oom.places,
    peak,
});

object!(InUse as in_use {
    free_bytes: in_use.free,
    allocated_bytes: in_use.allocations,
    driver_bytes: in_use.driver,
    is_at_most: in_use.is_at_most,
    largest_of_driver: in_use.largest,
    other_processes_bytes: in_use.others,
    rest_bytes: in_use.rest,
});

object!(LargestOfDriver as largest { name, bytes });

object!(Place as place {
    name, caller, blocks, bytes,
    bytes_each: place.each,
});

object!(Leaks as leaks {
    blocks, bytes, places,
    gone_with_context: leaks.gone,
    intercepted: leaks.is_intercepted,
});

object!(Peaks as peaks {
    devices,
    intercepted: peaks.is_intercepted,
});

object!(PeakHolders as peak {
    device, simulated, bytes,
    over_start: peak.is_over_start,
    holders, pools,
    untracked_frees: peak.untracked,
    lost_events: peak.lost,
});

object!(PoolAtPeak as pool { name, used, reserved });

object!(PeakHolder as holder {
    scopes: holder.path,
    scope_place, library, line, caller,
    older: holder.is_older,
    bytes,
});

object!(Summary as summary {
    scopes, pools,
    untracked_frees: summary.untracked,
    lost_events: summary.lost,
    not_intercepted,
});

object!(ScopeSummary as scope {
    path, place, device, simulated, calls, used, peak, at_peak, device_peak, allocated, allocations,
});

object!(Stats as stats { names });

object!(NameStats as name {
    name, device, simulated, calls,
    used: name.measured.as_ref().map(|measured| measured.used),
    used_sum: name.measured.as_ref().map(|measured| measured.sum),
    peaked: name.measured.as_ref().map(|measured| measured.peaked),
    worst: name.measured.as_ref().map(|measured| &measured.worst),
    unmeasured, sampled, doubtful, shared,
});

object!(Spread<T> as spread for any T { min, median, p99, max });

object!(WorstCall as worst {
    call, name,
    time_us: micros(worst.time),
    needed,
});

object!(RegisteredPool as pool {
    name, device, parts, used, reserved, reported, unknown_frees, doubled, outside, late, read_early, below,
    overlapping, counted_twice,
});

object!(Breakdown as breakdown {
    device, name, simulated,
    total: breakdown.memory.total,
    free: breakdown.memory.free,
    used: breakdown.memory.used,
    parts,
});

object!(Part as part { kind, name, bytes, count });

impl Summary {
    /// Returns a JSON object on one line: `{"scopes":[{"path":["train","forward"], …`, in exact bytes. The scope with
    /// an empty path is the whole process.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let trace = gpumem::GpuMemTrace::new();
    /// let json = gpumem::summary().to_json();
    /// assert!(json.starts_with(r#"{"scopes":["#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(self)
    }
}

impl Stats {
    /// Returns a JSON object on one line: `{"names":[{"name":"step", …`, in exact bytes.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// drop(gpumem::GpuMemTrace::builder().ctx("step").stats().start()?);
    /// assert!(gpumem::stats().to_json().starts_with(r#"{"names":[{"name":"step","device":0,"#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(self)
    }
}

impl Breakdown {
    /// Returns a JSON object on one line: `{"device":0, …, "parts":[{"kind":"scope", …`, in exact bytes.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let json = gpumem::breakdown(0)?.to_json();
    /// assert!(json.starts_with(r#"{"device":0,"#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(self)
    }
}

// The names come from PyTorch's `memory_stats_as_nested_dict`.
object!(MemoryStats as stats {
    device, simulated, intercepted_by,
    since_us: micros(stats.since),
    untracked_frees: stats.untracked,
    lost_events: stats.lost,
    allocated_bytes: ByKind(stats.named().map(|(kind, stats)| (kind, stats.bytes))),
    allocation: ByKind(stats.named().map(|(kind, stats)| (kind, stats.blocks))),
    reserved_bytes: stats.reserved,
});

/// The statistics of all memory and of each kind.
struct ByKind<T>([(&'static str, Tally<T>); 7]);

impl<T: Serialize> Serialize for ByKind<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(kind, tally)| (kind, tally)))
    }
}

object!(Tally<T> as tally for any T { current, peak, allocated, freed });

object!(ReservedStats as reserved {
    current,
    peak_at_least: reserved.peak.at_least,
    peak_at_most: reserved.peak.at_most,
});

object!(LiveBlock as block {
    id, bytes, device, simulated, kind, path, scope_place, line, caller, library, backtrace, thread,
    time_us: micros(block.time),
});

impl MemoryStats {
    /// Returns a JSON object on one line, nested like PyTorch's `memory_stats_as_nested_dict`: `{"device":0, …,
    /// "allocated_bytes":{"all":{"current":335544320, …`. A value that could not be read is `null`.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let json = gpumem::torch::memory_stats(0)?.to_json();
    /// assert!(json.starts_with(r#"{"device":0,"#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(self)
    }
}

impl LiveBlock {
    /// Returns a JSON object on one line.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # gpumem::torch::memory_allocated(0)?;
    /// # let block = gpu.alloc(gpumem::Bytes::mib(1))?;
    /// for block in gpumem::torch::memory_snapshot()? {
    ///     println!("{}", block.to_json());
    /// }
    /// # assert!(gpumem::torch::memory_snapshot()?[0].to_json().contains("\"bytes\":1048576"));
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(self)
    }
}

object!(Tracked as tracked {
    ctx, simulated, used, live, changes,
    lost_events: tracked.lost,
});

object!(Change as change {
    count,
    bytes_each: change.each,
    bytes: change.total(),
    kind, dtype, shape,
    names: change.names.iter().map(|(name, count)| Named { name, count: *count }).collect::<Vec<_>>(),
    scopes: change.dtype.is_none().then_some(&change.path),
    line, library,
});

/// A label's name, and the number of its blocks.
struct Named<'a> {
    name: &'a str,
    count: u64,
}

object!(Named<'_> as named { name, count });
