//! The commands, one in each file: its arguments, and `execute`.

pub(crate) mod attach;
pub(crate) mod completions;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod estimate;
pub(crate) mod info;
pub(crate) mod man;
pub(crate) mod ps;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod start;
pub(crate) mod stop;
pub(crate) mod watch;

use crate::{
    arguments::{Arguments, Command},
    exit::Exit,
    failure::Failure,
};

/// Does what the arguments ask for.
pub(crate) fn execute(arguments: Arguments) -> Result<Exit, Failure> {
    let done = match arguments.command {
        Command::Run(arguments) => run::execute(&arguments),
        Command::Attach(arguments) => attach::execute(&arguments),
        Command::Start(arguments) => start::execute(&arguments),
        Command::Stop(arguments) => stop::execute(&arguments),
        Command::Report(arguments) => report::execute(&arguments),
        Command::Diff(arguments) => diff::execute(&arguments),
        Command::Estimate(arguments) => estimate::execute(&arguments),
        Command::Info(arguments) => info::execute(&arguments),
        Command::Ps(arguments) => ps::execute(&arguments),
        Command::Watch(arguments) => watch::execute(&arguments),
        Command::Doctor(arguments) => doctor::execute(&arguments),
        Command::Completions(arguments) => completions::execute(&arguments),
        Command::Man(arguments) => man::execute(&arguments),
    };
    match done {
        Err(Failure::ClosedPipe) => Ok(Exit::Done),
        done => done,
    }
}
