//! Sends gpumem's output as `tracing` events.

use gpumem::{
    __private::notice,
    Trace,
    sink::{Content, Level as OutputLevel, Output, Sink},
};
use tracing::Level;

use crate::stack::is_in_layer;

/// Emits an event whose level is known only at run time. The macros of `tracing` need a constant level.
macro_rules! emit {
    ($level:expr, [$($parent:tt)*], $($rest:tt)*) => {
        match $level {
            ::tracing::Level::ERROR => ::tracing::event!(target: "gpumem", $($parent)* ::tracing::Level::ERROR, $($rest)*),
            ::tracing::Level::WARN => ::tracing::event!(target: "gpumem", $($parent)* ::tracing::Level::WARN, $($rest)*),
            ::tracing::Level::INFO => ::tracing::event!(target: "gpumem", $($parent)* ::tracing::Level::INFO, $($rest)*),
            ::tracing::Level::DEBUG => ::tracing::event!(target: "gpumem", $($parent)* ::tracing::Level::DEBUG, $($rest)*),
            ::tracing::Level::TRACE => ::tracing::event!(target: "gpumem", $($parent)* ::tracing::Level::TRACE, $($rest)*),
        }
    };
}
pub(crate) use emit;

/// Returns the reason why the values may be wrong, or `None` if they are right to the byte.
pub(crate) fn note(trace: &Trace) -> Option<String> {
    let Trace { device, stale, lost, untracked, shared, allocated_on, .. } = *trace;
    if stale {
        return Some("could not be read".to_owned());
    }
    if trace.sampling.is_none() && (lost, untracked, shared.get(), allocated_on) == (0, 0, 0, None) {
        return None;
    }
    let sampled =
        trace.sampling.map(|sampling| format!("sampled every {:?}, all processes on the device", sampling.every));
    let lost = (lost > 0).then(|| format!("lost events: {lost}"));
    let untracked = (untracked > 0).then(|| format!("frees of unknown size: {untracked}"));
    let shared = (shared.get() > 0).then(|| format!("{shared} by threads in no scope"));
    let elsewhere = allocated_on.map(|other| format!("of device {device}; allocated on device {other}"));
    let all: Vec<String> = [elsewhere, sampled, lost, untracked, shared].into_iter().flatten().collect();
    Some(all.join("; "))
}

/// Sends gpumem's output to `tracing`, as events with the target `gpumem`: reports as `INFO`, notices as `WARN`, out of memory as
/// `ERROR`. The text is the message of the event. The fields are `kind` (as `type` in JSON) and, where known, `device`, `ctx`, `gpu_used`,
/// `gpu_peaked`, `gpu_note`, and `at`, the line in the program.
///
/// If the program installs no subscriber and some crate enables the feature `log` of `tracing`, the events go to the crate `log`.
///
/// While a [`GpuMemLayer`](crate::GpuMemLayer) opens or closes a span, no event can be emitted, so output goes to stderr.
///
/// ```
/// gpumem::sink::set_sink(gpumem_tracing::sink());
/// ```
pub fn sink() -> Sink {
    Sink::custom(|output| if is_in_layer() { notice(text(&output.content)) } else { send(output) })
}

fn send(output: &Output) {
    let level = match output.level {
        OutputLevel::Error => Level::ERROR,
        OutputLevel::Warning => Level::WARN,
        _ => Level::INFO,
    };
    let report = output.report();
    let trace = report.map(|report| report.trace);
    let measured = trace.filter(Trace::is_measured);
    let note = trace.and_then(|trace| note(&trace));
    let at = output.at.as_ref().map(tracing::field::display);
    emit!(
        level,
        [],
        kind = output.content.name(),
        device = output.device,
        ctx = report.and_then(|report| report.ctx.as_deref()),
        gpu_used = measured.map(|trace| trace.used.get()),
        gpu_peaked = measured.map(|trace| trace.peaked.get()),
        gpu_note = note.as_deref(),
        at,
        "{}",
        text(&output.content)
    );
}

fn text(content: &Content) -> String {
    match content {
        Content::Trace(report) => report.to_string(),
        Content::Tracked(tracked) => tracked.to_string(),
        Content::OutOfMemory(oom) => oom.to_string(),
        Content::Leaks(leaks) => leaks.to_string(),
        Content::Peaks(peaks) => peaks.to_string(),
        Content::Budget(text) | Content::Notice(text) => text.clone(),
        other => other.name().to_owned(),
    }
}
