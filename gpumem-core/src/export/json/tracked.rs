//! Writes points of trackers as JSON.

use super::object::object;
use crate::report::{Change, Tracked};

object!(Tracked as tracked {
    "ctx": tracked.ctx,
    "simulated": tracked.simulated,
    "used": tracked.used,
    "live": tracked.live,
    "changes": tracked.changes,
    "lost_events": tracked.lost,
});

object!(Change as change {
    "count": change.count,
    "bytes_each": change.each,
    "bytes": change.total(),
    "kind": change.kind,
    "dtype": change.dtype,
    "shape": change.shape,
    "names": change.names,
    "scopes": change.dtype.is_none().then_some(&change.path),
    "line": change.line,
    "library": change.library,
});

/// A name, and the number of its blocks.
type Named = (String, u64);

object!(Named as named {
    "name": named.0,
    "count": named.1,
});
