//! Python's functions on the stacks of allocations.
//!
//! A stack is a list of addresses. A line of Python has no address, so it gets a number that no address has. The addresses inside
//! the interpreter and outside of it are left out: the lines of Python stand in their place.

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::{BuildHasher, BuildHasherDefault},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    model::{Frame, StackId},
    sys::{
        python::{CodeParts, Interpreter, PythonFrame, PythonLine},
        stack::{as_observer_cold, files_of},
    },
};

use super::{hasher::AddressHasher, recorder};

/// The most Python functions of a stack that are recorded.
const MAX_FRAMES: usize = 128;

/// The bit that numbers of lines have, and addresses of programs do not.
const LINE: usize = 1 << (usize::BITS - 1);

/// The number of stacks in the cache of a thread.
const CACHED: usize = 64;

/// So many of the innermost functions choose the place in the cache.
const HASHED: usize = 8;

type Hasher = BuildHasherDefault<AddressHasher>;

/// The lines of Python that are on stacks. They belong to the process, as its code objects do.
#[derive(Default)]
struct Lines {
    numbers: HashMap<(PythonFrame, CodeParts), usize, Hasher>,
    lines: Vec<Arc<PythonLine>>,
}

static LINES: Mutex<Option<Lines>> = Mutex::new(None);

/// A stack with Python's functions, and its number.
struct CachedStack {
    native: StackId,
    frames: Vec<(PythonFrame, CodeParts)>,
    number: StackId,
}

/// What a thread keeps: less than 3 KiB, and its stacks.
struct StackCache {
    /// The functions of the newest stack. They are kept here because to fill a new array costs as much as three functions.
    frames: [PythonFrame; MAX_FRAMES],
    stacks: [Option<CachedStack>; CACHED],
}

thread_local! {
    static CACHE: RefCell<Option<Box<StackCache>>> = const { RefCell::new(None) };
}

/// The number of the calling thread's stack with Python's functions. `native` is its number without them, which is returned if the
/// thread runs no Python.
#[cold]
#[inline(never)]
pub(super) fn with_python(native: StackId) -> StackId {
    as_observer_cold(|| number(native)).flatten().unwrap_or(native)
}

fn number(native: StackId) -> Option<StackId> {
    let interpreter = Interpreter::of_process()?;
    let of_thread = |cache: &RefCell<Option<Box<StackCache>>>| {
        let mut cache = cache.try_borrow_mut().ok()?;
        cache.get_or_insert_with(StackCache::empty).number(native, interpreter)
    };
    CACHE.try_with(of_thread).ok()?
}

impl StackCache {
    fn empty() -> Box<Self> {
        Box::new(Self { frames: [PythonFrame::default(); MAX_FRAMES], stacks: [const { None }; CACHED] })
    }

    fn number(&mut self, native: StackId, interpreter: &Interpreter) -> Option<StackId> {
        let count = interpreter.frames(&mut self.frames);
        let frames = &self.frames[..count];
        if frames.is_empty() {
            return None;
        }
        // The outer functions of two stacks are often the same.
        let inner = &frames[..frames.len().min(HASHED)];
        let at = usize::try_from(Hasher::default().hash_one((native.0, frames.len(), inner))).unwrap_or(0) % CACHED;
        if let Some(known) = &self.stacks[at]
            && known.native == native
            && interpreter.are_same(&known.frames, frames)
        {
            return Some(known.number);
        }
        let number = number_of(native, interpreter, frames);
        let frames = frames.iter().map(|frame| (*frame, interpreter.code_parts(frame))).collect();
        self.stacks[at] = Some(CachedStack { native, frames, number });
        Some(number)
    }
}

/// The number of a stack that is not in the cache.
fn number_of(native: StackId, interpreter: &Interpreter, frames: &[PythonFrame]) -> StackId {
    let mut stack = recorder::addresses(native).to_vec();
    // As a return address behind its first byte, it is inside the interpreter.
    stack.push(interpreter.address() + 1);
    let files = files_of(&stack);
    let inner = files.iter().position(|file| Some(file) == files.last()).unwrap_or(0);
    stack.truncate(inner);
    let mut locked = lines();
    let lines = locked.get_or_insert_default();
    for frame in frames {
        let next = lines.lines.len();
        let number = *lines.numbers.entry((*frame, interpreter.code_parts(frame))).or_insert(next);
        if number == next {
            lines.lines.push(Arc::new(interpreter.line(frame)));
        }
        stack.push(LINE | number);
    }
    // A recording asks for the lines of a new stack.
    drop(locked);
    recorder::number_stack(&stack)
}

fn lines() -> MutexGuard<'static, Option<Lines>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The frame that a number on a stack stands for; `None` if it is an address.
pub(crate) fn frame(number: usize) -> Option<Frame> {
    if number & LINE == 0 {
        return None;
    }
    let line = lines().as_ref()?.lines.get(number ^ LINE).cloned()?;
    let PythonLine { function, file, line } = (*line).clone();
    Some(Frame { function: Some(function), file: Some(file), line, ..Frame::default() })
}

/// The Python functions that the calling thread is in, innermost first.
#[cfg(feature = "__internal")]
pub(crate) fn python_lines() -> Vec<String> {
    let Some(interpreter) = Interpreter::of_process() else { return Vec::new() };
    let mut frames = [PythonFrame::default(); MAX_FRAMES];
    let count = interpreter.frames(&mut frames);
    let text = |frame: &PythonFrame| {
        let PythonLine { function, file, line } = interpreter.line(frame);
        format!("{file}:{} {function}", line.unwrap_or(0))
    };
    frames[..count].iter().map(text).collect()
}
