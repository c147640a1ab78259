//! Reads the loader's data about the program and its libraries.
//!
//! # The two locks of the loader
//!
//! The loader of glibc has two locks, and this crate keeps them apart:
//!
//! - The lock of loading (`dl_load_lock`): `dlopen` and `dlclose` hold it until they return, even while they run constructors and
//!   destructors of libraries. `dlsym` and `dladdr` take it, too. A constructor may do anything, for example wait for a thread that is in a
//!   hook. Therefore hooks and callbacks of the driver must not take this lock: [`pin`], [`dl`](super::dl) and Python's functions are
//!   looked up earlier. glibc before 2.35 takes the lock anyway when a thread first uses the thread-local variables of a library that was
//!   loaded by `dlopen`.
//! - The lock of the list (`dl_load_write_lock`): `dl_iterate_phdr` holds it during all its callbacks. `dlopen` and `dlclose` hold it while
//!   they change the list, unmap a file or release its name. Under this lock, the only code of libraries that runs is callbacks of
//!   `dl_iterate_phdr`. Hooks take the lock, like unwinders do for each exception. It is always taken last: the callbacks here only copy,
//!   so the only other lock that they take is the memory allocator's, which never waits for the loader. A thread that holds the lock
//!   of loading may wait for this one, but never the other way round, so there can be no deadlock. A program that waits in its own callback
//!   for a thread in a hook would wait forever. The same is true for a thread that walks its stack.
//!
//! The loader's data about a file is valid as long as the file is loaded. Therefore all of it is copied in a callback of `dl_iterate_phdr`,
//! during which no thread can unload a file. (musl has one lock for both purposes. That lock is not held while constructors run, so the
//! same is true there.)

use std::path::PathBuf;
#[cfg(not(target_os = "linux"))]
use std::sync::Arc;

/// A loaded program or library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LoadedFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The address at which the file is mapped.
    pub base: usize,
    /// The notes of the file, which contain the id that its linker gave it. Empty if they are not in memory.
    pub notes: Vec<u8>,
}

#[cfg(target_os = "linux")]
pub(super) use self::linux::files;
#[cfg(target_os = "linux")]
pub use self::linux::files_of;

/// Returns nothing, because the loader's list is only read on Linux.
#[cfg(not(target_os = "linux"))]
pub fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
    vec![None; addresses.len()]
}

/// Returns nothing, because the loader's list is only read on Linux.
#[cfg(not(target_os = "linux"))]
pub(super) fn files() -> Vec<Arc<LoadedFile>> {
    Vec::new()
}

/// Returns the file that contains the code at an address.
pub(crate) fn file_of(address: usize) -> Option<PathBuf> {
    let file = files_of(&[address.checked_add(1)?]).pop()??;
    Some(file.path.clone())
}

#[cfg(all(feature = "dry", target_os = "linux"))]
pub(super) use self::linux::loaded_as;
#[cfg(target_os = "linux")]
pub(super) use self::linux::{headers_of_program, pin};

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        ffi::{CStr, OsStr, c_char, c_int, c_void},
        mem::{self, MaybeUninit},
        ops::Range,
        os::unix::ffi::OsStrExt,
        ptr, slice,
        sync::Arc,
    };

    use libc::{PF_R, PF_X, PT_LOAD, PT_NOTE, dl_phdr_info};

    use super::LoadedFile;
    use crate::sys::process;

    /// The page size at which files are mapped, or a divisor of it.
    const PAGE: usize = 4096;

    /// The maximum length of notes. Longer notes are not copied.
    const MOST_NOTES: usize = 1 << 12;

    #[derive(Default)]
    struct Search<'a> {
        addresses: &'a [usize],
        /// The index of the file for each address.
        found: Vec<Option<usize>>,
        /// The files that contain the addresses, or all files.
        files: Vec<LoadedFile>,
        is_of_all: bool,
    }

    /// Returns the files that contain these return addresses, and the addresses at which they are mapped. `None` if a file is not known.
    /// The lock of the loader's list is taken once for all addresses, so hooks and callbacks may call this.
    #[doc(alias = "dl_iterate_phdr")]
    pub fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
        let mut search = Search { addresses, found: vec![None; addresses.len()], ..Search::default() };
        let files = search.run();
        search.found.into_iter().map(|at| files.get(at?).cloned()).collect()
    }

    /// Returns all files that are loaded.
    pub(in super::super) fn files() -> Vec<Arc<LoadedFile>> {
        Search { is_of_all: true, ..Search::default() }.run()
    }

    unsafe extern "C" fn visit(info: *mut dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes the pointer that it received, which is to a live `Search`, and its own record.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        search.add(info);
        0
    }

    /// Returns the loaded files whose names start with `prefix`, in the order in which they were loaded.
    #[cfg(feature = "dry")]
    pub(in super::super) fn loaded_as(prefix: &str) -> Vec<std::path::PathBuf> {
        use std::path::{Path, PathBuf};

        unsafe extern "C" fn add(info: *mut dl_phdr_info, _: usize, paths: *mut c_void) -> c_int {
            // SAFETY: the loader passes the pointer that it received, which is to a live list, and its own record. It keeps the file loaded
            // during this call, and the name is copied.
            unsafe {
                let name = text((*info).dlpi_name).map(CStr::to_bytes).unwrap_or_default();
                (*paths.cast::<Vec<PathBuf>>()).push(OsStr::from_bytes(name).into());
            }
            0
        }

        let mut paths: Vec<PathBuf> = Vec::new();
        // SAFETY: `add` is called only before this returns, with this pointer, and only by this thread.
        unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut paths).cast()) };
        let has_name =
            |path: &Path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(prefix.as_bytes()));
        paths.retain(|path| has_name(path));
        paths
    }

    impl Search<'_> {
        /// Visits all files, and returns those that were searched for.
        fn run(&mut self) -> Vec<Arc<LoadedFile>> {
            // SAFETY: `visit` is called only before this returns, with this pointer, and only by this thread.
            unsafe { libc::dl_iterate_phdr(Some(visit), ptr::from_mut(self).cast()) };
            let named = |mut file: LoadedFile| {
                // The loader has no name for the program.
                if file.path.as_os_str().is_empty() {
                    file.path = process::executable().unwrap_or_default();
                }
                Arc::new(file)
            };
            mem::take(&mut self.files).into_iter().map(named).collect()
        }

        fn add(&mut self, info: &dl_phdr_info) {
            if info.dlpi_phdr.is_null() {
                return;
            }
            // SAFETY: the loader passes the headers of a file that it keeps loaded during this call.
            let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
            let start = |header: &libc::Elf64_Phdr| word(info.dlpi_addr.wrapping_add(header.p_vaddr));
            let range = |header: &libc::Elf64_Phdr| {
                let start = start(header);
                start..start.saturating_add(word(header.p_memsz.min(header.p_filesz)))
            };
            let of = |kind, flags| {
                headers.iter().filter(move |header| header.p_type == kind && header.p_flags & flags == flags)
            };
            let mut is_found = false;
            for (address, found) in self.addresses.iter().zip(&mut self.found) {
                // If a function ends with a call that never returns, the return address may be after the function, or even after the file.
                let is_inside = |code: Range<usize>| code.contains(&address.wrapping_sub(1));
                if found.is_none() && of(PT_LOAD, PF_X).map(range).any(is_inside) {
                    *found = Some(self.files.len());
                    is_found = true;
                }
            }
            if !is_found && !self.is_of_all {
                return;
            }
            let base = of(PT_LOAD, 0).map(start).min().unwrap_or(0) & !(PAGE - 1);
            let mut notes = Vec::new();
            for note in of(PT_NOTE, PF_R).map(range).filter(|note| note.len() <= MOST_NOTES) {
                let is_around = |part: Range<usize>| part.start <= note.start && note.end <= part.end;
                if of(PT_LOAD, PF_R).map(range).any(is_around) {
                    // SAFETY: the loader has mapped this part of the file, readable, and keeps it mapped during this call.
                    notes.extend_from_slice(unsafe {
                        slice::from_raw_parts(ptr::with_exposed_provenance(note.start), note.len())
                    });
                }
            }
            // SAFETY: the loader keeps the file loaded during this call, and the name is copied below.
            let name = unsafe { text(info.dlpi_name) }.map(CStr::to_bytes);
            self.files.push(LoadedFile { path: OsStr::from_bytes(name.unwrap_or_default()).into(), base, notes });
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on Linux")]
    const fn word(value: u64) -> usize {
        value as usize
    }

    /// Keeps the file that contains this code loaded until the process ends, even if other code closes it. If that is not possible, the
    /// error is the reason. Takes the lock of loading.
    #[doc(alias = "RTLD_NODELETE")]
    pub(in super::super) fn pin() -> Result<(), String> {
        let here = info(pin as *const () as usize).ok_or("the loader does not know gpumem's file")?;
        // The program itself is never unloaded.
        if info(headers_of_program()).is_some_and(|program| program.dli_fbase == here.dli_fbase) {
            return Ok(());
        }
        // SAFETY: the file is the one with this code, which runs, so it stays loaded.
        let file = unsafe { text(here.dli_fname) }.ok_or("the loader has no name for gpumem's file")?;
        // SAFETY: the name is the loader's own; with `RTLD_NOLOAD` nothing is loaded, and no initializer runs.
        let pinned = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
        if pinned.is_null() {
            return Err(format!("{} cannot be kept loaded", file.to_string_lossy()));
        }
        Ok(())
    }

    /// Returns the address of the program's own headers, which the kernel provides.
    #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on Linux")]
    pub(in super::super) fn headers_of_program() -> usize {
        // SAFETY: `getauxval` accepts any value.
        unsafe { libc::getauxval(libc::AT_PHDR) as usize }
    }

    /// Returns the result of `dladdr` for an address. Its strings are valid as long as the file is loaded.
    fn info(address: usize) -> Option<libc::Dl_info> {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `dladdr` accepts any address, since it only compares it; `info` is a live `Dl_info`, for which zeros are a valid
        // value.
        unsafe {
            let found = libc::dladdr(ptr::without_provenance::<c_void>(address), info.as_mut_ptr());
            (found != 0).then(|| info.assume_init())
        }
    }

    /// Returns a string of the loader or of a loaded file.
    ///
    /// # Safety
    /// `text` must be null, or a string of a file that stays loaded as long as the string is used.
    unsafe fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
        // SAFETY: required by this function's contract.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}
