//! Remembers whether traces are off for the rest of the process, because of `GPUMEM_GAUGE=off` or because there is no device to measure. A
//! guard then costs little more than one load.

use std::sync::atomic::{
    AtomicU8,
    Ordering::{Acquire, Release},
};

/// Not checked yet.
const UNKNOWN: u8 = 0;
/// Traces that request no gauge stay off.
const OFF: u8 = 1;
/// Each trace checks again.
const ASK: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Returns whether traces that request no gauge are off for the rest of the process.
#[inline]
pub fn traces_are_off() -> bool {
    STATE.load(Acquire) == OFF
}

/// Turns traces that request no gauge off, unless each trace must check.
pub fn turn_traces_off() {
    let _ = STATE.compare_exchange(UNKNOWN, OFF, Release, Acquire);
}

/// Makes each trace check whether it is off. That is needed with simulated devices, which a program may add at any time, and with the
/// session of a test, which has its own settings.
pub fn ask_for_each_trace() {
    STATE.store(ASK, Release);
}
