//! The high-water marks of stream-ordered pools. The driver keeps one mark for each pool, and not one for each trace. So each
//! reading is applied to all open traces of the device, and the mark is reset when a trace opens.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::session::{Inbox, Notice, Session};
use crate::{
    error::Result,
    model::{Bytes, Device, EventKind, Gauge, PoolUsage, Trace},
    source::Devices,
};

/// Locked from the reading until its event is recorded, so that events have the order in which the marks were read and reset.
#[derive(Debug, Default)]
pub(in crate::session) struct Pools(Mutex<Vec<WatchedPool>>);

/// The pool of a device with open scopes.
#[derive(Debug)]
struct WatchedPool {
    device: Device,
    scopes: usize,
    /// The driver's handle of the pool that was current at the newest reading.
    pool: u64,
    /// The mark has been at least this high since then.
    least: Bytes,
}

impl Pools {
    /// Records that a scope opens, and resets the mark for it.
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
            watched.record(inbox, &usage, true)
        } else {
            pools.push(WatchedPool { device, scopes: 1, pool: usage.pool, least: usage.used });
            false
        };
        inbox.ask(Some(&EventKind::PoolUsage { device, usage }), open);
        drop(pools);
        notify(session, device, reset_by_others);
        Ok(())
    }

    /// Reads the pool, then the figures of an open scope. A query that resets the scope also resets the mark.
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
                let reset_by_others = watched.is_some_and(|watched| watched.record(inbox, usage, reset));
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

    fn lock(&self) -> MutexGuard<'_, Vec<WatchedPool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedPool {
    /// Stores a reading. If the mark is lower than `least`, or belongs to another pool, a peak may be missed: records an event that
    /// marks the open scopes, and returns `true`.
    fn record(&mut self, inbox: &Inbox, usage: &PoolUsage, reset: bool) -> bool {
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
            "the high-water mark of {device}'s pool was reset by other code, or another pool was made current: peaks before \
             that are missed; let only gpumem do either, or use GPUMEM_GAUGE=exact"
        );
        session.notify(Notice::PoolReset, &text);
    }
}
