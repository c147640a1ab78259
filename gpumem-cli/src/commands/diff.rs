//! Compares two recordings.

use std::path::PathBuf;

use clap::Args;

use crate::{
    exit::Exit,
    failure::Failure,
    history::History,
    recording::complete_for_report,
    report::{
        difference::{Difference, Limit},
        overview::Overview,
    },
    terminal,
};

const EXAMPLES: &str = "\
Examples:
  gpumem diff before.capture after.capture
  gpumem diff before.capture after.capture --fail-on-increase 5%
  gpumem diff before.capture after.capture --markdown > comment.md";

/// Compares the peaks of two recordings, by scope, place, library and kind of memory, and those of PyTorch's tensors if both have them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiffArguments {
    /// The recording to compare with.
    before: PathBuf,
    /// The recording that is compared. It may be one that an estimate wrote.
    after: PathBuf,
    /// Exit with 1 if the peak of a device increased by more than this, such as 5% or 100MiB (100MB means the same); with 2 if that is not known.
    #[arg(long, value_name = "LIMIT")]
    fail_on_increase: Option<Limit>,
    /// As tables in Markdown, for a comment on a pull request.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &DiffArguments) -> Result<Exit, Failure> {
    let [before, after] = [&arguments.before, &arguments.after].map(|file| {
        complete_for_report(file);
        History::read(file).map(|history| Overview::of(&history))
    });
    let difference = Difference::of(before?, after?, arguments.fail_on_increase);
    if arguments.markdown {
        terminal::print(|out| difference.write_markdown(out))?;
    } else {
        terminal::answer(arguments.json, &difference, |out, paint| difference.write(out, paint))?;
    }
    if let Some(why) = difference.not_measured.first() {
        terminal::error(&Failure::new("the peaks cannot be compared", why, "record the program again"));
        return Ok(Exit::Failed);
    }
    Ok(if difference.is_exceeded == Some(true) { Exit::LimitExceeded } else { Exit::Done })
}
