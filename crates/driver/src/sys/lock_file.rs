//! A file whose lock excludes gpumem's other processes.

use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use super::descriptor;

/// The maximum number of bytes of names that are read.
const MOST_NOTED: u64 = 16 << 20;

/// The interval at which a waiting thread tries again.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A lock file. Dropping this removes the file. If the process is killed, the system releases the lock.
///
/// Any user who may write to the folder can put a file there and hold its lock. Therefore no thread waits forever, links are not followed,
/// and only [`note`] writes to the file. On a file system without locks, no process is excluded.
#[derive(Debug)]
pub struct LockFile {
    path: PathBuf,
    open: File,
}

/// Returns the path of the lock file of a recording: `.train.capture.PURPOSE` for `train.capture`. The recording itself cannot serve as the
/// lock file, because child processes that outlive their parent hold its lock.
pub fn lock_file(recording: &Path, purpose: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(recording.file_name().unwrap_or_default());
    name.push(".");
    name.push(purpose);
    recording.with_file_name(name)
}

/// Adds the name of a file to the lock file of another process, which reads it with [`LockFile::noted`].
///
/// # Errors
/// Returns an error if the lock file does not exist or cannot be written.
pub fn note(lock: &Path, file: &Path) -> io::Result<()> {
    let mut open = descriptor::open_lock_to_append(lock)?;
    open.write_all(&[file.as_os_str().as_encoded_bytes(), b"\0"].concat())
}

impl LockFile {
    /// Returns the file names that other processes have added.
    pub fn noted(&self) -> Vec<Vec<u8>> {
        let (mut open, mut names) = (&self.open, Vec::new());
        // A process that removes names can hide only its own files.
        _ = open.rewind().and_then(|()| open.take(MOST_NOTED).read_to_end(&mut names));
        names.split(|byte| *byte == 0).filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
    }

    /// Tries to take the lock. Returns `None` if another process holds it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created, or is not a regular file.
    pub fn try_new(path: &Path) -> io::Result<Option<Self>> {
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("its lock file `{}` cannot be used: {error}", path.display()))
        };
        loop {
            let open = descriptor::open_lock(path).map_err(failed)?;
            if matches!(open.try_lock(), Err(TryLockError::WouldBlock)) {
                return Ok(None);
            }
            if descriptor::identity(&open) == descriptor::identity_at(path) {
                return Ok(Some(Self { path: path.to_owned(), open }));
            }
            // The process that held the lock has removed the file.
        }
    }

    /// Takes the lock. Waits at most `patience` while another process holds it. `waits` is called after a quarter of that time.
    ///
    /// # Errors
    /// Returns the same errors as [`try_new`](Self::try_new), and an error if another process holds the lock the whole time.
    pub fn wait(path: &Path, patience: Duration, waits: impl FnOnce()) -> io::Result<Self> {
        let started = Instant::now();
        let mut waits = Some(waits);
        loop {
            if let Some(lock) = Self::try_new(path)? {
                return Ok(lock);
            }
            if started.elapsed() >= patience {
                let why = format!(
                    "another process has locked `{}` for {} s; remove that file if no gpumem runs",
                    path.display(),
                    patience.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
            }
            if started.elapsed() >= patience / 4
                && let Some(waits) = waits.take()
            {
                waits();
            }
            sleep(LOOK_EVERY);
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
    use std::{process, thread};

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn only_one_process_has_the_lock() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("one");
        let first = LockFile::try_new(&path).unwrap().expect("nobody has it");
        assert!(LockFile::try_new(&path).unwrap().is_none());
        thread::scope(|threads| {
            let waits = threads.spawn(|| LockFile::wait(&path, Duration::from_secs(60), || {}).map(drop));
            assert!(!waits.is_finished());
            drop(first);
            waits.join().unwrap().unwrap();
        });
        assert!(!path.exists() && LockFile::try_new(&path).unwrap().is_some());
    }

    #[test]
    fn names_of_several_processes_are_found() {
        let folder = tempdir().unwrap();
        let path = lock_file(&folder.path().join("a.capture"), "lock");
        assert!(note(&path, Path::new("/x")).is_err() && !path.exists(), "nobody has it");
        let lock = LockFile::try_new(&path).unwrap().expect("nobody has it");
        for name in ["/a b", "/c"] {
            note(&path, Path::new(name)).unwrap();
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(lock.noted(), [b"/a b".to_vec(), b"/c".to_vec()]);
    }

    /// Another user has put the file there to block others.
    #[test]
    fn a_wait_for_the_lock_ends() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("planted");
        let planted = File::create(&path).unwrap();
        planted.lock().unwrap();
        let error = LockFile::wait(&path, Duration::from_millis(50), || {}).unwrap_err().to_string();
        assert!(error.contains("another process has locked `") && error.contains("remove that file"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_not_followed_and_a_pipe_is_not_waited_for() {
        let folder = tempdir().unwrap();
        let [path, target] = ["link", "target"].map(|name| folder.path().join(name));
        fs::write(&target, "text of the user").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        let error = LockFile::try_new(&path).unwrap_err().to_string();
        assert!(error.contains("its lock file `") && error.contains("/link` cannot be used"), "{error}");
        assert_eq!(fs::read_to_string(&target).unwrap(), "text of the user");
        fs::remove_file(&path).unwrap();
        assert!(process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert!(LockFile::try_new(&path).is_err());
    }
}
