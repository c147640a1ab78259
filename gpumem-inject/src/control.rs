//! Switches the recording on and off while the program runs: `gpumem run --dormant`, `gpumem start`, `gpumem stop`.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use gpumem::__private::{end_injected, run_beside_program};

use crate::{request::Request, torch, variable};

/// Who connects and sends nothing is not waited for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Listens to commands, on a thread of its own. Until one comes, nothing is intercepted and the thread sleeps.
pub(crate) fn listen(folder: &Path, request: Request) -> Result<(), String> {
    let socket = folder.join(format!("{}.sock", process::id()));
    // Of an earlier process with this number, or of the program that called `exec`.
    _ = fs::remove_file(&socket);
    let failed = |why| format!("cannot listen to `gpumem start` at {}: {why}", socket.display());
    let listener = UnixListener::bind(&socket).map_err(failed)?;
    let serve = move || {
        let mut recording = None;
        for stream in listener.incoming().flatten() {
            // A program that has closed the connection has its reasons.
            _ = answer(&stream, &request, &mut recording);
        }
    };
    run_beside_program("gpumem-control", serve).map_err(failed)
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
