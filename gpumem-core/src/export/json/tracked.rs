//! Writes points of trackers as JSON.

use super::object::object;
use crate::report::{Change, Tracked};

object!(Tracked as tracked {
    ctx, simulated, used, live, changes,
    lost_events: tracked.lost,
});

object!(Change as change {
    count,
    bytes_each: change.each,
    bytes: change.total(),
    kind, dtype, shape, names,
    scopes: change.dtype.is_none().then_some(&change.path),
    line, library,
});

/// A name, and the number of its blocks.
type Named = (String, u64);

object!(Named as named {
    name: named.0,
    count: named.1,
});
