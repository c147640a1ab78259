//! JSON lines: one object for each event.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    history::{Change, ChangeKind, DeviceHistory, History},
    report::json,
};

#[derive(Serialize)]
struct Event<'a> {
    number: u64,
    time_ns: u64,
    action: &'static str,
    device: u32,
    simulated: bool,
    address: u64,
    /// How many bytes more are live.
    change_bytes: i64,
    /// Live on the device after it. `None` if that is not in the recording.
    live_bytes: Option<u64>,
    kind: &'static str,
    thread: u16,
    scope: &'a [String],
    place: &'a str,
    library: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<&'a str>,
}

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let places: Vec<_> = history.origins.iter().map(crate::history::Origin::place).collect();
    let mut live = vec![0_u64; history.devices.len()];
    let whole_from = history.whole_from();
    for (at, Change { time, number, delta, block, thread, kind }) in (0_u32..).zip(&history.changes) {
        let block_life = &history.blocks[*block as usize];
        let origin = history.origin(block_life);
        let DeviceHistory { device, peak_at, .. } = &history.devices[usize::from(block_life.device)];
        let is_known = whole_from.map_or(*peak_at == Some(at), |first| first <= at as usize);
        let live = &mut live[usize::from(block_life.device)];
        if origin.kind.is_on_device() {
            *live = live.saturating_add_signed(*delta);
        }
        let label = history.labels.get(block).filter(|_| *kind == ChangeKind::Alloc);
        let event = Event {
            number: *number,
            time_ns: *time,
            action: kind.name(),
            device: device.ordinal,
            simulated: device.family == gpumem_core::model::Family::Simulated,
            address: block_life.key,
            change_bytes: *delta,
            live_bytes: is_known.then_some(*live),
            kind: origin.kind.name(),
            thread: *thread,
            scope: &origin.path,
            place: &places[block_life.origin as usize],
            library: origin.library.as_deref(),
            label: label.map(|label| &**label),
        };
        json::write_line(&event, out)?;
    }
    Ok(())
}
