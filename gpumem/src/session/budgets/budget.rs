//! Budgets: the memory that a function may use, and the failure if it uses more.

use std::{fmt::Display, path::PathBuf, thread};

#[cfg(feature = "sim")]
use once_cell::sync::OnceCell;

use super::{baseline, exclusive_tests::Turn, other_threads::Others};
use crate::{
    model::{Gauge, Trace, one_line},
    process,
    report::{Content, Counted, Limit, Measurement, Place, Quantity, Relation, Verdict, by_place, judge},
    session::{GpuMemTrace, GpuMemTraceBuilder, Notice, current},
};

/// Returns the number of blocks that were allocated inside the trace and are still live. `None` if it is not known.
fn live_inside(trace: &GpuMemTrace) -> Option<u64> {
    (trace.data().gauge == Gauge::Exact).then(|| trace.live().len() as u64)
}

/// Returns the ten source locations with the most memory that was allocated inside the trace and is still live. `None` if the
/// trace is not exact.
fn places(trace: &GpuMemTrace) -> Option<Vec<Place>> {
    if trace.data().gauge != Gauge::Exact {
        return None;
    }
    Some(by_place(&trace.live()))
}

/// Panics with a message, at a line of the function that has the budget.
type Fail = fn(&str) -> !;

/// The memory that a function may use. Counts exact allocations, either of the function's thread or of all threads.
pub struct Budget {
    name: String,
    fail: Fail,
    limits: Vec<Limit>,
    /// True if an unmeasured budget is a failure.
    strict: bool,
    /// True if the function uses the real GPU, where there is one.
    #[cfg_attr(not(feature = "sim"), expect(dead_code, reason = "no simulated device hides a real one"))]
    real_if_any: bool,
    baseline: Option<BaselineLimit>,
    counted: Counted,
    owner: BudgetOwner,
    /// The watch of other threads, while it runs.
    others: Option<Others>,
    /// The turn, while it runs. It is dropped last.
    turn: Option<Turn>,
}

/// The owner of a budget.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BudgetOwner {
    Test,
    /// The code is compiled only for tests.
    TestCode,
    Program,
}

/// The limit that the peak of an earlier run sets.
struct BaselineLimit {
    file: PathBuf,
    key: String,
    /// The allowed growth, in hundredths of a percent.
    growth: u32,
}

impl Budget {
    /// Creates the budget of a function in a program. If it cannot be measured, one notice is printed and the program continues.
    pub fn of_function(name: impl Into<String>, fail: Fail) -> Self {
        Self {
            name: name.into(),
            fail,
            limits: Vec::new(),
            strict: false,
            real_if_any: false,
            baseline: None,
            counted: Counted::OwnThread,
            owner: BudgetOwner::Program,
            others: None,
            turn: None,
        }
    }

    /// Creates the budget of an assertion, which fails if it cannot be measured.
    pub fn of_assertion(name: impl Into<String>, fail: Fail) -> Self {
        Self { strict: true, ..Self::of_function(name, fail) }
    }

    /// Creates the budget of a test. `growth` is the allowed excess of the peak over the baseline, in hundredths of a percent. The
    /// baseline is in `file`, or else in the file that `GPUMEM_BASELINE` names. `simulated` is true if the test allocates on
    /// [`simulated_gpu`]. `binary` is the program of the test, unless the test belongs to a library: tests in `src/main.rs` and
    /// `src/lib.rs` of a package may have the same names.
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
        let baseline = file.map(|file| BaselineLimit { file, key, growth });
        Self { baseline, real_if_any: !simulated, owner: BudgetOwner::Test, ..Self::of_assertion(name, fail) }
    }

    /// `is_test` is true if the code is compiled for tests (`cfg!(test)`), so that other tests may run at the same time.
    #[must_use]
    pub fn in_code(mut self, is_test: bool) -> Self {
        if is_test && self.owner == BudgetOwner::Program {
            self.owner = BudgetOwner::TestCode;
        }
        self
    }

    /// Counts all threads of the process. Other tests with a budget wait while this one runs.
    #[must_use]
    pub fn of_all_threads(mut self) -> Self {
        self.counted = Counted::AllThreads;
        self
    }

    /// Adds a condition.
    #[must_use]
    pub fn limit(mut self, quantity: Quantity, relation: Relation, amount: impl TryInto<i128>) -> Self {
        let amount = amount.try_into().unwrap_or(i128::MAX);
        self.limits.push(Limit { quantity, relation, amount, origin: None });
        self
    }

    /// Starts the trace that the budget needs. If the function runs without its budget, starts the plain trace.
    pub(in crate::session) fn start(mut self, builder: GpuMemTraceBuilder) -> (GpuMemTrace, Option<Self>) {
        let session = current();
        let is_custom = builder.is_custom(session);
        if is_custom {
            // A custom gauge measures the whole process.
            self.counted = Counted::AllThreads;
        }
        if self.owner != BudgetOwner::Program {
            self.turn = Turn::wait(self.owner == BudgetOwner::Test, self.counted == Counted::AllThreads);
        }
        #[cfg(feature = "sim")]
        if self.real_if_any && !is_custom {
            if !has_gpu() {
                simulated_gpu();
            } else if *HIDDEN.get().unwrap_or(&false) {
                self.unmeasured(
                    "another test of this process uses the simulated device, so allocations on GPUs are not intercepted; \
                     run each test in its own process (cargo nextest)",
                );
                return (builder.start_or_off(), None);
            }
        }
        let is_peak_limited =
            self.baseline.is_some() || self.limits.iter().any(|limit| limit.quantity == Quantity::Peak);
        // The program may have requested `at_peak` itself.
        if self.counted == Counted::OwnThread && builder.counts_own_thread() {
            self.counted = Counted::OwnThreadOnly;
        }
        // The watch starts before the trace, so that nothing is missed. If the device does not exist, the trace reports it.
        if !is_custom && let Ok(device) = builder.device_or_current(session) {
            self.others = Others::watch(session, device, self.counted);
        }
        let counted = match self.counted {
            _ if is_custom => builder.clone(),
            Counted::AllThreads => builder.clone().all_threads_exactly(),
            Counted::OwnThread | Counted::OwnThreadOnly => builder.clone().thread_local_only(),
        };
        let counted = if is_peak_limited { counted.at_peak(true) } else { counted };
        match counted.start() {
            Ok(trace) if trace.data().gauge != Gauge::Off => (trace, Some(self)),
            Ok(_) => {
                self.unmeasured("traces are off (GPUMEM_GAUGE is off)");
                (builder.start_or_off(), None)
            }
            Err(error) => {
                self.unmeasured(&error.to_string());
                (builder.start_or_off(), None)
            }
        }
    }

    /// Panics if the budget was exceeded, unless the thread is already panicking.
    pub(in crate::session) fn check(mut self, result: Trace, trace: &GpuMemTrace) {
        if thread::panicking() {
            return;
        }
        let baseline = self.baseline.take();
        let updated = match &baseline {
            Some(baseline) => self.apply_baseline(baseline),
            None => false,
        };
        let is_counted = self.limits.iter().any(|limit| limit.quantity == Quantity::Leaks);
        let live = if is_counted { live_inside(trace) } else { None };
        let measured = Measurement {
            counted: self.counted,
            others: &|| self.others.as_ref().map(Others::found).unwrap_or_default(),
            trace: result,
            live,
            places: &|| places(trace),
            peak: &|| trace.peak_holders(),
        };
        match judge(&self.name, &self.limits, &measured) {
            Verdict::Broken(message) => self.panic(&message),
            Verdict::Unmeasured(reason) => self.unmeasured(&reason),
            Verdict::NotKnown(reason) => self.not_known(&reason),
            Verdict::Kept => {
                if let (true, Some(BaselineLimit { file, key, .. })) = (updated, &baseline) {
                    let peak = result.peak_over_start().get();
                    baseline::write(file, key, peak).unwrap_or_else(|error| self.panic(&error));
                }
            }
        }
    }

    /// Adds the limit of the baseline. Returns `true` if the baseline must be written instead.
    fn apply_baseline(&mut self, BaselineLimit { file, key, growth }: &BaselineLimit) -> bool {
        if self.counted == Counted::AllThreads && *growth == 0 {
            let text = format_args!(
                "`{}` counts all threads and allows no growth over its baseline, but the order in which threads allocate changes a peak; \
                 allow some with fail_on_increase = \"5%\"",
                one_line(&self.name)
            );
            current().notify(Notice::Tolerance, &text);
        }
        if current().settings().update_baseline {
            return true;
        }
        let peak = baseline::read(file, key).unwrap_or_else(|error| self.panic(&error));
        let allowed = u128::from(peak) + u128::from(peak) * u128::from(*growth) / 10_000;
        let percent = f64::from(*growth) / 100.0;
        let origin = Some(format!("{}, and {percent} % of growth", file.display()));
        let amount = i128::try_from(allowed).unwrap_or(i128::MAX);
        self.limits.push(Limit { quantity: Quantity::Peak, relation: Relation::AtMost, amount, origin });
        false
    }

    fn panic(&self, message: &dyn Display) -> ! {
        (self.fail)(&format!("gpumem: {message}"))
    }

    /// Handles a result that other threads' allocations and frees make uncertain. Such a budget counts as exceeded.
    fn not_known(&self, reason: &str) {
        let name = one_line(&self.name);
        if current().settings().skip_budgets {
            // A notice is one line.
            return self.unmeasured(&reason.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        let only = if self.strict || self.counted == Counted::AllThreads {
            ""
        } else {
            "; or, if they do not concern this function, leave them out with the option thread_local"
        };
        self.panic(&format_args!(
            "whether `{name}` kept its GPU memory budget is not known: {reason}{only}; GPUMEM_BUDGETS=skip runs without it"
        ));
    }

    /// Handles a budget that cannot be checked, which is either reported or a failure.
    fn unmeasured(&self, reason: &str) {
        let name = one_line(&self.name);
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

/// True if the process has a GPU that the simulated device hides.
#[cfg(feature = "sim")]
static HIDDEN: OnceCell<bool> = OnceCell::new();

#[cfg(feature = "sim")]
fn has_gpu() -> bool {
    crate::source::devices().and_then(crate::source::Devices::count).is_ok_and(|count| count > 0)
}

/// Returns the simulated device of tests: the first one of this process. All tests of a process share it. This call makes it the
/// current device of the calling thread, because an earlier test on this thread may have chosen another one.
///
/// # Panics
/// Panics if `GPUMEM_SIM` is not valid.
#[cfg(feature = "sim")]
pub fn simulated_gpu() -> crate::source::sim::SimGpu {
    use crate::{error::Error, model::Bytes, source::sim::SimGpu};

    static SHARED: OnceCell<SimGpu> = OnceCell::new();
    let first = || {
        if let Some(gpu) = SimGpu::all()?.into_iter().next() {
            return Ok(gpu);
        }
        let _ = HIDDEN.set(has_gpu());
        SimGpu::install(Bytes::gib(16))
    };
    let gpu = SHARED.get_or_try_init(first).unwrap_or_else(|error: Error| panic!("gpumem: {error}"));
    gpu.make_current();
    gpu.clone()
}
