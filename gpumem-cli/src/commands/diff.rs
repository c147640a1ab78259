//! Compares two recordings.

use std::path::PathBuf;

use clap::Args;

use crate::{exit::Exit, failure::Failure};

const EXAMPLES: &str = "\
Examples:
  gpumem diff before.capture after.capture";

/// Compares the peaks of two recordings.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The recording to compare with.
    before: PathBuf,
    /// The recording that is compared.
    after: PathBuf,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    Err(Failure::new(format!("`{}`", arguments.after.display()), "this command is not written yet", ""))
}
