//! Finds out what keeps gpumem from working here.

use std::{
    fmt,
    io::{self, Write},
};

use clap::Args;
use gpumem_core::{
    export::{Cell, Fit, InPaint, Paint, Role, Show, Table},
    model::one_line,
    report::counted,
};

use crate::{
    exit::Exit,
    failure::Failure,
    machine::{self, Check, Diagnosis, SettingInUse, Verdict},
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem doctor
  gpumem doctor --json | jq '.checks[] | select(.verdict != \"ok\")'";

/// Finds problems that keep gpumem from working here, or from working well.
///
/// This command checks the driver, NVML, CUDA, the dispatch table, CUPTI, permissions and settings, and exits with 1 if there is a problem.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DoctorArguments {
    /// List also the settings that have their defaults. JSON always contains them.
    #[arg(long)]
    settings: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &DoctorArguments) -> Result<Exit, Failure> {
    machine::leave_out_injection();
    let diagnosis = Diagnosis::make();
    terminal::answer(arguments.json, &diagnosis, |out, paint| {
        write_checks(&diagnosis.checks, out, paint)?;
        write_settings(&diagnosis.settings, arguments.settings, out, paint)
    })?;
    Ok(if diagnosis.has_problem() { Exit::ProblemFound } else { Exit::Done })
}

fn write_checks(checks: &[Check], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for Check { name, verdict, found, next } in checks {
        let role = match verdict {
            Verdict::Ok => Role::More,
            Verdict::Warning => Role::Heading,
            Verdict::Problem => Role::Alarm,
        };
        let next = if next.is_empty() { String::new() } else { format!("; {next}") };
        let found = one_line(found);
        writeln!(out, "{}  {name:<width$}  {found}{next}", paint.on(role, format!("{:<7}", verdict.name())))?;
    }
    Ok(())
}

/// Writes the settings of the library: those that are set, or all.
fn write_settings(settings: &[SettingInUse], all: bool, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let shown: Vec<_> = settings.iter().filter(|setting| all || setting.is_set()).collect();
    let defaults = (settings.len() - shown.len()) as u64;
    if shown.is_empty() {
        return writeln!(out, "\nNo setting is set: `gpumem doctor --settings` lists the defaults.");
    }
    writeln!(out, "\n{}", InPaint(&SettingTable(shown), paint))?;
    if defaults > 0 {
        let others = counted(defaults, "other setting has its default", "other settings have their defaults");
        writeln!(out, "{others}: `gpumem doctor --settings` lists all.")?;
    }
    Ok(())
}

struct SettingTable<'a>(Vec<&'a SettingInUse>);

impl Show for SettingTable<'_> {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let mut table =
            Table::new().column("setting", Fit::Left).column("from", Fit::Left).column("value", Fit::LeftCutEnd);
        for setting in &self.0 {
            table.row([setting.name, setting.from, setting.value.as_str()].map(Cell::from));
        }
        table.show(f, paint)
    }
}
