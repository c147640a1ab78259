//! Custom gauges of the program, as devices that can only be read.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{PoisonError, RwLock},
};

use super::devices::{Devices, Interception};
use crate::{
    error::{Kind, Result},
    model::{Bytes, CustomGauge, Family, GpuMemory, GpuProcess, PoolUsage, Source},
    sys::process,
};

/// The maximum number of bytes that a function may return: 64 TiB, the same limit as in recordings.
const MOST_BYTES: u64 = 1 << 46;

/// All gauges of the process, by ordinal. An ordinal is never reused, because open traces refer to it.
static GAUGES: RwLock<Gauges> = RwLock::new(Gauges { all: Vec::new(), latest: None });

#[derive(Debug)]
struct Gauges {
    all: Vec<State>,
    /// The gauge that was set last.
    latest: Option<usize>,
}

#[derive(Clone, Debug)]
struct State {
    gauge: CustomGauge,
    /// The reason why the gauge's function is no longer called.
    broken: Option<String>,
}

thread_local! {
    /// True while this thread runs the function of a gauge.
    static IS_READING: Cell<bool> = const { Cell::new(false) };
}

/// The family of the program's gauges.
#[derive(Clone, Copy, Debug)]
struct CustomDevices;

/// Makes this the gauge of traces that request no other one. A gauge with the same name is replaced.
pub fn set_gauge(gauge: CustomGauge) {
    // In the child process of a fork, the lock may be held by a thread that does not exist there.
    if process::is_forked() {
        return;
    }
    let mut gauges = GAUGES.write().unwrap_or_else(PoisonError::into_inner);
    let at = gauges.all.iter().position(|known| known.gauge.name() == gauge.name());
    let state = State { gauge, broken: None };
    // The old gauge is dropped after the lock is released, because dropping its function runs code of the program.
    let _replaced = if let Some(at) = at {
        gauges.latest = Some(at);
        Some(std::mem::replace(&mut gauges.all[at], state))
    } else {
        gauges.latest = Some(gauges.all.len());
        gauges.all.push(state);
        None
    };
    drop(gauges);
}

/// Returns the program's gauges, or `None` if it has set none.
pub fn custom_devices() -> Option<&'static dyn Devices> {
    let gauges = GAUGES.read().unwrap_or_else(PoisonError::into_inner);
    gauges.latest.map(|_| &CustomDevices as &dyn Devices)
}

fn state(ordinal: u32) -> Result<State> {
    let gauges = GAUGES.read().unwrap_or_else(PoisonError::into_inner);
    let count = u32::try_from(gauges.all.len()).unwrap_or(u32::MAX);
    let state = gauges.all.get(ordinal as usize).cloned();
    state.ok_or_else(|| Kind::NoDevice { ordinal, count, simulated: false }.into())
}

/// Marks a gauge as broken. Its function is no longer called, because each panic would print a message.
fn set_broken(ordinal: u32, why: &str) {
    let mut gauges = GAUGES.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(state) = gauges.all.get_mut(ordinal as usize) {
        state.broken = Some(why.to_owned());
    }
}

fn bytes_in_use(ordinal: u32, state: &State) -> std::result::Result<Bytes, String> {
    if let Some(why) = &state.broken {
        return Err(why.clone());
    }
    if IS_READING.replace(true) {
        return Err("its function reads a trace, which would call the function again".to_owned());
    }
    let read = catch_unwind(AssertUnwindSafe(|| state.gauge.read()));
    IS_READING.set(false);
    let bytes = read.unwrap_or_else(|panic| {
        // Dropping the panic's value might panic as well.
        std::mem::forget(panic);
        let why = "its function panicked, and is no longer called";
        set_broken(ordinal, why);
        Err(why.to_owned())
    })?;
    if bytes.get() >= MOST_BYTES {
        Err(format!("its function returned {bytes}, more than the memory of any device"))
    } else {
        Ok(bytes)
    }
}

fn nothing_else<T>() -> Result<T> {
    let why = "a gauge of the program reports only the bytes in use";
    Err(Kind::NoGauge { gauge: "exact", why }.into())
}

impl Devices for CustomDevices {
    fn family(&self) -> Family {
        Family::Custom
    }

    fn count(&self) -> Result<u32> {
        let count = GAUGES.read().unwrap_or_else(PoisonError::into_inner).all.len();
        Ok(u32::try_from(count).unwrap_or(u32::MAX))
    }

    /// Returns the gauge that was set last, on whichever thread.
    fn current(&self) -> Result<u32> {
        let latest = GAUGES.read().unwrap_or_else(PoisonError::into_inner).latest;
        Ok(latest.and_then(|latest| u32::try_from(latest).ok()).unwrap_or(0))
    }

    fn check(&self, ordinal: u32) -> Result<()> {
        state(ordinal).map(drop)
    }

    fn name(&self, ordinal: u32) -> Result<String> {
        state(ordinal).map(|state| state.gauge.name().to_owned())
    }

    /// Reads the gauge. The total is not known, so it is set to the used memory.
    fn read(&self, ordinal: u32) -> Result<GpuMemory> {
        let state = state(ordinal)?;
        let used = bytes_in_use(ordinal, &state);
        let used = used.map_err(|detail| Kind::CustomGauge { name: state.gauge.name().to_owned(), detail })?;
        Ok(GpuMemory::new(used, Bytes::ZERO, used, None))
    }

    fn processes(&self, _: u32) -> Result<Vec<GpuProcess>> {
        nothing_else()
    }

    fn read_pool(&self, _: u32) -> Result<Option<PoolUsage>> {
        nothing_else()
    }

    fn reset_pool_reserved(&self, _: u32) -> Result<()> {
        nothing_else()
    }

    fn trim(&self, _: u32) -> Result<()> {
        nothing_else()
    }

    fn preload(&self, _: u32) -> Result<()> {
        nothing_else()
    }

    fn subscribe(&self, _: Option<Source>) -> Result<Interception> {
        nothing_else()
    }

    fn can_subscribe(&self, _: Option<Source>) -> Result<Source> {
        nothing_else()
    }

    fn unsubscribe(&self) {}

    fn subscribed(&self) -> Option<Interception> {
        None
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_that_is_set_in_the_child_of_a_fork_waits_for_no_thread() {
        process::notice_forks();
        let _is_set = GAUGES.write().unwrap_or_else(PoisonError::into_inner);
        assert!(process::ends_in_child(|| set_gauge(crate::model::Gauge::custom("child", || 0))));
    }
}
