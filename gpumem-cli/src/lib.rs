//! The command `gpumem`: records, shows and compares the GPU memory of any CUDA program.
//!
//! `arguments.rs` has what each command takes, `commands/` what it does, `run/` how a program is
//! run and recorded, `machine/` what the machine has, `exit.rs` the exit codes, `failure.rs` the form of errors.

#![forbid(unsafe_code)]

mod arguments;
mod commands;
mod exit;
mod failure;
mod formats;
mod history;
mod machine;
#[cfg(test)]
#[path = "../tests/command/made.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod made;
mod page;
mod progress;
mod report;
mod run;
mod size;
mod terminal;
mod watch;
mod wrap;

use std::process::ExitCode;

use clap::Parser;

use self::{arguments::Arguments, exit::Exit};

/// Does what the arguments of the process ask for.
pub fn main() -> ExitCode {
    let done = commands::execute(Arguments::parse());
    let exit = done.unwrap_or_else(|failure| {
        terminal::error(&failure);
        Exit::Failed
    });
    exit.into()
}
