//! Writes the completions of a shell.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{exit::Exit, failure::Failure, terminal};

const EXAMPLES: &str = "\
Examples:
  gpumem completions bash > ~/.local/share/bash-completion/completions/gpumem
  gpumem completions zsh > ~/.zfunc/_gpumem
  gpumem completions fish > ~/.config/fish/completions/gpumem.fish";

/// Writes the completions of a shell to stdout.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The shell.
    shell: Shell,
}

pub(crate) fn execute(arguments: &Arguments) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut crate::arguments::Arguments::command(), "gpumem", &mut script);
    terminal::print(|out| out.write_all(&script))?;
    Ok(Exit::Done)
}
