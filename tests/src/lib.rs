//! Runs gpumem on the stand-in driver: puts a shared object under NVIDIA's names on the loader's path of a child
//! process, with the faults that the test requests, and returns the output and the calls of the child.
//!
//! The child is `probe`, which takes its commands from its arguments; `src/bin/probe/main.rs` lists them.

pub mod bare_inbox;
mod device;
pub mod driver;
pub mod growth;
mod install;
mod machines;
mod nested_calls;
mod outcome;
mod own_process;
mod patch;
mod pending;
mod process;
mod python;
mod random;
mod script;
mod simulated;
mod standin;
mod stub;
mod text;

pub use gpumem_core::testing::skipped;

pub use self::{
    device::{Mismatches, device, on_the_standin, on_the_standin_with_both_sources, reported_by_both},
    machines::Machines,
    nested_calls::with_nested_calls,
    outcome::Outcome,
    own_process::{Ended, OwnProcess, Running, output_of, part},
    patch::Patch,
    pending::Yield,
    process::{built, wait},
    python::interpreters,
    random::Random,
    script::{CONTEXT, check, check_answers, each, ensure, ensure_answer, ensure_clean, ensure_error, ensure_unharmed},
    simulated::{reported_lines, reports_of, simulated_gpu},
    standin::{Library, Standin},
    stub::Stub,
    text::without_line_numbers,
};
