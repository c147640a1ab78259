//! Writes the statistics of traces as a table.

use std::{fmt, time::Duration};

use super::{
    amounts::Amounts,
    paint::{Paint, Role, Show},
    table::{Cell, Fit, Table},
};
use crate::{
    model::{ByteDelta, Bytes},
    report::{MeasuredCalls, NameStats, Stats},
};

/// Writes a table for each device, with two lines for each name: the used and the peaked amounts of its calls.
impl Show for Stats {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        if self.names.is_empty() {
            return f.write_str("no trace with `stats` has ended");
        }
        for (at, names) in self.names.chunk_by(|a, b| a.device == b.device).enumerate() {
            let NameStats { device, simulated, .. } = &names[0];
            let (before, simulated) = (if at > 0 { "\n" } else { "" }, if *simulated { "simulated " } else { "" });
            writeln!(f, "{before}{}", paint.on(Role::Heading, format_args!("{simulated}device {device}, by name")))?;
            table(names).show(f, paint)?;
            for name in names {
                for doubt in name.doubts() {
                    write!(f, "\n{}", paint.on(Role::Alarm, format_args!("{}: {doubt}", name.name)))?;
                }
            }
        }
        Ok(())
    }
}

/// Returns the amounts of a name: min, median, 99 %, max and sum of `used`, and the same for `peaked` without the sum.
fn amounts_of(MeasuredCalls { used, sum, peaked, .. }: &MeasuredCalls) -> ([i64; 5], [i64; 4]) {
    (
        [used.min, used.median, used.p99, used.max, *sum].map(ByteDelta::get),
        [peaked.min, peaked.median, peaked.p99, peaked.max].map(Bytes::signed),
    )
}

fn table(names: &[NameStats]) -> Table {
    let all = || names.iter().filter_map(|name| name.measured.as_ref()).map(amounts_of);
    let amounts = Amounts::of(all().flat_map(|(used, peaked)| [&used[..4], &peaked[..]].concat()));
    // The sum of all calls may be far larger, so it has its own decimals.
    let sums = amounts.for_others(all().map(|(used, _)| used[4]));
    let mut table = Table::new().column("name", Fit::LeftCutFront).column("calls", Fit::Right).column("", Fit::Left);
    for name in ["min", "median", "99 %", "max"] {
        table = table.amounts(name, amounts);
    }
    table = table.amounts("sum", sums).column("worst", Fit::Right).column("after", Fit::Right);
    for NameStats { name, calls, measured, .. } in names {
        let cells = |line: &str, amounts: Vec<String>, last: [String; 2]| {
            let amounts = amounts.into_iter().chain(last).map(Cell::from);
            [Cell::from(line)].into_iter().chain(amounts).collect::<Vec<_>>()
        };
        let (used, peaked) = match measured {
            None => (vec!["?".to_owned(); 5], vec!["?".to_owned(); 4]),
            Some(measured) => {
                let (used, peaked) = amounts_of(measured);
                let mut shown: Vec<_> = used[..4].iter().map(|bytes| amounts.show(*bytes)).collect();
                shown.push(sums.show(used[4]));
                (shown, peaked.iter().map(|bytes| amounts.show(*bytes)).collect())
            }
        };
        let peaked = peaked.into_iter().chain([String::new()]).collect();
        let worst = measured.as_ref().map(|measured| &measured.worst);
        let worst = worst.map_or_else(Default::default, |worst| [format!("#{}", worst.call), seconds(worst.time)]);
        let first = [Cell::from(name), Cell::from(calls.to_string())];
        table.row(first.into_iter().chain(cells("used", used, Default::default())));
        table.row([Cell::default(), Cell::default()].into_iter().chain(cells("peaked", peaked, worst)));
    }
    table
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{ByteDelta, Bytes},
        report::{Spread, WorstCall},
    };

    fn stats() -> Stats {
        let of = |name: &str, mib: u64| NameStats {
            calls: 1000,
            measured: Some(MeasuredCalls {
                used: Spread::new(-1, 0, 0, 3).map(|mib| ByteDelta::new(mib << 20)),
                sum: ByteDelta::new(-5 << 30),
                peaked: Spread::new(64, 64, mib, mib).map(Bytes::mib),
                worst: WorstCall::new(250, None, Duration::from_millis(12_340), Bytes::mib(mib + 3)),
            }),
            ..NameStats::new(name.to_owned(), 0, true)
        };
        let unread = NameStats { calls: 1, unmeasured: 1, ..NameStats::new("unread".to_owned(), 0, true) };
        let doubtful = NameStats { sampled: 7, doubtful: 1, shared: 3, ..of("request #", 512) };
        Stats::of(vec![unread, of("step", 64), doubtful])
    }

    #[test]
    fn each_name_has_two_lines_and_its_doubts() {
        let text = stats().to_string();
        assert_eq!(
            text,
            "\
simulated device 0, by name
 name       calls          min  median  99 %  max    sum  worst   after
                           MiB     MiB   MiB  MiB    MiB
 ──────────────────────────────────────────────────────────────────────
 request #   1000  used     -1       0     0    3  -5120
                   peaked   64      64   512  512          #250  12.3 s
 step        1000  used     -1       0     0    3  -5120
                   peaked   64      64    64   64          #250  12.3 s
 unread         1  used      ?       ?     ?    ?      ?
                   peaked    ?       ?     ?    ?
request #: 7 of 1000 calls sampled: shorter peaks are missed
request #: 1 of 1000 calls with lost or unknown events: may be wrong
request #: 3 of 1000 calls with memory of threads in no scope, which counts in traces of several threads
unread: 1 of 1 call not measured",
            "\n{text}\n"
        );
        assert_eq!(Stats::default().to_string(), "no trace with `stats` has ended");
    }
}
