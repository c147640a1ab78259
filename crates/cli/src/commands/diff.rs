//! Compares two recordings, or two runs of several processes.

use std::{
    path::{Path, PathBuf},
    slice::from_ref,
};

use clap::Args;

use super::report::read;
use crate::{
    exit::Exit,
    failure::Failure,
    files::{self, Recordings},
    report::{
        annotations::{Annotations, Check},
        change::Limit,
        difference::Difference,
        overview::Overview,
        run_difference::{Run, RunDifference},
    },
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem diff before.capture after.capture
  gpumem diff before.capture after.capture --fail-on-increase 5%
  gpumem diff before/ after/                                       all ranks of two runs
  gpumem diff before.capture after.capture --markdown > comment.md";

/// Compares the peaks of two recordings, by scope, place, library and kind of memory, and those of PyTorch's tensors if both have them.
/// If both are folders, this command compares the peaks of all ranks.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiffArguments {
    /// The recording to compare with, or a folder or pattern: the recordings of one run.
    before: PathBuf,
    /// The recording that is compared. It may be one that an estimate wrote. If this is a folder, each of its recordings is compared with
    /// that of the same rank, device and command.
    after: PathBuf,
    /// Exit with 1 if the peak of a device increased by more than this, such as 5% or 100MiB (100MB means the same); with 2 if that is not known.
    /// The peak is that of allocations: memory that the driver takes by itself has no limit.
    #[arg(long, value_name = "LIMIT")]
    fail_on_increase: Option<Limit>,
    /// Report an increase to CI: `github` marks the line in a pull request, and `junit=FILE` writes a JUnit test report.
    #[arg(long, value_name = "FORMAT", requires = "fail_on_increase")]
    annotations: Option<Annotations>,
    /// Print tables in Markdown, for a comment on a pull request.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &DiffArguments) -> Result<Exit, Failure> {
    let sides = [Recordings::of(from_ref(&arguments.before))?, Recordings::of(from_ref(&arguments.after))?];
    let has_empty = sides.iter().any(|side| !side.empty.is_empty());
    let ([[before], [after]], false) = (sides.each_ref().map(|side| side.files.as_slice()), has_empty) else {
        return of_runs(arguments, &sides);
    };
    let difference = Difference::of(overview(before)?, overview(after)?, arguments.fail_on_increase);
    if arguments.markdown {
        terminal::print(|out| difference.write_markdown(out))?;
    } else {
        terminal::answer(arguments.json, &difference, |out, paint| difference.write(out, paint))?;
    }
    exit(arguments, &difference.not_measured, difference.is_exceeded, &difference.checks())
}

fn overview(file: &Path) -> Result<Overview, Failure> {
    read(file).map(|history| Overview::of(&history))
}

/// Compares the recordings of two runs. They are read one by one, and only their peaks are kept.
fn of_runs(arguments: &DiffArguments, sides: &[Recordings; 2]) -> Result<Exit, Failure> {
    let run = |Recordings { files, empty }: &Recordings| {
        let mut run = Run::default();
        for file in empty {
            run.add_empty(file, files::EMPTY);
        }
        for file in files {
            let history = read(file)?;
            run.add(file, &history, &Overview::of(&history));
        }
        Ok::<_, Failure>(run)
    };
    let names = [&arguments.before, &arguments.after].map(|side| side.display().to_string());
    let mut difference = RunDifference::of(names, [run(&sides[0])?, run(&sides[1])?], arguments.fail_on_increase)?;
    if let Some(worst) = difference.changed_most().filter(|_| difference.not_measured.is_empty()) {
        let [before, after] = [&worst.before_file, &worst.after_file].map(|file| overview(file));
        difference.worst = Some(Difference::of(before?, after?, None));
    }
    if arguments.markdown {
        terminal::print(|out| difference.write_markdown(out))?;
    } else {
        terminal::answer(arguments.json, &difference, |out, paint| difference.write(out, paint))?;
    }
    let mut why_not = difference.not_measured.clone();
    // If a peak has no partner, it is not known whether all peaks keep the limit.
    if arguments.fail_on_increase.is_some() && difference.is_exceeded.is_none() {
        why_not.extend(difference.alone());
    }
    exit(arguments, &why_not, difference.is_exceeded, &difference.checks())
}

/// Returns the exit code. `why_not` explains why peaks cannot be compared.
fn exit(
    arguments: &DiffArguments,
    why_not: &[String],
    is_exceeded: Option<bool>,
    checks: &[Check],
) -> Result<Exit, Failure> {
    if arguments.annotations.is_some() {
        Annotations::publish(arguments.annotations.as_ref(), checks)?;
    }
    if let Some(why) = why_not.first() {
        terminal::error(&Failure::new(
            "the peaks cannot be compared",
            why.trim_end_matches('.'),
            "record the missing data again",
        ));
        return Ok(Exit::Failed);
    }
    Ok(if is_exceeded == Some(true) { Exit::LimitExceeded } else { Exit::Done })
}
