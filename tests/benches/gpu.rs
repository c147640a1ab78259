//! Measures what it costs to record every allocation on a real GPU, and prints the results as tables for `docs/VERIFIED.md`.
//!
//! Run `cargo bench -p gpumem-tests --bench gpu`, or run only the binary, which needs neither a CUDA toolkit nor Rust.
//! `-- --help` lists the options: `-- --rows async,launch --only dispatch1` takes half a minute, and the whole benchmark takes
//! about four minutes.
//!
//! The baseline of every row is an untraced process: gpumem intercepts nothing in it, and CUPTI was never loaded. CUPTI makes the
//! driver slower from the moment it is loaded, even without a subscriber, so a process that has loaded CUPTI is not a baseline.
//! Each way to observe calls has a separate process, which runs this same program. The first process does not use the GPU: it
//! only asks the other processes to measure in turns. While one of them measures, the others wait.

use std::{
    collections::BTreeMap,
    env,
    ffi::CStr,
    fs,
    hint::black_box,
    io::{BufRead, BufReader, Write, stdin},
    panic,
    path::{Path, PathBuf},
    process::{self, Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr,
    sync::{Barrier, Mutex, OnceLock},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use cudarc::driver::{result, sys};
use gpumem::{
    Bytes, Gauge, GpuMemTrace, device,
    intercept::{subscribe, unsubscribe},
    status,
    torch::memory_snapshot,
};
use gpumem_recording::{Reader, Step};
use gpumem_tests::with_nested_calls;

const THREADS: usize = 16;
const MIB: usize = 1 << 20;
/// The deep rows call the driver this many functions deeper.
const DEEP: usize = 40;

/// Measures what it costs to record every allocation, compared with processes in which calls are not observed.
#[derive(Parser)]
struct Options {
    /// Measure only rows whose name contains one of these words, such as `async,launch`
    #[arg(long, value_delimiter = ',')]
    rows: Vec<String>,
    /// Use only these ways to observe calls, such as `dispatch1,cupti1`; `untraced` is always used
    #[arg(long, value_delimiter = ',', value_parser = Way::ALL.map(|way| way.name))]
    only: Vec<String>,
    /// Start all processes this many times
    #[arg(long, default_value_t = 5)]
    generations: usize,
    /// The rounds in each generation. In a round every way is measured once for every row
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// `cargo bench` passes this to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    if env::var_os("GPUMEM_SIM").is_some() {
        gpumem_tests::skipped("no GPU");
        return;
    }
    // If one thread panicked, the other threads would wait at their barrier forever. Therefore a panic ends the process.
    let say = panic::take_hook();
    panic::set_hook(Box::new(move |failure| {
        say(failure);
        process::abort();
    }));
    match env::var(Worker::SWITCH).as_deref() {
        Ok(ABOUT) => about(),
        Ok(way) => answer(Way::named(way)),
        Err(_) => control(&Options::parse()),
    }
}

/// Starts the other processes, lets them measure in turns, and prints the table.
fn control(options: &Options) {
    let Ok(about) = Worker::hello_of(ABOUT) else {
        gpumem_tests::skipped("no GPU");
        return;
    };
    let rows: Vec<_> = BenchRow::ALL.iter().filter(|row| row.is_selected(options)).collect();
    assert!(!rows.is_empty(), "no row is called {:?}; there are {:?}", options.rows, BenchRow::ALL.map(|row| row.name));
    let hello = Worker::hello_of("cupti1").unwrap_or_default();
    println!("{about}\nCUPTI: {}", hello.strip_prefix("cupti ").map_or("not found", file_name));
    let mut ways = Way::ALL.iter().filter(|way| way.is_selected(options, &rows)).collect::<Vec<_>>();
    let mut times: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let mut functions = BTreeMap::new();
    for generation in 0..options.generations {
        // All processes start at the same time, because the driver takes seconds to start.
        let mut workers: Vec<_> = ways.iter().map(|way| Worker::start(way.name)).collect();
        let rejected: Vec<_> = workers.iter_mut().map(|worker| worker.hello().err()).collect();
        for (way, why) in ways.iter().zip(&rejected).filter_map(|(way, why)| Some((way, why.as_ref()?))) {
            assert_eq!(generation, 0, "{} worked before: {why}", way.name);
            println!("{}: not measured: {why}", way.name);
        }
        let works = |name: &str| ways.iter().zip(&rejected).any(|(way, why)| way.name == name && why.is_none());
        let (useful, useless): (Vec<_>, Vec<_>) = workers.into_iter().partition(|worker| works(&worker.name));
        useless.into_iter().for_each(Worker::end);
        let mut workers = useful;
        ways = ways.iter().copied().filter(|way| works(way.name)).collect();
        for round in 0..options.rounds {
            for row in &rows {
                let measuring: Vec<_> = (0..ways.len()).filter(|at| row.is_for(ways[*at])).collect();
                for turn in 0..measuring.len() {
                    let at = measuring[(turn + round + generation) % measuring.len()];
                    let measured = workers[at].ask("measure", row.name);
                    times.entry((row.name, ways[at].name)).or_default().push(measured);
                }
            }
        }
        if generation == 0 {
            for (way, worker) in ways.iter().zip(&mut workers).filter(|(way, _)| way.is_gpumem() && way.traces > 0) {
                for row in rows.iter().filter(|row| row.has_stacks && row.is_for(way)) {
                    let known = worker.ask("functions", row.name);
                    assert_eq!(known > 1.0, row.takes_stacks(way), "{} {}: {known} functions", row.name, way.name);
                    if known > 0.0 {
                        functions.insert((row.name, way.name), known);
                    }
                }
            }
        }
        workers.into_iter().for_each(Worker::end);
    }
    Table { options, rows: &rows, ways: &ways, times: &times, functions: &functions }.print();
}

/// All measured times.
struct Table<'a> {
    options: &'a Options,
    rows: &'a [&'a BenchRow],
    ways: &'a [&'a Way],
    /// The times by row and way, in the order of the rounds.
    times: &'a BTreeMap<(&'a str, &'a str), Vec<f64>>,
    functions: &'a BTreeMap<(&'a str, &'a str), f64>,
}

impl Table<'_> {
    fn print(&self) {
        let Options { generations, rounds, .. } = self.options;
        println!(
            "Medians of {} rounds, {rounds} in each of {generations} generations of processes. The ratio is that of a traced and \
             an untraced process in one round. Times are for each pair, launch or trace; with {THREADS} threads, on {} \
             processors, the wall time of all divided by what each did, waits included.",
            generations * rounds,
            thread::available_parallelism().map_or(0, usize::from),
        );
        println!();
        println!(
            "| what | observed by | untraced, ns | traced, ns | ratio | 10th to 90th percentile | required | kept |"
        );
        println!("|---|---|---:|---:|---:|---:|---:|---|");
        for row in self.rows {
            let untraced = self.times.get(&(row.name, UNTRACED));
            for way in self.ways.iter().filter(|way| way.name != UNTRACED) {
                let Some(traced) = self.times.get(&(row.name, way.name)) else { continue };
                let Some(untraced) = untraced else {
                    println!("| {} | {} | | {:.0} | | | | |", row.what(), way.what, median(traced.clone()));
                    continue;
                };
                let ratios = sorted(traced.iter().zip(untraced).map(|(traced, untraced)| traced / untraced).collect());
                let ratio = ratios[ratios.len() / 2];
                let (required, kept) = row.most_for(way).map_or_else(Default::default, |most| {
                    (format!("{most:.2}"), if ratio <= most { "yes" } else { "**no**" })
                });
                println!(
                    "| {} | {} | {:.0} | {:.0} | {ratio:.3} | {:.3} to {:.3} | {required} | {kept} |",
                    row.what(),
                    way.what,
                    median(untraced.clone()),
                    median(traced.clone()),
                    ratios[ratios.len() / 10],
                    ratios[ratios.len() * 9 / 10],
                );
            }
        }
        if !self.functions.is_empty() {
            println!("\n| what | observed by | functions known of a stack | the stack adds, ns |\n|---|---|---:|---:|");
        }
        for ((name, way), functions) in self.functions {
            let (row, way) = (BenchRow::named(name), Way::named(way));
            // The times of the same source without stacks, if they were measured too.
            let without = way.without_stacks.and_then(|without| self.times.get(&(row.name, without)));
            let added = without.map(|without| {
                let with = &self.times[&(row.name, way.name)];
                median(with.iter().zip(without).map(|(with, without)| with - without).collect())
            });
            let added = added.map(|added| format!("{added:.0}")).unwrap_or_default();
            println!("| {} | {} | {functions} | {added} |", row.what(), way.what);
        }
    }
}

/// The measured action. A size is in bytes.
#[derive(Clone, Copy)]
enum Kind {
    Async(usize),
    Plain(usize),
    Launch,
    /// The launch of a graph that has one kernel.
    Graph,
    /// The creation, reading and drop of an exact trace.
    Trace,
}

struct BenchRow {
    name: &'static str,
    kind: Kind,
    threads: usize,
    /// The number of actions of each thread in each measurement.
    times: usize,
    /// The number of functions between the bench and the call.
    deeper: usize,
    /// True if the row measures the cost of stacks.
    has_stacks: bool,
}

impl BenchRow {
    const ALL: [Self; 11] = [
        Self::of("async-4KiB-alone", Kind::Async(4096), 1, 10_000),
        Self::of("async-1MiB-alone", Kind::Async(MIB), 1, 10_000),
        Self::of("async-4KiB-threads", Kind::Async(4096), THREADS, 1000),
        Self::of("async-1MiB-threads", Kind::Async(MIB), THREADS, 1000),
        Self { has_stacks: true, ..Self::of("plain-1MiB", Kind::Plain(MIB), 1, 500) },
        Self::of("launch", Kind::Launch, 1, 10_000),
        Self::of("launch-threads", Kind::Launch, THREADS, 1000),
        Self::of("graph-launch", Kind::Graph, 1, 10_000),
        Self { has_stacks: true, ..Self::of("stacks-shallow", Kind::Async(4096), 1, 5000) },
        Self { has_stacks: true, deeper: DEEP, ..Self::of("stacks-deep", Kind::Async(4096), 1, 5000) },
        Self::of("trace", Kind::Trace, 1, 2000),
    ];

    const fn of(name: &'static str, kind: Kind, threads: usize, times: usize) -> Self {
        Self { name, kind, threads, times, deeper: 0, has_stacks: false }
    }

    fn named(name: &str) -> &'static Self {
        Self::ALL.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row is called {name}"))
    }

    fn is_selected(&self, options: &Options) -> bool {
        options.rows.is_empty() || options.rows.iter().any(|word| self.name.contains(word.as_str()))
    }

    /// Returns whether the row measures only stacks. The other rows measure allocations, with the stacks that they have by
    /// default.
    fn is_of_stacks(&self) -> bool {
        self.has_stacks && matches!(self.kind, Kind::Async(_))
    }

    /// Returns whether the row is measured in this way.
    fn is_for(&self, way: &Way) -> bool {
        let is_one_trace = way.is_gpumem() && way.traces == 1;
        if way.is_of_pairs() {
            return matches!(self.kind, Kind::Async(_) | Kind::Plain(_)) && !self.is_of_stacks();
        }
        match self.kind {
            Kind::Trace => is_one_trace && way.without_stacks.is_none(),
            _ if self.is_of_stacks() => is_one_trace || way.name == UNTRACED,
            _ => way.without_stacks.is_none(),
        }
    }

    fn takes_stacks(&self, way: &Way) -> bool {
        matches!(self.kind, Kind::Plain(_)) || way.without_stacks.is_some()
    }

    /// Returns the highest ratio that gpumem allows itself.
    fn most_for(&self, way: &Way) -> Option<f64> {
        let is_by_dispatch = matches!(way.observer, Observer::Gpumem { source: "dispatch" });
        if !is_by_dispatch || way.traces == 0 || way.is_of_pairs() || self.is_of_stacks() {
            return None;
        }
        match self.kind {
            Kind::Async(_) => Some(if self.threads == 1 { 1.06 } else { 1.10 }),
            Kind::Plain(_) => Some(1.02),
            Kind::Launch => Some(1.01),
            Kind::Graph | Kind::Trace => None,
        }
    }

    fn what(&self) -> String {
        let what = match self.kind {
            Kind::Async(bytes) => format!("`cuMemAllocAsync` + `cuMemFreeAsync`, {}", Bytes::from(bytes)),
            Kind::Plain(bytes) => format!("`cuMemAlloc` + `cuMemFree`, {}", Bytes::from(bytes)),
            Kind::Launch => "kernel launch".to_owned(),
            Kind::Graph => "launch of a graph of one kernel".to_owned(),
            Kind::Trace => "exact trace: create, read, drop".to_owned(),
        };
        let with = |number: usize, what: &str| if number > 0 { format!(", {number} {what}") } else { String::new() };
        let threads = if self.threads > 1 { self.threads } else { 0 };
        format!("{what}{}{}", with(threads, "threads"), with(self.deeper, "functions deeper"))
    }

    /// Returns the lowest and the highest peak that a trace may report. The threads of a row may allocate at the same time or one
    /// after the other.
    fn most(&self) -> (u64, u64) {
        match self.kind {
            Kind::Async(bytes) | Kind::Plain(bytes) => (bytes as u64, (bytes * self.threads) as u64),
            Kind::Launch | Kind::Graph | Kind::Trace => (0, 0),
        }
    }

    /// Returns how often each thread runs the action before the clock starts.
    fn warm_up(&self) -> usize {
        self.times / 5
    }

    /// Returns the number of allocations and frees of one measurement.
    fn events(&self) -> u64 {
        match self.kind {
            Kind::Async(_) | Kind::Plain(_) => (2 * self.threads * (self.times + self.warm_up())) as u64,
            Kind::Launch | Kind::Graph | Kind::Trace => 0,
        }
    }
}

const UNTRACED: &str = "untraced";
/// The way that also writes a recording.
const RECORDED: &str = "dispatch1-recorded";
/// The way that also keeps a trace open on another thread.
const OVERLAPPED: &str = "dispatch1-overlapped";

/// How allocations are observed in a process.
struct Way {
    name: &'static str,
    what: &'static str,
    observer: Observer,
    /// The number of open traces.
    traces: usize,
    /// The name of the same way without stacks, if this way records all stacks.
    without_stacks: Option<&'static str>,
}

/// The observer of allocations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Observer {
    Nobody,
    /// CUPTI is loaded. Its subscriber has unsubscribed.
    Idle,
    Gpumem {
        source: &'static str,
    },
}

const DISPATCH: Observer = Observer::Gpumem { source: "dispatch" };
const CUPTI: Observer = Observer::Gpumem { source: "cupti" };

impl Way {
    const ALL: [Self; 12] = [
        Self::of(UNTRACED, "nobody", Observer::Nobody, 0),
        // The ratio of this way to the untraced one shows how far two equal processes differ.
        Self::of("untraced-again", "nobody, in another process", Observer::Nobody, 0),
        Self::of("dispatch0", "gpumem by dispatch, no open trace", DISPATCH, 0),
        Self::of("dispatch1", "gpumem by dispatch, 1 open trace", DISPATCH, 1),
        Self::of("dispatch100", "gpumem by dispatch, 100 open traces", DISPATCH, 100),
        Self::of(OVERLAPPED, "gpumem by dispatch, a trace of another thread is open as well", DISPATCH, 1),
        Self::of(RECORDED, "gpumem by dispatch, 1 open trace, recorded (`GPUMEM_CAPTURE`)", DISPATCH, 1),
        Self {
            without_stacks: Some("dispatch1"),
            ..Self::of("dispatch-stacks", "gpumem by dispatch, `GPUMEM_BACKTRACE=1`", DISPATCH, 1)
        },
        Self::of("cupti-idle", "CUPTI loaded, nobody", Observer::Idle, 0),
        Self::of("cupti1", "gpumem by CUPTI, 1 open trace", CUPTI, 1),
        Self::of("cupti100", "gpumem by CUPTI, 100 open traces", CUPTI, 100),
        Self {
            without_stacks: Some("cupti1"),
            ..Self::of("cupti-stacks", "gpumem by CUPTI, `GPUMEM_BACKTRACE=1`", CUPTI, 1)
        },
    ];

    const fn of(name: &'static str, what: &'static str, observer: Observer, traces: usize) -> Self {
        Self { name, what, observer, traces, without_stacks: None }
    }

    fn named(name: &str) -> &'static Self {
        let names = || Self::ALL.map(|way| way.name);
        Self::ALL.iter().find(|way| way.name == name).unwrap_or_else(|| panic!("{name} is none of {:?}", names()))
    }

    /// Returns whether only pairs are measured in this way. No ratio is required of such a way.
    fn is_of_pairs(&self) -> bool {
        [RECORDED, OVERLAPPED].contains(&self.name)
    }

    fn is_gpumem(&self) -> bool {
        matches!(self.observer, Observer::Gpumem { .. })
    }

    fn is_selected(&self, options: &Options, rows: &[&BenchRow]) -> bool {
        let is_chosen = options.only.is_empty() || options.only.iter().any(|name| name == self.name);
        (is_chosen || self.name == UNTRACED) && rows.iter().any(|row| row.is_for(self))
    }
}

/// Another process of this program, which measures one way to observe calls.
struct Worker {
    name: String,
    process: Child,
    questions: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// The file of the recording, if the process writes one.
    recording: Option<PathBuf>,
}

const ABOUT: &str = "about";

impl Worker {
    /// The variable that names the way of a worker.
    const SWITCH: &str = "GPUMEM_BENCH_WORKER";

    fn start(name: &str) -> Self {
        let mut command = Command::new(env::current_exe().expect("a program has a path"));
        command.env(Self::SWITCH, name).env_remove("CUDA_INJECTION64_PATH");
        if let Some(Way { observer, without_stacks, .. }) = Way::ALL.iter().find(|way| way.name == name) {
            let source = if let Observer::Gpumem { source } = observer { source } else { "cupti" };
            // The rows of `cuMemAlloc` measure the stacks of `auto`, which is the default.
            let stacks = if without_stacks.is_some() { "1" } else { "auto" };
            command.env("GPUMEM_SOURCE", source).env("GPUMEM_BACKTRACE", stacks);
        }
        let recording = env::temp_dir().join(format!("gpumem-bench-{}.capture", process::id()));
        let recording = (name == RECORDED).then_some(recording);
        if let Some(recording) = &recording {
            command.env("GPUMEM_CAPTURE", recording);
        }
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be run again");
        let questions = process.stdin.take().expect("it is piped");
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        Self { name: name.to_owned(), process, questions, answers, recording }
    }

    /// Starts a process only for its first answer. Returns this answer.
    fn hello_of(name: &str) -> Result<String, String> {
        let mut worker = Self::start(name);
        let hello = worker.hello();
        worker.end();
        hello
    }

    /// Returns the first answer: the observer of the process, or the reason why its calls cannot be observed in this way.
    fn hello(&mut self) -> Result<String, String> {
        let hello = self.answer();
        hello.strip_prefix("cannot ").map_or_else(|| Ok(hello.clone()), |why| Err(why.to_owned()))
    }

    fn ask(&mut self, what: &str, row: &str) -> f64 {
        writeln!(self.questions, "{what} {row}").and_then(|()| self.questions.flush()).expect("it reads questions");
        self.answer().parse().expect("it answers with a number")
    }

    fn answer(&mut self) -> String {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it answers");
        assert!(answer.ends_with('\n'), "the process `{}` has ended: {:?}", self.name, self.process.wait());
        answer.trim_end().to_owned()
    }

    /// Closes the input of the process, so that it checks its libraries again and ends.
    fn end(self) {
        let Self { name, mut process, questions, recording, .. } = self;
        drop(questions);
        let ended = process.wait().expect("it can be waited for");
        assert!(ended.success(), "the process `{name}` has failed: {ended}");
        if let Some(recording) = recording {
            println!("{}", size_of_recording(&recording));
            fs::remove_file(&recording).expect("it was written");
        }
    }
}

/// Returns a text with the number of events and the size of a recording.
#[expect(clippy::cast_precision_loss, reason = "one digit after the point is printed")]
fn size_of_recording(file: &Path) -> String {
    let bytes = fs::metadata(file).expect("it was written").len();
    let mut reader = Reader::new(fs::File::open(file).expect("it was written")).expect("it is a recording");
    let mut events = 0_u64;
    while let Some(step) = reader.step().expect("it can be read") {
        events += u64::from(matches!(step, Step::Event(..)));
    }
    let missed = reader.skipped().missed;
    format!("recording: {events} events, {missed} missed, {:.1} bytes for each", bytes as f64 / events.max(1) as f64)
}

/// Prints facts about the machine.
fn about() {
    if !gpumem::is_available() {
        return println!("cannot measure: there is no device");
    }
    println!(
        "Card: {}, driver {}, CUDA {}",
        device::name(0).expect("device 0 has a name"),
        driver_version(),
        cuda_version()
    );
}

/// Answers questions with measurements.
fn answer(way: &Way) {
    let gpu = Gpu::open();
    match start_observer(way) {
        Ok(hello) => println!("{hello}"),
        Err(why) => return println!("cannot {why}"),
    }
    for question in stdin().lines() {
        let question = question.expect("it can be read");
        let (what, row) = question.split_once(' ').expect("two words");
        let row = BenchRow::named(row);
        let mut answer = 0.0;
        with_nested_calls(row.deeper, &mut || {
            answer = match what {
                "measure" => gpu.measure_by(row, way),
                _ => functions(&gpu, row.kind),
            };
        });
        println!("{answer}");
    }
    check_libraries(way).expect("it has stayed so to the end");
}

/// Starts to observe calls. Returns the name of the observer.
fn start_observer(way: &Way) -> Result<String, String> {
    if way.observer != Observer::Nobody {
        subscribe().map_err(|error| error.to_string())?;
    }
    check_libraries(way)?;
    match way.observer {
        Observer::Nobody => Ok("nothing".to_owned()),
        Observer::Idle => {
            unsubscribe();
            Ok("nothing, with CUPTI".to_owned())
        }
        Observer::Gpumem { source } => {
            let intercepted_by = status().intercepted_by.ok_or("subscribed, and nothing is intercepted")?;
            Ok(format!("{source} {intercepted_by}"))
        }
    }
}

/// Returns an error if CUPTI is missing in this process although it is needed, or loaded although it is not.
fn check_libraries(way: &Way) -> Result<(), String> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|error| error.to_string())?;
    let is_there = maps.lines().any(|line| line.rsplit('/').next().is_some_and(|file| file.starts_with("libcupti")));
    let is_intercepted = !matches!(way.observer, Observer::Nobody | DISPATCH);
    match (is_there, is_intercepted) {
        (true, false) => Err(format!("{} without CUPTI: libcupti is loaded", way.name)),
        (false, true) => Err(format!("{} with CUPTI: libcupti is not loaded", way.name)),
        _ => Ok(()),
    }
}

/// Device 0 with its primary context current, and a stream for each thread.
struct Gpu {
    context: sys::CUcontext,
    streams: Vec<sys::CUstream>,
    /// A kernel that does nothing.
    kernel: OnceLock<Kernel>,
    /// A graph of that kernel.
    graph: OnceLock<Graph>,
}

/// An executable graph that is never destroyed.
struct Graph(sys::CUgraphExec);

/// A kernel in a module that is never unloaded.
struct Kernel(sys::CUfunction);

// SAFETY: contexts and streams are handles that the driver accepts from any thread.
unsafe impl Sync for Gpu {}

// SAFETY: a function is a handle that the driver accepts from any thread.
unsafe impl Send for Kernel {}

// SAFETY: a graph is a handle that the driver accepts from any thread.
unsafe impl Send for Graph {}

// SAFETY: the driver accepts the graph from any thread, and only one thread at a time launches it.
unsafe impl Sync for Graph {}

// SAFETY: a function is a handle that the driver accepts from any thread.
unsafe impl Sync for Kernel {}

impl Gpu {
    fn open() -> Self {
        result::init().expect("there is a driver");
        let device = result::device::get(0).expect("there is a device");
        // SAFETY: the device came from the driver. The reference is kept until the process ends.
        let context = unsafe { result::primary_ctx::retain(device) }.expect("the device can be used");
        // SAFETY: the context is alive.
        unsafe { result::ctx::set_current(context) }.expect("a live context can be current");
        let stream = |_| result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
        let gpu = Self {
            context,
            streams: (0..THREADS).map(stream).collect(),
            kernel: OnceLock::new(),
            graph: OnceLock::new(),
        };
        let mut all = u64::MAX;
        // SAFETY: the device came from the driver, and both the attribute and the value are 64 bits wide.
        unsafe {
            let pool = result::device::get_default_mem_pool(device).expect("the device has a pool");
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result().expect("it has a threshold");
        }
        gpu
    }

    /// Loads the kernel at the first launch, so that the other rows also run on machines without kernels.
    fn kernel(&self) -> sys::CUfunction {
        const PTX: &CStr = c".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n";
        let load = || {
            let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the out-parameters are live, the image and the name are C strings, and the module is never unloaded.
            unsafe {
                sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()).result().expect("the kernel can be loaded");
                sys::cuModuleGetFunction(&raw mut kernel, module, c"k".as_ptr()).result().expect("it is in the module");
            }
            Kernel(kernel)
        };
        self.kernel.get_or_init(load).0
    }

    /// Makes one measurement. Returns the nanoseconds of wall time for one action of each thread.
    fn measure(&self, row: &BenchRow) -> f64 {
        match row.kind {
            Kind::Launch => drop(self.kernel()),
            Kind::Graph => drop(self.graph()),
            _ => {}
        }
        if row.threads == 1 {
            self.run(row.kind, 0, row.warm_up());
            return self.run(row.kind, 0, row.times);
        }
        let barrier = Barrier::new(row.threads);
        let (barrier, clock) = (&barrier, &Mutex::new(None));
        thread::scope(|threads| {
            let of_thread = |stream| {
                move || {
                    // SAFETY: the context is alive until the process ends.
                    unsafe { result::ctx::set_current(self.context) }.expect("a live context can be current");
                    self.run(row.kind, stream, row.warm_up());
                    barrier.wait();
                    // The first thread that passes the barrier starts the clock for all.
                    let start = *clock.lock().expect("nobody panicked").get_or_insert_with(Instant::now);
                    self.run(row.kind, stream, row.times);
                    start.elapsed()
                }
            };
            let running: Vec<_> = (0..row.threads).map(|stream| threads.spawn(of_thread(stream))).collect();
            let through = running.into_iter().map(|thread| thread.join().expect("a call of the driver failed"));
            nanoseconds(through.max().expect("there are threads")) / count(row.times)
        })
    }

    /// Runs the action at least this often on one thread. Returns the median time of one action, without waiting for the device.
    fn run(&self, kind: Kind, stream: usize, times: usize) -> f64 {
        /// The number of actions in a batch. The driver can queue more launches than this. The median of many short batches
        /// ignores the batches in which the processor did something else.
        const BATCH: usize = 100;
        pin(stream);
        let stream = self.streams[stream];
        let mut spent = Vec::new();
        for _ in 0..times.div_ceil(BATCH) {
            let start = Instant::now();
            for _ in 0..BATCH {
                match kind {
                    Kind::Async(bytes) => pooled_pair(bytes, stream),
                    Kind::Plain(bytes) => plain_pair(bytes),
                    Kind::Launch => self.launch(stream),
                    Kind::Graph => self.launch_graph(stream),
                    Kind::Trace => drop(black_box(exact().data())),
                }
            }
            spent.push(nanoseconds(start.elapsed()) / count(BATCH));
            // SAFETY: the stream is alive.
            unsafe { result::stream::synchronize(stream) }.expect("nothing failed on the stream");
        }
        median(spent)
    }

    fn launch(&self, stream: sys::CUstream) {
        let none = ptr::null_mut();
        // SAFETY: the kernel takes no parameters, and the stream is alive.
        unsafe { sys::cuLaunchKernel(self.kernel(), 1, 1, 1, 1, 1, 1, 0, stream, none, none.cast()) }
            .result()
            .expect("the kernel can be launched");
    }

    fn graph(&self) -> sys::CUgraphExec {
        let capture = || {
            let (stream, mode) = (self.streams[0], sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
            self.kernel();
            // SAFETY: the stream is alive, and nothing else uses it during the capture.
            unsafe { result::stream::begin_capture(stream, mode) }.expect("the stream can be captured");
            self.launch(stream);
            // SAFETY: the stream is alive; the graph came from the capture, and is never destroyed.
            let graph = unsafe { result::stream::end_capture(stream) }.expect("the capture ended whole");
            let mut executable = ptr::null_mut();
            // SAFETY: the out-parameter and the graph are live.
            let instantiated = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0) };
            instantiated.result().expect("the graph can be made executable");
            Graph(executable)
        };
        self.graph.get_or_init(capture).0
    }

    fn launch_graph(&self, stream: sys::CUstream) {
        // SAFETY: the graph and the stream are alive.
        unsafe { sys::cuGraphLaunch(self.graph(), stream) }.result().expect("the graph can be launched");
    }

    /// Makes one measurement, and checks that each call was observed.
    fn measure_by(&self, row: &BenchRow, way: &Way) -> f64 {
        match way.observer {
            Observer::Nobody | Observer::Idle => self.measure(row),
            Observer::Gpumem { .. } => self.measure_by_gpumem(row, way),
        }
    }

    fn measure_by_gpumem(&self, row: &BenchRow, way: &Way) -> f64 {
        // All traces except one stay open until the process ends. If a hundred traces were opened and closed around each
        // measurement, they would leave holes on the heap, and the driver's own allocations there would become slower.
        static OPEN: Mutex<Vec<GpuMemTrace>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().expect("nobody panicked");
        while open.len() + 1 < way.traces {
            open.push(exact());
        }
        let trace = (way.traces > 0).then(exact);
        let before = status();
        let measured = if way.name == OVERLAPPED {
            let barrier = Barrier::new(2);
            thread::scope(|threads| {
                threads.spawn(|| {
                    let other = exact();
                    barrier.wait();
                    barrier.wait();
                    drop(other);
                });
                barrier.wait();
                let measured = self.measure(row);
                barrier.wait();
                measured
            })
        } else {
            self.measure(row)
        };
        let after = status();
        assert_eq!(after.events - before.events, row.events(), "every call was recorded once");
        let left = after.live.iter().filter(|block| !block.kind.is_taken_by_driver()).count();
        assert_eq!((after.lost, after.untracked, left), (0, 0, 0), "nothing was missed, nothing is left");
        let Some(latest) = trace.map(|trace| trace.data()) else { return measured };
        let (least, most) = row.most();
        let peaked = latest.peaked.get();
        assert!((least..=most).contains(&peaked), "{peaked} B is not from {least} to {most}");
        for data in open.iter().map(GpuMemTrace::data).chain([latest]) {
            assert_eq!((data.used.get(), data.lost, data.untracked), (0, 0, 0), "all was recorded");
            assert!(data.peaked.get() >= peaked, "what was open was open for longer");
        }
        measured
    }
}

/// Returns how many functions of the stack of an allocation are known, including inlined ones.
fn functions(gpu: &Gpu, kind: Kind) -> f64 {
    let stream = gpu.streams[0];
    let mut at = 0;
    // SAFETY: the out-parameter and the stream are live, and the block is freed once.
    unsafe {
        match kind {
            Kind::Async(bytes) => sys::cuMemAllocAsync(&raw mut at, bytes, stream),
            Kind::Plain(bytes) => sys::cuMemAlloc_v2(&raw mut at, bytes),
            Kind::Launch | Kind::Graph | Kind::Trace => unreachable!("it allocates nothing"),
        }
        .result()
        .expect("the device has room");
    }
    let blocks = memory_snapshot().expect("allocations are intercepted");
    // SAFETY: the stream is live, and the block is freed once.
    unsafe {
        match kind {
            Kind::Async(_) => sys::cuMemFreeAsync(at, stream),
            _ => sys::cuMemFree_v2(at),
        }
        .result()
        .expect("it was allocated");
    }
    count(blocks.iter().find(|block| block.id == at).expect("it was recorded").backtrace.len())
}

/// Keeps the calling thread on one processor, because the caches of another processor are empty.
fn pin(thread: usize) {
    // The number of processors of the machine. `available_parallelism` would return 1 for a thread that is bound to one of them.
    // SAFETY: `sysconf` accepts any name.
    let processors = usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1).max(1);
    // SAFETY: a `cpu_set_t` of zeros is an empty set, the processor's number is below the size of the set, and 0 means the
    // calling thread. If the call is not allowed, the thread stays where it is.
    unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(thread % processors.min(libc::CPU_SETSIZE as usize), &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}

fn pooled_pair(bytes: usize, stream: sys::CUstream) {
    let mut at = 0;
    // SAFETY: the out-parameter and the stream are live, and the block is freed once.
    unsafe {
        sys::cuMemAllocAsync(&raw mut at, bytes, stream).result().expect("the device has room");
        sys::cuMemFreeAsync(black_box(at), stream).result().expect("it was allocated");
    }
}

fn plain_pair(bytes: usize) {
    let mut at = 0;
    // SAFETY: the out-parameter is live, and the block is freed once.
    unsafe {
        sys::cuMemAlloc_v2(&raw mut at, bytes).result().expect("the device has room");
        sys::cuMemFree_v2(black_box(at)).result().expect("it was allocated");
    }
}

fn exact() -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).on_exit_report(false);
    builder.start().expect("the device can be traced")
}

fn sorted(mut of: Vec<f64>) -> Vec<f64> {
    of.sort_by(f64::total_cmp);
    of
}

fn median(of: Vec<f64>) -> f64 {
    let middle = of.len() / 2;
    sorted(of)[middle]
}

#[expect(clippy::cast_precision_loss, reason = "there are fewer than 2^52")]
fn count(of: usize) -> f64 {
    of as f64
}

fn nanoseconds(of: Duration) -> f64 {
    of.as_secs_f64() * 1e9
}

fn driver_version() -> String {
    let nvml = nvml_wrapper::Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
    nvml.and_then(|nvml| nvml.sys_driver_version()).unwrap_or_else(|error| format!("({error})"))
}

fn cuda_version() -> String {
    let mut version = 0;
    // SAFETY: the out-parameter is live.
    match unsafe { sys::cuDriverGetVersion(&raw mut version) }.result() {
        Ok(()) => format!("{}.{}", version / 1000, version % 1000 / 10),
        Err(error) => format!("({error})"),
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
