//! Reads the Python functions that the calling thread is in, without Python's global lock.
//!
//! A library such as PyTorch releases that lock before it allocates, so a hook must not call most of Python's functions. But a thread that
//! is inside native code does not change its own frames, and its frames keep their code objects alive. This also holds in a
//! free-threaded Python, because its garbage collector visits the frames of all threads. Only a shutdown of the interpreter deletes frames: it
//! deletes the states of all threads but one, even of threads that run native code. [`threads`] prevents that while a thread reads. The only
//! interpreter functions that are called here are those that read memory.

mod access;
mod code;
mod layout;
mod lines;
mod threads;

use std::{
    ffi::{c_int, c_ulong, c_void},
    hash::{Hash, Hasher},
    marker::PhantomData,
    ptr, slice,
    sync::OnceLock,
};

pub use self::code::run_in_python;
pub use self::lines::line_at;
use self::{
    access::{byte, function, int, symbol, word},
    layout::{Identity, Layout},
    threads::{Threads, ThreadsGuard},
};

/// The maximum number of frames that are read of a chain.
const MAX_CHAIN: usize = 1024;

/// File and function names are truncated to this length.
const MAX_CHARACTERS: isize = 4096;

/// Identifies a Python function on a stack. The numbers stay the same after the function has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FrameKey {
    /// The address of its code object.
    code: usize,
    /// The offset of its current instruction in the code, in bytes: negative before the first instruction, and the maximum if it is not
    /// known.
    offset: isize,
}

/// A stack has dozens of these, so each is hashed as one number.
impl Hash for FrameKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(self.code ^ self.offset.cast_unsigned().rotate_left(48));
    }
}

/// The addresses of the parts of a code object, and its identity. A new code object may have the address of a deleted one, and even its
/// names and its table of lines may have the same addresses. Only the identity always differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CodeParts([usize; 3], usize);

impl CodeParts {
    /// Compares word by word. The derived comparison uses vectors of two words: it stores the words that were just read and loads them
    /// again as a vector, which waits for the stores (store forwarding). That would take longer than everything else.
    fn are(&self, others: Self) -> bool {
        let (Self([file, function, lines], identity), now) = (*self, others.0);
        file == now[0] && function == now[1] && lines == now[2] && identity == others.1
    }
}

/// The Python functions that the calling thread is in, innermost first. Their code objects live as long as this value.
#[derive(Clone, Copy)]
pub(crate) struct Frames<'a> {
    interpreter: &'a Interpreter,
    keys: &'a [FrameKey],
    /// The functions belong to one thread.
    thread: PhantomData<*const ()>,
}

/// One of these functions.
#[derive(Clone, Copy)]
pub(crate) struct Frame<'a> {
    interpreter: &'a Interpreter,
    key: FrameKey,
    thread: PhantomData<*const ()>,
}

/// The file, the function and the line of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PythonLine {
    /// The function with the names of its classes, such as `Trainer.step`.
    pub(crate) function: String,
    /// The file as Python names it, such as `train.py` or `<stdin>`.
    pub(crate) file: String,
    /// The line. `None` if the instruction belongs to no line, and on a thread of a free-threaded Python 3.14 or later that is not the main
    /// one.
    pub(crate) line: Option<u32>,
}

static FOUND: OnceLock<Option<Interpreter>> = OnceLock::new();

/// The Python interpreter in this process.
#[derive(Debug)]
pub(crate) struct Interpreter {
    functions: Functions,
    layout: Layout,
    threads: Threads,
    /// The addresses of the types of code objects, strings and bytes.
    code_type: usize,
    text_type: usize,
    bytes_type: usize,
}

/// The interpreter's functions. None of them needs Python's lock.
#[derive(Clone, Copy, Debug)]
struct Functions {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    /// Returns the state of this thread while it holds the lock. Missing on 3.11, where it might return another thread's state.
    attached_thread: Option<unsafe extern "C" fn() -> *mut c_void>,
    /// Returns the state of this thread, whether or not it holds the lock.
    this_thread: unsafe extern "C" fn() -> *mut c_void,
    text_length: unsafe extern "C" fn(*mut c_void) -> isize,
    character: unsafe extern "C" fn(*mut c_void, isize) -> u32,
}

impl Interpreter {
    /// Returns the interpreter of this process. `None` before [`find`](Self::find) was called, or if that found none.
    pub(crate) fn of_process() -> Option<&'static Self> {
        FOUND.get()?.as_ref()
    }

    /// Finds the interpreter of this process on the first call. There is none if Python does not run, or if its version is not 3.11 to
    /// 3.15. Takes the loader's lock of loading, so hooks and callbacks must not call this.
    pub(crate) fn find() {
        FOUND.get_or_init(Self::new);
    }

    fn new() -> Option<Self> {
        let version: *const c_ulong = symbol(c"Py_Version")?.cast();
        // SAFETY: Python 3.11 and later export a constant `unsigned long` of this name.
        let version = u32::try_from(unsafe { version.read() } >> 16).ok()?;
        let runtime: *const u64 = symbol(c"_PyRuntime")?.cast();
        // SAFETY: the structure of 3.13 and later starts with a record of offsets, and is longer than that record. Earlier versions have no
        // record, and `of` does not read it.
        let layout = Layout::of(version, |index| unsafe { runtime.add(index).read() })?;
        // SAFETY: these functions have these types in all versions that have a layout.
        let functions = unsafe {
            Functions {
                is_initialized: function(c"Py_IsInitialized")?,
                is_finalizing: function(c"Py_IsFinalizing").or_else(|| function(c"_Py_IsFinalizing"))?,
                attached_thread: (version > 0x030b)
                    .then(|| {
                        function(c"PyThreadState_GetUnchecked").or_else(|| function(c"_PyThreadState_UncheckedGet"))
                    })
                    .flatten(),
                this_thread: function(c"PyGILState_GetThisThreadState")?,
                text_length: function(c"PyUnicode_GetLength")?,
                character: function(c"PyUnicode_ReadChar")?,
            }
        };
        let [code_type, text_type, bytes_type] = [c"PyCode_Type", c"PyUnicode_Type", c"PyBytes_Type"].map(symbol);
        let (code_type, text_type, bytes_type) = (code_type?.addr(), text_type?.addr(), bytes_type?.addr());
        // SAFETY: both functions may be called on any thread at any time.
        if unsafe { (functions.is_initialized)() == 0 || (functions.is_finalizing)() != 0 } {
            return None;
        }
        // When the interpreter shuts down, it calls a function of this library.
        #[cfg(target_os = "linux")]
        super::loader::pin().ok()?;
        // SAFETY: the address points to `_PyRuntime`, and the layout fits its version.
        let threads = unsafe { Threads::of(runtime.expose_provenance(), layout.threads_lock, layout.thread_id) }?;
        Some(Self { functions, layout, threads, code_type, text_type, bytes_type })
    }

    /// Returns an address in the file that contains the interpreter.
    pub(crate) fn address(&self) -> usize {
        self.functions.is_initialized as *const () as usize
    }

    /// Calls `read` with the Python functions that the calling thread is in. If `keys` is too short, it gets the innermost ones. Returns
    /// `None` on a thread that runs no Python, and while the interpreter shuts down.
    ///
    /// Python can neither create nor destroy threads while `read` runs. Therefore `read` must be short, and must not call Python.
    pub(crate) fn with_frames<R>(&self, keys: &mut [FrameKey], read: impl FnOnce(Frames<'_>) -> R) -> Option<R> {
        let state = self.own_state()?;
        let guard = self.threads.lock()?;
        let count = self.walk(&guard, state, keys);
        let frames = Frames { interpreter: self, keys: &keys[..count], thread: PhantomData };
        (count > 0).then(|| read(frames))
    }

    /// Returns the address of the calling thread's state, which may have been deleted.
    fn own_state(&self) -> Option<usize> {
        let Functions { is_initialized, is_finalizing, attached_thread, this_thread, .. } = self.functions;
        // SAFETY: these functions may be called on any thread at any time.
        let state = unsafe {
            if is_initialized() == 0 || is_finalizing() != 0 {
                return None;
            }
            let attached = attached_thread.map_or(ptr::null_mut(), |attached| attached());
            if attached.is_null() { this_thread() } else { attached }
        };
        (!state.is_null()).then(|| state.expose_provenance())
    }

    /// Writes the functions of the calling thread to `keys`, innermost first, until `keys` is full. Returns their number, or 0 if `state`
    /// is not that of the calling thread.
    fn walk(&self, guard: &ThreadsGuard<'_>, state: usize, keys: &mut [FrameKey]) -> usize {
        if !guard.is_own(state) {
            return 0;
        }
        let Layout { code, instruction, previous, entry_owner, copy, object_type, first_instruction, .. } = self.layout;
        let (owner_at, entry) = entry_owner.map_or((0, None), |(at, owner)| (at, Some(owner)));
        let mut free = keys.iter_mut();
        // SAFETY: the state belongs to this thread, and exists while the lock is held. Only this thread changes the chain of its frames,
        // and it is here now. Therefore the chain is complete, its frames exist, and each has the fields of the layout.
        unsafe {
            let record = self.layout.thread_record.map_or(state, |at| word(state + at));
            let mut frame = if record == 0 { 0 } else { word(record + self.layout.current_frame) };
            for _ in 0..MAX_CHAIN {
                if frame == 0 {
                    break;
                }
                let code = word(frame + code) & !layout::TAGS;
                let is_entry = entry.is_some_and(|entry| byte(frame + owner_at) == entry);
                if code != 0 && !is_entry && word(code + object_type) == self.code_type {
                    let Some(out) = free.next() else { break };
                    // Python may delete the list of a code object's copies while this thread is in native code. Therefore only instructions
                    // inside of the object have a line.
                    let offset = if copy.is_some_and(|at| int(frame + at) != 0) {
                        isize::MAX
                    } else {
                        word(frame + instruction).wrapping_sub(code + first_instruction).cast_signed()
                    };
                    *out = FrameKey { code, offset };
                }
                frame = word(frame + previous);
            }
        }
        let unused = free.len();
        keys.len() - unused
    }
}

impl<'a> Frames<'a> {
    pub(crate) fn keys(self) -> &'a [FrameKey] {
        self.keys
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = Frame<'a>> {
        let Self { interpreter, keys, thread } = self;
        keys.iter().map(move |key| Frame { interpreter, key: *key, thread })
    }

    /// Returns whether these are the frames of a known stack.
    pub(crate) fn are_same(self, known: &[(FrameKey, CodeParts)]) -> bool {
        let is_same =
            |((key, parts), frame): (&(FrameKey, CodeParts), Frame<'_>)| *key == frame.key && parts.are(frame.parts());
        known.len() == self.keys.len() && known.iter().zip(self.iter()).all(is_same)
    }
}

// The code object of a `Frame` belongs to a function on the stack of this thread, and is alive. Only `with_frames` creates a `Frame`, for
// the time in which the thread is in native code and its state is not deleted. Therefore the code object has the fields of the layout.
impl Frame<'_> {
    pub(crate) fn key(self) -> FrameKey {
        self.key
    }

    /// Returns the parts of the frame's code object.
    pub(crate) fn parts(self) -> CodeParts {
        let Layout { code_parts, identity, .. } = self.interpreter.layout;
        let code = self.key.code;
        // SAFETY: the code object is alive, as said above. Its name is a string, which has a hash.
        unsafe {
            let parts = code_parts.map(|at| word(code + at));
            let identity = match identity {
                Identity::Version { at } => word(code + at),
                Identity::Name { at, hash, first_line } => {
                    word(word(code + at) + hash) ^ word(code + first_line).rotate_left(32)
                }
            };
            CodeParts(parts, identity)
        }
    }

    /// Returns the file, the function and the line.
    pub(crate) fn line(self) -> PythonLine {
        let CodeParts([file, function, table], _) = self.parts();
        // SAFETY: the code object is alive, as said above, and so are its parts.
        unsafe {
            let first_line = int(self.key.code + self.interpreter.layout.first_line);
            let line = lines::line_at(self.interpreter.bytes(table), first_line, self.key.offset);
            PythonLine { function: self.interpreter.text(function), file: self.interpreter.text(file), line }
        }
    }
}

impl Interpreter {
    /// Returns the characters of a string, or `?` if its type is derived from the string type.
    ///
    /// # Safety
    /// `text` must be the address of a live object.
    unsafe fn text(&self, text: usize) -> String {
        // SAFETY: this function's contract requires a live object. If its type is the type of strings, both functions only read it: strings do
        // not change, and the index is less than the length.
        unsafe {
            if word(text + self.layout.object_type) != self.text_type {
                return "?".to_owned();
            }
            let text = ptr::with_exposed_provenance_mut(text);
            let length = (self.functions.text_length)(text).min(MAX_CHARACTERS);
            (0..length)
                .map(|at| char::from_u32((self.functions.character)(text, at)).unwrap_or(char::REPLACEMENT_CHARACTER))
                .collect()
        }
    }

    /// Returns the first [`lines::MAX_TABLE`] bytes of a bytes object, or none if it is another object.
    ///
    /// # Safety
    /// `bytes` must be the address of an object that lives as long as the slice.
    unsafe fn bytes<'a>(&self, bytes: usize) -> &'a [u8] {
        let [length, first] = self.layout.bytes;
        // SAFETY: this function's contract requires a live object. If its type is the type of bytes, it has this many bytes, and they do not
        // change.
        unsafe {
            if word(bytes + self.layout.object_type) != self.bytes_type {
                return &[];
            }
            let length = word(bytes + length).min(lines::MAX_TABLE);
            slice::from_raw_parts(ptr::with_exposed_provenance(bytes + first), length)
        }
    }
}
