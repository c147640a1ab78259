//! The program and its libraries, as the loader knows them.

use std::{
    env,
    ffi::{CStr, OsStr, c_void},
    mem::MaybeUninit,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    ptr,
};

/// The file that an address is in.
#[doc(alias = "dladdr")]
pub(super) fn file_of(address: usize) -> Option<PathBuf> {
    let info = info(address)?;
    let known_as = OsStr::from_bytes(name(&info)?.to_bytes());
    // Of the program the loader knows only what it was called by.
    let is_program = env::args_os().next().is_some_and(|called| called == known_as);
    let program = is_program.then(env::current_exe).and_then(Result::ok);
    Some(program.unwrap_or_else(|| known_as.into()))
}

/// Keeps the file that this code is in loaded until the process ends, whoever closes it. The error says why that is not
/// possible.
#[doc(alias = "RTLD_NODELETE")]
pub(super) fn pin() -> Result<(), String> {
    let here = info(pin as *const () as usize).ok_or("the loader does not know the file of gpumem")?;
    // The kernel says where the program's headers are: what begins where they do is the program, and stays anyway.
    // SAFETY: `getauxval` may be asked for anything.
    let program = unsafe { libc::getauxval(libc::AT_PHDR) };
    #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on Linux")]
    if info(program as usize).is_some_and(|program| program.dli_fbase == here.dli_fbase) {
        return Ok(());
    }
    let file = name(&here).ok_or("the loader has no name for the file of gpumem")?;
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

fn name(info: &libc::Dl_info) -> Option<&CStr> {
    // SAFETY: it is a string of the loader's, which lives as long as the file stays loaded. Callers ask about files that they
    // hold, or are in.
    (!info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) })
}
