//! Runs a program and records it.

use std::ffi::OsString;

use clap::Args;

use crate::{exit::Exit, failure::Failure};

const EXAMPLES: &str = "\
Examples:
  gpumem run -- python train.py";

/// Runs a program and records its GPU memory.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    Err(Failure::new(format!("{arguments:?}"), "this command is not written yet", ""))
}
