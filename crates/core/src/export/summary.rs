//! Writes the memory of each scope as a table.

use std::fmt;

use super::{
    amounts::Amounts,
    paint::{Paint, Role, Show},
    pools::pool_in_words,
    table::{Cell, Fit, Table},
};
use crate::{
    model::Bytes,
    report::{ScopeSummary, Summary, missing_in_words},
};

/// Writes a tree of scopes for each device, the highest peak first. The bars compare peaks.
impl Show for Summary {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        if let Some(why) = &self.not_intercepted {
            writeln!(f, "{}", paint.on(Role::Alarm, format_args!("allocations are not intercepted: {why}")))?;
        }
        if self.scopes.is_empty() {
            f.write_str(match &self.not_intercepted {
                Some(_) => "the allocated memory is not known",
                None if self.pools.is_empty() => "no scope was opened and nothing was allocated",
                None => "no scope was opened, and the pools handed nothing out",
            })?;
        }
        let (rows, has_shared) = self.rows();
        for (at, scopes) in rows.chunk_by(|a, b| a.device == b.device).enumerate() {
            let ScopeSummary { device, simulated, .. } = &scopes[0];
            let (before, simulated) = (if at > 0 { "\n" } else { "" }, if *simulated { "simulated " } else { "" });
            writeln!(f, "{before}{}", paint.on(Role::Heading, format_args!("{simulated}device {device}, by scope")))?;
            table(scopes).show(f, paint)?;
        }
        for pool in &self.pools {
            let pool_in_words = pool_in_words(pool, in_use(rows.iter().filter(|scope| scope.device == pool.device)));
            let role = if pool.wrong_calls() > 0 { Role::Alarm } else { Role::Faint };
            let device = if self.pools.iter().any(|other| other.device != pool.device) {
                format!("device {}: ", pool.device)
            } else {
                String::new()
            };
            write!(f, "\n{}", paint.on(role, format_args!("{device}{pool_in_words}")))?;
        }
        if self.untracked + self.lost > 0 {
            write!(f, "\n{}", paint.on(Role::Alarm, missing_in_words(self.untracked, self.lost)))?;
        }
        if !self.scopes.is_empty() {
            let legend = "used: still in use. at peak: its part of the peak of the whole process.";
            write!(f, "\n{}", paint.on(Role::Faint, legend))?;
        }
        if has_shared {
            let legend = "#: names that differ only in numbers; their peak is at least this.";
            write!(f, "\n{}", paint.on(Role::Faint, legend))?;
        }
        Ok(())
    }
}

type AmountColumn = (&'static str, fn(&ScopeSummary) -> Bytes);
const IN_USE: [AmountColumn; 3] =
    [("peak", |scope| scope.peak), ("at peak", |scope| scope.at_peak), ("used", |scope| scope.used)];

/// Returns the format of the memory in use. Its unit is used in the whole table and in the lines below it.
fn in_use<'a>(scopes: impl IntoIterator<Item = &'a ScopeSummary>) -> Amounts {
    Amounts::of(scopes.into_iter().flat_map(|scope| IN_USE.map(|(_, column)| column(scope).signed())))
}

fn table(scopes: &[ScopeSummary]) -> Table {
    let amounts = in_use(scopes);
    let total: AmountColumn = ("total", |scope| scope.allocated);
    // The sum of all allocations may be far larger, so it has its own decimals.
    let totals = amounts.for_others(scopes.iter().map(|scope| scope.allocated.signed()));
    let columns: Vec<_> = IN_USE.map(|column| (column, amounts)).into_iter().chain([(total, totals)]).collect();
    let mut table = Table::new().column("scope", Fit::LeftCutFront);
    for ((name, _), amounts) in &columns {
        table = table.amounts(name, *amounts);
    }
    table = table.column("allocs", Fit::Right).column("calls", Fit::Right).column("", Fit::Left);
    let highest = scopes.iter().map(|scope| scope.peak.signed()).max().unwrap_or(0);
    // The outer scopes of the last row's scope, the outermost first.
    let mut around: Vec<&[String]> = Vec::new();
    for scope in scopes {
        while around.last().is_some_and(|outer| !scope.path.starts_with(outer) || outer.len() == scope.path.len()) {
            around.pop();
        }
        let is_whole = scope.path.is_empty();
        // Outer scopes without their own row are written before its name.
        let own = &scope.path[around.last().map_or(0, |outer| outer.len())..];
        let name = if is_whole { "(whole process)".to_owned() } else { own.join(" > ") };
        let calls = if is_whole { String::new() } else { scope.calls.to_string() };
        let row = [Cell::nested(around.len(), &name)]
            .into_iter()
            .chain(columns.iter().map(|((_, column), amounts)| amounts.show(column(scope).signed()).into()))
            .chain([scope.allocations.to_string().into(), calls.into(), Cell::bar(scope.peak.signed(), highest)]);
        table.row(row);
        around.push(&scope.path);
    }
    table
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthStr;

    use super::*;
    use crate::{export::samples, report::Path};

    fn scope(path: &[&str], parent: Option<usize>, columns: [u64; 6]) -> Path {
        let [calls, used, peak, at_peak, allocated, allocations] = columns;
        let own = ScopeSummary {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            place: None,
            device: 0,
            simulated: false,
            calls,
            used: Bytes::mib(used),
            peak: Bytes::mib(peak),
            at_peak: Bytes::mib(at_peak),
            device_peak: Bytes::mib(peak),
            allocated: Bytes::mib(allocated),
            allocations,
        };
        Path { parent, own }
    }

    #[track_caller]
    fn check(paths: Vec<Path>, expected: &str) {
        let text = Summary::of(paths, 0, 0, None).to_string();
        assert_eq!(text, expected, "\n{text}\n");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "\n{text}\n");
    }

    #[test]
    fn scopes_stand_inside_scopes() {
        check(
            vec![
                scope(&[], None, [0, 276, 786, 0, 0, 0]),
                scope(&["load"], Some(0), [1, 256, 256, 256, 256, 1]),
                scope(&["train"], Some(0), [1, 20, 530, 10, 0, 0]),
                scope(&["train", "a scope with a long name"], Some(2), [3, 20, 530, 520, 1566, 6]),
                // Nothing was allocated in this scope, and no scope was opened in it on this device.
                scope(&["eval"], Some(0), [0, 0, 0, 0, 0, 0]),
                scope(&["eval", "forward"], Some(4), [2, 0, 0, 0, 0, 0]),
                scope(&["nothing"], Some(0), [0, 0, 0, 0, 0, 0]),
            ],
            "\
device 0, by scope
 scope                       peak  at peak  used  total  allocs  calls
                              MiB      MiB   MiB    MiB
 ───────────────────────────────────────────────────────────────────────────────
 (whole process)              786      786   276   1822       7         ████████
   train                      530      530    20   1566       6      1  █████▍
     …cope with a long name   530      520    20   1566       6      3  █████▍
   load                       256      256   256    256       1      1  ██▌
   eval                         0        0     0      0       0      0
     forward                    0        0     0      0       0      2
used: still in use. at peak: its part of the peak of the whole process.",
        );
    }

    #[test]
    fn many_names_that_differ_in_numbers_are_one_row() {
        let mut paths = vec![scope(&[], None, [0, 20, 100, 0, 0, 0])];
        for number in 0..17 {
            let name = format!("request {number}");
            paths.push(scope(&[&name], Some(0), [1, 1, 10 + number, 2, 5, 1]));
            let at = paths.len() - 1;
            paths.push(scope(&[&name, "decode"], Some(at), [2, 1, 3, 0, 5, 1]));
            paths.push(scope(&[&name, if number == 0 { "layer 1" } else { "layer 2" }], Some(at), [1, 0, 4, 0, 5, 1]));
        }
        paths.push(scope(&["load 1"], Some(0), [1, 1, 12, 0, 0, 0]));
        paths.push(scope(&["load 2"], Some(0), [1, 1, 11, 0, 0, 0]));
        check(
            paths,
            "\
device 0, by scope
 scope            peak  at peak  used  total  allocs  calls
                   MiB      MiB   MiB    MiB
 ────────────────────────────────────────────────────────────────────
 (whole process)   100       34    20    255      51         ████████
   request #        34       34    17    255      51     17  ██▋
     decode         17        0    17     85      17     34  █▎
     layer 1         4        0     0      5       1      1  ▎
     layer 2         4        0     0     80      16     16  ▎
   load 1           12        0     1      0       0      1  ▉
   load 2           11        0     1      0       0      1  ▉
used: still in use. at peak: its part of the peak of the whole process.
#: names that differ only in numbers; their peak is at least this.",
        );
    }

    #[test]
    fn numbers_are_not_cut_off() {
        let many = [1_000_000_000, 19_999, 99_999, 99_999, 99_999, 9_999_999_999];
        let text = Summary::of(vec![scope(&["a name of 20 columns"], None, many)], 0, 0, None).to_string();
        // The name takes the space of the bar.
        let line = " a name of 20 columns  97.66    97.66  19.53  97.66  9999999999  1000000000\n";
        assert!(text.contains(line), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let huge = [1000, 134_217_728, 134_217_728, 134_217_728, 8_589_934_592, 9999];
        let text = Summary::of(vec![scope(&["a name of 20 columns"], None, huge)], 0, 0, None).to_string();
        assert!(text.contains("  128      128   128   8192    9999   1000  ████████\n"), "{text}");
    }

    #[test]
    fn rows_stand_in_80_columns_whatever_scopes_are_called() {
        let long = "x".repeat(500);
        let accents = "e\u{301}\u{301}\u{301} 👩‍👩‍👧‍👦 🇪🇺".repeat(9);
        let wide = "模型的前向传播和反向传播以及优化器的状态更新都在这里";
        let names = [&long, &accents, wide, "two\nlines\tand \u{1b}[31mred\u{7}", "عربي \u{202e}backwards", "\0"];
        let mut paths = vec![scope(&[], None, [1000, 4 << 20, 4 << 20, 4 << 20, 8 << 30, 9999])];
        paths.extend(names.map(|name| scope(&[name], Some(0), [1000, 4 << 20, 4 << 20, 4 << 20, 8 << 30, 9999])));
        let text = Summary::of(paths, 0, 0, None).to_string();
        for line in text.lines() {
            assert!(line.width() <= 80 && !line.contains(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn the_table_and_the_lines_of_pools_have_one_unit() {
        let scopes = vec![scope(&["a"], None, [100, 50, 50, 50, 20_480, 100])];
        let mut summary = Summary::of(scopes, 0, 0, None);
        summary.pools.push(samples::pool("arena", Bytes::mib(512), Bytes::mib(2048)));
        let text = summary.to_string();
        assert!(text.contains("\n         MiB      MiB   MiB    MiB\n"), "{text}");
        assert!(text.contains("\n a        50       50    50  20480     100    100  ████████\n"), "{text}");
        assert!(text.contains("\ncache of arena: 1536 MiB of 2048 MiB\n"), "{text}");
    }

    #[test]
    fn a_scope_is_not_without_the_scopes_around_it() {
        let mut summary = Summary::of(
            vec![scope(&[], None, [0; 6]), scope(&["a"], Some(0), [1; 6]), scope(&["a", "b"], Some(1), [1; 6])],
            0,
            0,
            None,
        );
        summary.scopes.retain(|scope| scope.path.len() != 1);
        assert!(summary.to_string().contains("\n   a > b "), "{summary}");
    }

    #[test]
    fn what_may_be_wrong_is_reported() {
        let some = || vec![scope(&["a"], None, [1; 6])];
        let text = Summary::of(some(), 1, 2, None).to_string();
        assert!(text.contains("\n1 free of an unknown block, 2 lost events: some numbers may be wrong\n"), "{text}");
        let why = Some("there is no driver".to_owned());
        let text = Summary::of(Vec::new(), 0, 0, why).to_string();
        assert_eq!(text, "allocations are not intercepted: there is no driver\nthe allocated memory is not known");
        let text = Summary::of(Vec::new(), 0, 0, None).to_string();
        assert_eq!(text, "no scope was opened and nothing was allocated");
        let text = Summary::of(Vec::new(), 0, 2, None).to_string();
        assert!(text.ends_with(", 2 lost events: some numbers may be wrong"), "{text}");
    }
}
