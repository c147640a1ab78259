//! Opens files that users name.

use std::{
    fs::{File, OpenOptions},
    io,
    path::Path,
};

/// `O_NONBLOCK` on all platforms that CUDA has on Linux.
#[cfg(target_os = "linux")]
const NONBLOCK: i32 = 0o4000;

/// Opens a regular file. A pipe may wait for a writer, and a device may have no end. The file is checked after it was opened, because
/// another process may have put another one in its place.
///
/// # Errors
/// Returns an error if the file cannot be opened, or if it is not a regular file.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, NONBLOCK);
    // Some devices fail when they are opened. The kind of the file is the cause that helps.
    let opened = options.open(path);
    let known = opened.as_ref().map_or_else(|_| path.metadata(), File::metadata);
    match known {
        Ok(known) if known.is_dir() => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a folder")),
        Ok(known) if !known.is_file() => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")),
        _ => opened,
    }
}

/// Opens a regular file for reading, like [`open`], if there is something in it. A file of the kernel has no size, and reading it may wait for
/// ever, such as `/proc/kmsg`.
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
