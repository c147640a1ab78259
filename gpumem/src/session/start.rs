//! Starts a session: the sources record into it, and its devices are queried for the first time.

use super::{Notice, Session, alive, events, exit};
use crate::{
    error::Result,
    model::Family,
    process,
    source::{self, Devices},
};

impl Session {
    /// Starts the session and returns it. The sources of its devices then record into it.
    pub(super) fn ensure_started(&'static self) -> &'static Self {
        self.started.get_or_init(|| {
            #[cfg(feature = "capture")]
            self.start_recording();
            // The devices of any other session record into it without this call.
            if self.devices.get().is_none() {
                events::record_process(self.settings);
                process::at_exit(exit::at_exit);
            }
        });
        self
    }

    /// Returns the devices of the session. If they are simulated, the first use prints a notice.
    pub(crate) fn devices(&self) -> Result<&'static dyn Devices> {
        alive()?;
        process::notice_forks();
        self.settings();
        let devices = self.devices.get().map_or_else(source::devices, |own| Ok(*own))?;
        if devices.family() == Family::Simulated {
            let text = "the numbers come from a simulated GPU (GPUMEM_SIM or SimGpu::install), not from a real one";
            self.notify(Notice::Simulated, &text);
        } else if let Some((cards, _)) = source::replaced_cards().filter(|_| !self.settings.is_foreign) {
            self.notify(Notice::Simulated, &format_args!("the program does not see the real GPU: {cards}"));
        }
        Ok(devices)
    }

    /// Returns whether no device can be measured while the process runs. The first answer of the driver is stored.
    pub(super) fn is_without_devices(&self) -> bool {
        self.devices().and_then(|devices| devices.check(0)).is_err_and(|error| error.is_unavailable())
    }
}
