//! Writes the holders of memory as JSON: when memory runs out, at peaks, and at the end of the process.

use super::object::object;
use crate::report::{Leaks, OutOfMemory, PeakHolder, PeakHolders, Peaks, Place, PoolAtPeak};

object!(OutOfMemory as oom {
    "requested": oom.requested,
    "kind": oom.kind,
    "scopes": oom.path,
    "breakdown": oom.breakdown.as_ref().ok(),
    "why_no_breakdown": oom.breakdown.as_ref().err().map(ToString::to_string),
    "largest_scopes": oom.scopes,
    "largest_places": oom.places,
    "peak": oom.peak,
});

object!(Place as place {
    "name": place.name,
    "caller": place.caller,
    "blocks": place.blocks,
    "bytes": place.bytes,
    "bytes_each": place.each,
});

object!(Leaks as leaks {
    "blocks": leaks.blocks,
    "bytes": leaks.bytes,
    "places": leaks.places,
    "gone_with_context": leaks.gone,
    "intercepted": leaks.is_intercepted,
});

object!(Peaks as peaks {
    "devices": peaks.devices,
    "intercepted": peaks.is_intercepted,
});

object!(PeakHolders as peak {
    "device": peak.device,
    "simulated": peak.simulated,
    "bytes": peak.bytes,
    "over_start": peak.is_over_start,
    "holders": peak.holders,
    "pools": peak.pools,
    "untracked_frees": peak.untracked,
    "lost_events": peak.lost,
});

object!(PoolAtPeak as pool {
    "name": pool.name,
    "used": pool.used,
    "reserved": pool.reserved,
});

object!(PeakHolder as holder {
    "scopes": holder.path,
    "scope_place": holder.scope_place,
    "library": holder.library,
    "line": holder.line,
    "caller": holder.caller,
    "older": holder.is_older,
    "bytes": holder.bytes,
});
