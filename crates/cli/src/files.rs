//! Files that other processes may replace at any time, and the folders and patterns that expand to several files.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    slice::from_ref,
};

use glob::MatchOptions;
use gpumem_core::regular_file;
pub(crate) use gpumem_core::regular_file::open;
use gpumem_recording::{new_path, old_path};

use crate::failure::Failure;

/// Opens a recording or a file next to one. See [`regular_file::open_to_read`].
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    regular_file::open_to_read(path).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), EMPTY),
        _ => error,
    })
}

/// Returns whether a file starts as recordings do.
pub(crate) fn is_recording(file: &Path) -> bool {
    open_to_read(file).and_then(gpumem_recording::is_recording).unwrap_or(false)
}

/// Returns the files that arguments name. A folder expands to its recordings, and a pattern such as `runs/*.capture` to
/// the files that match it. Both are sorted by name, with rank 2 before rank 10. Any other argument is returned as it is.
///
/// # Errors
/// Returns an error if a folder has no recordings or cannot be read, or if nothing matches a pattern.
pub(crate) fn expand(arguments: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for argument in arguments {
        let pattern = argument.to_str().filter(|text| text.contains(['*', '?', '[']) && !argument.exists());
        let matches = match pattern {
            Some(pattern) => matches(pattern)?,
            None => vec![argument.clone()],
        };
        let mut found = Vec::new();
        for path in matches {
            if path.is_dir() {
                found.extend(recordings_in(&path)?);
            } else {
                found.push(path);
            }
        }
        found.sort_by_cached_key(|path| (texts_and_numbers(path), path.clone()));
        // `runs/**/*` matches a folder and the recordings in it.
        found.dedup();
        files.extend(found);
    }
    Ok(files)
}

/// Why a file without any bytes is not a recording.
pub(crate) const EMPTY: &str =
    "the file is empty: its program ended, or the disk was full, before anything was written";

/// The recordings that arguments name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Recordings {
    pub(crate) files: Vec<PathBuf>,
    /// The empty files found through folders and patterns. They do not hide the others.
    pub(crate) empty: Vec<PathBuf>,
}

impl Recordings {
    /// Returns the files that [`expand`] returns, with the empty files of folders and patterns in
    /// [`empty`](Self::empty).
    ///
    /// # Errors
    /// Returns an error in the same cases as [`expand`], and if all files of a folder or a pattern are empty.
    pub(crate) fn of(arguments: &[PathBuf]) -> Result<Self, Failure> {
        let mut all = Self::default();
        for argument in arguments {
            let found = expand(from_ref(argument))?;
            // If the user named the file, its reader reports that it is empty.
            let is_named = found.as_slice() == from_ref(argument);
            let is_empty = |path: &PathBuf| path.metadata().is_ok_and(|known| known.is_file() && known.len() == 0);
            let (empty, files): (Vec<_>, Vec<_>) = found.into_iter().partition(|path| !is_named && is_empty(path));
            if files.is_empty() {
                let what = format!("`{}` cannot be read", argument.display());
                return Err(Failure::new(what, "all its recordings are empty", "record the program again"));
            }
            all.files.extend(files);
            all.empty.extend(empty);
        }
        Ok(all)
    }
}

/// Splits a name into parts, each with the number that follows it.
fn texts_and_numbers(path: &Path) -> Vec<(String, u128)> {
    let name = path.to_string_lossy();
    let mut rest = &*name;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let (text, after) = rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
        let (number, after) = after.split_at(after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len()));
        parts.push((text.to_owned(), number.parse().unwrap_or(0)));
        rest = after;
    }
    parts
}

/// Returns the files that match a pattern.
fn matches(pattern: &str) -> Result<Vec<PathBuf>, Failure> {
    let failed = |cause: String| {
        let next = "pass recordings, a folder, or a pattern such as 'runs/*.capture'";
        Failure::new(format!("`{pattern}` cannot be read"), cause, next)
    };
    // Lock files and other dotfiles do not belong in a report.
    let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
    let paths = glob::glob_with(pattern, options).map_err(|error| failed(error.to_string()))?;
    let paths: Vec<_> = paths.collect::<Result<_, _>>().map_err(|error| failed(error.to_string()))?;
    if paths.is_empty() { Err(failed("no file matches".to_owned())) } else { Ok(paths) }
}

/// Returns the recordings in a folder, without its subfolders. Every file that ends in `.capture` is returned;
/// its reader reports an error if it is not a recording.
fn recordings_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |cause: String| {
        let next =
            format!("pass a folder with recordings, or a pattern such as '{}'", folder.join("**/*.capture").display());
        Failure::new(format!("`{}` cannot be read", folder.display()), cause, next)
    };
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| failed(error.to_string()))?;
    // A recording that keeps only the latest events has parts while its program runs.
    let is_part = |path: &Path| {
        let recording = path.with_extension("");
        recording.exists() && [old_path(&recording), new_path(&recording)].iter().any(|part| part == path)
    };
    let is_candidate = |path: &PathBuf| {
        let has_capture_extension = path.extension().is_some_and(|extension| extension == "capture");
        path.is_file() && (has_capture_extension || is_recording(path) && !is_part(path))
    };
    let is_hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let files = entries.into_iter().filter(|entry| !is_hidden(entry)).map(|entry| entry.path());
    let files: Vec<_> = files.filter(is_candidate).collect();
    if files.is_empty() { Err(failed("it contains no recording".to_owned())) } else { Ok(files) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording_builder::RecordingBuilder;

    #[test]
    fn folders_and_patterns_expand_to_recordings() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let inner = folder.join("host-1");
        fs::create_dir_all(&inner).unwrap();
        let recording = RecordingBuilder::new("train").training(1, 1, 1).file();
        let put = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
        let in_folder = |names: &[&str]| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
        let expanded = |names: &[&str]| expand(&in_folder(names)).map_err(|error| error.to_string());
        let cause = |cause: &str, path: &Path| format!("`{}` cannot be read: {cause}; pass ", path.display());

        let none = expanded(&[""]).unwrap_err();
        assert!(none.starts_with(&cause("it contains no recording", &folder.join(""))), "{none}");
        assert!(none.ends_with("/**/*.capture'"), "{none}");

        for name in ["b.capture", "c.recording", "host-1/d.capture", "b.capture.old", ".hidden.capture"] {
            put(name, &recording);
        }
        put("a.capture", b"no recording");
        put("notes.txt", b"no recording");
        assert_eq!(expanded(&[""]), Ok(in_folder(&["a.capture", "b.capture", "c.recording"])));
        assert_eq!(expanded(&["*.capture"]), Ok(in_folder(&["a.capture", "b.capture"])));
        assert_eq!(
            expanded(&["**/*.capture", "notes.txt"]),
            Ok(in_folder(&["a.capture", "b.capture", "host-1/d.capture", "notes.txt"]))
        );
        // A match may be a folder, and an argument that is not a pattern need not exist.
        assert_eq!(expanded(&["host-?", "none.capture"]), Ok(in_folder(&["host-1/d.capture", "none.capture"])));
        // A pattern may match a folder and what is in it.
        let all = ["a.capture", "b.capture", "b.capture.old", "c.recording", "host-1/d.capture", "notes.txt"];
        assert_eq!(expanded(&["**/*"]), Ok(in_folder(&all)));
        for name in ["host-1/rank10.capture", "host-1/rank2.capture"] {
            put(name, &recording);
        }
        let ranks = ["host-1/d.capture", "host-1/rank2.capture", "host-1/rank10.capture"];
        for argument in ["host-1", "host-1/*"] {
            assert_eq!(expanded(&[argument]), Ok(in_folder(&ranks)));
        }
        // Empty files are listed separately, except a file that the user named. If all files are empty, that is an
        // error.
        put("host-1/empty.capture", b"");
        let recordings = |name| Recordings::of(&in_folder(&[name])).map_err(|error| error.to_string());
        for argument in ["host-1", "host-1/*"] {
            let (files, empty) = (in_folder(&ranks), in_folder(&["host-1/empty.capture"]));
            assert_eq!(recordings(argument), Ok(Recordings { files, empty }));
        }
        assert_eq!(recordings("host-1/empty.capture").unwrap().empty, in_folder(&[]));
        let empty = recordings("host-1/e*").unwrap_err();
        assert!(empty.ends_with("/host-1/e*` cannot be read: all its recordings are empty; record the program again"));
        put("[1].capture", &recording);
        assert_eq!(expanded(&["[1].capture"]), Ok(in_folder(&["[1].capture"])));
        let unmatched = expanded(&["*.no"]).unwrap_err();
        assert!(unmatched.starts_with(&cause("no file matches", &folder.join("*.no"))), "{unmatched}");
        let wrong = expanded(&["[x"]).unwrap_err();
        assert!(wrong.contains("cannot be read: Pattern syntax error"), "{wrong}");
    }
}
