//! Ends what `gpumem start` began.

use clap::Args;

use crate::{exit::Exit, failure::Failure};

const EXAMPLES: &str = "\
Examples:
  gpumem stop 4711";

/// Ends a recording that `gpumem start` began.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The number of the process.
    pid: u32,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    Err(Failure::new(format!("{arguments:?}"), "this command is not written yet", ""))
}
