//! The file of DHAT, version 2, for Valgrind's `dh_view.html`: one point for each stack, with its totals and lifetimes.

use std::io::{self, Write};

use serde::Serialize;

use super::frames::{Numbers, stack};
use crate::{
    history::{ChangeKind, History, LIVE},
    report::json,
};

#[derive(Serialize)]
struct File {
    #[serde(rename = "dhatFileVersion")]
    version: u32,
    mode: &'static str,
    verb: &'static str,
    /// Blocks have lifetimes.
    bklt: bool,
    /// Accesses are not recorded.
    bkacc: bool,
    /// The units of time.
    tu: &'static str,
    #[serde(rename = "Mtu")]
    million_tu: &'static str,
    /// Lifetimes below this are short.
    tuth: u64,
    cmd: String,
    pid: u32,
    /// The time of the peak, and the time when the recording ends.
    tg: u64,
    te: u64,
    pps: Vec<Point>,
    ftbl: Vec<String>,
}

/// A program point.
#[derive(Clone, Default, Serialize)]
struct Point {
    /// The bytes and the number of all blocks.
    tb: u64,
    tbk: u64,
    /// The sum of their lifetimes.
    tl: u64,
    /// The bytes and the blocks at its own peak.
    mb: u64,
    mbk: u64,
    /// The bytes and the blocks at the peak of the sum of all points.
    gb: u64,
    gbk: u64,
    /// The bytes and the blocks that it has at the end.
    eb: u64,
    ebk: u64,
    /// Its stack, the innermost first.
    fs: Vec<usize>,
}

pub(super) fn write(history: &History, is_folded: bool, out: &mut dyn Write) -> io::Result<()> {
    let folder = &history.definitions().process().folder;
    let mut frames = Numbers::<String>::default();
    frames.of(&"[root]".to_owned());
    let mut stacks = Numbers::<Vec<usize>>::default();
    // The point of each origin.
    let points_of: Vec<usize> = history
        .origins
        .iter()
        .map(|origin| {
            // The viewer shows the text after `0x0: ` as the function.
            let stack = stack(history, origin, is_folded);
            let frames = stack.iter().rev().map(|frame| frames.of(&format!("0x0: {}", frame.in_words(folder))));
            let frames = frames.collect();
            stacks.of(&frames)
        })
        .collect();
    let mut points: Vec<Point> = stacks.all.into_iter().map(|fs| Point { fs, ..Point::default() }).collect();
    let peak = history.busiest().and_then(|device| device.peak_at);
    for (at, change) in (0_u32..).zip(history.lives.changes()) {
        let block = history.lives.block(change.block);
        let point = &mut points[points_of[block.origin as usize]];
        point.eb = point.eb.saturating_add_signed(change.delta);
        if change.kind == ChangeKind::Allocated {
            point.tb += block.bytes;
            point.tbk += 1;
        }
        point.ebk = point.ebk.saturating_add_signed(change.kind.blocks());
        if point.eb > point.mb {
            (point.mb, point.mbk) = (point.eb, point.ebk);
        }
        if Some(at) == peak {
            for point in &mut points {
                (point.gb, point.gbk) = (point.eb, point.ebk);
            }
        }
    }
    let micros = |nanos: u64| nanos / 1000;
    for (_, block) in history.lives.blocks() {
        let died = if block.died == LIVE { history.end_nanos() } else { history.time_of(block.died) };
        points[points_of[block.origin as usize]].tl += micros(died) - micros(history.time_of(block.born));
    }
    let process = history.definitions().process();
    let file = File {
        version: 2,
        mode: "gpumem",
        verb: "Allocated",
        bklt: true,
        bkacc: false,
        tu: "µs",
        million_tu: "s",
        tuth: 10,
        cmd: process.arguments.join(" "),
        pid: process.pid,
        tg: peak.map_or(0, |peak| micros(history.time_of(peak))),
        te: micros(history.end_nanos()),
        pps: points,
        ftbl: frames.all,
    };
    json::write_line(&file, out)
}
