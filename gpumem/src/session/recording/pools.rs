//! The high-water marks of stream-ordered pools. The driver keeps one for each pool and not for each trace, so each reading is
//! folded into all open traces of the device, and the mark begins anew with each new one.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::session::{Inbox, Notice, Session};
use crate::{
    error::Result,
    model::{Bytes, Device, EventKind, Gauge, PoolUsage, Trace},
    source::Devices,
};

/// Locked from the reading until its event is posted: readings reach the inbox in the order in which the marks were read and reset.
#[derive(Debug, Default)]
pub(in crate::session) struct Pools(Mutex<Vec<Watched>>);

/// The pool of a device that open scopes watch.
#[derive(Debug)]
struct Watched {
    device: Device,
    scopes: usize,
    /// Which one it was at the newest reading, by the driver's name.
    pool: u64,
    /// What its mark has been since then, at least.
    least: Bytes,
}

impl Pools {
    /// Posts a scope that opens, and has the mark begin anew for it.
    pub(in crate::session) fn open(
        &self,
        session: &Session,
        device: Device,
        devices: &dyn Devices,
        open: &EventKind,
    ) -> Result<()> {
        let inbox = &session.inbox;
        let mut pools = self.lock();
        let usage = devices.reset_pool(device.ordinal)?;
        let reset_by_others = if let Some(watched) = pools.iter_mut().find(|watched| watched.device == device) {
            watched.scopes += 1;
            watched.take(inbox, &usage, true)
        } else {
            pools.push(Watched { device, scopes: 1, pool: usage.pool, least: usage.used });
            false
        };
        inbox.ask(Some(&EventKind::PoolUsage { device, usage }), open);
        drop(pools);
        notify(session, device, reset_by_others);
        Ok(())
    }

    /// Asks an open scope what it has come to, after a reading. A reset has the mark begin anew.
    pub(in crate::session) fn ask(
        &self,
        session: &Session,
        device: Device,
        devices: &dyn Devices,
        query: &EventKind,
    ) -> Option<Trace> {
        let inbox = &session.inbox;
        let mut pools = self.lock();
        let reset = matches!(query, EventKind::Reset { .. });
        let usage = if reset { devices.reset_pool(device.ordinal) } else { devices.read_pool(device.ordinal) };
        let watched = pools.iter_mut().find(|watched| watched.device == device);
        let (reading, reset_by_others) = match &usage {
            Ok(usage) => {
                let reset_by_others = watched.is_some_and(|watched| watched.take(inbox, usage, reset));
                (EventKind::PoolUsage { device, usage: *usage }, reset_by_others)
            }
            Err(_) => (EventKind::ReadFailed { device, gauge: Gauge::Pool }, false),
        };
        let trace = inbox.ask(Some(&reading), query);
        if matches!(query, EventKind::Close { .. }) {
            pools.retain_mut(|watched| {
                watched.scopes -= usize::from(watched.device == device);
                watched.scopes > 0
            });
        }
        drop(pools);
        notify(session, device, reset_by_others);
        if let Err(error) = usage {
            session.notify_stale(device, &error);
        }
        trace
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    /// Remembers a reading; `true` if the mark is lower than it can be, or of another pool: a peak may have gone with it, and
    /// the scopes that are open are told so.
    fn take(&mut self, inbox: &Inbox, usage: &PoolUsage, reset: bool) -> bool {
        let reset_by_others = usage.pool != self.pool || usage.used_high < self.least;
        if reset_by_others {
            inbox.post(&EventKind::PoolMarkDisturbed { device: self.device });
        }
        self.pool = usage.pool;
        self.least = if reset { usage.used } else { usage.used_high.max(usage.used) };
        reset_by_others
    }
}

fn notify(session: &Session, device: Device, reset_by_others: bool) {
    if reset_by_others {
        let text = format_args!(
            "the high-water mark of {device}'s pool was reset by others, or another pool was made current: peaks before that \
             are missed; leave both to gpumem, or use GPUMEM_GAUGE=exact"
        );
        session.notify(Notice::PoolReset, &text);
    }
}
