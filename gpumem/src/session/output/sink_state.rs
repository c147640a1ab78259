//! Where the output of a session goes.

use std::{
    fs::File,
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
};

use crate::export::Sink;

/// Where the output of a session goes.
#[derive(Debug, Default)]
pub(in crate::session) struct SinkState {
    /// The sink that the program set. `None`: that of `GPUMEM_REPORT`.
    pub(super) set: RwLock<Option<Sink>>,
    /// The file that was written last.
    pub(super) file: Mutex<Option<(PathBuf, Arc<File>)>>,
}
