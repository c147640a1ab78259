//! The exit codes of all commands.

use std::process::ExitCode;

/// The outcome of a command. `gpumem --help` lists the codes, from [`HELP`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command did what it was asked for.
    Done,
    /// A limit was exceeded, such as that of `--fail-on-increase`.
    LimitExceeded,
    /// `gpumem doctor` found a problem.
    ProblemFound,
    /// The command failed, or did only a part of its work. An error on stderr explains it.
    Failed,
    /// `gpumem run` exits with the code of the program.
    Program(u8),
}

/// The exit codes, for the help of the command.
pub(crate) const HELP: &str = "\
Exit codes:
  0  done
  1  a limit was exceeded, or `gpumem doctor` found a problem
  2  failed, or was done only in part: stderr has the reason
`gpumem run` exits with the program's exit code.";

impl Exit {
    const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::LimitExceeded | Self::ProblemFound => 1,
            Self::Failed => 2,
            Self::Program(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}
