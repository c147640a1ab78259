//! Where memory is, on a real GPU: scopes, the breakdown, who holds it when it runs out, leaks, PyTorch's statistics.
//! Switched on by `GPUMEM_DEVICE=1`; `docs/VERIFIED.md` holds what was seen on which.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_memory -- --nocapture --test-threads=1`
//!
//! The training loop needs libcublas on the loader's path, which `LD_LIBRARY_PATH` extends. Each test is a process of its own.

use std::{
    collections::BTreeSet,
    env,
    ffi::c_void,
    fmt::Write as _,
    mem,
    process::Command,
    ptr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use cudarc::{
    cublas::{CudaBlas, result as blas, sys as blas_sys},
    driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result, sys},
};
use gpumem::{
    Breakdown, Bytes, Gauge, GpuMemTrace, OutOfMemory, PartKind, breakdown, max_memory_allocated, memory_allocated,
    memory_snapshot, memory_stats, memory_summary, on_oom, reset_peak_memory_stats, retry_after_trim, status,
    subscribe, summary,
};
use gpumem_tests::{Random, device, on_the_standin};
use nvml_wrapper::Nvml;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// Everything that was wrong, at the end: a run on a rare machine is to say all of it.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn unless(&mut self, right: bool, what: impl FnOnce() -> String) {
        if !right {
            self.0.push(what());
        }
    }

    #[track_caller]
    fn end(self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

/// There is no cuBLAS, and its memory does not run full as a card's does.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&["a_training_loop_adds_up", "out_of_memory_names_who_holds_it"]);
}

/// Run in a process of its own, by the tests below.
#[test]
fn child() {
    match env::var("GPUMEM_CHILD").as_deref() {
        Ok("train") => train(),
        Ok("statistics") => statistics(),
        Ok("out of memory") => out_of_memory(),
        Ok("leak") => leak(),
        Ok("retry") => retry(),
        Ok("hook") => hook(),
        _ => {}
    }
}

/// What a child said on stdout and on stderr.
fn run_child(what: &str, variables: &[(&str, &str)]) -> (String, String) {
    let mut child = Command::new(env::current_exe().expect("a test has a path"));
    for ours in ["GPUMEM_BACKTRACE", "GPUMEM_LEAKS", "GPUMEM_REPORT", "GPUMEM_GAUGE", "GPUMEM_SIM"] {
        child.env_remove(ours);
    }
    child.args(["--exact", "child", "--nocapture"]).env("GPUMEM_CHILD", what);
    let output = child.envs(variables.iter().copied()).output().expect("the test can be run again");
    let [said, noticed] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    println!("a process of its own: {what} {variables:?}\n{said}\nand on stderr:\n{noticed}");
    assert!(output.status.success(), "{what}: {}", output.status);
    (said, noticed)
}

#[test]
fn a_training_loop_adds_up() {
    let Some(_one) = device() else { return };
    run_child("train", &[]);
}

#[test]
fn a_training_loop_adds_up_with_every_stack() {
    let Some(_one) = device() else { return };
    run_child("train", &[("GPUMEM_BACKTRACE", "1")]);
}

#[test]
fn allocated_is_what_a_program_adds_up() {
    let Some(_one) = device() else { return };
    run_child("statistics", &[]);
}

#[test]
fn out_of_memory_names_who_holds_it() {
    let Some(_one) = device() else { return };
    let (said, noticed) = run_child("out of memory", &[]);
    let lines: Vec<_> = said.lines().filter_map(|line| line.strip_prefix("refused at ")).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| noticed.contains(line)), "{lines:?} are named");
    for part in ["device 0 is out of memory: 1 GiB (device) were asked for", "\n  in victim\n", "\n    hog "] {
        assert!(noticed.contains(part), "{part:?} is not said");
    }
}

#[test]
fn a_planted_leak_is_found_with_its_line() {
    let Some(_one) = device() else { return };
    let (said, noticed) = run_child("leak", &[("GPUMEM_LEAKS", "1")]);
    let (_, rest) = said.split_once("leaked at ").expect("the child says it");
    let place = rest.lines().next().unwrap_or_default();
    assert!(noticed.contains("1 block (1 MiB) was not freed"), "one is said to be left");
    assert!(noticed.lines().any(|line| line.contains(place) && line.contains("in train > step")), "{place} is named");
}

#[test]
fn a_retry_comes_after_the_pool_gave_back() {
    let Some(_one) = device() else { return };
    run_child("retry", &[]);
}

#[test]
fn what_a_hook_gives_back_is_heard() {
    let Some(_one) = device() else { return };
    run_child("hook", &[]);
}

/// Used memory of device 0, asked of NVML without gpumem.
fn nvml_used() -> u64 {
    static NVML: OnceLock<Nvml> = OnceLock::new();
    let nvml = NVML.get_or_init(|| {
        Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().expect("the driver brings it along")
    });
    let uuid = result::device::get(0).and_then(result::device::get_uuid).expect("device 0 has one").bytes;
    let hex = uuid.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{:02x}", byte.to_ne_bytes()[0]);
        hex
    });
    let uuid = format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    let memory = nvml.device_by_uuid(uuid).and_then(|device| device.memory_info());
    memory.expect("NVML reads the device").used
}

/// The breakdown adds up to what NVML says before it and after it.
fn look(when: &str, wrong: &mut Wrong) -> Breakdown {
    let before = nvml_used();
    let told = breakdown(0).expect("the device can be read");
    let after = nvml_used();
    let sum = told.parts.iter().map(|part| part.bytes).sum::<Bytes>().get();
    println!("\n{when}: NVML says {before} B before, {after} B after; the parts add up to {sum} B\n{told}");
    let off = sum.abs_diff(before).min(sum.abs_diff(after));
    wrong.unless(off <= 2 << 20, || format!("{when}: the parts are {off} B from what NVML says"));
    told
}

fn of_kind(told: &Breakdown, kind: PartKind) -> u64 {
    told.parts.iter().filter(|part| part.kind == kind).map(|part| part.bytes.get()).sum()
}

type Path = Vec<&'static str>;

/// What the program did, as it keeps it itself.
#[derive(Default)]
struct Log {
    /// The scopes that are open.
    path: Path,
    entries: Vec<Entry>,
}

enum Entry {
    Opened(Path),
    /// A block that was made in this path was given out or back.
    Changed(Path, i64),
}

/// What a path comes to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Figures {
    calls: u64,
    used: u64,
    peak: u64,
    total: u64,
    allocations: u64,
}

impl Log {
    /// Replays for one path and all inside it: for all, if it is empty.
    fn replay(&self, path: &[&str]) -> Figures {
        let mut figures = Figures::default();
        for entry in &self.entries {
            match entry {
                Entry::Opened(opened) => figures.calls += u64::from(opened == path),
                Entry::Changed(of, by) if of.starts_with(path) => {
                    figures.used = figures.used.checked_add_signed(*by).expect("no more is freed than was allocated");
                    figures.peak = figures.peak.max(figures.used);
                    figures.total += u64::try_from(*by).unwrap_or(0);
                    figures.allocations += u64::from(*by > 0);
                }
                Entry::Changed(..) => {}
            }
        }
        figures
    }

    /// The most that was allocated at one time from this entry on.
    fn peak_since(&self, first: usize) -> u64 {
        let change = |entry: &Entry| if let Entry::Changed(_, by) = entry { *by } else { 0 };
        let (before, since) = self.entries.split_at(first);
        let mut used: i64 = before.iter().map(change).sum();
        let mut peak = used;
        for entry in since {
            used += change(entry);
            peak = peak.max(used);
        }
        peak.unsigned_abs()
    }

    fn paths(&self) -> BTreeSet<Path> {
        let opened = |entry: &Entry| if let Entry::Opened(path) = entry { Some(path.clone()) } else { None };
        self.entries.iter().filter_map(opened).collect()
    }
}

/// Floats on the device, column after column, as cuBLAS has them.
struct Matrix {
    at: u64,
    rows: usize,
    columns: usize,
    made_in: Path,
    /// Gives stream-ordered memory back when it is dropped. None is memory of `cuMemAlloc`.
    pooled: Option<CudaSlice<f32>>,
}

impl Matrix {
    fn len(&self) -> usize {
        self.rows * self.columns
    }

    fn bytes(&self) -> i64 {
        i64::try_from(self.len() * 4).expect("small")
    }
}

/// A program that keeps its own log beside gpumem's.
struct Program {
    stream: Arc<CudaStream>,
    log: Log,
}

impl Program {
    fn new(context: &Arc<CudaContext>) -> Self {
        Self { stream: context.default_stream(), log: Log::default() }
    }

    fn scope<R>(&mut self, name: &'static str, code: impl FnOnce(&mut Self) -> R) -> R {
        self.log.path.push(name);
        self.log.entries.push(Entry::Opened(self.log.path.clone()));
        let result = GpuMemTrace::scope(name, |trace| {
            trace.silent(true);
            code(self)
        });
        self.log.path.pop();
        result
    }

    /// By cudarc, in stream order.
    fn pooled(&mut self, rows: usize, columns: usize) -> Matrix {
        let slice = self.stream.alloc_zeros::<f32>(rows * columns).expect("the device has room");
        let at = slice.device_ptr(&self.stream).0;
        self.made(at, rows, columns, Some(slice))
    }

    /// By `cuMemAlloc`.
    fn plain(&mut self, rows: usize, columns: usize) -> Matrix {
        // SAFETY: a context is current. Nothing reads the memory before it was written.
        let at = unsafe { result::malloc_sync(rows * columns * 4) }.expect("the device has room");
        self.made(at, rows, columns, None)
    }

    fn made(&mut self, at: u64, rows: usize, columns: usize, pooled: Option<CudaSlice<f32>>) -> Matrix {
        let matrix = Matrix { at, rows, columns, made_in: self.log.path.clone(), pooled };
        self.log.entries.push(Entry::Changed(matrix.made_in.clone(), matrix.bytes()));
        matrix
    }

    fn free(&mut self, matrix: Matrix) {
        self.log.entries.push(Entry::Changed(matrix.made_in.clone(), -matrix.bytes()));
        match matrix.pooled {
            Some(slice) => drop(slice),
            // SAFETY: the block came from `malloc_sync` and is given back once, after what the stream does with it:
            // `cuMemFree` waits.
            None => unsafe { result::free_sync(matrix.at) }.expect("it was allocated"),
        }
    }
}

fn fill(matrix: &Matrix, value: f32) {
    // SAFETY: the matrix is live and has as many elements of 32 bits.
    unsafe { sys::cuMemsetD32_v2(matrix.at, value.to_bits(), matrix.len()) }.result().expect("the device writes");
}

fn first(matrix: &Matrix) -> f32 {
    let mut value = [0.0];
    // SAFETY: the matrix is live and not empty.
    unsafe { result::memcpy_dtoh_sync(&mut value, matrix.at) }.expect("nothing failed before it");
    value[0]
}

/// `c = a · b`, where each may be transposed.
fn multiply(by: &CudaBlas, (a, a_turned): (&Matrix, bool), (b, b_turned): (&Matrix, bool), c: &Matrix) {
    let int = |of: usize| i32::try_from(of).expect("small");
    let turned = |turned| {
        if turned { blas_sys::cublasOperation_t::CUBLAS_OP_T } else { blas_sys::cublasOperation_t::CUBLAS_OP_N }
    };
    let float = |of: &Matrix| ptr::with_exposed_provenance_mut::<f32>(usize::try_from(of.at).expect("64 bits"));
    let inner = if a_turned { a.rows } else { a.columns };
    let (one, zero) = (1.0, 0.0);
    // SAFETY: all are live on the device of the handle, their sizes are told, and the scalars are on the host.
    let done = unsafe {
        blas::sgemm(
            *by.handle(),
            turned(a_turned),
            turned(b_turned),
            int(c.rows),
            int(c.columns),
            int(inner),
            &raw const one,
            float(a),
            int(a.rows),
            float(b),
            int(b.rows),
            &raw const zero,
            float(c),
            int(c.rows),
        )
    };
    done.expect("cuBLAS multiplies");
}

/// `weights -= rate * gradient`.
struct Descent(sys::CUfunction);

impl Descent {
    fn load() -> Self {
        const PTX: &std::ffi::CStr = c"\
.version 8.0
.target sm_80
.address_size 64
.visible .entry descend(.param .u64 p_weights, .param .u64 p_gradient, .param .f32 p_rate, .param .u32 p_count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [p_weights];
    ld.param.u64 %rd2, [p_gradient];
    ld.param.f32 %f1, [p_rate];
    ld.param.u32 %r1, [p_count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd7];
    neg.f32 %f4, %f1;
    fma.rn.f32 %f5, %f4, %f3, %f2;
    st.global.f32 [%rd6], %f5;
DONE:
    ret;
}
";
        // SAFETY: the image and the name are C strings, and the module is never unloaded.
        let kernel = unsafe {
            let module = result::module::load_data(PTX.as_ptr().cast()).expect("the driver compiles it");
            result::module::get_function(module, c"descend".to_owned())
        };
        Self(kernel.expect("it is in the module"))
    }

    fn step(&self, weights: &Matrix, gradient: &Matrix, rate: f32) {
        const BLOCK: u32 = 256;
        let count = u32::try_from(weights.len()).expect("small");
        let mut arguments: [*mut c_void; 4] = [
            (&raw const weights.at).cast_mut().cast(),
            (&raw const gradient.at).cast_mut().cast(),
            (&raw const rate).cast_mut().cast(),
            (&raw const count).cast_mut().cast(),
        ];
        let (grid, block) = ((count.div_ceil(BLOCK), 1, 1), (BLOCK, 1, 1));
        // SAFETY: the arguments are as the kernel has them, both matrices are live and have so many elements, and the null
        // stream always is.
        unsafe { result::launch_kernel(self.0, grid, block, 0, ptr::null_mut(), &mut arguments) }
            .expect("the kernel can be launched");
    }
}

const BATCH: usize = 256;
const IN: usize = 1024;
const HIDDEN: usize = 4096;
const OUT: usize = 1000;

/// Two layers without anything between them, which learn to say nothing.
struct Model {
    x: Matrix,
    first: Matrix,
    second: Matrix,
}

/// The forward pass. What of it is kept for the backward one: the activations and the output.
fn forward(program: &mut Program, by: &CudaBlas, model: &Model, inside: impl FnOnce()) -> (Matrix, Matrix) {
    program.scope("forward", |program| {
        let hidden = program.pooled(HIDDEN, BATCH);
        multiply(by, (&model.first, false), (&model.x, false), &hidden);
        let spare = program.plain(1_000_003, 1);
        let output = program.plain(OUT, BATCH);
        multiply(by, (&model.second, false), (&hidden, false), &output);
        inside();
        program.free(spare);
        (hidden, output)
    })
}

/// The gradients of both layers.
fn backward(program: &mut Program, by: &CudaBlas, model: &Model, (hidden, output): (Matrix, Matrix)) -> [Matrix; 2] {
    program.scope("backward", |program| {
        let second = program.pooled(OUT, HIDDEN);
        multiply(by, (&output, false), (&hidden, true), &second);
        let back = program.pooled(HIDDEN, BATCH);
        multiply(by, (&model.second, true), (&output, false), &back);
        program.free(hidden);
        program.free(output);
        let first = program.plain(HIDDEN, IN);
        multiply(by, (&back, false), (&model.x, true), &first);
        program.free(back);
        [first, second]
    })
}

fn train() {
    const STEPS: usize = 4;
    let mut wrong = Wrong::default();
    result::init().expect("GPUMEM_DEVICE says that there is a driver");
    // SAFETY: it only looks.
    let there = unsafe { blas_sys::is_culib_present() };
    assert!(there, "libcublas is not on the loader's path; add its folder to LD_LIBRARY_PATH");

    look("before the context", &mut wrong);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    look("after the context", &mut wrong);
    println!("{}", status());
    let mut program = Program::new(&context);

    let (model, work) = program.scope("load", |program| {
        let model = Model {
            x: program.pooled(IN, BATCH),
            first: program.pooled(HIDDEN, IN),
            second: program.plain(OUT, HIDDEN),
        };
        for (matrix, value) in [(&model.x, 1.0), (&model.first, 1.0 / 1024.0), (&model.second, 1.0 / 4096.0)] {
            fill(matrix, value);
        }
        let shapes = [(HIDDEN, BATCH), (OUT, BATCH), (OUT, HIDDEN), (HIDDEN, BATCH), (HIDDEN, IN)];
        (model, shapes.map(|(rows, columns)| program.pooled(rows, columns)))
    });
    // Whatever is allocated in here is the library's: what the loop needs of it is loaded now, and the kernel's module too.
    let (by, descent) = program.scope("library", |program| {
        let by = CudaBlas::new(Arc::clone(&program.stream)).expect("cuBLAS begins");
        let [hidden, output, second, back, first] = &work;
        multiply(&by, (&model.first, false), (&model.x, false), hidden);
        multiply(&by, (&model.second, false), (hidden, false), output);
        multiply(&by, (output, false), (hidden, true), second);
        multiply(&by, (&model.second, true), (output, false), back);
        multiply(&by, (back, false), (&model.x, true), first);
        let descent = Descent::load();
        descent.step(first, first, 0.0);
        (by, descent)
    });
    program.scope("load", |program| work.into_iter().for_each(|matrix| program.free(matrix)));
    let library = whose(&program, &mut wrong);
    let mut driver = vec![("after load", look("after load", &mut wrong))];
    let libraries: Vec<_> = driver[0].1.parts.iter().filter(|part| part.kind == PartKind::Library).collect();
    println!("of libraries: {libraries:#?}");

    reset_peak_memory_stats(0).expect("allocations are heard");
    let (began, mut outputs) = (program.log.entries.len(), Vec::new());
    for step in 0..STEPS {
        program.scope("step", |program| {
            let kept = forward(program, &by, &model, || {
                if step == STEPS - 1 {
                    driver.push(("inside forward", look("inside forward", &mut wrong)));
                }
            });
            outputs.push(first(&kept.1));
            let [first, second] = backward(program, &by, &model, kept);
            program.scope("update", |program| {
                for (weights, gradient) in [(&model.first, first), (&model.second, second)] {
                    descent.step(weights, &gradient, 1e-7);
                    program.free(gradient);
                }
            });
        });
        agree(&program, library, began, &mut wrong);
    }
    result::ctx::synchronize().expect("nothing failed");
    driver.push(("at the end", look("at the end", &mut wrong)));
    println!("outputs: {outputs:?}");
    wrong.unless(outputs.windows(2).all(|pair| pair[1] < pair[0]), || format!("nothing is learnt: {outputs:?}"));

    let drivers: Vec<_> = driver.iter().map(|(when, told)| (*when, of_kind(told, PartKind::Driver))).collect();
    println!("context, kernels and modules, in bytes: {drivers:?}");
    let (least, most) = (drivers.iter().map(|(_, bytes)| *bytes).min(), drivers.iter().map(|(_, bytes)| *bytes).max());
    wrong.unless(least > Some(0), || format!("the driver's part is not told: {drivers:?}"));
    wrong.unless(most.zip(least).is_some_and(|(most, least)| most - least <= 64 << 20), || {
        format!("the driver's part is not the same: {drivers:?}")
    });

    compare(&program.log, library, &mut wrong);
    println!("{}", memory_summary(0).expect("allocations are heard"));
    for matrix in [model.x, model.first, model.second] {
        program.free(matrix);
    }
    agree(&program, library, began, &mut wrong);
    drop(by);
    println!("left when all was freed and cuBLAS is gone: {:?}", memory_allocated(0));
    let counts = status();
    wrong.unless((counts.untracked, counts.lost) == (0, 0), || format!("something was missed: {counts}"));
    wrong.end();
}

/// How much libraries allocated for themselves, which is all that was allocated in their scope, and whether it is named.
fn whose(program: &Program, wrong: &mut Wrong) -> u64 {
    let (all, own) = (memory_allocated(0).expect("allocations are heard").get(), program.log.replay(&[]).used);
    let blocks = memory_snapshot().expect("allocations are heard").into_iter();
    let theirs: Vec<_> = blocks.filter(|block| block.path == ["library"]).collect();
    println!("\nallocated by libraries, and so in their scope:");
    for block in &theirs {
        println!("  {block}");
    }
    let on_device = theirs.iter().filter(|block| !["managed", "pinned host"].contains(&block.kind));
    let library: u64 = on_device.map(|block| block.bytes.get()).sum();
    wrong.unless(own + library == all, || format!("{own} B of ours and {library} B of theirs are not {all} B"));
    let large = theirs.iter().filter(|block| block.kind == "device" && block.bytes >= Bytes::mib(1));
    let large: Vec<_> = large.map(|block| block.library.as_deref()).collect();
    let of_cublas = |library: Option<&str>| library.is_some_and(|name| name.starts_with("cuBLAS"));
    wrong
        .unless(large.is_empty() || large.iter().copied().any(of_cublas), || format!("cuBLAS is not named: {large:?}"));
    if env::var_os("GPUMEM_BACKTRACE").is_some() {
        let named: Vec<_> = theirs.iter().map(|block| block.library.as_deref()).collect();
        wrong.unless(named.iter().all(Option::is_some), || format!("not all are named: {named:?}"));
        let told = of_kind(&breakdown(0).expect("the device can be read"), PartKind::Library);
        wrong.unless(told == library, || format!("the breakdown has {told} B of libraries, not {library} B"));
    }
    if theirs.is_empty() {
        println!("  nothing: this cuBLAS has not allocated");
    }
    library
}

/// What PyTorch's statistics say is what the program adds up, and what libraries hold on top of that.
fn agree(program: &Program, library: u64, began: usize, wrong: &mut Wrong) {
    let statistics = (memory_allocated(0), max_memory_allocated(0));
    let (Ok(now), Ok(most)) = statistics else { panic!("allocations are heard: {statistics:?}") };
    let own = (program.log.replay(&[]).used + library, program.log.peak_since(began) + library);
    println!("allocated {} B, at most {} B; added up {} B and {} B", now.get(), most.get(), own.0, own.1);
    wrong.unless((now.get(), most.get()) == own, || format!("allocated {now:?}, at most {most:?}, added up {own:?}"));
}

/// The summary has what the log comes to when it is replayed, to the byte.
fn compare(log: &Log, library: u64, wrong: &mut Wrong) {
    let summary = summary();
    println!("\n{summary}");
    let mut left = log.paths();
    for scope in &summary.scopes {
        let path: Vec<&str> = scope.path.iter().map(String::as_str).collect();
        let told = Figures {
            calls: scope.calls,
            used: scope.used.get(),
            peak: scope.peak.get(),
            total: scope.allocated.get(),
            allocations: scope.allocations,
        };
        left.retain(|known| *known != path);
        match path.as_slice() {
            [] => {
                let all = log.replay(&[]).used + library;
                wrong.unless(told.used == all, || format!("the whole process: {told:?}, used should be {all}"));
            }
            ["library"] => {
                let right = (told.calls, told.used) == (1, library);
                wrong.unless(right, || format!("{path:?}: {told:?}, of which {library} B should be used"));
            }
            _ => {
                let replayed = log.replay(&path);
                println!("{path:?}: {replayed:?}");
                wrong.unless(told == replayed, || format!("{path:?}: {told:?}, replayed {replayed:?}"));
            }
        }
    }
    wrong.unless(left.is_empty(), || format!("the summary lacks {left:?}"));
}

/// Blocks of all sizes come and go, through cudarc and by the raw calls.
fn statistics() {
    const STEPS: usize = 2000;
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    subscribe().expect("allocations can be heard");
    let (mut program, mut wrong, mut live) = (Program::new(&context), Wrong::default(), Vec::new());
    let mut random = Random::new(1);
    let mut below = |end: usize| random.below(end);
    let (mut began, mut compared) = (0, 0);
    for _ in 0..STEPS {
        match below(20) {
            0 => {
                reset_peak_memory_stats(0).expect("allocations are heard");
                began = program.log.entries.len();
            }
            1..=9 if !live.is_empty() => program.free(live.swap_remove(below(live.len()))),
            turn => {
                let power = below(11);
                let (rows, columns) = (1 + below(1000), 1 + below(1 << power));
                live.push(if turn % 2 == 0 { program.pooled(rows, columns) } else { program.plain(rows, columns) });
            }
        }
        let (own, most) = (program.log.replay(&[]), program.log.peak_since(began));
        let told = memory_stats(0).expect("allocations are heard").all;
        let now = (memory_allocated(0), max_memory_allocated(0));
        let same = matches!(&now, (Ok(now), Ok(peak)) if (now.get(), peak.get()) == (own.used, most));
        let same = same && (told.bytes.allocated.get(), told.blocks.allocated) == (own.total, own.allocations);
        wrong.unless(same, || format!("{now:?}, {told:?}, added up {own:?}, at most {most}"));
        compared += usize::from(same);
    }
    let own = program.log.replay(&[]);
    println!("{compared} of {STEPS} times to the byte; {} B by {} allocations in all", own.total, own.allocations);
    println!("{}", memory_summary(0).expect("allocations are heard"));
    for matrix in live {
        program.free(matrix);
    }
    wrong.unless(memory_allocated(0).is_ok_and(|left| left == Bytes::ZERO), || "not all is freed".to_owned());
    wrong.0.truncate(5);
    wrong.end();
}

fn free_memory() -> usize {
    result::mem_get_info().expect("a context is current").0
}

/// A scope that reports nothing.
fn quietly<R>(name: &str, code: impl FnOnce(&mut GpuMemTrace) -> R) -> R {
    GpuMemTrace::scope(name, |trace| {
        trace.silent(true);
        code(trace)
    })
}

/// Takes all but half a GiB of the card. Its line, and the blocks.
#[inline(never)]
fn hog(blocks: usize) -> (u32, usize, Vec<u64>) {
    let size = (free_memory() - GIB / 2) / blocks / (2 * MIB) * (2 * MIB);
    let mut taken = Vec::new();
    let mut place = 0;
    for _ in 0..blocks {
        // SAFETY: a context is current. The memory is never read.
        let (line, block) = (line!(), unsafe { result::malloc_sync(size) });
        taken.push(block.expect("so much was free"));
        place = line;
    }
    (place, size * blocks, taken)
}

fn out_of_memory() {
    static TOLD: Mutex<Vec<OutOfMemory>> = Mutex::new(Vec::new());
    let told = || TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let stream = context.default_stream().cu_stream();
    on_oom(move |oom| told().push(oom.clone()));
    let mut wrong = Wrong::default();
    let before = quietly("innocent", |_| {
        // SAFETY: a context is current. The memory is never read.
        unsafe { result::malloc_sync(3 * MIB) }.expect("the device has room")
    });
    let (hogged_at, bytes, blocks) = quietly("hog", |_| hog(4));
    println!("the hog has {bytes} B by {} blocks, and {} B are free", blocks.len(), free_memory());

    // The lines of what is live are known before the refusals. There is little time then.
    gpumem::breakdown(0).expect("it can be read");
    let lines = quietly("victim", |_| {
        // SAFETY: a context is current, and the null stream is of it. Nothing is given out.
        let (plain_at, plain) = (line!(), unsafe { result::malloc_sync(GIB) });
        // SAFETY: as above.
        let (pooled_at, pooled) = (line!(), unsafe { result::malloc_async(stream, 3 * GIB) });
        println!("refused: {plain:?}, {pooled:?}");
        assert!(plain.is_err() && pooled.is_err(), "more than is free");
        [plain_at, pooled_at]
    });
    let told = mem::take(&mut *told());
    wrong.unless(told.len() == 2, || format!("told of {} refusals, not 2", told.len()));
    for ((oom, line), (asked, kind)) in told.iter().zip(lines).zip([(GIB, "device"), (3 * GIB, "pool")]) {
        println!("told: asked {:?} {} in {:?} at {:?}", oom.asked, oom.kind, oom.path, oom.line);
        println!("  scopes {:?}\n  places {:?}", oom.scopes, oom.places);
        let what = (oom.device, oom.asked.get(), oom.kind, oom.path.clone());
        wrong.unless(what == (0, asked as u64, kind, vec!["victim".to_owned()]), || format!("{what:?}"));
        let at = |place: &str, line: u32| place.contains(&format!("gpu_memory/main.rs:{line}:"));
        // The report has it in any case.
        println!("refused at gpu_memory/main.rs:{line}:");
        wrong
            .unless(oom.line.as_deref().is_none_or(|place| at(place, line)), || format!("line {line}: {:?}", oom.line));
        let scope = oom.scopes.first().map(|scope| (scope.name.as_str(), scope.blocks, scope.bytes.get()));
        wrong.unless(scope == Some(("hog", 4, bytes as u64)), || format!("{kind}: held by {scope:?}, not {bytes} B"));
        let place = oom.places.first();
        let right = place.is_some_and(|place| at(&place.name, hogged_at) && place.bytes.get() == bytes as u64);
        wrong.unless(right, || format!("{kind}: held at {place:?}, not line {hogged_at}"));
        match &oom.breakdown {
            Ok(Breakdown { parts, memory, .. }) => {
                let sum: Bytes = parts.iter().map(|part| part.bytes).sum();
                wrong.unless(sum == memory.used, || format!("{kind}: the parts are {sum}, not {}", memory.used));
                let hog = parts.iter().find(|part| part.kind == PartKind::Scope && part.name == "hog");
                let right = hog.is_some_and(|part| part.bytes.get() == bytes as u64);
                wrong.unless(right, || format!("{kind}: the breakdown has {hog:?}"));
            }
            Err(why) => wrong.unless(false, || format!("{kind}: no breakdown: {why}")),
        }
    }
    for block in blocks.into_iter().chain([before]) {
        // SAFETY: each came from `malloc_sync` and is given back once.
        unsafe { result::free_sync(block) }.expect("it was allocated");
    }
    // Less than what was refused, which would not be reported if it was obtained after all.
    // SAFETY: as above.
    let after = unsafe { result::malloc_sync(GIB / 2).and_then(|block| result::free_sync(block)) };
    wrong.unless(after.is_ok(), || format!("refused when all is free: {after:?}"));
    wrong.end();
}

/// A hook runs in the callback of the call that was refused. What it frees is heard, or the trace says that something was not.
fn hook() {
    let _context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let trace = GpuMemTrace::builder().gauge(Gauge::Exact).silent(true).start().expect("allocations are heard");
    // SAFETY: a context is current. The memory is never read.
    let block = unsafe { result::malloc_sync(64 * MIB) }.expect("the device has room");
    let held = Mutex::new(Some(block));
    on_oom(move |_| {
        if let Some(block) = held.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // SAFETY: it came from `malloc_sync` and is given back once.
            unsafe { result::free_sync(block) }.expect("it was allocated");
        }
    });
    // SAFETY: a context is current. Nothing is given out.
    let refused = unsafe { result::malloc_sync(1 << 45) };
    let data = trace.data();
    println!("{refused:?}: used {} B, lost {}, untracked {}", data.used.get(), data.lost, data.untracked);
    let mut wrong = Wrong::default();
    wrong.unless(refused.is_err() && (data.used == 0 || data.lost > 0), || {
        "64 MiB are gone, and it was not said".to_owned()
    });
    wrong.end();
}

/// Takes memory and forgets it.
#[inline(never)]
fn leaky() -> u32 {
    // SAFETY: a context is current. The memory is never read.
    let (line, leaked) = (line!(), unsafe { result::malloc_sync(MIB) });
    leaked.expect("the device has room");
    line
}

fn leak() {
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let mut program = Program::new(&context);
    let (line, left) = quietly("train", |_| {
        let weights = program.pooled(1024, 1024);
        let found = quietly("step", |step| {
            let (a, b) = (program.pooled(1024, 512), program.plain(1024, 2048));
            let line = leaky();
            program.free(a);
            program.free(b);
            (line, step.live())
        });
        program.free(weights);
        found
    });
    for block in &left {
        println!("live: {block}\n  by {:#?}", block.backtrace.iter().take(20).collect::<Vec<_>>());
    }
    let [block] = left.as_slice() else { panic!("{} blocks are left, not 1", left.len()) };
    assert_eq!((block.bytes, block.kind, block.library.as_deref()), (Bytes::mib(1), "device", None));
    assert_eq!(block.path, ["train", "step"]);
    let place = format!("gpu_memory/main.rs:{line}:");
    println!("leaked at {place}");
    // A context that is given up takes its blocks along, and then nothing is left at the end of the process.
    mem::forget(context);
    assert!(block.line.as_ref().is_some_and(|line| line.contains(&place)), "{:?} is not {place}", block.line);
    assert!(block.backtrace.iter().any(|frame| frame.contains("leaky")), "{:?}", block.backtrace);
}

fn take(bytes: usize) -> Result<u64, DriverError> {
    // SAFETY: a context is current. The memory is never read.
    unsafe { result::malloc_sync(bytes) }
}

fn give(block: u64) {
    // SAFETY: it came from `take` and is given back once.
    unsafe { result::free_sync(block) }.expect("it was allocated");
}

/// The default pool of device 0.
struct Pool(sys::CUmemoryPool);

impl Pool {
    /// It keeps what it has, as that of a program at work does.
    fn that_keeps() -> Self {
        let device = result::device::get(0).expect("there is a device");
        let mut all = u64::MAX;
        // SAFETY: the device came from the driver, and the attribute is 64 bits wide, as what is passed is.
        unsafe {
            let pool = result::device::get_default_mem_pool(device).expect("the device has a pool");
            let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut all).cast()).result().expect("it has a threshold");
            Self(pool)
        }
    }

    fn reserved(&self) -> Bytes {
        let (mut bytes, attribute) = (0_u64, sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        // SAFETY: the pool is live, and the attribute is 64 bits wide, as the out-parameter is.
        unsafe { sys::cuMemPoolGetAttribute(self.0, attribute, (&raw mut bytes).cast()) }
            .result()
            .expect("it is known");
        Bytes::new(bytes)
    }
}

fn retry() {
    static TOLD: AtomicUsize = AtomicUsize::new(0);
    let context = CudaContext::new(0).expect("GPUMEM_DEVICE says that there is a device");
    let stream = context.default_stream().cu_stream();
    subscribe().expect("allocations can be heard");
    on_oom(|_| {
        TOLD.fetch_add(1, Relaxed);
    });
    let (pool, mut wrong) = (Pool::that_keeps(), Wrong::default());
    let most = free_memory() / 10 * 8 / (2 * MIB) * (2 * MIB);
    // SAFETY: the null stream is of the current context. The memory is never read.
    let take_async = || unsafe { result::malloc_async(stream, most) }.expect("so much is free");
    // SAFETY: each block came from `take_async` and is given back once.
    let give_async = |block| unsafe { result::free_async(block, stream) }.expect("it was allocated");

    // What the driver does by itself differs from version to version, so it is asked first.
    give_async(take_async());
    println!("the pool keeps {}, and {} are wanted", pool.reserved(), Bytes::from(most));
    let alone = take(most);
    println!("without us: {alone:?}; the pool keeps {}", pool.reserved());
    let is_refused = alone.is_err();
    alone.into_iter().for_each(give);
    let told = TOLD.load(Relaxed);
    wrong.unless(told == usize::from(is_refused), || format!("{told} refusals are told"));

    give_async(take_async());
    let mut attempts = 0;
    let got = retry_after_trim(|| {
        attempts += 1;
        println!("attempt {attempts}: the pool keeps {}", pool.reserved());
        take(most)
    });
    println!("kept by the pool: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 1 + usize::from(is_refused);
    wrong.unless(right, || format!("kept by the pool: {got:?} after {attempts} attempts"));
    got.into_iter().for_each(give);

    // A cache that lets go of its block when it is told that there is no room: the pool has it then, until it is trimmed.
    let mut cache = Some(take_async());
    let (mut attempts, mut kept) = (0, Bytes::ZERO);
    let got = retry_after_trim(|| {
        attempts += 1;
        kept = pool.reserved();
        println!("attempt {attempts}: the pool keeps {kept}");
        take(most).inspect_err(|_| cache.take().into_iter().for_each(give_async))
    });
    println!("in a cache: {got:?} after {attempts} attempts");
    let right = got.is_ok() && attempts == 2 && kept < Bytes::mib(64);
    wrong.unless(right, || format!("in a cache: {got:?} after {attempts} attempts, with {kept} in the pool"));
    got.into_iter().for_each(give);
    wrong.unless(TOLD.load(Relaxed) == told, || "the first failure of a retry is told".to_owned());
    wrong.end();
}
