//! The program and the loaded libraries, by address, with their unwind tables.

use std::{
    ffi::{CStr, c_int, c_void},
    ops::{ControlFlow, Range},
    slice,
    sync::{Arc, Mutex, TryLockError},
};

use libc::{PF_R, PF_X, PT_GNU_EH_FRAME, PT_LOAD, dl_phdr_info};

/// The numbers of libraries that were loaded and unloaded so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Generation {
    loaded: u64,
    pub(super) unloaded: u64,
}

/// One segment of code of a file.
#[derive(Clone, Debug)]
pub(super) struct Module {
    pub(super) code: Range<u64>,
    /// `.eh_frame_hdr` with its table, up to the end of the section.
    pub(super) index: Range<u64>,
    /// The readable segments of the file; `.eh_frame` is in one of them.
    readable: Arc<[Range<u64>]>,
    /// True if the functions of this file are left out of stacks.
    pub(super) is_skipped: bool,
}

#[derive(Debug, Default)]
pub(super) struct Modules {
    pub(super) generation: Generation,
    /// The modules, by address.
    all: Vec<Module>,
}

/// The latest list, shared by all threads.
static LATEST: Mutex<Option<Arc<Modules>>> = Mutex::new(None);

impl Modules {
    /// Returns the list of loaded files; `known` is the list that the caller has. Returns `None` if the loader has no counters that show
    /// changes.
    ///
    /// This takes the lock of the loader's list, like the unwinder of the system: see [`loader`](crate::sys::loader).
    pub(super) fn current(known: Option<&Arc<Self>>, is_skipped: fn(&[u8]) -> bool) -> Option<Arc<Self>> {
        let generation = Generation::now()?;
        if let Some(known) = known.filter(|known| known.generation == generation) {
            return Some(Arc::clone(known));
        }
        // In the child process of a fork, `lock` could wait forever for a thread that does not exist there.
        let mut latest = match LATEST.try_lock() {
            Ok(latest) => latest,
            Err(TryLockError::Poisoned(latest)) => latest.into_inner(),
            Err(TryLockError::WouldBlock) => return Some(Arc::new(Self::read(is_skipped))),
        };
        if latest.as_ref().is_none_or(|latest| latest.generation != generation) {
            *latest = Some(Arc::new(Self::read(is_skipped)));
        }
        latest.clone()
    }

    fn read(is_skipped: fn(&[u8]) -> bool) -> Self {
        let mut read = Self::default();
        each(|info| {
            read.generation = Generation::of(info);
            read.add(info, is_skipped);
            ControlFlow::Continue(())
        });
        read.all.sort_unstable_by_key(|module| module.code.start);
        read
    }

    fn add(&mut self, info: &dl_phdr_info, is_skipped: fn(&[u8]) -> bool) {
        if info.dlpi_phdr.is_null() {
            return;
        }
        // SAFETY: the loader passes the headers of a file that it keeps loaded during this call.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let of =
            |kind, flags| headers.iter().filter(move |header| header.p_type == kind && header.p_flags & flags == flags);
        let range = |header: &libc::Elf64_Phdr| {
            let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
            start..start.saturating_add(header.p_memsz.min(header.p_filesz))
        };
        let readable: Arc<[_]> = of(PT_LOAD, PF_R).map(range).collect();
        let index =
            of(PT_GNU_EH_FRAME, PF_R).map(range).find(|index| covering(&readable, index.start) >= Some(index.end));
        let Some(index) = index else { return };
        // SAFETY: a name that is not null is a string of the loader, which keeps the file loaded during this call.
        let name = (!info.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes());
        let is_skipped = name.is_some_and(is_skipped);
        let segment = |code| Module { code, index: index.clone(), readable: Arc::clone(&readable), is_skipped };
        self.all.extend(of(PT_LOAD, PF_X).map(range).map(segment));
    }

    pub(super) fn of(&self, address: u64) -> Option<&Module> {
        let after = self.all.partition_point(|module| module.code.start <= address);
        self.all[..after].last().filter(|module| module.code.contains(&address))
    }
}

impl Module {
    /// Returns the end of the readable segment that contains this address.
    pub(super) fn readable_up_to(&self, address: u64) -> Option<u64> {
        covering(&self.readable, address)
    }
}

fn covering(ranges: &[Range<u64>], address: u64) -> Option<u64> {
    ranges.iter().find(|range| range.contains(&address)).map(|range| range.end)
}

impl Generation {
    fn of(info: &dl_phdr_info) -> Self {
        Self { loaded: info.dlpi_adds, unloaded: info.dlpi_subs }
    }

    fn now() -> Option<Self> {
        let mut now = None;
        each(|info| {
            now = Some(Self::of(info));
            ControlFlow::Break(())
        });
        now
    }
}

/// Calls `visit` with each loaded file, or not at all if the loader is too old to have the counters.
fn each<F: FnMut(&dl_phdr_info) -> ControlFlow<()>>(mut visit: F) {
    unsafe extern "C" fn one<F: FnMut(&dl_phdr_info) -> ControlFlow<()>>(
        info: *mut dl_phdr_info,
        size: usize,
        visit: *mut c_void,
    ) -> c_int {
        if size < size_of::<dl_phdr_info>() {
            return 1;
        }
        // SAFETY: the loader passes the pointer that it received, which is to the closure below and valid until the loader returns,
        // and a record of its own, which is at least as long as `size`.
        let (info, visit) = unsafe { (&*info, &mut *visit.cast::<F>()) };
        visit(info).is_break().into()
    }
    // SAFETY: `one` is called only before this returns, with this pointer, and only by this thread.
    unsafe { libc::dl_iterate_phdr(Some(one::<F>), (&raw mut visit).cast()) };
}

#[cfg(test)]
impl Modules {
    pub(super) fn all(&self) -> &[Module] {
        &self.all
    }

    /// Creates a list for a test.
    pub(super) fn with(all: Vec<Module>) -> Self {
        Self { generation: Generation::default(), all }
    }
}

#[cfg(test)]
impl Module {
    /// Returns a module with one readable segment.
    pub(super) fn with(code: Range<u64>, index: Range<u64>, readable: Range<u64>) -> Self {
        Self { code, index, readable: std::iter::once(readable).collect(), is_skipped: false }
    }
}
