//! Writes statistics and live blocks as JSON. Bytes are exact.

use serde_core::Serializer;

use super::{
    json_line,
    object::{AsJson, Json, object},
};
use crate::report::{LiveBlock, MemoryStats, ReservedStats, Tally};

// The names are those of PyTorch's `memory_stats_as_nested_dict`.
object!(MemoryStats as stats {
    device, simulated, intercepted_by,
    since_us: stats.since,
    untracked_frees: stats.untracked,
    lost_events: stats.lost,
    allocated_bytes: ByKind(stats.named().map(|(kind, stats)| (kind, stats.bytes))),
    allocation: ByKind(stats.named().map(|(kind, stats)| (kind, stats.blocks))),
    reserved_bytes: stats.reserved,
});

/// The figures of all memory and of each kind.
struct ByKind<T>([(&'static str, Tally<T>); 7]);

impl<T: Json> Json for ByKind<T> {
    fn write<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(kind, tally)| (kind, AsJson(tally))))
    }
}

object!(Tally<T> as tally for any T {
    current, peak, allocated, freed,
});

object!(ReservedStats as reserved {
    current,
    peak_at_least: reserved.peak.at_least,
    peak_at_most: reserved.peak.at_most,
});

object!(LiveBlock as block {
    id, bytes, device, simulated, kind, path, scope_place, line, caller, library, backtrace, thread,
    time_us: block.time,
});

impl MemoryStats {
    /// Returns a JSON object on one line, nested as PyTorch's `memory_stats_as_nested_dict`: `{"device":0, …,
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::{Bytes, MemKind},
        report::{AllocStats, KindStats},
    };

    #[test]
    fn statistics_are_nested_as_in_pytorch() {
        let bytes =
            Tally { current: Bytes::new(7), peak: Bytes::new(9), allocated: Bytes::new(20), freed: Bytes::new(13) };
        let vmm = AllocStats { bytes, blocks: Tally { current: 1, peak: 2, allocated: 4, freed: 3 } };
        let kinds = KindStats { vmm, ..KindStats::default() };
        let stats = MemoryStats {
            device: 2,
            simulated: true,
            intercepted_by: "the \"simulated\" device".to_owned(),
            since: Duration::from_millis(5),
            untracked: 1,
            lost: 0,
            all: vmm,
            kinds,
            reserved: Some(ReservedStats::new(&kinds, None)),
        };
        let zeros = "{\"current\":0,\"peak\":0,\"allocated\":0,\"freed\":0}";
        let kinds = |vmm| {
            format!(
                "{{\"all\":{vmm},\"device\":{zeros},\"pool\":{zeros},\"vmm\":{vmm},\"graph\":{zeros},\"managed\":{zeros},\
                 \"pinned_host\":{zeros}}}"
            )
        };
        let expected = format!(
            "{{\"device\":2,\"simulated\":true,\"intercepted_by\":\"the \\\"simulated\\\" device\",\"since_us\":5000,\
             \"untracked_frees\":1,\"lost_events\":0,\"allocated_bytes\":{},\"allocation\":{},\
             \"reserved_bytes\":{{\"current\":7,\"peak_at_least\":9,\"peak_at_most\":9}}}}",
            kinds("{\"current\":7,\"peak\":9,\"allocated\":20,\"freed\":13}"),
            kinds("{\"current\":1,\"peak\":2,\"allocated\":4,\"freed\":3}"),
        );
        assert_eq!(stats.to_json(), expected);
        let unread = MemoryStats { reserved: None, ..stats }.to_json();
        assert!(unread.ends_with("\"reserved_bytes\":null}"), "{unread}");
    }

    #[test]
    fn a_block_is_a_line() {
        let block = LiveBlock {
            id: u64::MAX,
            device: 1,
            simulated: false,
            bytes: Bytes::new(7),
            kind: MemKind::PinnedHost,
            path: vec!["epoch 1".to_owned(), "a \"b\"\n".to_owned()],
            scope_place: Some("src/train.rs:12".to_owned()),
            line: None,
            caller: None,
            library: Some("cuBLAS".to_owned()),
            backtrace: Vec::new(),
            thread: 3,
            time: Duration::from_millis(100),
        };
        assert_eq!(
            block.to_json(),
            "{\"id\":18446744073709551615,\"bytes\":7,\"device\":1,\"simulated\":false,\"kind\":\"pinned host\",\
             \"path\":[\"epoch 1\",\"a \\\"b\\\"\\n\"],\"scope_place\":\"src/train.rs:12\",\"line\":null,\
             \"caller\":null,\"library\":\"cuBLAS\",\"backtrace\":[],\"thread\":3,\"time_us\":100000}"
        );
    }
}
