//! What `gpumem run` and `gpumem attach` are asked for.

use std::{ffi::OsString, path::PathBuf};

/// How a program is run.
#[derive(Debug)]
pub(crate) struct RunOptions {
    /// The file of the recording; `None`: a new one in the current folder.
    pub(crate) output: Option<PathBuf>,
    pub(crate) recorded: RecordOptions,
    /// Nothing is recorded until `gpumem start`.
    pub(crate) dormant: bool,
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
}

/// Which process is recorded from now on.
#[derive(Debug)]
pub(crate) struct AttachOptions {
    pub(crate) pid: u32,
    /// The file of the recording; `None`: one in the current folder.
    pub(crate) output: Option<PathBuf>,
    pub(crate) recorded: RecordOptions,
}

/// What is recorded of a program.
#[derive(Debug)]
pub(crate) struct RecordOptions {
    /// The value of the library's setting `GPUMEM_BACKTRACE`.
    pub(crate) backtrace: &'static str,
    /// See [`variable::KEEP`](gpumem_inject::variable::KEEP).
    pub(crate) keep: String,
    /// How many events PyTorch keeps of each device; `None` if its tensors are not recorded.
    pub(crate) torch_events: Option<u64>,
}

impl RecordOptions {
    /// See [`variable::TORCH`](gpumem_inject::variable::TORCH).
    pub(super) fn torch(&self) -> String {
        self.torch_events.map(|events| events.to_string()).unwrap_or_default()
    }
}
