//! Statistics and live blocks as JSON. Bytes are exact.

use super::object::object;
use super::{json_line, microseconds};

use crate::{
    model::Bytes,
    report::{AllocStats, LiveBlock, MemoryStats, ReservedStats, Tally},
};

object! {
    /// The names are those of PyTorch's `memory_stats_as_nested_dict`.
    struct StatsLine<'a> {
        device: u32,
        simulated: bool,
        intercepted_by: &'a str,
        since_us: u64,
        untracked_frees: u64,
        lost_events: u64,
        allocated_bytes: KindsLine,
        allocation: KindsLine,
        reserved_bytes: Option<ReservedLine>,
    }
}

object! {
    struct KindsLine {
        all: TallyLine,
        device: TallyLine,
        pool: TallyLine,
        vmm: TallyLine,
        graph: TallyLine,
        managed: TallyLine,
        pinned_host: TallyLine,
    }
}

object! {
    struct TallyLine {
        current: u64,
        peak: u64,
        allocated: u64,
        freed: u64,
    }
}

object! {
    struct ReservedLine {
        current: u64,
        peak_at_least: u64,
        peak_at_most: u64,
    }
}

impl KindsLine {
    fn new(stats: &MemoryStats, line: impl Fn(&AllocStats) -> TallyLine) -> Self {
        let [all, device, pool, vmm, graph, managed, pinned_host] = stats.named().map(|(_, stats)| line(stats));
        Self { all, device, pool, vmm, graph, managed, pinned_host }
    }
}

impl TallyLine {
    fn bytes(stats: &AllocStats) -> Self {
        let Tally { current, peak, allocated, freed } = stats.bytes;
        let [current, peak, allocated, freed] = [current, peak, allocated, freed].map(Bytes::get);
        Self { current, peak, allocated, freed }
    }

    fn blocks(stats: &AllocStats) -> Self {
        let Tally { current, peak, allocated, freed } = stats.blocks;
        Self { current, peak, allocated, freed }
    }
}

impl MemoryStats {
    /// A JSON object on one line, nested as PyTorch's `memory_stats_as_nested_dict`:
    /// `{"device":0, …, "allocated_bytes":{"all":{"current":335544320, …`. What could not be read is `null`.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// let json = gpumem::torch::memory_stats(0)?.to_json();
    /// assert!(json.starts_with(r#"{"device":0,"#));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        let MemoryStats { device, simulated, since, untracked, lost, .. } = *self;
        let reserved_bytes = self.reserved.map(|ReservedStats { current, peak }| ReservedLine {
            current: current.get(),
            peak_at_least: peak.at_least.get(),
            peak_at_most: peak.at_most.get(),
        });
        let line = StatsLine {
            device,
            simulated,
            intercepted_by: &self.intercepted_by,
            since_us: microseconds(since),
            untracked_frees: untracked,
            lost_events: lost,
            allocated_bytes: KindsLine::new(self, TallyLine::bytes),
            allocation: KindsLine::new(self, TallyLine::blocks),
            reserved_bytes,
        };
        json_line(&line)
    }
}

object! {
    struct BlockLine<'a> {
        id: u64,
        bytes: u64,
        device: u32,
        simulated: bool,
        kind: &'static str,
        path: &'a [String],
        scope_place: Option<&'a str>,
        line: Option<&'a str>,
        caller: Option<&'a str>,
        library: Option<&'a str>,
        backtrace: &'a [String],
        thread: u32,
        time_us: u64,
    }
}

impl LiveBlock {
    /// A JSON object on one line.
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
        let line = BlockLine {
            id: self.id,
            bytes: self.bytes.get(),
            device: self.device,
            simulated: self.simulated,
            kind: self.kind.name(),
            path: &self.path,
            scope_place: self.scope_place.as_deref(),
            line: self.line.as_deref(),
            caller: self.caller.as_deref(),
            library: self.library.as_deref(),
            backtrace: &self.backtrace,
            thread: self.thread,
            time_us: microseconds(self.time),
        };
        json_line(&line)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{model::MemKind, report::KindStats};

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
