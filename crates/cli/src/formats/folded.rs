//! Folded stacks: `outer;inner 4096`, for `flamegraph.pl` and `inferno-flamegraph`.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use gpumem_core::model::one_line;

use super::frames::{held_at, stack};
use crate::history::{History, Moment};

pub(super) fn write(history: &History, moment: Moment, is_folded: bool, out: &mut dyn Write) -> io::Result<()> {
    let folder = &history.definitions().process().folder;
    let mut lines: BTreeMap<String, i64> = BTreeMap::new();
    for held in held_at(history, moment) {
        let frame = |text: String| one_line(&text).replace(';', ":");
        let mut frames: Vec<_> =
            stack(history, held.origin, is_folded).iter().map(|known| frame(known.in_words(folder))).collect();
        if history.devices.len() > 1 {
            frames.insert(0, history.devices[usize::from(held.device)].device.to_string());
        }
        *lines.entry(frames.join(";")).or_default() += held.bytes;
    }
    lines.into_iter().try_for_each(|(stack, bytes)| writeln!(out, "{stack} {bytes}"))
}
