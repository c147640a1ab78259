//! The files of the recordings of a run.

use std::{
    collections::BTreeSet,
    env,
    ffi::{OsStr, OsString},
    fs::{self, File},
    io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    process,
};

use gpumem_driver::lock_file::{LockFile, lock_file};
use gpumem_inject::variable;

use crate::{machine, recording::why_not_replaceable};

const EXTENSION: &str = "capture";

/// The file of a run. The files of its processes have names derived from it.
#[derive(Debug)]
pub(super) struct Destination {
    file: PathBuf,
    /// Files with such names from before the run.
    older: Vec<PathBuf>,
    /// The file that the user named, if another run records to it.
    pub(super) instead_of: Option<PathBuf>,
    /// A lock against other runs: the files of both runs would have the same names, and the later run would replace
    /// those of the earlier one. The processes of this run also note in the lock file which files they start.
    claim: Option<LockFile>,
}

impl Destination {
    /// Returns the file that the user named, else a new one named after the program. If another run is recording to the
    /// file, this process's id is added to the name. The error names the file that cannot be written.
    pub(super) fn new(
        output: Option<&Path>,
        program: &OsStr,
        arguments: &[OsString],
    ) -> Result<Self, (PathBuf, io::Error)> {
        let requested = output.map(Path::to_owned);
        let names: &mut dyn Iterator<Item = PathBuf> = match &requested {
            Some(requested) => &mut [requested.clone(), with_number(requested, &process::id().to_string())].into_iter(),
            None => &mut free_names(program, arguments),
        };
        for (at, name) in names.enumerate() {
            let file = env::current_dir().map(|folder| folder.join(&name)).map_err(|error| (name, error))?;
            let rejected =
                why_not_replaceable(&file).map(|why| io::Error::other(format!("{why}; use another --output")));
            let lock = || LockFile::try_new(&lock_file(&file, "lock")).map_err(|error| of_folder(&file, error));
            let claim = rejected.map_or_else(lock, Err);
            let Some(claim) = claim.map_err(|error| (file.clone(), error))? else { continue };
            // Another run, which has ended in the meantime, used the name.
            if requested.is_none() && file.exists() {
                continue;
            }
            let instead_of = requested.filter(|_| at > 0);
            let mut destination = Self { file, older: Vec::new(), instead_of, claim: Some(claim) };
            destination.older = destination.of_processes();
            return Ok(destination);
        }
        let file = requested.unwrap_or_else(|| env::current_dir().unwrap_or_default());
        Err((file, io::Error::other("no name is free; use another --output")))
    }

    /// Returns the file under the name that the user knows.
    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the recordings that the processes of this run have written, sorted by name.
    pub(super) fn of_processes(&self) -> Vec<PathBuf> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        // If a link or a pipe has replaced a recording, it is not touched.
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        let mut files: Vec<_> = files
            .map(|entry| entry.path())
            .filter(|path| self.process_of(path).is_some() && !self.older.contains(path))
            .collect();
        files.sort();
        files
    }

    /// Returns the recordings that the processes of this run have started but that no longer exist, sorted by name.
    pub(super) fn removed(&self) -> Vec<PathBuf> {
        let noted = self.claim.iter().flat_map(LockFile::noted).map(|name| PathBuf::from(OsString::from_vec(name)));
        let is_removed =
            |path: &PathBuf| path.parent() == self.file.parent() && self.process_of(path).is_some() && !path.exists();
        let removed: BTreeSet<_> = noted.filter(is_removed).collect();
        removed.into_iter().collect()
    }

    /// Returns the process of this run to which the path belongs: 17 for `train.rank3.pid17.2.capture`, if the file is
    /// `train.capture`.
    pub(super) fn process_of(&self, path: &Path) -> Option<u32> {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let between = || {
            // Names need not be UTF-8, but the part in between must be.
            let [name, stem] = [path.file_name()?, self.file.file_stem()?].map(OsStr::as_bytes);
            let rest = name.strip_prefix(stem)?;
            let rest = match self.file.extension() {
                Some(extension) => rest.strip_suffix(extension.as_bytes())?.strip_suffix(b".")?,
                None => rest,
            };
            str::from_utf8(rest.strip_prefix(b".")?).ok()
        };
        let mut parts = between()?.split('.').peekable();
        parts.next_if(|part| part.strip_prefix("rank").is_some_and(is_number));
        let process = parts.next()?.strip_prefix("pid").filter(|part| is_number(part))?.parse().ok()?;
        parts.next_if(|part| is_number(part));
        parts.next().is_none().then_some(process)
    }

    /// Turns `train.rank3.pid17.capture` into `train.rank3.gpu0.pid17.capture`.
    pub(super) fn with_devices(path: &Path, devices: &[u32]) -> PathBuf {
        let name = path.file_name().unwrap_or_default().as_bytes();
        let at = name.windows(4).rposition(|part| part == b".pid").filter(|_| !devices.is_empty());
        let Some((before, after)) = at.map(|at| name.split_at(at)) else { return path.to_owned() };
        let devices: Vec<_> = devices.iter().map(u32::to_string).collect();
        let name = [before, b".gpu", devices.join("+").as_bytes(), after].concat();
        path.with_file_name(OsString::from_vec(name))
    }

    /// Returns the file of the process with this id, unless its name contains a rank.
    pub(super) fn of_process(&self, pid: u32) -> PathBuf {
        with_number(&self.file, &format!("pid{pid}"))
    }

    /// Returns the processes of this run that have not ended, as far as this user may see them. They are recognized by
    /// the file name, which they have inherited.
    pub(super) fn running(&self) -> Vec<u32> {
        let is_of_the_run =
            |pid: &u32| machine::variable_of(&machine::environment(*pid), variable::FILE) == Some(self.file());
        machine::pids().into_iter().filter(is_of_the_run).collect()
    }
}

/// Explains why no file can be created next to this one. Only an error about the lock itself names the lock.
fn of_folder(file: &Path, error: io::Error) -> io::Error {
    let folder = file.parent().unwrap_or(file);
    let (is_there, folder) = (folder.is_dir(), folder.display());
    let why = match error.kind() {
        io::ErrorKind::NotFound if !is_there => {
            format!("there is no folder `{folder}`; create it, or use another --output")
        }
        io::ErrorKind::NotADirectory => format!("`{folder}` is not a folder; use another --output"),
        kind @ (io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem) => {
            format!("no file can be created in `{folder}` ({kind}); use another --output")
        }
        _ => return error,
    };
    io::Error::new(error.kind(), why)
}

/// Checks that a file can be created in this folder. Otherwise the error would appear only when the program initialises
/// CUDA.
pub(super) fn try_folder(file: &Path) -> io::Result<()> {
    let probe = file.with_file_name(format!(".gpumem-{}", process::id()));
    let tried = File::create(&probe).map(drop);
    _ = fs::remove_file(&probe);
    tried.map_err(|error| of_folder(file, error))
}

/// Returns `train.capture` for `python train.py`, and then names with a number, for when that file exists.
fn free_names(program: &OsStr, arguments: &[OsString]) -> impl Iterator<Item = PathBuf> {
    let stem = |path: &OsStr| Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let script = || {
        let is_script = |path: &&OsString| {
            let extension = Path::new(path).extension().and_then(OsStr::to_str);
            matches!(extension, Some("py" | "sh"))
        };
        stem(arguments.iter().find(is_script)?)
    };
    let stem = script().or_else(|| stem(program)).unwrap_or_else(|| "program".to_owned());
    let first = PathBuf::from(format!("{stem}.{EXTENSION}"));
    let others = (2..=1_000).map({
        let first = first.clone();
        move |count| with_number(&first, &count.to_string())
    });
    [first].into_iter().chain(others).filter(|path| !path.exists())
}

/// Turns `train.capture` into `train.2.capture`.
fn with_number(file: &Path, number: &str) -> PathBuf {
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    for part in [Some(OsStr::new(number)), file.extension()].into_iter().flatten() {
        name.push(".");
        name.push(part);
    }
    file.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_processes_are_known_by_their_names() {
        let file = |file: &str| Path::new("/folder").join(file);
        let place = |name: &str| Destination { file: file(name), older: Vec::new(), instead_of: None, claim: None };
        let of = |file: &str, path: &str| place(file).process_of(&Path::new("/folder").join(path));
        for (path, pid) in
            [("a.b.pid1.capture", 1), ("a.b.rank0.pid17.capture", 17), ("a.b.rank12.pid17.3.capture", 17)]
        {
            assert_eq!(of("a.b.capture", path), Some(pid), "{path}");
        }
        for path in [
            "a.b.capture",
            "a.b.pid.capture",
            "a.b.pid1.capture.torch",
            "a.pid1.capture",
            "a.b.rank0.capture",
            "a.b.rank0.gpu0.pid1.capture",
            "a.b.pid1.2.3.capture",
            "xa.b.pid1.capture",
        ] {
            assert_eq!(of("a.b.capture", path), None, "{path}");
        }
        assert_eq!((of("a", "a.pid3"), of("a", "a.pid3.capture")), (Some(3), None));
        let bytes = |name: &[u8]| Path::new("/folder").join(OsStr::from_bytes(name));
        let mut other = place("");
        other.file = bytes(b"n\xff.capture");
        let of = |name: &[u8]| other.process_of(&bytes(name));
        assert_eq!((of(b"n\xff.pid3.capture"), of(b"n\xfe.pid3.capture")), (Some(3), None));
        assert_eq!(Destination::with_devices(&bytes(b"n\xff.pid3.capture"), &[1]), bytes(b"n\xff.gpu1.pid3.capture"));
        let named = Destination::with_devices(Path::new("/folder/a.rank1.pid2.3.capture"), &[0, 2]);
        assert_eq!(named, Path::new("/folder/a.rank1.gpu0+2.pid2.3.capture"));
    }

    #[test]
    fn a_file_is_named_after_the_program() {
        let name = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            free_names(&words[0], &words[1..]).next().unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(name(&["/usr/bin/python3", "-u", "src/no-such-train.py", "--x"]), "no-such-train.capture");
        assert_eq!(name(&["./no-such-program", "8"]), "no-such-program.capture");
    }
}
