//! A file beside a recording, whose lock excludes other processes of the command. Not the lock of the recording itself: children that
//! outlive their process have that one.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// It is removed when it is dropped. The system releases the lock of a killed process.
///
/// On a file system without locks, no process is excluded.
#[derive(Debug)]
pub(super) struct LockFile {
    path: PathBuf,
    _open: File,
}

impl LockFile {
    /// `None` if another process has it.
    pub(super) fn try_new(recording: &Path, purpose: &str) -> io::Result<Option<Self>> {
        Self::of(recording, purpose, |file| !matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
    }

    /// Waits while another process has it.
    pub(super) fn wait(recording: &Path, purpose: &str) -> io::Result<Self> {
        let wait = |file: &File| {
            while file.lock().is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {}
            true
        };
        let locked = Self::of(recording, purpose, wait)?;
        locked.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// For `train.capture`, the file is `.train.capture.PURPOSE`. `lock` returns whether others are excluded.
    fn of(recording: &Path, purpose: &str, lock: impl Fn(&File) -> bool) -> io::Result<Option<Self>> {
        let mut name = OsString::from(".");
        name.push(recording.file_name().unwrap_or_default());
        name.push(".");
        name.push(purpose);
        let path = recording.with_file_name(name);
        let identity = |known: fs::Metadata| (known.dev(), known.ino());
        loop {
            let open = File::options().write(true).create(true).truncate(false).open(&path)?;
            if !lock(&open) {
                return Ok(None);
            }
            let own = identity(open.metadata()?);
            if path.metadata().is_ok_and(|there| identity(there) == own) {
                return Ok(Some(Self { path, _open: open }));
            }
            // The process that had it has removed it meanwhile.
        }
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::{env, process, thread};

    use super::*;

    #[test]
    fn one_at_a_time_has_it() {
        let recording = env::temp_dir().join(format!("gpumem-lock-file-{}.capture", process::id()));
        let first = LockFile::try_new(&recording, "lock").unwrap().expect("nobody has it");
        assert!(LockFile::try_new(&recording, "lock").unwrap().is_none());
        // Another purpose is another file.
        let other = LockFile::wait(&recording, "completing").unwrap();
        let path = first.path.clone();
        thread::scope(|threads| {
            let waits = threads.spawn(|| LockFile::wait(&recording, "lock").map(drop));
            assert!(!waits.is_finished());
            drop(first);
            waits.join().unwrap().unwrap();
        });
        drop(other);
        assert!(!path.exists() && LockFile::try_new(&recording, "lock").unwrap().is_some());
    }
}
