//! The sockets of programs that are recorded on request.

use std::{
    env, fs,
    io::{self, Read, Write},
    os::unix::{
        fs::{DirBuilderExt, MetadataExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use gpumem_inject::variable;

use crate::{failure::Failure, machine};

/// The program starts or ends the recording within this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the folder of the sockets, which only this user can access. Sockets of programs that have ended are removed.
pub(super) fn folder() -> io::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_dir());
    // The path of a socket has at most 108 bytes.
    let folder = runtime.map_or_else(|| PathBuf::from(format!("/tmp/gpumem-{user}")), |folder| folder.join("gpumem"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let known = folder.metadata()?;
    if known.uid() != user || known.mode() & 0o077 != 0 {
        let why = format!("`{}` is open to others", folder.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    remove_old(&folder);
    Ok(folder)
}

fn remove_old(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let socket = entry.path();
        let is_over = || UnixStream::connect(&socket).is_err_and(|why| why.kind() == io::ErrorKind::ConnectionRefused);
        if socket.extension().is_some_and(|extension| extension == "sock") && is_over() {
            _ = fs::remove_file(socket);
        }
    }
}

/// Returns whether a signal or a debugger has stopped the process.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let status = fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    status
        .lines()
        .find_map(|line| line.strip_prefix("State:"))
        .is_some_and(|state| matches!(state.trim().get(..1), Some("T" | "t")))
}

/// Explains why the system's data about a process cannot be read, and returns the next step.
pub(super) fn unreadable(error: &io::Error) -> (String, &'static str) {
    match error.kind() {
        io::ErrorKind::NotFound => ("it is not running".to_owned(), ""),
        _ => (format!("it cannot be read: {error}"), "run gpumem as root"),
    }
}

/// Sends a command to a program, and returns the file of its recording.
pub(crate) fn send(pid: u32, command: &str) -> Result<String, Failure> {
    let process = format!("process {pid}");
    let next = "start the program with `gpumem run --dormant`";
    let environment = fs::read(format!("/proc/{pid}/environ")).map_err(|error| {
        let (cause, next) = unreadable(&error);
        Failure::new(&process, cause, next)
    })?;
    if is_stopped(pid) {
        return Err(Failure::new(
            process,
            "it is stopped, and cannot answer",
            format_args!("continue it: kill -CONT {pid}"),
        ));
    }
    let socket = match machine::variable_of(&environment, variable::CONTROL) {
        Some(folder) => variable::socket(folder, pid),
        // `gpumem attach` loaded the library, which waits.
        None => match folder().map(|folder| variable::socket(&folder, pid)) {
            Ok(socket) if socket.exists() => socket,
            _ => return Err(Failure::new(process, "no gpumem library waits in it", next)),
        },
    };
    let mut stream = UnixStream::connect(&socket).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            let next = "it may be a parent or a child of the process that uses CUDA, or call cuInit later";
            Failure::new(&process, "it has not initialised CUDA", next)
        }
        _ => Failure::new(&process, error, ""),
    })?;
    let mut answer = String::new();
    let mut talk = || {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(command.as_bytes())?;
        stream.read_to_string(&mut answer)
    };
    talk().map_err(|error| Failure::new(&process, error, "")).map(drop)?;
    match answer.strip_prefix(variable::DONE) {
        Some(file) => Ok(file.to_owned()),
        None => Err(Failure::new(process, answer, "")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_another_user_has_a_next_step() {
        let (cause, next) = unreadable(&io::Error::from_raw_os_error(13));
        assert_eq!((&*cause, next), ("it cannot be read: Permission denied (os error 13)", "run gpumem as root"));
        assert_eq!(unreadable(&io::ErrorKind::NotFound.into()), ("it is not running".to_owned(), ""));
    }
}
