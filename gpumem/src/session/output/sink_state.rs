//! The target of the output of a session.

use std::{
    fs::File,
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
    thread::ThreadId,
};

use crate::export::Sink;

/// The target of the output of a session.
#[derive(Debug, Default)]
pub(in crate::session) struct SinkState {
    /// The sink that the program set. `None` for the sink in `GPUMEM_REPORT`.
    pub(super) set: RwLock<Option<Sink>>,
    /// The file of the last write.
    pub(super) file: Mutex<Option<(PathBuf, Arc<File>)>>,
    /// The line of a trace, if nothing was written after it.
    pub(super) last: Mutex<Option<LastLine>>,
}

/// The last line of a trace, and the number of equal lines after it.
#[derive(Debug)]
pub(super) struct LastLine {
    pub(super) text: String,
    /// The thread that wrote it. Tests run on separate threads, with separate outputs.
    pub(super) thread: ThreadId,
    pub(super) more: u64,
}
