//! Writes the completion script of a shell.

use clap::{Args, Command};
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
pub(crate) struct CompletionsArguments {
    /// The shell.
    shell: Shell,
}

pub(super) fn execute(arguments: &CompletionsArguments, mut command: Command) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "gpumem", &mut script);
    terminal::print(|out| out.write_all(&script))?;
    Ok(Exit::Done)
}
