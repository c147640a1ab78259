//! `CUDA_INJECTION64_PATH` in the environment of this command.

use std::{env, ffi::OsString, process::Command};

use gpumem_inject::variable::INJECTION;

/// Holds the variable's value from before the command restarted itself without it.
const WAS: &str = "GPUMEM_COMMAND_INJECTION";

/// Restarts this command without the variable, in the same process. Otherwise, when the command initialises the driver,
/// the driver would load the tool into the command, which is not the program that the tool is meant for.
pub(crate) fn leave_out_injection() {
    #[cfg(unix)]
    if let Some(tool) = set(INJECTION)
        && let Ok(this) = env::current_exe()
    {
        use std::os::unix::process::CommandExt;

        // The call returns only if it fails. The tool is then loaded, which does not change the output.
        _ = Command::new(this).args(env::args_os().skip(1)).env_remove(INJECTION).env(WAS, tool).exec();
    }
}

/// The tool that is loaded into programs in the environment of this command.
pub(super) fn tool() -> Option<OsString> {
    set(INJECTION).or_else(|| set(WAS))
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
