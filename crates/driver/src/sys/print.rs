//! The only code that prints for gpumem. `print!` and `eprint!` panic if they cannot write (a closed pipe, a full disk). Also, a write to a
//! pipe without a reader kills a program that does not ignore SIGPIPE, which is the default in C. A notice must not end the program.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "no other code of the libraries prints")]

use std::{
    cell::{Cell, RefCell},
    fmt,
    fs::File,
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

use super::process::without_cancellation;

thread_local! {
    /// The text that the thread has printed since its capture started. `None` if it is not captured.
    static CAPTURED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs code, and returns what it prints instead of writing it to stdout. Python has its own buffer for stdout.
pub fn captured(code: impl FnOnce()) -> String {
    CAPTURED.with(|captured| captured.replace(Some(String::new())));
    code();
    CAPTURED.with(RefCell::take).unwrap_or_default()
}

/// Returns whether the thread's stdout is captured.
pub fn is_captured() -> bool {
    CAPTURED.try_with(|captured| captured.borrow().is_some()).unwrap_or(false)
}

/// Writes the text to stdout. Returns whether that was possible.
pub fn to_stdout(text: &str) -> bool {
    let add = |captured: &RefCell<Option<String>>| captured.borrow_mut().as_mut().map(|lines| lines.push_str(text));
    if CAPTURED.try_with(add).is_ok_and(|added| added.is_some()) {
        return true;
    }
    let text = Quiet::new(text);
    unharmed(|| print!("{text}"));
    !text.failed.get()
}

/// Writes the text to stderr, if possible. A single write is used, so that the output of other processes cannot come in between.
pub fn to_stderr(text: &str) {
    unharmed(|| eprint!("{}", Quiet::new(text)));
}

/// Writes a line about gpumem itself to stderr, if possible.
pub fn notice(what: impl fmt::Display) {
    to_stderr(&format!("gpumem: {what}\n"));
}

/// Like [`notice`], but takes no lock. Meant for the child process of a fork, where the lock of stderr may be held by a thread that does
/// not exist.
#[cfg(target_os = "linux")]
pub fn notice_without_lock(what: impl fmt::Display) {
    use std::{mem::ManuallyDrop, os::fd::FromRawFd};

    // SAFETY: `ManuallyDrop` leaves the descriptor open. If the program has closed it, or has opened another file with its number, the write
    // fails or goes there, as any write to stderr does.
    let stderr = ManuallyDrop::new(unsafe { File::from_raw_fd(2) });
    unharmed(|| _ = (&*stderr).write_all(format!("gpumem: {what}\n").as_bytes()));
}

/// Writes the text to a file of [`open_at_end`](super::descriptor::open_at_end). If the file is a full pipe, waits at most this long for
/// its reader.
///
/// # Errors
/// Returns an error if not all of the text could be written.
pub fn to_file(mut file: &File, text: &str, patience: Duration) -> io::Result<()> {
    let (mut rest, until) = (text.as_bytes(), Instant::now() + patience);
    while !rest.is_empty() {
        let mut written = Ok(0);
        unharmed(|| written = file.write(rest));
        match written {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(bytes) => rest = &rest[bytes..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    return Err(io::Error::new(error.kind(), "the pipe is full, and its reader does not read"));
                }
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Text for `print!` that ignores write errors. `print!` is used instead of `write!` to stdout, because the test harness captures only
/// `print!`.
struct Quiet<'a> {
    text: &'a str,
    failed: Cell<bool>,
}

impl<'a> Quiet<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, failed: Cell::new(false) }
    }
}

impl fmt::Display for Quiet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failed.set(f.write_str(self.text).is_err());
        Ok(())
    }
}

/// Runs code that prints. During that, the thread cannot be cancelled, and gets no signal if the pipe has no reader.
fn unharmed(print: impl FnOnce()) {
    without_cancellation(|| without_sigpipe(print));
}

#[cfg(not(target_os = "linux"))]
fn without_sigpipe(print: impl FnOnce()) {
    print();
}

#[cfg(target_os = "linux")]
fn without_sigpipe(print: impl FnOnce()) {
    use std::{mem::MaybeUninit, ptr};

    let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    let mut pending = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first two calls fill `pipe`. `sigpending` fills `pending`, and `pthread_sigmask`, if it succeeds, `before`. All are
    // valid for these calls, which concern the calling thread alone.
    let is_blocked = unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::sigpending(pending.as_mut_ptr()) == 0
            && libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 0
            && libc::pthread_sigmask(libc::SIG_BLOCK, pipe.as_ptr(), before.as_mut_ptr()) == 0
    };
    print();
    if is_blocked {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `pipe` and `before` were filled, because the calls succeeded. No signal of this kind was pending before, so the one
        // that is taken here, without waiting, is the one for the write.
        unsafe {
            libc::sigtimedwait(pipe.as_ptr(), ptr::null_mut(), &raw const none);
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_is_no_error_and_is_remembered() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let quiet = Quiet::new("text");
        assert!(write!(Full, "{quiet}").is_ok());
        assert!(quiet.failed.get());
        assert!(write!(Vec::new(), "{quiet}").is_ok());
        assert!(!quiet.failed.get());
    }
}
