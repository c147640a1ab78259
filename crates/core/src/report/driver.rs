//! The memory that the driver takes for itself, by cause.

use std::fmt;

use crate::model::{Bytes, Label, MemKind};

/// Memory that the driver took for itself for one cause.
///
/// `Display` is its name, such as `local memory of deep (x.cu:43), 16384 B for each thread`.
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

impl DriverMemory {
    /// Writes the cause and its line, such as `local memory of deep (x.cu:43)`.
    fn write_cause(&self, f: &mut impl fmt::Write) -> fmt::Result {
        match self.kind {
            MemKind::Device => f.write_str("rounding of allocations to pages of 2 MiB")?,
            MemKind::NotKnown => f.write_str("taken by the driver, cause not known")?,
            MemKind::Earlier => f.write_str("taken before the first trace")?,
            MemKind::SharedCalls => f.write_str("calls of several threads at once")?,
            kind => f.write_str(kind.name())?,
        }
        match (&self.name, self.kind) {
            (Some(name), MemKind::LocalMemory | MemKind::Modules) => write!(f, " of {name}")?,
            (Some(name), MemKind::ExecutableGraphs) => write!(f, " {name}")?,
            (Some(name), _) => write!(f, ": {name}")?,
            (None, _) => {}
        }
        if let Some(line) = &self.line {
            write!(f, " ({line})")?;
        }
        Ok(())
    }

    /// Returns the cause and its line, such as `local memory of deep (x.cu:43)`.
    pub(crate) fn cause(&self) -> String {
        let mut cause = String::new();
        // Writing to memory does not fail.
        let _ = self.write_cause(&mut cause);
        cause
    }
}

impl fmt::Display for DriverMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_cause(f)?;
        self.bytes_per_thread.map_or(Ok(()), |bytes| write!(f, ", {bytes} B for each thread"))
    }
}
