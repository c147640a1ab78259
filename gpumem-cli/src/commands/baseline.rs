//! Writes the peaks of recordings to a file of a repository, and compares other recordings with it.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use gpumem_driver::baseline_file::Baseline;

use super::report::read;
use crate::{
    exit::Exit,
    failure::Failure,
    files,
    report::{
        annotations::Annotations,
        baseline::{Comparison, Lines, is_of_recording},
        difference::Limit,
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
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Write(WriteArguments),
    Check(CheckArguments),
}

/// Writes the peak of each device, and of each place with 1 % of it or more: a line each, rounded up by less than 1 %.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct WriteArguments {
    #[command(flatten)]
    of: Of,
}

/// Compares recordings with a baseline, and ends with 1 if a peak is higher.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
struct CheckArguments {
    #[command(flatten)]
    of: Of,
    /// The allowed increase of a peak, such as 5% or 100MiB (100MB means the same).
    #[arg(long, value_name = "LIMIT", default_value = "2%")]
    fail_on_increase: Limit,
    /// Report an increase to CI: `github` marks the line in a pull request, and `junit=FILE` writes a report of tests.
    #[arg(long, value_name = "FORM")]
    annotations: Option<Annotations>,
    /// Print a table in Markdown, for a comment on a pull request.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Of {
    /// The file of the baseline.
    file: PathBuf,
    /// Recordings, folders of them, or patterns such as 'runs/*.capture'.
    #[arg(required = true)]
    recordings: Vec<PathBuf>,
}

pub(super) fn execute(arguments: &BaselineArguments) -> Result<Exit, Failure> {
    match &arguments.what {
        What::Write(WriteArguments { of }) => {
            let written = lines(of)?.written();
            let change = |baseline: &mut Baseline| {
                baseline.peaks.retain(|name, _| !is_of_recording(name));
                baseline.peaks.extend(written);
            };
            Baseline::update(&of.file, change).map_err(|error| refused("kept", error))?;
            Ok(Exit::Done)
        }
        What::Check(arguments) => check(arguments),
    }
}

fn check(arguments: &CheckArguments) -> Result<Exit, Failure> {
    let CheckArguments { of, fail_on_increase, annotations, markdown, json } = arguments;
    let lines = lines(of)?;
    let baseline = Baseline::read(&of.file).map_err(|error| refused("compared", error))?.ok_or_else(|| {
        let file = of.file.display();
        Failure::new(
            format!("`{file}` cannot be read"),
            "there is no such file",
            "write it with `gpumem baseline write`",
        )
    })?;
    let comparison = Comparison::of(&of.file, &baseline.peaks, &lines, *fail_on_increase);
    if *markdown {
        terminal::print(|out| comparison.write_markdown(out))?;
    } else {
        terminal::answer(*json, &comparison, |out, paint| comparison.write(out, paint))?;
    }
    if annotations.is_some() {
        Annotations::tell(annotations.as_ref(), &comparison.checks())?;
    }
    Ok(if comparison.is_exceeded() { Exit::LimitExceeded } else { Exit::Done })
}

/// The library's error says what is wrong with the file, and the next step.
fn refused(what: &str, error: gpumem_core::error::Error) -> Failure {
    Failure::new(format!("the peaks cannot be {what}"), error, "")
}

fn lines(of: &Of) -> Result<Lines, Failure> {
    let mut lines = Lines::default();
    for file in files::expand(&of.recordings)? {
        let history = read(&file)?;
        lines.add(&history, &Overview::of(&history))?;
    }
    if lines.is_empty() {
        let next = "record a program that uses a GPU";
        return Err(Failure::new("no peaks are known", "nothing was measured", next));
    }
    Ok(lines)
}
