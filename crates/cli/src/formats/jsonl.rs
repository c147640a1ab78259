//! JSON lines: one object for each event, and then one for each change of the memory of the process that is not an allocation.

use std::io::{self, Write};

use gpumem_core::export::json_line;
use serde::Serialize;
use serde_json::to_writer;

use super::texts::check_texts;
use crate::history::{Change, ChangeKind, DeviceHistory, History, Origin};

/// The fields that all events of an origin share, as they are written after the event's own fields.
#[derive(Serialize)]
struct OfOrigin<'a> {
    scope: &'a [String],
    place: String,
    library: Option<&'a str>,
}

/// The fields of an event that do not follow from its origin.
#[derive(Serialize)]
struct OfEvent<'a> {
    number: u64,
    time_ns: u64,
    action: &'a str,
    device: u32,
    simulated: bool,
    address: u64,
    /// The number of bytes by which the live memory grows.
    change_bytes: i64,
    /// The bytes that are live on the device after the event; `None` if the recording does not contain that.
    live_bytes: Option<u64>,
    kind: &'a str,
    thread: u16,
}

/// The size of a part of the memory of the process from a moment on.
#[derive(Serialize)]
struct OfProcess {
    time_ns: u64,
    action: &'static str,
    device: u32,
    /// A kind that the driver takes, `rounding`, or `process` for the sum with all allocations.
    kind: &'static str,
    bytes: u64,
}

/// Returns the fields as JSON, without the braces. This is done once for each origin, because names are long and there
/// are many events.
fn fields(of: &impl Serialize) -> String {
    let json = json_line(of);
    json[1..json.len() - 1].to_owned()
}

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let place = |origin: &Origin| {
        fields(&OfOrigin { scope: &origin.path, place: origin.place(), library: origin.library.as_deref() })
    };
    let places: Vec<String> = history.origins.iter().map(place).collect();
    check_texts(history, |origin| places[origin as usize].len())?;
    let mut live = vec![0_u64; history.devices.len()];
    let complete_from = history.complete_from();
    let mut event = Vec::new();
    for (at, Change { time, number, delta, block, thread, kind }) in (0_u32..).zip(history.lives.changes()) {
        let block_life = history.lives.block(block);
        let origin = history.origin(&block_life);
        let DeviceHistory { device, peak_at, .. } = &history.devices[usize::from(block_life.device)];
        let live = &mut live[usize::from(block_life.device)];
        if origin.kind.is_on_device() {
            *live = live.saturating_add_signed(delta);
        }
        let is_known = complete_from.map_or(*peak_at == Some(at), |first| first <= at as usize);
        let event_values = OfEvent {
            number,
            time_ns: time,
            action: kind.name(),
            device: device.ordinal,
            simulated: device.family == gpumem_core::model::Family::Simulated,
            address: block_life.key,
            change_bytes: delta,
            live_bytes: is_known.then_some(*live),
            kind: origin.kind.name(),
            thread,
        };
        event.clear();
        to_writer(&mut event, &event_values)?;
        // The fields of the origin follow, so the closing brace is removed.
        event.pop();
        event.push(b',');
        event.extend_from_slice(places[block_life.origin as usize].as_bytes());
        if let Some(label) = history.labels.get(&block).filter(|_| kind == ChangeKind::Allocated) {
            event.extend_from_slice(b",\"label\":");
            event.extend_from_slice(json_line(label).as_bytes());
        }
        event.extend_from_slice(b"}\n");
        out.write_all(&event)?;
    }
    write_process(history, out)
}

/// Writes the memory of the process, and each part of it that the driver took by itself, whenever one of them has changed.
fn write_process(history: &History, out: &mut dyn Write) -> io::Result<()> {
    for series in history.process_series() {
        let device = history.devices[usize::from(series.device)].device;
        for (time_ns, bytes) in series.values {
            let part = OfProcess { time_ns, action: "process", device: device.ordinal, kind: series.name, bytes };
            writeln!(out, "{}", json_line(&part))?;
        }
    }
    Ok(())
}
