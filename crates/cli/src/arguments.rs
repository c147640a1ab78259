//! The arguments of all commands.

use std::ffi::OsString;

use clap::{
    Arg, CommandFactory, FromArgMatches, Parser,
    builder::{ValueParser, styling},
};

use crate::{commands::Command, exit, values};

const EXAMPLES: &str = "\
Examples:
  gpumem run -- python train.py            records the program; its peak is printed at its end
  gpumem report train.capture              the peak, its parts, and memory that was not freed
  gpumem report --html train.html train.capture
  gpumem diff before.capture after.capture --fail-on-increase 5%
  gpumem baseline check peaks.json train.capture
  gpumem what-if -- python train.py        settings of PyTorch's allocator, and the smallest GPU for each
  gpumem estimate config.json --train adam --fit 80GiB
  gpumem info                              the GPUs and their memory
  gpumem ps                                the processes on them, and which are recorded
  gpumem watch                             memory, processes and running recordings, now
  gpumem export                            metrics for Prometheus and OpenTelemetry
  gpumem doctor                            problems that keep gpumem from working here";

const STYLES: styling::Styles = styling::Styles::styled()
    .header(styling::Style::new().bold())
    .usage(styling::Style::new().bold())
    .literal(styling::AnsiColor::Cyan.on_default());

/// Records, shows and compares the GPU memory of any CUDA program.
#[derive(Debug, Parser)]
#[command(
    name = "gpumem",
    version,
    after_help = format!("{EXAMPLES}\n\n{}\n\n{}", values::SIZE_HELP, exit::HELP),
    subcommand_required = true,
    arg_required_else_help = true,
    styles = STYLES,
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Reads the arguments of the process; the first is its name.
pub(crate) fn parse(arguments: impl IntoIterator<Item: Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    // The option checks its value, such as `--at -5s`. For a path this is an error: `-o --json` lacks one.
    let takes_dash = |argument: Arg| {
        let is_option = argument.get_long().is_some() && argument.get_action().takes_values();
        let takes_dash = is_option && argument.get_value_parser().type_id() != ValueParser::path_buf().type_id();
        if takes_dash { argument.allow_hyphen_values(true) } else { argument }
    };
    let mut command = Arguments::command().mut_subcommands(|command| command.mut_args(takes_dash));
    // Without this, errors show the usage without `[OPTIONS]`. The names of subcommands are complete after `build`.
    command.build();
    let command = command.mut_subcommands(|mut command| {
        let usage = command.render_usage().ansi().to_string();
        match usage.split_once(' ') {
            Some((_, usage)) => command.override_usage(usage.to_owned()),
            None => command,
        }
    });
    let matches = command.try_get_matches_from(arguments)?;
    Arguments::from_arg_matches(&matches)
}

#[cfg(test)]
mod tests {
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
