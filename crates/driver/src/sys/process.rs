//! The process itself: its exit, its forks and its threads.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use once_cell::sync::OnceCell;

use super::own_threads;
use crate::{
    inbox::{Primitives, Std},
    model::ThreadName,
};

unsafe extern "C" {
    fn atexit(callback: extern "C" fn()) -> c_int;

    #[cfg(unix)]
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Calls `callback` when the process exits. Handlers run in reverse order, so libraries that have already registered their handlers still
/// work when `callback` runs. `callback` must not unwind.
pub fn at_exit(callback: extern "C" fn()) {
    // SAFETY: `atexit` is in the C library that every target of `std` with NVIDIA drivers links; it keeps the function
    // pointer, which is `'static`, and calls it once with no argument. If `atexit` fails for want of memory, the handler is not
    // called, which is harmless.
    unsafe { atexit(callback) };
}

/// Runs code, and delays a cancellation of the calling thread (`pthread_cancel`) until the code has returned. Functions such as `write` are
/// cancellation points. The C library would unwind through code that catches panics, which kills the process.
#[inline]
pub(super) fn without_cancellation<R>(code: impl FnOnce() -> R) -> R {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
        }
        const DISABLE: c_int = 1;

        struct Restore(c_int);

        impl Drop for Restore {
            fn drop(&mut self) {
                let mut disabled = DISABLE;
                // SAFETY: the state is one that the C library returned.
                unsafe { pthread_setcancelstate(self.0, &raw mut disabled) };
            }
        }

        let mut before = DISABLE;
        // SAFETY: it concerns this thread alone, and writes to a live variable.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        let _restore = Restore(before);
        code()
    }
    #[cfg(not(target_os = "linux"))]
    code()
}

/// Returns the path of the program.
///
/// # Errors
/// Returns an error if the system does not report it.
pub fn executable() -> std::io::Result<std::path::PathBuf> {
    // `/proc/self` is the main thread, which may have ended before the others. It has no file then.
    #[cfg(target_os = "linux")]
    if let Ok(path) = std::fs::read_link("/proc/thread-self/exe") {
        return Ok(path);
    }
    std::env::current_exe()
}

/// Returns the name of the machine or of the container, or `None` if the system does not report it.
pub fn host() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim_end().to_owned()).filter(|name| !name.is_empty())
}

/// Returns the rank of this process in its job, if the launcher has set one.
pub fn rank() -> Option<u64> {
    rank_of(|name| std::env::var(name).ok())
}

/// Like [`rank`], for the process that has these variables.
pub fn rank_of(variable: impl Fn(&str) -> Option<String>) -> Option<u64> {
    const VARIABLES: [&str; 5] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"];
    VARIABLES.iter().find_map(|name| variable(name)?.trim().parse().ok())
}

/// Returns the operating system's id of the calling thread, or 0 if it is not known.
pub fn thread_id() -> u64 {
    #[cfg(target_os = "linux")]
    {
        // The function with this name requires glibc 2.30. SAFETY: this system call has no arguments and cannot fail.
        let id = unsafe { libc::syscall(libc::SYS_gettid) };
        u64::try_from(id).unwrap_or(0)
    }
    #[cfg(not(target_os = "linux"))]
    0
}

/// Returns the operating system's name of the calling thread, truncated to 15 bytes. A thread without its own name has the name of the
/// thread that started it. `None` on systems without such names.
pub fn thread_name() -> Option<String> {
    let name = name_of_thread();
    (name != ThreadName::default()).then(|| String::from_utf8_lossy(name.bytes()).into_owned())
}

/// Like [`thread_name`], but empty if the name is not known. Hooks may call this: on Linux it makes one system call, which takes no lock.
pub fn name_of_thread() -> ThreadName {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn prctl(option: c_int, ...) -> c_int;
        }
        const PR_GET_NAME: c_int = 16;
        let mut name = [0_u8; 16];
        // SAFETY: with this option, `prctl` writes a name and its zero to the 16 bytes at the address, and concerns the calling thread
        // alone. It is in the C library of every Linux.
        let result = unsafe { prctl(PR_GET_NAME, name.as_mut_ptr()) };
        if result == 0 { ThreadName::new(&name) } else { ThreadName::default() }
    }
    // This is the name that the Rust program gave the thread.
    #[cfg(not(target_os = "linux"))]
    std::thread::current().name().map_or_else(ThreadName::default, |name| ThreadName::new(name.as_bytes()))
}

/// Ends the process with code 0 if all of the program's threads have ended. The C library does so after the last thread, and gpumem's
/// threads must not keep the process alive. This is needed for a program that ends its main thread with `pthread_exit`.
pub fn exit_without_program() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if is_without_program() && !DONE.swap(true, Relaxed) {
        // The exit runs on a separate thread, because exit handlers wait for gpumem's threads.
        let _ = own_threads::spawn("exit", || std::process::exit(0));
    }
}

/// Returns whether the main thread and all other threads of the program have ended.
#[cfg(target_os = "linux")]
fn is_without_program() -> bool {
    use std::{fs, io};
    // This check needs no descriptor: at this moment the program may expect to get the lowest one.
    let has_main = !matches!(fs::read_link("/proc/self/exe"), Err(error) if error.kind() == io::ErrorKind::NotFound);
    if has_main {
        return false;
    }
    let main = std::process::id().to_string();
    let is_own = |thread: io::Result<fs::DirEntry>| {
        let thread = thread.ok()?;
        let has_ended = || {
            let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
            Some(stat.rsplit_once(')')?.1.trim_start().starts_with(['Z', 'X']))
        };
        let is_of_gpumem =
            || Some(fs::read_to_string(thread.path().join("comm")).ok()?.starts_with(own_threads::PREFIX));
        if thread.file_name() == *main { has_ended() } else { is_of_gpumem() }
    };
    fs::read_dir("/proc/self/task").is_ok_and(|mut threads| threads.all(|thread| is_own(thread) == Some(true)))
}

#[cfg(not(target_os = "linux"))]
fn is_without_program() -> bool {
    false
}

/// Returns the start time of this process from `/proc`, or 0 if it is not known. Another process that gets the same id started later.
pub fn start_time() -> u64 {
    start_time_in("/proc/self").unwrap_or(0)
}

/// Returns the start time of the process with this id, or `None` if no such process runs.
pub fn start_time_of(pid: u32) -> Option<u64> {
    start_time_in(&format!("/proc/{pid}"))
}

fn start_time_in(folder: &str) -> Option<u64> {
    let stat = std::fs::read(format!("{folder}/stat")).ok()?;
    // The name of the program is in brackets and may contain any bytes, even if they are not UTF-8.
    let stat = String::from_utf8_lossy(&stat);
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // The state belongs to the main thread, which may have ended before the others.
    let has_ended = matches!(fields.next()?, "Z" | "X");
    let has_others = || std::fs::read_dir(format!("{folder}/task")).is_ok_and(|threads| threads.count() > 1);
    if has_ended && !has_others() { None } else { fields.nth(18)?.parse().ok() }
}

/// Returns how long this process has run, or `None` if it is not known.
pub fn age() -> Option<std::time::Duration> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: `sysconf` has no preconditions; it returns -1 for what it does not know.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let per_second = u32::try_from(per_second).ok().filter(|per_second| *per_second > 0)?;
        let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        let started = std::time::Duration::from_millis(start_time().checked_mul(1000)? / u64::from(per_second));
        Some(std::time::Duration::try_from_secs_f64(uptime).ok()?.saturating_sub(started))
    }
    #[cfg(not(target_os = "linux"))]
    None
}

/// The code that runs in the child process of a fork.
static IN_CHILD: OnceCell<fn()> = OnceCell::new();

/// Runs `code` in the child process of a fork. `code` may only store to atomics.
#[cfg(feature = "cuda")]
pub(super) fn at_fork(code: fn()) {
    let _ = IN_CHILD.set(code);
    notice_forks();
}

/// Starts to notice forks of this process.
pub fn notice_forks() {
    #[cfg(unix)]
    {
        static DONE: AtomicBool = AtomicBool::new(false);
        run_in_children(&DONE, forked);
    }
}

/// Makes the child process of each later fork run `code`, and sets `done`. Does nothing if `done` is set. `code` may only store to atomics.
#[cfg(unix)]
#[inline]
pub(super) fn run_in_children(done: &AtomicBool, code: unsafe extern "C" fn()) {
    // This is not a `OnceCell`: a child process that is forked while another thread initializes it would wait for that thread forever.
    if !done.load(Relaxed) && !done.swap(true, Relaxed) {
        // SAFETY: `pthread_atfork` is in the C library of every unix; it keeps the function pointer, which is `'static`,
        // and calls it in the child of a fork. The function only stores to atomics, which is allowed there.
        unsafe { pthread_atfork(None, None, Some(code)) };
    }
}

#[cfg(unix)]
unsafe extern "C" fn forked() {
    crate::inbox::set_forked();
    if let Some(code) = IN_CHILD.get() {
        code();
    }
}

/// Returns whether this process was forked from a process that used this crate, if [`notice_forks`] was called before the fork. The other
/// threads do not exist in the child process. Locks that they held stay locked forever, and the CUDA driver does not work there. Therefore
/// this crate takes no lock in the child process, neither its own nor one of the standard library, and prints nothing. Every request
/// returns an error.
#[inline]
pub fn is_forked() -> bool {
    <Std as Primitives>::is_forked()
}

/// Runs `code` in the child process of a fork. Returns whether it returns there.
#[cfg(all(test, unix))]
pub(crate) fn ends_in_child(code: fn()) -> bool {
    // SAFETY: the child only runs `code` and ends, at the latest by its alarm. If `code` waits there for a lock, the alarm ends the child
    // and the test fails.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(20);
            code();
            libc::_exit(0);
        }
        let mut status = -1;
        libc::waitpid(child, &raw mut status, 0) == child && status == 0
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_name_of_the_process_does_not_matter() {
        let started = super::start_time();
        // Linux truncates long names at a byte, which may split a character.
        std::fs::write("/proc/self/comm", b"a) gpumem\xff").unwrap();
        assert_eq!(super::start_time(), started);
        assert_ne!(started, 0);
    }
}
