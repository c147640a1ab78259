//! The memory of the process as text: what was allocated, and what the driver took by itself.

use std::io::{self, Write};

use gpumem_core::{
    export::{Amounts, InPaint, Leaf, Paint, Role, Tree, part_table},
    model::{ByteDelta, Bytes, MemKind, one_line},
    report::{LargestOfDriver, counted},
};

use crate::history::{DriverSum, History, Moment, ProcessMemory, ROUNDING, Sum};
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
    format!("the process took {all}: {}; allocations {allocated}", largest_in_words(process))
}

/// Returns the kinds that the driver took most of: `local memory of deep (x.cu:43) 3.9 GiB, context 526 MiB and 2 more`.
pub(super) fn largest_in_words(process: &ProcessMemory) -> String {
    let mut kinds: Vec<Sum> = Vec::new();
    for sum in &process.taken_by_driver {
        match kinds.iter_mut().find(|kind| kind.name == sum.kind) {
            Some(kind) => kind.bytes += sum.bytes,
            None => kinds.push(Sum { name: sum.kind.to_owned(), bytes: sum.bytes, blocks: sum.blocks }),
        }
    }
    kinds.push(Sum { name: ROUNDING.to_owned(), bytes: process.rounding_bytes, blocks: 0 });
    kinds.retain(|kind| kind.bytes > 0);
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.bytes));
    let named = |kind: &Sum| format!("{} {}", kind_in_words(process, &kind.name), amount(process, kind.bytes));
    let words: Vec<_> = kinds.iter().take(MOST).map(named).collect();
    let more = if kinds.len() > MOST { format!(" and {} more", kinds.len() - MOST) } else { String::new() };
    format!("{}{more}", words.join(", "))
}

/// Returns the kind of memory. The kernel or library follows if all sums of the kind have the same one, and so does the line.
fn kind_in_words(process: &ProcessMemory, kind: &str) -> String {
    let of_kind = process.taken_by_driver.iter().filter(|sum| sum.kind == kind && sum.bytes > 0).cloned();
    let common = of_kind.reduce(|first, other| DriverSum {
        label: first.label.filter(|label| other.label.as_ref() == Some(label)),
        place: first.place.filter(|place| other.place.as_ref() == Some(place)),
        ..other
    });
    common.map_or_else(|| kind.to_owned(), |common| sum_in_words(&common))
}

/// Returns the largest part of the driver's memory, such as `local memory of deep (x.cu:43)`.
pub(super) fn largest(process: &ProcessMemory) -> Option<LargestOfDriver> {
    let sums = process.taken_by_driver.iter().map(|sum| (sum_in_words(sum), sum.bytes));
    let rounding = (ROUNDING.to_owned(), process.rounding_bytes);
    let (name, bytes) = sums.chain([rounding]).filter(|(_, bytes)| *bytes > 0).max_by_key(|(_, bytes)| *bytes)?;
    Some(LargestOfDriver::new(&name, Bytes::new(bytes.unsigned_abs())))
}

/// Returns the kind of a sum, with its kernel or its library, and its line.
fn sum_in_words(sum: &DriverSum) -> String {
    let kind = sum.kind;
    let kernel = sum.label.as_deref().filter(|_| kind == MemKind::LocalMemory.name());
    let kernel = kernel.map(|kernel| format!(" of {}", one_line(kernel))).unwrap_or_default();
    let is_placed = [MemKind::LocalMemory, MemKind::ExecutableGraphs].iter().any(|placed| placed.name() == kind);
    let is_named = [MemKind::Modules, MemKind::PoolCache].iter().any(|named| named.name() == kind);
    let inside = match (is_placed, is_named) {
        (true, _) => sum.place.as_deref(),
        (false, true) => sum.label.as_deref(),
        _ => None,
    };
    let inside = inside.map(|inside| format!(" ({})", one_line(inside))).unwrap_or_default();
    format!("{kind}{kernel}{inside}")
}

/// Returns the row of a table for a sum: `local memory of deep (16 KiB a thread), x.cu:43`, `modules: libcublasLt.so.13`.
fn row_of(sum: &DriverSum) -> String {
    let is = |kind: MemKind| sum.kind == kind.name();
    let label = match sum.label.as_deref() {
        Some(label) if is(MemKind::LocalMemory) => format!(" of {label}"),
        Some(label) => format!(": {label}"),
        None => String::new(),
    };
    let each = sum.bytes_per_thread.map(|bytes| format!(" ({} a thread)", Bytes::new(bytes))).unwrap_or_default();
    // Where a context was created, or where a pool was read, is no cause.
    let has_cause = !is(MemKind::Context) && !is(MemKind::PoolCache);
    let place = sum.place.as_deref().filter(|_| has_cause).map(|place| format!(", {place}")).unwrap_or_default();
    format!("{}{label}{each}{place}", sum.kind)
}

/// Returns the name of a sum that is the same in each run of a program. Addresses of pools are not.
pub(super) fn stable_name(sum: &DriverSum) -> String {
    let label = match sum.label.as_deref() {
        Some(label) if sum.kind == MemKind::LocalMemory.name() => format!(" of {label}"),
        Some(label) if sum.kind == MemKind::Modules.name() => format!(": {label}"),
        _ => String::new(),
    };
    format!("{}{label}", sum.kind)
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
    for sum in &process.taken_by_driver {
        // One block of memory is what all have; only graphs are counted.
        let blocks = if sum.kind == MemKind::ExecutableGraphs.name() { sum.blocks.unsigned_abs() } else { 0 };
        tree.leaf(&[], leaf(row_of(sum), sum.bytes, blocks));
    }
    if process.rounding_bytes != 0 {
        tree.leaf(&[], leaf(ROUNDING.to_owned(), process.rounding_bytes, 0));
    }
    let rows = tree.rows(MOST_ROWS);
    if !rows.is_empty() {
        let title = if process.is_at_most() { "taken by the driver (≤)" } else { "taken by the driver" };
        writeln!(out, "{}", InPaint(&part_table(title, &rows, unit), paint))?;
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
#[derive(Debug, Serialize)]
pub(crate) struct Kept {
    device: u32,
    /// Executable graphs and what pools do not use. `None` if it was not measured.
    sums: Option<Vec<DriverSum>>,
}

/// Returns what stays with the process at its end, by device.
pub(crate) fn kept(history: &History) -> Vec<Kept> {
    let is_kept =
        |sum: &DriverSum| [MemKind::ExecutableGraphs, MemKind::PoolCache].iter().any(|kind| kind.name() == sum.kind);
    let of_process = |process: ProcessMemory| process.taken_by_driver.into_iter().filter(is_kept).collect();
    let processes = history.process_at(Moment::End).into_iter().zip(&history.devices);
    processes.map(|(process, of)| Kept { device: of.device.ordinal, sums: process.map(of_process) }).collect()
}

/// Writes what stays with the process until its end although it may not need it: executable graphs, and what pools keep.
pub(crate) fn write_kept(all: &[Option<ProcessMemory>], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    for process in all.iter().flatten() {
        let of = |kind: MemKind| process.taken_by_driver.iter().filter(move |sum| sum.kind == kind.name());
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
            let name = pool.label.as_deref().map(|label| format!(" {}", one_line(label))).unwrap_or_default();
            let text = format!("{} unused in pool{name} at the end", amount(process, pool.bytes));
            writeln!(out, "\n{}", paint.on(Role::Heading, text))?;
            let how =
                "cuMemPoolTrimTo or a release threshold of 0 gives it back; in Rust gpumem::torch::empty_cache(), and";
            writeln!(out, "{}", paint.on(Role::Faint, how))?;
            writeln!(out, "{}", paint.on(Role::Faint, "torch.cuda.empty_cache() with PyTorch's async allocator."))?;
        }
        if process.is_at_most() {
            writeln!(out, "{}", paint.on(Role::Faint, AT_MOST))?;
        }
    }
    Ok(())
}
