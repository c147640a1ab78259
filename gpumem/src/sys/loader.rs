//! The program and its libraries, as the loader knows them.

use std::{ffi::CString, path::PathBuf};

/// What the loader knows of an address.
#[derive(Debug)]
pub(super) struct Loaded {
    /// The program or library that it is in.
    pub(super) file: PathBuf,
    /// The function around it, if its file exports it.
    #[cfg_attr(not(feature = "backtrace"), expect(dead_code, reason = "stacks alone have functions"))]
    pub(super) symbol: Option<CString>,
}

#[cfg(all(feature = "dispatch", target_os = "linux"))]
pub(super) use self::unix::pin;

/// It takes the loader's lock: not for hooks and callbacks.
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

    /// What the loader knows of this address.
    pub(in super::super) fn at(address: usize) -> Option<Loaded> {
        let info = info(address)?;
        let known_as = OsStr::from_bytes(text(info.dli_fname)?.to_bytes());
        // Of the program the loader knows only what it was called by.
        let is_program = env::args_os().next().is_some_and(|called| called == known_as);
        let program = is_program.then(env::current_exe).and_then(Result::ok);
        Some(Loaded {
            file: program.unwrap_or_else(|| known_as.into()),
            symbol: text(info.dli_sname).map(CStr::to_owned),
        })
    }

    /// Keeps the file that this code is in loaded until the process ends, whoever closes it. The error says why that is not
    /// possible.
    #[doc(alias = "RTLD_NODELETE")]
    #[cfg(all(feature = "dispatch", target_os = "linux"))]
    pub(in super::super) fn pin() -> Result<(), String> {
        let here = info(pin as *const () as usize).ok_or("the loader does not know the file of gpumem")?;
        // The kernel says where the program's headers are: what begins where they do is the program, and stays anyway.
        // SAFETY: `getauxval` may be asked for anything.
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
        // SAFETY: any address may be asked about, since it is only compared; `info` is a live `Dl_info`, for which zeros are
        // a value.
        unsafe {
            let found = libc::dladdr(ptr::without_provenance::<c_void>(address), info.as_mut_ptr());
            (found != 0).then(|| info.assume_init())
        }
    }

    /// A string of the loader's or of a loaded file, copied at once by who asks.
    fn text<'a>(text: *const c_char) -> Option<&'a CStr> {
        // SAFETY: it ends, and lives as long as the file stays loaded. `dladdr` leaves it to its callers that nobody unloads
        // the file in this very moment: the files that are asked about are the driver, gpumem's own, and those that made an
        // allocation of GPU memory, which are not unloaded in practice.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}
