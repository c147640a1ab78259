//! Reads processes from Linux's `/proc`. Nothing is written there, and no process is stopped.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

#[cfg(feature = "export")]
use gpumem_driver::process::rank_of;
use gpumem_inject::variable;
use gpumem_recording::{FileStart, new_path};

use crate::files::{is_recording, open_to_read};

fn place(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

/// Reads a file of a process. Bytes that are not UTF-8 are replaced: Linux cuts the names of programs at a byte, which
/// may be within a character.
fn read(pid: u32, name: &str) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(place(pid, name)).ok()?).into_owned())
}

/// Returns the ids of the processes that are visible here.
pub(crate) fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<_> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// Returns the command line of a process, else its short name.
pub(crate) fn command(pid: u32) -> Option<String> {
    let words = read(pid, "cmdline")?;
    let line = words.split('\0').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ");
    let short = || Some(read(pid, "comm")?.trim_end().to_owned());
    Some(line).filter(|line| !line.is_empty()).or_else(short).filter(|line| !line.is_empty())
}

/// Returns the name of the user that a process belongs to; the user id if there is no name.
pub(crate) fn user(pid: u32) -> Option<String> {
    let uid = uid(pid)?;
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    Some(name_of(uid, &users).unwrap_or_else(|| uid.to_string()))
}

/// Returns the id of the user that a process belongs to.
pub(crate) fn uid(pid: u32) -> Option<u32> {
    Some(fs::metadata(format!("/proc/{pid}")).ok()?.uid())
}

/// Returns whether this process and the given one see the same shared memory.
#[cfg(feature = "export")]
pub(crate) fn shares_memory(pid: u32) -> bool {
    let names = |process: &str| fs::read_link(format!("/proc/{process}/ns/ipc")).ok();
    names("self").is_some_and(|own| names(&pid.to_string()) == Some(own))
}

/// Returns the cgroups of a process: one line `number:controllers:path` for each hierarchy.
#[cfg(feature = "export")]
pub(crate) fn cgroups(pid: u32) -> Option<String> {
    read(pid, "cgroup")
}

fn name_of(uid: u32, users: &str) -> Option<String> {
    users.lines().find_map(|line| {
        let mut parts = line.split(':');
        let (name, number) = (parts.next()?, parts.nth(1)?);
        (number.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

/// Returns the start time of a process, in the system's own unit. Another process may get the same id later.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let stat = read(pid, "stat")?;
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

/// Returns whether the process has loaded a library of the NVIDIA driver or opened one of its devices. `None` if that
/// cannot be read.
pub(crate) fn uses_driver(pid: u32) -> Option<bool> {
    let maps = read(pid, "maps")?;
    Some(["nvidia", "libcuda.so", "/dev/dxg"].iter().any(|name| maps.contains(name)))
}

/// Returns whether the process has loaded a library whose name starts with `library`. `None` if that cannot be read.
pub(super) fn has_loaded(pid: u32, library: &str) -> Option<bool> {
    Some(read(pid, "maps")?.contains(&format!("/{library}")))
}

/// Returns the recordings that the process writes, or an error if its files cannot be read.
pub(super) fn open_recordings(pid: u32) -> io::Result<Vec<PathBuf>> {
    let mut recordings = Vec::new();
    // If a file was closed during a look, the process may have restarted its recording in another file. The next look
    // finds it.
    for _ in 0..MOST_LOOKS {
        let (open, mut is_closed) = written_files(pid)?;
        recordings.clear();
        for (link, path) in &open {
            match recording_at(pid, link, path) {
                Some(recording) if recordings.contains(&recording) || !is_writer(pid, &recording) => {}
                Some(recording) => recordings.push(recording),
                None => is_closed |= is_recording(&visible_here(pid, path)),
            }
        }
        if !is_closed && written_files(pid)?.0 == open {
            break;
        }
    }
    Ok(recordings)
}

const MOST_LOOKS: usize = 10;

/// Returns the files that a process has opened only for writing, as it opens recordings: for each file, its link in
/// `/proc` and its path. Also returns whether a file was closed during this look.
fn written_files(pid: u32) -> io::Result<(Vec<(PathBuf, PathBuf)>, bool)> {
    let (mut files, mut is_closed) = (Vec::new(), false);
    for entry in fs::read_dir(place(pid, "fd"))?.flatten() {
        let link = entry.path();
        let (Ok(known), Ok(path)) = (fs::symlink_metadata(&link), fs::read_link(&link)) else {
            is_closed = true;
            continue;
        };
        // The permissions of the link show how the file was opened.
        let is_written = known.permissions().mode() & 0o600 == 0o200;
        if is_written && path.is_absolute() && !path.starts_with("/dev") {
            files.push((link, path));
        }
    }
    Ok((files, is_closed))
}

/// Returns the recording that the process writes through this link to a path. While a recording is being restarted,
/// only the file that will replace it is open, and that file may still be empty. In that case, the recording to be
/// replaced is returned.
fn recording_at(pid: u32, link: &Path, path: &Path) -> Option<PathBuf> {
    let replaced = path.with_extension("");
    let replaced =
        (new_path(&replaced) == path).then(|| visible_here(pid, &replaced)).filter(|file| is_recording(file));
    replaced.or_else(|| is_recording(link).then(|| visible_here(pid, path)))
}

/// Returns whether this process is the recorded one. A forked child also has its parent's files open, and `gpumem run`
/// has the recordings open that it completes.
fn is_writer(pid: u32, recording: &Path) -> bool {
    let writer = open_to_read(recording).and_then(FileStart::read).map_or(0, |file_start| file_start.pid);
    writer == 0 || own_number(pid).is_none_or(|own| own == writer)
}

/// Returns the id that the process has in its own namespace. In a container this is not `pid` but the last id of the
/// line `NSpid`.
fn own_number(pid: u32) -> Option<u32> {
    let status = read(pid, "status")?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().next_back()?.parse().ok()
}

/// Returns the path as seen from here. In a container, `path` is in the container's own file system. The folders are
/// compared, because the file may be replaced at any moment.
fn visible_here(pid: u32, path: &Path) -> PathBuf {
    let inside = place(pid, "root").join(path.strip_prefix("/").unwrap_or(path));
    let folder = |path: &Path| path.parent()?.metadata().ok().map(|known| (known.dev(), known.ino()));
    if folder(&inside).is_some() && folder(&inside) != folder(path) { inside } else { path.to_owned() }
}

/// Returns the environment with which the process started. Empty if it cannot be read.
pub(crate) fn environment(pid: u32) -> Vec<u8> {
    fs::read(place(pid, "environ")).unwrap_or_default()
}

/// Returns the value of a variable in the environment of a process. `None` if it is empty.
pub(crate) fn variable_of<'a>(environment: &'a [u8], name: &str) -> Option<&'a Path> {
    let mut variables = environment.split(|byte| *byte == 0);
    let value = variables.find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    (!value.is_empty()).then(|| Path::new(OsStr::from_bytes(value)))
}

/// Returns whether the process waits for `gpumem start`.
pub(super) fn is_dormant(pid: u32, environment: &[u8]) -> bool {
    variable_of(environment, variable::CONTROL).is_some_and(|folder| variable::socket(folder, pid).exists())
}

/// Returns the latest recording that `gpumem run` requested, if this process has started one.
#[cfg(feature = "export")]
pub(super) fn left_recording(pid: u32, environment: &[u8]) -> Option<PathBuf> {
    let file = variable_of(environment, variable::FILE)?;
    let rank = rank_of(|name| variable_of(environment, name)?.to_str().map(str::to_owned));
    let own = own_number(pid)?;
    let files = (1..).map(|count| visible_here(pid, &variable::file_of_process(file, rank, own, count)));
    files.take_while(|file| is_recording(file)).last()
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process,
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Duration,
    };

    use gpumem_recording::{Item, Process, Writer};

    use super::*;

    #[test]
    fn this_process_is_known() {
        let own = process::id();
        // Linux cuts long names at a byte, which may be within a character.
        fs::write("/proc/self/comm", b"gpumem\xff").unwrap();
        assert!(pids().contains(&own));
        assert!(command(own).is_some_and(|line| line.contains("gpumem")), "{:?}", command(own));
        assert!(start_time(own).is_some() && user(own).is_some());
        assert_eq!(
            (command(u32::MAX), user(u32::MAX), start_time(u32::MAX), uses_driver(u32::MAX)),
            (None, None, None, None)
        );
    }

    #[test]
    fn users_have_names() {
        let users = "root:x:0:0:root:/root:/bin/sh\nbroken\nada:x:1000:1000::/home/ada:/bin/sh\n";
        assert_eq!(name_of(1000, users).as_deref(), Some("ada"));
        assert_eq!(name_of(7, users), None);
    }

    #[cfg(feature = "export")]
    #[test]
    fn the_recording_that_a_process_has_left_is_the_latest_one_of_its_name() {
        let (own, folder) = (process::id(), tempfile::tempdir().unwrap());
        let file = |name: &str| folder.path().join(name);
        let environment = format!("PATH=/bin\0{}={}\0PMI_RANK=3\0", variable::FILE, file("a.capture").display());
        let left = |environment: &str| left_recording(own, environment.as_bytes());
        assert_eq!((left(&environment), left("PATH=/bin\0")), (None, None));
        let [first, second] =
            [format!("a.rank3.pid{own}.capture"), format!("a.rank3.pid{own}.2.capture")].map(|name| file(&name));
        for latest in [&first, &second] {
            fs::write(latest, crate::recording_builder::RecordingBuilder::new("train").file()).unwrap();
            assert_eq!(left(&environment).as_ref(), Some(latest));
        }
    }

    #[test]
    fn only_what_is_written_and_starts_as_a_recording_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a.capture", "b.capture", "c.capture", "b.capture.new", "d.new", "inherited.capture"];
        let [recording, read, other, new, named_new, inherited] = names.map(|name| folder.path().join(name));
        for file in [&recording, &read, &named_new, &inherited] {
            let pid = if *file == inherited { 4711 } else { process::id() };
            let mut writer = Writer::new(Vec::new()).unwrap();
            writer.write(&Item::Process(Process { pid, ..Process::default() })).unwrap();
            fs::write(file, writer.finish().unwrap()).unwrap();
        }
        fs::write(&other, "not one of them").unwrap();
        let write = |path: &Path| fs::File::options().write(true).open(path).unwrap();
        let _open =
            (write(&recording), fs::File::open(&read).unwrap(), write(&other), write(&named_new), write(&inherited));
        let in_folder = || -> Vec<PathBuf> {
            let mut found = open_recordings(process::id()).unwrap();
            found.retain(|path| path.starts_with(&folder));
            found.sort();
            found
        };
        assert_eq!(in_folder(), [recording.clone(), named_new.clone()]);
        // While `b.capture` is restarted, the process has only its replacement open.
        let _new = fs::File::create(&new).unwrap();
        assert_eq!(in_folder(), [recording, read, named_new]);
    }

    #[test]
    fn a_recording_that_is_restarted_is_found_at_every_moment() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.capture");
        let new = new_path(&path);
        let start = |path: &Path| {
            let mut file = fs::File::create(path).unwrap();
            file.write_all(&Writer::new(Vec::new()).unwrap().finish().unwrap()).unwrap();
            file
        };
        let (mut file, has_ended) = (start(&path), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    file = start(&new);
                    fs::rename(&new, &path).unwrap();
                    // The file has another descriptor each time.
                    file = file.try_clone().unwrap();
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let is_missing = |_: &u32| !open_recordings(process::id()).unwrap().contains(&path);
            let missing = (0..2000).filter(is_missing).count();
            has_ended.store(true, Ordering::Relaxed);
            assert_eq!(missing, 0, "of 2000 looks");
        });
    }
}
