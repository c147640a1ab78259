//! The options of `gpumem run` and `gpumem attach`.

use std::{ffi::OsString, io, path::PathBuf};

use clap::{ArgGroup, Args, ValueEnum};
use gpumem_core::model::Bytes;
use gpumem_driver::{
    dry::SHARED_WORDS,
    ring_memory::RingPages,
    settings::{card, size},
};
use gpumem_inject::options::{self, CardMode, Keep, Options, Torch};

use crate::{report::limit::Limits, terminal, values::recording};

/// The options for running a program.
#[derive(Debug, Args)]
pub(crate) struct RunOptions {
    /// The file of the recording, which is replaced if it exists. Without this option, a new file in the current folder, named
    /// after the program.
    #[arg(short, long, value_name = "FILE", value_parser = recording())]
    pub(super) output: Option<PathBuf>,
    #[command(flatten)]
    pub(super) recorded: RecordingOptions,
    /// Record nothing until `gpumem start PID`.
    #[arg(long, conflicts_with = "limits")]
    pub(super) dormant: bool,
    #[command(flatten)]
    pub(super) cards: Cards,
    // The limits count if the program ends well.
    #[command(flatten)]
    pub(super) limits: Limits,
    /// The program and its arguments. `--` before it is needed if its name starts with a dash.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

/// The cards that the program sees.
#[derive(Debug, Args)]
pub(super) struct Cards {
    /// Do not compute: large blocks have no memory of their own, and kernels that use them are skipped. The program needs a GPU of any size,
    /// and allocates as on the GPU of --card.
    #[arg(long)]
    pub(super) dry: bool,
    /// The GPU of a dry run: a size such as 24GiB, or a name such as "RTX 4090" or H100. Without this option, the GPU of this
    /// machine.
    #[arg(long, value_name = "CARD", requires = "dry", value_parser = card)]
    card: Option<Bytes>,
    /// In a dry run, the number of these GPUs that the program sees, on the first GPU of the machine.
    #[arg(long = "cards", value_name = "COUNT", requires = "dry", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) count: Option<u32>,
    /// In a dry run, each process has its own GPU, like ranks on a machine with several GPUs. Without this option, they share the
    /// GPU.
    #[arg(long = "card-per-process", requires = "dry", conflicts_with = "count")]
    per_process: bool,
    /// The bytes that a dry run copies to the host from memory that does not exist: 0 or 1.
    #[arg(long, value_enum, value_name = "VALUE", requires = "dry", default_value_t = Fill::Zero)]
    dry_fill: Fill,
    /// In a dry run, the size up to which blocks have memory, such as 64MiB: kernels that use only such blocks are executed. At least 2 MiB.
    /// Without this option, 1/64 of the GPU's free memory, and at most 160 MiB.
    #[arg(long, value_name = "SIZE", requires = "dry", value_parser = real_size)]
    real: Option<Bytes>,
    /// Fail allocations that a GPU of this size could not serve. The program computes as usual.
    #[arg(long, value_name = "CARD", conflicts_with_all = ["dry", "dormant"], value_parser = card)]
    limit: Option<Bytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Fill {
    Zero,
    One,
}

impl Cards {
    /// Returns whether the program should not use the real GPU as it is.
    pub(super) fn are_replaced(&self) -> bool {
        self.dry || self.limit.is_some()
    }

    /// Creates the shared memory in which the program's processes note their memory on GPUs that are not the real ones.
    /// Without it, each process has these GPUs to itself.
    pub(super) fn account(&self) -> Option<RingPages> {
        let pages = || RingPages::new(SHARED_WORDS.div_ceil(8));
        let shared = (self.are_replaced() && !self.per_process).then(pages)?.and_then(|pages| match pages.segment() {
            Some(_) => Ok(pages),
            None => Err(io::Error::other("this machine has no shared memory of System V")),
        });
        // From here on, the shared memory is removed with the last process that holds it.
        let kept = shared.inspect(RingPages::discard);
        kept.inspect_err(|why| terminal::error(&format_args!("each process has the GPUs to itself: {why}"))).ok()
    }

    /// Returns the GPUs that the program sees, or `None` if they are the real ones.
    pub(super) fn of_program(&self, shared: Option<u64>) -> Option<options::Cards> {
        let Self { dry, card, count, dry_fill, real, limit, .. } = self;
        let mode = match limit {
            Some(card) => CardMode::Limit { card: card.get() },
            None if *dry => {
                let (card, cards, fill) = (card.map(Bytes::get), count.unwrap_or(0), *dry_fill as u8);
                CardMode::Dry { card, cards, fill, real: real.map(Bytes::get) }
            }
            None => return None,
        };
        Some(options::Cards { mode, shared })
    }
}

/// The size of a recording with `--live`. Half of it can hold one minute of a program with 27,000 events per second.
const LIVE: Bytes = Bytes::mib(16);

/// The options for recording a program.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("tensors").args(["torch", "modules"]).multiple(true)))]
#[expect(clippy::struct_excessive_bools, reason = "each is an option")]
pub(crate) struct RecordingOptions {
    /// The stacks that are recorded for allocations of 1 MiB or more. For smaller ones, only the library is recorded.
    #[arg(long, value_enum, default_value_t = Stacks::Python)]
    stacks: Stacks,
    /// Keep only the latest events, about SIZE such as 100MiB, and the blocks that were live before them.
    #[arg(long, value_name = "SIZE", value_parser = recording_size)]
    max_size: Option<Bytes>,
    /// For programs that run for months: like --max-size, with 16 MiB if no size is given. `gpumem watch` and `gpumem export` show all numbers
    /// since the start.
    #[arg(long)]
    live: bool,
    /// Keep only the blocks that were live at the peak of each device and at the end. A killed program loses its last second.
    #[arg(long, conflicts_with_all = ["max_size", "live"])]
    pub(super) only_peak: bool,
    /// Record PyTorch's tensors (2.1 or newer) as well. They are in the memory that its allocator gets from the
    /// driver.
    #[arg(long)]
    pub(super) torch: bool,
    /// Record for each PyTorch tensor (2.10 or newer) the module that allocated it, and whether it is a weight, a gradient, or something
    /// else. Implies --torch.
    #[arg(long)]
    pub(super) modules: bool,
    /// The number of latest events of each device that PyTorch keeps, three for a tensor. Each takes up to 1 KB of the program's
    /// memory.
    #[arg(long, value_name = "COUNT", default_value_t = 500_000, requires = "tensors",
        value_parser = clap::value_parser!(u64).range(1_000..))]
    torch_events: u64,
}

impl RecordingOptions {
    /// Returns whether PyTorch's tensors are recorded.
    pub(super) fn has_torch(&self) -> bool {
        self.torch || self.modules
    }

    /// Returns the options for the library in the program.
    pub(super) fn options(&self, cards: Option<options::Cards>) -> Options {
        let keep = match self.max_size.or_else(|| self.live.then_some(LIVE)) {
            _ if self.only_peak => Keep::Peaks,
            Some(size) => Keep::Latest(size.get()),
            None => Keep::All,
        };
        let torch = self.has_torch().then_some(Torch { events: self.torch_events, modules: self.modules });
        Options { backtrace: self.stacks.backtrace().to_owned(), keep, torch, cards }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Stacks {
    /// Records no stacks.
    None,
    /// Records the functions of the program and of its libraries.
    Native,
    /// Records the same, and Python lines (3.11 to 3.15).
    Python,
}

impl Stacks {
    /// Returns the value of the library's setting `GPUMEM_BACKTRACE`.
    const fn backtrace(self) -> &'static str {
        match self {
            Self::None => "0",
            Self::Native => "auto",
            Self::Python => "python",
        }
    }
}

/// Parses the size of a recording, which needs room for the live blocks.
fn real_size(text: &str) -> Result<Bytes, String> {
    let size = size(text)?;
    if size < Bytes::mib(2) { Err("blocks up to 2 MiB are always real".to_owned()) } else { Ok(size) }
}

fn recording_size(text: &str) -> Result<Bytes, String> {
    let size = size(text)?;
    if size < Bytes::kib(64) { Err("it is less than 64 KiB".to_owned()) } else { Ok(size) }
}
