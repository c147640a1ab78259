//! Functions that Python programs call in the tests. They read the calling thread's stack, as a hook of the driver does.
//!
//! `ctypes.CDLL` releases Python's lock before a call, as PyTorch does before it allocates; `ctypes.PyDLL` keeps it.

use std::{
    hint::black_box,
    slice,
    sync::mpsc::{Receiver, Sender, channel},
    sync::{Arc, LazyLock, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use gpumem_core::model::{Answer, Bytes, EventKind, Frame, Key, StackId, Tag};
use gpumem_driver::{
    python::{line_at as python_line_at, lines as python_lines},
    settings::settings,
    source::{self, RecordEvents, StackTable},
};

static STACKS: LazyLock<StackTable> = LazyLock::new(StackTable::default);

/// Gives ids to stacks, and records nothing.
struct NumberStacks;

impl RecordEvents for NumberStacks {
    fn alloc(_: Key, _: Bytes, _: Tag) {}

    fn free(_: Key) -> Answer {
        Answer::Applied
    }

    fn record(_: &EventKind) -> Answer {
        Answer::Applied
    }

    fn number_stack(addresses: &[usize]) -> StackId {
        STACKS.number(addresses, |_| {})
    }

    fn addresses(stack: StackId) -> Arc<[usize]> {
        STACKS.get(stack)
    }
}

/// Returns the id of the stack that is recorded for a large block.
#[inline(never)]
fn stack() -> u32 {
    source::current_stack().0
}

/// Returns the lines of that stack, innermost first.
#[inline(never)]
fn stack_lines() -> Vec<String> {
    source::record_to::<NumberStacks>(settings());
    let stack = STACKS.get(source::current_stack());
    source::frames(&stack).iter().map(Frame::with_function).collect()
}

/// Writes a text to a Python buffer, cut to the buffer's size. Returns the length.
fn put(text: &str, at: *mut u8, room: usize) -> usize {
    let length = text.len().min(room);
    // SAFETY: the program passes a buffer of `room` bytes, and no other code uses it during the call.
    unsafe { slice::from_raw_parts_mut(at, length) }.copy_from_slice(&text.as_bytes()[..length]);
    length
}

/// Writes the Python functions that the thread is in, innermost first, each as `file:line function`. Returns the length.
///
/// # Safety
/// `at` must be valid for writes of `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lines(at: *mut u8, room: usize) -> usize {
    put(&python_lines().join("\n"), at, room)
}

/// Writes the lines of the stack that is recorded for a large block. Returns the length.
///
/// # Safety
/// `at` must be valid for writes of `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recorded(at: *mut u8, room: usize) -> usize {
    put(&stack_lines().join("\n"), at, room)
}

/// Returns the id of the stack that is recorded for a large block.
#[unsafe(no_mangle)]
pub extern "C" fn number() -> u32 {
    stack_lines();
    stack()
}

/// Returns the line of an instruction from the table of its code object, or 0 if the instruction has none.
///
/// # Safety
/// `table` must be valid for reads of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn line_at(table: *const u8, length: usize, first_line: i32, offset: isize) -> u32 {
    // SAFETY: required by this function's contract.
    let table = unsafe { slice::from_raw_parts(table, length) };
    python_line_at(table, first_line, offset).unwrap_or(0)
}

/// Returns the number of Python functions that are found on a thread that Python does not know.
#[unsafe(no_mangle)]
pub extern "C" fn lines_of_another_thread() -> usize {
    thread::spawn(|| python_lines().len()).join().unwrap_or(usize::MAX)
}

/// Waits without Python's lock, then reads the stack, even while the interpreter ends. Returns the number of functions.
#[unsafe(no_mangle)]
pub extern "C" fn lines_later(milliseconds: u64) -> usize {
    thread::sleep(Duration::from_millis(milliseconds));
    python_lines().len()
}

/// The channels of a waiting thread: one tells the thread to read its stack, and the other returns the number of functions.
static WAITING: Mutex<Option<(Sender<()>, Receiver<usize>)>> = Mutex::new(None);

/// Waits without Python's lock until [`lines_of_waiting`] tells it to read the stack. Never returns, because the test deletes
/// Python's state of this thread during the wait.
#[unsafe(no_mangle)]
pub extern "C" fn lines_when_told() {
    let ((tell, told), (say, said)) = (channel(), channel());
    *WAITING.lock().unwrap_or_else(PoisonError::into_inner) = Some((tell, said));
    let _ = told.recv();
    let _ = say.send(python_lines().len());
    loop {
        thread::park();
    }
}

/// Returns whether a thread waits in [`lines_when_told`].
#[unsafe(no_mangle)]
pub extern "C" fn is_waiting() -> bool {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

/// Tells that thread to read its stack. Returns the number of functions that it found.
#[unsafe(no_mangle)]
pub extern "C" fn lines_of_waiting() -> usize {
    let waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner).take();
    let found = |(tell, said): (Sender<()>, Receiver<usize>)| {
        tell.send(()).ok()?;
        said.recv().ok()
    };
    waiting.and_then(found).unwrap_or(usize::MAX)
}

/// Reads the stack again and again without Python's lock, and never returns.
#[unsafe(no_mangle)]
pub extern "C" fn lines_for_ever() {
    loop {
        black_box(python_lines().len());
    }
}

/// Returns the number of nanoseconds for one recorded stack, in the fastest of 20 rounds.
#[unsafe(no_mangle)]
pub extern "C" fn nanoseconds() -> f64 {
    const TIMES: u32 = 1000;
    // Stacks have ids only after `stack_lines` has called `record_to`.
    stack_lines();
    let round = || {
        let started = Instant::now();
        for _ in 0..TIMES {
            black_box(stack());
        }
        started.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES)
    };
    (0..20).map(|_| round()).fold(f64::INFINITY, f64::min)
}
