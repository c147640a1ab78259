//! Distinguishes calls that ran from calls that a stream capture turned into nodes of a graph.

use super::{
    events::record_lost,
    state::{CU_STREAM_LEGACY, is_capture_active, state},
};
use crate::sys::{calls, cuda};

/// Returns whether a call on this stream became a node of a graph, or `None` if the driver does not report it. The capture may have
/// started on another stream: a stream joins a capture when it waits for an event of a captured stream.
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

pub(super) fn capture_started(stream: u64) {
    state().start_capture(stream);
}

/// Notes that a call that ends a capture has returned. Even if the call failed, the capture may have ended.
pub(super) fn capture_ended(stream: u64, succeeded: bool) {
    if !succeeded && cuda::is_capturing(stream) != Some(false) {
        return;
    }
    // The capture started before the subscription, so its allocations may have been counted as if they had been made.
    if !state().end_capture(stream) && succeeded {
        record_lost();
    }
}
