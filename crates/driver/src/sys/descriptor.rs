//! Descriptors in a process whose program may close any descriptor.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    path::Path,
};

/// Returns the identity of a descriptor's file: the ids of its device and of the file. `None` if the descriptor is closed, or if the file
/// is not known.
pub fn identity(file: &File) -> Option<(u64, u64)> {
    file.metadata().ok().and_then(|known| numbers(&known))
}

/// Like [`identity`], but for a path. Does not follow a link.
pub fn identity_at(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().ok().and_then(|known| numbers(&known))
}

#[cfg(unix)]
#[expect(clippy::unnecessary_wraps, reason = "other systems have none")]
fn numbers(known: &Metadata) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    Some((known.dev(), known.ino()))
}

#[cfg(not(unix))]
fn numbers(_: &Metadata) -> Option<(u64, u64)> {
    None
}

/// Returns whether an open file no longer has a name.
#[cfg(unix)]
pub fn is_removed(known: &Metadata) -> bool {
    std::os::unix::fs::MetadataExt::nlink(known) == 0
}

/// Returns false, because this system does not report whether an open file still has a name.
#[cfg(not(unix))]
pub fn is_removed(_: &Metadata) -> bool {
    false
}

/// Opens or creates a regular file for writing. Does not wait if another process has put a pipe there.
///
/// # Errors
/// Returns an error if that fails, or if the file is not a regular file.
pub fn open(path: &Path, creates: bool) -> io::Result<File> {
    open_with(path, File::options().write(true).create(creates).truncate(false), false)
}

/// Opens or creates a lock file. A link is rejected, because another user may have put it there.
///
/// # Errors
/// Returns the same errors as [`open`].
pub fn open_lock(path: &Path) -> io::Result<File> {
    open_with(path, File::options().read(true).write(true).create(true).truncate(false), true)
}

/// Opens a lock file for appending, while other processes may append to it at the same time.
///
/// # Errors
/// Returns the same errors as [`open`], and an error if the file does not exist.
pub fn open_lock_to_append(path: &Path) -> io::Result<File> {
    open_with(path, File::options().append(true), true)
}

/// Opens or creates a file to append output. The file may be a terminal or a pipe. Neither this function nor a write waits for a reader:
/// the write fails with [`io::ErrorKind::WouldBlock`] instead.
///
/// # Errors
/// Returns an error if that fails, or if the file is a pipe without a reader.
pub fn open_at_end(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.append(true).create(true);
    not_waiting(&mut options, false);
    options.open(path).map_err(|error| {
        #[cfg(target_os = "linux")]
        if error.raw_os_error() == Some(libc::ENXIO) {
            return io::Error::new(error.kind(), "no process reads this pipe");
        }
        error
    })
}

#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "files of other systems have no such flags"))]
fn not_waiting(options: &mut OpenOptions, rejects_links: bool) {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK | if rejects_links { libc::O_NOFOLLOW } else { 0 });
    }
}

fn open_with(path: &Path, options: &mut OpenOptions, rejects_links: bool) -> io::Result<File> {
    not_waiting(options, rejects_links);
    let known = if rejects_links { path.symlink_metadata() } else { path.metadata() };
    let is_other = known.is_ok_and(|known| !known.is_file());
    let file = options.open(path).map_err(|error| if is_other { no_file() } else { error })?;
    if !is_other && file.metadata()?.is_file() { Ok(file) } else { Err(no_file()) }
}

fn no_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")
}

/// Returns the same file under a number that the program is unlikely to use, because programs get the lowest free number. Returns the file
/// unchanged if no such number is free.
pub fn with_high_number(file: File) -> File {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::{AsRawFd, FromRawFd};
        // The kernel's table has room up to the highest number in use, so a much higher number would cost memory.
        const HIGH: u64 = 1000;
        let from = limit(libc::RLIMIT_NOFILE).map_or(HIGH, |limit| HIGH.min(limit.saturating_sub(24)));
        let from = libc::c_int::try_from(from).unwrap_or(3).max(3);
        // SAFETY: the descriptor is open. The result is a new descriptor, which no other code knows, or -1.
        let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, from) };
        if number >= 0 {
            // SAFETY: as above.
            return unsafe { File::from_raw_fd(number) };
        }
    }
    file
}

/// Gives the calling thread its own descriptor table, which is initially empty. The program then cannot close the thread's descriptors,
/// and does not get other numbers because of them. Returns `false` if the kernel (before 5.9) or its rules do not allow that; the thread
/// then still shares the program's table.
///
/// # Safety
/// After this call, the thread must not use a descriptor that was opened before or on another thread, and no other thread may use one that
/// this thread opens: the number would refer to another file, or to none.
pub(super) unsafe fn leave_table_of_program() -> bool {
    #[cfg(target_os = "linux")]
    {
        const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;
        // SAFETY: the call reads no memory. The thread gets a new table into which nothing is copied, so all descriptors of other threads
        // stay open.
        unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) == 0 }
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Makes a newly created file readable and writable for its owner, whatever the program's umask.
pub fn grant_owner_access(file: &File) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let Ok(mut permissions) = file.metadata().map(|known| known.permissions()) else { return };
        if permissions.mode() & 0o600 != 0o600 {
            permissions.set_mode(permissions.mode() | 0o600);
            // This fails for another user's file, which then stays as it is.
            let _ = file.set_permissions(permissions);
        }
    }
    #[cfg(not(unix))]
    let _ = file;
}

/// Returns the maximum size of a file of this process, or `None` if there is no limit.
pub fn file_size_limit() -> Option<u64> {
    #[cfg(target_os = "linux")]
    {
        limit(libc::RLIMIT_FSIZE)
    }
    #[cfg(not(target_os = "linux"))]
    None
}

#[cfg(target_os = "linux")]
fn limit(of: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the function fills the structure that it is given.
    let is_known = unsafe { libc::getrlimit(of, &raw mut limit) } == 0;
    (is_known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Closes a number like a program does, and assigns it to a file of the program. Returns a descriptor of that file.
#[cfg(all(test, target_os = "linux"))]
pub(crate) fn replace(number: std::os::fd::RawFd, file: &File) -> File {
    use std::os::fd::{AsRawFd, FromRawFd};
    // SAFETY: both are open; the first one's owner expects this.
    let replaced = unsafe { libc::dup2(file.as_raw_fd(), number) };
    assert_eq!(replaced, number);
    // SAFETY: it is open, and its former owner does not close it any more.
    unsafe { File::from_raw_fd(number) }
}
