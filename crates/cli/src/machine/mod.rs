//! The GPUs of this machine, their processes, and running recordings. `gpumem info`, `ps`, `watch` and `doctor` show
//! them.

mod doctor;
mod gpus;
mod injection;
mod processes;
mod system;

#[cfg(test)]
pub(crate) use self::processes::Dormant;
#[cfg(any(test, feature = "export"))]
pub(crate) use self::processes::Process;
pub(crate) use self::{
    doctor::{Check, Diagnosis, SettingInUse, Verdict},
    gpus::{Gpu, Machine, Memory, NotRead},
    injection::leave_out_injection,
    processes::{Known, Recording, Usage},
    system::{environment, pids, variable_of},
};
#[cfg(feature = "export")]
pub(crate) use self::{
    processes::{Found, RecordedProcess},
    system::{cgroups, command, shares_memory, start_time, uid, user, uses_driver},
};
use crate::{exit::Exit, failure::Failure, terminal};

/// Prints a line on stderr for each thing that failed. Returns the exit code.
pub(crate) fn exit_of(not_read: &[NotRead]) -> Exit {
    let mut exit = Exit::Done;
    for not_read in not_read.iter().filter(|not_read| not_read.is_error) {
        terminal::error(&Failure::new(format!("{} cannot be read", not_read.what), &not_read.why, ""));
        exit = Exit::Failed;
    }
    exit
}

/// Creates the error for a driver that runs but finds no GPU.
pub(crate) fn no_gpu() -> Failure {
    let next = "in a container, start it with --gpus all; else see `lspci` and dmesg";
    Failure::new("no GPU", "the driver is running, but finds no GPU", next)
}
