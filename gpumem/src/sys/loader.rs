//! What the loader knows about the program and its libraries.

#[cfg(all(feature = "backtrace", not(target_os = "linux")))]
use std::sync::Arc;
use std::{ffi::CString, path::PathBuf};

/// What the loader knows about an address.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The program or library that contains the address.
    pub(super) file: PathBuf,
    /// The function that contains the address, if its file exports the function.
    #[cfg_attr(not(feature = "backtrace"), expect(dead_code, reason = "only stacks need functions"))]
    pub(super) symbol: Option<CString>,
}

/// A program or library that is loaded.
#[cfg(feature = "backtrace")]
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LoadedFile {
    pub(crate) path: PathBuf,
    /// The address at which it is mapped.
    pub(crate) base: usize,
    /// Its notes, which have the name that its linker gave it. Empty if they are not in memory.
    pub(crate) notes: Vec<u8>,
}

/// The files that contain these return addresses. One look at the loader's list for all of them, and unlike [`at`] without a search
/// for functions, which takes milliseconds in large libraries. It takes the loader's lock, as the unwinder of the system does.
#[cfg(all(feature = "backtrace", target_os = "linux"))]
#[doc(alias = "dl_iterate_phdr")]
pub(crate) use self::linux::files_of;

#[cfg(all(feature = "backtrace", not(target_os = "linux")))]
pub(crate) fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
    let file = |address: &usize| {
        let found = at(address.checked_sub(1)?)?;
        Some(Arc::new(LoadedFile { path: found.file, ..LoadedFile::default() }))
    };
    addresses.iter().map(file).collect()
}

#[cfg(target_os = "linux")]
pub(super) use self::unix::pin;

/// What the loader knows about an address. It takes the loader's lock, so hooks and callbacks must not call it.
#[doc(alias = "dladdr")]
#[cfg(unix)]
pub(super) use self::unix::at;

#[cfg(not(unix))]
pub(super) fn at(_: usize) -> Option<Loaded> {
    None
}

#[cfg(all(feature = "backtrace", target_os = "linux"))]
mod linux {
    use std::{
        ffi::{CStr, OsStr, c_int, c_void},
        ops::Range,
        os::unix::ffi::OsStrExt,
        slice,
        sync::Arc,
    };

    use libc::{PF_R, PF_X, PT_LOAD, PT_NOTE, dl_phdr_info};

    use super::LoadedFile;
    use crate::sys::process;

    /// Files are mapped at pages of this size, or of a multiple of it.
    const PAGE: usize = 4096;

    /// Longer notes are not copied.
    const MOST_NOTES: usize = 1 << 12;

    struct Search<'a> {
        addresses: &'a [usize],
        /// For each address, the index of its file.
        found: Vec<Option<usize>>,
        files: Vec<LoadedFile>,
    }

    pub(crate) fn files_of(addresses: &[usize]) -> Vec<Option<Arc<LoadedFile>>> {
        let mut search = Search { addresses, found: vec![None; addresses.len()], files: Vec::new() };
        // SAFETY: `visit` is called only before this returns, with this pointer, and only by this thread.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        let Search { found, files, .. } = search;
        let named = |mut file: LoadedFile| {
            // The loader has no name for the program.
            if file.path.as_os_str().is_empty() {
                file.path = process::executable().unwrap_or_default();
            }
            Arc::new(file)
        };
        let files: Vec<_> = files.into_iter().map(named).collect();
        found.into_iter().map(|at| files.get(at?).cloned()).collect()
    }

    unsafe extern "C" fn visit(info: *mut dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the loader passes the pointer that it received, which is to a live `Search`, and a record of its own.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        search.add(info);
        0
    }

    impl Search<'_> {
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
                // After a call that never returns, the return address may be behind the function, and even behind the file.
                let is_inside = |code: Range<usize>| code.contains(&address.wrapping_sub(1));
                if found.is_none() && of(PT_LOAD, PF_X).map(range).any(is_inside) {
                    *found = Some(self.files.len());
                    is_found = true;
                }
            }
            if !is_found {
                return;
            }
            let base = of(PT_LOAD, 0).map(start).min().unwrap_or(0) & !(PAGE - 1);
            let mut notes = Vec::new();
            for note in of(PT_NOTE, PF_R).map(range).filter(|note| note.len() <= MOST_NOTES) {
                let is_around = |part: Range<usize>| part.start <= note.start && note.end <= part.end;
                if of(PT_LOAD, PF_R).map(range).any(is_around) {
                    // SAFETY: the loader has mapped this part of the file, readable, and keeps it mapped during this call.
                    notes.extend_from_slice(unsafe {
                        slice::from_raw_parts(std::ptr::with_exposed_provenance(note.start), note.len())
                    });
                }
            }
            // SAFETY: a name that is not null is a string of the loader, which is valid as long as the file is loaded.
            let name = (!info.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes());
            self.files.push(LoadedFile { path: OsStr::from_bytes(name.unwrap_or_default()).into(), base, notes });
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on Linux")]
    const fn word(value: u64) -> usize {
        value as usize
    }
}

#[cfg(unix)]
mod unix {
    use std::{
        env,
        ffi::{CStr, OsStr, c_char, c_void},
        mem::MaybeUninit,
        os::unix::ffi::OsStrExt,
        ptr,
    };

    use super::Loaded;
    use crate::sys::process;

    pub(in super::super) fn at(address: usize) -> Option<Loaded> {
        let info = info(address)?;
        let known_as = OsStr::from_bytes(text(info.dli_fname)?.to_bytes());
        // For the program, the loader knows only the name by which it was started.
        let is_program = env::args_os().next().is_some_and(|called| called == known_as);
        let program = is_program.then(process::executable).and_then(Result::ok);
        Some(Loaded {
            file: program.unwrap_or_else(|| known_as.into()),
            symbol: text(info.dli_sname).map(CStr::to_owned),
        })
    }

    /// Keeps the file with this code loaded until the process ends, even if other code closes it. The error says why this is not
    /// possible.
    #[doc(alias = "RTLD_NODELETE")]
    #[cfg(target_os = "linux")]
    pub(in super::super) fn pin() -> Result<(), String> {
        let here = info(pin as *const () as usize).ok_or("the loader does not know the file of gpumem")?;
        // The program itself is never unloaded. The kernel knows the address of its headers.
        // SAFETY: `getauxval` accepts any value.
        let program = unsafe { libc::getauxval(libc::AT_PHDR) };
        #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on Linux")]
        if info(program as usize).is_some_and(|program| program.dli_fbase == here.dli_fbase) {
            return Ok(());
        }
        let file = text(here.dli_fname).ok_or("the loader has no name for the file of gpumem")?;
        // SAFETY: the name is the loader's own; with `RTLD_NOLOAD` nothing is loaded, and no initialiser runs.
        let pinned = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
        if pinned.is_null() {
            return Err(format!("{} cannot be kept loaded", file.to_string_lossy()));
        }
        Ok(())
    }

    fn info(address: usize) -> Option<libc::Dl_info> {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `dladdr` accepts any address, since it only compares it; `info` is a live `Dl_info`, for which zeros are a valid
        // value.
        unsafe {
            let found = libc::dladdr(ptr::without_provenance::<c_void>(address), info.as_mut_ptr());
            (found != 0).then(|| info.assume_init())
        }
    }

    /// A string of the loader or of a loaded file. The caller copies it at once.
    fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
        // SAFETY: the string is terminated, and valid as long as the file is loaded. `dladdr` cannot prevent that the file is
        // unloaded at this moment. Its callers ask only about the driver, gpumem's own file, and files that allocate GPU memory,
        // which are not unloaded in practice.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}
