//! The command `gpumem`: records, shows and compares the GPU memory of any CUDA program.
//!
//! `commands/` has what each command takes and does, `run/` how a program is run and recorded, `recording/` how the file of a recording is
//! completed, `history/` what it says, `report/`, `formats/` and `page/` what is shown of that, `machine/` what the machine has.

#![forbid(unsafe_code)]

mod arguments;
mod commands;
mod exit;
#[cfg(feature = "export")]
mod export;
mod failure;
mod files;
mod formats;
mod history;
mod machine;
#[cfg(test)]
#[path = "../tests/command/made.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod made;
mod page;
mod progress;
mod recording;
mod report;
mod run;
mod terminal;
mod values;
mod watch;
mod what_if;
mod wrap;

use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};

use clap::CommandFactory;
use gpumem_core::model::one_line;

use self::{arguments::Arguments, exit::Exit, failure::Failure};

/// Does what the arguments of the process ask for.
pub fn main() -> ExitCode {
    let done = match arguments::parse(env::args_os()) {
        Ok(arguments) => commands::execute(arguments.command, Arguments::command()),
        Err(error) => answer(&error),
    };
    let exit = done.unwrap_or_else(|failure| {
        terminal::error(&failure);
        Exit::Failed
    });
    exit.into()
}

/// The help or the version, or what is wrong with the arguments.
fn answer(error: &clap::Error) -> Result<Exit, Failure> {
    // The message has arguments in it. With printable ones it is the same, unless one was wrong for what is not printable in it.
    let printable = env::args_os().map(|argument| one_line(&argument.to_string_lossy()).into_owned());
    let error = match arguments::parse(printable) {
        Err(same) if same.kind() == error.kind() => same,
        _ => {
            terminal::error(error);
            return Ok(Exit::Failed);
        }
    };
    let printed = error.print().and_then(|()| io::stdout().flush());
    if error.use_stderr() {
        Ok(Exit::Failed)
    } else {
        printed.map(|()| Exit::Done).map_err(|error| Failure::of_output(&error))
    }
}
