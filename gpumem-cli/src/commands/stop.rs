//! Ends the recording of a program that was started with `gpumem run --dormant`. The program runs on.

use clap::Args;
use gpumem_inject::variable;

use crate::{exit::Exit, failure::Failure, run::control, terminal};

const EXAMPLES: &str = "\
Examples:
  gpumem stop 4711";

/// Ends the recording of a program that was started with `gpumem run --dormant`. The program runs on.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The number of the process that uses CUDA.
    pid: u32,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    let file = control::send(arguments.pid, variable::STOP)?;
    terminal::print(|out| writeln!(out, "{file}"))?;
    Ok(Exit::Done)
}
