//! The devices that are polled, and the thread that polls them.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::Duration,
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::{model::Device, process, source::Devices};

/// The longest wait at exit for a reading in progress.
const EXIT_WAIT: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(in crate::session) struct Sampler {
    state: Mutex<SamplerState>,
}

#[derive(Default)]
pub(super) struct SamplerState {
    pub(super) polled: Vec<PolledDevice>,
    pub(super) thread: SamplerThread,
    /// True if the exit handler that stops the thread is registered.
    pub(super) has_exit_handler: bool,
    /// True if the process is exiting, so that no thread may start.
    pub(super) is_stopped: bool,
}

#[derive(Default)]
pub(super) enum SamplerThread {
    #[default]
    None,
    Running {
        is_idle: bool,
        /// A message wakes the thread. Dropping the sender ends it.
        wake: Sender<()>,
        ended: Receiver<()>,
        handle: JoinHandle<()>,
    },
    /// The thread has ended and is not joined yet.
    Ended(JoinHandle<()>),
}

#[derive(Clone, Copy)]
pub(super) struct PolledDevice {
    pub(super) device: Device,
    pub(super) devices: &'static dyn Devices,
    /// The number of open scopes that need its readings.
    pub(super) scopes: usize,
}

impl Sampler {
    /// Notes that a sampled scope of the device has closed.
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

    /// Ends the thread for good.
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
                // The wait has a time limit, because a driver call that hangs must not keep the process from exiting.
                if matches!(ended.recv_timeout(EXIT_WAIT), Err(RecvTimeoutError::Disconnected)) {
                    let _ = handle.join();
                }
            }
            SamplerThread::Ended(handle) => {
                let _ = handle.join();
            }
        }
    }

    /// Returns the devices to poll. If there are none, marks the thread as idle.
    pub(super) fn targets(&self) -> Vec<PolledDevice> {
        let mut state = self.state();
        let is_empty = state.polled.is_empty();
        if let SamplerThread::Running { is_idle, .. } = &mut state.thread {
            *is_idle = is_empty;
        }
        state.polled.clone()
    }

    /// Marks the idle thread as ended and returns true, unless a sampled scope has opened since.
    pub(super) fn may_end(&self) -> bool {
        let mut state = self.state();
        if !state.polled.is_empty() {
            return false;
        }
        if let SamplerThread::Running { handle, .. } = mem::take(&mut state.thread) {
            state.thread = SamplerThread::Ended(handle);
        }
        true
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SamplerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
