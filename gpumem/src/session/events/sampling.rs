//! The thread that polls the devices of sampled scopes.
//!
//! The thread starts with the first sampled scope, and reads only devices with open sampled scopes. When the last one closes, the
//! thread waits, and ends after [`IDLE_TIME`] without work. Therefore a guard in a loop costs two readings per iteration, and does
//! not start a thread each time.

use std::{
    mem,
    time::{Duration, Instant},
};

use crossbeam_channel::{self as channel, Receiver, RecvTimeoutError};

use super::sampler::{PolledDevice, SamplerThread};
use crate::{
    error::{Error, Result},
    model::{Device, EventKind, Gauge},
    own_threads, process,
    session::{Session, exit},
    source::Devices,
};

/// The time after which an idle thread ends.
const IDLE_TIME: Duration = Duration::from_millis(200);

impl Session {
    /// Polls the device for one more scope, until [`remove_scope`](super::Sampler::remove_scope) is called for it.
    pub(super) fn sample(&'static self, device: Device, devices: &'static dyn Devices) -> Result<()> {
        let mut state = self.sampler.state();
        if let SamplerThread::Running { is_idle, wake, .. } = &mut state.thread {
            if mem::take(is_idle) {
                // The channel has room for one message. If it is full, the thread will wake anyway.
                let _ = wake.try_send(());
            }
        } else if !state.is_stopped {
            // The caller has read the device, so the libraries that the thread calls are loaded. Exit handlers run in reverse order:
            // this one runs before the libraries' handlers.
            if !mem::replace(&mut state.has_exit_handler, true) {
                process::at_exit(exit::stop_sampling);
            }
            let running = start(self)?;
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
}

fn start(session: &'static Session) -> Result<SamplerThread> {
    let (wake, woken) = channel::bounded(1);
    let (ending, ended) = channel::bounded(0);
    let body = move || {
        run(session, &woken);
        drop(ending);
    };
    let handle = own_threads::spawn("sampler", body).map_err(Error::no_thread)?;
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
                let started = Instant::now();
                for PolledDevice { device, devices, .. } in targets {
                    session.readings.post(&session.inbox, device, || reading(session, device, devices));
                }
                // If a reading takes longer than the interval, the missed readings are skipped. A slow library is not called back to
                // back: it may hold a lock, and other threads would never get it.
                due = (due + session.settings.sample_every).max(Instant::now() + started.elapsed() / 10);
            }
        }
    }
}

/// Returns one reading as an event, or its failure.
pub(in crate::session) fn reading(session: &Session, device: Device, devices: &dyn Devices) -> EventKind {
    match devices.read(device.ordinal) {
        Ok(memory) => EventKind::Sample { device, memory },
        Err(error) => {
            session.notify_stale(device, &error);
            EventKind::ReadFailed { device, gauge: Gauge::Sampled }
        }
    }
}
