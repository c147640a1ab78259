//! The file of a recording.

use std::{
    fs::{File, TryLockError},
    io,
    path::Path,
};

/// Creates the file, or empties it. The lock lasts until the process ends: two processes that write to one file would destroy both
/// recordings. A pipe or a device is refused, because opening or writing it can block the program.
pub(super) fn create(path: &Path) -> io::Result<File> {
    if path.metadata().is_ok_and(|known| !known.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        let why = "another process records to it; with %p in the name, each process has a file of its own";
        return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
    }
    file.set_len(0)?;
    Ok(file)
}
