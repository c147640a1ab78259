//! Shows the GPUs and their memory.

use std::{
    fmt,
    io::{self, Write},
};

use clap::Args;
use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::one_line,
};

use crate::{
    exit::Exit,
    failure::Failure,
    machine::{self, Machine, Memory},
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem info
  gpumem info --json | jq '.gpus[] | {uuid, free_bytes}'";

/// Shows the GPUs: names, indices, UUIDs, memory, and the driver and CUDA versions.
///
/// This creates no CUDA context.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InfoArguments {
    /// Print JSON: bytes are exact, and a value that could not be read is null.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &InfoArguments) -> Result<Exit, Failure> {
    machine::leave_out_injection();
    let machine = Machine::read_with_cuda()?;
    terminal::answer(arguments.json, &machine, |out, paint| write(&machine, out, paint))?;
    if machine.gpus.is_empty() { Err(machine::no_gpu()) } else { Ok(machine::exit_of(&machine.not_read)) }
}

fn write(machine: &Machine, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let version = |version: &Option<String>| one_line(version.as_deref().unwrap_or(NOT_READ)).into_owned();
    let [driver, cuda, nvml] = [&machine.driver_version, &machine.cuda_version, &machine.nvml_version].map(version);
    writeln!(out, "driver {driver}, CUDA {cuda}, NVML {nvml}\n")?;
    writeln!(out, "{}", InPaint(machine, paint))?;
    for not_read in machine.not_read.iter().filter(|not_read| !not_read.is_error) {
        writeln!(out, "{}", paint.on(Role::Faint, format!("{}: {}", not_read.what, not_read.why)))?;
    }
    Ok(())
}

const NOT_READ: &str = "-";

impl Show for Machine {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let memories = || {
            let of_gpu = |gpu: &machine::Gpu| {
                let slices = gpu.mig_devices.iter().map(|slice| slice.memory);
                [gpu.memory].into_iter().chain(slices).collect::<Vec<_>>()
            };
            self.gpus.iter().flat_map(of_gpu)
        };
        let bytes = |value: fn(Memory) -> Option<u64>| memories().filter_map(value).map(u64::cast_signed);
        let total = Amounts::of(bytes(|memory| memory.total_bytes));
        let used = total.for_others(bytes(|memory| memory.used_bytes).chain(bytes(|memory| memory.free_bytes)));
        let reserved = total.for_others(bytes(|memory| memory.reserved_bytes));
        let show = |amounts: Amounts, bytes: Option<u64>| {
            bytes.map_or_else(|| NOT_READ.to_owned(), |bytes| amounts.show(bytes.cast_signed()))
        };
        let number = |number: Option<u32>| number.map_or_else(|| NOT_READ.to_owned(), |number| number.to_string());
        let row_cells = |memory: Memory| {
            let bar = memory.used_bytes.zip(memory.total_bytes);
            let cells = [
                show(total, memory.total_bytes),
                show(used, memory.used_bytes),
                show(used, memory.free_bytes),
                show(reserved, memory.reserved_bytes),
            ];
            let bar =
                bar.map_or_else(Cell::default, |(used, total)| Cell::bar(used.cast_signed(), total.cast_signed()));
            cells.map(Cell::from).into_iter().chain([bar])
        };
        let mut table = Table::new()
            .column("GPU", Fit::Left)
            .column("CUDA", Fit::Right)
            .column("name", Fit::LeftCutEnd)
            .amounts("total", total)
            .amounts("used", used)
            .amounts("free", used)
            .amounts("reserved", reserved)
            .column("", Fit::Left);
        for gpu in &self.gpus {
            let name = gpu.name.as_deref().unwrap_or(NOT_READ);
            let first = [Cell::from(number(gpu.index)), number(gpu.cuda_ordinal).into(), name.into()];
            table.row(first.into_iter().chain(row_cells(gpu.memory)));
            let mode = if gpu.mig == Some(true) { ", in MIG mode" } else { "" };
            if let Some(uuid) = &gpu.uuid {
                table.note(1, &format!("{uuid}{mode}"));
            }
            for slice in &gpu.mig_devices {
                let name = slice.name.as_deref().unwrap_or(NOT_READ);
                let first = [Cell::nested(1, "MIG"), number(slice.cuda_ordinal).into(), name.into()];
                table.row(first.into_iter().chain(row_cells(slice.memory)));
                table.note(2, &slice.uuid);
            }
        }
        table.show(f, paint)
    }
}
