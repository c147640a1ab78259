//! The memory at one moment, and the changes between two moments, for `--at` and `--between`.

use std::{
    io::{self, Write},
    time::Duration,
};

use gpumem_core::{
    derive::registered_pool,
    export::{Amounts, InPaint, Paint, Role, or_unknown, part_table},
    model::{ByteDelta, Bytes, Family},
};
use serde::Serialize;

use super::{
    overview::PoolOverview,
    place_sums::{PlaceSum, place_sums},
    process,
    rejected::in_use_at_oom,
    text::{BESIDES_NOT_KNOWN, device_in_words, has_scopes, shares, tree, unit_of},
};
use crate::history::{DeviceHistory, History, Moment, Origin, OriginSum, ProcessMemory, Sum, in_words, sums_by};

/// The memory that was live on one device at one moment, or its increase since another one.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceMoment {
    pub(crate) device: u32,
    pub(crate) simulated: bool,
    /// The bytes in the memory of the device. This field and each one below are `None` if the recording does not contain
    /// the value.
    pub(crate) bytes: Option<i64>,
    pub(crate) blocks: Option<i64>,
    /// The parts of these bytes.
    pub(crate) by_kind: Option<Vec<Sum>>,
    pub(crate) by_library: Option<Vec<Sum>>,
    pub(crate) by_scope: Option<Vec<Sum>>,
    pub(crate) by_place: Option<Vec<PlaceSum>>,
    /// Managed and pinned host memory, by kind and by place, which is not part of `bytes`.
    pub(crate) besides: Option<Vec<Sum>>,
    pub(crate) besides_by_place: Option<Vec<PlaceSum>>,
    /// The memory of the process, with what the driver took by itself. `None` if that was not measured.
    pub(crate) process: Option<ProcessMemory>,
    /// The registered pools. `None` also for the difference of two moments.
    pub(crate) pools: Option<Vec<PoolOverview>>,
}

/// The memory that belongs to a device.
struct Held<'a> {
    on_device: Vec<OriginSum<'a>>,
    /// Managed and pinned host memory; `None` if the recording does not contain it.
    besides: Option<Vec<OriginSum<'a>>>,
}

/// The memory of each device, in the order of the history; `None` if the recording does not contain it.
type AllHeld<'a> = Vec<Option<Held<'a>>>;

/// Returns `held`, or `None` for each device if a moment is not known.
fn known<'a>(history: &History, moments: &[Moment], held: impl FnOnce() -> Vec<Vec<OriginSum<'a>>>) -> AllHeld<'a> {
    if !moments.iter().all(|moment| history.is_known_at(*moment)) {
        return history.devices.iter().map(|_| None).collect();
    }
    let has_besides = moments.iter().all(|moment| history.has_besides_at(*moment));
    let known = held().into_iter().map(|held| {
        let (on_device, besides) = held.into_iter().partition(|held| held.origin.kind.is_on_device());
        Some(Held { on_device, besides: has_besides.then_some(besides) })
    });
    known.collect()
}

fn held_at(history: &History, moment: Moment) -> AllHeld<'_> {
    known(history, &[moment], || history.held_after(&history.changes_at(moment)))
}

fn held_between(history: &History, from: Moment, to: Moment) -> AllHeld<'_> {
    let changes = || history.changes_at(from).into_iter().zip(history.changes_at(to)).collect::<Vec<_>>();
    known(history, &[from, to], || history.held_between(&changes()))
}

/// The memory of the process on each device, in the order of the history; `None` if the recording does not contain it.
type Processes = Vec<Option<ProcessMemory>>;

fn process_at(history: &History, moment: Moment) -> Processes {
    if history.is_known_at(moment) { history.process_at(moment) } else { vec![None; history.devices.len()] }
}

fn process_between(history: &History, from: Moment, to: Moment) -> Processes {
    let is_known = [from, to].iter().all(|moment| history.is_known_at(*moment));
    if is_known { history.process_between(from, to) } else { vec![None; history.devices.len()] }
}

/// Returns the pools of a device that have memory at a moment. `None` if the recording does not contain them.
fn pools_at(history: &History, moment: Moment, device: &DeviceHistory) -> Option<Vec<PoolOverview>> {
    let known = history.pools_at(moment, device)?;
    let overlaps = history.overlaps(&known);
    let pools = known.iter().map(|pool| registered_pool(pool, &overlaps, history.definitions()));
    Some(pools.filter(|pool| !pool.is_empty()).map(|pool| PoolOverview::of(pool, false)).collect())
}

fn device_moments(
    history: &History,
    held: &AllHeld<'_>,
    processes: Processes,
    moment: Option<Moment>,
) -> Vec<DeviceMoment> {
    let device_moments = held.iter().zip(&history.devices).zip(processes).map(|((held, device), process)| {
        let besides = held.as_ref().and_then(|held| held.besides.as_deref());
        let held = held.as_ref().map(|held| &*held.on_device);
        let kinds = |held| sums_by(held, |origin| origin.kind.name().to_owned());
        DeviceMoment {
            device: device.device.ordinal,
            simulated: device.device.family == Family::Simulated,
            bytes: held.map(|held| held.iter().map(|held| held.bytes).sum()),
            blocks: held.map(|held| held.iter().map(|held| held.blocks).sum()),
            by_kind: held.map(kinds),
            by_library: held.map(|held| sums_by(held, Origin::library_or_program)),
            by_scope: held.map(|held| sums_by(held, Origin::scope)),
            by_place: held.map(place_sums),
            process,
            besides: besides.map(kinds),
            besides_by_place: besides.map(place_sums),
            pools: moment.and_then(|moment| pools_at(history, moment, device)),
        }
    });
    device_moments.collect()
}

pub(crate) fn at(history: &History, moment: Moment) -> Vec<DeviceMoment> {
    device_moments(history, &held_at(history, moment), process_at(history, moment), Some(moment))
}

pub(crate) fn between(history: &History, from: Moment, to: Moment) -> Vec<DeviceMoment> {
    let processes = process_between(history, from, to);
    device_moments(history, &held_between(history, from, to), processes, None)
}

/// Returns the time of a moment as text. `change` is the last change up to the moment on the device that is shown,
/// because each device has its own peak.
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
            |rejected| {
                let (bytes, at) = (Bytes::new(rejected.bytes), in_words(Duration::from_nanos(rejected.time)));
                format!("the rejected allocation of {bytes}, after {at}")
            },
        ),
    }
}

pub(crate) fn write_at(history: &History, moment: Moment, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let changes = history.changes_at(moment);
    let title = |at: usize, _: Option<i64>| format!("in use at {}", time(history, moment, changes[at]));
    let held = (&held_at(history, moment), process_at(history, moment));
    write(history, held, title, Some(moment), out, paint)
}

pub(crate) fn write_between(
    history: &History,
    [from, to]: [Moment; 2],
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let changes = [from, to].map(|moment| history.changes_at(moment));
    let title = |at: usize, bytes: Option<i64>| {
        let more = if bytes.is_some_and(|bytes| bytes < 0) { "(less)" } else { "more" };
        let times = [time(history, from, changes[0][at]), time(history, to, changes[1][at])];
        format!("{more} between {}", times.join(" and "))
    };
    let held = (&held_between(history, from, to), process_between(history, from, to));
    write(history, held, title, None, out, paint)
}

/// Writes the memory of each device. `title` names the amount of a device. With a `moment`, its parts and the pools are
/// written, too.
fn write(
    history: &History,
    (all, processes): (&AllHeld<'_>, Processes),
    title: impl Fn(usize, Option<i64>) -> String,
    moment: Option<Moment>,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    for (at, held) in all.iter().enumerate() {
        let device = history.devices[at].device;
        let name = history.definitions().device(device).and_then(|defined| defined.name.as_deref());
        let besides = held.as_ref().map(|held| &held.besides);
        let held = held.as_ref().map(|held| &*held.on_device);
        let bytes: Option<i64> = held.map(|held| held.iter().map(|held| held.bytes).sum());
        let amount = or_unknown(bytes.map(ByteDelta::new));
        if at > 0 {
            writeln!(out)?;
        }
        let title = format!("{}: {amount} {}", device_in_words(device, name), title(at, bytes));
        writeln!(out, "{}", paint.on(Role::Heading, title))?;
        if let Some(in_use) = in_use_at_oom(history, at).filter(|_| moment == Some(Moment::Oom)) {
            writeln!(out, "{in_use}")?;
        }
        let held = held.unwrap_or_default();
        let rows = tree(held);
        let whole = bytes.unwrap_or(0).unsigned_abs();
        // The parts of a difference may be far larger than their sum.
        let unit = match moment {
            Some(_) => unit_of(whole),
            None => Amounts::of(rows.iter().map(|row| row.bytes)),
        };
        let title = if has_scopes(held) { "allocated in, and at" } else { "allocated at" };
        if !rows.is_empty() {
            writeln!(out, "{}", InPaint(&part_table(title, &rows, unit), paint))?;
        }
        if let Some(process) = &processes[at] {
            let unit = if whole == 0 { unit_of(process.bytes.unsigned_abs()) } else { unit };
            process::write(process, unit, moment.is_none(), out, paint)?;
        }
        let line = |name: &str, text: &str| format!("{}{text}", paint.on(Role::Faint, format!("{name:<9}")));
        match besides {
            // If the memory of the device is not known either, the `?` in the title says so.
            None => {}
            Some(None) => writeln!(out, "{}", line("besides", BESIDES_NOT_KNOWN))?,
            Some(Some(besides)) if besides.is_empty() => {}
            Some(Some(besides)) => {
                let kinds = sums_by(besides, |origin| origin.kind.name().to_owned());
                let kinds: Vec<_> = kinds.iter().map(|sum| &*sum.name).collect();
                let title = format!("besides: {}", kinds.join(", "));
                writeln!(out, "{}", InPaint(&part_table(&title, &tree(besides), unit), paint))?;
            }
        }
        let Some(moment) = moment else { continue };
        if bytes.is_some() && !rows.is_empty() {
            let kinds = sums_by(held, |origin| origin.kind.name().to_owned());
            writeln!(out, "{}", line("kind", &shares(&kinds, whole)))?;
            writeln!(out, "{}", line("library", &shares(&sums_by(held, Origin::library_or_program), whole)))?;
        }
        let pools = pools_at(history, moment, &history.devices[at]);
        pools.iter().flatten().try_for_each(|pool| writeln!(out, "{}", pool.in_words(unit)))?;
    }
    if history.devices.is_empty() {
        writeln!(out, "nothing was allocated")?;
    }
    Ok(())
}
