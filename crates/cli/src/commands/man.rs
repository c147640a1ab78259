//! Writes manual pages.

use std::{fs, path::PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;

use crate::{exit::Exit, failure::Failure, terminal};

const EXAMPLES: &str = "\
Examples:
  gpumem man | man -l -                                  read gpumem's page
  gpumem man --folder ~/.local/share/man/man1            a page for each command: man gpumem-report";

/// Writes the manual page to stdout, or the pages of all commands to a folder.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ManArguments {
    /// Write a page for each command to this folder.
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(super) fn execute(arguments: &ManArguments, command: Command) -> Result<Exit, Failure> {
    let Some(folder) = &arguments.folder else {
        let mut page = Vec::new();
        Man::new(command).render(&mut page).map_err(|error| Failure::of_output(&error))?;
        terminal::print(|out| out.write_all(&page))?;
        return Ok(Exit::Done);
    };
    let failed = |error| {
        let what = format!("manual pages cannot be written to `{}`", folder.display());
        Failure::new(what, error, "use a folder that you may write to")
    };
    fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(command, folder).map_err(failed)?;
    Ok(Exit::Done)
}
