//! JSON lines: one object for each event.

use std::io::{self, Write};

use gpumem_core::export::JsonEscapes;
use serde::Serialize;
use serde_json::to_writer;

use super::check_texts;
use crate::history::{Change, ChangeKind, DeviceHistory, History, Origin};

/// What all events of an origin have, as it is written after their figures.
#[derive(Serialize)]
struct OfOrigin<'a> {
    scope: &'a [String],
    place: String,
    library: Option<&'a str>,
}

/// As JSON, without the braces. Made once for each origin, because names are long and events are many.
fn fields(of: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    to_writer(JsonEscapes(&mut text), of)?;
    Ok(text[1..text.len() - 1].to_vec())
}

fn field(line: &mut Vec<u8>, name: &str, value: impl Serialize) -> serde_json::Result<()> {
    line.extend_from_slice(name.as_bytes());
    to_writer(line, &value)
}

pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let place = |origin: &Origin| {
        fields(&OfOrigin { scope: &origin.path, place: origin.place(), library: origin.library.as_deref() })
    };
    let places = history.origins.iter().map(place).collect::<io::Result<Vec<_>>>()?;
    check_texts(history, |origin| places[origin as usize].len())?;
    let mut live = vec![0_u64; history.devices.len()];
    let whole_from = history.whole_from();
    let mut event = Vec::new();
    for (at, Change { time, number, delta, block, thread, kind }) in (0_u32..).zip(&history.changes) {
        let block_life = &history.blocks[*block as usize];
        let origin = history.origin(block_life);
        let DeviceHistory { device, peak_at, .. } = &history.devices[usize::from(block_life.device)];
        let live = &mut live[usize::from(block_life.device)];
        if origin.kind.is_on_device() {
            *live = live.saturating_add_signed(*delta);
        }
        event.clear();
        field(&mut event, "{\"number\":", number)?;
        field(&mut event, ",\"time_ns\":", time)?;
        field(&mut event, ",\"action\":", kind.name())?;
        field(&mut event, ",\"device\":", device.ordinal)?;
        let is_simulated = device.family == gpumem_core::model::Family::Simulated;
        field(&mut event, ",\"simulated\":", is_simulated)?;
        field(&mut event, ",\"address\":", block_life.key)?;
        // How many bytes more are live.
        field(&mut event, ",\"change_bytes\":", delta)?;
        // Live on the device after it; `null` if that is not in the recording.
        let is_known = whole_from.map_or(*peak_at == Some(at), |first| first <= at as usize);
        field(&mut event, ",\"live_bytes\":", is_known.then_some(*live))?;
        field(&mut event, ",\"kind\":", origin.kind.name())?;
        field(&mut event, ",\"thread\":", thread)?;
        event.push(b',');
        event.extend_from_slice(&places[block_life.origin as usize]);
        if let Some(label) = history.labels.get(block).filter(|_| *kind == ChangeKind::Alloc) {
            event.extend_from_slice(b",\"label\":");
            to_writer(JsonEscapes(&mut event), label)?;
        }
        event.extend_from_slice(b"}\n");
        out.write_all(&event)?;
    }
    Ok(())
}
