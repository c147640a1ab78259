//! The file of a recording.

use std::{
    fs::{File, TryLockError},
    io::{self, Seek, SeekFrom, Write},
    mem::forget,
    path::{Path, PathBuf},
};

use gpumem_recording::is_recording;

use super::descriptor;

/// A file to which only this process writes, even if the program closes descriptors that are not its own.
///
/// Daemons and programs that start others close all descriptors from 3 on. The number of this file is then free, and the program's next
/// file or connection may get it. Therefore each write first checks which file the number refers to, and opens the recording again if it
/// was closed.
#[derive(Debug)]
pub struct RecordingFile {
    /// The file. `None` if the program has closed the descriptor and the file could not be opened again.
    file: Option<File>,
    identity: Option<(u64, u64)>,
    /// The path of the file, and the path to which it will be moved.
    paths: [PathBuf; 2],
    written: u64,
}

impl RecordingFile {
    /// Creates the file, or empties it. It will be moved to `place`, if that is another path.
    ///
    /// The file stays locked until the process ends, because two processes that write to one file would destroy both recordings. A pipe or
    /// a device is rejected, because opening it or writing to it can block the program.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created, is not a regular file, contains something else than a recording, or is used by
    /// another process for its recording.
    pub fn create(path: &Path, place: &Path) -> io::Result<Self> {
        let file = descriptor::open(path, true)?;
        lock(&file)?;
        if file.metadata()?.len() > 0 && !is_recording(File::open(path)?)? {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "it exists and is not a recording"));
        }
        file.set_len(0)?;
        descriptor::grant_owner_access(&file);
        let file = descriptor::with_high_number(file);
        let identity = descriptor::identity(&file);
        // The program may change its working directory.
        let paths = [std::path::absolute(path)?, std::path::absolute(place)?];
        Ok(Self { file: Some(file), identity, paths, written: 0 })
    }

    /// Returns the file. Opens it again if the program has closed it.
    fn own(&mut self) -> io::Result<&mut File> {
        let identity = self.identity;
        let is_own = |file: &File| descriptor::identity(file) == identity;
        if self.file.as_ref().is_none_or(|file| !is_own(file)) {
            // The number belongs to the program now and must not be closed.
            forget(self.file.take());
            let opened = |path: &PathBuf| descriptor::open(path, false).ok().filter(is_own);
            let Some(mut file) = self.paths.iter().find_map(opened) else {
                let why = "the program has closed its descriptor, and it is not where it was";
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            };
            lock(&file)?;
            file.seek(SeekFrom::Start(self.written))?;
            self.file = Some(descriptor::with_high_number(file));
        }
        self.file.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Write for RecordingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Above the limit, the kernel would kill the program with SIGXFSZ.
        if let Some(limit) = descriptor::file_size_limit().filter(|limit| self.written + bytes.len() as u64 > *limit) {
            let why = format!("files of this process may have {limit} bytes at most (ulimit -f)");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
        }
        let written = self.written;
        let file = self.own()?;
        // Data after a gap is not a valid recording.
        let known = file.metadata()?;
        if known.len() < written {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "another process has made it shorter"));
        }
        let count = file.write(bytes)?;
        self.written += count as u64;
        // A reader that has the file open still gets these last events.
        if descriptor::is_removed(&known) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it was removed while the program ran"));
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for RecordingFile {
    fn drop(&mut self) {
        if self.file.as_ref().is_some_and(|file| descriptor::identity(file) != self.identity) {
            forget(self.file.take());
        }
    }
}

fn lock(file: &File) -> io::Result<()> {
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        let why = "another process records to it; with %p in the name, each process has its own file";
        return Err(io::Error::new(io::ErrorKind::WouldBlock, why));
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{fs, os::fd::AsRawFd, process};

    use tempfile::tempdir;

    use super::*;

    #[test]
    fn what_gets_the_number_of_a_closed_file_is_left_alone() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("closed");
        let mut recording = RecordingFile::create(&path, &path).unwrap();
        recording.write_all(b"one ").unwrap();
        // The program closes the number, and its next file gets it.
        let number = recording.file.as_ref().unwrap().as_raw_fd();
        let other = folder.path().join("other");
        let kept = descriptor::replace(number, &File::create(&other).unwrap());
        recording.write_all(b"two ").unwrap();
        recording.write_all(b"three").unwrap();
        drop(recording);
        assert_eq!(descriptor::identity(&kept), descriptor::identity(&File::open(&other).unwrap()), "it is still open");
        assert_eq!((fs::read(&path).unwrap(), fs::read(&other).unwrap()), (b"one two three".to_vec(), Vec::new()));
        drop(kept);

        // The file was moved, so nothing can be written.
        fs::remove_file(&path).unwrap();
        let mut recording = RecordingFile::create(&path, &path).unwrap();
        let number = recording.file.as_ref().unwrap().as_raw_fd();
        let kept = descriptor::replace(number, &File::create(&other).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(recording.write_all(b"four").unwrap_err().to_string().contains("it is not where it was"));
        drop((recording, kept));
    }

    /// A clean-up job empties files that have become old.
    #[test]
    fn a_recording_that_was_emptied_ends() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("emptied");
        let mut recording = RecordingFile::create(&path, &path).unwrap();
        recording.write_all(b"one ").unwrap();
        File::options().write(true).open(&path).unwrap().set_len(2).unwrap();
        assert!(recording.write_all(b"two").unwrap_err().to_string().contains("made it shorter"));
        assert_eq!(fs::read(&path).unwrap(), b"on");
    }

    #[test]
    fn a_file_that_is_no_recording_is_left_alone() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        fs::write(&path, "text of the user").unwrap();
        let error = RecordingFile::create(&path, &path).unwrap_err();
        assert_eq!(error.to_string(), "it exists and is not a recording");
        assert_eq!(fs::read_to_string(&path).unwrap(), "text of the user");
        fs::write(&path, "\x09gpumem\n").unwrap();
        assert!(RecordingFile::create(&path, &path).is_err(), "the first byte differs");
        fs::write(&path, b"\x89gpumem\nolder").unwrap();
        drop(RecordingFile::create(&path, &path).unwrap());
    }

    #[test]
    fn a_recording_that_was_removed_ends() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("removed");
        let mut recording = RecordingFile::create(&path, &path).unwrap();
        recording.write_all(b"one ").unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(recording.write_all(b"two").unwrap_err().to_string(), "it was removed while the program ran");
    }

    /// The file was replaced with a pipe, and opening it would block until there is a reader.
    #[test]
    fn a_pipe_in_the_place_of_the_file_is_not_waited_for() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("pipe");
        assert!(process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = descriptor::open(&path, true).unwrap_err();
        assert_eq!(error.to_string(), "it is not a regular file");
    }
}
