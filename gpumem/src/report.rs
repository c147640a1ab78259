//! The data in reports. Each type implements `Display`, or is part of one that does.

#[allow(unused_imports, reason = "each module of this crate names what it needs")]
pub(crate) use gpumem_core::report::*;
pub use gpumem_core::{
    model::{GpuProcess, MemKind, ProcessKind, Sampling},
    report::{
        AllocStats, Breakdown, Change, DriverMemory, Group, InUse, KindStats, LargestOfDriver, Leaks, Line, LiveBlock,
        MeasuredCalls, MemoryStats, MemorySummary, NameStats, OutOfMemory, Part, PartKind, PeakBounds, PeakHolder,
        PeakHolders, Peaks, Place, PoolAtPeak, RegisteredPool, Report, ReservedStats, ScopeSummary, SourceLine, Spread,
        Stats, Summary, Tally, Tracked, WorstCall,
    },
};
