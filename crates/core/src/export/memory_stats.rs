//! Writes the allocator's statistics: PyTorch's table, and its flat names.

use std::fmt::{self, Display};

use super::{
    marks::or_unknown,
    paint::{Paint, Role, Show},
    table::{Cell, Fit, Table},
};
use crate::{
    model::one_line,
    report::{KindStats, MemoryStats, MemorySummary, ReservedStats, Tally, counted},
};

/// Writes PyTorch's table, preceded by lines about its accuracy.
impl Show for MemorySummary {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let MemoryStats { device, simulated, intercepted_by, since, untracked, lost, reserved, .. } = &self.stats;
        let simulated = if *simulated { "simulated " } else { "" };
        // Blocks that are older than the session are not counted, so their frees change nothing.
        let exact = if *lost == 0 { "exact" } else { "not exact" };
        let since = since.as_secs_f64();
        let title =
            format_args!("GPU memory of this process, {simulated}device {device}: {exact}, counted for {since:.1} s");
        writeln!(f, "{}", paint.on(Role::Heading, title))?;
        // The path of a library may be longer than a line.
        let intercepted_by = one_line(intercepted_by.rsplit('/').next().unwrap_or_default());
        let untracked = counted(*untracked, "untracked free", "untracked frees");
        let lost = counted(*lost, "lost event", "lost events");
        writeln!(f, "(intercepted by {intercepted_by}; {untracked}, {lost})")?;
        table(&self.stats).show(f, paint)?;
        f.write_str("\n")?;
        match reserved.map(|reserved| reserved.peak) {
            None => f.write_str("?: the pool cannot be read; memory_reserved() returns the reason"),
            Some(peak) => match peak.exact() {
                Some(_) => f.write_str("-: the driver does not report it"),
                None => write!(f, "≤: parts that peaked at different moments, added up; at least {}", peak.at_least),
            },
        }
    }
}

fn table(stats: &MemoryStats) -> Table {
    let mut table = Table::new().column("Metric", Fit::Left);
    for name in ["Cur Usage", "Peak Usage", "Tot Alloc", "Tot Freed"] {
        table = table.column(name, Fit::Right);
    }
    let mut row = |name: &str, values: [String; 4]| {
        let nested = name.trim_start();
        let name = Cell::nested((name.len() - nested.len()) / 2, nested);
        table.row([name].into_iter().chain(values.map(Cell::from)));
    };
    let KindStats { device, pool, vmm, graph, managed, pinned_host } = &stats.kinds;
    let on_device = [("  device", device), ("  pool", pool), ("  vmm", vmm), ("  graph", graph)];
    row("Allocated memory", values(&stats.all.bytes));
    for (name, kind) in on_device {
        row(name, values(&kind.bytes));
    }
    row("Reserved memory", reserved(stats.reserved.as_ref()));
    row("Allocations", values(&stats.all.blocks));
    for (name, kind) in on_device {
        row(name, values(&kind.blocks));
    }
    for (name, kind) in [("Managed memory", managed), ("Pinned host memory", pinned_host)] {
        row(name, values(&kind.bytes));
        row("  allocations", values(&kind.blocks));
    }
    table
}

fn values<T: Display>(tally: &Tally<T>) -> [String; 4] {
    let Tally { current, peak, allocated, freed } = tally;
    [current, peak, allocated, freed].map(T::to_string)
}

fn reserved(reserved: Option<&ReservedStats>) -> [String; 4] {
    let peak = reserved.map(|ReservedStats { peak, .. }| {
        peak.exact().map_or_else(|| format!("≤ {}", peak.at_most), |peak| peak.to_string())
    });
    let current = reserved.map(|reserved| reserved.current);
    [or_unknown(current), or_unknown(peak), "-".to_owned(), "-".to_owned()]
}

/// Writes PyTorch's names, one on each line. Numbers that the driver does not report are left out.
impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.named();
        let mut lines: Vec<String> = Vec::new();
        let mut tally = |metric: &str, name: &str, [current, peak, allocated, freed]: [u64; 4]| {
            for (field, value) in [("current", current), ("peak", peak), ("allocated", allocated), ("freed", freed)] {
                lines.push(format!("{metric}.{name}.{field}: {value}"));
            }
        };
        for (name, stats) in named {
            let Tally { current, peak, allocated, freed } = stats.bytes;
            tally("allocated_bytes", name, [current, peak, allocated, freed].map(crate::model::Bytes::get));
        }
        for (name, stats) in named {
            let Tally { current, peak, allocated, freed } = stats.blocks;
            tally("allocation", name, [current, peak, allocated, freed]);
        }
        if let Some(ReservedStats { current, peak }) = self.reserved {
            for (name, bytes) in
                [("current", current), ("peak_at_least", peak.at_least), ("peak_at_most", peak.at_most)]
            {
                lines.push(format!("reserved_bytes.all.{name}: {}", bytes.get()));
            }
        }
        f.write_str(&lines.join("\n"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        model::Bytes,
        report::{AllocStats, PeakBounds},
    };

    fn stat(bytes: [u64; 3], blocks: [u64; 3]) -> AllocStats {
        let ([bytes, peak, allocated], [blocks, most, made]) = (bytes, blocks);
        let freed = Bytes::new(allocated - bytes);
        let [current, peak, allocated] = [bytes, peak, allocated].map(Bytes::new);
        AllocStats {
            bytes: Tally { current, peak, allocated, freed },
            blocks: Tally { current: blocks, peak: most, allocated: made, freed: made - blocks },
        }
    }

    pub(in crate::export) fn statistics() -> MemoryStats {
        const MIB: u64 = 1 << 20;
        let kinds = KindStats {
            device: stat([256 * MIB, 320 * MIB, 1_536 * MIB], [4, 5, 12]),
            pool: stat([1_000, 40 * MIB, 143_771 * MIB + 1], [1, 2, 1_000_000]),
            managed: stat([5, 5, 5], [1, 1, 1]),
            ..KindStats::default()
        };
        MemoryStats {
            device: 1,
            simulated: false,
            intercepted_by: "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13".to_owned(),
            since: Duration::from_millis(12_345),
            untracked: 0,
            lost: 0,
            all: stat([256 * MIB + 1_000, 352 * MIB, 145_307 * MIB + 1], [5, 7, 1_000_012]),
            kinds,
            reserved: Some(ReservedStats {
                current: Bytes::mib(288),
                peak: PeakBounds { at_least: Bytes::mib(320), at_most: Bytes::mib(384) },
            }),
        }
    }

    #[track_caller]
    fn check(stats: MemoryStats, expected: &str) {
        let text = MemorySummary { stats }.to_string();
        assert_eq!(text, expected, "\n{text}\n");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "\n{text}\n");
    }

    #[test]
    fn the_table_is_pytorchs() {
        check(
            statistics(),
            "\
GPU memory of this process, device 1: exact, counted for 12.3 s
(intercepted by libcupti.so.13; 0 untracked frees, 0 lost events)
 Metric               Cur Usage  Peak Usage   Tot Alloc   Tot Freed
 ──────────────────────────────────────────────────────────────────
 Allocated memory    256.00 MiB     352 MiB  141.90 GiB  141.65 GiB
   device               256 MiB     320 MiB    1.50 GiB    1.25 GiB
   pool                  1000 B      40 MiB  140.40 GiB  140.40 GiB
   vmm                      0 B         0 B         0 B         0 B
   graph                    0 B         0 B         0 B         0 B
 Reserved memory        288 MiB   ≤ 384 MiB           -           -
 Allocations                  5           7     1000012     1000007
   device                     4           5          12           8
   pool                       1           2     1000000      999999
   vmm                        0           0           0           0
   graph                      0           0           0           0
 Managed memory             5 B         5 B         5 B         0 B
   allocations                1           1           1           0
 Pinned host memory         0 B         0 B         0 B         0 B
   allocations                0           0           0           0
≤: parts that peaked at different moments, added up; at least 320 MiB",
        );
        let exact = PeakBounds { at_least: Bytes::mib(384), at_most: Bytes::mib(384) };
        let reserved = statistics().reserved.map(|reserved| ReservedStats { peak: exact, ..reserved });
        let text = MemorySummary { stats: MemoryStats { reserved, ..statistics() } }.to_string();
        assert!(text.contains("\n Reserved memory        288 MiB     384 MiB           -           -\n"), "\n{text}\n");
        assert!(text.ends_with("\n-: the driver does not report it"), "\n{text}\n");
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let intercepted_by = "the simulated device".to_owned();
        let stats =
            MemoryStats { reserved: None, lost: 3, untracked: 1, simulated: true, intercepted_by, ..statistics() };
        let text = MemorySummary { stats }.to_string();
        for line in [
            "GPU memory of this process, simulated device 1: not exact, counted for 12.3 s",
            "(intercepted by the simulated device; 1 untracked free, 3 lost events)",
            " Reserved memory              ?           ?           -           -",
            "?: the pool cannot be read; memory_reserved() returns the reason",
        ] {
            assert!(text.lines().any(|found| found == line), "no line {line}\n{text}");
        }
    }

    /// The device has a PiB, and the totals come from a long run.
    #[test]
    fn the_table_stands_in_80_columns() {
        let most = stat([(1 << 50) - 1; 3], [999_999_999_999; 3]);
        let peak = PeakBounds { at_least: Bytes::ZERO, at_most: Bytes::new((1 << 50) - 1) };
        let reserved = Some(ReservedStats { current: Bytes::new((1 << 50) - 1), peak });
        let text = MemorySummary { stats: MemoryStats { all: most, reserved, ..statistics() } }.to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80) && !text.contains('…'), "\n{text}\n");
    }

    #[test]
    fn names_are_pytorchs() {
        let text = statistics().to_string();
        assert_eq!(text.lines().count(), 59);
        for line in [
            "allocated_bytes.all.current: 268436456",
            "allocated_bytes.pool.freed: 150754819097",
            "allocation.device.peak: 5",
            "allocation.pinned_host.allocated: 0",
            "reserved_bytes.all.peak_at_most: 402653184",
        ] {
            assert!(text.lines().any(|found| found == line), "no line {line}\n{text}");
        }
        let unread = MemoryStats { reserved: None, ..statistics() }.to_string();
        assert!(!unread.contains("reserved"), "{unread}");
    }
}
