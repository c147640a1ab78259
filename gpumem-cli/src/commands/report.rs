//! Shows what a recording has.

use std::path::PathBuf;

use clap::Args;

use crate::{exit::Exit, failure::Failure};

const EXAMPLES: &str = "\
Examples:
  gpumem report train.capture              the peak, what it consisted of, what was not freed
  gpumem report rank-*.capture             several ranks, side by side";

/// Shows what a recording has: the peak, what it consisted of, what was not freed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Recordings, as `gpumem run` and `GPUMEM_CAPTURE` write them.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    Err(Failure::new(format!("`{}`", arguments.files[0].display()), "this command is not written yet", ""))
}
