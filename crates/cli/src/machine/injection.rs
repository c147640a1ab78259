//! `CUDA_INJECTION64_PATH` in the environment of this command.

use std::{env, ffi::OsString, process::Command};

use gpumem_inject::variable::INJECTION;

/// The value of the variable before the command started itself again without it.
const WAS: &str = "GPUMEM_COMMAND_INJECTION";

/// Starts this command again without the variable, in this process: if the command initialised the driver, the driver would load the
/// tool into the command, which is not the program that the tool is for.
pub(crate) fn leave_out_injection() {
    #[cfg(unix)]
    if let Some(tool) = set(INJECTION)
        && let Ok(this) = env::current_exe()
    {
        use std::os::unix::process::CommandExt;

        // The call returns only if it fails. Then the tool is loaded, which does not change the output.
        _ = Command::new(this).args(env::args_os().skip(1)).env_remove(INJECTION).env(WAS, tool).exec();
    }
}

/// The tool that programs in the environment of this command have loaded.
pub(super) fn tool() -> Option<OsString> {
    set(INJECTION).or_else(|| set(WAS))
}

fn set(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
