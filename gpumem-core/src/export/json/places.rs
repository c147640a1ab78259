//! Summary and breakdown as JSON. The names are part of the public interface, the types here are not.

use super::json_line;
use super::object::object;
use crate::report::{Breakdown, PartKind, ScopeSummary, Summary};

object! {
    struct SummaryObject<'a> {
        scopes: Vec<ScopeObject<'a>>,
        untracked_frees: u64,
        lost_events: u64,
        not_intercepted: Option<&'a str>,
    }
}

object! {
    struct ScopeObject<'a> {
        path: &'a [String],
        place: Option<&'a str>,
        device: u32,
        simulated: bool,
        calls: u64,
        used: u64,
        peak: u64,
        at_peak: u64,
        device_peak: u64,
        allocated: u64,
        allocations: u64,
    }
}

object! {
    pub(super) struct BreakdownObject<'a> {
        device: u32,
        name: Option<&'a str>,
        simulated: bool,
        total: u64,
        free: u64,
        used: u64,
        parts: Vec<PartObject<'a>>,
    }
}

object! {
    struct PartObject<'a> {
        kind: &'static str,
        name: &'a str,
        bytes: u64,
        count: u64,
    }
}

impl Summary {
    /// A JSON object on one line: `{"scopes":[{"path":["train","forward"], …`, in exact bytes. The
    /// scope with an empty path is the whole process.
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
        let scopes = self.scopes.iter().map(|scope: &ScopeSummary| ScopeObject {
            path: &scope.path,
            place: scope.place.as_deref(),
            device: scope.device,
            simulated: scope.simulated,
            calls: scope.calls,
            used: scope.used.get(),
            peak: scope.peak.get(),
            at_peak: scope.at_peak.get(),
            device_peak: scope.device_peak.get(),
            allocated: scope.allocated.get(),
            allocations: scope.allocations,
        });
        let object = SummaryObject {
            scopes: scopes.collect(),
            untracked_frees: self.untracked,
            lost_events: self.lost,
            not_intercepted: self.not_intercepted.as_deref(),
        };
        json_line(&object)
    }
}

impl Breakdown {
    /// A JSON object on one line: `{"device":0, …, "parts":[{"kind":"scope", …`, in exact bytes.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let json = gpumem::breakdown(0)?.to_json();
    /// assert!(json.starts_with(r#"{"device":0,"#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        json_line(&BreakdownObject::new(self))
    }
}

impl<'a> BreakdownObject<'a> {
    pub(super) fn new(breakdown: &'a Breakdown) -> Self {
        let parts = breakdown.parts.iter().map(|part| PartObject {
            kind: match part.kind {
                PartKind::Others => "others",
                PartKind::Scope => "scope",
                PartKind::Library => "library",
                PartKind::PoolCache => "pool_cache",
                PartKind::Driver => "driver",
                PartKind::Unknown => "unknown",
            },
            name: &part.name,
            bytes: part.bytes.get(),
            count: part.count,
        });
        Self {
            device: breakdown.device,
            name: breakdown.name.as_deref(),
            simulated: breakdown.simulated,
            total: breakdown.memory.total.get(),
            free: breakdown.memory.free.get(),
            used: breakdown.memory.used.get(),
            parts: parts.collect(),
        }
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
        let summary = Summary { scopes: vec![scope], untracked: 8, lost: 9, not_intercepted: None };
        assert_eq!(
            summary.to_json(),
            "{\"scopes\":[{\"path\":[\"train\",\"a \\\"b\\\"\"],\"place\":\"src/train.rs:12\",\"device\":1,\
             \"simulated\":true,\"calls\":2,\"used\":3,\"peak\":4,\"at_peak\":2,\"device_peak\":5,\"allocated\":6,\"allocations\":7}],\
             \"untracked_frees\":8,\"lost_events\":9,\"not_intercepted\":null}"
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
