//! One live allocation.

use std::time::Duration;

use crate::model::{Bytes, MemKind};

/// An allocation that is still there, and where it comes from.
///
/// Example: see `gpumem::GpuMemTrace::live`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LiveBlock {
    /// Its own among the live blocks of the process: the address, and for arrays, handles of `cuMemCreate` and registered
    /// memory a number above all addresses.
    pub key: u64,
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// The device is a simulated one.
    pub simulated: bool,
    /// How much was asked for.
    pub bytes: Bytes,
    /// What sort of memory it is.
    pub kind: MemKind,
    /// The path of scopes that it was allocated in, the outermost first. Empty: outside of all scopes.
    pub path: Vec<String>,
    /// Where the innermost of them was opened, such as `src/train.rs:12`.
    pub scope_place: Option<String>,
    /// The line that asked for it, such as `src/train.rs:15`. `None` where its stack was not taken down: blocks below 1 MiB,
    /// unless `GPUMEM_BACKTRACE=1` is set.
    pub line: Option<String>,
    /// The line that called that one's function: programs allocate through functions of their own.
    pub caller: Option<String>,
    /// The library that asked for it by itself (cuBLAS, cuDNN, NCCL…). `None`: the program, or nobody knows.
    pub library: Option<String>,
    /// The functions that it was asked for in, the innermost first, with their lines. Empty where `line` is not known.
    pub backtrace: Vec<String>,
    /// The thread that allocated it, or on whose behalf that was, by a number of this crate.
    pub thread: u32,
    /// When, since the first trace. To a tenth of a second; stream-ordered memory may be older than this says by the
    /// time since the event before it.
    pub time: Duration,
}

/// `1 block`, `2 blocks`
pub fn counted(count: impl Into<i128>, one: &str, many: &str) -> String {
    let count = count.into();
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Where something was asked for, in words: the line, else the scope.
pub fn place_in_words(line: Option<&str>, scope_place: Option<&str>) -> Option<String> {
    line.map(str::to_owned).or_else(|| scope_place.map(|place| format!("scope of {place}")))
}

impl LiveBlock {
    /// Where it was asked for: the line, else where its scope was opened.
    ///
    /// Example: see `gpumem::GpuMemTrace::live`.
    pub fn place(&self) -> Option<&str> {
        self.line.as_deref().or(self.scope_place.as_deref())
    }
}
