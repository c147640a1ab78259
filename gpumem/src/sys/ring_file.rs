//! The memory of a recording's ring: a file mapped into memory, whose content outlives the process.

use std::path::Path;

use gpumem_core::capture::{Line, RingMemory};

/// The memory of a ring.
#[derive(Debug)]
pub(crate) enum RingFile {
    /// A mapped file.
    #[cfg(target_os = "linux")]
    Mapped(linux::Mapping),
    /// What the process has in memory is lost with it.
    Heap(Box<[Line]>),
}

impl RingFile {
    /// Memory of so many lines, in a new file at this path if that is possible.
    pub(crate) fn new(path: &Path, lines: usize) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(mapping) = linux::Mapping::new(path, lines) {
            return Self::Mapped(mapping);
        }
        let _ = path;
        Self::on_the_heap(lines)
    }

    pub(crate) fn on_the_heap(lines: usize) -> Self {
        Self::Heap((0..lines).map(|_| Line::default()).collect())
    }
}

impl RingMemory for RingFile {
    #[inline]
    fn lines(&self) -> &[Line] {
        match self {
            #[cfg(target_os = "linux")]
            Self::Mapped(mapping) => mapping.lines(),
            Self::Heap(lines) => lines,
        }
    }
}

#[cfg(target_os = "linux")]
pub(crate) mod linux {
    use std::{
        fs::{self, File},
        io,
        os::fd::AsRawFd,
        path::Path,
        ptr::{self, NonNull},
        slice,
    };

    use gpumem_core::capture::Line;

    use crate::sys::descriptor;

    /// A file mapped into memory. The file belongs to this process: nobody else writes to it.
    #[derive(Debug)]
    pub(crate) struct Mapping {
        lines: NonNull<Line>,
        count: usize,
    }

    // SAFETY: a line consists of atomic words, so threads may share it, and any thread may unmap it.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        /// Maps a new file. `None` if it cannot be created, the disk is full, or the file system cannot reserve space.
        pub(super) fn new(path: &Path, count: usize) -> Option<Self> {
            // What an earlier process left there is not written over: it may still be mapped.
            let _ = fs::remove_file(path);
            let file = File::options().read(true).write(true).create_new(true).open(path).ok()?;
            descriptor::give_owner_access(&file);
            let mapping = Self::map(&file, count);
            if mapping.is_none() {
                let _ = fs::remove_file(path);
            }
            mapping
        }

        fn map(file: &File, count: usize) -> Option<Self> {
            let bytes = count.checked_mul(size_of::<Line>())?;
            reserve(file, bytes).ok()?;
            // SAFETY: a new mapping, wherever the kernel has room, so it overlaps nothing. The file stays open only until it is mapped.
            let address = unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
            };
            if address == libc::MAP_FAILED {
                return None;
            }
            // SAFETY: the range was just mapped. The pages are fetched now, so that hooks do not wait for them. A kernel before 5.14
            // refuses, which changes nothing else.
            unsafe { libc::madvise(address, bytes, libc::MADV_POPULATE_WRITE) };
            // A mapping begins at a page, so a line is aligned.
            Some(Self { lines: NonNull::new(address.cast())?, count })
        }

        #[inline]
        pub(super) fn lines(&self) -> &[Line] {
            // SAFETY: so many lines are mapped, until this is dropped. They begin at a page. Any bytes are atomic words, and the space
            // on disk is reserved, so each access succeeds. The process changes them through atomics only; nobody else writes the file.
            unsafe { slice::from_raw_parts(self.lines.as_ptr(), self.count) }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: this range was mapped by `map` and is unmapped once; borrowed lines have ended.
            unsafe { libc::munmap(self.lines.as_ptr().cast(), self.count * size_of::<Line>()) };
        }
    }

    /// Makes the file so long, with space on the disk for each byte: a store to a page without space would end the process.
    fn reserve(file: &File, bytes: usize) -> io::Result<()> {
        // Above the limit the kernel would end the program with SIGXFSZ.
        if descriptor::file_size_limit().is_some_and(|limit| bytes as u64 > limit) {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let bytes = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
        // Not `posix_fallocate`, which writes each page if the file system cannot reserve: that may take long, and a network's file
        // system may still run out of space.
        // SAFETY: the descriptor is open.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process, sync::atomic::Ordering::Relaxed};

    use super::*;

    #[test]
    fn what_is_stored_is_in_the_file_afterwards() {
        let path = env::temp_dir().join(format!("gpumem-ring-{}", process::id()));
        fs::write(&path, "left by another process").unwrap();
        let memory = RingFile::new(&path, 4);
        let words = || memory.lines().iter().flat_map(|line| &line.0);
        assert_eq!((words().count(), words().all(|word| word.load(Relaxed) == 0)), (32, true));
        memory.lines()[3].0[1].store(0x0102, Relaxed);
        if cfg!(target_os = "linux") {
            let bytes = fs::read(&path).unwrap();
            assert_eq!((bytes.len(), &bytes[3 * 64 + 8..][..3]), (256, &[2, 1, 0][..]));
        }
        drop(memory);
        let _ = fs::remove_file(&path);
        assert!(matches!(RingFile::new(&env::temp_dir().join("no such folder/ring"), 4), RingFile::Heap(_)));
    }
}
