//! One live allocation.

use std::time::Duration;

use crate::model::{Bytes, MemKind};

/// An allocation that is not freed yet, and where it was made.
///
/// Example: see `gpumem::GpuMemTrace::live`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveBlock {
    /// The unique id of the block among the live blocks of the process: its address, or a value above all addresses for arrays,
    /// handles of `cuMemCreate` and registered memory.
    pub id: u64,
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The requested size.
    pub bytes: Bytes,
    /// The kind of memory.
    pub kind: MemKind,
    /// The path of scopes in which it was allocated, the outermost first. Empty outside all scopes.
    pub path: Vec<String>,
    /// The place where the innermost scope was opened, such as `src/train.rs:12`.
    pub scope_place: Option<String>,
    /// The line of the program that allocated the block, such as `src/train.rs:15`. `None` if its stack was not recorded: blocks
    /// below 1 MiB, unless `GPUMEM_BACKTRACE=1` is set.
    pub line: Option<String>,
    /// The line that called the function of `line`, because programs often allocate through their own helper functions.
    pub caller: Option<String>,
    /// The library whose code allocated the block (cuBLAS, PyTorch…): the innermost one on the stack that is not the driver's.
    /// `None` if the program allocated the block, if `line` is more exact (a Python line, or an operation of PyTorch's backward
    /// pass), or if the stack is not known.
    pub library: Option<String>,
    /// The functions that allocated the block, the innermost first, with their lines. Empty if `line` is not known.
    pub backtrace: Vec<String>,
    /// The owner thread of the block: the thread that allocated it, or the thread in whose scope that thread was. These ids are
    /// gpumem's own and start at 1.
    pub thread: u32,
    /// The time of its allocation since the first trace, to a tenth of a second. Stream-ordered memory has the time of an earlier
    /// event, because the clock is not read for it.
    pub time: Duration,
}

/// Returns a text such as `1 block` or `2 blocks`.
pub fn counted(count: impl Into<i128>, one: &str, many: &str) -> String {
    let count = count.into();
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Returns the reason why numbers may be wrong, as text.
pub(crate) fn missing_in_words(untracked: u64, lost: u64) -> String {
    let untracked = counted(untracked, "free of an unknown block", "frees of unknown blocks");
    format!("{untracked}, {}: some numbers may be wrong", counted(lost, "lost event", "lost events"))
}

/// Returns the place of an allocation as text: the line, or else the scope.
pub fn place_in_words(line: Option<&str>, scope_place: Option<&str>) -> Option<String> {
    line.map(str::to_owned).or_else(|| scope_place.map(|place| format!("scope of {place}")))
}

impl LiveBlock {
    /// Returns the place of the block's allocation: the line, or else the place where its scope was opened.
    pub fn place(&self) -> Option<&str> {
        self.line.as_deref().or(self.scope_place.as_deref())
    }
}
