//! fastai's line, to the byte.

use std::{borrow::Cow, fmt, io};

use super::table::{Side, Table, mib};
use crate::{
    model::ByteDelta,
    report::{Line, Report},
};

pub(super) fn write(report: &Report, to: &mut dyn io::Write) -> io::Result<()> {
    writeln!(to, "{report}")?;
    if report.lines.is_empty() { Ok(()) } else { write!(to, "{}", statements(&report.lines)) }
}

/// Each statement by itself, under the line of the function.
fn statements(lines: &[Line]) -> Table {
    const HEADING: [(&str, Side); 5] = [
        ("line", Side::Right),
        ("used MB", Side::Right),
        ("peaked MB", Side::Right),
        ("total MB", Side::Right),
        ("statement", Side::Left),
    ];
    let mut table = Table::new(&HEADING);
    for Line { number, source, trace, total } in lines {
        let shown = |bytes: ByteDelta| if trace.is_measured() { mib(bytes) } else { "?".to_owned() };
        let peaked = ByteDelta::new(trace.peaked.get().cast_signed());
        table.row([number.to_string().as_str(), &shown(trace.used), &shown(peaked), &shown(*total), source]);
    }
    table
}

/// `△Used Peaked MB: {used:>6} {peaked:>6}` in whole MiB with commas between thousands, then ` (ctx)`, ` (subctx)`,
/// ` (ctx: subctx)` or nothing. Figures that were not measured are `?`. A trace that overlapped those of other threads ends in a
/// note that fastai does not have.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trace = &self.trace;
        let (used, peaked) = if trace.is_measured() {
            (grouped(trace.used.mb()), grouped(trace.peaked.mb().cast_signed()))
        } else {
            ("?".to_owned(), "?".to_owned())
        };
        write!(f, "\u{25b3}Used Peaked MB: {used:>6} {peaked:>6}")?;
        match (self.ctx.as_deref().map(one_line), self.subctx.as_deref().map(one_line)) {
            (None, None) => {}
            (Some(word), None) | (None, Some(word)) => write!(f, " ({word})")?,
            (Some(ctx), Some(subctx)) => write!(f, " ({ctx}: {subctx})")?,
        }
        if trace.overlapped { f.write_str(" [overlaps other threads]") } else { Ok(()) }
    }
}

/// A report is a line, whatever it is called: line breaks and terminal controls are shown, not done.
pub(super) fn one_line(word: &str) -> Cow<'_, str> {
    // Controls, line and paragraph separators, and all that has to do with the direction of text (Unicode's `Bidi_Control`).
    let acts = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !word.contains(acts) {
        return Cow::Borrowed(word);
    }
    let shown = |c: char| if acts(c) { c.escape_default().to_string() } else { c.to_string() };
    Cow::Owned(word.chars().map(shown).collect())
}

/// Commas between thousands, as Python's `,` format does.
fn grouped(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if number < 0 {
        text.push('-');
    }
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
        export::TEXT,
        model::{ByteDelta, Bytes, Gauge, Trace},
    };

    fn line(used: i64, peaked: u64, ctx: &str, subctx: &str) -> String {
        let trace = Trace {
            gauge: Gauge::Exact,
            used: ByteDelta::new(used << 20),
            peaked: Bytes::mib(peaked),
            ..Trace::off(0)
        };
        TEXT.line(&Report::new(trace, Some(ctx), Some(subctx)))
    }

    #[test]
    fn lines_are_those_of_fastai() {
        for (used, peaked, ctx, subctx, expected) in [
            (0, 0, "", "", "△Used Peaked MB:      0      0\n"),
            (10, 15, "forward", "exit", "△Used Peaked MB:     10     15 (forward: exit)\n"),
            (20, 0, "epoch", "", "△Used Peaked MB:     20      0 (epoch)\n"),
            (-300, 300, "", "exit", "△Used Peaked MB:   -300    300 (exit)\n"),
            (0, 0, "two\nlines \u{1b}[1m", "é", "△Used Peaked MB:      0      0 (two\\nlines \\u{1b}[1m: é)\n"),
            (
                0,
                0,
                "\u{61c}\u{200e}\u{200f}\u{202e}\u{2066}",
                "",
                "△Used Peaked MB:      0      0 (\\u{61c}\\u{200e}\\u{200f}\\u{202e}\\u{2066})\n",
            ),
            (79_872, 1_024, "", "", "△Used Peaked MB: 79,872  1,024\n"),
            (-1_234, 143_771, "", "", "△Used Peaked MB: -1,234 143,771\n"),
            (-12_345_678, 0, "", "", "△Used Peaked MB: -12,345,678      0\n"),
        ] {
            assert_eq!(line(used, peaked, ctx, subctx), expected);
        }
    }

    #[test]
    fn statements_stand_under_their_function() {
        let mut lines = crate::report::Lines::default();
        let trace = Trace { gauge: Gauge::Exact, used: ByteDelta::new(20 << 20), ..Trace::off(0) };
        lines.push(7, "let x = f();", Trace { peaked: Bytes::kib(512), ..trace });
        lines.push(8, "g(\"\u{1b}[1m\")", Trace { stale: true, ..trace });
        let (_, lines) = lines.finish(9, Trace { used: ByteDelta::new(-1 << 30), ..trace });
        assert_eq!(
            TEXT.line(&Report { lines, ..Report::new(trace, Some("f"), Some("exit")) }),
            "△Used Peaked MB:     20      0 (f: exit)\n \
             line    used MB  peaked MB  total MB  statement\n    \
             7     20.000      0.500    20.000  let x = f();\n    \
             8          ?          ?         ?  g(\"\\u{1b}[1m\")\n    \
             9  -1024.000      0.000  -984.000  }\n"
        );
    }

    #[test]
    fn a_trace_that_overlapped_others_says_so() {
        let trace = Trace { gauge: Gauge::Exact, overlapped: true, ..Trace::off(0) };
        let line = |ctx| TEXT.line(&Report::new(trace, ctx, Some("exit")));
        assert_eq!(line(Some("handle")), "△Used Peaked MB:      0      0 (handle: exit) [overlaps other threads]\n");
        assert_eq!(line(None), "△Used Peaked MB:      0      0 (exit) [overlaps other threads]\n");
    }

    #[test]
    fn what_was_not_measured_is_no_number() {
        let off = Report::new(Trace::off(0), None, Some("exit"));
        assert_eq!(TEXT.line(&off), "△Used Peaked MB:      ?      ? (exit)\n");
        let stale = Trace { gauge: Gauge::Sampled, stale: true, used: ByteDelta::new(7 << 20), ..Trace::off(0) };
        assert_eq!(Report::new(stale, Some(""), Some("")).to_string(), "△Used Peaked MB:      ?      ?");
    }
}
