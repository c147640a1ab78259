//! The command `gpumem`. All of it is in the library, so that the tests of the workspace can build it as a program of their own.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpumem_cli::main()
}
