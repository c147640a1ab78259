//! Switches the recording on and off while the program runs: `gpumem run --dormant`, `gpumem start`, `gpumem stop`.

use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    mem::{forget, replace},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process,
    thread::sleep,
    time::Duration,
};

use gpumem::__private::{end_injected, exit_without_program, run_beside_program};

use crate::{request::Request, torch, variable};

/// Who connects and sends nothing is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// After this time it is seen that the program has ended, or has closed the socket.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Listens to commands, on a thread of its own. Until one comes, nothing is intercepted.
pub(crate) fn listen(folder: &Path, request: Request) -> Result<(), String> {
    let socket = folder.join(format!("{}.sock", process::id()));
    let failed = |why| format!("cannot listen to `gpumem start` at {}: {why}", socket.display());
    let mut listener = bind(&socket).map_err(failed)?;
    let path = socket.clone();
    let serve = move || {
        let mut recording = None;
        loop {
            exit_without_program();
            let is_own = listener.local_addr().is_ok_and(|address| address.as_pathname() == Some(&path));
            if !is_own {
                // The program has closed all descriptors that it does not know. The number may be that of its own socket now.
                let Ok(again) = bind(&path) else { return };
                forget(replace(&mut listener, again));
            }
            match listener.accept() {
                // A command that has closed the connection has its reasons.
                Ok((stream, _)) => _ = answer(&stream, &request, &mut recording),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // It was closed meanwhile, or there is no free number.
                Err(_) => sleep(LOOK_EVERY),
            }
        }
    };
    run_beside_program("gpumem-control", serve).map_err(failed)
}

/// A listener whose `accept` returns after [`LOOK_EVERY`].
fn bind(socket: &Path) -> std::io::Result<UnixListener> {
    // Of an earlier process with this number, or of the program that called `exec`.
    _ = fs::remove_file(socket);
    let listener = UnixStream::from(OwnedFd::from(UnixListener::bind(socket)?));
    listener.set_read_timeout(Some(LOOK_EVERY))?;
    Ok(UnixListener::from(OwnedFd::from(listener)))
}

fn answer(mut stream: &UnixStream, request: &Request, recording: &mut Option<PathBuf>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut command = String::new();
    BufReader::new(stream.take(64)).read_line(&mut command)?;
    let done = match (command.as_str(), recording.take()) {
        (variable::START, Some(known)) => {
            let text = format!("it is recorded already, to {}", known.display());
            *recording = Some(known);
            Err(text)
        }
        (variable::START, None) => request.record().inspect(|begun| *recording = Some(begun.clone())),
        (variable::STOP, Some(known)) => {
            if request.has_torch() {
                torch::end(&known);
            }
            end_injected();
            Ok(known)
        }
        (variable::STOP, None) => Err("it is not recorded".to_owned()),
        (_, known) => {
            *recording = known;
            Err("the command is not known; it is of another version of gpumem".to_owned())
        }
    };
    match done {
        Ok(file) => write!(stream, "{}{}", variable::DONE, file.display()),
        Err(why) => stream.write_all(why.as_bytes()),
    }
}
