//! The C side of a call: what comes in and goes out by pointer. All of the crate's reading and writing through C
//! pointers is here.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::slice;

/// A pointer that should not have been null was; each library has its own code for that.
pub(crate) struct NullPointer;

/// Where a C function puts a result.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    pub(crate) fn put(&self, value: T) -> Result<(), NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: an `Out` is made by C callers only, as an argument that NVIDIA's headers declare as a pointer to one
        // `T` for the function to write; a null one was refused above. `T: Copy`, so that no old value needs dropping.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// What the caller left there, for arguments that go both ways.
    pub(crate) fn get(&self) -> Result<T, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: as in `put`; used only for arguments that the headers declare as read and written.
        Ok(unsafe { self.0.read() })
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Puts `values` one after the other, for arguments whose length the caller gave as at least that many.
    pub(crate) fn put_all(&self, values: &[T]) -> Result<(), NullPointer> {
        if values.is_empty() {
            return Ok(());
        }
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: every call site compares `values.len()` with the length that the C caller passed for this buffer,
        // which is the caller's own and so no part of `values`.
        unsafe { values.as_ptr().copy_to_nonoverlapping(self.0, values.len()) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Puts a C string, cut to what fits with its end mark when it must be.
    pub(crate) fn put_text(&self, text: &str, length: usize) -> Result<(), NullPointer> {
        let fitting = text.len().min(length.saturating_sub(1));
        let bytes = text.as_bytes()[..fitting].iter().copied().chain([0]);
        self.put_all(&bytes.map(u8::cast_signed).take(length).collect::<Vec<_>>())
    }
}

impl Out<c_void> {
    /// The same place, seen as the type that another argument of the call says it has.
    pub(crate) fn of<T>(&self) -> Out<T> {
        Out(self.0.cast())
    }
}

/// A C string that comes in.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> Result<String, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: a `Text` is made by C callers only, where the headers declare a string that ends with a 0 byte.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Bytes that come in; the length is another argument.
#[repr(transparent)]
pub(crate) struct Input(*const c_void);

impl Input {
    pub(crate) fn get(&self, length: usize) -> Result<Vec<u8>, NullPointer> {
        if length == 0 {
            return Ok(Vec::new());
        }
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: an `Input` is made by C callers only, where the headers declare a buffer of at least the length that
        // goes with it, which is what every call site passes on.
        Ok(unsafe { slice::from_raw_parts(self.0.cast::<u8>(), length) }.to_vec())
    }
}

/// What a C function returns: 0, or the library's code.
pub(crate) fn code_of<E: Into<c_int>>(outcome: Result<(), E>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => error.into(),
    }
}
