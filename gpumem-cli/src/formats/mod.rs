//! Recordings in the formats of other tools, one in each file.

mod dhat;
mod folded;
pub(crate) mod frames;
mod jsonl;
#[cfg(feature = "parquet")]
pub(crate) mod parquet;
mod perfetto;
mod pickle;
mod pprof;
mod rmm;
mod speedscope;
mod torch;

pub(crate) use self::frames::{Numbers, stack};

use std::io::{self, Write};

use clap::ValueEnum;

use crate::history::{Change, History, Moment};

/// A format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(clippy::doc_markdown, reason = "the help of the command shows it as it is")]
pub(crate) enum Format {
    /// Stacks of what was live at a moment, one a line, for flamegraph.pl and inferno
    Folded,
    /// Each event as a JSON object on its own line
    Json,
    /// Stacks, live and in all, for `go tool pprof`
    Pprof,
    /// Stacks of what was live at a moment, for speedscope.app
    Speedscope,
    /// Places with their totals, lifetimes and peaks, for Valgrind's dh_view.html
    Dhat,
    /// Memory over time by kind, PyTorch's tensors, and scopes, for ui.perfetto.dev
    Perfetto,
    /// A snapshot for torch.cuda._memory_viz and pytorch.org/memory_viz
    Torch,
    /// The log of RMM's logging adaptor
    RmmCsv,
    /// Tables of events, of blocks and of PyTorch's tensors, in a folder, for DuckDB, DataFusion and Spark
    Parquet,
}

/// Formats with a line or a row for each event repeat names: for each byte of a recording, these may have so many. Those of usual
/// recordings have less than a tenth.
const MOST_TEXTS: u64 = 128;

/// Refuses to write names again and again that are long and many. `length` is that of an origin.
fn check_texts(history: &History, length: impl Fn(u32) -> usize) -> io::Result<()> {
    let length_of = |change: &Change| length(history.blocks[change.block as usize].origin) as u64;
    let texts: u64 = history.changes.iter().map(length_of).sum();
    let most = history.bytes.max(2 << 20) * MOST_TEXTS;
    if texts <= most {
        return Ok(());
    }
    let why = format!(
        "the names of places, repeated for each event, have {texts} bytes (at most {most}): write another format"
    );
    Err(io::Error::other(why))
}

impl Format {
    /// It is no text.
    pub(crate) const fn is_binary(self) -> bool {
        matches!(self, Self::Pprof | Self::Perfetto | Self::Torch)
    }

    /// It shows one moment.
    pub(crate) const fn has_moment(self) -> bool {
        matches!(self, Self::Folded | Self::Pprof | Self::Speedscope)
    }

    /// It has totals, or each event of all blocks.
    pub(crate) const fn has_all_events(self) -> bool {
        matches!(self, Self::Dhat | Self::RmmCsv)
    }

    /// As the user chooses it.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Writes a recording. Formats of stacks show what was live at the moment.
    pub(crate) fn write(self, history: &History, moment: Moment, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Self::Folded => folded::write(history, moment, out),
            Self::Json => jsonl::write(history, out),
            Self::Pprof => pprof::write(history, moment, out),
            Self::Speedscope => speedscope::write(history, moment, out),
            Self::Dhat => dhat::write(history, out),
            Self::Perfetto => perfetto::write(history, out),
            Self::Torch => torch::write(history, out),
            Self::RmmCsv => rmm::write(history, out),
            Self::Parquet => Err(io::Error::other("it is written to a folder")),
        }
    }
}
