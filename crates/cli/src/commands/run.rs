//! Runs a program and records it.

use clap::Args;

use crate::{
    exit::Exit,
    failure::Failure,
    run::{self, RunOptions},
};

const EXAMPLES: &str = "\
Examples:
  gpumem run -- python train.py
  gpumem run -o step.capture -- ./my-program --batch 8
  gpumem run --torch -- python train.py            with the tensors in PyTorch's memory
  gpumem run -- torchrun --nproc-per-node 2 train.py

Each process that uses CUDA has a recording of its own. One process: FILE. Several: the name has the rank, the devices and the number \
of the process before the extension, such as train.rank0.gpu0.pid4711.capture.

The program sees its own stdin, stdout and signals. `gpumem run` ends with the program's exit code, with 128 and the number of the \
signal that ended it, with 127 if there is no such program, and with 126 if it cannot be started. \
If the program ended with 0 and a limit was not kept, it ends with 1. If recording fails, one line on stderr \
says why, and the program runs on.";

/// Runs a program and records its GPU memory.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    options: RunOptions,
}

pub(super) fn execute(arguments: &RunArguments) -> Result<Exit, Failure> {
    run::run(&arguments.options)
}
