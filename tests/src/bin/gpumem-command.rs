//! The command `gpumem`, for the tests of this package. Cargo builds the programs of a package for its own tests only.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpumem_cli::main()
}
