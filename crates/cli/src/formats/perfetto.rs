//! A trace for Perfetto: counters of each kind of memory and of PyTorch's tensors, and the scopes of each thread as slices.
//!
//! The messages are some of `perfetto_trace.proto`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
};

use gpumem_core::{
    derive,
    model::{Bytes, DriverGauge, MemKind, ThreadId},
};
use prost::Message;

use super::texts::check_scopes;
use crate::history::{Change, History, MarkedMoment, ScopeLife};

#[derive(Clone, PartialEq, Message)]
struct Packet {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    sequence: u32,
    #[prost(message, optional, tag = "11")]
    event: Option<TrackEvent>,
    #[prost(message, optional, tag = "60")]
    track: Option<Track>,
}

#[derive(Clone, PartialEq, Message)]
struct TrackEvent {
    #[prost(int32, optional, tag = "9")]
    r#type: Option<i32>,
    #[prost(uint64, optional, tag = "11")]
    track: Option<u64>,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
    #[prost(int64, optional, tag = "30")]
    counter: Option<i64>,
}

const SLICE_START: i32 = 1;
const SLICE_END: i32 = 2;
const INSTANT: i32 = 3;
const COUNTER: i32 = 4;

#[derive(Clone, PartialEq, Message)]
struct Track {
    #[prost(uint64, optional, tag = "1")]
    uuid: Option<u64>,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(message, optional, tag = "3")]
    process: Option<Process>,
    #[prost(message, optional, tag = "4")]
    thread: Option<Thread>,
    #[prost(uint64, optional, tag = "5")]
    parent: Option<u64>,
    #[prost(message, optional, tag = "8")]
    counter: Option<Counter>,
}

#[derive(Clone, PartialEq, Message)]
struct Process {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(string, repeated, tag = "2")]
    cmdline: Vec<String>,
    #[prost(string, optional, tag = "6")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Thread {
    #[prost(int32, optional, tag = "1")]
    pid: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    tid: Option<i32>,
    #[prost(string, optional, tag = "5")]
    name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Counter {
    #[prost(int32, optional, tag = "3")]
    unit: Option<i32>,
}

const SIZE_BYTES: i32 = 3;

/// Writes packets. A trace is a message that contains only one field, number 1, which is repeated.
struct Packets<'a> {
    out: &'a mut dyn Write,
    buffer: Vec<u8>,
    tracks: u64,
    /// The process id, which tracks and sequences contain so that the traces of several processes can be joined in one
    /// file.
    pid: u32,
}

impl Packets<'_> {
    fn write(&mut self, timestamp: Option<u64>, event: Option<TrackEvent>, track: Option<Track>) -> io::Result<()> {
        self.buffer.clear();
        self.buffer.push(1 << 3 | 2);
        // 0 is not a valid sequence.
        let packet = Packet { timestamp, sequence: self.pid.max(1), event, track };
        packet.encode_length_delimited(&mut self.buffer).map_err(io::Error::other)?;
        self.out.write_all(&self.buffer)
    }

    fn track(&mut self, track: Track) -> io::Result<u64> {
        self.tracks += 1;
        let uuid = u64::from(self.pid) << 32 | self.tracks;
        self.write(None, None, Some(Track { uuid: Some(uuid), ..track }))?;
        Ok(uuid)
    }

    fn counter(&mut self, time: u64, track: u64, value: i64) -> io::Result<()> {
        let event = TrackEvent { r#type: Some(COUNTER), track: Some(track), name: None, counter: Some(value) };
        self.write(Some(time), Some(event), None)
    }
}

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let process = history.definitions().process();
    let mut packets = Packets { out, buffer: Vec::new(), tracks: 0, pid: process.pid };
    let pid = process.pid.cast_signed();
    let name = process.executable.rsplit('/').next().unwrap_or_default().to_owned();
    let described = Process { pid: Some(pid), cmdline: process.arguments.clone(), name: Some(name) };
    let parent = packets.track(Track { process: Some(described), ..Track::default() })?;
    write_counters(history, &mut packets, parent)?;
    write_driver(history, &mut packets, parent)?;
    write_tensors(history, &mut packets, parent)?;
    write_scopes(history, &mut packets, pid)
}

/// Writes one counter for each kind of memory of each device. If there are several kinds in the device's memory, also
/// writes one for their sum.
fn write_counters(history: &History, packets: &mut Packets<'_>, parent: u64) -> io::Result<()> {
    let Some(complete_from) = history.complete_from() else { return write_peaks(history, packets, parent) };
    let mut kinds: BTreeMap<(u16, MemKind), (u64, i64)> = BTreeMap::new();
    for (_, block) in history.lives.blocks() {
        kinds.entry((block.device, history.origin(&block).kind)).or_default();
    }
    let counter = |name| counter(name, parent);
    let mut totals: Vec<Option<(u64, i64)>> = vec![None; history.devices.len()];
    for (number, total) in totals.iter_mut().enumerate() {
        let kinds_on_device =
            kinds.keys().filter(|(device, kind)| usize::from(*device) == number && kind.is_on_device());
        if kinds_on_device.count() > 1 {
            *total = Some((packets.track(counter(format!("{}: in use", history.devices[number].device)))?, 0));
        }
    }
    for ((device, kind), (track, _)) in &mut kinds {
        let name = format!("{}: {kind}", history.devices[usize::from(*device)].device);
        *track = packets.track(counter(name))?;
    }
    for (at, change) in history.lives.changes().enumerate() {
        // Earlier memory is not known: the counters start with the memory that is live at this point.
        if at == complete_from && at > 0 {
            for (track, value) in kinds.values().chain(totals.iter().flatten()) {
                packets.counter(change.time, *track, *value)?;
            }
        }
        let block = history.lives.block(change.block);
        let kind = history.origin(&block).kind;
        let kind_counter = kinds.get_mut(&(block.device, kind));
        let total = totals[usize::from(block.device)].as_mut().filter(|_| kind.is_on_device());
        for (track, value) in kind_counter.into_iter().chain(total) {
            *value += change.delta;
            if at >= complete_from {
                packets.counter(change.time, *track, *value)?;
            }
        }
    }
    Ok(())
}

/// Writes the memory of the process with the driver's own memory, and each kind of the driver's own memory.
fn write_driver(history: &History, packets: &mut Packets<'_>, parent: u64) -> io::Result<()> {
    for series in history.process_series() {
        let device = &history.devices[usize::from(series.device)].device;
        let at_most = if history.driver_measured_by(*device) == Some(DriverGauge::AtMost) { " (at most)" } else { "" };
        let track = packets.track(counter(format!("{device}: {}{at_most}", series.name), parent))?;
        for (time, bytes) in series.values {
            packets.counter(time, track, bytes.cast_signed())?;
        }
    }
    Ok(())
}

/// Writes only the peaks, because nothing else is known: a counter would be wrong at all other times.
fn write_peaks(history: &History, packets: &mut Packets<'_>, parent: u64) -> io::Result<()> {
    for device in &history.devices {
        let Some(at) = device.peak_at else { continue };
        let name = Some(format!("{}: the peak was {}", device.device, Bytes::new(device.peak)));
        let event = TrackEvent { r#type: Some(INSTANT), track: Some(parent), name, counter: None };
        packets.write(Some(history.time_of(at)), Some(event), None)?;
    }
    Ok(())
}

fn counter(name: String, parent: u64) -> Track {
    Track {
        name: Some(name),
        parent: Some(parent),
        counter: Some(Counter { unit: Some(SIZE_BYTES) }),
        ..Track::default()
    }
}

/// Writes the bytes of PyTorch's tensors and of its segments on each device. They are part of the other counters.
fn write_tensors(history: &History, packets: &mut Packets<'_>, parent: u64) -> io::Result<()> {
    let Some(tensors) = &history.tensors else { return Ok(()) };
    let lives = &tensors.blocks.lives;
    let mut changes_by_device: Vec<[Vec<Change>; 2]> = tensors.devices.iter().map(|_| Default::default()).collect();
    for change in lives.changes() {
        let block = lives.block(change.block);
        changes_by_device[usize::from(block.device)][usize::from(block.origin == tensors.blocks.segment_origin)]
            .push(change);
    }
    for (device, changes) in tensors.devices.iter().zip(changes_by_device) {
        for (what, changes) in ["tensors", "segments"].into_iter().zip(changes) {
            let mut changes = changes.into_iter().peekable();
            if changes.peek().is_none() {
                continue;
            }
            let track = packets.track(counter(format!("{}: PyTorch {what}", device.about.device), parent))?;
            let mut value = 0_i64;
            // Earlier memory is not known: the counter starts with the memory that is live when the history starts.
            if let Some(from) = device.known_from() {
                while let Some(change) = changes.next_if(|change| change.time <= from) {
                    value = value.saturating_add(change.delta);
                }
                packets.counter(from, track, value)?;
            }
            for change in changes {
                value = value.saturating_add(change.delta);
                packets.counter(change.time, track, value)?;
            }
        }
    }
    Ok(())
}

/// Writes the scopes and the marks of each thread. Scopes that do not nest, such as those of tasks, get separate
/// tracks.
fn write_scopes(history: &History, packets: &mut Packets<'_>, pid: i32) -> io::Result<()> {
    let mut threads: BTreeMap<u16, (Vec<&ScopeLife>, Vec<&MarkedMoment>)> = BTreeMap::new();
    for scope in &history.scopes {
        threads.entry(scope.thread).or_default().0.push(scope);
    }
    for mark in &history.marks {
        threads.entry(mark.thread).or_default().1.push(mark);
    }
    let used =
        || history.scopes.iter().map(|scope| scope.callsite).chain(history.marks.iter().map(|mark| mark.callsite));
    let callsites: BTreeSet<_> = used().collect();
    let callsites: Vec<_> = callsites.into_iter().collect();
    let names = derive::short_names(history.ledger(), history.definitions(), &callsites);
    let names: BTreeMap<_, _> = callsites.into_iter().zip(names).collect();
    check_scopes(history, used().filter_map(|callsite| names.get(&callsite)).map(String::len))?;
    for (thread, (scopes, marks)) in threads {
        let known = history.definitions().thread(ThreadId(thread.into()));
        let name = known.and_then(|known| known.name.clone()).unwrap_or_else(|| format!("thread {thread}"));
        let tid = known.and_then(|known| i32::try_from(known.os_id).ok()).unwrap_or_else(|| i32::from(thread));
        let described = Thread { pid: Some(pid), tid: Some(tid), name: Some(name.clone()) };
        let first = packets.track(Track { thread: Some(described), ..Track::default() })?;
        if !marks.is_empty() {
            let name = Some(format!("{name}, marks"));
            let track = Some(packets.track(Track { name, parent: Some(first), ..Track::default() })?);
            for MarkedMoment { callsite, time, .. } in marks {
                let name = names.get(callsite).cloned();
                let event = TrackEvent { r#type: Some(INSTANT), track, name, counter: None };
                packets.write(Some(*time), Some(event), None)?;
            }
        }
        for (number, lane) in lanes(&scopes, history.end_nanos()).into_iter().enumerate() {
            let track = if number == 0 {
                first
            } else {
                let name = format!("{name}, scopes {}", number + 1);
                packets.track(Track { name: Some(name), parent: Some(first), ..Track::default() })?
            };
            let mut open: Vec<u64> = Vec::new();
            let close = |packets: &mut Packets<'_>, until: u64, open: &mut Vec<u64>| -> io::Result<()> {
                while let Some(end) = open.pop_if(|end| *end <= until) {
                    let event = TrackEvent { r#type: Some(SLICE_END), track: Some(track), ..TrackEvent::default() };
                    packets.write(Some(end), Some(event), None)?;
                }
                Ok(())
            };
            for (start, end, scope) in lane {
                close(packets, start, &mut open)?;
                let name = names.get(&scope.callsite).cloned();
                let event = TrackEvent { r#type: Some(SLICE_START), track: Some(track), name, counter: None };
                packets.write(Some(start), Some(event), None)?;
                open.push(end);
            }
            close(packets, u64::MAX, &mut open)?;
        }
    }
    Ok(())
}

/// At most this many lanes are tried for a scope, starting with the latest one.
const TRIED: usize = 64;

type Lane<'a> = Vec<(u64, u64, &'a ScopeLife)>;

/// Distributes scopes to lanes, so that the scopes of a lane nest. The scopes are in the order of their start.
fn lanes<'a>(scopes: &[&'a ScopeLife], last: u64) -> Vec<Lane<'a>> {
    let mut lanes: Vec<(Lane<'a>, Vec<u64>)> = Vec::new();
    for scope in scopes {
        let (start, end) = (scope.opened, scope.closed.unwrap_or(last));
        let fits = |(_, open): &mut (Lane<'a>, Vec<u64>)| {
            while open.pop_if(|outer| *outer <= start).is_some() {}
            open.last().is_none_or(|outer| end <= *outer)
        };
        let first = lanes.len().saturating_sub(TRIED);
        let at = lanes[first..].iter_mut().position(fits).map(|at| first + at).unwrap_or_else(|| {
            lanes.push((Vec::new(), Vec::new()));
            lanes.len() - 1
        });
        let (lane, open) = &mut lanes[at];
        lane.push((start, end, scope));
        open.push(end);
    }
    lanes.into_iter().map(|(lane, _)| lane).collect()
}

#[cfg(test)]
mod tests {
    use gpumem_core::model::CallsiteId;

    use super::*;

    #[test]
    fn scopes_that_do_not_nest_are_on_lanes_of_their_own() {
        let scope = |opened, closed| ScopeLife { callsite: CallsiteId(2), thread: 1, opened, closed };
        let scopes =
            [scope(0, Some(100)), scope(10, Some(50)), scope(40, Some(60)), scope(60, Some(100)), scope(70, None)];
        let lanes = lanes(&scopes.iter().collect::<Vec<_>>(), 200);
        let times: Vec<Vec<_>> =
            lanes.iter().map(|lane| lane.iter().map(|(start, end, _)| (*start, *end)).collect()).collect();
        assert_eq!(times, [vec![(0, 100), (10, 50), (60, 100)], vec![(40, 60), (70, 200)]]);
    }
}
