//! The memory of a recording's ring, which outlives the process.
//!
//! The memory is a segment of shared memory (System V). A segment has no name in a file system and keeps its size, so no process can shrink
//! or empty it while it is mapped into the program, and a full disk cannot make it fail. It needs no descriptor and no other process. If
//! its process is killed, the segment stays: a report reads it, adds it to the recording, and removes it.

use std::io;

use gpumem_recording::{Line, RingMemory, Segment, Segments};

#[cfg(target_os = "linux")]
pub use self::linux::{RingPages, words_of};
#[cfg(not(target_os = "linux"))]
pub use self::other::RingPages;

/// The shared memory of this machine.
#[derive(Clone, Copy, Debug)]
pub struct SharedMemory;

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        fs,
        ptr::{self, NonNull},
        slice,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering::Relaxed},
        },
        time::Duration,
    };

    use libc::{c_int, shmid_ds};

    use super::{Line, RingMemory, Segment, Segments, SharedMemory, io};

    /// The number of rings of killed processes that are kept until a report reads them. They use memory, and some are never read.
    const MOST_FORGOTTEN: usize = 16;

    /// Only the owner may use a segment.
    const MODE: c_int = 0o600;

    /// The memory of a ring. A clone refers to the same memory.
    #[derive(Clone, Debug)]
    pub struct RingPages {
        lines: NonNull<Line>,
        count: usize,
        /// The mapping of these lines. The lines are also stored here, so that an event need not read the mapping.
        mapping: Arc<Mapping>,
    }

    // SAFETY: the lines stay mapped while `mapping` lives, and consist of atomic words, which threads may share.
    unsafe impl Send for RingPages {}
    // SAFETY: as above.
    unsafe impl Sync for RingPages {}

    #[derive(Debug)]
    struct Mapping {
        lines: NonNull<Line>,
        count: usize,
        /// The segment. `None` for private memory, which is lost with the process.
        segment: Option<OwnSegment>,
    }

    // SAFETY: any thread may unmap the memory, and may remove the id of its segment.
    unsafe impl Send for Mapping {}
    // SAFETY: a shared reference only allows removing the id of the segment, which is one call of the kernel.
    unsafe impl Sync for Mapping {}

    /// A segment that this process has created and must remove.
    #[derive(Debug)]
    struct OwnSegment {
        number: c_int,
        /// The process that created it. The child process of a fork has a copy of this value, and removes nothing.
        process: u32,
    }

    impl OwnSegment {
        fn remove(&self) {
            if std::process::id() == self.process {
                remove(self.number);
            }
        }
    }

    impl RingPages {
        /// Allocates memory that outlives the process, or private memory if that is not possible. All bytes are 0.
        ///
        /// # Errors
        /// Returns an error if the process may not have that much memory.
        pub fn new(count: usize) -> io::Result<Self> {
            Self::shared(count).or_else(|_| Self::private(count))
        }

        /// Allocates memory that is lost with the process. All bytes are 0.
        ///
        /// # Errors
        /// Returns an error if the process may not have that much memory.
        pub fn private(count: usize) -> io::Result<Self> {
            let bytes = bytes_of(count)?;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping, wherever the kernel has room, so it overlaps nothing.
            let address = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
            match NonNull::new(address.cast()).filter(|_| address != libc::MAP_FAILED) {
                Some(lines) => Ok(Self::of(lines, count, None)),
                None => Err(io::Error::last_os_error()),
            }
        }

        fn shared(count: usize) -> io::Result<Self> {
            let bytes = bytes_of(count)?;
            remove_forgotten(bytes);
            // SAFETY: a new segment; the call reads and writes no memory of this process.
            let number = unsafe { libc::shmget(libc::IPC_PRIVATE, bytes, libc::IPC_CREAT | MODE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let segment = OwnSegment { number, process: std::process::id() };
            let lines = attach(number, 0).inspect_err(|_| segment.remove())?;
            Ok(Self::of(lines, count, Some(segment)))
        }

        fn of(lines: NonNull<Line>, count: usize, segment: Option<OwnSegment>) -> Self {
            Self { lines, count, mapping: Arc::new(Mapping { lines, count, segment }) }
        }

        /// Returns the id of the segment, if the memory outlives the process.
        pub fn segment(&self) -> Option<u64> {
            self.mapping.segment.as_ref().and_then(|segment| segment.number.try_into().ok())
        }

        /// Fetches all pages, so that hooks do not wait for them. This must be called after the ring contains the id of its process,
        /// because the process may be killed during the call.
        pub fn fetch(&self) {
            let bytes = self.count * size_of::<Line>();
            // SAFETY: this range is mapped, and its bytes do not change. A kernel before 5.14 returns an error and changes nothing else.
            unsafe { libc::madvise(self.lines.as_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) };
        }

        /// Marks the ring as not needed after the process. The memory can still be used until this value is dropped.
        pub fn discard(&self) {
            self.mapping.discard();
        }
    }

    impl Mapping {
        fn discard(&self) {
            if let Some(segment) = &self.segment {
                segment.remove();
            }
        }
    }

    impl RingMemory for RingPages {
        #[inline]
        fn lines(&self) -> &[Line] {
            // SAFETY: this number of lines is mapped until `mapping` is dropped: by `mmap` without a file, or by `shmat`, whose segment
            // cannot be made smaller. Removing the segment does not change the mapping. The memory starts at a page, so lines are aligned,
            // and any bytes are valid atomic words. Another process of this user may attach the segment and write to it: words are read and
            // written atomically, and a ring trusts none of them. The kernel provides a page for each access, or kills a process if there
            // is not enough memory, as for any other memory of the program.
            unsafe { slice::from_raw_parts(self.lines.as_ptr(), self.count) }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            self.discard();
            let address = self.lines.as_ptr().cast();
            // SAFETY: this range was mapped by `new` and is unmapped once; the `RingPages` with it are gone, and borrowed lines have ended.
            unsafe {
                if self.segment.is_some() {
                    libc::shmdt(address);
                } else {
                    libc::munmap(address, self.count * size_of::<Line>());
                }
            }
        }
    }

    /// Maps the first `count` words of a segment of any process, for the rest of this process.
    ///
    /// # Errors
    /// Returns an error if this process may not use the segment, or if no segment of this size exists.
    pub fn words_of(segment: u64, count: usize) -> io::Result<&'static [AtomicU64]> {
        let number = segment.try_into().map_err(|_| io::ErrorKind::NotFound)?;
        let lines = attach(number, 0)?;
        // SAFETY: the structure consists of numbers, for all of which 0 is a value, and the call fills it.
        let bytes = unsafe {
            let mut about: shmid_ds = std::mem::zeroed();
            let is_known = libc::shmctl(number, libc::IPC_STAT, &raw mut about) == 0;
            if is_known { about.shm_segsz } else { 0 }
        };
        if bytes / size_of::<AtomicU64>() < count {
            return Err(io::Error::other("the segment of shared memory is too small"));
        }
        // SAFETY: this number of words is mapped and stays mapped, because no code detaches them. They start at a page. As in `lines`, any
        // bytes are valid atomic words.
        Ok(unsafe { slice::from_raw_parts(lines.as_ptr().cast(), count) })
    }

    fn bytes_of(count: usize) -> io::Result<usize> {
        count.checked_mul(size_of::<Line>()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Maps a segment, which stays mapped until `shmdt`.
    fn attach(number: c_int, access: c_int) -> io::Result<NonNull<Line>> {
        // SAFETY: a new mapping, wherever the kernel has room, so it overlaps nothing.
        let address = unsafe { libc::shmat(number, ptr::null(), access) };
        // The error is the address -1.
        NonNull::new(address.cast()).filter(|_| address.addr() != usize::MAX).ok_or_else(io::Error::last_os_error)
    }

    fn remove(number: c_int) {
        // SAFETY: the call removes the number, and the memory when no process has it mapped any more.
        unsafe { libc::shmctl(number, libc::IPC_RMID, ptr::null_mut()) };
    }

    /// Returns the content of a segment, at most `most` bytes. `None` if there is no segment with this id.
    fn content(number: c_int, most: usize) -> io::Result<Option<Segment>> {
        let lines = match attach(number, libc::SHM_RDONLY) {
            Ok(lines) => lines,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIDRM | libc::ENOSYS)) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // SAFETY: the structure consists of numbers, for all of which 0 is a value.
        let mut about: shmid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the call fills the structure that it is given.
        let is_known = unsafe { libc::shmctl(number, libc::IPC_STAT, &raw mut about) } == 0;
        let read = if is_known {
            let count = about.shm_segsz.min(most) / size_of::<Line>();
            // SAFETY: the segment has at least this number of bytes: it keeps its size, and while it is attached, no other segment gets its
            // id. It is attached until `shmdt` below. Another process may write to it during that time, so words are read atomically; any
            // bytes are valid atomic words.
            let read = unsafe { slice::from_raw_parts(lines.as_ptr(), count) };
            let mut bytes = Vec::with_capacity(size_of_val(read));
            for word in read.iter().flat_map(|line| &line.0) {
                bytes.extend_from_slice(&word.load(Relaxed).to_le_bytes());
            }
            let creator = u32::try_from(about.shm_cpid).ok().filter(|pid| *pid != 0);
            // This process is one of those that have attached the segment.
            // 0 means never.
            let detached = u64::try_from(about.shm_dtime).ok().filter(|time| *time != 0).map(Duration::from_secs);
            Ok(Some(Segment { bytes, creator, is_in_use: about.shm_nattch > 1, detached }))
        } else {
            Err(io::Error::last_os_error())
        };
        // SAFETY: it was mapped above, and nothing borrows from it any more.
        unsafe { libc::shmdt(lines.as_ptr().cast()) };
        read
    }

    impl Segments for SharedMemory {
        fn read(&self, segment: u64) -> io::Result<Option<Segment>> {
            // No ring is that large.
            const MOST: usize = 1 << 28;
            c_int::try_from(segment).map_or(Ok(None), |number| content(number, MOST))
        }

        fn remove(&self, segment: u64) {
            if let Ok(number) = c_int::try_from(segment) {
                remove(number);
            }
        }
    }

    /// Removes the oldest unread rings of this user's killed processes, if there are too many.
    fn remove_forgotten(bytes: usize) {
        let list = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        // SAFETY: the call has no arguments and cannot fail.
        let user = unsafe { libc::geteuid() };
        let mut forgotten: Vec<(u64, c_int)> =
            list.lines().skip(1).filter_map(|line| forgotten(line, bytes, user)).collect();
        forgotten.sort_unstable_by(|a, b| b.cmp(a));
        for (_, number) in forgotten.into_iter().skip(MOST_FORGOTTEN - 1) {
            let header = content(number, size_of::<Line>()).ok().flatten();
            if header.is_some_and(|header| !header.is_in_use && header.bytes.starts_with(b"gpumring")) {
                remove(number);
            }
        }
    }

    /// Returns the time when a segment was created or changed, and its id, if it may be the ring of a process of this user that has ended.
    fn forgotten(line: &str, bytes: usize, user: u32) -> Option<(u64, c_int)> {
        let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
        // The key is 0, as for all segments without a name.
        let [0, number, mode, size, _, _, attached, owner, _, _, _, _, _, changed, ..] = fields[..] else {
            return None;
        };
        let is_one = mode == 600 && size == bytes as u64 && attached == 0 && owner == u64::from(user);
        is_one.then_some((changed, number.try_into().ok()?))
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use std::sync::Arc;

    use super::{Line, RingMemory, Segment, Segments, SharedMemory, io};

    /// The memory of a ring, which is lost with the process. A clone refers to the same memory.
    #[derive(Clone, Debug)]
    pub struct RingPages(Arc<[Line]>);

    impl RingPages {
        pub fn new(count: usize) -> io::Result<Self> {
            Self::private(count)
        }

        pub fn private(count: usize) -> io::Result<Self> {
            Ok(Self((0..count).map(|_| Line::default()).collect()))
        }

        #[expect(clippy::unused_self, reason = "it is as on Linux")]
        pub fn segment(&self) -> Option<u64> {
            None
        }

        #[expect(clippy::unused_self, reason = "it is as on Linux")]
        pub fn fetch(&self) {}

        #[expect(clippy::unused_self, reason = "it is as on Linux")]
        pub fn discard(&self) {}
    }

    impl RingMemory for RingPages {
        #[inline]
        fn lines(&self) -> &[Line] {
            &self.0
        }
    }

    impl Segments for SharedMemory {
        fn read(&self, _: u64) -> io::Result<Option<Segment>> {
            Ok(None)
        }

        fn remove(&self, _: u64) {}
    }
}

/// Announces that this processor will soon write to the line. The processor then takes the line from others in the background, without
/// waiting for it.
#[inline]
pub fn prefetch_for_writing(line: &Line) {
    let line: *const Line = line;
    // SAFETY: the instruction changes no register and no memory, even if a processor does not know it.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{process, sync::atomic::Ordering::Relaxed};

    use super::*;

    #[test]
    fn what_is_stored_can_be_read_until_it_is_discarded() {
        let memory = RingPages::new(4).unwrap();
        memory.fetch();
        let words = || memory.lines().iter().flat_map(|line| &line.0);
        assert_eq!((words().count(), words().all(|word| word.load(Relaxed) == 0)), (32, true));
        memory.lines()[3].0[1].store(0x0102, Relaxed);
        let number = memory.segment().unwrap();
        let segment = SharedMemory.read(number).unwrap().unwrap();
        assert_eq!((segment.bytes.len(), &segment.bytes[3 * 64 + 8..][..3]), (256, &[2, 1, 0][..]));
        assert_eq!((segment.creator, segment.is_in_use), (Some(process::id()), true));
        memory.discard();
        memory.lines()[3].0[1].store(0x0304, Relaxed);
        drop(memory);
        assert!(SharedMemory.read(number).unwrap().is_none());
        for number in [u64::MAX, 1 << 40] {
            assert!(SharedMemory.read(number).unwrap().is_none());
            SharedMemory.remove(number);
        }
    }

    #[test]
    fn processes_share_words() {
        let memory = RingPages::new(4).unwrap();
        // Other processes find the segment by its id as long as a process has it attached.
        memory.discard();
        let number = memory.segment().unwrap();
        memory.lines()[3].0[1].store(0x0102, Relaxed);
        assert_eq!(words_of(number, 32).unwrap()[25].load(Relaxed), 0x0102);
        assert!(words_of(number, 4096).is_err() && words_of(u64::MAX, 1).is_err());
    }

    #[test]
    fn private_memory_is_no_segment() {
        let memory = RingPages::private(4).unwrap();
        memory.lines()[3].0[7].store(1, Relaxed);
        assert_eq!(memory.segment(), None);
        assert!(RingPages::private(usize::MAX / 64).is_err() && RingPages::new(usize::MAX).is_err());
    }
}
