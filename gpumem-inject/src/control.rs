//! Switches the recording on and off while the program runs, for `gpumem run --dormant`, `gpumem start` and `gpumem
//! stop`.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    mem::{forget, replace},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    thread::sleep,
    time::Duration,
};

use gpumem::recording;
use gpumem_driver::{
    beside::{self, run_with_own_descriptors},
    descriptor,
    process::exit_without_program,
};

use crate::{recordings, request::Request, torch, variable};

/// The longest wait for a command that connects and sends nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// The interval at which a thread looks whether the program has ended or has closed the socket.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A command, and the connection for its answer.
type Command = (String, Sender<String>);

/// Begins to record, or to wait for a command to do so, as the environment asks.
pub(crate) fn begin() -> Result<(), String> {
    let request = Request::of_environment()?;
    match env::var_os(variable::CONTROL).filter(|folder| !folder.is_empty()) {
        None => request.record().map(drop),
        Some(folder) => listen(Path::new(&folder), Request { is_late: true, ..request }),
    }
}

/// Listens to commands. Until one comes, nothing is intercepted.
///
/// One thread has the socket, in a table of descriptors of its own: the program can neither close it nor get a connection of it. The
/// other thread obeys, and opens files as the program does, because these must be visible in the program's table.
pub(crate) fn listen(folder: &Path, request: Request) -> Result<(), String> {
    let socket = folder.join(format!("{}.sock", process::id()));
    let failed = |why: io::Error| format!("cannot listen to `gpumem start` at {}: {why}", socket.display());
    let (commands, received) = channel();
    let (bound, is_bound) = sync_channel(1);
    let path = socket.clone();
    let serve = move |has_own_table| serve(&path, has_own_table, &bound, &commands);
    run_with_own_descriptors("gpumem-control", serve).map_err(failed)?;
    is_bound.recv().unwrap_or_else(|_| Err(ErrorKind::BrokenPipe.into())).map_err(failed)?;
    beside::run("gpumem-switch", move || obey(&received, &request)).map_err(failed)
}

/// Obeys commands until the sender is gone.
fn obey(received: &Receiver<Command>, request: &Request) {
    let mut recording = None;
    loop {
        exit_without_program();
        match received.recv_timeout(LOOK_EVERY) {
            // The command that asked may have ended.
            Ok((command, answer)) => _ = answer.send(answer_to(&command, request, &mut recording)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Accepts connections, one after the other.
fn serve(socket: &Path, has_own_table: bool, bound: &SyncSender<io::Result<()>>, commands: &Sender<Command>) {
    let mut listener = match bind(socket) {
        Ok(listener) => listener,
        Err(why) => {
            _ = bound.send(Err(why));
            return;
        }
    };
    _ = bound.send(Ok(()));
    loop {
        // Only an older kernel needs this. The program may still close the socket between this line and the next one, and the
        // accepted connection would then be one of the program.
        let is_own = || listener.local_addr().is_ok_and(|address| address.as_pathname() == Some(socket));
        if !has_own_table && !is_own() {
            // The program has closed all descriptors that it does not know. The number may be that of its own socket now.
            let Ok(again) = bind(socket) else { return };
            forget(replace(&mut listener, again));
        }
        match listener.accept() {
            // An error is ignored if the command has closed the connection.
            Ok((stream, _)) => _ = converse(&with_high_number(stream.into()).into(), commands),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The descriptor was closed meanwhile, or there is no free number.
            Err(_) => sleep(LOOK_EVERY),
        }
    }
}

/// Returns the same file or socket with a number that the program hardly uses.
fn with_high_number(descriptor: OwnedFd) -> OwnedFd {
    descriptor::with_high_number(descriptor.into()).into()
}

/// Returns a listener whose `accept` returns after [`LOOK_EVERY`].
fn bind(socket: &Path) -> io::Result<UnixListener> {
    // An earlier process with this number may have left a socket, or the program before it called `exec`.
    _ = fs::remove_file(socket);
    let listener = UnixStream::from(with_high_number(UnixListener::bind(socket)?.into()));
    listener.set_read_timeout(Some(LOOK_EVERY))?;
    Ok(UnixListener::from(OwnedFd::from(listener)))
}

/// Passes one command to the other thread, and its answer back.
fn converse(mut stream: &UnixStream, commands: &Sender<Command>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut command = String::new();
    BufReader::new(stream.take(64)).read_line(&mut command)?;
    let (answer, answered) = channel();
    let is_sent = commands.send((command, answer)).is_ok();
    let text = answered.recv().ok().filter(|_| is_sent);
    stream.write_all(text.as_deref().unwrap_or("the library of gpumem has ended").as_bytes())
}

fn answer_to(command: &str, request: &Request, recording: &mut Option<PathBuf>) -> String {
    let done = match (command, recording.take()) {
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
            recordings::change();
            recording::end();
            Ok(known)
        }
        (variable::STOP, None) => Err("it is not recorded".to_owned()),
        (_, known) => {
            *recording = known;
            Err("the command is not known; it is of another version of gpumem".to_owned())
        }
    };
    done.map_or_else(|why| why, |file| format!("{}{}", variable::DONE, file.display()))
}
