//! The command `gpumem`, for the tests of this package. Cargo builds the programs of a package only for the tests of
//! the same package.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpumem_cli::main()
}
