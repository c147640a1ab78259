//! The socket that receives commands.

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

use gpumem_driver::{descriptor, own_threads::spawn_with_own_descriptors};

/// The maximum wait for a process that connects but sends nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// The interval at which a thread checks whether the program has ended or has closed the socket.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A command, and the channel for its answer.
pub(crate) type Command = (String, Sender<String>);

/// Returns the commands that arrive at this socket. A separate thread keeps the socket in its own descriptor table, so the program can
/// neither close the socket nor receive one of its connections.
pub(crate) fn commands(socket: &Path) -> io::Result<Receiver<Command>> {
    let (commands, received) = channel();
    let (bound, is_bound) = sync_channel(1);
    let path = socket.to_owned();
    let serve = move |has_own_table| serve(&path, has_own_table, &bound, &commands);
    // SAFETY: `serve` opens the socket and its connections itself. It gets a path and channels, and sends only text and errors to other
    // threads.
    #[expect(unsafe_code, reason = "the thread has a table of descriptors of its own")]
    unsafe {
        spawn_with_own_descriptors("control", serve)?;
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
        // Only older kernels need this check. The program may still close the socket between this line and the next one; the accepted
        // connection would then belong to the program.
        let is_own = || listener.local_addr().is_ok_and(|address| address.as_pathname() == Some(socket));
        if !has_own_table && !is_own() {
            // The program has closed all descriptors that it does not know. Its own socket may have the same number now.
            let Ok(again) = bind(socket) else { return };
            forget(replace(&mut listener, again));
        }
        match listener.accept() {
            // An error is ignored, because the command may have closed the connection.
            Ok((stream, _)) => _ = converse(&with_high_number(stream.into()).into(), commands),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // The descriptor was closed, or no number is free.
            Err(_) => sleep(LOOK_EVERY),
        }
    }
}

/// Returns the same file or socket under a number that the program is unlikely to use.
fn with_high_number(descriptor: OwnedFd) -> OwnedFd {
    descriptor::with_high_number(descriptor.into()).into()
}

/// Returns a listener whose `accept` returns after [`LOOK_EVERY`].
fn bind(socket: &Path) -> io::Result<UnixListener> {
    // An earlier process with the same id may have left a socket, or an earlier program in this process that called `exec`.
    _ = fs::remove_file(socket);
    let listener = UnixStream::from(with_high_number(UnixListener::bind(socket)?.into()));
    listener.set_read_timeout(Some(LOOK_EVERY))?;
    Ok(UnixListener::from(OwnedFd::from(listener)))
}

/// Passes one command to the other thread, and sends the answer back.
fn converse(mut stream: &UnixStream, commands: &Sender<Command>) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut command = String::new();
    BufReader::new(stream.take(64)).read_line(&mut command)?;
    let (answer, answered) = channel();
    let is_sent = commands.send((command, answer)).is_ok();
    let text = answered.recv().ok().filter(|_| is_sent);
    stream.write_all(text.as_deref().unwrap_or("gpumem's library has ended").as_bytes())
}
