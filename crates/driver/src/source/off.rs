//! Remembers whether traces are off for as long as the process runs, by `GPUMEM_GAUGE=off` or because there is no device to measure.
//! A guard then costs little more than one load.

use std::sync::atomic::{
    AtomicU8,
    Ordering::{Acquire, Release},
};

/// No trace has found it out yet.
const UNKNOWN: u8 = 0;
/// Traces that request no gauge stay off.
const OFF: u8 = 1;
/// Each trace finds it out by itself.
const ASK: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Returns whether traces that request no gauge are off for as long as the process runs.
#[inline]
pub fn traces_are_off() -> bool {
    STATE.load(Acquire) == OFF
}

/// Switches traces that request no gauge off from now on, unless each has to find it out by itself.
pub fn turn_traces_off() {
    let _ = STATE.compare_exchange(UNKNOWN, OFF, Release, Acquire);
}

/// Makes each trace find it out by itself from now on. There are simulated devices, which a program may add at any time, or a
/// session of a test, which has its own settings.
pub fn ask_for_each_trace() {
    STATE.store(ASK, Release);
}
