//! Columns of text within 80 columns.

use std::fmt;

use comfy_table::{CellAlignment, ContentArrangement, Row, presets};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::text::one_line;
use crate::model::ByteDelta;

/// On which side of its column a text stands.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Left,
    Right,
}

/// A heading and rows; what does not fit into 80 columns is cut off with `…`, the longest column first.
pub(super) struct Table(comfy_table::Table);

impl Table {
    pub(super) fn new(columns: &[(&str, Side)]) -> Self {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(80);
        table.set_header(row(columns.iter().map(|(name, _)| *name)));
        for (column, (_, side)) in table.column_iter_mut().zip(columns) {
            // Cut where the space ends, not at a word.
            column.set_delimiter('\0');
            column.set_cell_alignment(match side {
                Side::Left => CellAlignment::Left,
                Side::Right => CellAlignment::Right,
            });
        }
        Self(table)
    }

    pub(super) fn row<'a>(&mut self, cells: impl IntoIterator<Item = &'a str>) {
        self.0.add_row(row(cells));
    }
}

fn row<'a>(cells: impl IntoIterator<Item = &'a str>) -> Row {
    let mut row = Row::from(cells.into_iter().map(one_line).collect::<Vec<_>>());
    row.max_height(1);
    row
}

/// The lines, each with its break.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.lines().try_for_each(|line| writeln!(f, "{}", line.trim_end()))
    }
}

/// As wide as so many columns, or wider if it is.
pub(super) fn padded(text: &str, columns: usize) -> String {
    format!("{text}{:pad$}", "", pad = columns.saturating_sub(text.width()))
}

/// At most so many columns: of a longer name the end is kept, which tells most.
pub(super) fn shortened(name: &str, most: usize) -> String {
    let name = one_line(name);
    if name.width() <= most {
        return name.into_owned();
    }
    let mut room = most.saturating_sub(1);
    let fits = |(_, c): &(usize, char)| {
        let left = room.checked_sub(c.width().unwrap_or(0));
        room = left.unwrap_or_default();
        left.is_some()
    };
    let end = name.char_indices().rev().take_while(fits).last().map_or(name.len(), |(at, _)| at);
    format!("…{}", &name[end..])
}

/// MiB with three decimals, so that a KiB shows.
pub(super) fn mib(bytes: ByteDelta) -> String {
    #[expect(clippy::cast_precision_loss, reason = "three decimals are printed")]
    let mib = bytes.get() as f64 / f64::from(1 << 20);
    format!("{mib:.3}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_in_80() {
        let mut table = Table::new(&[("MB", Side::Right), ("what", Side::Left)]);
        table.row(["1.000", "short"]);
        table.row(["143771.000", &"long ".repeat(30)]);
        table.row(["-1.000", "two\nlines"]);
        let text = table.to_string();
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "         MB  what",
                "      1.000  short",
                " 143771.000  long long long long long long long long long long long long long …",
                "     -1.000  two\\nlines",
            ]
        );
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_kib_shows() {
        for (bytes, text) in [(0, "0.000"), (1 << 10, "0.001"), (-(3 << 19), "-1.500"), (143_771 << 20, "143771.000")] {
            assert_eq!(mib(ByteDelta::new(bytes)), text);
        }
    }
}
