//! What `gpumem run` and `gpumem attach` are asked for.

use std::{ffi::OsString, path::PathBuf};

use clap::{ArgGroup, Args, ValueEnum};
use gpumem_core::model::Bytes;
use gpumem_inject::variable;

use crate::values::{recording, size};

/// How a program is run.
#[derive(Debug, Args)]
pub(crate) struct RunOptions {
    /// The file of the recording, which is replaced if it exists. Else a new file in the current folder, named after the program.
    #[arg(short, long, value_name = "FILE", value_parser = recording())]
    pub(super) output: Option<PathBuf>,
    #[command(flatten)]
    pub(super) recorded: Recorded,
    /// Record nothing until `gpumem start PID`.
    #[arg(long)]
    pub(super) dormant: bool,
    /// The program and its arguments. `--` before it is needed if its name begins with a dash.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

/// What is recorded of a program.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("tensors").args(["torch", "modules"]).multiple(true)))]
pub(crate) struct Recorded {
    /// The stacks that are recorded of allocations of 1 MiB or more. Smaller ones have a library.
    #[arg(long, value_enum, default_value_t = Stacks::Python)]
    stacks: Stacks,
    /// Keep the newest events only: about SIZE, such as 100MiB, and besides the blocks that were live before them.
    #[arg(long, value_name = "SIZE", value_parser = recording_size)]
    max_size: Option<Bytes>,
    /// Keep only what was live at the peak of each device and at the end. A killed program loses its last second.
    #[arg(long, conflicts_with = "max_size")]
    only_peak: bool,
    /// Record the tensors of PyTorch (2.1 or newer) as well: what is in the memory that its allocator gets from the driver.
    #[arg(long)]
    pub(super) torch: bool,
    /// Record for each tensor of PyTorch (2.10 or newer) the module that allocated it, and whether it is a weight, a gradient, or something
    /// else. Implies --torch.
    #[arg(long)]
    pub(super) modules: bool,
    /// PyTorch keeps so many of the newest events of each device, three for a tensor, in the memory of the program: up to 1 KB each.
    #[arg(long, value_name = "COUNT", default_value_t = 500_000, requires = "tensors",
        value_parser = clap::value_parser!(u64).range(1_000..))]
    torch_events: u64,
}

impl Recorded {
    /// Whether the tensors of PyTorch are recorded.
    pub(super) fn has_torch(&self) -> bool {
        self.torch || self.modules
    }

    /// The settings that tell the library in the program what to record.
    pub(super) fn settings(&self) -> Settings {
        let keep = match self.max_size {
            _ if self.only_peak => variable::PEAKS.to_owned(),
            Some(size) => size.get().to_string(),
            None => String::new(),
        };
        let torch = match (self.has_torch(), self.modules) {
            (false, _) => String::new(),
            (true, false) => self.torch_events.to_string(),
            (true, true) => format!("{}{}", self.torch_events, variable::MODULES),
        };
        Settings { backtrace: self.stacks.backtrace(), keep, torch }
    }
}

/// The values of the variables of the environment that have the same names.
pub(super) struct Settings {
    /// See `GPUMEM_BACKTRACE`.
    pub(super) backtrace: &'static str,
    /// See [`variable::KEEP`].
    pub(super) keep: String,
    /// See [`variable::TORCH`].
    pub(super) torch: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stacks {
    /// No stacks.
    None,
    /// The functions of the program and of its libraries.
    Native,
    /// The same, and the lines of Python (3.11 to 3.14).
    Python,
}

impl Stacks {
    /// The value of the library's setting `GPUMEM_BACKTRACE`.
    const fn backtrace(self) -> &'static str {
        match self {
            Self::None => "0",
            Self::Native => "auto",
            Self::Python => "python",
        }
    }
}

/// A recording has to have room for what is live.
fn recording_size(text: &str) -> Result<Bytes, String> {
    let size = size(text)?;
    if size < Bytes::kib(64) { Err("it is less than 64 KiB".to_owned()) } else { Ok(size) }
}
