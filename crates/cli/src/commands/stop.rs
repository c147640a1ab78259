//! Ends a recording that `gpumem start` or `gpumem attach` started. The program continues.

use clap::Args;
use gpumem_inject::variable;

use crate::{
    exit::Exit,
    failure::Failure,
    run::{attach, control},
};

const EXAMPLES: &str = "\
Examples:
  gpumem stop 4711";

/// Stops the recording that `gpumem start` or `gpumem attach` started. The program continues.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StopArguments {
    /// The id of the process that uses CUDA.
    pid: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: &StopArguments) -> Result<Exit, Failure> {
    let file = control::send(arguments.pid, variable::STOP)?;
    // `gpumem run` completes the recordings of its program when that ends. No other command waits for a recording to
    // end.
    attach::complete_if_unattended(&file);
    super::attach::answer(arguments.pid, &file, arguments.json)
}
