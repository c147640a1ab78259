//! Writes the peaks of recordings to a file in a repository, and compares other recordings with it.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use gpumem_driver::baseline_file::Baseline;

use super::report::read;
use crate::{
    exit::Exit,
    failure::Failure,
    files::{self, Recordings},
    report::{
        annotations::{Annotations, Check, Finding},
        baseline::{Comparison, is_of_recording, repository_of},
        baseline_lines::{LinePeaks, Processes},
        change::Limit,
        overview::Overview,
    },
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem baseline write gpumem-peaks.json train.capture
  gpumem baseline check gpumem-peaks.json train.capture
  gpumem baseline check gpumem-peaks.json runs/ --markdown > comment.md";

/// Keeps the peaks of devices and places in a small file of a repository, for reviews.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BaselineArguments {
    #[command(subcommand)]
    command: BaselineCommand,
}

#[derive(Debug, Subcommand)]
enum BaselineCommand {
    Write(WriteArguments),
    Check(CheckArguments),
}

/// Writes one line for the peak of each device, and one for each place that holds at least 1 % of it. Values are rounded up: below
/// 128 MiB to whole MiB, above by less than 1 %.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct WriteArguments {
    #[command(flatten)]
    inputs: Inputs,
}

/// Compares recordings with a baseline, and exits with 1 if a peak is higher, or if the baseline does not contain its place.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct CheckArguments {
    #[command(flatten)]
    inputs: Inputs,
    /// The allowed increase of a peak, such as 5% or 100MiB (100MB means the same).
    #[arg(long, value_name = "LIMIT", default_value = "2%")]
    fail_on_increase: Limit,
    /// Report an increase to CI: `github` marks the line in a pull request, and `junit=FILE` writes a JUnit test report.
    #[arg(long, value_name = "FORMAT")]
    annotations: Option<Annotations>,
    /// Print a table in Markdown, for a comment on a pull request.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Inputs {
    /// The baseline file.
    file: PathBuf,
    /// Recordings, folders of them, or patterns such as 'runs/*.capture'.
    #[arg(required = true)]
    recordings: Vec<PathBuf>,
}

pub(super) fn execute(arguments: &BaselineArguments) -> Result<Exit, Failure> {
    match &arguments.command {
        BaselineCommand::Write(WriteArguments { inputs }) => {
            let (lines, empty) = lines(inputs)?;
            let written = lines.written();
            let change = |baseline: &mut Baseline| {
                baseline.peaks.retain(|name, _| !is_of_recording(name));
                baseline.peaks.extend(written);
            };
            Baseline::update(&inputs.file, change).map_err(|error| failure("saved", error))?;
            Ok(exit(Annotations::publish(None, &empty)?))
        }
        BaselineCommand::Check(arguments) => check(arguments),
    }
}

fn check(arguments: &CheckArguments) -> Result<Exit, Failure> {
    let CheckArguments { inputs, fail_on_increase, annotations, markdown, json } = arguments;
    let (lines, empty) = lines(inputs)?;
    let baseline = Baseline::read(&inputs.file).map_err(|error| failure("compared", error))?.ok_or_else(|| {
        let file = inputs.file.display();
        Failure::new(
            format!("`{file}` cannot be read"),
            "there is no such file",
            "write it with `gpumem baseline write`",
        )
    })?;
    if let Some(name) = lines.first_unmatched(baseline.peaks.keys()) {
        let what = format!("`{name}` cannot be compared");
        let why = "the recordings do not show how much memory the processes held at the same time";
        return Err(Failure::new(what, why, "record them with `gpumem run`, without --only-peak"));
    }
    let comparison = Comparison::of(&inputs.file, &baseline.peaks, &lines, *fail_on_increase);
    if *markdown {
        terminal::print(|out| comparison.write_markdown(out))?;
    } else {
        terminal::answer(*json, &comparison, |out, paint| comparison.write(out, paint))?;
    }
    let has_empty = !empty.is_empty();
    let mut checks = if annotations.is_some() { comparison.checks() } else { Vec::new() };
    checks.extend(empty);
    Annotations::publish(annotations.as_ref(), &checks)?;
    Ok(if comparison.is_exceeded() { Exit::LimitExceeded } else { exit(has_empty) })
}

/// Returns the exit code. An empty recording adds no peak to a new baseline, and is not compared with one.
fn exit(has_empty: bool) -> Exit {
    if has_empty { Exit::Failed } else { Exit::Done }
}

/// Creates a failure from the library's error, which says what is wrong with the file and what to do about it.
fn failure(what: &str, error: gpumem_core::error::Error) -> Failure {
    Failure::new(format!("the peaks cannot be {what}"), error, "")
}

/// Returns the lines of the recordings, and a check for each empty recording.
fn lines(inputs: &Inputs) -> Result<(LinePeaks, Vec<Check>), Failure> {
    let mut processes = Processes::default();
    let Recordings { files, empty } = Recordings::of(&inputs.recordings)?;
    let root = repository_of(&inputs.file);
    let check = |file: &Path, why: &str| {
        let file = file.display().to_string();
        let found = vec![Finding::new(format!("`{file}` has no peaks: {why}"))];
        Check { of: file, name: "its peaks are known".to_owned(), found }
    };
    let mut empty: Vec<_> = empty.iter().map(|file| check(file, files::EMPTY)).collect();
    for file in files {
        let history = read(&file)?;
        let overview = Overview::of(&history);
        match overview.why_empty() {
            Some(why) => empty.push(check(&file, why)),
            None => processes.add(&history, &overview, root.as_deref())?,
        }
    }
    let lines = processes.lines()?;
    if lines.is_empty() {
        let next = "record a program that uses a GPU";
        Annotations::publish(None, &empty)?;
        return Err(Failure::new("no peaks are known", "nothing was measured", next));
    }
    Ok((lines, empty))
}
