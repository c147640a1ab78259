//! Opens files that users name.

use std::{
    fs::{File, OpenOptions},
    io,
    path::Path,
};

/// `O_NONBLOCK` on all Linux platforms that CUDA supports.
#[cfg(target_os = "linux")]
const NONBLOCK: i32 = 0o4000;

/// Opens a regular file. A pipe may wait for a writer, and a device may have no end. The file is checked after it is opened, because
/// another process may have replaced it.
///
/// # Errors
/// Returns an error if the file cannot be opened, or if it is not a regular file.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, NONBLOCK);
    // Opening some devices fails. The kind of the file is then the more helpful error.
    let opened = options.open(path);
    let known = opened.as_ref().map_or_else(|_| path.metadata(), File::metadata);
    match known {
        Ok(known) if known.is_dir() => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a folder")),
        Ok(known) if !known.is_file() => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
        _ => opened,
    }
}

/// Opens a regular file for reading, like [`open`], if it is not empty. Kernel files such as `/proc/kmsg` have no size, and reading them
/// may block forever.
///
/// # Errors
/// Returns the errors of [`open`], and one of the kind [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if the file has no size.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let file = open(path, File::options().read(true))?;
    match file.metadata()?.len() {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it is empty")),
        _ => Ok(file),
    }
}
