//! Files that other processes may replace at any time.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// Opens a regular file. A pipe that somebody has put in its place is not waited for.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
}

/// Opens a regular file for reading, like [`open`].
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    open(path, File::options().read(true))
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use super::*;

    #[test]
    fn a_pipe_is_not_waited_for() {
        let path = env::temp_dir().join(format!("gpumem-files-{}", process::id()));
        assert!(process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(open_to_read(&path).unwrap_err().to_string(), "it is no regular file");
        assert!(open(&path, File::options().append(true)).is_err());
        fs::remove_file(path).unwrap();
    }
}
