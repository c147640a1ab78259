//! Runs Python code in the interpreter of this process.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

use super::access::{function, symbol};

/// `Py_file_input`: the text is a list of statements.
const STATEMENTS: c_int = 257;

/// The dictionary with the names of the code. Null until code runs for the first time. Only used with Python's lock.
static NAMESPACE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The code to run.
struct Code {
    /// The code that runs if no code ran before.
    first: CString,
    /// The code that runs otherwise.
    again: CString,
}

/// The interpreter's functions.
#[derive(Clone, Copy)]
struct Functions {
    is_initialized: unsafe extern "C" fn() -> c_int,
    is_finalizing: unsafe extern "C" fn() -> c_int,
    add_pending_call: unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    new_dictionary: unsafe extern "C" fn() -> *mut c_void,
    set_item: unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_void) -> c_int,
    builtins: unsafe extern "C" fn() -> *mut c_void,
    run: unsafe extern "C" fn(*const c_char, c_int, *mut c_void, *mut c_void, *mut c_void) -> *mut c_void,
    release: unsafe extern "C" fn(*mut c_void),
    clear_exception: unsafe extern "C" fn(),
}

impl Functions {
    fn of_process() -> Option<Self> {
        symbol(c"Py_IsInitialized")?;
        // SAFETY: these functions have these types in all Python versions from 3.7 on. A `PyObject*`, and a `PyCompilerFlags*`,
        // which may be null, are pointers.
        unsafe {
            Some(Self {
                is_initialized: function(c"Py_IsInitialized")?,
                is_finalizing: function(c"Py_IsFinalizing").or_else(|| function(c"_Py_IsFinalizing"))?,
                add_pending_call: function(c"Py_AddPendingCall")?,
                new_dictionary: function(c"PyDict_New")?,
                set_item: function(c"PyDict_SetItemString")?,
                builtins: function(c"PyEval_GetBuiltins")?,
                run: function(c"PyRun_StringFlags")?,
                release: function(c"Py_DecRef")?,
                clear_exception: function(c"PyErr_Clear")?,
            })
        }
    }
}

/// Runs code on the main thread of the interpreter, as soon as that thread executes Python code. Runs `again` if this was called before. An
/// exception that escapes the code is dropped. Returns false if there is no interpreter, or if it is shutting down.
///
/// Any thread may call this, with or without Python's lock, and in a hook: the code does not run during the call.
pub fn run_in_python(first: &CStr, again: &CStr) -> bool {
    let Some(functions) = Functions::of_process() else { return false };
    // SAFETY: both functions may be called on any thread at any time.
    if unsafe { (functions.is_initialized)() == 0 || (functions.is_finalizing)() != 0 } {
        return false;
    }
    let code = Box::into_raw(Box::new(Code { first: first.to_owned(), again: again.to_owned() }));
    // SAFETY: any thread may call `Py_AddPendingCall`, even without Python's lock. It keeps the function, which is in this library, and the
    // library is never unloaded. It also keeps the pointer, which `run` owns.
    let added = unsafe { (functions.add_pending_call)(run, code.cast()) == 0 };
    if !added {
        // SAFETY: the interpreter has not kept the pointer, so no other code owns what it points to.
        drop(unsafe { Box::from_raw(code) });
    }
    added
}

/// Runs the code. The interpreter calls this once for each code, on its main thread, with its lock. Returns 0, which means that there is no
/// exception.
unsafe extern "C" fn run(code: *mut c_void) -> c_int {
    // SAFETY: `run_in_python` made the pointer of a `Box`, for this call alone.
    let Code { first, again } = *unsafe { Box::from_raw(code.cast::<Code>()) };
    let Some(functions) = Functions::of_process() else { return 0 };
    // SAFETY: this thread has Python's lock and no exception is set, since the interpreter calls this between two instructions. The
    // namespace is a dictionary that is never released. `builtins` returns a borrowed reference, and the dictionary adds its own. The texts
    // are C strings. `run` returns null after an exception, or a reference that this code owns.
    unsafe {
        let mut namespace = NAMESPACE.load(Relaxed);
        let is_first = namespace.is_null();
        if is_first {
            namespace = (functions.new_dictionary)();
            let builtins = (functions.builtins)();
            if namespace.is_null()
                || builtins.is_null()
                || (functions.set_item)(namespace, c"__builtins__".as_ptr(), builtins) != 0
            {
                (functions.clear_exception)();
                return 0;
            }
            NAMESPACE.store(namespace, Relaxed);
        }
        let text = if is_first { first } else { again };
        let result = (functions.run)(text.as_ptr(), STATEMENTS, namespace, namespace, ptr::null_mut());
        if result.is_null() {
            (functions.clear_exception)();
        } else {
            (functions.release)(result);
        }
    }
    0
}
