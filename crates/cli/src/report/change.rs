//! Changed amounts: the limit of an increase, rows with the amounts before and after, and tables of them.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    io::{self, Write},
    str::FromStr,
};

use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::{ByteDelta, Bytes, one_line},
};
use gpumem_driver::settings::size;
use serde::{Serialize, Serializer};

use super::annotations::{Check, Finding, position};

/// At most this many rows of a table are printed; JSON contains all.
pub(super) const MOST_ROWS: usize = 20;

/// The allowed increase of a peak, such as `5%` or `100MiB`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Limit {
    Percent(f64),
    Bytes(Bytes),
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let message = || "write a share such as 5%, or an amount such as 100MiB".to_owned();
        if let Some(percent) = text.trim().strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|_| message())?;
            return if percent.is_finite() && percent >= 0.0 { Ok(Self::Percent(percent)) } else { Err(message()) };
        }
        // `5` is not a size. It most likely means 5 %.
        size(text).map(Self::Bytes).map_err(|_| message())
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent} %"),
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Limit {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "a share is not an exact figure, and it is not negative"
    )]
    pub(super) fn of(self, whole: u64) -> u64 {
        match self {
            Self::Percent(percent) => (whole as f64 * percent / 100.0) as u64,
            Self::Bytes(bytes) => bytes.get(),
        }
    }
}

/// The bytes of a row at the peak before, and at the peak after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Change {
    #[serde(rename = "before_bytes")]
    pub(crate) before: i64,
    #[serde(rename = "after_bytes")]
    pub(crate) after: i64,
    #[serde(rename = "change_bytes")]
    pub(crate) bytes: i64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Named {
    pub(crate) name: String,
    /// The earlier name of a place that is now at another line of its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) moved_from: Option<String>,
    #[serde(flatten)]
    pub(crate) change: Change,
}

impl Named {
    pub(super) fn new(name: impl Into<String>, change: Change) -> Self {
        Self { name: name.into(), moved_from: None, change }
    }

    /// Returns the name, with the earlier line of a place: `src/model.rs:44 (was :42)`.
    fn words(&self) -> String {
        let Self { name, moved_from, .. } = self;
        let (file, line) = moved_from.as_deref().and_then(position).map_or(("", 0), |(file, line, _)| (file, line));
        if file.is_empty() { name.clone() } else { format!("{name} (was :{line})") }
    }
}

impl Change {
    pub(super) fn new(before: i64, after: i64) -> Self {
        Self { before, after, bytes: after.saturating_sub(before) }
    }

    /// Returns whether the increase exceeds the limit.
    pub(super) fn exceeds(self, limit: Limit) -> bool {
        let [before, after] = [self.before, self.after].map(i64::unsigned_abs);
        after.saturating_sub(before) > limit.of(before)
    }

    /// Returns text such as `+66 MiB (+5.3 %)`.
    #[expect(clippy::cast_precision_loss, reason = "a share is not an exact figure")]
    pub(super) fn in_words(self) -> String {
        let Self { before, bytes, .. } = self;
        let sign = if bytes > 0 { "+" } else { "" };
        let amount = ByteDelta::new(bytes);
        if bytes == 0 {
            return "no change".to_owned();
        }
        if before == 0 {
            return format!("{sign}{amount}");
        }
        format!("{sign}{amount} ({:+.1} %)", bytes as f64 * 100.0 / before as f64)
    }
}

pub(super) fn named<S: Into<String>>(sides: [impl IntoIterator<Item = (S, i64)>; 2]) -> Vec<Named> {
    let mut sums: BTreeMap<String, [i64; 2]> = BTreeMap::new();
    for (at, side) in sides.into_iter().enumerate() {
        for (name, bytes) in side {
            sums.entry(name.into()).or_default()[at] += bytes;
        }
    }
    let named = |(name, [before, after]): (String, [i64; 2])| Named::new(name, Change::new(before, after));
    sorted(sums.into_iter().map(named).collect())
}

pub(super) fn sorted(mut all: Vec<Named>) -> Vec<Named> {
    all.sort_by_key(|named| {
        (std::cmp::Reverse(named.change.bytes.unsigned_abs()), std::cmp::Reverse(named.change.after))
    });
    all
}

pub(super) fn signed(bytes: u64) -> i64 {
    Bytes::new(bytes).signed()
}

/// Returns the sentence about a limit that ends the report.
pub(super) fn verdict(limit: Option<Limit>, is_exceeded: Option<bool>) -> Option<String> {
    let limit = limit?;
    Some(match is_exceeded {
        Some(true) => format!("The peak increased by more than {limit}."),
        Some(false) => format!("The peak did not increase by more than {limit}."),
        None => format!("Whether the peak increased by more than {limit} is not known."),
    })
}

/// Creates the check of a peak that was compared with that of `of`. `place` is the place that grew.
pub(super) fn check(of: &str, words: &str, peak: Change, limit: Option<Limit>, place: Option<String>) -> Check {
    let limit = limit.unwrap_or(Limit::Percent(0.0));
    let [before, after] = [peak.before, peak.after].map(ByteDelta::new);
    let text = format!("{of}: the peak of {words} was {before} and is {after}: {}, more than {limit}", peak.in_words());
    let found = peak.exceeds(limit).then_some(Finding { text, place });
    let name = format!("the peak of {words} increases by at most {limit}");
    Check { of: of.to_owned(), name, found: found.into_iter().collect() }
}

/// The heading of the text for a pull request.
pub(super) const MARKDOWN_TITLE: &str = "### GPU memory";

pub(super) fn write_verdict(
    limit: Option<Limit>,
    is_exceeded: Option<bool>,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let Some(verdict) = verdict(limit, is_exceeded) else { return Ok(()) };
    let role = if is_exceeded == Some(false) { Role::Text } else { Role::Alarm };
    writeln!(out, "\n{}", paint.on(role, verdict))
}

fn changed(all: &[Named]) -> Vec<&Named> {
    all.iter().filter(|named| named.change.bytes != 0).collect()
}

/// Writes a table of the changes, if there are any.
pub(super) fn write_rows(by: &str, all: &[Named], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let changed = changed(all);
    if changed.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{}", InPaint(&Rows { by, rows: &changed[..changed.len().min(MOST_ROWS)] }, paint))?;
    if changed.len() > MOST_ROWS {
        writeln!(out, "({} more; --json lists all)", changed.len() - MOST_ROWS)?;
    }
    Ok(())
}

pub(super) fn write_markdown_rows(by: &str, all: &[Named], out: &mut dyn Write) -> io::Result<()> {
    let changed = changed(all);
    if changed.is_empty() {
        return Ok(());
    }
    writeln!(out, "| {by} | before | after | change |\n|---|---:|---:|---:|")?;
    for named in changed.iter().take(MOST_ROWS) {
        let change = named.change;
        let [before, after] = [change.before, change.after].map(ByteDelta::new);
        writeln!(out, "| {} | {before} | {after} | {} |", escaped(&named.words()), change.in_words())?;
    }
    if changed.len() > MOST_ROWS {
        writeln!(out, "| {} more | | | |", changed.len() - MOST_ROWS)?;
    }
    writeln!(out)
}

/// Returns text for a cell of a Markdown table. It is marked as code, so that no character has a special meaning.
pub(super) fn escaped(text: &str) -> String {
    let text = one_line(text);
    if !text.is_empty() && !text.contains(['|', '`']) {
        return format!("`{text}`");
    }
    // Markdown readers disagree about where a cell ends if these characters are between backticks.
    let mut cell = "<code>".to_owned();
    for c in text.chars() {
        if c.is_ascii_punctuation() {
            let _ = write!(cell, "&#{};", u32::from(c));
        } else {
            cell.push(c);
        }
    }
    cell + "</code>"
}

struct Rows<'a> {
    by: &'a str,
    rows: &'a [&'a Named],
}

impl Show for Rows<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let values = |named: &&Named| [named.change.before, named.change.after, named.change.bytes];
        let amounts = Amounts::of(self.rows.iter().flat_map(values));
        let mut table = Table::new()
            .column(self.by, Fit::LeftCutFront)
            .amounts("before", amounts)
            .amounts("after", amounts)
            .amounts("change", amounts);
        for named in self.rows {
            let [before, after, change] = values(named);
            let (sign, role) = if change > 0 { ("+", Role::Less) } else { ("", Role::More) };
            let change = Cell::from(format!("{sign}{}", amounts.show(change))).role(role);
            table.row([Cell::from(named.words()), amounts.show(before).into(), amounts.show(after).into(), change]);
        }
        table.show(f, paint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shares_and_amounts() {
        assert_eq!("5%".parse(), Ok(Limit::Percent(5.0)));
        assert_eq!(" 0.5 % ".parse(), Ok(Limit::Percent(0.5)));
        assert_eq!("100MiB".parse(), Ok(Limit::Bytes(Bytes::mib(100))));
        assert_eq!("0".parse(), Ok(Limit::Bytes(Bytes::ZERO)));
        for text in ["", "%", "-1%", "five", "inf%", "nan%", "-1MiB", "5", "0.5"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
