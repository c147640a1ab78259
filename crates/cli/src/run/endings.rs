//! Messages in which `gpumem run` informs each `gpumem export` of this machine about the recordings that it has
//! completed. An exporter looks at processes about once a second, and does not see a program that starts and ends in
//! between.
//!
//! An exporter listens on an abstract socket. `gpumem run` finds those sockets in `/proc`, connects, and sends the paths
//! separated by NUL.

use std::{fs, io, os::unix::ffi::OsStrExt, path::PathBuf, time::Duration};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with};

const NAME: &str = "gpumem-export-";

/// Exporters have already found the process of an older recording.
const LATEST: Duration = Duration::from_secs(60);

/// Tells all exporters about the recordings of a run that has ended. An exporter that does not accept the message at
/// once does not get it.
pub(super) fn notify(recordings: &[PathBuf]) {
    let is_new = |path: &&PathBuf| {
        // Some file systems do not know when a file was created.
        let created = path.metadata().and_then(|known| known.created().or_else(|_| known.modified()));
        created.is_ok_and(|created| created.elapsed().is_ok_and(|age| age < LATEST))
    };
    let paths: Vec<_> = recordings.iter().filter(is_new).map(|path| path.as_os_str().as_bytes()).collect();
    if paths.is_empty() {
        return;
    }
    let message = paths.join(&0);
    for name in exporters() {
        // The exporter may have ended since, or be stopped.
        _ = notify_one(&name, &message);
    }
}

/// Returns the names of the sockets on which exporters listen.
fn exporters() -> Vec<String> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = sockets.lines().filter_map(|line| line.rsplit(' ').next()?.strip_prefix('@'));
    let mut names: Vec<_> = names.filter(|name| name.starts_with(NAME)).map(str::to_owned).collect();
    names.sort_unstable();
    // An accepted connection has the name of its listener.
    names.dedup();
    names
}

fn notify_one(name: &str, message: &[u8]) -> io::Result<()> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    send(&socket, message, rustix::net::SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(feature = "export")]
mod listen {
    use std::{
        ffi::OsStr,
        io::Read,
        os::{
            linux::net::SocketAddrExt,
            unix::{
                fs::MetadataExt,
                net::{SocketAddr, UnixListener, UnixStream},
            },
        },
        path::Path,
        process, thread,
        time::Instant,
    };

    use gpumem_recording::FileStart;

    use super::{Duration, NAME, OsStrExt, PathBuf, io};
    use crate::{files::open_to_read, machine};

    /// A message is at most this long, and must arrive within this time.
    const LONGEST: usize = 1 << 20;
    const PATIENCE: Duration = Duration::from_secs(1);

    /// A recording whose run has ended.
    #[derive(Debug)]
    pub(crate) struct Ending {
        pub(crate) path: PathBuf,
        /// The id of the recording.
        pub(crate) recording: u64,
        pub(crate) pid: u32,
    }

    /// Calls `take` on a thread for each recording that a `gpumem run` of this user has completed; for root, of any
    /// user.
    pub(crate) fn listen(take: impl Fn(Ending) + Send + 'static) -> io::Result<()> {
        let own = process::id();
        // Containers may share the network and have processes of the same id.
        let name = format!("{NAME}{own}-{}", machine::start_time(own).unwrap_or_default());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
        let serve = move || {
            for stream in listener.incoming().flatten() {
                endings(&stream).unwrap_or_default().into_iter().for_each(&take);
            }
        };
        thread::Builder::new().name("gpumem-endings".to_owned()).spawn(serve).map(drop)
    }

    fn endings(stream: &UnixStream) -> io::Result<Vec<Ending>> {
        let (own, from) = (rustix::process::geteuid(), rustix::net::sockopt::socket_peercred(stream)?.uid);
        if !own.is_root() && own != from {
            return Ok(Vec::new());
        }
        let message = message(stream)?;
        let paths = message.split(|byte| *byte == 0).map(|path| Path::new(OsStr::from_bytes(path)));
        // No user can make an exporter of root read a file of another user.
        let ending = |path: &Path| {
            let file = open_to_read(path).ok()?;
            let FileStart { recording, pid, .. } = FileStart::read(&file)
                .ok()
                .filter(|_| from.is_root() || file.metadata().is_ok_and(|of| of.uid() == from.as_raw()))?;
            Some(Ending { path: path.to_owned(), recording: recording?, pid })
        };
        Ok(paths.filter_map(ending).collect())
    }

    /// Reads up to the end. A sender that is too slow delays the messages of others by `PATIENCE`.
    fn message(mut stream: &UnixStream) -> io::Result<Vec<u8>> {
        let (until, mut message, mut part) = (Instant::now() + PATIENCE, Vec::new(), vec![0; 1 << 16]);
        while message.len() < LONGEST {
            // A time of 0 would be no limit.
            let rest = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            stream.set_read_timeout(Some(rest))?;
            match stream.read(&mut part)? {
                0 => break,
                read => message.extend(&part[..read]),
            }
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(message)
    }
}

#[cfg(feature = "export")]
pub(crate) use listen::{Ending, listen};
