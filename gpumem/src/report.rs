//! The data in reports. All of it implements `Display`, or is a part of such data.

#[allow(unused_imports, reason = "each module of this crate names what it needs")]
pub(crate) use gpumem_core::report::*;
pub use gpumem_core::{
    model::{GpuProcess, MemKind, ProcessKind, Sampling},
    report::{
        AllocStats, Breakdown, CallFigures, Change, Group, KindStats, Leaks, Line, LiveBlock, MemoryStats,
        MemorySummary, NameStats, OutOfMemory, Part, PartKind, PeakBounds, PeakHolder, PeakHolders, Peaks, Place,
        PoolAtPeak, RegisteredPool, Report, ReservedStats, ScopeSummary, SourceLine, Spread, Stats, Summary, Tally,
        Tracked, WorstCall,
    },
};
