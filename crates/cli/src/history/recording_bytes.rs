//! The bytes of a recording.

use std::{
    fmt::Debug,
    io::{self, Read, Seek, SeekFrom},
};

use crate::progress::Progress;

/// A file, or bytes in memory.
pub(super) trait ReadSeek: Read + Seek + Debug {}

impl<T: Read + Seek + Debug> ReadSeek for T {}

/// The bytes of a recording. Reading them shows the progress.
#[derive(Debug)]
pub(super) struct RecordingBytes {
    from: Box<dyn ReadSeek>,
    progress: Progress,
}

impl RecordingBytes {
    pub(super) fn new(from: impl ReadSeek + 'static, progress: Progress) -> Self {
        Self { from: Box::new(from), progress }
    }
}

impl Read for RecordingBytes {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(to)?;
        self.progress.advance(read as u64);
        Ok(read)
    }
}

impl Seek for RecordingBytes {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.from.seek(to)
    }
}
