//! Finds out whether a call was made, or was captured as a node of a graph.

use super::{
    events::record_lost,
    state::{CU_STREAM_LEGACY, is_capture_active, state},
};
use crate::sys::{calls, cuda};

/// Returns whether a call on this stream became a node of a graph; `None` if the driver does not say. The capture may have
/// begun on another stream: a stream joins a capture when it waits for an event of a captured stream.
pub(super) fn is_captured(stream: u64) -> Option<bool> {
    // The legacy stream cannot be captured.
    if !is_capture_active() || matches!(stream, 0 | CU_STREAM_LEGACY) {
        return Some(false);
    }
    let is_captured = cuda::is_capturing(stream);
    if is_captured == Some(true) {
        calls::record_graph_launches();
    }
    is_captured
}

pub(super) fn capture_begun(stream: u64) {
    state().begin_capture(stream);
}

/// Notes that a call which ends a capture has returned. If it failed, the capture may have ended all the same.
pub(super) fn capture_ended(stream: u64, succeeded: bool) {
    if !succeeded && cuda::is_capturing(stream) != Some(false) {
        return;
    }
    // The capture began before the subscription: its allocations may have been counted as if they were made.
    if !state().end_capture(stream) && succeeded {
        record_lost();
    }
}
