//! Text that several reports share.

use std::collections::HashMap;

use gpumem_core::{
    export::{Amounts, Leaf, Row, Tree},
    model::{Bytes, Device, one_line},
    report::SharedNames,
};

use crate::history::{OriginSum, Sum};

/// At most this many rows of a tree are shown.
const MOST_ROWS: usize = 24;

/// The text of the line `besides` if a recording of the peaks does not contain that memory.
pub(super) const BESIDES_NOT_KNOWN: &str = "? (managed and pinned host memory at the peak is not in the recording)";

/// Returns text such as `60 %`. Less than half a percent is `<1 %`.
pub(super) fn percent(part: i64, whole: u64) -> String {
    let (part, whole) = (i128::from(part), i128::from(whole.max(1)));
    match (part * 200 / whole + 1) / 2 {
        0 if part > 0 => "<1 %".to_owned(),
        percent => format!("{percent} %"),
    }
}

/// Returns the unit for a table of the parts of this memory, and for the lines above and below it.
pub(super) fn unit_of(whole: u64) -> Amounts {
    Amounts::of([Bytes::new(whole).signed()])
}

/// Returns text such as `pool 800 MiB (66 %), vmm 400 MiB (33 %)`: the largest parts, and the number of the others.
pub(super) fn shares(sums: &[Sum], whole: u64) -> String {
    const MOST: usize = 4;
    let unit = unit_of(whole);
    let share = |Sum { name, bytes, .. }: &Sum| {
        format!("{} {} ({})", one_line(name), unit.in_words(*bytes), percent(*bytes, whole))
    };
    let mut words: Vec<_> = sums.iter().take(MOST).map(share).collect();
    if sums.len() > MOST {
        words.push(format!("{} more", sums.len() - MOST));
    }
    words.join(", ")
}

/// Returns `device 0`, with the driver's name for it.
pub(super) fn device_in_words(device: Device, name: Option<&str>) -> String {
    name.map_or_else(|| device.to_string(), |name| format!("{device} ({})", one_line(name)))
}

/// Returns whether any of this memory was allocated in a scope. If not, reports do not mention scopes.
pub(super) fn has_scopes(held: &[OriginSum<'_>]) -> bool {
    held.iter().any(|held| !held.origin.path.is_empty())
}

/// Returns nested rows of scopes, each with its places, the largest first. Origins that look the same in a row are
/// joined.
pub(super) fn tree(held: &[OriginSum<'_>]) -> Vec<Row> {
    let names = SharedNames::of(held.iter().map(|held| &*held.origin.path));
    let mut known = HashMap::new();
    let mut rows = Vec::new();
    for OriginSum { origin, bytes, blocks, .. } in held {
        let key = (names.path(&origin.path), origin.place(), &origin.caller);
        let at = *known.entry(key).or_insert_with_key(|(path, place, _)| {
            rows.push((path.clone(), place.clone(), *origin, [0, 0]));
            rows.len() - 1
        });
        let [all_bytes, all_blocks] = &mut rows[at].3;
        (*all_bytes, *all_blocks) = (*all_bytes + bytes, *all_blocks + blocks);
    }
    rows.retain(|(.., sums)| *sums != [0, 0]);
    rows.sort_by_key(|(.., [bytes, _])| std::cmp::Reverse(*bytes));
    let has_scopes = rows.iter().any(|(path, ..)| !path.is_empty());
    let mut tree = Tree::new();
    for (path, name, origin, [bytes, blocks]) in rows {
        let leaf = Leaf { name, bytes, blocks: blocks.unsigned_abs(), note: origin.caller.clone() };
        match &*path {
            [] if has_scopes => tree.leaf(&[origin.scope()], leaf),
            path => tree.leaf(path, leaf),
        }
    }
    tree.rows(MOST_ROWS)
}
