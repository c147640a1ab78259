//! Takes the lock of the interpreter's lists of threads, and checks whether this thread is in one of them.
//!
//! When the interpreter shuts down, it deletes the states of threads that are in native code, while these threads run. In all versions from
//! 3.11 to 3.15 it takes this lock, removes the states from the list of their interpreter, releases the lock, and deletes the states.
//! Therefore the state of a thread that is in a list exists as long as the lock is held. A thread may take the lock without Python's global
//! lock, and Python holds it only for a few instructions.

use std::{
    ffi::{c_int, c_void},
    hint, ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU8, Ordering::Acquire, Ordering::Relaxed},
    },
    thread,
};

use super::{
    super::process,
    access::{function, word},
    layout::ThreadsLock,
};

/// The number of times that a thread tries to take the interpreter's lock. After the first `SPINS` tries, it yields to other threads.
const TRIES: u32 = 1000;
const SPINS: u32 = 50;

/// `PyMutex`: the bit that is set while the lock is held.
const LOCKED: u8 = 1;

/// True if the interpreter has ended. Locked while a thread reads its frames. Therefore gpumem's threads do not wait for each other while
/// they hold the interpreter's lock, and the interpreter, which calls [`ended`] at its end, waits for all of them.
static ENDED: Mutex<bool> = Mutex::new(false);

/// The interpreter's functions. None of them needs Python's lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Threads {
    /// The address of the lock.
    lock: usize,
    kind: LockFunctions,
    first_interpreter: unsafe extern "C" fn() -> *mut c_void,
    next_interpreter: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    first_thread: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    next_thread: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    /// The offset of a thread's `pthread_self` in its state.
    id: usize,
}

#[derive(Clone, Copy, Debug)]
enum LockFunctions {
    /// The lock is an object behind a pointer.
    Object { acquire: unsafe extern "C" fn(*mut c_void, c_int) -> c_int, release: unsafe extern "C" fn(*mut c_void) },
    /// The lock is a byte, a `PyMutex`.
    Byte { release: unsafe extern "C" fn(*mut u8) },
}

/// While this exists, no state of a thread that is in a list is deleted.
pub(super) struct ThreadsGuard<'a> {
    threads: &'a Threads,
    /// The object or the byte.
    lock: *mut c_void,
    _not_ended: MutexGuard<'static, bool>,
}

impl Threads {
    /// Finds the lock. `runtime` is the address of `_PyRuntime`. Returns `None` if the list does not match the layout, or if the
    /// interpreter cannot announce its end.
    ///
    /// # Safety
    /// `runtime` must be that address, in a version with this layout.
    pub(super) unsafe fn of(runtime: usize, lock: ThreadsLock, id: usize) -> Option<Self> {
        // SAFETY: these functions have these types in all versions that have a layout. `Py_AtExit` keeps a function of this library,
        // which the caller keeps loaded.
        unsafe {
            let (at, kind) = match lock {
                ThreadsLock::Object { at } => {
                    let acquire = function(c"PyThread_acquire_lock")?;
                    (at, LockFunctions::Object { acquire, release: function(c"PyThread_release_lock")? })
                }
                ThreadsLock::Byte { at } => (at, LockFunctions::Byte { release: function(c"PyMutex_Unlock")? }),
            };
            let threads = Self {
                lock: runtime + at,
                kind,
                first_interpreter: function(c"PyInterpreterState_Head")?,
                next_interpreter: function(c"PyInterpreterState_Next")?,
                first_thread: function(c"PyInterpreterState_ThreadHead")?,
                next_thread: function(c"PyThreadState_Next")?,
                id,
            };
            // The start of the list of interpreters follows its lock.
            let first = (threads.first_interpreter)().addr();
            if first == 0 || word(threads.lock + size_of::<usize>()) != first {
                return None;
            }
            let at_exit: unsafe extern "C" fn(extern "C" fn()) -> c_int = function(c"Py_AtExit")?;
            (at_exit(ended) == 0).then_some(threads)
        }
    }

    /// Takes the lock. Returns `None` if another thread holds it for long, if the interpreter has ended, or in the child process of a fork.
    pub(super) fn lock(&self) -> Option<ThreadsGuard<'_>> {
        if process::is_forked() {
            return None;
        }
        let not_ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        if *not_ended {
            return None;
        }
        // SAFETY: the interpreter has not called `ended` yet, or waits there while `not_ended` is locked. Until then the lock exists.
        let lock = unsafe { self.acquire() }?;
        Some(ThreadsGuard { threads: self, lock, _not_ended: not_ended })
    }

    /// # Safety
    /// The interpreter must not have deleted its lock, and must not do so during the call.
    unsafe fn acquire(&self) -> Option<*mut c_void> {
        let lock: *mut c_void = match self.kind {
            // SAFETY: `self.lock` is the address of the pointer to the lock.
            LockFunctions::Object { .. } => ptr::with_exposed_provenance_mut(unsafe { word(self.lock) }),
            LockFunctions::Byte { .. } => ptr::with_exposed_provenance_mut(self.lock),
        };
        if lock.is_null() {
            return None;
        }
        for tries in 0..TRIES {
            let is_mine = match self.kind {
                // SAFETY: the lock exists. The function does not wait.
                LockFunctions::Object { acquire, .. } => unsafe { acquire(lock, 0) == 1 },
                LockFunctions::Byte { .. } => {
                    // SAFETY: the byte is a part of the interpreter's data, and Python uses it as an atomic byte.
                    let byte = unsafe { AtomicU8::from_ptr(lock.cast()) };
                    let now = byte.load(Relaxed);
                    now & LOCKED == 0 && byte.compare_exchange(now, now | LOCKED, Acquire, Relaxed).is_ok()
                }
            };
            if is_mine {
                return Some(lock);
            }
            if tries < SPINS {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        None
    }
}

impl ThreadsGuard<'_> {
    /// Returns whether this is the existing state of the calling thread. The address may be any number.
    pub(super) fn is_own(&self, state: usize) -> bool {
        let Threads { first_interpreter, next_interpreter, first_thread, next_thread, id, .. } = *self.threads;
        // SAFETY: the lists do not change while the lock is held. The functions only read them. A state in a list has the field of the
        // layout.
        unsafe {
            let mut interpreter = first_interpreter();
            while !interpreter.is_null() {
                let mut thread = first_thread(interpreter);
                while !thread.is_null() {
                    if thread.addr() == state {
                        // If a state was deleted, another thread's state may have its address.
                        return word(state + id) == own_id();
                    }
                    thread = next_thread(thread);
                }
                interpreter = next_interpreter(interpreter);
            }
        }
        false
    }
}

impl Drop for ThreadsGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock, and the lock exists, as in `lock`.
        unsafe {
            match self.threads.kind {
                LockFunctions::Object { release, .. } => release(self.lock),
                LockFunctions::Byte { release } => release(self.lock.cast()),
            }
        }
    }
}

/// Waits for threads that read their frames. The interpreter calls this after it has deleted everything except its locks.
extern "C" fn ended() {
    // In the child process of a fork, no thread reads frames, and the lock may be held by a thread that does not exist there.
    if process::is_forked() {
        return;
    }
    *ENDED.lock().unwrap_or_else(PoisonError::into_inner) = true;
}

/// Returns the id by which Python knows the calling thread.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn own_id() -> usize {
    // SAFETY: it has no preconditions.
    let id = unsafe { libc::pthread_self() };
    usize::try_from(id).unwrap_or(0)
}

/// Returns 0, because Python is supported only on Linux.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn own_id() -> usize {
    0
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn python_ends_in_the_child_of_a_fork() {
        process::notice_forks();
        let _reads_frames = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(process::ends_in_child(|| ended()));
    }
}
