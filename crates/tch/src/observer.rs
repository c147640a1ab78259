//! Observes PyTorch's allocator with one tracker per device.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::{
    Error, Result, sys,
    tracker::{Event, Held, Tracker},
};
use gpumem::{pool::Pool, scope::Threads};

/// The name of the pools.
const NAME: &str = "PyTorch";

static TRACKERS: OnceLock<Vec<Tracker>> = OnceLock::new();
/// True if PyTorch passes its events to us.
static IS_ATTACHED: Mutex<bool> = Mutex::new(false);

pub(crate) fn observe() -> Result<()> {
    let mut is_attached = IS_ATTACHED.lock().unwrap_or_else(PoisonError::into_inner);
    let trackers = match TRACKERS.get() {
        Some(trackers) => trackers,
        None => {
            let new = new_trackers()?;
            TRACKERS.get_or_init(|| new)
        }
    };
    trackers.iter().for_each(Tracker::start);
    let result = attach(&mut is_attached).and_then(|()| settle(trackers));
    result.inspect_err(|_| trackers.iter().for_each(Tracker::stop))
}

fn attach(is_attached: &mut bool) -> Result<()> {
    if !*is_attached {
        sys::attach()?;
        *is_attached = true;
        gpumem::scope::adopt(Threads::named("pt_autograd_"));
    }
    Ok(())
}

fn new_trackers() -> Result<Vec<Tracker>> {
    let (devices, is_native) = sys::init()?;
    if devices == 0 {
        return Err(Error::NoCuda);
    }
    if !is_native {
        return Err(Error::OtherAllocator);
    }
    let settings = sys::snapshot()?.settings;
    Ok((0..devices).map(|_| Tracker::new(settings.clone())).collect())
}

/// Starts the trackers so that no tensor is lost or counted twice: later tensors have an event, and the trackers add the others.
fn settle(trackers: &[Tracker]) -> Result<()> {
    loop {
        let segment_events: Vec<_> = trackers.iter().map(Tracker::segment_events).collect();
        if segment_events.iter().all(Option::is_none) {
            return Ok(());
        }
        let snapshot = sys::snapshot()?;
        for ((ordinal, tracker), segment_events) in (0..).zip(trackers).zip(segment_events) {
            let Some(segment_events) = segment_events else { continue };
            let held = snapshot.of_device(ordinal);
            tracker.settle(&held, segment_events, || {
                // gpumem cannot find out who requested the memory of expandable segments.
                if held.iter().any(|(held, ..)| *held == Held::Expandable) {
                    return Err(Error::TooLate);
                }
                Ok(Pool::register(NAME, ordinal)?)
            })?;
        }
    }
}

/// Receives an event from PyTorch, which holds the lock of the device during the call. Therefore this must not call PyTorch.
pub(crate) fn event(ordinal: usize, event: TrackedEvent, address: u64, bytes: u64) {
    if let Some(tracker) = TRACKERS.get().and_then(|trackers| trackers.get(ordinal)) {
        tracker.event(event, address, bytes);
    }
}
