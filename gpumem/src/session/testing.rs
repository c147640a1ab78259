//! Sessions for tests: each has its own simulated devices, settings and tables, so that tests can share a process.

use super::{OVERRIDE, Session, events::label_block, output::oom};
use crate::{
    error::Result,
    model::{Block, Bytes, Device, EventKind, MemKind, StackId},
    settings::Settings,
    source::{
        self,
        sim::{RecordSimulated, SimDevices, SimGpu},
    },
};

/// Simulated devices with separate traces, settings and reports, for a test that runs in parallel with others. Its memory is never
/// freed, because guards refer to it for as long as the process runs.
pub(crate) struct TestSession {
    session: &'static Session,
    devices: &'static SimDevices,
}

impl TestSession {
    /// Creates a session with only these environment variables. `GPUMEM_SIM` adds devices.
    pub(crate) fn new(variables: &[(&str, &str)]) -> Result<Self> {
        source::ask_for_each_trace();
        source::label_with(label_block);
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        let settings: &'static Settings = Box::leak(Box::new(Settings::read(value)));
        let session: &'static Session = Box::leak(Box::new(Session::new(settings)));
        let devices: &'static SimDevices = Box::leak(Box::new(SimDevices::new(session)));
        let _ = session.devices.set(devices);
        for total in settings.sim()? {
            devices.add(*total)?;
        }
        Ok(Self { session, devices })
    }

    /// Adds a device.
    pub(crate) fn add(&self, total: Bytes) -> Result<SimGpu> {
        self.devices.add(total)
    }

    /// Runs `code` in this session. Other sessions do not observe what `code` does on this thread.
    pub(crate) fn run<R>(&self, code: impl FnOnce() -> R) -> R {
        struct RestoreSession(Option<&'static Session>);

        impl Drop for RestoreSession {
            fn drop(&mut self) {
                OVERRIDE.set(self.0);
            }
        }

        let _restore = RestoreSession(OVERRIDE.replace(Some(self.session)));
        code()
    }
}

#[cfg(feature = "capture")]
impl TestSession {
    /// Ends the recording of `GPUMEM_CAPTURE`, as the exit of a process does.
    pub(crate) fn end_recording(&self) {
        self.session.end_recording();
    }
}

impl RecordSimulated for Session {
    fn record(&self, event: &EventKind) {
        if self.is_started() {
            self.inbox.post(event);
        }
    }

    fn stack_for(&self, bytes: u64) -> StackId {
        if bytes < source::min_bytes_of(self.settings) { StackId::NONE } else { self.stack_here() }
    }

    fn rejected(&'static self, device: Device, bytes: Bytes, kind: MemKind) {
        if self.is_started() {
            oom::rejected(self, Some(device), bytes, kind);
        }
    }

    fn allocated(&self, block: &Block) {
        if source::is_watched() {
            oom::obtained(self, block.device, block.bytes);
        }
    }
}
