//! The memory that the driver takes for itself, by cause.

use std::fmt;

use crate::model::{Bytes, Label, MemKind};

/// Memory that the driver took for itself for one cause.
///
/// `Display` is its name, such as `local memory of deep (x.cu:43), 16 KiB per thread`.
///
/// Example: see `gpumem::GpuMemTrace::driver_memory`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverMemory {
    /// The kind of the cause; see [`MemKind::is_taken_by_driver`].
    pub kind: MemKind,
    /// The kernel, the file of the module, or the pool, if it is known.
    pub name: Option<String>,
    /// The bytes of local memory for each thread, for [`MemKind::LocalMemory`].
    pub bytes_per_thread: Option<u64>,
    /// The line of the program whose call was the cause, if stacks are recorded.
    pub line: Option<String>,
    /// The scopes in which the call was made, the outermost first.
    pub path: Vec<String>,
    /// The bytes that the driver took and has not returned.
    pub bytes: Bytes,
    /// The number of executable graphs, or of other growths.
    pub count: u64,
}

impl DriverMemory {
    /// Creates a row from the label of its block.
    #[doc(hidden)]
    pub fn new(kind: MemKind, label: Option<&Label>, line: Option<String>, path: Vec<String>, bytes: Bytes) -> Self {
        let name = label.map(|label| label.name.clone());
        let bytes_per_thread = label.and_then(|label| label.shape.first()).map(|bytes| *bytes as u64);
        Self { kind, name, bytes_per_thread, line, path, bytes, count: 1 }
    }

    /// Returns whether both have the same cause.
    #[doc(hidden)]
    pub fn is_alike(&self, other: &Self) -> bool {
        (self.kind, &self.name, &self.line, &self.path) == (other.kind, &other.name, &other.line, &other.path)
    }

    /// Returns the rounding of allocations to the driver's pages.
    #[doc(hidden)]
    pub fn rounding(bytes: Bytes) -> Self {
        let (name, line, path) = (None, None, Vec::new());
        Self { kind: MemKind::Device, name, bytes_per_thread: None, line, path, bytes, count: 0 }
    }
}

/// Returns a cause and its line, such as `local memory of deep (x.cu:43)`.
#[doc(hidden)]
#[must_use]
pub fn cause_in_words(kind: MemKind, name: Option<&str>, line: Option<&str>) -> String {
    let name = name.map(|name| match kind {
        MemKind::LocalMemory | MemKind::Modules => format!(" of {name}"),
        MemKind::ExecutableGraphs => format!(" {name}"),
        _ => format!(" ({name})"),
    });
    // The line that created a context or read a pool is not the cause.
    let line = line.filter(|_| !matches!(kind, MemKind::Context | MemKind::PoolCache | MemKind::NotKnown));
    let line = line.map(|line| format!(" ({line})")).unwrap_or_default();
    format!("{kind}{}{line}", name.unwrap_or_default())
}

/// The name of what pages contain beside the blocks that are in them.
#[doc(hidden)]
pub const ROUNDING: &str = "rest of 2 MiB pages";

impl DriverMemory {
    /// Returns the cause and its line, such as `local memory of deep (x.cu:43)`.
    pub(crate) fn cause(&self) -> String {
        match self.kind {
            MemKind::Device => ROUNDING.to_owned(),
            MemKind::NotKnown => "taken by the driver, cause not known".to_owned(),
            MemKind::Earlier => "taken by the driver before the first trace".to_owned(),
            kind => cause_in_words(kind, self.name.as_deref(), self.line.as_deref()),
        }
    }
}

impl fmt::Display for DriverMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause())?;
        self.bytes_per_thread.map_or(Ok(()), |bytes| write!(f, ", {} per thread", Bytes::new(bytes)))
    }
}
