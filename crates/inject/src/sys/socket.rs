//! The socket at which commands come in.

use std::{
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    mem::{forget, replace},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::sleep,
    time::Duration,
};

use gpumem_driver::{beside::run_with_own_descriptors, descriptor};

/// The longest wait for a command that connects and sends nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// The interval at which a thread looks whether the program has ended or has closed the socket.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A command, and the way back for its answer.
pub(crate) type Command = (String, Sender<String>);

/// Returns the commands that will come in at this socket. A thread has the socket in a table of descriptors of its own: the program can neither
/// close it nor get a connection of it.
pub(crate) fn commands(socket: &Path) -> io::Result<Receiver<Command>> {
    let (commands, received) = channel();
    let (bound, is_bound) = sync_channel(1);
    let path = socket.to_owned();
    let serve = move |has_own_table| serve(&path, has_own_table, &bound, &commands);
    // SAFETY: `serve` opens the socket and its connections itself. It gets a path and channels, and sends only text and errors to other threads.
    #[expect(unsafe_code, reason = "the thread has a table of descriptors of its own")]
    unsafe {
        run_with_own_descriptors("gpumem-control", serve)?;
    }
    is_bound.recv().unwrap_or_else(|_| Err(ErrorKind::BrokenPipe.into()))?;
    Ok(received)
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
