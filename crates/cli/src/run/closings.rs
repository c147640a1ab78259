//! The times at which the recordings of a run were closed. The kernel closes the files of a process that ends, so this is also the end of a
//! process that could not write it, such as a killed one.

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, UNIX_EPOCH},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::inotify,
    io::retry_on_intr,
};

#[derive(Debug)]
pub(super) struct Closings {
    events: OwnedFd,
    /// How the names of the recordings start.
    start: OsString,
    /// The last time at which each file was closed, since 1970.
    last: Mutex<HashMap<OsString, Duration>>,
}

impl Closings {
    /// Watches the folder of the recordings until this process ends. `file` is the file of the run.
    ///
    /// # Errors
    /// Returns an error if the kernel does not allow one more watch.
    pub(super) fn watch(file: &Path) -> io::Result<Arc<Self>> {
        let events = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&events, file.parent().unwrap_or(Path::new(".")), inotify::WatchFlags::CLOSE_WRITE)?;
        let start = file.file_stem().unwrap_or_default().to_owned();
        let closings = Arc::new(Self { events, start, last: Mutex::default() });
        let noted = Arc::clone(&closings);
        let wait = move || while noted.wait().is_ok() {};
        thread::Builder::new().name("gpumem-closings".to_owned()).spawn(wait)?;
        Ok(closings)
    }

    fn wait(&self) -> io::Result<()> {
        retry_on_intr(|| poll(&mut [PollFd::new(&self.events, PollFlags::IN)], None))?;
        self.note();
        Ok(())
    }

    /// Notes the time of the events that the kernel has queued.
    fn note(&self) {
        // The lock is held while events are read, so that no event is missing when `of` looks a time up.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&self.events, &mut buffer);
        while let Ok(event) = events.next() {
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            if let Some(name) = name.filter(|name| name.as_bytes().starts_with(self.start.as_bytes())) {
                last.insert(name.to_owned(), UNIX_EPOCH.elapsed().unwrap_or_default());
            }
        }
    }

    /// Returns when a recording was closed for the last time, since 1970.
    pub(super) fn of(&self, recording: &Path) -> Option<Duration> {
        self.note();
        self.last.lock().unwrap_or_else(PoisonError::into_inner).get(recording.file_name()?).copied()
    }
}
