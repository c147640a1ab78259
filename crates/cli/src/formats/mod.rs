//! Writes recordings in the formats of other tools, and as a picture, one module for each.

mod folded;
pub(crate) mod frames;
mod jsonl;
#[cfg(feature = "parquet")]
pub(crate) mod parquet;
mod perfetto;
mod pickle;
mod pprof;
mod svg;
mod texts;
mod torch;

pub(crate) use self::frames::{Indices, stack};

use std::io::{self, Write};

use clap::ValueEnum;

use crate::history::{History, Moment};

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(clippy::doc_markdown, reason = "the help of the command shows it as it is")]
pub(crate) enum Format {
    /// Stacks of the blocks that were live at a moment, one per line, for flamegraph.pl, inferno and speedscope.app
    Folded,
    /// Each event as a JSON object on its own line
    Json,
    /// Stacks with their live and total memory, for `go tool pprof`
    Pprof,
    /// Memory over time by kind, PyTorch's tensors, and scopes, for ui.perfetto.dev
    Perfetto,
    /// A snapshot for torch.cuda._memory_viz and pytorch.org/memory_viz
    Torch,
    /// Tables of events, of blocks and of PyTorch's tensors, in a folder, for DuckDB, DataFusion and Spark
    Parquet,
    /// A picture of the memory over time, for notebooks, READMEs and bug reports
    Svg,
}

impl Format {
    /// Returns whether files of this format are binary.
    pub(crate) const fn is_binary(self) -> bool {
        matches!(self, Self::Pprof | Self::Perfetto | Self::Torch)
    }

    /// Returns whether this format contains the stacks of one moment.
    pub(crate) const fn has_stacks(self) -> bool {
        matches!(self, Self::Folded | Self::Pprof)
    }

    /// Returns the name that selects this format on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Writes a recording. Formats of stacks show the live memory at `moment`, optionally with folded stacks.
    pub(crate) fn write(
        self,
        history: &History,
        moment: Moment,
        is_folded: bool,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        match self {
            Self::Folded => folded::write(history, moment, is_folded, out),
            Self::Json => jsonl::write(history, out),
            Self::Pprof => pprof::write(history, moment, is_folded, out),
            Self::Perfetto => perfetto::write(history, out),
            Self::Torch => torch::write(history, out),
            Self::Svg => svg::write(history, out),
            Self::Parquet => Err(io::Error::other("it is written to a folder")),
        }
    }
}
