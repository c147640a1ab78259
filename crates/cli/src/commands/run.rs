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

Each process that uses CUDA has its own recording. One process: FILE. Several: the rank, the devices and the process id are inserted \
before the extension, such as train.rank0.gpu0.pid4711.capture.

The program sees its own stdin, stdout and signals. `gpumem run` exits with the program's exit code, with 128 plus the number of the \
signal that ended it, with 127 if there is no such program, and with 126 if it cannot be started. \
If the program exited with 0 and a limit was exceeded, it exits with 1. If recording fails, one line on stderr \
gives the reason, and the program continues.";

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
