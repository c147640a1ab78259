//! Starts and stops the recording while the program runs, for `gpumem run --dormant`, `gpumem start` and `gpumem stop`.

use std::{
    env,
    path::{Path, PathBuf},
    process,
    sync::mpsc::{Receiver, RecvTimeoutError},
};

use gpumem::{intercept, recording};
use gpumem_driver::{own_threads, process::exit_without_program};

use crate::{
    recordings,
    request::Request,
    sys::socket::{Command, LOOK_EVERY, commands},
    torch, variable,
};

/// Starts the recording, or waits for a command to start it, as the environment requests.
pub(crate) fn start() -> Result<(), String> {
    let request = Request::of_environment()?;
    match env::var_os(variable::CONTROL).filter(|folder| !folder.is_empty()) {
        None => request.record().map(drop),
        Some(folder) => listen(Path::new(&folder), Request { is_late: true, ..request }),
    }
}

/// Listens for commands. Until one arrives, nothing is intercepted.
///
/// One thread handles the socket, in its own descriptor table. Another thread executes the commands. It opens files in the program's
/// table, because they must be visible there.
pub(crate) fn listen(folder: &Path, request: Request) -> Result<(), String> {
    let socket = variable::socket(folder, process::id());
    commands(&socket)
        .and_then(|received| own_threads::spawn("switch", move || obey(&received, &request)))
        .map(drop)
        .map_err(|why| format!("cannot listen to `gpumem start` at {}: {why}", socket.display()))
}

/// Executes commands until the sender is gone.
fn obey(received: &Receiver<Command>, request: &Request) {
    let mut recording = None;
    loop {
        exit_without_program();
        match received.recv_timeout(LOOK_EVERY) {
            // The process that sent the command may have ended.
            Ok((command, answer)) => _ = answer.send(answer_to(&command, request, &mut recording)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn answer_to(command: &str, request: &Request, recording: &mut Option<PathBuf>) -> String {
    let done = match (command, recording.take()) {
        (variable::START, Some(known)) => {
            let text = format!("it is recorded already, to {}", known.display());
            *recording = Some(known);
            Err(text)
        }
        (variable::START, None) => request.record().inspect(|started| *recording = Some(started.clone())),
        (variable::STOP, Some(known)) => {
            if request.has_torch() {
                torch::end(&known);
            }
            recordings::change();
            // The recording ends first: it does not miss the events that are lost when the interception ends.
            recording::end();
            intercept::unsubscribe();
            Ok(known)
        }
        (variable::STOP, None) => Err("it is not recorded".to_owned()),
        (_, known) => {
            *recording = known;
            Err("the command is not known; it comes from another gpumem version".to_owned())
        }
    };
    done.map_or_else(|why| why, |file| format!("{}{}", variable::DONE, file.display()))
}
