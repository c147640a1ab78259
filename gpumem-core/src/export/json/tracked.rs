//! Points of trackers, as JSON.

use super::object::object;
use crate::{
    model::Bytes,
    report::{Change, Tracked},
};

object! {
    pub(super) struct TrackedLine<'a> {
        ctx: Option<&'a str>,
        simulated: bool,
        used: Option<u64>,
        live: Option<u64>,
        changes: Option<Vec<ChangeLine<'a>>>,
        lost_events: u64,
    }
}

object! {
    struct ChangeLine<'a> {
        count: i64,
        bytes_each: u64,
        bytes: i64,
        kind: &'static str,
        dtype: Option<&'a str>,
        shape: Option<&'a [usize]>,
        names: Vec<NameLine<'a>>,
        scopes: Option<&'a [String]>,
        line: Option<&'a str>,
        library: Option<&'a str>,
    }
}

object! {
    struct NameLine<'a> {
        name: &'a str,
        count: u64,
    }
}

impl<'a> TrackedLine<'a> {
    pub(super) fn new(tracked: &'a Tracked) -> Self {
        Self {
            ctx: tracked.ctx.as_deref(),
            simulated: tracked.simulated,
            used: tracked.used.map(Bytes::get),
            live: tracked.live.map(Bytes::get),
            changes: tracked.changes.as_ref().map(|changes| changes.iter().map(ChangeLine::of).collect()),
            lost_events: tracked.lost,
        }
    }
}

impl<'a> ChangeLine<'a> {
    fn of(change: &'a Change) -> Self {
        Self {
            count: change.count,
            bytes_each: change.each.get(),
            bytes: change.total().get(),
            kind: change.kind.name(),
            dtype: change.dtype.as_deref(),
            shape: change.shape.as_deref(),
            names: change.names.iter().map(|(name, count)| NameLine { name, count: *count }).collect(),
            scopes: change.dtype.is_none().then_some(&change.path),
            line: change.line.as_deref(),
            library: change.library.as_deref(),
        }
    }
}
