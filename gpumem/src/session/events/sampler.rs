//! The thread that polls the devices of sampled scopes.
//!
//! It starts with the first sampled scope, and reads only devices with open sampled scopes. When the last of these scopes closes,
//! the thread waits, and ends after [`IDLE_TIME`] without work. So a guard in a loop costs two readings, and not the start and end
//! of a thread in each iteration.

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
    process,
    source::Devices,
};

/// How long the thread waits without a device to poll before it ends.
const IDLE_TIME: Duration = Duration::from_millis(200);

/// How long the end of the process waits for a reading that has begun.
const EXIT_WAIT: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(in crate::session) struct Sampler {
    state: Mutex<SamplerState>,
}

#[derive(Default)]
struct SamplerState {
    polled: Vec<PolledDevice>,
    thread: SamplerThread,
    /// The exit handler that stops the thread is registered.
    has_exit_handler: bool,
    /// The process ends: no thread starts any more.
    is_stopped: bool,
}

#[derive(Default)]
enum SamplerThread {
    #[default]
    None,
    Running {
        is_idle: bool,
        /// A message wakes the thread. Dropping the sender ends it.
        wake: Sender<()>,
        ended: Receiver<()>,
        handle: JoinHandle<()>,
    },
    /// It has ended, and is not joined yet.
    Ended(JoinHandle<()>),
}

#[derive(Clone, Copy)]
struct PolledDevice {
    device: Device,
    devices: &'static dyn Devices,
    /// How many open scopes need its readings.
    scopes: usize,
}

impl Sampler {
    /// Polls the device for one more scope, until [`remove_scope`](Self::remove_scope) is called for it.
    pub(in crate::session) fn add_scope(
        &self,
        session: &'static Session,
        device: Device,
        devices: &'static dyn Devices,
    ) -> Result<()> {
        let mut state = self.state();
        if let SamplerThread::Running { is_idle, wake, .. } = &mut state.thread {
            if mem::take(is_idle) {
                // The channel has room for one message. If it is full, the thread will wake anyway.
                let _ = wake.try_send(());
            }
        } else if !state.is_stopped {
            // The caller has read the device, so the libraries that the thread calls are loaded. Exit handlers run in reverse order:
            // this one runs before those of the libraries.
            if !mem::replace(&mut state.has_exit_handler, true) {
                process::at_exit(crate::session::exit::stop_sampling);
            }
            let running = start(session)?;
            if let SamplerThread::Ended(handle) = mem::replace(&mut state.thread, running) {
                let _ = handle.join();
            }
        }
        match state.polled.iter_mut().find(|polled| polled.device == device) {
            Some(polled) => polled.scopes += 1,
            None => state.polled.push(PolledDevice { device, devices, scopes: 1 }),
        }
        Ok(())
    }

    /// A sampled scope of the device has closed.
    pub(in crate::session) fn remove_scope(&self, device: Device) {
        if process::is_forked() {
            return;
        }
        let mut state = self.state();
        if let Some(polled) = state.polled.iter_mut().find(|polled| polled.device == device) {
            polled.scopes -= 1;
        }
        state.polled.retain(|polled| polled.scopes > 0);
    }

    /// Ends the thread. It does not start again.
    pub(in crate::session) fn stop(&self) {
        let thread = {
            let mut state = self.state();
            state.is_stopped = true;
            mem::take(&mut state.thread)
        };
        match thread {
            SamplerThread::None => {}
            SamplerThread::Running { wake, ended, handle, .. } => {
                drop(wake);
                // With a time limit: a driver call may hang, and must not keep the process from ending.
                if matches!(ended.recv_timeout(EXIT_WAIT), Err(RecvTimeoutError::Disconnected)) {
                    let _ = handle.join();
                }
            }
            SamplerThread::Ended(handle) => {
                let _ = handle.join();
            }
        }
    }

    /// The devices to poll. If there are none, the thread is idle from now on.
    fn targets(&self) -> Vec<PolledDevice> {
        let mut state = self.state();
        let is_empty = state.polled.is_empty();
        if let SamplerThread::Running { is_idle, .. } = &mut state.thread {
            *is_idle = is_empty;
        }
        state.polled.clone()
    }

    /// Whether the idle thread may end: no scope has opened meanwhile.
    fn may_end(&self) -> bool {
        let mut state = self.state();
        if !state.polled.is_empty() {
            return false;
        }
        if let SamplerThread::Running { handle, .. } = mem::take(&mut state.thread) {
            state.thread = SamplerThread::Ended(handle);
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, SamplerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start(session: &'static Session) -> Result<SamplerThread> {
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
    Ok(SamplerThread::Running { is_idle: false, wake, ended, handle })
}

fn run(session: &'static Session, woken: &Receiver<()>) {
    let mut due = Instant::now() + session.settings.sample_every;
    loop {
        let targets = session.sampler.targets();
        let until = if targets.is_empty() { Instant::now() + IDLE_TIME } else { due };
        match woken.recv_deadline(until) {
            Ok(()) => due = Instant::now() + session.settings.sample_every,
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) if targets.is_empty() => {
                if session.sampler.may_end() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                for PolledDevice { device, devices, .. } in targets {
                    session.readings.post(&session.inbox, device, || reading(session, device, devices));
                }
                // If a reading takes longer than the interval, the missed readings are skipped.
                due = (due + session.settings.sample_every).max(Instant::now());
            }
        }
    }
}

/// One reading as an event, also if it failed.
pub(in crate::session) fn reading(session: &Session, device: Device, devices: &dyn Devices) -> EventKind {
    match devices.read(device.ordinal) {
        Ok(memory) => EventKind::Sample { device, memory },
        Err(error) => {
            session.notify_stale(device, &error);
            EventKind::ReadFailed { device, gauge: Gauge::Sampled }
        }
    }
}
