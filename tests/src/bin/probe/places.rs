//! Commands about the holders of memory: scopes, the breakdown of a device, the report of a failed allocation.

use gpumem::{
    Bytes, GpuMemTrace,
    report::{Breakdown, PartKind},
};

use crate::{Names, Trouble};

/// Starts a trace that prints nothing.
pub(crate) fn scope(name: &str) -> gpumem::Result<GpuMemTrace> {
    GpuMemTrace::builder().ctx(name).silent(true).start()
}

/// Prints each failed allocation as an answer: `> refused: bytes kind, device, path; bytes in use, bytes in parts`.
pub(crate) fn print_refusals() {
    gpumem::oom::on_oom(|oom| {
        let reported = oom.breakdown.as_ref().map_or_else(ToString::to_string, |reported| {
            format!("{} in use, {} in parts", reported.memory.used.get(), sum(reported))
        });
        println!("> refused: {} {}, device {}, {:?}; {reported}", oom.requested.get(), oom.kind, oom.device, oom.path);
    });
}

/// Makes each failed allocation call `function argument…`, whose result is printed as an answer `on_refusal`.
pub(crate) fn on_refusal(names: &Names, call: &str) {
    let (names, call) = (names.clone(), call.to_owned());
    gpumem::oom::on_oom(move |_| match names.call(&call) {
        Ok(result) => println!("> on_refusal: {result}"),
        Err(trouble) => println!("> on_refusal: {trouble}"),
    });
}

/// Makes each failed allocation panic.
pub(crate) fn panic_on_refusal() {
    gpumem::oom::on_oom(|_| panic!("the hook's own"));
}

fn sum(reported: &Breakdown) -> u64 {
    reported.parts.iter().map(|part| part.bytes).sum::<Bytes>().get()
}

/// Returns `bytes name (count)` for each part, in MiB if the bytes are whole MiB, and whether the parts add up.
pub(crate) fn breakdown(device: Option<u32>) -> gpumem::Result<String> {
    let reported = gpumem::breakdown(device)?;
    let part = |part: &gpumem::report::Part| {
        let kind = match part.kind {
            PartKind::Others => "others",
            PartKind::Scope => "scope",
            PartKind::Library => "library",
            PartKind::PoolCache => "cache",
            PartKind::Driver => "driver",
            PartKind::Unknown => "unknown",
            _ => "?",
        };
        let count = if part.count == 0 { String::new() } else { format!(" ({})", part.count) };
        format!("{kind} `{}` {}{count}", part.name, part.bytes)
    };
    let parts: Vec<_> = reported.parts.iter().map(part).collect();
    let adds_up = if sum(&reported) == reported.memory.used.get() { "adds up" } else { "does not add up" };
    Ok(format!("{}, {adds_up}: {}", reported.memory.used, parts.join(", ")))
}

/// Returns `name KiB` for each part that the driver took, without the lines; `nothing` if there is none.
pub(crate) fn taken(device: Option<u32>) -> gpumem::Result<String> {
    let reported = gpumem::breakdown(device)?;
    let own = reported.parts.iter().filter(|part| part.kind == PartKind::Driver);
    Ok(without_lines(own.map(|part| (part.name.clone(), part.bytes))))
}

/// Returns the rows of [`GpuMemTrace::driver_memory`] in the same form.
pub(crate) fn taken_inside(trace: &GpuMemTrace) -> String {
    without_lines(trace.driver_memory().into_iter().map(|row| (row.to_string(), row.bytes)))
}

/// Returns `name KiB` for each part, without the lines in the names.
fn without_lines(parts: impl Iterator<Item = (String, Bytes)>) -> String {
    let part = |(name, bytes): (String, Bytes)| {
        let kib = bytes.get() / 1024;
        match name.split_once(" (src/") {
            Some((name, rest)) => format!("{name}{} {kib}", rest.split_once(')').map_or("", |(_, rest)| rest)),
            None => format!("{name} {kib}"),
        }
    };
    let parts: Vec<_> = parts.map(part).collect();
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(" + ") }
}

/// Returns `path calls used peak total allocations` for each scope with a path, and `all` for the process. If there is no scope,
/// returns the text of the summary.
pub(crate) fn summary() -> String {
    let scopes = gpumem::summary().scopes.into_iter().map(|scope| {
        let path = if scope.path.is_empty() { "all".to_owned() } else { scope.path.join("/") };
        let [used, peak, total] = [scope.used, scope.peak, scope.allocated].map(Bytes::get);
        format!("{path} {} {used} {peak} {total} {}", scope.calls, scope.allocations)
    });
    let scopes = scopes.collect::<Vec<_>>();
    if scopes.is_empty() { gpumem::summary().to_string().trim().replace('\n', "|") } else { scopes.join(", ") }
}

/// Returns the text of the summary, the statistics of the current device and the live blocks.
pub(crate) fn all_reports() -> gpumem::Result<String> {
    let stats = gpumem::torch::memory_stats(None)?;
    let live = gpumem::torch::memory_snapshot()?;
    Ok(format!("{:?} {:?} {live:?}", gpumem::summary().to_string(), (stats.all, stats.kinds)))
}

/// Calls `function argument…`, and tries again if the call fails. Returns the results of all attempts.
pub(crate) fn retry(names: &Names, call: &str) -> Result<String, Trouble> {
    let mut results = Vec::new();
    let tried = gpumem::oom::retry_after_trim(|| match names.call(call) {
        Ok(result) => {
            results.push(result.to_string());
            if result == 0 { Ok(()) } else { Err(None) }
        }
        Err(trouble) => Err(Some(trouble)),
    });
    match tried {
        Err(Some(trouble)) => Err(trouble),
        Ok(()) | Err(None) => Ok(results.join(" ")),
    }
}
