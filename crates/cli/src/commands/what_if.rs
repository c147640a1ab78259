//! Tries settings of a program in dry runs, or with the requests from a recording.

use std::{ffi::OsString, path::PathBuf};

use clap::Args;
use gpumem_core::{
    export::Role,
    model::{Bytes, one_line},
};
use gpumem_driver::settings::card;

use super::report::read;
use crate::{
    exit::Exit,
    failure::Failure,
    files,
    progress::working,
    terminal,
    what_if::{self, Question},
};

const EXAMPLES: &str = "\
Examples:
  gpumem what-if -- python train.py                          PyTorch's settings, and the smallest GPU for each
  gpumem what-if --try BATCH=16 --try BATCH=32 -- python train.py
  gpumem what-if --card 'RTX 4090' --largest BATCH -- python train.py
  gpumem what-if train.capture                               from what `gpumem run --torch` recorded: modelled, no GPU is needed

With a program, each is a dry run (`gpumem run --dry`): the program needs a GPU of any size, and computes nothing. Its stdin is empty, and its output is not shown.";

/// Tries settings in dry runs of a program, or by replaying a recording: the memory that each needs, and the smallest GPU for it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WhatIfArguments {
    /// A recording with PyTorch's history (`gpumem run --torch`), or a PyTorch snapshot, instead of the program.
    #[arg(conflicts_with_all = ["tries", "largest", "command"])]
    recording: Option<PathBuf>,
    /// Try these variables of the environment, such as BATCH=16 or 'BATCH=16 LENGTH=512'. The option may be given several times. Without
    /// this option, gpumem tries settings of PyTorch's allocator.
    #[arg(long = "try", value_name = "VARIABLES", value_parser = variables)]
    tries: Vec<String>,
    /// Look for the largest whole number in this variable of the environment with which the program runs.
    #[arg(long, value_name = "VARIABLE", conflicts_with = "tries", value_parser = variable)]
    largest: Option<String>,
    /// The GPU: a size such as 24GiB, or a name such as "RTX 4090" or H100.
    #[arg(long, value_name = "CARD", default_value = "1TiB", value_parser = card)]
    card: Bytes,
    /// The number of dry runs at a time. Each needs as much host memory as the program.
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The program and its arguments.
    #[arg(required_unless_present = "recording", last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Parses `NAME=VALUE`, or several of them separated by spaces.
fn variables(text: &str) -> Result<String, String> {
    let is_variable = |word: &str| word.split_once('=').is_some_and(|(name, _)| !name.is_empty());
    if text.split_whitespace().next().is_some() && text.split_whitespace().all(is_variable) {
        Ok(text.to_owned())
    } else {
        Err("write variables such as BATCH=16, with spaces between them".to_owned())
    }
}

/// Parses the name of a variable.
fn variable(text: &str) -> Result<String, String> {
    if text.is_empty() || text.contains(|letter: char| letter == '=' || letter.is_whitespace()) {
        Err("write the name of one variable, such as BATCH".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

pub(super) fn execute(arguments: WhatIfArguments) -> Result<Exit, Failure> {
    let WhatIfArguments { recording, tries, largest, card, jobs, json, command } = arguments;
    let question = Question { command, tries, card, jobs: jobs.into() };
    let Some(name) = largest else {
        let answer = match recording {
            Some(argument) => {
                let files = files::expand(std::slice::from_ref(&argument))?;
                let [file] = files.as_slice() else {
                    let what = format!("`{}` cannot be replayed", argument.display());
                    return Err(Failure::new(what, "it contains several recordings", "pass one of them"));
                };
                let history = read(file)?;
                working("replaying the requests", || what_if::ask_recording(&history, card, question.jobs))?
            }
            None => working("running dry runs of the program", || what_if::ask(&question))?,
        };
        terminal::answer(json, &answer, |out, paint| answer.write(out, paint))?;
        return Ok(if answer.has_any() { Exit::Done } else { Exit::LimitExceeded });
    };
    let found = working("running dry runs of the program", || what_if::largest(&question, &name))?;
    let words = match found.value {
        Some(value) if found.other_failure.is_none() => {
            format!("{name}={value} is the largest that runs on a GPU of {card}.")
        }
        Some(value) => format!("{name}={value} is the largest of the values tried that runs on a GPU of {card}."),
        None => format!("{name}=1 does not run on a GPU of {card}."),
    };
    let (next, why) = found.other_failure.unzip();
    let value = serde_json::json!({
        "variable": name, "largest": found.value, "card_bytes": card.get(),
        "other_failure": next.map(|value| serde_json::json!({ "value": value, "why": why })), "unknown_values": found.unknown_values,
    });
    terminal::answer(json, &value, |out, paint| {
        writeln!(out, "{}", paint.on(Role::Heading, &words))?;
        if let (Some(next), Some(why)) = (next, &why) {
            writeln!(out, "{name}={next} fails for a reason other than memory: {}", one_line(why))?;
        }
        let unknown = what_if::unknown_values(found.unknown_values);
        unknown.map_or(Ok(()), |note| writeln!(out, "{}", paint.on(Role::Faint, note)))
    })?;
    Ok(if found.value.is_some() { Exit::Done } else { Exit::LimitExceeded })
}
