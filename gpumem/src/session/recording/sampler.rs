//! The one thread that polls the devices of sampled scopes.
//!
//! It starts with the first sampled scope and polls only the devices that some scope watches. When the last one closes
//! it parks, and leaves after [`LINGER`] without work: a guard in a loop then costs two readings, not the start and the
//! end of a thread each time round.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crossbeam_channel::{self as channel, Receiver, RecvTimeoutError, Sender};

use crate::session::Session;
use crate::{
    error::{Error, Kind, Result},
    model::{Device, EventKind, Gauge},
    source::Devices,
    sys::process,
};

/// How long the thread stays with nothing to watch.
const LINGER: Duration = Duration::from_millis(200);

/// How long the end of the process waits for a reading that is under way.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(in crate::session) struct Sampler {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    watched: Vec<Watched>,
    thread: Thread,
    /// The end of the process stops the thread.
    ends: bool,
    /// The process ends: no more threads.
    over: bool,
}

#[derive(Default)]
enum Thread {
    #[default]
    None,
    Running {
        parked: bool,
        /// A message ends the thread's wait; hanging up ends the thread.
        wake: Sender<()>,
        ended: Receiver<()>,
        handle: JoinHandle<()>,
    },
    /// It ended by itself and is not joined yet.
    Ended(JoinHandle<()>),
}

#[derive(Clone, Copy)]
struct Watched {
    device: Device,
    devices: &'static dyn Devices,
    scopes: usize,
}

impl Sampler {
    /// Polls the device from now on, at least until [`unwatch`](Self::unwatch) is called as often.
    pub(in crate::session) fn watch(
        &self,
        session: &'static Session,
        device: Device,
        devices: &'static dyn Devices,
    ) -> Result<()> {
        let mut state = self.state();
        if let Thread::Running { parked, wake, .. } = &mut state.thread {
            if mem::take(parked) {
                // The channel holds one message, and one that waits there will do.
                let _ = wake.try_send(());
            }
        } else if !state.over {
            // What the thread calls has begun by now: who starts it has read the device.
            if !mem::replace(&mut state.ends, true) {
                process::at_exit(crate::session::exit::stop_sampling);
            }
            let running = start(session)?;
            if let Thread::Ended(handle) = mem::replace(&mut state.thread, running) {
                let _ = handle.join();
            }
        }
        match state.watched.iter_mut().find(|watched| watched.device == device) {
            Some(watched) => watched.scopes += 1,
            None => state.watched.push(Watched { device, devices, scopes: 1 }),
        }
        Ok(())
    }

    /// One scope less watches the device.
    pub(in crate::session) fn unwatch(&self, device: Device) {
        if process::is_forked() {
            return;
        }
        let mut state = self.state();
        if let Some(watched) = state.watched.iter_mut().find(|watched| watched.device == device) {
            watched.scopes -= 1;
        }
        state.watched.retain(|watched| watched.scopes > 0);
    }

    /// Ends the thread, for good.
    pub(in crate::session) fn stop(&self) {
        let thread = {
            let mut state = self.state();
            state.over = true;
            mem::take(&mut state.thread)
        };
        match thread {
            Thread::None => {}
            Thread::Running { wake, ended, handle, .. } => {
                drop(wake);
                // Not for ever: a driver call may hang, and a process that wants to end must.
                if matches!(ended.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected)) {
                    let _ = handle.join();
                }
            }
            Thread::Ended(handle) => {
                let _ = handle.join();
            }
        }
    }

    /// What to poll; none if the thread is to park.
    fn targets(&self) -> Vec<Watched> {
        let mut state = self.state();
        let none = state.watched.is_empty();
        if let Thread::Running { parked, .. } = &mut state.thread {
            *parked = none;
        }
        state.watched.clone()
    }

    /// Whether the thread, after lingering, may leave.
    fn leave(&self) -> bool {
        let mut state = self.state();
        if !state.watched.is_empty() {
            return false;
        }
        if let Thread::Running { handle, .. } = mem::take(&mut state.thread) {
            state.thread = Thread::Ended(handle);
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start(session: &'static Session) -> Result<Thread> {
    let (wake, woken) = channel::bounded(1);
    let (ending, ended) = channel::bounded(0);
    let body = move || {
        run(session, &woken);
        drop(ending);
    };
    let handle = thread::Builder::new()
        .name("gpumem-sampler".to_owned())
        .spawn(body)
        .map_err(|error| Error::from(Kind::NoThread { detail: error.to_string() }).because(error))?;
    Ok(Thread::Running { parked: false, wake, ended, handle })
}

fn run(session: &'static Session, woken: &Receiver<()>) {
    let mut due = Instant::now() + session.settings.sample_every;
    loop {
        let targets = session.sampler.targets();
        let until = if targets.is_empty() { Instant::now() + LINGER } else { due };
        match woken.recv_deadline(until) {
            Ok(()) => due = Instant::now() + session.settings.sample_every,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) if targets.is_empty() => {
                if session.sampler.leave() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                for Watched { device, devices, .. } in targets {
                    session.readings.post(&session.inbox, device, || reading(session, device, devices));
                }
                // A reading that took longer than the interval is not made up for.
                due = (due + session.settings.sample_every).max(Instant::now());
            }
        }
    }
}

/// One reading as a fact, also where it failed.
pub(in crate::session) fn reading(session: &Session, device: Device, devices: &dyn Devices) -> EventKind {
    match devices.read(device.ordinal) {
        Ok(memory) => EventKind::Sample { device, memory },
        Err(error) => {
            session.notify_stale(device, &error);
            EventKind::ReadFailed { device, gauge: Gauge::Sampled }
        }
    }
}
