//! What hearing every allocation costs the calls that are heard, on a real GPU: bare and traced interleaved in one run,
//! beside a callback that does nothing and one with the obvious map in it. Prints one table, for `docs/VERIFIED.md`.
//!
//! `cargo bench -p gpumem-tests --bench gpu`; with `-- stacks` behind it, only what it costs to take stacks down.

use std::{
    collections::HashMap,
    env,
    ffi::c_void,
    hint::black_box,
    io::{BufRead, BufReader, Write, stdin},
    panic,
    process::{self, Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr,
    sync::{
        Barrier, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

use cudarc::driver::{result, sys};
use gpumem::{Bytes, Gauge, GpuMemTrace, device_name, memory_snapshot, status, subscribe, unsubscribe};
use gpumem_tests::deeper;
use libloading::Library;

/// Pairs of a bare and a traced measurement in each row.
const PAIRS: usize = 25;
const THREADS: usize = 16;
const MIB: usize = 1 << 20;
/// What fastai's guard costs on the same machine, in nanoseconds.
const FASTAI: f64 = 265_000.0;

fn main() {
    if env::var_os("GPUMEM_SIM").is_some() || !gpumem::is_available() {
        println!("skipped: no device");
        return;
    }
    // A thread that fails would leave the others at their barrier.
    let say = panic::take_hook();
    panic::set_hook(Box::new(move |failure| {
        say(failure);
        process::abort();
    }));
    if env::var_os(Other::SWITCH).is_some() {
        return Other::answer();
    }
    if !env::args().any(|argument| argument == "stacks") {
        calls();
    }
    stacks();
}

/// What hearing costs.
fn calls() {
    let gpu = Gpu::open();
    // Before anything was ever subscribed.
    let works = Work::all();
    let pristine: Vec<f64> = works.iter().map(|work| median((0..7).map(|_| gpu.measure(work)).collect())).collect();
    subscribe().expect("allocations can be heard");
    let heard_by = status().heard_by.expect("it was subscribed just now");
    let cupti = Cupti::load(&heard_by);
    unsubscribe();

    println!("Card: {}", device_name(0).expect("device 0 has a name"));
    println!("Driver: {}, CUDA {}; heard by {}", driver_version(), cuda_version(), file_name(&heard_by));
    println!(
        "Medians of {PAIRS} interleaved pairs, bare and heard; ratios are those of each pair. \"Before\" is bare before \
         CUPTI was first used. Times are for each pair or launch; with {} threads, on {} processors, the wall time of all \
         divided by what each did, waits included.",
        THREADS,
        thread::available_parallelism().map_or(0, usize::from),
    );
    println!();
    println!("| what | heard by | callbacks | before, ns | bare, ns | heard, ns | ratio | 10th to 90th percentile |");
    println!("|---|---|---:|---:|---:|---:|---:|---:|");
    for (work, pristine) in works.iter().zip(pristine) {
        let callbacks = gpu.callbacks(&cupti, work);
        for ear in [Ear::Empty, Ear::Naive, Ear::Gpumem { traces: 1 }, Ear::Gpumem { traces: 100 }] {
            let Pairs { bare, heard, ratios } = gpu.pairs(&cupti, work, ear);
            println!(
                "| {} | {} | {callbacks:.2} | {pristine:.0} | {bare:.0} | {heard:.0} | {:.3} | {:.3} to {:.3} |",
                work.name(),
                ear.name(),
                ratios[ratios.len() / 2],
                ratios[ratios.len() / 10],
                ratios[ratios.len() * 9 / 10],
            );
        }
    }
    let (trace, low, high) = guard();
    println!(
        "| Exact trace: create, read, drop | gpumem | | | {FASTAI:.0} (fastai's guard) | {trace:.0} | {:.5} | {:.5} to \
         {:.5} |",
        trace / FASTAI,
        low / FASTAI,
        high / FASTAI
    );
}

/// What is timed. A size is in bytes.
#[derive(Clone, Copy)]
enum Kind {
    Async(usize),
    Plain(usize),
    Launch,
}

struct Work {
    kind: Kind,
    threads: usize,
    /// Of each thread in each measurement.
    times: usize,
}

impl Work {
    fn all() -> Vec<Self> {
        let work = |kind, threads, times| Self { kind, threads, times };
        vec![
            work(Kind::Async(4096), 1, 10_000),
            work(Kind::Async(MIB), 1, 10_000),
            work(Kind::Plain(MIB), 1, 2000),
            work(Kind::Launch, 1, 10_000),
            work(Kind::Async(4096), THREADS, 2000),
            work(Kind::Async(MIB), THREADS, 2000),
            work(Kind::Launch, THREADS, 2000),
        ]
    }

    fn name(&self) -> String {
        let what = match self.kind {
            Kind::Async(bytes) => format!("`cuMemAllocAsync` + `cuMemFreeAsync`, {}", Bytes::from(bytes)),
            Kind::Plain(bytes) => format!("`cuMemAlloc` + `cuMemFree`, {}", Bytes::from(bytes)),
            Kind::Launch => "kernel launch".to_owned(),
        };
        if self.threads == 1 { what } else { format!("{what}, {} threads", self.threads) }
    }

    /// What a trace must say to all of it: the least and the most at once.
    fn most(&self) -> (u64, u64) {
        match self.kind {
            Kind::Async(bytes) | Kind::Plain(bytes) => (bytes as u64, (bytes * self.threads) as u64),
            Kind::Launch => (0, 0),
        }
    }
}

/// Who hears the calls.
#[derive(Clone, Copy)]
enum Ear {
    Empty,
    Naive,
    Gpumem { traces: usize },
}

impl Ear {
    fn name(self) -> String {
        match self {
            Self::Empty => "empty callback".to_owned(),
            Self::Naive => "naive `Mutex<HashMap>`".to_owned(),
            Self::Gpumem { traces: 1 } => "gpumem, 1 open trace".to_owned(),
            Self::Gpumem { traces } => format!("gpumem, {traces} open traces"),
        }
    }
}

struct Pairs {
    bare: f64,
    heard: f64,
    /// Sorted.
    ratios: Vec<f64>,
}

/// Device 0 with its primary context current, a kernel that does nothing, and a stream for each thread.
struct Gpu {
    context: sys::CUcontext,
    kernel: sys::CUfunction,
    streams: Vec<sys::CUstream>,
}

// SAFETY: contexts, functions and streams are handles that the driver takes from any thread.
unsafe impl Sync for Gpu {}

impl Gpu {
    fn open() -> Self {
        const PTX: &std::ffi::CStr = c".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n";
        result::init().expect("there is a driver");
        let device = result::device::get(0).expect("there is a device");
        // SAFETY: the device came from the driver. The reference is kept until the process ends.
        let context = unsafe { result::primary_ctx::retain(device) }.expect("the device can be used");
        // SAFETY: the context is alive.
        unsafe { result::ctx::set_current(context) }.expect("a live context can be current");
        let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the out-parameters are live, the image and the name are C strings, and the module is never unloaded.
        unsafe {
            sys::cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()).result().expect("the kernel can be loaded");
            sys::cuModuleGetFunction(&raw mut kernel, module, c"k".as_ptr()).result().expect("it is in the module");
        }
        let stream = |_| result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream");
        let gpu = Self { context, kernel, streams: (0..THREADS).map(stream).collect() };
        let mut all = u64::MAX;
        // SAFETY: the device came from the driver, and the attribute is 64 bits wide, as what is passed is.
        unsafe {
            let pool = result::device::get_default_mem_pool(device).expect("the device has a pool");
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result().expect("it has a threshold");
        }
        gpu
    }

    /// One measurement: nanoseconds of wall time for each time that each thread does it.
    fn measure(&self, work: &Work) -> f64 {
        if work.threads == 1 {
            self.run(work.kind, 0, work.times / 10);
            return self.run(work.kind, 0, work.times);
        }
        let barrier = Barrier::new(work.threads);
        let (barrier, clock) = (&barrier, &Mutex::new(None));
        thread::scope(|threads| {
            let of_thread = |stream| {
                move || {
                    // SAFETY: the context is alive until the process ends.
                    unsafe { result::ctx::set_current(self.context) }.expect("a live context can be current");
                    self.run(work.kind, stream, work.times / 10);
                    barrier.wait();
                    // The first thread that is through the barrier starts the clock for all.
                    let begin = *clock.lock().expect("nobody panicked").get_or_insert_with(Instant::now);
                    self.run(work.kind, stream, work.times);
                    begin.elapsed()
                }
            };
            let running: Vec<_> = (0..work.threads).map(|stream| threads.spawn(of_thread(stream))).collect();
            let through = running.into_iter().map(|thread| thread.join().expect("a call of the driver failed"));
            nanoseconds(through.max().expect("there are threads")) / count(work.times)
        })
    }

    /// Does it so many times on one thread: nanoseconds for each, without waiting for the device.
    fn run(&self, kind: Kind, stream: usize, times: usize) -> f64 {
        /// Fewer launches than the driver queues.
        const BATCH: usize = 500;
        let stream = self.streams[stream];
        let mut spent = std::time::Duration::ZERO;
        let mut left = times;
        while left > 0 {
            let batch = left.min(BATCH);
            left -= batch;
            let begin = Instant::now();
            for _ in 0..batch {
                match kind {
                    Kind::Async(bytes) => pooled_pair(bytes, stream),
                    Kind::Plain(bytes) => plain_pair(bytes),
                    Kind::Launch => self.launch(stream),
                }
            }
            spent += begin.elapsed();
            // SAFETY: the stream is alive.
            unsafe { result::stream::synchronize(stream) }.expect("nothing failed on the stream");
        }
        nanoseconds(spent) / count(times)
    }

    fn launch(&self, stream: sys::CUstream) {
        let none = ptr::null_mut();
        // SAFETY: the kernel takes no parameters, and the stream is alive.
        unsafe { sys::cuLaunchKernel(self.kernel, 1, 1, 1, 1, 1, 1, 0, stream, none, none.cast()) }
            .result()
            .expect("the kernel can be launched");
    }

    /// Bare and heard by turns, each first every other time.
    fn pairs(&self, cupti: &Cupti, work: &Work, ear: Ear) -> Pairs {
        let (mut bare, mut heard) = (Vec::new(), Vec::new());
        for pair in 0..PAIRS {
            if pair % 2 == 0 {
                bare.push(self.measure(work));
                heard.push(self.heard(cupti, work, ear));
            } else {
                heard.push(self.heard(cupti, work, ear));
                bare.push(self.measure(work));
            }
        }
        let mut ratios: Vec<_> = heard.iter().zip(&bare).map(|(heard, bare)| heard / bare).collect();
        ratios.sort_by(f64::total_cmp);
        Pairs { bare: median(bare), heard: median(heard), ratios }
    }

    /// One measurement while somebody listens, who has then heard all of it.
    fn heard(&self, cupti: &Cupti, work: &Work, ear: Ear) -> f64 {
        match ear {
            Ear::Empty => cupti.during(empty, || self.measure(work)),
            Ear::Naive => {
                let measured = cupti.during(naive, || self.measure(work));
                let naive = NAIVE.lock().expect("nobody panicked");
                assert!(naive.as_ref().is_none_or(HashMap::is_empty), "all was freed again");
                measured
            }
            Ear::Gpumem { traces } => self.heard_by_gpumem(work, traces),
        }
    }

    fn heard_by_gpumem(&self, work: &Work, traces: usize) -> f64 {
        subscribe().expect("nobody else is subscribed");
        let traces: Vec<_> = (0..traces).map(|_| exact()).collect();
        let measured = self.measure(work);
        for trace in traces {
            let (data, (least, most)) = (trace.data(), work.most());
            assert_eq!((data.used.get(), data.lost, data.untracked), (0, 0, 0), "all was heard");
            let peaked = data.peaked.get();
            assert!((least..=most).contains(&peaked), "{peaked} B is not from {least} to {most}");
        }
        unsubscribe();
        measured
    }

    /// How many functions are known of the stack of an allocation, those that were inlined too.
    fn functions(&self, kind: Kind) -> f64 {
        subscribe().expect("nobody else is subscribed");
        let stream = self.streams[0];
        let mut at = 0;
        // SAFETY: the out-parameter and the stream are live, and the block is given back once.
        unsafe {
            match kind {
                Kind::Async(bytes) => sys::cuMemAllocAsync(&raw mut at, bytes, stream),
                Kind::Plain(bytes) => sys::cuMemAlloc_v2(&raw mut at, bytes),
                Kind::Launch => unreachable!("a launch allocates nothing"),
            }
            .result()
            .expect("the device has room");
        }
        let blocks = memory_snapshot().expect("allocations are heard");
        // SAFETY: as above.
        unsafe {
            match kind {
                Kind::Async(_) => sys::cuMemFreeAsync(at, stream),
                _ => sys::cuMemFree_v2(at),
            }
            .result()
            .expect("it was allocated");
        }
        unsubscribe();
        count(blocks.iter().find(|block| block.key == at).expect("it was heard").backtrace.len())
    }

    /// How many callbacks one time takes.
    fn callbacks(&self, cupti: &Cupti, work: &Work) -> f64 {
        let times = 1000;
        let before = COUNTED.load(Relaxed);
        cupti.during(counting, || self.run(work.kind, 0, times));
        let counted = COUNTED.load(Relaxed) - before;
        count(usize::try_from(counted).expect("not so many")) / count(times)
    }
}

/// What is timed with stacks and without them.
struct Stacked {
    work: Work,
    /// `GPUMEM_BACKTRACE`.
    stacks: &'static str,
    /// So many functions more than the bench has anyway.
    deeper: usize,
}

impl Stacked {
    fn all() -> Vec<Self> {
        let of = |kind, times, stacks, deeper| Self { work: Work { kind, threads: 1, times }, stacks, deeper };
        vec![
            of(Kind::Async(4096), 10_000, "1", 0),
            of(Kind::Async(4096), 10_000, "1", 40),
            of(Kind::Plain(MIB), 500, "auto", 0),
            of(Kind::Plain(MIB), 500, "auto", 40),
        ]
    }
}

/// What it costs to take down the stack of each allocation.
fn stacks() {
    println!();
    println!(
        "Stacks. Medians of {PAIRS} rounds of bare, heard with `GPUMEM_BACKTRACE=0`, and heard with what the row says, in a \
         process of its own each; ratios are those of each round. A stack is taken down for the allocation of a pair, not for \
         its free."
    );
    println!();
    println!(
        "| what | `GPUMEM_BACKTRACE` | functions on the stack | bare, ns | heard, ns | with stacks, ns | ratio | 10th to 90th \
         percentile | a stack, µs | both events with it, µs |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    for (number, row) in Stacked::all().iter().enumerate() {
        let (mut without, mut with) = (Other::start("0"), Other::start(row.stacks));
        let functions = [&mut without, &mut with].map(|other| other.ask("functions", number));
        assert!(functions[0] < 1.0 && functions[1] > 1.0, "stacks are taken down where they are wanted: {functions:?}");
        let mut rounds = Vec::new();
        for round in 0..PAIRS {
            let mut measured = [0.0; 3];
            for turn in 0..3 {
                let which = (round + turn) % 3;
                measured[which] = match which {
                    0 => without.ask("bare", number),
                    1 => without.ask("heard", number),
                    _ => with.ask("heard", number),
                };
            }
            rounds.push(measured);
        }
        let mut ratios: Vec<_> = rounds.iter().map(|[_, heard, with]| with / heard).collect();
        ratios.sort_by(f64::total_cmp);
        let of = |figure: &dyn Fn(&[f64; 3]) -> f64| median(rounds.iter().map(figure).collect());
        println!(
            "| {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.3} | {:.3} to {:.3} | {:.2} | {:.2} |",
            row.work.name(),
            row.stacks,
            functions[1],
            of(&|[bare, ..]| *bare),
            of(&|[_, heard, _]| *heard),
            of(&|[.., with]| *with),
            ratios[PAIRS / 2],
            ratios[PAIRS / 10],
            ratios[PAIRS * 9 / 10],
            of(&|[_, heard, with]| (with - heard) / 1000.0),
            of(&|[bare, _, with]| (with - bare) / 1000.0),
        );
    }
}

/// This program once more, since `GPUMEM_BACKTRACE` is read once in a process. It measures when it is asked to.
struct Other {
    process: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Other {
    const SWITCH: &str = "GPUMEM_BENCH_ANSWERS";

    fn start(stacks: &str) -> Self {
        let mut command = Command::new(env::current_exe().expect("a program has a path"));
        command.env(Self::SWITCH, "1").env("GPUMEM_BACKTRACE", stacks);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it can be run again");
        let (questions, answers) = (process.stdin.take(), process.stdout.take().expect("it is piped"));
        Self { process, questions, answers: BufReader::new(answers) }
    }

    fn ask(&mut self, what: &str, row: usize) -> f64 {
        let questions = self.questions.as_mut().expect("it is piped");
        writeln!(questions, "{what} {row}").and_then(|()| questions.flush()).expect("it listens");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it answers");
        answer.trim().parse().expect("it answers with a number")
    }

    /// The other end.
    fn answer() {
        let (gpu, rows) = (Gpu::open(), Stacked::all());
        for question in stdin().lines() {
            let question = question.expect("it can be read");
            let (what, row) = question.split_once(' ').expect("two words");
            let Stacked { work, deeper: depth, .. } = &rows[row.parse::<usize>().expect("a number")];
            let mut answer = 0.0;
            deeper(*depth, &mut || {
                answer = match what {
                    "bare" => gpu.measure(work),
                    "heard" => gpu.heard_by_gpumem(work, 1),
                    _ => gpu.functions(work.kind),
                };
            });
            println!("{answer}");
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It ends when nobody can ask any more.
        self.questions = None;
        let _ = self.process.wait();
    }
}

fn pooled_pair(bytes: usize, stream: sys::CUstream) {
    let mut at = 0;
    // SAFETY: the out-parameter and the stream are live, and the block is given back once.
    unsafe {
        sys::cuMemAllocAsync(&raw mut at, bytes, stream).result().expect("the device has room");
        sys::cuMemFreeAsync(black_box(at), stream).result().expect("it was allocated");
    }
}

fn plain_pair(bytes: usize) {
    let mut at = 0;
    // SAFETY: the out-parameter is live, and the block is given back once.
    unsafe {
        sys::cuMemAlloc_v2(&raw mut at, bytes).result().expect("the device has room");
        sys::cuMemFree_v2(black_box(at)).result().expect("it was allocated");
    }
}

fn exact() -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).on_exit_report(false);
    builder.start().expect("the device can be heard")
}

/// Median, 10th and 90th percentile of what a trace costs.
fn guard() -> (f64, f64, f64) {
    const TIMES: usize = 2000;
    subscribe().expect("nobody else is subscribed");
    let once = || {
        let begin = Instant::now();
        for _ in 0..TIMES {
            let trace = exact();
            black_box(trace.data());
        }
        nanoseconds(begin.elapsed()) / count(TIMES)
    };
    once();
    let mut measured: Vec<_> = (0..PAIRS).map(|_| once()).collect();
    measured.sort_by(f64::total_cmp);
    unsubscribe();
    (measured[PAIRS / 2], measured[PAIRS / 10], measured[PAIRS * 9 / 10])
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

#[expect(clippy::cast_precision_loss, reason = "there are fewer than 2^52")]
fn count(of: usize) -> f64 {
    of as f64
}

fn nanoseconds(of: std::time::Duration) -> f64 {
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

const ALLOC: u32 = 243;
const FREE: u32 = 245;
const ALLOC_ASYNC: u32 = 598;
const FREE_ASYNC: u32 = 600;

/// What gpumem enables in the domain of the driver's calls (1); and in that of resources (3) the end of contexts (2).
const NUMBERS: [u32; 33] = [
    ALLOC,
    244,
    371,
    ALLOC_ASYNC,
    599,
    611,
    612,
    FREE,
    FREE_ASYNC,
    601,
    294,
    39,
    271,
    38,
    301,
    379,
    302,
    272,
    274,
    347,
    89,
    349,
    549,
    565,
    550,
    551,
    552,
    607,
    606,
    610,
    124,
    367,
    326,
];
const DRIVER_CALLS: u32 = 1;
const RESOURCES: (u32, u32) = (3, 2);

type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> u32;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> u32;
type Enable = unsafe extern "C" fn(u32, *mut c_void, u32, u32) -> u32;

/// CUPTI as somebody else would use it.
struct Cupti {
    subscribe: Subscribe,
    unsubscribe: Unsubscribe,
    enable: Enable,
    _library: Library,
}

impl Cupti {
    fn load(path: &str) -> Self {
        // SAFETY: the library is in this process already, and the signatures are those of its header.
        unsafe {
            let library = Library::new(path).expect("gpumem has loaded it");
            Self {
                subscribe: *library.get::<Subscribe>(b"cuptiSubscribe").expect("gpumem has it too"),
                unsubscribe: *library.get::<Unsubscribe>(b"cuptiUnsubscribe").expect("gpumem has it too"),
                enable: *library.get::<Enable>(b"cuptiEnableCallback").expect("gpumem has it too"),
                _library: library,
            }
        }
    }

    /// Does something while this callback hears what gpumem would.
    fn during<T>(&self, callback: Callback, action: impl FnOnce() -> T) -> T {
        let mut subscriber = ptr::null_mut();
        // SAFETY: the out-parameter is live, and the callbacks below keep CUPTI's contract.
        let code = unsafe { (self.subscribe)(&raw mut subscriber, callback, ptr::null_mut()) };
        assert_eq!(code, 0, "cuptiSubscribe");
        for (domain, number) in NUMBERS.map(|number| (DRIVER_CALLS, number)).into_iter().chain([RESOURCES]) {
            // SAFETY: the subscriber is live, and the numbers are CUPTI's own.
            let code = unsafe { (self.enable)(1, subscriber, domain, number) };
            assert_eq!(code, 0, "cuptiEnableCallback of {number}");
        }
        let done = action();
        // SAFETY: the subscriber is live and not used again.
        let code = unsafe { (self.unsubscribe)(subscriber) };
        assert_eq!(code, 0, "cuptiUnsubscribe");
        done
    }
}

unsafe extern "C" fn empty(_: *mut c_void, _: u32, _: u32, _: *const c_void) {}

static COUNTED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn counting(_: *mut c_void, _: u32, _: u32, _: *const c_void) {
    COUNTED.fetch_add(1, Relaxed);
}

/// The front of `CUpti_CallbackData`.
#[repr(C)]
struct Data {
    site: u32,
    name: *const c_void,
    arguments: *const u64,
    answer: *const u32,
}

static NAIVE: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);

/// What one would write first.
unsafe extern "C" fn naive(_: *mut c_void, domain: u32, number: u32, data: *const c_void) {
    if domain != DRIVER_CALLS {
        return;
    }
    // SAFETY: in this domain CUPTI passes a `CUpti_CallbackData` that is valid until the callback returns.
    let data = unsafe { &*data.cast::<Data>() };
    let Ok(mut live) = NAIVE.lock() else { return };
    let live = live.get_or_insert_default();
    match (number, data.site) {
        (ALLOC | ALLOC_ASYNC, 1) => {
            // SAFETY: at the exit the answer is there; when the call worked, its first argument's target was written,
            // and the second is the size.
            let block = unsafe {
                (data.answer.read() == 0)
                    .then(|| ((data.arguments.read() as *const u64).read(), data.arguments.add(1).read()))
            };
            if let Some((at, bytes)) = block {
                live.insert(at, bytes);
            }
        }
        (FREE | FREE_ASYNC, 0) => {
            // SAFETY: the first argument is the address.
            live.remove(&unsafe { data.arguments.read() });
        }
        _ => {}
    }
}
