//! JSON lines: one object for each event.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    history::{Change, ChangeKind, History},
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
    /// Live on the device after it.
    live_bytes: u64,
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
    for Change { time, number, delta, block, thread, kind } in &history.changes {
        let block_life = &history.blocks[*block as usize];
        let origin = history.origin(block_life);
        let device = &history.devices[usize::from(block_life.device)].device;
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
            live_bytes: *live,
            kind: origin.kind.name(),
            thread: *thread,
            scope: &origin.path,
            place: &places[block_life.origin as usize],
            library: origin.library.as_deref(),
            label: label.map(|label| label.name.as_str()),
        };
        json::write_line(&event, out)?;
    }
    Ok(())
}
