//! `--calls`: the scopes and functions whose calls allocated what was live at the peak, as a tree.

use std::{
    collections::{HashMap, HashSet},
    io::{self, Write},
};

use gpumem_core::export::{Leaf, Paint, Role, Row, Tree};
use serde::Serialize;

use super::text::{Bars, device_in_words, shown, signed_amount};
use crate::{
    formats::frames::{held_at, stack_to_place},
    history::{History, Moment},
};

/// What one stack allocated and was live at the peak of its device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Calls {
    pub(crate) device: u32,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
    /// Scopes, then functions with their lines; the outermost first.
    pub(crate) frames: Vec<String>,
    #[serde(skip)]
    number: u16,
}

/// Those with the most bytes first.
pub(crate) fn calls(history: &History) -> Vec<Calls> {
    let folder = &history.definitions().process().folder;
    let mut all: Vec<Calls> = Vec::new();
    let mut known = HashMap::new();
    for held in held_at(history, Moment::Peak).iter().filter(|held| held.origin.kind.is_on_device()) {
        let frames: Vec<_> = stack_to_place(history, held.origin).iter().map(|frame| frame.in_words(folder)).collect();
        let at = *known.entry((held.device, frames.clone())).or_insert(all.len());
        if at == all.len() {
            let device = history.devices[usize::from(held.device)].device.ordinal;
            all.push(Calls { device, bytes: 0, blocks: 0, frames, number: held.device });
        }
        all[at].bytes += held.bytes;
        all[at].blocks += held.blocks;
    }
    all.sort_by_key(|calls| std::cmp::Reverse(calls.bytes));
    all
}

/// So many rows are printed; JSON has all.
const MOST: usize = 40;

pub(crate) fn write(history: &History, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let calls = calls(history);
    for (number, device) in (0_u16..).zip(&history.devices).filter(|(_, device)| device.peak_at.is_some()) {
        let of_device: Vec<_> = calls.iter().filter(|calls| calls.number == number).collect();
        let name = history.definitions().device(device.device).and_then(|defined| defined.name.as_deref());
        let peak = signed_amount(of_device.iter().map(|calls| calls.bytes).sum());
        let title = format!("{}: the peak was {peak}", device_in_words(device.device, name));
        writeln!(out, "{}{}", if number > 0 { "\n" } else { "" }, paint.on(Role::Heading, title))?;
        writeln!(out, "{}", shown(&Bars("allocated by", &rows(&of_device)), paint))?;
    }
    if calls.is_empty() {
        writeln!(out, "nothing was allocated")?;
    }
    Ok(())
}

/// A function that called only one other has no row, because it has the same bytes. The caller of an innermost function is a note.
fn rows(calls: &[&Calls]) -> Vec<Row> {
    let mut called: HashMap<&[String], HashSet<&str>> = HashMap::new();
    for frames in calls.iter().map(|calls| &*calls.frames) {
        for at in 1..frames.len() {
            called.entry(&frames[..at]).or_default().insert(&frames[at]);
        }
    }
    let branches = |path: &[String]| called.get(path).is_some_and(|functions| functions.len() > 1);
    let mut tree = Tree::new();
    for Calls { frames, bytes, blocks, .. } in calls {
        let Some((innermost, outer)) = frames.split_last() else { continue };
        let path: Vec<_> =
            (1..=outer.len()).filter(|at| branches(&frames[..*at])).map(|at| frames[at - 1].clone()).collect();
        let note = outer.last().filter(|_| !branches(outer)).cloned();
        tree.leaf(&path, Leaf { name: innermost.clone(), bytes: *bytes, blocks: blocks.unsigned_abs(), note });
    }
    tree.rows(MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows_of(stacks: &[(&str, i64)]) -> Vec<String> {
        let calls: Vec<_> = stacks
            .iter()
            .map(|(frames, bytes)| Calls {
                device: 0,
                bytes: *bytes,
                blocks: 1,
                frames: frames.split(' ').map(str::to_owned).collect(),
                number: 0,
            })
            .collect();
        let row = |row: &Row| {
            let note = row.note.as_ref().map(|caller| format!(" from {caller}")).unwrap_or_default();
            format!("{}{} {}{note}", " ".repeat(row.depth), row.name, row.bytes)
        };
        rows(&calls.iter().collect::<Vec<_>>()).iter().map(row).collect()
    }

    #[test]
    fn only_functions_that_called_several_have_a_row_of_their_own() {
        assert_eq!(
            rows_of(&[("main train step forward", 4), ("main train step backward", 6), ("main load read", 1)]),
            ["main 11", " step 10", "  backward 6", "  forward 4", " read 1 from load"]
        );
    }

    #[test]
    fn a_function_that_allocates_and_calls_another_stands_beside_it() {
        assert_eq!(rows_of(&[("main", 1), ("main grow", 2)]), ["grow 2 from main", "main 1"]);
        assert_eq!(rows_of(&[("main", 3)]), ["main 3"]);
    }
}
