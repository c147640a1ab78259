//! Budgets: what a body may come to, and what happens when it comes to more.

use std::{fmt::Display, path::PathBuf, thread};

#[cfg(feature = "sim")]
use once_cell::sync::OnceCell;

use super::baseline;
use crate::{
    model::{Gauge, Trace},
    report::{Content, Figure, Found, Limit, Place, Relation, Verdict, by_place, judge},
    session::{GpuMemTrace, GpuMemTraceBuilder, Notice, current},
    sys::process,
};

/// How many blocks were allocated inside the trace and are still live. `None`: not known.
fn live_inside(trace: &GpuMemTrace) -> Option<u64> {
    (trace.data().gauge == Gauge::Exact).then(|| trace.live().len() as u64)
}

/// The ten largest places that hold what was allocated inside the trace and is still live. `None`: not known.
fn places(trace: &GpuMemTrace) -> Option<Vec<Place>> {
    if trace.data().gauge != Gauge::Exact {
        return None;
    }
    Some(by_place(&trace.live()))
}

/// Panics with a text, in the function that is held to a budget.
type Fail = fn(&str) -> !;

/// What a body may come to. It counts what its own thread allocates, exactly.
pub struct Budget {
    name: String,
    fail: Fail,
    limits: Vec<Limit>,
    /// A body that cannot be measured fails too.
    strict: bool,
    /// The device is to be the GPU, if there is one.
    real_if_any: bool,
    baseline: Option<Baseline>,
}

/// An earlier peak.
struct Baseline {
    file: PathBuf,
    key: String,
    /// What is let pass, in hundredths of a per cent.
    growth: u32,
}

impl Budget {
    /// The budget of a function in a program: where nothing can be measured, that is said once and the program goes on.
    pub fn of_function(name: impl Into<String>, fail: Fail) -> Self {
        Self { name: name.into(), fail, limits: Vec::new(), strict: false, real_if_any: false, baseline: None }
    }

    /// The budget of an assertion: where nothing can be measured, it fails.
    pub fn of_assertion(name: impl Into<String>, fail: Fail) -> Self {
        Self { strict: true, ..Self::of_function(name, fail) }
    }

    /// The budget of a test. `growth` over the baseline, in hundredths of a per cent, is let pass; the baseline is in
    /// `file`, else where `GPUMEM_BASELINE` says, if it does.
    /// `simulated` says that the test takes its memory from [`simulated_gpu`]. `binary` is the program that the test is part
    /// of, if it is not a library's: `src/main.rs` and `src/lib.rs` of a package name their tests the same.
    pub fn of_test(
        name: impl Into<String>,
        binary: Option<&str>,
        file: Option<&str>,
        growth: u32,
        simulated: bool,
        fail: Fail,
    ) -> Self {
        let name = name.into();
        let file = file.map(PathBuf::from).or_else(|| current().settings().baseline.clone());
        let key = binary.map_or_else(|| name.clone(), |binary| format!("{name} (bin {binary})"));
        let baseline = file.map(|file| Baseline { file, key, growth });
        Self { baseline, real_if_any: !simulated, ..Self::of_assertion(name, fail) }
    }

    /// One condition more.
    #[must_use]
    pub fn limit(mut self, figure: Figure, relation: Relation, amount: impl TryInto<i128>) -> Self {
        let amount = amount.try_into().unwrap_or(i128::MAX);
        self.limits.push(Limit { figure, relation, amount, origin: None });
        self
    }

    /// Starts the trace that the budget needs, or any, if the body is to run without its budget.
    pub(in crate::session) fn start(self, builder: GpuMemTraceBuilder) -> (GpuMemTrace, Option<Self>) {
        #[cfg(feature = "sim")]
        if self.real_if_any {
            if !is_there() {
                simulated_gpu();
            } else if *HIDDEN.get().unwrap_or(&false) {
                self.unmeasured(
                    "another test of this process runs on the simulated device, and GPUs are not listened to any more; \
                     run each test in a process of its own (cargo nextest)",
                );
                return (builder.start_or_off(), None);
            }
        }
        let is_peak_limited = self.baseline.is_some() || self.limits.iter().any(|limit| limit.figure == Figure::Peak);
        // Of a program that asks for it anyway, the trace keeps it.
        let counted = builder.clone().thread_local_only();
        let counted = if is_peak_limited { counted.at_peak(true) } else { counted };
        match counted.start() {
            Ok(trace) if trace.data().gauge != Gauge::Off => (trace, Some(self)),
            Ok(_) => {
                self.unmeasured("traces are off (GPUMEM_GAUGE says so)");
                (builder.start_or_off(), None)
            }
            Err(error) => {
                self.unmeasured(&error.to_string());
                (builder.start_or_off(), None)
            }
        }
    }

    /// Panics if the budget was not kept, unless a panic is on its way already.
    pub(in crate::session) fn check(mut self, figures: Trace, trace: &GpuMemTrace) {
        if thread::panicking() {
            return;
        }
        let baseline = self.baseline.take();
        let updated = match &baseline {
            Some(baseline) => self.against_baseline(baseline),
            None => false,
        };
        let is_counted = self.limits.iter().any(|limit| limit.figure == Figure::Leaks);
        let live = if is_counted { live_inside(trace) } else { None };
        let found = Found { trace: figures, live, places: &|| places(trace), peak: &|| trace.peak_holders() };
        match judge(&self.name, &self.limits, &found) {
            Verdict::Broken(message) => self.panic(&message),
            Verdict::Unmeasured(reason) => self.unmeasured(&reason),
            Verdict::Kept => {
                if let (true, Some(Baseline { file, key, .. })) = (updated, &baseline) {
                    let peak = figures.peak_over_start().get();
                    baseline::write(file, key, peak).unwrap_or_else(|error| self.panic(&error));
                }
            }
        }
    }

    /// Adds the limit of the baseline; true if the baseline is to be written instead.
    fn against_baseline(&mut self, Baseline { file, key, growth }: &Baseline) -> bool {
        if current().settings().update_baseline {
            return true;
        }
        let peak = baseline::read(file, key).unwrap_or_else(|error| self.panic(&error));
        let allowed = u128::from(peak) + u128::from(peak) * u128::from(*growth) / 10_000;
        let percent = f64::from(*growth) / 100.0;
        let origin = Some(format!("{}, and {percent} % of growth", file.display()));
        let amount = i128::try_from(allowed).unwrap_or(i128::MAX);
        self.limits.push(Limit { figure: Figure::Peak, relation: Relation::AtMost, amount, origin });
        false
    }

    fn panic(&self, message: &dyn Display) -> ! {
        (self.fail)(&format!("gpumem: {message}"))
    }

    /// The budget cannot be held to anything: that is never passed over in silence.
    fn unmeasured(&self, reason: &str) {
        let Self { name, .. } = self;
        // The child of a fork prints nothing.
        if process::is_forked() && !self.strict {
            return;
        }
        if current().settings().skip_budgets {
            current().print(Content::Budget(format!("the GPU memory budget of `{name}` was skipped: {reason}")));
        } else if self.strict {
            self.panic(&format_args!(
                "the GPU memory budget of `{name}` cannot be measured: {reason}; GPUMEM_BUDGETS=skip runs without it"
            ));
        } else {
            current().notify(
                Notice::Budget,
                &format_args!("the GPU memory budget of `{name}` cannot be measured: {reason}"),
            );
        }
    }
}

/// A GPU was there, and the simulated device hides it.
#[cfg(feature = "sim")]
static HIDDEN: OnceCell<bool> = OnceCell::new();

#[cfg(feature = "sim")]
fn is_there() -> bool {
    crate::source::devices().and_then(crate::source::Devices::count).is_ok_and(|count| count > 0)
}

/// The simulated device that a test takes its memory from: the first of this process. All tests of a process share it.
///
/// # Panics
/// When `GPUMEM_SIM` cannot be understood.
#[cfg(feature = "sim")]
pub fn simulated_gpu() -> crate::source::sim::SimGpu {
    use crate::{error::Error, model::Bytes, source::sim::SimGpu};

    static SHARED: OnceCell<SimGpu> = OnceCell::new();
    let first = || {
        if let Some(gpu) = SimGpu::all()?.into_iter().next() {
            return Ok(gpu);
        }
        let _ = HIDDEN.set(is_there());
        SimGpu::install(Bytes::gib(16))
    };
    SHARED.get_or_try_init(first).unwrap_or_else(|error: Error| panic!("gpumem: {error}")).clone()
}
