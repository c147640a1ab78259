//! The table of the parts of a whole, each with its size and a bar. Most reports contain one.

use super::{
    amounts::Amounts,
    table::{Cell, Fit, Table},
    tree::Row,
};

/// Returns a table of rows with a size, a number of blocks, and a bar.
pub(super) fn table(what: &str, rows: &[Row]) -> Table {
    part_table_in(what, rows, amounts_of(rows))
}

/// Returns the format of the table's amounts. Lines above and below the table use the same unit.
pub(super) fn amounts_of(rows: &[Row]) -> Amounts {
    Amounts::of(rows.iter().map(|row| row.bytes))
}

/// Returns the parts of a whole in its unit. Lines above and below the table have the unit of the whole too.
pub fn part_table(what: &str, rows: &[Row], whole: Amounts) -> Table {
    part_table_in(what, rows, whole.for_others(rows.iter().map(|row| row.bytes)))
}

/// Like [`part_table`], but with the unit and the decimals of other tables.
pub fn part_table_in(what: &str, rows: &[Row], amounts: Amounts) -> Table {
    let has_blocks = rows.iter().any(|row| row.blocks > 0);
    let mut table = Table::new().column(what, Fit::LeftCutFront).amounts("", amounts);
    if has_blocks {
        table = table.column("blocks", Fit::Right);
    }
    table = table.column("", Fit::Left);
    let largest = rows.iter().map(|row| row.bytes).max().unwrap_or(0);
    for Row { depth, name, bytes, blocks, each, note } in rows {
        let blocks = match (*blocks, each) {
            (0, _) => String::new(),
            (blocks @ 2.., Some(each)) => format!("{blocks} × {each}"),
            (blocks, _) => blocks.to_string(),
        };
        let blocks = has_blocks.then(|| blocks.into());
        let cells = [Cell::nested(*depth, name), amounts.show(*bytes).into()].into_iter().chain(blocks);
        table.row(cells.chain([Cell::bar(*bytes, largest)]));
        if let Some(caller) = note {
            table.note(depth + 1, &format!("from {caller}"));
        }
    }
    table
}
