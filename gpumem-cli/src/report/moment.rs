//! `--at` and `--between`: what was live at one moment, and what came and went between two.

use std::{
    io::{self, Write},
    time::Duration,
};

use gpumem_core::{
    export::{Paint, Role},
    model::Bytes,
};
use serde::Serialize;

use super::{
    overview::{PlaceSum, Sum, place_sums, sums},
    text::{Bars, device_in_words, has_scopes, merged, shares, shown, signed_amount, tree},
};
use crate::history::{Held, History, Moment, Origin, in_words, sums_by};

/// What was live on one device at one moment; or how much more that was than at another one.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceMoment {
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    /// In the memory of the device.
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
    pub(crate) by_kind: Vec<Sum>,
    pub(crate) by_library: Vec<Sum>,
    pub(crate) by_scope: Vec<Sum>,
    pub(crate) by_place: Vec<PlaceSum>,
}

/// One moment; with the changes of each device.
fn changes_at(history: &History, moment: Moment) -> Vec<Option<u32>> {
    let change = history.change_at(moment);
    // Each device has its own peak.
    history.devices.iter().map(|device| if moment == Moment::Peak { device.peak_at } else { change }).collect()
}

/// What was live then, by device, in the order of the history.
fn held_at(history: &History, moment: Moment) -> Vec<Vec<Held<'_>>> {
    let of_device = |(number, change): (u16, Option<u32>)| {
        let mut held = history.held_after(change);
        held.retain(|held| held.device == number);
        held
    };
    (0_u16..).zip(changes_at(history, moment)).map(of_device).collect()
}

fn held_between(history: &History, from: Moment, to: Moment) -> Vec<Vec<Held<'_>>> {
    let all = (0_u16..).zip(changes_at(history, from).into_iter().zip(changes_at(history, to)));
    let of_device = |(number, (from, to)): (u16, (Option<u32>, Option<u32>))| {
        let mut held = history.held_between(from, to);
        held.retain(|held| held.device == number);
        held
    };
    all.map(of_device).collect()
}

fn figures(history: &History, held: &[Vec<Held<'_>>]) -> Vec<DeviceMoment> {
    let figures = held.iter().zip(&history.devices).map(|(held, device)| {
        let on_device = || held.iter().filter(|held| held.origin.kind.is_on_device());
        DeviceMoment {
            device: device.device.ordinal,
            simulated: device.device.family == gpumem_core::model::Family::Simulated,
            bytes: on_device().map(|held| held.bytes).sum(),
            blocks: on_device().map(|held| held.blocks).sum(),
            by_kind: sums(sums_by(held, |origin| origin.kind.name().to_owned())),
            by_library: sums(sums_by(held, Origin::library_or_program)),
            by_scope: sums(sums_by(held, Origin::scope)),
            by_place: place_sums(held),
        }
    });
    figures.collect()
}

pub(crate) fn at(history: &History, moment: Moment) -> Vec<DeviceMoment> {
    figures(history, &held_at(history, moment))
}

pub(crate) fn between(history: &History, from: Moment, to: Moment) -> Vec<DeviceMoment> {
    figures(history, &held_between(history, from, to))
}

/// The time of a moment, in words: that of the first device that was used.
fn time(history: &History, moment: Moment, change: Option<u32>) -> String {
    match moment {
        Moment::Time(time) if time > history.end => {
            format!("{moment}, which is after the end of the recording ({})", in_words(history.end))
        }
        Moment::Start | Moment::Time(_) => moment.to_string(),
        Moment::Peak => change.map_or_else(
            || moment.to_string(),
            |at| format!("the peak, after {}", in_words(Duration::from_nanos(history.time_of(at)))),
        ),
        Moment::End => format!("the end, after {}", in_words(history.end)),
        Moment::Oom => history.oom().map_or_else(
            || moment.to_string(),
            |refused| {
                let (bytes, at) = (Bytes::new(refused.bytes), in_words(Duration::from_nanos(refused.time)));
                format!("the refusal of {bytes}, after {at}")
            },
        ),
    }
}

pub(crate) fn write_at(history: &History, moment: Moment, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let changes = changes_at(history, moment);
    for (at, held) in held_at(history, moment).iter().enumerate() {
        let device = history.devices[at].device;
        let name = history.definitions().device(device).and_then(|defined| defined.name.as_deref());
        let bytes: i64 = held.iter().filter(|held| held.origin.kind.is_on_device()).map(|held| held.bytes).sum();
        let title = format!(
            "{}: {} in use at {}",
            device_in_words(device, name),
            signed_amount(bytes),
            time(history, moment, changes[at])
        );
        write_tree(&title, held, Some(bytes.unsigned_abs()), at == 0, out, paint)?;
    }
    if history.devices.is_empty() {
        writeln!(out, "nothing was allocated")?;
    }
    Ok(())
}

pub(crate) fn write_between(
    history: &History,
    [from, to]: [Moment; 2],
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let changes = [from, to].map(|moment| changes_at(history, moment));
    for (at, held) in held_between(history, from, to).iter().enumerate() {
        let device = history.devices[at].device;
        let name = history.definitions().device(device).and_then(|defined| defined.name.as_deref());
        let bytes: i64 = held.iter().filter(|held| held.origin.kind.is_on_device()).map(|held| held.bytes).sum();
        let title = format!(
            "{}: {} {} between {} and {}",
            device_in_words(device, name),
            signed_amount(bytes),
            if bytes < 0 { "(less)" } else { "more" },
            time(history, from, changes[0][at]),
            time(history, to, changes[1][at])
        );
        write_tree(&title, held, None, at == 0, out, paint)?;
    }
    if history.devices.is_empty() {
        writeln!(out, "nothing was allocated")?;
    }
    Ok(())
}

fn write_tree(
    title: &str,
    held: &[Held<'_>],
    whole: Option<u64>,
    is_first: bool,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    if !is_first {
        writeln!(out)?;
    }
    writeln!(out, "{}", paint.on(Role::Heading, title))?;
    let rows = tree(&merged(held));
    if rows.is_empty() {
        return Ok(());
    }
    let title = if has_scopes(held) { "allocated in, and at" } else { "allocated at" };
    writeln!(out, "{}", shown(&Bars(title, &rows), paint))?;
    if let Some(whole) = whole {
        let line = |name: &str, text: String| format!("{}{text}", paint.on(Role::Faint, format!("{name:<9}")));
        writeln!(out, "{}", line("kind", shares(&sums_by(held, |origin| origin.kind.name().to_owned()), whole, 4)))?;
        writeln!(out, "{}", line("library", shares(&sums_by(held, Origin::library_or_program), whole, 4)))?;
    }
    Ok(())
}
