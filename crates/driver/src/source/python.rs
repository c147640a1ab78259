//! Adds Python's functions to the stacks of allocations.
//!
//! A stack is a list of addresses. A Python line has no address, so it gets an id that cannot be an address. Python lines replace the
//! addresses of the interpreter and the outer addresses.

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::BuildHasher,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    model::{self, NumberHashBuilder, StackId},
    sys::{
        python::{CodeParts, Frame, FrameKey, Frames, Interpreter, PythonLine},
        stack::{as_observer_cold, files_of},
    },
};

use super::recorder;

/// The maximum number of Python functions that are recorded for each stack.
const MAX_FRAMES: usize = 128;

/// The bit that is set in ids of lines, and never in addresses of programs.
const LINE: usize = 1 << (usize::BITS - 1);

/// The maximum number of stacks in each thread's cache. The id of a stack that is not in the cache takes a hundred times longer.
const CACHED: usize = 1024;

/// The Python lines that occur on stacks. They belong to the process, like its code objects.
#[derive(Default)]
struct PythonLines {
    numbers: HashMap<(FrameKey, CodeParts), usize, NumberHashBuilder>,
    lines: Vec<Arc<PythonLine>>,
}

static LINES: Mutex<Option<PythonLines>> = Mutex::new(None);

/// A stack with Python's functions, and its id.
struct CachedStack {
    native: StackId,
    frames: Vec<(FrameKey, CodeParts)>,
    number: StackId,
}

/// The stack cache of a thread. A stack takes 48 bytes for each function.
struct StackCache {
    /// The functions of the latest stack. They are kept here because filling a new array costs as much as reading three functions.
    keys: [FrameKey; MAX_FRAMES],
    /// The stacks by their hashes.
    stacks: HashMap<u64, CachedStack, NumberHashBuilder>,
}

thread_local! {
    static CACHE: RefCell<Option<Box<StackCache>>> = const { RefCell::new(None) };
}

/// Starts to add Python's functions to stacks, if this process runs Python.
pub(super) fn start() {
    Interpreter::find();
}

/// Returns the id of the calling thread's stack with Python's functions. `native` is the id of the stack without them. It is returned if
/// the thread runs no Python.
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
        Box::new(Self { keys: [FrameKey::default(); MAX_FRAMES], stacks: HashMap::default() })
    }

    fn number(&mut self, native: StackId, interpreter: &Interpreter) -> Option<StackId> {
        let Self { keys, stacks } = self;
        let read = |frames: Frames<'_>| {
            let hash = NumberHashBuilder::default().hash_one((native.0, frames.keys()));
            match stacks.get(&hash) {
                Some(known) if known.native == native && frames.are_same(&known.frames) => Found::Known(known.number),
                _ => Found::New(hash, NewStack::of(frames)),
            }
        };
        match interpreter.with_frames(keys, read)? {
            Found::Known(number) => Some(number),
            Found::New(hash, NewStack { frames, lines }) => {
                let number = number_of(native, interpreter, &lines);
                if stacks.len() == CACHED {
                    stacks.clear();
                }
                stacks.insert(hash, CachedStack { native, frames, number });
                Some(number)
            }
        }
    }
}

/// The result of looking up the thread's Python functions.
enum Found {
    /// The id of the stack that contains them.
    Known(StackId),
    /// The stack with this hash is not in the cache.
    New(u64, NewStack),
}

struct NewStack {
    frames: Vec<(FrameKey, CodeParts)>,
    /// The ids of the functions' lines.
    lines: Vec<usize>,
}

impl NewStack {
    fn of(frames: Frames<'_>) -> Self {
        let mut locked = lines();
        let PythonLines { numbers, lines } = locked.get_or_insert_default();
        let number_of = |(frame, known): (Frame<'_>, &(FrameKey, CodeParts))| {
            let next = lines.len();
            let number = *numbers.entry(*known).or_insert(next);
            if number == next {
                lines.push(Arc::new(frame.line()));
            }
            number
        };
        let known: Vec<_> = frames.iter().map(|frame| (frame.key(), frame.parts())).collect();
        let lines = frames.iter().zip(&known).map(number_of).collect();
        Self { frames: known, lines }
    }
}

/// Returns the id of a stack that is not in the cache.
fn number_of(native: StackId, interpreter: &Interpreter, lines: &[usize]) -> StackId {
    let mut stack = recorder::addresses(native).to_vec();
    // `files_of` expects return addresses, and looks up the byte before each of them.
    stack.push(interpreter.address() + 1);
    let files = files_of(&stack);
    let inner = files.iter().position(|file| Some(file) == files.last()).unwrap_or(0);
    stack.truncate(inner);
    stack.extend(lines.iter().map(|number| LINE | number));
    recorder::number_stack(&stack)
}

fn lines() -> MutexGuard<'static, Option<PythonLines>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the frame for the id of a line; `None` if the number is an address.
pub fn frame(number: usize) -> Option<model::Frame> {
    if number & LINE == 0 {
        return None;
    }
    let line = lines().as_ref()?.lines.get(number ^ LINE).cloned()?;
    let PythonLine { function, file, line } = (*line).clone();
    Some(model::Frame { function: Some(function), file: Some(file), line, ..model::Frame::default() })
}

/// Returns the Python functions that the calling thread is in, innermost first, each as `file:line function`.
pub fn python_lines() -> Vec<String> {
    Interpreter::find();
    let Some(interpreter) = Interpreter::of_process() else { return Vec::new() };
    let text = |frame: Frame<'_>| {
        let PythonLine { function, file, line } = frame.line();
        format!("{file}:{} {function}", line.unwrap_or(0))
    };
    let mut keys = [FrameKey::default(); MAX_FRAMES];
    interpreter.with_frames(&mut keys, |frames| frames.iter().map(text).collect()).unwrap_or_default()
}
