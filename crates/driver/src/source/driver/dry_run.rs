//! Records what only a dry run knows: how much of its memory is real, and which values it did not compute.

use super::{
    super::{recorder::record, stacks},
    own_memory::LARGE,
};
use crate::{
    model::{Bytes, EventKind},
    sys::{
        calls,
        dispatch::dry::{self, Observe},
    },
};

/// Makes a dry run report here.
pub(super) fn watch() {
    dry::observe(Observe { real_part, value_read });
}

fn real_part(largest: Bytes) {
    calls::as_observer_cold(|| record(&EventKind::RealBlocks { largest }));
}

/// Records the stack of each value, as of a large block.
fn value_read(bytes: Bytes) {
    calls::as_observer_cold(|| record(&EventKind::UnknownValue { bytes, stack: stacks::stack_for(LARGE) }));
}
