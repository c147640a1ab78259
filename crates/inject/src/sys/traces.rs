//! Traces for other languages. The Python package `gpumem_trace` loads the library and calls these functions.
//!
//! Python identifies a trace by its id. A text that a function returns is valid until the same thread calls another of these functions.
//! In the child of a fork, these functions measure nothing and take no lock, because a thread that does not exist there may hold it.

#![expect(unsafe_code, reason = "Python finds the functions by their names, and hands over pointers")]

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, btree_map::Entry},
    env,
    ffi::{CStr, CString, OsStr, c_char},
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use gpumem::{
    __private::builder_at,
    Bytes, Gauge, GpuMemTrace, device,
    recording::{self, Keep},
    report::LiveBlock,
    scope::Entered,
    sim::{SimBlock, SimGpu},
    try_gpu_mem_get, try_preload,
};
use gpumem_driver::{
    print, process, python,
    settings::{self, Settings},
};
use serde_json::{Value, json};

use crate::{request::Request, torch};

/// The version of this interface, which the package compares with its own. Increase it with each change.
const VERSION: u32 = 5;

/// The traces that are not closed. Python's own lock is held in these functions, so nobody waits for this one, except in a Python without
/// that lock.
static TRACES: Mutex<Traces> = Mutex::new(Traces { latest: 0, open: BTreeMap::new() });
/// The id of a trace in the child of a fork. The ids of other traces are smaller.
const OFF: u32 = i32::MAX as u32;
/// The lines of the program that start traces. The id of a line is its index plus 1.
static PLACES: Mutex<Vec<(&'static str, u32)>> = Mutex::new(Vec::new());

struct Traces {
    /// The id of the trace that was opened last. An id is not used again soon: a thread may use the trace that another one has closed.
    latest: u32,
    open: BTreeMap<u32, GpuMemTrace>,
}

impl Traces {
    fn insert(&mut self, trace: GpuMemTrace) -> u32 {
        loop {
            self.latest = self.latest % (OFF - 1) + 1;
            if let Entry::Vacant(free) = self.open.entry(self.latest) {
                free.insert(trace);
                return self.latest;
            }
        }
    }
}

thread_local! {
    static ANSWER: RefCell<CString> = RefCell::default();
    /// The traces of tasks whose steps the thread runs, the innermost last.
    static STEPS: RefCell<Vec<(u32, Entered)>> = const { RefCell::new(Vec::new()) };
    /// The trace that the thread opened last, or 0 if it is closed.
    static LATEST: Cell<u32> = const { Cell::new(0) };
}

/// What a trace has measured.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Values {
    used: i64,
    peaked: u64,
    lost: u64,
    untracked: u64,
    /// The number of [`gpumem::Gauge`].
    gauge: u32,
}

fn answer(text: impl Into<Vec<u8>>) -> *const c_char {
    let mut text: Vec<u8> = text.into();
    text.retain(|byte| *byte != 0);
    let text = CString::new(text).unwrap_or_default();
    ANSWER.with(|answer| {
        let mut answer = answer.borrow_mut();
        *answer = text;
        answer.as_ptr()
    })
}

/// Runs code that must not unwind into C, and returns its error, or null.
pub(super) fn guarded(code: impl FnOnce() -> Result<(), String>) -> *const c_char {
    match catch_unwind(AssertUnwindSafe(code)) {
        Ok(Ok(())) => ptr::null(),
        Ok(Err(why)) => answer(why),
        Err(_) => answer("gpumem panicked"),
    }
}

/// # Safety
/// `text` must be null or a C string.
unsafe fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: it is not null here.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the traces. Returns `None` in the child of a fork.
fn traces() -> Option<MutexGuard<'static, Traces>> {
    (!process::is_forked()).then(|| lock(&TRACES))
}

/// Runs code with a trace. Returns `None` if the trace is not open or the code panics, and in the child of a fork.
fn with_trace<R>(id: u32, code: impl FnOnce(&mut GpuMemTrace) -> R) -> Option<R> {
    let code = || traces()?.open.get_mut(&id).map(code);
    catch_unwind(AssertUnwindSafe(code)).ok().flatten()
}

/// Returns the version of the functions. Python calls this first. Under `gpumem run` this may be before the driver loads the library; then
/// the command's settings hold, and otherwise those of the environment, with Python's lines in stacks.
// SAFETY: the names of all functions here start with the prefix of this project, so they cannot clash with others of the program.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_trace_version() -> u32 {
    _ = guarded(|| {
        match Request::of_environment() {
            Ok(request) => recording::serve_foreign_program(&request.options.backtrace),
            Err(_) => settings::preset(Settings::read(|name| {
                env::var_os(name).or_else(|| (name == "GPUMEM_BACKTRACE").then(|| "python".into()))
            })),
        }
        Ok(())
    });
    VERSION
}

/// Returns the error of the function that failed last on this thread.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_why() -> *const c_char {
    ANSWER.with(|answer| answer.borrow().as_ptr())
}

/// True between [`gpumem_record`] and [`gpumem_record_end`]. Another recording is not Python's.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

/// Starts to record the process to a file, until [`gpumem_record_end`]. Returns the reason if it cannot, or null.
///
/// # Safety
/// `file` must be a C string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_record(file: *const c_char) -> *const c_char {
    // SAFETY: required by this function's contract.
    let file = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(file) }.to_bytes()));
    guarded(|| {
        recording::start(file, Keep::All).map_err(|why| format!("cannot record to {}: {why}", file.display()))?;
        IS_RECORDED.store(true, Relaxed);
        Ok(())
    })
}

/// Ends the recording of [`gpumem_record`], if there is one. Its file is complete afterwards.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_record_end() {
    _ = guarded(|| {
        if IS_RECORDED.swap(false, Relaxed) {
            recording::end();
        }
        Ok(())
    });
}

/// Returns Python code that records the history of PyTorch's allocator and the modules of tensors. Its function `begin(file, events)` starts
/// the history, and `finish()` writes the file.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_torch_code() -> *const c_char {
    answer(torch::code(true))
}

/// Returns the id of a line of the program.
///
/// # Safety
/// `file` must be a C string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_place(file: *const c_char, line: u32) -> u32 {
    // SAFETY: required by this function's contract.
    let file = unsafe { text_of(file) }.unwrap_or_default();
    let mut id = 0;
    _ = guarded(|| {
        if !process::is_forked() {
            let mut places = lock(&PLACES);
            places.push((file.leak(), line));
            id = u32::try_from(places.len()).map_err(|why| why.to_string())?;
        }
        Ok(())
    });
    id
}

/// The trace counts only the threads that run steps of a task.
const TASK: u32 = 1;
/// The trace counts all threads.
const ALL: u32 = 2;

/// Starts a trace at a line of the program. `device` is -1 for the current one. `threads` is 0, [`TASK`] or [`ALL`]. Returns the trace's id,
/// or 0 after an error, which [`gpumem_why`] returns.
///
/// # Safety
/// `ctx` must be null or a C string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_open(place: u32, ctx: *const c_char, device: i32, threads: u32) -> u32 {
    // SAFETY: required by this function's contract.
    let ctx = unsafe { text_of(ctx) };
    let mut id = OFF;
    let open = || {
        if process::is_forked() {
            return Ok(());
        }
        let place = (place as usize).checked_sub(1).and_then(|place| lock(&PLACES).get(place).copied());
        let (file, line) = place.ok_or("a trace starts at an unknown line")?;
        let mut builder = builder_at(file, line).entered(threads != TASK);
        if threads == ALL {
            builder = builder.all_threads();
        }
        if let Some(ctx) = ctx {
            builder = builder.ctx(ctx);
        }
        let device = u32::try_from(device).ok();
        if let Some(device) = device {
            builder = builder.device(device);
        }
        // Without a GPU, a notice says why nothing is measured.
        let trace = if device.is_some() && device::count().is_ok_and(|count| count > 0) {
            builder.start().map_err(|why| why.to_string())?
        } else {
            builder.start_or_off()
        };
        id = lock(&TRACES).insert(trace);
        LATEST.set(id);
        Ok(())
    };
    if guarded(open).is_null() { id } else { 0 }
}

/// What Python does with a trace: [`gpumem_trace_set`].
const RESET: u32 = 1;
const START: u32 = 2;
const STOP: u32 = 3;
const ENTER: u32 = 4;
const LEAVE: u32 = 5;
const CLOSE: u32 = 6;
const CLOSE_LATEST: u32 = 7;
/// And [`gpumem_trace_report`].
const REPORT: u32 = 1;
const REPORT_AND_RESET: u32 = 2;
const EXIT: u32 = 3;
const EXIT_AND_CLOSE: u32 = 4;
const TEXT: u32 = 5;

/// Changes the state of a trace, which may be closed. [`CLOSE_LATEST`] closes the one that the thread opened last, whatever the id.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_trace_set(id: u32, what: u32) {
    _ = guarded(|| {
        match what {
            RESET => _ = with_trace(id, GpuMemTrace::reset),
            START => _ = with_trace(id, GpuMemTrace::start),
            STOP => _ = with_trace(id, GpuMemTrace::stop),
            ENTER => {
                let entered = with_trace(id, |trace| trace.handle().enter());
                STEPS.with_borrow_mut(|steps| steps.extend(entered.map(|entered| (id, entered))));
            }
            LEAVE => {
                let is_own = |(own, _): &(u32, Entered)| *own == id;
                drop(STEPS.with_borrow_mut(|steps| Some(steps.remove(steps.iter().rposition(is_own)?))));
            }
            CLOSE => drop(taken(id)),
            CLOSE_LATEST => drop(taken(LATEST.get())),
            _ => {}
        }
        Ok(())
    });
}

/// Removes a trace, which closes when it is dropped. Returns `None` if it is not open, and in the child of a fork.
fn taken(id: u32) -> Option<GpuMemTrace> {
    if LATEST.get() == id {
        LATEST.set(0);
    }
    traces()?.open.remove(&id)
}

/// Returns the lines of a report for Python to print, or null if there are none.
///
/// # Safety
/// `subctx` must be null or a C string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_report(id: u32, what: u32, subctx: *const c_char) -> *const c_char {
    // SAFETY: required by this function's contract.
    let subctx = unsafe { text_of(subctx) };
    let lines_of = |trace: &mut GpuMemTrace| match what {
        TEXT => trace.to_string(),
        _ => print::captured(|| match (what, subctx) {
            (REPORT, None) => trace.report(),
            (REPORT, Some(subctx)) => trace.report_with(subctx),
            (REPORT_AND_RESET, None) => trace.report_n_reset(),
            (REPORT_AND_RESET, Some(subctx)) => trace.report_n_reset_with(subctx),
            (EXIT | EXIT_AND_CLOSE, _) => gpumem::__private::exit(trace),
            _ => {}
        }),
    };
    let lines = if what == EXIT_AND_CLOSE {
        catch_unwind(AssertUnwindSafe(|| Some(lines_of(&mut taken(id)?)))).ok().flatten()
    } else {
        with_trace(id, lines_of)
    };
    lines.filter(|lines| !lines.is_empty()).map_or(ptr::null(), answer)
}

/// Writes what a trace has measured: since its start, or since the last call with `is_next`, which is not 0. Returns `used`.
///
/// # Safety
/// `to` must be null or a place for the values.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_read(id: u32, to: *mut Values, is_next: u32) -> i64 {
    let read = |trace: &mut GpuMemTrace| if is_next != 0 { gpumem::__private::read_next(trace) } else { trace.data() };
    let values = with_trace(id, read).map_or(Values { gauge: Gauge::Off as u32, ..Values::default() }, |data| Values {
        used: data.used.get(),
        peaked: data.peaked.get(),
        lost: data.lost,
        untracked: data.untracked,
        gauge: data.gauge as u32,
    });
    let used = values.used;
    // SAFETY: required by this function's contract.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = values;
    }
    used
}

/// Returns the blocks that were allocated inside a trace on its device and are still live, as JSON: the largest first.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_trace_live(id: u32) -> *const c_char {
    // Without Python's functions on the stacks, the lines would be those of Python itself.
    let has_lines = !python::lines().is_empty();
    let rows = with_trace(id, |trace| {
        let device = trace.data().device;
        let on_device = trace.live().into_iter().filter(|block| block.device == device && block.kind.is_on_device());
        on_device
            .map(|LiveBlock { bytes, device, line, caller, library, path, backtrace, .. }| {
                let [line, caller] = [line, caller].map(|line| line.filter(|_| has_lines));
                json!({
                    "bytes": bytes.get(), "device": device, "line": line, "caller": caller, "library": library, "scopes": path,
                    "frames": backtrace,
                })
            })
            .collect::<Vec<_>>()
    });
    answer(Value::from(rows.unwrap_or_default()).to_string())
}

/// Writes the total, free and used memory of a device in bytes; -1 is the current one. Returns the reason if it cannot be read, or null.
///
/// # Safety
/// `to` must be a place for three numbers.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_memory(device: i32, to: *mut [u64; 3]) -> *const c_char {
    guarded(|| {
        let memory = try_gpu_mem_get(u32::try_from(device).ok()).map_err(|why| why.to_string())?;
        // SAFETY: required by this function's contract.
        unsafe { *to = [memory.total, memory.free, memory.used].map(Bytes::get) };
        Ok(())
    })
}

/// Writes the number of devices. Returns the reason if it is not known, or null.
///
/// # Safety
/// `to` must be a place for a number.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_devices(to: *mut u32) -> *const c_char {
    guarded(|| {
        let count = device::count().map_err(|why| why.to_string())?;
        // SAFETY: required by this function's contract.
        unsafe { *to = count };
        Ok(())
    })
}

/// Creates the CUDA context, so that traces do not include it. Returns the reason if it cannot, or null.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_preload() -> *const c_char {
    guarded(|| try_preload().map_err(|why| why.to_string()))
}

/// Allocates memory of a simulated GPU. Returns the block, which Python passes to [`gpumem_sim_free`]. After an error, the block is null, and
/// [`gpumem_why`] returns the error.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_sim_alloc(device: u32, bytes: u64) -> *mut SimBlock {
    let mut block = ptr::null_mut();
    _ = guarded(|| {
        let gpus = SimGpu::all().map_err(|why| why.to_string())?;
        let gpu = gpus
            .get(device as usize)
            .ok_or_else(|| format!("there is no simulated GPU {device}: set GPUMEM_SIM=16GiB"))?;
        block = Box::into_raw(Box::new(gpu.alloc(Bytes::new(bytes)).map_err(|why| why.to_string())?));
        Ok(())
    });
    block
}

/// Frees memory of a simulated GPU.
///
/// # Safety
/// The block must be one that was allocated and not freed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_sim_free(block: *mut SimBlock) {
    // SAFETY: required by this function's contract.
    let block = unsafe { Box::from_raw(block) };
    _ = guarded(|| {
        drop(block);
        Ok(())
    });
}
