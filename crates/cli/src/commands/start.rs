//! Starts to record a program that was started with `gpumem run --dormant`.

use clap::Args;
use gpumem_inject::variable;

use crate::{exit::Exit, failure::Failure, run::control};

const EXAMPLES: &str = "\
Examples:
  gpumem start 4711";

/// Starts recording a program that was started with `gpumem run --dormant`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StartArguments {
    /// The id of the process that uses CUDA.
    pid: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &StartArguments) -> Result<Exit, Failure> {
    let file = control::send(arguments.pid, variable::START)?;
    super::attach::answer(arguments.pid, &file, arguments.json)
}
