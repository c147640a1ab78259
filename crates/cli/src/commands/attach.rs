//! Starts to record a program that is already running.

use std::path::PathBuf;

use clap::Args;
use gpumem_core::model::one_line;

use crate::{
    exit::Exit,
    failure::Failure,
    report::json,
    run::{RecordingOptions, attach},
    terminal,
    values::recording,
};

const EXAMPLES: &str = "\
Examples:
  gpumem attach 4711                               until `gpumem stop 4711`, or until the program ends
  gpumem attach -o server.capture 4711

Earlier allocations are not known; the recording and its reports mention this.

This works for programs in Python 3.14 or later, which run code on request. A debugger could force
other programs to run code, but that may hang them. Start those with `gpumem run --dormant`; then `gpumem start` starts the recording at any time.";

/// Starts recording a running program, with Python 3.14 or later.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AttachArguments {
    /// The id of the process that uses CUDA.
    pid: u32,
    /// The file of the recording, which gets the id of the process before the extension. Without this option, a file in
    /// the current folder.
    #[arg(short, long, value_name = "FILE", value_parser = recording())]
    output: Option<PathBuf>,
    #[command(flatten)]
    recorded: RecordingOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn execute(arguments: AttachArguments) -> Result<Exit, Failure> {
    let AttachArguments { pid, output, recorded, json } = arguments;
    let file = attach::attach(pid, output, &recorded)?;
    answer(pid, &file, json)
}

/// Prints the file of a recording that starts or ends.
pub(super) fn answer(pid: u32, file: &str, as_json: bool) -> Result<Exit, Failure> {
    terminal::print(|out| {
        if as_json {
            json::write_line(&serde_json::json!({ "pid": pid, "file": file }), out)
        } else {
            writeln!(out, "{}", one_line(file))
        }
    })?;
    Ok(Exit::Done)
}
