//! The memory of the process as text: what was allocated, and what the driver took by itself.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use gpumem_core::{
    export::{Amounts, Fit, InPaint, Leaf, Paint, Role, Tree, part_table},
    model::{ByteDelta, Bytes, MemKind},
    report::{LargestOfDriver, ROUNDING, counted},
};

use crate::history::{DeviceHistory, DriverSum, History, Moment, ProcessMemory, in_words};
use serde::Serialize;

/// At most this many kinds of the driver's memory are named in a line.
const MOST: usize = 3;
/// At most this many rows of the driver's memory are shown in a table.
const MOST_ROWS: usize = 24;
/// Above this size, the driver's memory comes before the peak of allocations.
const MUCH: i64 = 1 << 30;

/// Why values are upper bounds.
pub(super) const AT_MOST: &str =
    "≤: other processes may use the device, and what they take counts here as the driver's memory of this process.";

/// How a program returns the memory that a pool keeps unused.
const GIVES_BACK: [&str; 2] = [
    "cuMemPoolTrimTo gives it back: in Rust gpumem::torch::empty_cache(), in PyTorch torch.cuda.empty_cache().",
    "With a release threshold of 0, the driver gives it back when the program next waits for the GPU.",
];

/// Returns whether what no call asked for is so much that it comes first.
pub(super) fn is_much(process: &ProcessMemory) -> bool {
    let besides = process.besides_allocations();
    besides > MUCH || besides > process.bytes / 10
}

/// Returns `4.7 GiB`, or `≤ 4.7 GiB` if it is an upper bound.
pub(super) fn amount(process: &ProcessMemory, bytes: i64) -> String {
    let at_most = if process.is_at_most() { "≤ " } else { "" };
    format!("{at_most}{}", Bytes::new(bytes.unsigned_abs()))
}

/// Returns what the process took, with the largest parts of the driver's memory, for a line about a device.
pub(crate) fn process_in_words(process: &ProcessMemory) -> String {
    let all = amount(process, process.bytes);
    let allocated = Bytes::new(process.allocated_bytes.unsigned_abs());
    let time = process.time.map(|time| format!(" after {}", in_words(time))).unwrap_or_default();
    format!("the process took {all}{time}: {}; allocations {allocated}", largest_in_words(process))
}

/// Returns the kinds that the driver took most of: `local memory of deep (x.cu:43) 3.9 GiB, context 526 MiB and 2 more`.
pub(super) fn largest_in_words(process: &ProcessMemory) -> String {
    let of_kind = |kind: MemKind| process.taken_by_driver.iter().filter(move |sum| sum.kind == kind);
    let sums = MemKind::ALL.map(|kind| (Some(kind), of_kind(kind).map(|sum| sum.bytes).sum()));
    let mut kinds: Vec<(Option<MemKind>, i64)> = sums.into_iter().chain([(None, process.rounding_bytes)]).collect();
    kinds.retain(|(_, bytes)| *bytes > 0);
    kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let named = |(kind, bytes): &(Option<MemKind>, i64)| {
        let name = kind.map_or_else(|| ROUNDING.to_owned(), |kind| kind_in_words(process, kind));
        format!("{name} {}", amount(process, *bytes))
    };
    let words: Vec<_> = kinds.iter().take(MOST).map(named).collect();
    let more = if kinds.len() > MOST { format!(" and {} more", kinds.len() - MOST) } else { String::new() };
    format!("{}{more}", words.join(", "))
}

/// Returns the kind of memory. The kernel or library follows if all sums of the kind have the same one, and so does the line.
fn kind_in_words(process: &ProcessMemory, kind: MemKind) -> String {
    let of_kind = process.taken_by_driver.iter().filter(|sum| sum.kind == kind && sum.bytes > 0).cloned();
    let common = of_kind.reduce(|first, other| DriverSum {
        label: first.label.filter(|label| other.label.as_ref() == Some(label)),
        place: first.place.filter(|place| other.place.as_ref() == Some(place)),
        ..other
    });
    common.map_or_else(|| kind.to_string(), |common| common.cause_in_words())
}

/// Returns the largest part of the driver's memory, such as `local memory of deep (x.cu:43)`.
pub(super) fn largest(process: &ProcessMemory) -> Option<LargestOfDriver> {
    let sums = process.taken_by_driver.iter().map(|sum| (sum.cause_in_words(), sum.bytes));
    let rounding = (ROUNDING.to_owned(), process.rounding_bytes);
    let (name, bytes) = sums.chain([rounding]).filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes)?;
    Some(LargestOfDriver::new(&name, Bytes::new(bytes.unsigned_abs())))
}

/// Writes what the driver took by itself, and the sum of everything. `is_difference` is true between two moments.
pub(super) fn write(
    process: &ProcessMemory,
    unit: Amounts,
    is_difference: bool,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let mut tree = Tree::new();
    let leaf = |name: String, bytes, blocks| Leaf { name, bytes, blocks, note: None };
    // Sums that differ only in their scope or their caller have one row.
    let mut sums: BTreeMap<String, (i64, u64)> = BTreeMap::new();
    for sum in &process.taken_by_driver {
        // One block of memory is what all have; only graphs are counted.
        let blocks = if sum.kind == MemKind::ExecutableGraphs { sum.blocks.unsigned_abs() } else { 0 };
        let known = sums.entry(sum.to_string()).or_default();
        *known = (known.0 + sum.bytes, known.1 + blocks);
    }
    for (name, (bytes, blocks)) in sums {
        tree.leaf(&[], leaf(name, bytes, blocks));
    }
    if process.rounding_bytes != 0 {
        tree.leaf(&[], leaf(ROUNDING.to_owned(), process.rounding_bytes, 0));
    }
    let rows = tree.rows(MOST_ROWS);
    if !rows.is_empty() {
        let title = if process.is_at_most() { "taken by the driver (≤)" } else { "taken by the driver" };
        // The cause matters more than the line.
        let table = part_table(title, &rows, unit).first_column(Fit::LeftCutEnd);
        writeln!(out, "{}", InPaint(&table, paint))?;
    }
    let parts = [process.allocated_bytes, process.besides_allocations()];
    let line = if is_difference {
        let at_most = if process.is_at_most() { "≤ " } else { "" };
        let [all, allocated, taken] =
            [process.bytes, parts[0], parts[1]].map(|bytes| ByteDelta::new(bytes).to_string());
        format!("together {at_most}{all}: {allocated} of allocations and {at_most}{taken} taken by the driver")
    } else {
        let [all, taken] = [process.bytes, parts[1]].map(|bytes| amount(process, bytes));
        let allocated = Bytes::new(parts[0].unsigned_abs());
        format!("together {all}: {allocated} of allocations and {taken} taken by the driver")
    };
    writeln!(out, "{}", paint.on(Role::Heading, line))?;
    if process.is_at_most() {
        writeln!(out, "{}", paint.on(Role::Faint, AT_MOST))?;
    }
    Ok(())
}

/// What stays with the process on one device. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Kept {
    device: u32,
    /// Executable graphs and what pools do not use. `None` if it was not measured.
    sums: Option<Vec<DriverSum>>,
    /// True if the values are upper bounds.
    #[serde(skip)]
    is_at_most: bool,
}

/// Returns what stays with the process at its end, by device.
pub(crate) fn kept(history: &History) -> Vec<Kept> {
    let is_kept = |sum: &DriverSum| [MemKind::ExecutableGraphs, MemKind::PoolCache].contains(&sum.kind);
    let processes = history.process_at(Moment::End).into_iter().zip(&history.devices);
    let of_device = |(process, of): (Option<ProcessMemory>, &DeviceHistory)| Kept {
        device: of.device.ordinal,
        is_at_most: process.as_ref().is_some_and(ProcessMemory::is_at_most),
        sums: process.map(|process| process.taken_by_driver.into_iter().filter(is_kept).collect()),
    };
    processes.map(of_device).collect()
}

/// Returns what stays with the processes on all devices in words: `200 executable graphs (100 MiB) and 32 MiB unused in pools`.
pub(crate) fn kept_in_words(all: &[Kept]) -> Option<String> {
    let sums =
        |kind: MemKind| all.iter().filter_map(|kept| kept.sums.as_ref()).flatten().filter(move |sum| sum.kind == kind);
    let at_most = if all.iter().any(|kept| kept.is_at_most) { "≤ " } else { "" };
    let bytes = |kind: MemKind| {
        let bytes = Bytes::new(sums(kind).map(|sum| sum.bytes).sum::<i64>().unsigned_abs());
        (bytes > Bytes::ZERO).then(|| format!("{at_most}{bytes}"))
    };
    let count: u64 = sums(MemKind::ExecutableGraphs).map(|sum| sum.blocks.unsigned_abs()).sum();
    let graphs = counted(count, "executable graph", "executable graphs");
    let graphs = bytes(MemKind::ExecutableGraphs).map(|bytes| format!("{graphs} ({bytes})"));
    let unused = bytes(MemKind::PoolCache).map(|bytes| format!("{bytes} {}", MemKind::PoolCache));
    let parts: Vec<_> = graphs.into_iter().chain(unused).collect();
    (!parts.is_empty()).then(|| parts.join(" and "))
}

/// Writes what stays with the process until its end although it may not need it: executable graphs, and what pools keep.
pub(crate) fn write_kept(all: &[Option<ProcessMemory>], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    for process in all.iter().flatten() {
        let of = |kind: MemKind| process.taken_by_driver.iter().filter(move |sum| sum.kind == kind);
        let graphs: Vec<_> = of(MemKind::ExecutableGraphs).collect();
        if !graphs.is_empty() {
            let blocks = graphs.iter().map(|sum| sum.blocks.unsigned_abs()).sum::<u64>();
            let bytes: i64 = graphs.iter().map(|sum| sum.bytes).sum();
            let title = format!(
                "{} ({}) not destroyed at the end",
                counted(blocks, "executable graph", "executable graphs"),
                amount(process, bytes)
            );
            writeln!(out, "\n{}", paint.on(Role::Heading, title))?;
            let mut tree = Tree::new();
            for sum in graphs {
                let place = sum.place.as_deref().unwrap_or("line not known");
                let label = sum.label.as_deref().map(|label| format!(" {label}")).unwrap_or_default();
                let name = format!("{place}{label}");
                tree.leaf(
                    &[],
                    Leaf { name, bytes: sum.bytes, blocks: sum.blocks.unsigned_abs(), note: sum.caller.clone() },
                );
            }
            let unit = Amounts::of([bytes]);
            writeln!(out, "{}", InPaint(&part_table("made executable at", &tree.rows(MOST_ROWS), unit), paint))?;
            let why = "Destroying them lets later graphs reuse the memory, but does not return it to the device.";
            writeln!(out, "{}", paint.on(Role::Faint, why))?;
        }
        for pool in of(MemKind::PoolCache).filter(|sum| sum.bytes > 0) {
            let text = format!("{} {} at the end", amount(process, pool.bytes), pool.cause_in_words());
            writeln!(out, "\n{}", paint.on(Role::Heading, text))?;
            for line in GIVES_BACK {
                writeln!(out, "{}", paint.on(Role::Faint, line))?;
            }
        }
        if process.is_at_most() {
            writeln!(out, "{}", paint.on(Role::Faint, AT_MOST))?;
        }
    }
    Ok(())
}
