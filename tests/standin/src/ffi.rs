//! The C side of a call: arguments and results behind pointers. All code of this crate that reads and writes through C
//! pointers is here.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::{mem, ptr};

use crate::driver::Root;

/// The error for a pointer that must not be null. Each library has its own code for it.
pub(crate) struct NullPointer;

/// The place where a C function puts a result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T: Copy> Out<T> {
    pub(crate) fn put(self, value: T) -> Result<(), NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: an `Out` is made by C callers only, as an argument that NVIDIA's headers declare as a pointer to one
        // `T` for the function to write; a null one was rejected above. `T: Copy`, so that no old value needs dropping.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Reads the caller's value, for arguments that are read and written.
    pub(crate) fn get(self) -> Result<T, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: as in `put`; used only for arguments that the headers declare as read and written.
        Ok(unsafe { self.0.read() })
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes `values` one after the other. The caller must have passed a length of at least that many.
    pub(crate) fn put_all(self, values: &[T]) -> Result<(), NullPointer> {
        if values.is_empty() {
            return Ok(());
        }
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: every call site compares `values.len()` with the length that the C caller passed for this buffer,
        // which belongs to the caller and therefore does not overlap `values`.
        unsafe { values.as_ptr().copy_to_nonoverlapping(self.0, values.len()) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a C string. It is cut so that it takes at most `length` bytes with the final 0.
    pub(crate) fn put_text(self, text: &str, length: usize) -> Result<(), NullPointer> {
        let fitting = text.len().min(length.saturating_sub(1));
        let bytes = text.as_bytes()[..fitting].iter().copied().chain([0]);
        self.put_all(&bytes.map(|byte| c_char::from_ne_bytes([byte])).take(length).collect::<Vec<_>>())
    }
}

impl<T> Out<T> {
    /// Returns the same address with another type, which another argument of the call determines.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }
}

/// A C string that is an argument.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Result<String, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: a `Text` is made by C callers only, where the headers declare a string that ends with a 0 byte.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// CUPTI calls this function at both ends of a driver call: with the subscriber's data, the domain, the function's
/// id and the data of the call.
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void, c_uint, c_uint, *const c_void);

/// A subscriber's function and its data.
#[derive(Clone, Copy)]
pub(crate) struct Listener {
    callback: Callback,
    userdata: *mut c_void,
}

// SAFETY: both pointers are only handed back to the C code that passed them. By CUPTI's contract, it may be called on
// any thread.
unsafe impl Send for Listener {}

impl Listener {
    pub(crate) fn new(callback: Callback, userdata: Out<c_void>) -> Self {
        Self { callback, userdata: userdata.0 }
    }

    /// Calls the subscriber. `data` is the data that CUPTI passes in this domain.
    #[allow(clippy::inline_always)] // As `cupti::call_back`.
    #[inline(always)]
    pub(crate) fn call<T>(self, domain: c_uint, id: c_uint, data: &T) {
        // SAFETY: the subscriber passed a function of this type for this purpose, and data that must be valid until it
        // unsubscribes; `data` is initialised and lives for the call.
        unsafe { (self.callback)(self.userdata, domain, id, ptr::from_ref(data).cast()) };
    }
}

/// Returns the root of the driver that is on the loader's path as `libcuda`, if that is another copy of this file.
pub(crate) fn root_of_libcuda(own: extern "C" fn() -> *const Root) -> Option<&'static Root> {
    // SAFETY: both functions belong to the C library, and the strings end with a zero. Loading a library runs its
    // initialisers, and this library has none with preconditions.
    let root = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() { ptr::null_mut() } else { libc::dlsym(library, c"standin_root".as_ptr()) }
    };
    if root.is_null() || root == own as *mut c_void {
        return None;
    }
    // SAFETY: only a copy of this file has such a symbol, which is a function of this type, whose result lives as long
    // as the library, which is never closed.
    unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> *const Root>(root)().as_ref() }
}

/// Returns the C code of an outcome: 0, or the library's error code.
pub(crate) fn code_of<E: Into<c_int>>(outcome: Result<(), E>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}
