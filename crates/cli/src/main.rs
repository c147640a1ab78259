//! The command `gpumem`. All code is in the library, so that the workspace's tests can build the command as a separate
//! program.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpumem_cli::main()
}
