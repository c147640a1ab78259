//! The arguments of all commands.

use clap::{Parser, Subcommand, builder::styling};

use crate::{commands, exit, size};

const EXAMPLES: &str = "\
Examples:
  gpumem run -- python train.py            records the program; its peak is printed at its end
  gpumem report train.capture              what made the peak, and what was not freed
  gpumem report --html train.html train.capture
  gpumem diff before.capture after.capture --fail-on-increase 5%
  gpumem estimate config.json --train adam --fit 80GiB
  gpumem info                              the GPUs, and what memory they have
  gpumem ps                                the processes on them, and which are recorded
  gpumem watch                             memory, processes and running recordings, now
  gpumem doctor                            what keeps gpumem from working here";

const STYLES: styling::Styles = styling::Styles::styled()
    .header(styling::Style::new().bold())
    .usage(styling::Style::new().bold())
    .literal(styling::AnsiColor::Cyan.on_default());

/// Records, shows and compares the GPU memory of any CUDA program.
#[derive(Debug, Parser)]
#[command(
    name = "gpumem",
    version,
    after_help = format!("{EXAMPLES}\n\n{}\n\n{}", size::HELP, exit::HELP),
    subcommand_required = true,
    arg_required_else_help = true,
    styles = STYLES,
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// One for each file in `commands/`.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(commands::run::Arguments),
    Attach(commands::attach::Arguments),
    Start(commands::start::Arguments),
    Stop(commands::stop::Arguments),
    Report(commands::report::Arguments),
    Diff(commands::diff::Arguments),
    Estimate(commands::estimate::Arguments),
    Info(commands::info::Arguments),
    Ps(commands::ps::Arguments),
    Watch(commands::watch::Arguments),
    Doctor(commands::doctor::Arguments),
    Completions(commands::completions::Arguments),
    Man(commands::man::Arguments),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_do_not_contradict_each_other() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_help_of_each_command_has_examples() {
        for command in Arguments::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with("Examples:\n  gpumem "), "{}: {help}", command.get_name());
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }
}
