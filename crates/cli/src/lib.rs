//! The command `gpumem`: records, shows and compares the GPU memory of any CUDA program.
//!
//! `commands/` contains the arguments and the work of each command, `run/` runs and records programs, `recording/`
//! completes the files of recordings, `history/` reads them, `report/`, `formats/` and `page/` show them, and
//! `machine/` describes the machine.

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
mod page;
mod progress;
mod recording;
#[cfg(test)]
#[path = "../tests/command/recording_builder.rs"]
#[allow(dead_code, reason = "the tests of the command use the rest")]
mod recording_builder;
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
    sync::Arc,
};

use clap::CommandFactory;
use gpumem_core::model::one_line;

use self::{arguments::Arguments, exit::Exit, failure::Failure};

/// Runs the command that the arguments of the process ask for.
pub fn main() -> ExitCode {
    // With a handler, a write beyond `ulimit -f` fails, instead of ending the command. Programs that it starts have none.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
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

/// Prints clap's result if there is no command to run: the help, the version, or an error about the arguments.
fn answer(error: &clap::Error) -> Result<Exit, Failure> {
    // The message repeats arguments, so their unprintable characters are removed and they are parsed again. The new
    // message is used unless an argument was wrong only because of such characters.
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
