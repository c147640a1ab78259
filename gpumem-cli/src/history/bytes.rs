//! The bytes of a recording.

use std::{
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
};

use crate::progress::Progress;

/// The bytes of a recording. It shows how much was read.
#[derive(Debug)]
pub(super) struct RecordingBytes {
    from: BufReader<File>,
    progress: Progress,
}

impl RecordingBytes {
    pub(super) fn new(file: File, progress: Progress) -> Self {
        Self { from: BufReader::with_capacity(1 << 16, file), progress }
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
