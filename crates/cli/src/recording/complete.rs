//! Completes a recording whose process has ended.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem_driver::{
    lock_file::{LockFile, lock_file},
    ring_memory::SharedMemory,
};
use gpumem_recording::{End, has_ring, recover};

use super::{content::Content, parts, symbols, torch};
use crate::{failure::Failure, files, terminal};

/// Completing a large recording takes some seconds. A process that holds the lock for longer hangs, or blocks others on
/// purpose.
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the path of a marker file next to a recording. If the file exists, no `gpumem run` will complete the
/// recording, so the next report does.
pub(crate) fn unattended_marker(recording: &Path) -> PathBuf {
    let mut marker = recording.as_os_str().to_owned();
    marker.push(".attached");
    marker.into()
}

/// Completes a recording before it is reported, if something is missing in its file. If that fails, an error is printed
/// on stderr, and the recording stays as readable as before. Returns true if the process is still recording.
pub(crate) fn complete_for_report(recording: &Path) -> bool {
    if !is_unfinished(recording) {
        return false;
    }
    match complete(recording, None) {
        Ok(Some(_)) => {}
        Ok(None) => return true,
        // The file is gone, because `gpumem run` has ended and given the recording its final name. The reader reports
        // that the file cannot be read.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !recording.exists() => {}
        Err(error) => {
            let what = format!("the last events of the process of `{}` cannot be added", recording.display());
            terminal::error(&Failure::new(what, error, "the report covers the data before that"));
        }
    }
    false
}

/// Returns whether some data of a recording is not in its file yet. If the recording cannot be opened, its reader
/// reports that.
fn is_unfinished(recording: &Path) -> bool {
    let Ok(file) = files::open_to_read(recording) else { return false };
    has_ring(&file, &SharedMemory) || unattended_marker(recording).exists() || torch::has_history(recording)
}

/// Adds the data that a killed process left in its ring, the older part of a recording that keeps the latest events, the functions at the
/// addresses of stacks, and PyTorch's history. Returns the content of the recording with the ring and the older part, but without the added
/// functions and PyTorch's history; `None` if the process is still recording. `ended` is the time at which the end of the process was
/// observed, since 1970.
///
/// # Errors
/// Returns an error if a file cannot be read or written. The recording stays as readable as before.
pub(crate) fn complete(path: &Path, ended: Option<Duration>) -> io::Result<Option<Content>> {
    // If several processes want to complete the recording at the same time, one does it, and the others wait.
    let lock = lock_file(path, "completing");
    let _turn = LockFile::wait(&lock, PATIENCE, || {
        let (path, lock) = (path.display(), lock.display());
        terminal::error(&format_args!("waiting for another process, which completes `{path}` and has locked `{lock}`"));
    })?;
    // Until everything is added, no process starts a recording with this name.
    let file = files::open(path, File::options().read(true).write(true))?;
    let Some(_ended) = recover(path, file, &SharedMemory, ended)? else { return Ok(None) };
    parts::join(path)?;
    let (content, end) = Content::read(io::BufReader::new(files::open_to_read(path)?))?;
    match end {
        End::Complete => {}
        // The disk was full. Data can only be added after a complete record.
        End::Cut { at } => files::open(path, File::options().write(true))?.set_len(at)?,
        End::Damaged { .. } | End::AboveLimit { .. } => return Ok(Some(content)),
    }
    if let Err(error) = symbols::add(path, &content) {
        let what = format!("`{}` lacks the functions of stacks", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    if let Err(error) = torch::add(path, &content) {
        let what = format!("`{}` lacks the history of PyTorch's allocator", path.display());
        terminal::error(&Failure::new(what, error, ""));
    }
    _ = fs::remove_file(unattended_marker(path));
    Ok(Some(content))
}
