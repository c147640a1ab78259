//! Shows the processes on the GPUs.

use std::{
    fmt,
    io::{self, Write},
};

use clap::Args;
use gpumem_core::{
    export::{Amounts, Cell, Fit, InPaint, Paint, Role, Show, Table, shortened_command},
    model::{Bytes, one_line},
};

use crate::{
    exit::Exit,
    failure::Failure,
    machine::{self, Known, Machine, Recording, Usage},
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem ps
  gpumem ps --json | jq '.processes[] | {pid, used_bytes}'";

/// Shows the processes on each GPU, their memory, and which of them are recorded.
///
/// The memory is what the driver reports.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PsArguments {
    /// Print JSON: bytes are exact, and an unknown value is null.
    #[arg(long)]
    json: bool,
}

/// The memory that the driver attributes to no process, such as a part of each context, is less than this.
const NOTABLE: u64 = 64 << 20;

/// In a sentence, commands are cut to this many columns.
const LONGEST: usize = 60;

pub(super) fn execute(arguments: &PsArguments) -> Result<Exit, Failure> {
    let (machine, failure) = match Machine::read() {
        Ok(machine) if machine.gpus.is_empty() => (machine, Some(machine::no_gpu())),
        Ok(machine) => (machine, None),
        Err(why) => (Machine::default(), Some(Failure::new("processes cannot be read", why, ""))),
    };
    let mut processes = Usage::read(&machine, &mut Known::default());
    processes.not_read.splice(0..0, machine.not_read.into_iter().filter(|not_read| not_read.is_error));
    let has_any = !processes.recorded_besides.is_empty() || !processes.dormant_besides.is_empty();
    let failure = match failure {
        Some(failure) if !has_any => return Err(failure),
        failure => failure,
    };
    terminal::answer(arguments.json, &processes, |out, paint| write(&processes, failure.is_none(), out, paint))?;
    if let Some(failure) = failure {
        terminal::error(&failure);
        return Ok(Exit::Failed);
    }
    Ok(machine::exit_of(&processes.not_read))
}

fn write(all: &Usage, is_listed: bool, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    if !is_listed {
        // The list is empty because of an error, which is printed elsewhere.
    } else if all.processes.is_empty() {
        writeln!(out, "The driver lists no process.")?;
    } else {
        writeln!(out, "{}", InPaint(all, paint))?;
    }
    for gpu in &all.gpus {
        let Some((used, not_listed)) = gpu.used_bytes.zip(gpu.not_listed_bytes) else { continue };
        if not_listed >= NOTABLE {
            // The lines below the table use its unit.
            let unit = if all.processes.is_empty() { Amounts::of([Bytes::new(used).signed()]) } else { amounts(all) };
            let [used, not_listed] = [used, not_listed].map(|bytes| unit.in_words(Bytes::new(bytes).signed()));
            let why = "processes that the driver does not show here, such as in other containers and on the host";
            let text = format!("GPU {}: {used} in use, of which {not_listed} by no process above: {why}", gpu.gpu);
            writeln!(out, "{}", paint.on(Role::Alarm, text))?;
        }
    }
    for recorded in &all.recorded_besides {
        let command = shortened_command(recorded.command.as_deref().unwrap_or_default(), LONGEST);
        for file in &recorded.files {
            let (pid, file) = (recorded.pid, file.to_string_lossy());
            let file = one_line(&file);
            writeln!(out, "not in the driver's list, but recorded: process {pid}, {command}, to {file}")?;
        }
    }
    for dormant in &all.dormant_besides {
        let command = shortened_command(dormant.command.as_deref().unwrap_or_default(), LONGEST);
        let pid = dormant.pid;
        writeln!(out, "not in the driver's list: process {pid}, {command}, is not recorded until gpumem start {pid}")?;
    }
    Ok(())
}

/// Returns the format of the memory of processes.
fn amounts(all: &Usage) -> Amounts {
    Amounts::of(all.processes.iter().filter_map(|process| process.used_bytes).map(u64::cast_signed))
}

impl Show for Usage {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let used = amounts(self);
        let mut table = Table::new()
            .column("GPU", Fit::Right)
            .column("pid", Fit::Right)
            .column("user", Fit::Left)
            .amounts("used", used)
            .column("for", Fit::Left)
            .column("command", Fit::LeftCutCommand);
        for process in &self.processes {
            let bytes = process.used_bytes.map_or_else(|| "-".to_owned(), |bytes| used.show(bytes.cast_signed()));
            table.row([
                Cell::from(process.gpu.to_string()),
                process.pid.to_string().into(),
                process.user.as_deref().unwrap_or("-").into(),
                bytes.into(),
                process.kind.into(),
                process.command.as_deref().unwrap_or("-").into(),
            ]);
            if process.is_visible == Some(false) {
                table.note(1, "not visible here: in a container, on the host, or ended");
            }
            match &process.recording {
                Recording::Recorded { files } => {
                    for file in files {
                        table.note(1, &format!("recorded to {}", file.display()));
                    }
                }
                Recording::Dormant => table.note(1, &format!("not recorded until gpumem start {}", process.pid)),
                Recording::None | Recording::Unknown => {}
            }
        }
        table.show(f, paint)
    }
}
