//! Traces for other languages. The Python package `gpumem_trace` loads the library and calls these functions.
//!
//! Any thread may use a trace, but only one at a time: Python's package holds its lock. A text that a function returns is valid until the
//! thread calls the next function.

#![expect(unsafe_code, reason = "Python finds the functions by their names, and hands over pointers")]

use std::{
    cell::RefCell,
    collections::HashMap,
    env,
    ffi::{CStr, CString, OsStr, c_char},
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    ptr,
    sync::{
        LazyLock, Mutex, PoisonError,
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
    print, process,
    settings::{self, Settings},
};
use serde_json::{Value, json};

use crate::{request::Request, torch};

/// The version of this interface, which the package compares with its own. Increase it with each change.
const VERSION: u32 = 4;

thread_local! {
    static ANSWER: RefCell<CString> = RefCell::default();
}

/// A trace of the package.
pub(crate) struct PythonTrace {
    trace: GpuMemTrace,
    /// How the thread that runs a step of a task has entered the scope.
    step: Option<Entered>,
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

/// Returns a pointer to a value. Python passes it to [`release`] later. After an error, the pointer is null, and [`gpumem_why`] returns the
/// error.
fn boxed<T>(make: impl FnOnce() -> Result<T, String>) -> *mut T {
    let mut pointer = ptr::null_mut();
    _ = guarded(|| make().map(|value| pointer = Box::into_raw(Box::new(value))));
    pointer
}

/// Drops a value that was handed over.
///
/// # Safety
/// The pointer must come from [`boxed`], and not be used again.
unsafe fn release<T>(value: *mut T) {
    // SAFETY: required by this function's contract.
    let value = unsafe { Box::from_raw(value) };
    _ = guarded(|| {
        drop(value);
        Ok(())
    });
}

/// # Safety
/// `text` must be null or a C string.
unsafe fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: it is not null here.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Returns a text that lives as long as the process: one copy of each.
fn kept(text: String) -> &'static str {
    static TEXTS: LazyLock<Mutex<HashMap<String, &'static str>>> = LazyLock::new(Mutex::default);

    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    texts.entry(text).or_insert_with_key(|text| Box::leak(text.clone().into_boxed_str()))
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

/// Returns the error of the thread's latest function that returned null.
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

/// The trace counts only the threads that run steps of a task.
const TASK: u32 = 1;
/// The trace counts all threads.
const ALL: u32 = 2;

/// Starts a trace at a line of the program. `device` is -1 for the current one. `threads` is 0, [`TASK`] or [`ALL`]. Returns the trace, or
/// null after an error.
///
/// # Safety
/// The texts must be C strings, `ctx` or null.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_open(
    ctx: *const c_char,
    file: *const c_char,
    line: u32,
    device: i32,
    threads: u32,
) -> *mut PythonTrace {
    // SAFETY: required by this function's contract.
    let (ctx, file) = unsafe { (text_of(ctx), text_of(file)) };
    let open = || {
        let mut builder = builder_at(kept(file.unwrap_or_default()), line).entered(threads != TASK);
        if threads == ALL {
            builder = builder.all_threads();
        }
        if let Some(ctx) = ctx {
            builder = builder.ctx(ctx);
        }
        if let Ok(device) = u32::try_from(device) {
            builder = builder.device(device);
            // Without a GPU, a notice says why nothing is measured.
            if device::count().is_ok_and(|count| count > 0) {
                let trace = builder.start().map_err(|why| why.to_string())?;
                return Ok(PythonTrace { trace, step: None });
            }
        }
        Ok(PythonTrace { trace: builder.start_or_off(), step: None })
    };
    boxed(open)
}

/// What Python does with a trace: [`gpumem_trace_set`].
const RESET: u32 = 1;
const START: u32 = 2;
const STOP: u32 = 3;
const ENTER: u32 = 4;
const LEAVE: u32 = 5;
/// And [`gpumem_trace_report`].
const REPORT: u32 = 1;
const REPORT_AND_RESET: u32 = 2;
const EXIT: u32 = 3;
const TEXT: u32 = 4;

/// Changes the state of a trace.
///
/// # Safety
/// The trace must be null, or one that was opened and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_set(this: *mut PythonTrace, what: u32) {
    // SAFETY: required by this function's contract. Python's lock is held, so no other thread uses the trace.
    let this = unsafe { this.as_mut() };
    // A finalizer may use a trace that Python has finalized before.
    let Some(PythonTrace { trace, step, .. }) = this else { return };
    _ = guarded(|| {
        match what {
            RESET => trace.reset(),
            START => trace.start(),
            STOP => trace.stop(),
            ENTER => *step = Some(trace.handle().enter()),
            LEAVE => *step = None,
            _ => {}
        }
        Ok(())
    });
}

/// Returns the lines of a report for Python to print, or null if there are none.
///
/// # Safety
/// The trace must be null, or one that was opened and not closed, and `subctx` null or a C string.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_report(
    this: *mut PythonTrace,
    what: u32,
    subctx: *const c_char,
) -> *const c_char {
    // SAFETY: as for `gpumem_trace_set`.
    let (this, subctx) = unsafe { (this.as_mut(), text_of(subctx)) };
    let Some(PythonTrace { trace, .. }) = this else { return ptr::null() };
    let mut lines = String::new();
    let failed = guarded(|| {
        lines = print::captured(|| match (what, subctx) {
            (REPORT, None) => trace.report(),
            (REPORT, Some(subctx)) => trace.report_with(subctx),
            (REPORT_AND_RESET, None) => trace.report_n_reset(),
            (REPORT_AND_RESET, Some(subctx)) => trace.report_n_reset_with(subctx),
            (EXIT, _) => gpumem::__private::exit(trace),
            _ => {}
        });
        if what == TEXT {
            lines = trace.to_string();
        }
        Ok(())
    });
    if failed.is_null() && !lines.is_empty() { answer(lines) } else { failed }
}

/// Writes what a trace has measured: since its start, or since the last call with `is_next`, which is not 0. Returns `used`.
///
/// # Safety
/// The trace must be null, or one that was opened and not closed, and `to` null or a place for the values.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_read(this: *const PythonTrace, to: *mut Values, is_next: u32) -> i64 {
    // SAFETY: required by this function's contract.
    let (this, to) = unsafe { (this.as_ref(), to.as_mut()) };
    let mut values = Values { gauge: Gauge::Off as u32, ..Values::default() };
    _ = guarded(|| {
        // After a fork, nothing is counted in the child.
        let Some(PythonTrace { trace, .. }) = this.filter(|_| !process::is_forked()) else { return Ok(()) };
        let data = if is_next != 0 { gpumem::__private::read_next(trace) } else { trace.data() };
        values = Values {
            used: data.used.get(),
            peaked: data.peaked.get(),
            lost: data.lost,
            untracked: data.untracked,
            gauge: data.gauge as u32,
        };
        Ok(())
    });
    let used = values.used;
    if let Some(to) = to {
        *to = values;
    }
    used
}

/// Returns the blocks that were allocated inside a trace on its device and are still live, as JSON: the largest first.
///
/// # Safety
/// The trace must be null, or one that was opened and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_live(this: *const PythonTrace) -> *const c_char {
    // SAFETY: required by this function's contract.
    let this = unsafe { this.as_ref() };
    let mut rows = Vec::new();
    _ = guarded(|| {
        let Some(PythonTrace { trace, .. }) = this.filter(|_| !process::is_forked()) else {
            return Ok(());
        };
        let device = trace.data().device;
        let on_device = trace.live().into_iter().filter(|block| block.device == device && block.kind.is_on_device());
        rows = on_device
            .map(|LiveBlock { bytes, device, line, caller, library, path, backtrace, .. }| {
                json!({
                    "bytes": bytes.get(), "device": device, "line": line, "caller": caller, "library": library, "scopes": path,
                    "frames": backtrace,
                })
            })
            .collect();
        Ok(())
    });
    answer(Value::from(rows).to_string())
}

/// Ends a trace, without a report.
///
/// # Safety
/// The trace must be one that was opened and not closed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_trace_close(this: *mut PythonTrace) {
    // SAFETY: required by this function's contract.
    unsafe { release(this) }
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

/// Allocates memory of a simulated GPU. Returns the block, or null after an error.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpumem_sim_alloc(device: u32, bytes: u64) -> *mut SimBlock {
    let alloc = || {
        let gpus = SimGpu::all().map_err(|why| why.to_string())?;
        let gpu = gpus
            .get(device as usize)
            .ok_or_else(|| format!("there is no simulated GPU {device}: set GPUMEM_SIM=16GiB"))?;
        gpu.alloc(Bytes::new(bytes)).map_err(|why| why.to_string())
    };
    boxed(alloc)
}

/// Frees memory of a simulated GPU.
///
/// # Safety
/// The block must be one that was allocated and not freed.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gpumem_sim_free(block: *mut SimBlock) {
    // SAFETY: required by this function's contract.
    unsafe { release(block) }
}
