//! The commands, one per file: the arguments, and `execute`.

mod attach;
mod baseline;
mod completions;
mod diff;
mod doctor;
mod estimate;
#[cfg(feature = "export")]
mod export;
mod info;
mod man;
mod ps;
mod report;
mod run;
mod start;
mod stop;
mod watch;
mod what_if;

use clap::Subcommand;

use crate::{exit::Exit, failure::Failure};

/// A command with its arguments.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(run::RunArguments),
    Attach(attach::AttachArguments),
    Start(start::StartArguments),
    Stop(stop::StopArguments),
    Report(report::ReportArguments),
    Diff(diff::DiffArguments),
    Baseline(baseline::BaselineArguments),
    WhatIf(what_if::WhatIfArguments),
    Estimate(estimate::EstimateArguments),
    Info(info::InfoArguments),
    Ps(ps::PsArguments),
    Watch(watch::WatchArguments),
    #[cfg(feature = "export")]
    Export(export::ExportArguments),
    Doctor(doctor::DoctorArguments),
    Completions(completions::CompletionsArguments),
    Man(man::ManArguments),
}

/// Runs a command. `all` describes all commands, for their manual pages and completions.
pub(crate) fn execute(command: Command, all: clap::Command) -> Result<Exit, Failure> {
    let done = match command {
        Command::Run(arguments) => run::execute(&arguments),
        Command::Attach(arguments) => attach::execute(arguments),
        Command::Start(arguments) => start::execute(&arguments),
        Command::Stop(arguments) => stop::execute(&arguments),
        Command::Report(arguments) => report::execute(arguments),
        Command::Diff(arguments) => diff::execute(&arguments),
        Command::Baseline(arguments) => baseline::execute(&arguments),
        Command::WhatIf(arguments) => what_if::execute(arguments),
        Command::Estimate(arguments) => estimate::execute(&arguments),
        Command::Info(arguments) => info::execute(&arguments),
        Command::Ps(arguments) => ps::execute(&arguments),
        Command::Watch(arguments) => watch::execute(&arguments),
        #[cfg(feature = "export")]
        Command::Export(arguments) => export::execute(arguments),
        Command::Doctor(arguments) => doctor::execute(&arguments),
        Command::Completions(arguments) => completions::execute(&arguments, all),
        Command::Man(arguments) => man::execute(&arguments, all),
    };
    match done {
        Err(Failure::ClosedPipe) => Ok(Exit::Done),
        done => done,
    }
}
