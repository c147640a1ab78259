//! What the loader knows about the program and its libraries.

use std::{ffi::CString, path::PathBuf};

/// What the loader knows about an address.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The program or library that contains the address.
    pub(super) file: PathBuf,
    /// The address at which the file is mapped.
    #[cfg_attr(not(feature = "capture"), expect(dead_code, reason = "only recordings need it"))]
    pub(super) base: usize,
    /// The function that contains the address, if its file exports the function.
    #[cfg_attr(not(feature = "backtrace"), expect(dead_code, reason = "only stacks need functions"))]
    pub(super) symbol: Option<CString>,
}

#[cfg(all(feature = "dispatch", target_os = "linux"))]
pub(super) use self::unix::pin;

/// What the loader knows about an address. It takes the loader's lock, so hooks and callbacks must not call it.
#[doc(alias = "dladdr")]
#[cfg(unix)]
pub(super) use self::unix::at;

#[cfg(not(unix))]
pub(super) fn at(_: usize) -> Option<Loaded> {
    None
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

    pub(in super::super) fn at(address: usize) -> Option<Loaded> {
        let info = info(address)?;
        let known_as = OsStr::from_bytes(text(info.dli_fname)?.to_bytes());
        // For the program, the loader knows only the name by which it was started.
        let is_program = env::args_os().next().is_some_and(|called| called == known_as);
        let program = is_program.then(env::current_exe).and_then(Result::ok);
        Some(Loaded {
            file: program.unwrap_or_else(|| known_as.into()),
            base: info.dli_fbase.addr(),
            symbol: text(info.dli_sname).map(CStr::to_owned),
        })
    }

    /// Keeps the file with this code loaded until the process ends, even if other code closes it. The error says why this is not
    /// possible.
    #[doc(alias = "RTLD_NODELETE")]
    #[cfg(all(feature = "dispatch", target_os = "linux"))]
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
