//! Compares measured results with a budget, and writes the message if it was exceeded.

use std::fmt::{self, Display, Write};

use super::{OtherThread, PeakHolders, Place, counted};
use crate::model::{ByteDelta, Gauge, Source, Trace, one_line};

/// The quantities that a budget can limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The peak above the memory in use at the start.
    Peak,
    /// The increase of the memory in use from the start to the end.
    Used,
    /// The number of blocks that were allocated inside and are still live.
    Leaks,
}

/// The relation between a measured value and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// `<`
    Less,
    /// `<=`
    AtMost,
    /// `==`
    Equal,
    /// `!=`
    Unequal,
    /// `>=`
    AtLeast,
    /// `>`
    More,
}

/// One condition of a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The quantity that is limited.
    pub quantity: Quantity,
    /// The relation that must hold between the measured value and `amount`.
    pub relation: Relation,
    /// The limit in bytes, or in blocks.
    pub amount: i128,
    /// The origin of the amount, if it does not come from the condition itself.
    pub origin: Option<String>,
}

/// The threads that a budget counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counted {
    /// The thread of the function, and threads in its scopes, by default. If other threads allocate, it is not known whether they do
    /// so for the function.
    #[default]
    OwnThread,
    /// The same threads, with the option `thread_local`. Allocations of other threads do not matter.
    OwnThreadOnly,
    /// All threads of the process: the option `threads = "all"`. Other tests must not run at the same time.
    AllThreads,
}

/// The measured results of a function.
pub struct Measurement<'a> {
    /// The threads that were counted.
    pub counted: Counted,
    /// Returns the other threads that make the results unusable. Called only if there is a limit and nothing else is wrong.
    pub others: &'a dyn Fn() -> Vec<OtherThread>,
    /// The trace of the function.
    pub trace: Trace,
    /// The number of blocks that were allocated inside and are still live. `None` if it is not known.
    pub live: Option<u64>,
    /// The source locations with the most live memory, the largest first. `None` if they are not known. Called only if a limit is
    /// exceeded, because resolving lines is slow.
    pub places: &'a dyn Fn() -> Option<Vec<Place>>,
    /// The allocations that made up the peak. `None` if they are not known. Called only if the peak is too high.
    pub peak: &'a dyn Fn() -> Option<PeakHolders>,
}

/// The result of checking a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All limits were kept.
    Kept,
    /// Something could not be measured, for this reason.
    Unmeasured(String),
    /// The results are correct, but other threads allocated or freed, so it is not known whether the function kept the limits.
    /// The text contains the reason and the next step.
    NotKnown(String),
    /// A limit was exceeded. The text is the message.
    Broken(String),
}

/// Compares the results with the limits. If one limit is exceeded and the value for another is not known, the budget is broken.
pub fn judge(name: &str, limits: &[Limit], measured: &Measurement<'_>) -> Verdict {
    let Measurement { trace, .. } = measured;
    if let Some(reason) = unmeasured(trace) {
        return Verdict::Unmeasured(reason);
    }
    let mut unknown = None;
    let mut broken = String::new();
    let mut is_peak_broken = false;
    for limit in limits {
        match value_of(limit.quantity, measured) {
            None => unknown = Some(limit),
            Some(value) if limit.relation.holds(value, limit.amount) => {}
            Some(value) => {
                is_peak_broken |= limit.quantity == Quantity::Peak;
                let _ = write!(broken, "\n  {}", Complaint { limit, value });
            }
        }
    }
    let others = if limits.is_empty() { Vec::new() } else { OtherThread::largest((measured.others)()) };
    if !broken.is_empty() {
        return Verdict::Broken(format!(
            "`{}` did not keep its GPU memory budget:{broken}{}",
            one_line(name),
            Circumstances { measured, is_peak_broken, others: &others }
        ));
    }
    if !others.is_empty() {
        return Verdict::NotKnown(because_of_others(measured, &others));
    }
    match unknown {
        Some(limit) => {
            Verdict::Unmeasured(format!("for `{}`, which blocks are still live is not known", limit.quantity))
        }
        None => Verdict::Kept,
    }
}

/// Returns the reason why the results cannot be compared with a budget, if there is one.
fn unmeasured(trace: &Trace) -> Option<String> {
    match trace.gauge {
        Gauge::Off => Some("traces are off".to_owned()),
        // The thread is inside gpumem already, or this is the child of a fork.
        Gauge::Exact if trace.stale => Some("its trace could not be read".to_owned()),
        Gauge::Exact if trace.allocated_on.is_some() => Some(format!(
            "it is for device {}, and its thread allocated on device {} only: name that device (`device = {1}`, which \
             `#[gpu_mem_test]` and `#[gpu_mem_trace]` take), or make it current before",
            trace.device,
            trace.allocated_on.unwrap_or_default()
        )),
        Gauge::Exact if trace.lost > 0 => {
            Some(counted(trace.lost, "allocation or free was missed", "allocations or frees were missed"))
        }
        Gauge::Exact => None,
        // A peak that a custom gauge has read is certain, but a higher one may have been missed.
        Gauge::Sampled if trace.source == Source::Custom => {
            trace.stale.then(|| "the program's gauge could not be read".to_owned())
        }
        gauge => Some(format!("its numbers are {gauge}, not exact")),
    }
}

fn value_of(quantity: Quantity, measured: &Measurement<'_>) -> Option<i128> {
    match quantity {
        Quantity::Peak => Some(measured.trace.peak_over_start().get().into()),
        Quantity::Used => Some(measured.trace.used.get().into()),
        Quantity::Leaks => measured.live.map(Into::into),
    }
}

impl Relation {
    fn holds(self, value: i128, amount: i128) -> bool {
        match self {
            Self::Less => value < amount,
            Self::AtMost => value <= amount,
            Self::Equal => value == amount,
            Self::Unequal => value != amount,
            Self::AtLeast => value >= amount,
            Self::More => value > amount,
        }
    }
}

impl Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peak => "peak",
            Self::Used => "used",
            Self::Leaks => "leaks",
        })
    }
}

impl Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Less => "<",
            Self::AtMost => "<=",
            Self::Equal => "==",
            Self::Unequal => "!=",
            Self::AtLeast => ">=",
            Self::More => ">",
        })
    }
}

/// A text such as `peak <= 512 MiB: it was 640 MiB, 128 MiB over`.
struct Complaint<'a> {
    limit: &'a Limit,
    value: i128,
}

impl Display for Complaint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit: Limit { quantity: name, relation, amount, origin }, value } = self;
        let shown = |amount: i128| match name {
            Quantity::Leaks => counted(amount, "block", "blocks"),
            Quantity::Peak | Quantity::Used => exactly(amount),
        };
        write!(f, "{name} {relation} {}", shown(*amount))?;
        if let Some(origin) = origin {
            write!(f, " ({})", one_line(origin))?;
        }
        write!(f, ": it was {}", shown(*value))?;
        match value.saturating_sub(*amount) {
            0 => Ok(()),
            over @ 1.. => write!(f, ", {} over", shown(over)),
            under => write!(f, ", {} under", shown(-under)),
        }
    }
}

/// Returns an amount without rounding: in the largest unit that gives a whole number, or else in bytes.
fn exactly(bytes: i128) -> String {
    let Ok(bytes) = i64::try_from(bytes) else { return format!("{bytes} B") };
    let text = ByteDelta::new(bytes).to_string();
    if text.contains('.') { format!("{bytes} B ({text})") } else { text }
}

/// Returns the reason why it is not known whether a budget was kept, and the next step.
fn because_of_others(measured: &Measurement<'_>, others: &[OtherThread]) -> String {
    let device = device(&measured.trace);
    let (why, next) = match measured.counted {
        Counted::AllThreads => (
            format!("it counts all threads, and other tests allocated or freed on {device} at the same time"),
            "give these tests the attribute #[gpu_mem_test], so that one waits for the other, or run the tests one after the other \
             (--test-threads=1)",
        ),
        Counted::OwnThread | Counted::OwnThreadOnly => (
            format!("it counts its own thread, and other threads allocated on {device} at the same time"),
            "let it count them: with the option threads = \"all\" a budget counts every thread, and its test runs alone; or let these \
             threads enter a scope of this thread (GpuMemTrace::handle)",
        ),
    };
    format!("{why}:{}\n  {next}", rows(others))
}

fn rows(others: &[OtherThread]) -> String {
    const MOST: usize = 10;
    let mut text = String::new();
    for other in others.iter().take(MOST) {
        let _ = write!(text, "\n    {other}");
    }
    if let more @ 1.. = others.len().saturating_sub(MOST) {
        let _ = write!(text, "\n    and {}", counted(more as i128, "more thread", "more threads"));
    }
    text
}

/// Returns a text such as `simulated device 0`.
fn device(trace: &Trace) -> String {
    if trace.source == Source::Custom {
        return "the program's gauge".to_owned();
    }
    let simulated = if trace.simulated { "simulated " } else { "" };
    format!("{simulated}device {}", trace.device)
}

/// The text about the measurement, and the places that hold the memory.
struct Circumstances<'a> {
    measured: &'a Measurement<'a>,
    others: &'a [OtherThread],
    is_peak_broken: bool,
}

impl Display for Circumstances<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Measurement { trace, places, peak, .. } = self.measured;
        let places = places();
        let what = match self.measured.counted {
            Counted::AllThreads => "the allocations of all threads",
            Counted::OwnThread | Counted::OwnThreadOnly => "the allocations of its own thread",
        };
        write!(f, "\n  measured on {}, {}, {what}", device(trace), trace.gauge)?;
        if !self.others.is_empty() {
            let not = if self.measured.counted == Counted::AllThreads { "other tests too" } else { "not counted" };
            write!(f, "\n  at the same time, other threads allocated ({not}):{}", rows(self.others))?;
        }
        if trace.untracked > 0 {
            let freed =
                counted(trace.untracked, "block of unknown size was freed", "blocks of unknown size were freed");
            write!(f, "\n  {freed}: `used` may be too high")?;
        }
        // Holders that add up to another peak would not explain this one.
        let peak = if self.is_peak_broken { peak().filter(|peak| peak.bytes == trace.peak_over_start()) } else { None };
        if let Some(peak) = &peak {
            made_peak(f, peak)?;
        }
        match places.as_deref() {
            Some([]) if peak.is_some() => Ok(()),
            None => f.write_str("\n  the largest places: not known"),
            Some([]) => f.write_str("\n  nothing that was allocated inside is live"),
            Some(places) => {
                f.write_str("\n  the largest places:")?;
                places.iter().try_for_each(|place| {
                    let count = counted(place.blocks, "block", "blocks");
                    let each = place.each.filter(|_| place.blocks > 1);
                    let each = each.map(|each| format!(" of {each}")).unwrap_or_default();
                    write!(f, "\n    {:>12} in {count}{each}: {}", place.bytes, one_line(&place.name))?;
                    place.caller.iter().try_for_each(|caller| write!(f, ", from {}", one_line(caller)))
                })
            }
        }
    }
}

/// Writes the scopes and lines that made up the peak. The smallest share one row, so that all rows add up to the peak.
fn made_peak(f: &mut fmt::Formatter<'_>, peak: &PeakHolders) -> fmt::Result {
    const MOST: usize = 10;
    write!(f, "\n  the peak of {} was made of:", peak.bytes)?;
    let holders = &peak.holders;
    let (listed, rest) = holders.split_at(if holders.len() > MOST + 1 { MOST } else { holders.len() });
    for holder in listed {
        let inside = if holder.path.is_empty() { "" } else { "in " };
        let (who, scope) = (holder.who(), holder.scope());
        write!(f, "\n    {:>12}: {}, {inside}{}", holder.bytes, one_line(&who), one_line(&scope))?;
        holder.caller.iter().try_for_each(|caller| write!(f, ", from {}", one_line(caller)))?;
    }
    if rest.is_empty() {
        return Ok(());
    }
    let bytes = ByteDelta::new(rest.iter().map(|holder| holder.bytes.get()).sum());
    write!(f, "\n    {bytes:>12}: {} more places", rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Bytes;

    fn limit(quantity: Quantity, relation: Relation, amount: i128) -> Limit {
        Limit { quantity, relation, amount, origin: None }
    }

    fn trace(used: i64, peaked: u64) -> Trace {
        Trace { gauge: Gauge::Exact, used: ByteDelta::new(used), peaked: Bytes::new(peaked), ..Trace::off(0) }
    }

    fn measured(trace: Trace) -> Measurement<'static> {
        let counted = Counted::OwnThread;
        Measurement { counted, others: &Vec::new, trace, live: None, places: &|| None, peak: &|| None }
    }

    fn other(who: &str, place: Option<&str>) -> OtherThread {
        let place = place.map(ToOwned::to_owned);
        OtherThread { who: who.to_owned(), place, threads: 1, blocks: 1, bytes: Bytes::mib(256), freed: Bytes::ZERO }
    }

    #[test]
    fn a_budget_that_other_threads_disturbed_is_not_known_to_be_kept() {
        let limits = [limit(Quantity::Peak, Relation::AtMost, 1 << 20)];
        let pool = || vec![other("a thread without a name", Some("src/a.rs:1")); 8];
        let disturbed = Measurement { others: &pool, ..measured(trace(0, 0)) };
        let Verdict::NotKnown(text) = judge("f", &limits, &disturbed) else { panic!("it is not known") };
        assert_eq!(
            text,
            "it counts its own thread, and other threads allocated on device 0 at the same time:\
             \n           2 GiB in 8 blocks: a thread without a name (8 of them), src/a.rs:1\
             \n  let it count them: with the option threads = \"all\" a budget counts every thread, and its test runs alone; or let \
             these threads enter a scope of this thread (GpuMemTrace::handle)"
        );
        let all = Measurement { counted: Counted::AllThreads, ..disturbed };
        let Verdict::NotKnown(text) = judge("f", &limits, &all) else { panic!("it is not known") };
        assert!(
            text.contains("other tests allocated or freed on device 0") && text.contains("#[gpu_mem_test]"),
            "{text}"
        );
        // Without a limit, `others` is not called; a limit that is certainly broken counts as broken.
        let undisturbed = || -> Vec<OtherThread> { panic!("nobody asks") };
        assert_eq!(judge("f", &[], &Measurement { others: &undisturbed, ..measured(trace(0, 0)) }), Verdict::Kept);
        let broken = Measurement { others: &pool, ..measured(trace(0, 2 << 20)) };
        let Verdict::Broken(text) = judge("f", &limits, &broken) else { panic!("it is broken") };
        assert!(
            text.contains("at the same time, other threads allocated (not counted):\n           2 GiB in 8 blocks"),
            "{text}"
        );
        let many = || (0..12).map(|at| other(&format!("thread {at}"), None)).collect::<Vec<_>>();
        let Verdict::NotKnown(text) = judge("f", &limits, &Measurement { others: &many, ..disturbed }) else {
            panic!()
        };
        assert!(text.contains("\n    and 2 more threads\n"), "{text}");
    }

    #[test]
    fn a_budget_of_another_device_is_not_measured() {
        let limits = [limit(Quantity::Peak, Relation::AtMost, 1 << 20)];
        let elsewhere = Trace { allocated_on: Some(2), ..trace(0, 0) };
        let Verdict::Unmeasured(text) = judge("f", &limits, &measured(elsewhere)) else { panic!("it is not measured") };
        assert!(
            text.starts_with("it is for device 0, and its thread allocated on device 2 only: name that device"),
            "{text}"
        );
    }

    #[test]
    fn relations_hold_as_they_are_written() {
        use Relation::{AtLeast, AtMost, Equal, Less, More, Unequal};
        for (relation, below, at, above) in [
            (Less, true, false, false),
            (AtMost, true, true, false),
            (Equal, false, true, false),
            (Unequal, true, false, true),
            (AtLeast, false, true, true),
            (More, false, false, true),
        ] {
            for (used, kept) in [(-21, below), (-20, at), (-19, above)] {
                let verdict = judge("f", &[limit(Quantity::Used, relation, -20)], &measured(trace(used, 0)));
                assert_eq!(verdict == Verdict::Kept, kept, "{used} {relation} -20: {verdict:?}");
            }
        }
    }

    #[test]
    fn peak_is_over_the_start() {
        let limits = [limit(Quantity::Peak, Relation::AtMost, 30)];
        assert_eq!(judge("f", &limits, &measured(trace(10, 20))), Verdict::Kept);
        assert_eq!(judge("f", &limits, &measured(trace(-10, 30))), Verdict::Kept);
        assert!(matches!(judge("f", &limits, &measured(trace(10, 21))), Verdict::Broken(_)));
    }

    #[test]
    fn a_broken_budget_is_reported_with_its_numbers() {
        let place = || Place {
            name: "src/model.rs:12".to_owned(),
            caller: None,
            blocks: 2,
            bytes: Bytes::mib(600),
            each: Some(Bytes::mib(300)),
        };
        let limits = [
            limit(Quantity::Peak, Relation::AtMost, 512 << 20),
            limit(Quantity::Used, Relation::Equal, 0),
            limit(Quantity::Used, Relation::Less, 1 << 40),
            Limit { origin: Some("base.json".to_owned()), ..limit(Quantity::Peak, Relation::Less, 640 << 20) },
            limit(Quantity::Leaks, Relation::AtMost, 0),
        ];
        let trace = Trace { simulated: true, ..trace(-1025, 640 << 20) };
        let measured = Measurement { live: Some(2), places: &|| Some(vec![place()]), ..measured(trace) };
        assert_eq!(
            judge("model::forward", &limits, &measured),
            Verdict::Broken(
                "`model::forward` did not keep its GPU memory budget:\
                 \n  peak <= 512 MiB: it was 640 MiB, 128 MiB over\
                 \n  used == 0 B: it was -1025 B (-1.00 KiB), 1025 B (1.00 KiB) under\
                 \n  peak < 640 MiB (base.json): it was 640 MiB\
                 \n  leaks <= 0 blocks: it was 2 blocks, 2 blocks over\
                 \n  measured on simulated device 0, exact, the allocations of its own thread\
                 \n  the largest places:\
                 \n         600 MiB in 2 blocks of 300 MiB: src/model.rs:12"
                    .to_owned()
            )
        );
    }

    #[test]
    fn what_is_not_known_is_not_kept() {
        let unmeasured = |limits: &[Limit], trace| match judge("f", limits, &measured(trace)) {
            Verdict::Unmeasured(reason) => reason,
            other => panic!("{other:?}"),
        };
        let leaks = [limit(Quantity::Leaks, Relation::AtMost, 0)];
        assert_eq!(unmeasured(&leaks, trace(0, 0)), "for `leaks`, which blocks are still live is not known");
        assert_eq!(unmeasured(&[], Trace::off(0)), "traces are off");
        assert_eq!(unmeasured(&[], Trace { lost: 1, ..trace(0, 0) }), "1 allocation or free was missed");
        assert_eq!(unmeasured(&[], Trace { stale: true, ..trace(0, 0) }), "its trace could not be read");
        let sampled = Trace { gauge: Gauge::Sampled, ..trace(0, 0) };
        assert_eq!(unmeasured(&[], sampled), "its numbers are sampled, not exact");
        // A limit that is certainly broken counts as broken.
        let both = [leaks[0].clone(), limit(Quantity::Used, Relation::Less, 1)];
        assert!(matches!(judge("f", &both, &measured(trace(1, 0))), Verdict::Broken(_)));
    }
}
