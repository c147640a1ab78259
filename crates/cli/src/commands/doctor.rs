//! Finds out what keeps gpumem from working here.

use std::{
    fmt,
    io::{self, Write},
};

use clap::Args;
use gpumem_core::{
    export::{Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::one_line,
};

use crate::{
    exit::Exit,
    failure::Failure,
    machine::{self, Check, Diagnosis, Verdict},
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem doctor
  gpumem doctor --json | jq '.checks[] | select(.verdict != \"ok\")'";

/// Finds out what keeps gpumem from working here, or from working best.
///
/// It looks at the driver, NVML, CUDA, the dispatch table, CUPTI, permissions and settings, and exits with 1 if there is a problem.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &DoctorArguments) -> Result<Exit, Failure> {
    machine::leave_out_injection();
    let diagnosis = Diagnosis::make();
    terminal::answer(arguments.json, &diagnosis, |out, paint| write(&diagnosis, out, paint))?;
    Ok(if diagnosis.has_problem() { Exit::ProblemFound } else { Exit::Done })
}

fn write(diagnosis: &Diagnosis, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let width = diagnosis.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for Check { name, verdict, found, next } in &diagnosis.checks {
        let role = match verdict {
            Verdict::Ok => Role::More,
            Verdict::Warning => Role::Heading,
            Verdict::Problem => Role::Alarm,
        };
        let next = if next.is_empty() { String::new() } else { format!("; {next}") };
        let found = one_line(found);
        writeln!(out, "{}  {name:<width$}  {found}{next}", paint.on(role, format!("{:<7}", verdict.name())))?;
    }
    writeln!(out, "\n{}", InPaint(diagnosis, paint))
}

/// The settings of the library.
impl Show for Diagnosis {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let mut table =
            Table::new().column("setting", Fit::Left).column("from", Fit::Left).column("value", Fit::LeftCutEnd);
        for setting in &self.settings {
            table.row([setting.name, setting.from, setting.value.as_str()].map(Cell::from));
        }
        table.show(f, paint)
    }
}
