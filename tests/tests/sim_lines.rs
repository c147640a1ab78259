//! Tests `#[gpu_mem_trace(lines)]`: the rows of a body's statements, for all ways to write a body and to leave it.
//!
//! The attribute must cause no warning in the strictest crate, so this crate denies all warnings and the pedantic lints.
#![deny(warnings, clippy::pedantic)]
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::catch_unwind;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Waker};
use std::thread::JoinHandle;

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, gpu_mem_trace, report::Report};
use gpumem_tests::{Yield, reported_lines, reports_of};
use pollster::block_on;

fn gpu() -> &'static SimGpu {
    static GPU: OnceLock<SimGpu> = OnceLock::new();
    GPU.get_or_init(|| SimGpu::install(Bytes::gib(1)).expect("no GPUMEM_SIM in the environment"))
}

fn take(mib: u64) -> SimBlock {
    gpu().alloc(Bytes::mib(mib)).expect("there is room")
}

/// Lets only one test run at a time, because a trace also counts the threads that are in no scope.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the reports of this thread while `run` ran.
fn reports<T>(run: impl FnOnce() -> T) -> Vec<Report> {
    drop(take(1));
    reports_of(run)
}

/// Returns a row as `source: used peaked total`, in MB.
fn rows(report: &Report) -> Vec<String> {
    let row = |line: &gpumem::report::Line| {
        let (used, peaked) = (line.trace.used.mb(), line.trace.peaked.mb());
        format!("{}: {used} {peaked} {}", line.source, line.total.mb())
    };
    report.lines.iter().map(row).collect()
}

/// Checks that `run` reports one table with this line and these rows.
#[track_caller]
fn check<T>(run: impl FnOnce() -> T, line: &str, expected: &[&str]) {
    let reports = reports(run);
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(rows(&reports[0]), expected);
    assert_eq!(reports[0].to_string(), format!("△Used Peaked MB: {line}"));
}

thread_local! {
    static LINE: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[gpu_mem_trace(lines)]
fn forward(input: &SimBlock) -> SimBlock {
    const HALF: u64 = 5;
    LINE.set(line!());
    let scratch = take(100);
    for _ in 0..3 {
        drop(take(200));
    }
    drop(scratch);
    let _kept_to_the_end = take(7);
    take(input.bytes().mb() + HALF)
}

#[test]
fn each_statement_is_a_row() {
    let _alone = alone();
    let input = take(5);
    check(
        || forward(&input),
        "    10    290 (forward: exit)",
        &[
            "LINE.set(line!());: 0 0 0",
            "let scratch = take(100);: 100 0 100",
            "for _ in 0..3 { … }: 0 200 100",
            "drop(scratch);: -100 0 0",
            "let _kept_to_the_end = take(7);: 7 0 7",
            "take(input.bytes().mb() + HALF): 10 0 17",
            "}: -7 0 10",
        ],
    );
    let reported = reports(|| forward(&input));
    let numbers = reported[0].lines.iter().map(|line| line.number - LINE.get()).collect::<Vec<_>>();
    assert_eq!(numbers, [0, 1, 2, 5, 6, 7, 8]);
}

#[gpu_mem_trace(lines)]
fn early(how: &str) -> Result<SimBlock, std::num::ParseIntError> {
    let _local = take(10);
    if how == "return" {
        let _inner = take(30);
        return Ok(take(1));
    }
    let amount: u64 = how.parse()?;
    assert!(amount < 100, "on purpose");
    let kept = take(amount);
    Ok(kept)
}

#[test]
fn a_body_may_be_left_anywhere() {
    const LOCAL: &str = "let _local = take(10);: 10 0 10";
    let _alone = alone();
    let condition = |values: &str| format!("if how == \"return\" {{ … }}: {values}");
    check(|| early("return"), "     1     40 (early: exit)", &[LOCAL, &condition("1 30 11"), "}: -10 0 1"]);
    let question = "let amount: u64 = how.parse()?;: 0 0 10";
    check(|| early("x"), "     0     10 (early: exit)", &[LOCAL, &condition("0 0 10"), question, "}: -10 0 0"]);
    let all = [
        LOCAL,
        &condition("0 0 10"),
        question,
        "assert!(amount < 100, \"on purpose\");: 0 0 10",
        "let kept = take(amount);: 2 0 12",
        "Ok(kept): 0 0 12",
        "}: -10 0 2",
    ];
    check(|| early("2"), "     2     10 (early: exit)", &all);
    let panicking = || catch_unwind(|| early("100")).is_err();
    check(panicking, "     0     10 (early: exit)", &[all[0], all[1], all[2], all[3], "}: -10 0 0"]);
}

#[gpu_mem_trace(lines)]
fn ends_with_a_variable() {
    let _a = take(3);
    let _b = take(4);
}

macro_rules! declare {
    ($name:ident = $value:expr) => {
        let $name = $value;
    };
}

#[gpu_mem_trace(lines)]
fn ends_with_a_variable_of_a_macro() {
    declare!(_held = take(3));
}

#[gpu_mem_trace(lines)]
fn ends_with_a_variable_by_a_macro() {
    macro_rules! unreachable {
        () => {
            take(3)
        };
    }
    let _held = unreachable!();
}

#[gpu_mem_trace(lines)]
#[allow(clippy::never_loop)]
fn ends_with_a_loop() {
    let _held = loop {
        break take(3);
    };
}

/// This compiles only if the `allow` on the statement after the `return` also applies to the mark that the attribute adds.
#[gpu_mem_trace(lines)]
fn goes_on_after_a_return() -> u32 {
    let _held = take(3);
    #[allow(clippy::let_unit_value, clippy::diverging_sub_expression)]
    let _never: () = return 3;
    #[allow(unreachable_code)]
    let _more = take(4);
}

#[gpu_mem_trace(lines)]
fn ends_with_a_return() -> u32 {
    let _held = take(3);
    #[allow(clippy::needless_return, clippy::let_unit_value, clippy::diverging_sub_expression)]
    let _never: () = return 3;
}

#[gpu_mem_trace(lines)]
#[allow(clippy::diverging_sub_expression)]
fn ends_with_a_panic() -> u32 {
    let _held = take(3);
    let _never: std::convert::Infallible = never();
}

#[gpu_mem_trace(lines)]
fn ends_with_a_panicking_macro() -> u32 {
    let _held = take(3);
    panic!("on purpose");
}

#[gpu_mem_trace(lines)]
fn ends_with_a_macro() -> SimBlock {
    macro_rules! block {
        ($value:expr) => {
            $value
        };
    }
    block! { take(3) }
}

#[gpu_mem_trace(lines)]
fn one() -> SimBlock {
    take(1)
}

#[gpu_mem_trace(lines)]
fn empty() {}

#[gpu_mem_trace(lines)]
fn only_items() {
    const _N: u32 = 1;
}

#[gpu_mem_trace(lines)]
fn never() -> ! {
    let _held = take(2);
    panic!("on purpose")
}

#[gpu_mem_trace(lines)]
#[allow(clippy::needless_return)]
fn returns_last(n: u32) -> u32 {
    if n > 1 {
        return n;
    }
    return n + 1;
}

#[gpu_mem_trace(lines)]
#[rustfmt::skip]
fn on_one_line(a: u32) -> u32 { let b = a; b + 1 }

#[test]
fn small_bodies() {
    let _alone = alone();
    check(
        ends_with_a_variable,
        "     0      7 (ends_with_a_variable: exit)",
        &["let _a = take(3);: 3 0 3", "let _b = take(4);: 4 0 7", "}: -7 0 0"],
    );
    let of = |name: &str, row: &str| {
        let rows = [format!("{row}: 3 0 3"), "}: -3 0 0".to_owned()];
        (format!("     0      3 ({name}: exit)"), rows)
    };
    for (run, name, row) in [
        (ends_with_a_variable_of_a_macro as fn(), "ends_with_a_variable_of_a_macro", "declare!(_held = take(3));"),
        (ends_with_a_variable_by_a_macro, "ends_with_a_variable_by_a_macro", "let _held = unreachable!();"),
        (ends_with_a_loop, "ends_with_a_loop", "let _held = loop { … };"),
    ] {
        let (line, rows) = of(name, row);
        check(run, &line, &rows.each_ref().map(String::as_str));
    }
    let held = "let _held = take(3);: 3 0 3";
    let rows = |last| [held, last, "}: -3 0 0"];
    check(ends_with_a_return, "     0      3 (ends_with_a_return: exit)", &rows("let _never: () = return 3;: 0 0 3"));
    check(
        goes_on_after_a_return,
        "     0      3 (goes_on_after_a_return: exit)",
        &rows("let _never: () = return 3;: 0 0 3"),
    );
    check(
        || catch_unwind(ends_with_a_panicking_macro).is_err(),
        "     0      3 (ends_with_a_panicking_macro: exit)",
        &rows("panic!(\"on purpose\");: 0 0 3"),
    );
    let reported = reports(|| catch_unwind(ends_with_a_panic).is_err());
    let diverged = reported.last().expect("its own report");
    assert_eq!((diverged.ctx.as_deref(), diverged.lines.len()), (Some("ends_with_a_panic"), 3));
    check(ends_with_a_macro, "     3      0 (ends_with_a_macro: exit)", &["block! { take(3) }: 3 0 3"]);
    check(one, "     1      0 (one: exit)", &["take(1): 1 0 1"]);
    check(empty, "     0      0 (empty: exit)", &[]);
    check(only_items, "     0      0 (only_items: exit)", &[]);
    let held = ["let _held = take(2);: 2 0 2", "panic!(\"on purpose\"): 0 0 2", "}: -2 0 0"];
    check(|| catch_unwind(|| never()).is_err(), "     0      2 (never: exit)", &held);
    check(|| returns_last(1), "     0      0 (returns_last: exit)", &["if n > 1 { … }: 0 0 0", "return n + 1;: 0 0 0"]);
    check(|| on_one_line(1), "     0      0 (on_one_line: exit)", &["let b = a;: 0 0 0", "b + 1: 0 0 0"]);
}

/// The marks between the statements must not change these: borrows that end before the next statement, temporaries, type
/// inference, and names.
#[gpu_mem_trace(lines)]
#[expect(clippy::needless_late_init, reason = "a variable that a later statement sets")]
fn borrows<'a, T: Copy + Into<u64>>(text: &'a mut String, sizes: &[T]) -> (&'a str, impl Fn(&str) -> usize + use<T>) {
    let lines = &mut *text;
    lines.push('x');
    let late;
    let [first, .., last] = sizes else { panic!("two sizes") };
    if sizes.len() > 1 {
        late = (*first).into() + (*last).into();
    } else {
        late = 0;
    }
    let mut all = Vec::new();
    #[cfg(any())]
    let gone = take(1);
    #[cfg(target_pointer_width = "64")]
    {
        all.push(take(late));
    }
    #[expect(unused_variables, reason = "the attribute must have been kept")]
    let unused = all.iter().map(SimBlock::bytes).sum::<Bytes>();
    let found = match text.find('x') {
        Some(at) => &text[at..],
        None => unreachable!(),
    };
    (found, |text| text.len() + 1)
}

#[test]
fn the_body_stays_as_it_is() {
    let _alone = alone();
    let mut text = "ab".to_owned();
    let reported = reports(|| assert_eq!(borrows(&mut text, &[1_u32, 2, 3]).0, "x"));
    let rows = rows(&reported[0]);
    assert_eq!(rows.len(), 11, "{rows:?}");
    assert!(!rows.iter().any(|row| row.contains("gone")), "{rows:?}");
    assert_eq!(rows[6], "{ … }: 4 0 4");
}

struct Model;

#[gpu_mem_trace(lines, device = 0, gauge = "exact")]
impl Model {
    fn load() -> Self {
        let _file = take(8);
        Self
    }

    async fn forward(&self) -> SimBlock {
        let scratch = take(30);
        Yield::default().await;
        drop(scratch);
        take(10)
    }

    #[gpu_mem_trace]
    #[expect(clippy::unused_self, reason = "a method")]
    fn plain(&self) {
        drop(take(1));
    }
}

#[test]
fn each_method_has_its_own_table() {
    let _alone = alone();
    check(
        Model::load,
        "     0      8 (Model::load: exit)",
        &["let _file = take(8);: 8 0 8", "Self: 0 0 8", "}: -8 0 0"],
    );
    check(|| Model.plain(), "     0      1 (Model::plain: exit)", &[]);
}

const fn assert_send<F: Send>(future: F) -> F {
    future
}

#[gpu_mem_trace(lines)]
async fn consumes(input: SimBlock) -> Result<Bytes, Box<dyn std::error::Error + Send + Sync>> {
    let _local = take(3);
    Yield::default().await;
    if input.bytes() > Bytes::mib(9) {
        return Err("too much".into());
    }
    Ok(input.bytes())
}

#[gpu_mem_trace(lines)]
fn by_hand(mib: u64) -> impl Future<Output = SimBlock> {
    let twice = 2 * mib;
    async move {
        Yield::default().await;
        take(twice)
    }
}

#[gpu_mem_trace(lines)]
fn boxed(block: &SimBlock) -> Pin<Box<dyn Future<Output = u64> + '_>> {
    Box::pin(async {
        let _local = take(2);
        block.bytes().mb()
    })
}

#[test]
fn futures_are_measured_across_awaits() {
    let _alone = alone();
    let rows = ["let scratch = take(30);: 30 0 30", "Yield::default().await;: 0 0 30", "drop(scratch);: -30 0 0"];
    let forward = || block_on(assert_send(Model.forward()));
    check(forward, "    10     20 (Model::forward: exit)", &[rows[0], rows[1], rows[2], "take(10): 10 0 10"]);

    let local = ["let _local = take(3);: 3 0 3", "Yield::default().await;: 0 0 3"];
    let condition = "if input.bytes() > Bytes::mib(9) { … }: 0 0 3";
    let input = take(10);
    let consumed = || block_on(assert_send(consumes(input)));
    check(consumed, "     0      3 (consumes: exit)", &[local[0], local[1], condition, "}: -3 0 0"]);

    check(
        || block_on(by_hand(4)),
        "     8      0 (by_hand: exit)",
        &["Yield::default().await;: 0 0 0", "take(twice): 8 0 8"],
    );
    let block = take(1);
    let local = ["let _local = take(2);: 2 0 2", "block.bytes().mb(): 0 0 2", "}: -2 0 0"];
    check(|| block_on(boxed(&block)), "     0      2 (boxed: exit)", &local);
}

#[test]
fn a_future_that_is_dropped_has_reported_its_lines() {
    let _alone = alone();
    let cancelled = || {
        let mut future = Box::pin(Model.forward());
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(reported_lines().is_empty());
    };
    check(
        cancelled,
        "     0     30 (Model::forward: exit)",
        &["let scratch = take(30);: 30 0 30", "Yield::default().await;: 0 0 30", "}: -30 0 0"],
    );
    assert!(reports(|| drop(Model.forward())).is_empty(), "never polled, never started");
}

#[gpu_mem_trace(lines, silent)]
fn silent() {
    drop(take(1));
}

#[gpu_mem_trace(lines, on_exit_report = false)]
fn no_exit() {
    drop(take(1));
}

#[gpu_mem_trace(lines, gauge = "off")]
fn unmeasured() {
    drop(take(1));
}

#[gpu_mem_trace(lines, gauge = "sampled", ctx = "step")]
fn sampled() {
    let _held = take(1);
}

#[gpu_mem_trace(lines, crate = elsewhere::memory)]
fn renamed() {
    drop(take(1));
}

mod elsewhere {
    pub(super) use gpumem as memory;
}

#[test]
fn with_other_options() {
    let _alone = alone();
    for quiet in [silent, no_exit, unmeasured] {
        assert!(reports(quiet).is_empty());
    }
    let reported = reports(sampled);
    assert_eq!((reported[0].ctx.as_deref(), reported[0].lines.len()), (Some("step"), 2));
    let sampling = reported[0].trace.sampling.expect("it was sampled");
    assert!(sampling.readings >= 3, "{sampling:?}");
    check(renamed, "     0      1 (renamed: exit)", &["drop(take(1));: 0 1 0"]);
}

#[gpu_mem_trace(lines)]
fn recursive(n: u64) -> u64 {
    let held = take(n + 1);
    if n == 0 { held.bytes().mb() } else { recursive(n - 1) }
}

#[test]
fn each_call_has_its_own_table() {
    let _alone = alone();
    let reported = reports(|| recursive(1));
    assert_eq!(rows(&reported[0])[0], "let held = take(n + 1);: 1 0 1");
    assert_eq!(rows(&reported[1])[1], "if n == 0 { held.bytes().mb() } else { recursive(n - 1) }: 0 1 2");
}

/// A thread that allocates until it is stopped or has 1,000 blocks.
struct Noise {
    beats: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<SimBlock>>,
}

impl Noise {
    fn start() -> Self {
        let (beats, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (of_thread, until) = (Arc::clone(&beats), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            let mut blocks = Vec::new();
            while !until.load(Relaxed) && blocks.len() < 1_000 {
                blocks
                    .push(gpu().alloc(Bytes::new(1 << of_thread.fetch_add(1, Relaxed).min(9))).expect("there is room"));
            }
            blocks
        });
        Self { beats, stop, thread }
    }

    /// Waits until the thread has allocated once more, or has ended.
    fn beat(&self) {
        let before = self.beats.load(Relaxed);
        while self.beats.load(Relaxed) == before && !self.thread.is_finished() {
            std::thread::yield_now();
        }
    }

    fn stop(self) -> Vec<SimBlock> {
        self.stop.store(true, Relaxed);
        self.thread.join().expect("it ends")
    }
}

#[gpu_mem_trace(lines)]
fn noisy() -> Vec<SimBlock> {
    let noise = Noise::start();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.beat();
    noise.stop()
}

#[test]
fn rows_have_all_that_other_threads_allocate() {
    let _alone = alone();
    for _ in 0..50 {
        let mut blocks = Vec::new();
        let reported = reports(|| blocks = noisy());
        let allocated = blocks.iter().map(|block| block.bytes().get()).sum::<u64>();
        assert_eq!(reported[0].trace.used.get(), allocated.cast_signed());
        assert_eq!(reported[0].lines.last().map(|line| line.total), Some(reported[0].trace.used));
    }
}
