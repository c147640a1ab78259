//! The Python functions that the calling thread is in, read without Python's lock.
//!
//! A library such as PyTorch releases the lock before it allocates, so a hook may not call most of Python's functions. But a thread
//! that is inside native code does not change its own frames, and its frames keep their code objects alive. So a thread may read its
//! own frames at any time. Only the functions in [`Functions`] are called; they read memory and take no lock.

#[cfg(all(feature = "capture", feature = "dispatch"))]
mod code;
mod layout;

use std::{
    ffi::{CStr, c_char, c_int, c_ulong, c_void},
    mem::transmute_copy,
    ptr,
    sync::OnceLock,
};

#[cfg(all(feature = "capture", feature = "dispatch"))]
pub(crate) use self::code::run_in_python;
use self::layout::{Identity, Layout};

/// A frame chain with more frames than this is not read to its end.
const MAX_CHAIN: usize = 1024;

/// File and function names are cut at this length.
const MAX_CHARACTERS: isize = 4096;

/// One Python function on the stack of the calling thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PythonFrame {
    /// The address of its code object.
    code: usize,
    /// The offset of its current instruction in the code, in bytes; negative before the first instruction.
    offset: isize,
}

/// The addresses of what a code object consists of, and its identity. A new code object may have the address of one that is gone, and
/// even its names and its table of lines may have the addresses of theirs; then the identity differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct CodeParts([usize; 3], usize);

impl CodeParts {
    /// Equality, word by word. The derived one compares vectors of two words: it stores the words that were just read and loads them
    /// again as a vector, which waits for the stores (store forwarding). That takes longer than all the rest.
    fn are(&self, others: Self) -> bool {
        let (Self([file, function, lines], identity), now) = (*self, others.0);
        file == now[0] && function == now[1] && lines == now[2] && identity == others.1
    }
}

/// What a frame stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PythonLine {
    /// With the names of its classes, such as `Trainer.step`.
    pub(crate) function: String,
    /// As Python names it, such as `train.py` or `<stdin>`.
    pub(crate) file: String,
    /// `None` if the instruction belongs to no line.
    pub(crate) line: Option<u32>,
}

/// The interpreter in this process.
#[derive(Debug)]
pub(crate) struct Interpreter {
    functions: Functions,
    layout: Layout,
    /// The address of the type of code objects.
    code_type: usize,
}

/// The interpreter's functions. None of them needs Python's lock.
#[derive(Clone, Copy, Debug)]
struct Functions {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    /// The state of this thread while it holds the lock. Not on 3.11, where it may be another thread's.
    attached_thread: Option<unsafe extern "C" fn() -> *mut c_void>,
    /// The state of this thread, whether it holds the lock or not.
    this_thread: unsafe extern "C" fn() -> *mut c_void,
    line_at: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    text_length: unsafe extern "C" fn(*mut c_void) -> isize,
    character: unsafe extern "C" fn(*mut c_void, isize) -> u32,
}

impl Interpreter {
    /// The interpreter of this process. `None` if no Python was loaded when this was called first, or if it is of a version other
    /// than 3.11 to 3.14, or without a global lock.
    pub(crate) fn of_process() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<Interpreter>> = OnceLock::new();
        FOUND.get_or_init(Self::find).as_ref()
    }

    fn find() -> Option<Self> {
        let version: *const c_ulong = symbol(c"Py_Version")?.cast();
        // SAFETY: Python 3.11 and later export a constant `unsigned long` of this name.
        let version = u32::try_from(unsafe { version.read() } >> 16).ok()?;
        let runtime: *const u64 = symbol(c"_PyRuntime")?.cast();
        // SAFETY: the structure of 3.13 and later begins with a record of offsets, and is longer than that. Earlier versions have no
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
                line_at: function(c"PyCode_Addr2Line")?,
                text_length: function(c"PyUnicode_GetLength")?,
                character: function(c"PyUnicode_ReadChar")?,
            }
        };
        Some(Self { functions, layout, code_type: symbol(c"PyCode_Type")?.addr() })
    }

    /// An address in the file that contains the interpreter.
    pub(crate) fn address(&self) -> usize {
        self.functions.is_initialized as *const () as usize
    }

    /// Writes the Python functions that the calling thread is in, innermost first, until `frames` is full. Returns their number: 0
    /// on a thread that runs no Python, and while the interpreter ends. It allocates nothing and takes no lock.
    pub(crate) fn frames(&self, frames: &mut [PythonFrame]) -> usize {
        let Some(mut frame) = self.innermost() else { return 0 };
        let Layout { code, instruction, previous, entry_owner, object_type, first_instruction, .. } = self.layout;
        let (owner_at, entry) = entry_owner.map_or((0, None), |(at, owner)| (at, Some(owner)));
        let mut free = frames.iter_mut();
        for _ in 0..MAX_CHAIN {
            if frame == 0 {
                break;
            }
            // SAFETY: the frames are this thread's own, see `innermost`. Each has the fields of the layout.
            unsafe {
                let code = word(frame + code) & !layout::TAGS;
                let is_entry = entry.is_some_and(|entry| byte(frame + owner_at) == entry);
                if code != 0 && !is_entry && word(code + object_type) == self.code_type {
                    let Some(out) = free.next() else { break };
                    let offset = word(frame + instruction).wrapping_sub(code + first_instruction).cast_signed();
                    *out = PythonFrame { code, offset };
                }
                frame = word(frame + previous);
            }
        }
        let unused = free.len();
        frames.len() - unused
    }

    /// The innermost frame of the calling thread.
    fn innermost(&self) -> Option<usize> {
        let Functions { is_initialized, is_finalizing, attached_thread, this_thread, .. } = self.functions;
        // SAFETY: these functions may be called on any thread at any time.
        let state = unsafe {
            if is_initialized() == 0 || is_finalizing() != 0 {
                return None;
            }
            let attached = attached_thread.map_or(ptr::null_mut(), |attached| attached());
            if attached.is_null() { this_thread() } else { attached }
        };
        if state.is_null() {
            return None;
        }
        // SAFETY: the state belongs to this thread, and exists until the thread ends or the interpreter does. Only this thread
        // changes the chain of its frames, and it is here now. So the chain is complete, and its frames exist.
        unsafe {
            let record = match self.layout.thread_record {
                Some(at) => word(state.addr() + at),
                None => state.addr(),
            };
            Some(if record == 0 { 0 } else { word(record + self.layout.current_frame) })
        }
    }

    /// The parts of the code object of a frame that [`frames`](Self::frames) has written, on the same thread and before it returned
    /// to Python.
    pub(crate) fn code_parts(&self, frame: &PythonFrame) -> CodeParts {
        // SAFETY: the frame is on the stack of this thread, so its code object is alive, and has these fields. The name is a string,
        // which has a hash.
        unsafe {
            let parts = self.layout.code_parts.map(|at| word(frame.code + at));
            let identity = match self.layout.identity {
                Identity::Version { at } => word(frame.code + at),
                Identity::Name { at, hash, first_line } => {
                    word(word(frame.code + at) + hash) ^ word(frame.code + first_line).rotate_left(32)
                }
            };
            CodeParts(parts, identity)
        }
    }

    /// Whether these are the frames of an earlier stack, under the same conditions as [`code_parts`](Self::code_parts).
    pub(crate) fn are_same(&self, known: &[(PythonFrame, CodeParts)], frames: &[PythonFrame]) -> bool {
        let is_same = |((known, parts), frame): (&(PythonFrame, CodeParts), &PythonFrame)| {
            known == frame && parts.are(self.code_parts(frame))
        };
        known.len() == frames.len() && known.iter().zip(frames).all(is_same)
    }

    /// What a frame stands for, under the same conditions as [`code_parts`](Self::code_parts).
    pub(crate) fn line(&self, frame: &PythonFrame) -> PythonLine {
        let CodeParts([file, function, _], _) = self.code_parts(frame);
        let code = ptr::with_exposed_provenance_mut(frame.code);
        // SAFETY: the code object is alive. The function reads its table of lines, which does not change.
        let line = unsafe { (self.functions.line_at)(code, c_int::try_from(frame.offset).unwrap_or(-1)) };
        PythonLine {
            function: self.text(function),
            file: self.text(file),
            line: u32::try_from(line).ok().filter(|line| *line > 0),
        }
    }

    /// The characters of a string object of a living code object.
    fn text(&self, text: usize) -> String {
        let text = ptr::with_exposed_provenance_mut(text);
        // SAFETY: the names of a code object are strings, and live and do not change as long as it does. Both functions only read
        // the string, if it is one and the index is less than its length.
        unsafe {
            let length = (self.functions.text_length)(text).min(MAX_CHARACTERS);
            (0..length)
                .map(|at| char::from_u32((self.functions.character)(text, at)).unwrap_or(char::REPLACEMENT_CHARACTER))
                .collect()
        }
    }
}

/// # Safety
/// There is an aligned word at this address.
unsafe fn word(address: usize) -> usize {
    // SAFETY: the caller guarantees it.
    unsafe { ptr::with_exposed_provenance::<usize>(address).read() }
}

/// # Safety
/// There is a byte at this address.
unsafe fn byte(address: usize) -> u8 {
    // SAFETY: the caller guarantees it.
    unsafe { ptr::with_exposed_provenance::<u8>(address).read() }
}

/// A symbol of the program, or of a library whose symbols all others see. The layouts are those of Linux.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn symbol(name: &CStr) -> Option<*mut c_void> {
    let name: *const c_char = name.as_ptr();
    // SAFETY: the name is a string. Nothing is loaded.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name) };
    (!found.is_null()).then_some(found)
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn symbol(_: &CStr) -> Option<*mut c_void> {
    None
}

/// A function of that name.
///
/// # Safety
/// `F` is the type of a pointer to the function of that name.
unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let found = symbol(name)?;
    // SAFETY: the address is not null, and the caller guarantees the type.
    Some(unsafe { transmute_copy::<*mut c_void, F>(&found) })
}
