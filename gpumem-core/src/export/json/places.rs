//! Writes summary and breakdown as JSON. The names are part of the public interface.

use serde_core::{Serialize, Serializer};

use super::{
    json_line,
    object::{Json, object},
};
use crate::report::{
    Breakdown, NameStats, Part, PartKind, RegisteredPool, ScopeSummary, Spread, Stats, Summary, WorstCall,
};

object!(Summary as summary {
    "scopes": summary.scopes,
    "pools": summary.pools,
    "untracked_frees": summary.untracked,
    "lost_events": summary.lost,
    "not_intercepted": summary.not_intercepted,
});

object!(ScopeSummary as scope {
    "path": scope.path,
    "place": scope.place,
    "device": scope.device,
    "simulated": scope.simulated,
    "calls": scope.calls,
    "used": scope.used,
    "peak": scope.peak,
    "at_peak": scope.at_peak,
    "device_peak": scope.device_peak,
    "allocated": scope.allocated,
    "allocations": scope.allocations,
});

object!(Stats as stats {
    "names": stats.names,
});

object!(NameStats as name {
    "name": name.name,
    "device": name.device,
    "simulated": name.simulated,
    "calls": name.calls,
    "used": name.figures.as_ref().map(|figures| figures.used),
    "used_sum": name.figures.as_ref().map(|figures| figures.sum),
    "peaked": name.figures.as_ref().map(|figures| figures.peaked),
    "worst": name.figures.as_ref().map(|figures| &figures.worst),
    "unmeasured": name.unmeasured,
    "sampled": name.sampled,
    "doubtful": name.doubtful,
    "overlapped": name.overlapped,
});

object!(Spread<T> as spread for any T {
    "min": spread.min,
    "median": spread.median,
    "p99": spread.p99,
    "max": spread.max,
});

object!(WorstCall as worst {
    "call": worst.call,
    "name": worst.name,
    "time_us": worst.time,
    "needed": worst.needed,
});

object!(RegisteredPool as pool {
    "name": pool.name,
    "device": pool.device,
    "parts": pool.parts,
    "used": pool.used,
    "reserved": pool.reserved,
    "reported": pool.reported,
    "unknown_frees": pool.unknown_frees,
    "doubled": pool.doubled,
    "outside": pool.outside,
    "late": pool.late,
    "read_early": pool.read_early,
});

object!(Breakdown as breakdown {
    "device": breakdown.device,
    "name": breakdown.name,
    "simulated": breakdown.simulated,
    "total": breakdown.memory.total,
    "free": breakdown.memory.free,
    "used": breakdown.memory.used,
    "parts": breakdown.parts,
});

object!(Part as part {
    "kind": part.kind,
    "name": part.name,
    "bytes": part.bytes,
    "count": part.count,
});

impl Json for PartKind {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let name = match self {
            Self::Others => "others",
            Self::Scope => "scope",
            Self::Library => "library",
            Self::PoolCache => "pool_cache",
            Self::RegisteredPool => "registered_pool",
            Self::Driver => "driver",
            Self::Unknown => "unknown",
        };
        name.serialize(to)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Bytes, GpuMemory},
        report::Part,
    };

    #[test]
    fn a_summary_is_an_object() {
        let scope = ScopeSummary {
            path: vec!["train".to_owned(), "a \"b\"".to_owned()],
            place: Some("src/train.rs:12".to_owned()),
            device: 1,
            simulated: true,
            calls: 2,
            used: Bytes::new(3),
            peak: Bytes::new(4),
            at_peak: Bytes::new(2),
            device_peak: Bytes::new(5),
            allocated: Bytes::new(6),
            allocations: 7,
        };
        let summary = Summary { scopes: vec![scope], pools: Vec::new(), untracked: 8, lost: 9, not_intercepted: None };
        assert_eq!(
            summary.to_json(),
            "{\"scopes\":[{\"path\":[\"train\",\"a \\\"b\\\"\"],\"place\":\"src/train.rs:12\",\"device\":1,\
             \"simulated\":true,\"calls\":2,\"used\":3,\"peak\":4,\"at_peak\":2,\"device_peak\":5,\"allocated\":6,\"allocations\":7}],\
             \"pools\":[],\"untracked_frees\":8,\"lost_events\":9,\"not_intercepted\":null}"
        );
    }

    #[test]
    fn a_breakdown_is_an_object() {
        let memory = GpuMemory { total: Bytes::new(9), free: Bytes::new(2), used: Bytes::new(7), reserved: None };
        let part = Part {
            kind: PartKind::PoolCache,
            name: "kept".to_owned(),
            path: Vec::new(),
            bytes: Bytes::new(7),
            count: 0,
        };
        let breakdown = Breakdown { device: 0, name: None, simulated: false, memory, parts: vec![part] };
        assert_eq!(
            breakdown.to_json(),
            "{\"device\":0,\"name\":null,\"simulated\":false,\"total\":9,\"free\":2,\"used\":7,\
             \"parts\":[{\"kind\":\"pool_cache\",\"name\":\"kept\",\"bytes\":7,\"count\":0}]}"
        );
    }
}
