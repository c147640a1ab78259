//! Writes fastai's line, to the byte.

use std::fmt;

use super::{
    amounts::Amounts,
    marks::or_unknown,
    paint::{Paint, Show},
    table::{Cell, Fit, Table},
};
use crate::{
    model::{Bytes, one_line},
    report::{Line, Report},
};

/// Writes the line, and the statements below it.
impl Show for Report {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        write!(f, "{self}")?;
        if self.lines.is_empty() {
            return Ok(());
        }
        f.write_str("\n")?;
        statements(&self.lines).show(f, paint)
    }
}

/// Returns one row for each statement, in the order of the source. The bars compare the peaks of statements.
fn statements(lines: &[Line]) -> Table {
    type AmountColumn = (&'static str, fn(&Line) -> i64);
    let columns: [AmountColumn; 3] = [
        ("used", |line| line.trace.used.get()),
        ("peaked", |line| line.trace.peaked.signed()),
        ("total", |line| line.total.get()),
    ];
    let is_measured = |line: &&Line| line.trace.is_measured();
    // All amounts have the unit of the line above, for comparison.
    let all: Vec<_> =
        lines.iter().filter(is_measured).flat_map(|line| columns.map(|(_, column)| column(line))).collect();
    let amounts = Amounts::in_mib(all);
    let mut table = Table::new().column("line", Fit::Right);
    for (name, _) in columns {
        table = table.amounts(name, amounts);
    }
    table = table.column("", Fit::Left).column("statement", Fit::LeftCutEnd);
    let needed = |line: &Line| -> i64 { line.trace.peak_over_start().signed() };
    let most = lines.iter().filter(is_measured).map(needed).max().unwrap_or(0);
    for line in lines {
        let columns = columns
            .map(|(_, column)| Cell::from(or_unknown(line.trace.is_measured().then(|| amounts.show(column(line))))));
        let bar = if line.trace.is_measured() { Cell::bar(needed(line), most) } else { Cell::default() };
        table.row([line.number.to_string().into()].into_iter().chain(columns).chain([bar, Cell::from(&*line.source)]));
    }
    table
}

/// Writes `△Used Peaked MB: {used:>6} {peaked:>6}` in whole MiB with commas between thousands, then ` (ctx)`, ` (subctx)`, ` (ctx: subctx)`
/// or nothing. A nested trace has two more spaces for each scope around it, then ` (outer > ctx: subctx)`. Values that were not measured
/// are `?`. Unlike fastai, the line ends in a note if threads in no scope count both in this trace and in traces of other threads, or if
/// its thread allocated only on another device.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trace = &self.trace;
        let (used, peaked) = if trace.is_measured() {
            (grouped(trace.used.mb()), grouped(trace.peaked.mb()))
        } else {
            ("?".to_owned(), "?".to_owned())
        };
        write!(f, "\u{25b3}Used Peaked MB: {used:>6} {peaked:>6}")?;
        let outer = self.outer.last().map(|outer| one_line(outer));
        let indent = 2 * self.outer.len();
        let (before, arrow) = outer.as_deref().map_or(("", ""), |outer| (outer, " > "));
        match (self.ctx.as_deref().map(one_line), self.subctx.as_deref().map(one_line)) {
            (None, None) if outer.is_none() => {}
            (None, None) => write!(f, "{:indent$} (in {before})", "")?,
            (Some(name), None) | (None, Some(name)) => write!(f, "{:indent$} ({before}{arrow}{name})", "")?,
            (Some(ctx), Some(subctx)) => write!(f, "{:indent$} ({before}{arrow}{ctx}: {subctx})", "")?,
        }
        if let Some(device) = trace.allocated_on {
            write!(f, " [of device {}; its thread allocated on device {device}]", trace.device)?;
        }
        if trace.shared > Bytes::ZERO { write!(f, " [{} by threads in no scope]", trace.shared) } else { Ok(()) }
    }
}

/// Returns the number with commas between thousands, as Python's `,` format does.
#[must_use]
pub fn grouped(number: impl Into<i128>) -> String {
    let number = number.into();
    let digits = number.unsigned_abs().to_string();
    let mut text = if number < 0 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        export::paint::InPaint,
        model::{ByteDelta, Gauge, Trace},
    };

    fn line(used: i64, peaked: u64, ctx: &str, subctx: &str) -> String {
        let trace = Trace {
            gauge: Gauge::Exact,
            used: ByteDelta::new(used << 20),
            peaked: Bytes::mib(peaked),
            ..Trace::off(0)
        };
        Report::new(trace, Some(ctx), Some(subctx)).to_string()
    }

    #[test]
    fn numbers_have_groups_of_three_digits() {
        let shown = [0_i64, 12, 123, 1234, -123_456, 1_234_567].map(grouped);
        assert_eq!(shown, ["0", "12", "123", "1,234", "-123,456", "1,234,567"]);
    }

    #[test]
    fn lines_are_those_of_fastai() {
        for (used, peaked, ctx, subctx, expected) in [
            (0, 0, "", "", "△Used Peaked MB:      0      0"),
            (10, 15, "forward", "exit", "△Used Peaked MB:     10     15 (forward: exit)"),
            (20, 0, "epoch", "", "△Used Peaked MB:     20      0 (epoch)"),
            (-300, 300, "", "exit", "△Used Peaked MB:   -300    300 (exit)"),
            (0, 0, "two\nlines \u{1b}[1m", "é", "△Used Peaked MB:      0      0 (two\\nlines \\u{1b}[1m: é)"),
            (
                0,
                0,
                "\u{61c}\u{200e}\u{200f}\u{202e}\u{2066}",
                "",
                "△Used Peaked MB:      0      0 (\\u{61c}\\u{200e}\\u{200f}\\u{202e}\\u{2066})",
            ),
            (79_872, 1_024, "", "", "△Used Peaked MB: 79,872  1,024"),
            (-1_234, 143_771, "", "", "△Used Peaked MB: -1,234 143,771"),
            (-12_345_678, 0, "", "", "△Used Peaked MB: -12,345,678      0"),
        ] {
            assert_eq!(line(used, peaked, ctx, subctx), expected);
        }
    }

    #[test]
    fn a_nested_trace_is_indented_and_names_the_scope_around_it() {
        let line = |outer: &[&str], ctx, subctx| {
            let report =
                Report::new(Trace::off(0), ctx, subctx).inside(outer.iter().map(ToString::to_string).collect());
            report.to_string().replace("△Used Peaked MB:      ?      ?", "")
        };
        assert_eq!(line(&["train"], Some("forward"), Some("exit")), "   (train > forward: exit)");
        assert_eq!(line(&["train", "a\nb"], Some("forward"), None), "     (a\\nb > forward)");
        assert_eq!(line(&["train"], None, Some("exit")), "   (train > exit)");
        assert_eq!(line(&["train"], None, None), "   (in train)");
    }

    #[test]
    fn statements_stand_under_their_function() {
        let mut lines = crate::report::Lines::default();
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(20 << 20), ..Trace::off(0) };
        lines.push(7, "let x = f();", Trace { peaked: Bytes::kib(512), ..trace });
        lines.push(8, "g(\"\u{1b}[1m\")", Trace { stale: true, ..trace });
        let (_, lines) = lines.finish(9, Trace { used: ByteDelta::new(-1 << 30), ..trace });
        let text = InPaint(&Report { lines, ..Report::new(trace, Some("f"), Some("exit")) }, Paint::PLAIN).to_string();
        assert_eq!(
            text,
            "\
△Used Peaked MB:     20      0 (f: exit)
 line   used  peaked  total            statement
         MiB     MiB    MiB
 ────────────────────────────────────────────────────
    7     20      <1     20  ████████  let x = f();
    8      ?       ?      ?            g(\"\\u{1b}[1m\")
    9  -1024       0   -984            }",
            "\n{text}\n"
        );
    }

    #[test]
    fn statements_have_the_unit_of_the_line_above() {
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(20 << 30), ..Trace::off(0) };
        let mut lines = crate::report::Lines::default();
        lines.push(7, "f();", trace);
        let (_, lines) = lines.finish(8, trace);
        let text = InPaint(&Report { lines, ..Report::new(trace, Some("f"), None) }, Paint::PLAIN).to_string();
        assert!(text.starts_with("△Used Peaked MB: 20,480 "), "{text}");
        assert!(text.contains("         MiB     MiB    MiB\n") && text.contains("\n    7  20480 "), "{text}");
    }

    #[test]
    fn memory_that_also_counts_for_other_threads_is_named() {
        let trace = Trace { gauge: Gauge::Exact, shared: Bytes::mib(12), ..Trace::off(0) };
        let line = |ctx| Report::new(trace, ctx, Some("exit")).to_string();
        assert_eq!(
            line(Some("handle")),
            "△Used Peaked MB:      0      0 (handle: exit) [12 MiB by threads in no scope]"
        );
        assert_eq!(line(None), "△Used Peaked MB:      0      0 (exit) [12 MiB by threads in no scope]");
    }

    #[test]
    fn a_trace_of_another_device_says_so() {
        let trace = Trace { gauge: Gauge::Exact, allocated_on: Some(3), ..Trace::off(1) };
        assert_eq!(
            Report::new(trace, Some("exit"), None).to_string(),
            "△Used Peaked MB:      0      0 (exit) [of device 1; its thread allocated on device 3]"
        );
    }

    #[test]
    fn what_was_not_measured_is_no_number() {
        let off = Report::new(Trace::off(0), None, Some("exit"));
        assert_eq!(off.to_string(), "△Used Peaked MB:      ?      ? (exit)");
        let stale = Trace { gauge: Gauge::Sampled, stale: true, used: ByteDelta::new(7 << 20), ..Trace::off(0) };
        assert_eq!(Report::new(stale, Some(""), Some("")).to_string(), "△Used Peaked MB:      ?      ?");
    }
}
