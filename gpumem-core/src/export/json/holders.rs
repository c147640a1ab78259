//! What holds memory, as JSON: when memory runs out, at peaks, and at the end of the process.

use super::object::object;
use super::places::BreakdownObject;
use crate::{
    model::Bytes,
    report::{Leaks, OutOfMemory, PeakHolders, Peaks, Place},
};

object! {
    pub(super) struct OutOfMemoryLine<'a> {
        requested: u64,
        kind: &'static str,
        scopes: &'a [String],
        breakdown: Option<BreakdownObject<'a>>,
        why_no_breakdown: Option<String>,
        largest_scopes: Vec<PlaceLine<'a>>,
        largest_places: Vec<PlaceLine<'a>>,
        peak: Option<PeakLine<'a>>,
    }
}

impl<'a> OutOfMemoryLine<'a> {
    pub(super) fn new(oom: &'a OutOfMemory) -> Self {
        Self {
            requested: oom.requested.get(),
            kind: oom.kind.name(),
            scopes: &oom.path,
            breakdown: oom.breakdown.as_ref().ok().map(BreakdownObject::new),
            why_no_breakdown: oom.breakdown.as_ref().err().map(ToString::to_string),
            largest_scopes: oom.scopes.iter().map(PlaceLine::new).collect(),
            largest_places: oom.places.iter().map(PlaceLine::new).collect(),
            peak: oom.peak.as_ref().map(PeakLine::new),
        }
    }
}

object! {
    struct PlaceLine<'a> {
        name: &'a str,
        caller: Option<&'a str>,
        blocks: u64,
        bytes: u64,
        bytes_each: Option<u64>,
    }
}

impl<'a> PlaceLine<'a> {
    fn new(place: &'a Place) -> Self {
        let Place { name, caller, blocks, bytes, each } = place;
        Self { name, caller: caller.as_deref(), blocks: *blocks, bytes: bytes.get(), bytes_each: each.map(Bytes::get) }
    }
}

object! {
    pub(super) struct LeaksLine<'a> {
        blocks: u64,
        bytes: u64,
        places: Vec<PlaceLine<'a>>,
        gone_with_context: u64,
        intercepted: bool,
    }
}

impl<'a> LeaksLine<'a> {
    pub(super) fn new(leaks: &'a Leaks) -> Self {
        Self {
            blocks: leaks.blocks,
            bytes: leaks.bytes.get(),
            places: leaks.places.iter().map(PlaceLine::new).collect(),
            gone_with_context: leaks.gone,
            intercepted: leaks.is_intercepted,
        }
    }
}

object! {
    pub(super) struct PeaksLine<'a> {
        devices: Vec<PeakLine<'a>>,
        intercepted: bool,
    }
}

impl<'a> PeaksLine<'a> {
    pub(super) fn new(peaks: &'a Peaks) -> Self {
        Self { devices: peaks.devices.iter().map(PeakLine::new).collect(), intercepted: peaks.is_intercepted }
    }
}

object! {
    struct PeakLine<'a> {
        device: u32,
        simulated: bool,
        bytes: u64,
        over_start: bool,
        holders: Vec<HolderLine<'a>>,
        untracked_frees: u64,
        lost_events: u64,
    }
}

object! {
    struct HolderLine<'a> {
        scopes: &'a [String],
        scope_place: Option<&'a str>,
        library: Option<&'a str>,
        line: Option<&'a str>,
        caller: Option<&'a str>,
        older: bool,
        bytes: i64,
    }
}

impl<'a> PeakLine<'a> {
    fn new(peak: &'a PeakHolders) -> Self {
        let holders = peak.holders.iter().map(|holder| HolderLine {
            scopes: &holder.path,
            scope_place: holder.scope_place.as_deref(),
            library: holder.library.as_deref(),
            line: holder.line.as_deref(),
            caller: holder.caller.as_deref(),
            older: holder.is_older,
            bytes: holder.bytes.get(),
        });
        Self {
            device: peak.device,
            simulated: peak.simulated,
            bytes: peak.bytes.get(),
            over_start: peak.is_over_start,
            holders: holders.collect(),
            untracked_frees: peak.untracked,
            lost_events: peak.lost,
        }
    }
}
