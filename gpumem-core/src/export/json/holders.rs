//! Writes the holders of memory as JSON: when memory runs out, at peaks, and at the end of the process.

use super::object::object;
use crate::report::{Leaks, OutOfMemory, PeakHolder, PeakHolders, Peaks, Place};

object!(OutOfMemory as oom {
    requested, kind,
    scopes: oom.path,
    breakdown: oom.breakdown.as_ref().ok(),
    why_no_breakdown: oom.breakdown.as_ref().err().map(ToString::to_string),
    largest_scopes: oom.scopes,
    largest_places: oom.places,
    peak,
});

object!(Place as place {
    name, caller, blocks, bytes,
    bytes_each: place.each,
});

object!(Leaks as leaks {
    blocks, bytes, places,
    gone_with_context: leaks.gone,
    intercepted: leaks.is_intercepted,
});

object!(Peaks as peaks {
    devices,
    intercepted: peaks.is_intercepted,
});

object!(PeakHolders as peak {
    device, simulated, bytes,
    over_start: peak.is_over_start,
    holders,
    untracked_frees: peak.untracked,
    lost_events: peak.lost,
});

object!(PeakHolder as holder {
    scopes: holder.path,
    scope_place, library, line, caller,
    older: holder.is_older,
    bytes,
});
