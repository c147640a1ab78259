//! The driver's dispatch table: `libcuda` calls the implementation of each exported function through a pointer in its own
//! writable data, its slot. A hook in the slot sees every call, however the caller found the function, and no code is
//! patched.
//!
//! NVIDIA does not document the table. So nothing is replaced before every function was checked: the instructions of its
//! stub ([`stub`]), where its slot lies ([`image`]), and that the slot is the function's alone and still holds a pointer into the
//! driver's own code ([`verify`]). If one of them differs, none is used.

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod image;
#[cfg(any(test, all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod stub;
#[cfg(any(test, all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod verify;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod table;
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod table {
    //! Elsewhere the table is not known.

    use crate::{
        error::{Error, Kind},
        sys::calls::Observe,
    };

    pub(crate) fn is_there() -> Result<(), Error> {
        let detail = "it is known on Linux on x86-64 and arm64 alone".to_owned();
        Err(Kind::NoDispatch { detail }.into())
    }

    pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
        is_there()
    }

    pub(crate) fn unsubscribe() {}

    pub(crate) fn subscribed() -> Option<&'static str> {
        None
    }

    pub(crate) fn displaced() -> u128 {
        0
    }
}

#[cfg(feature = "bench")]
pub(crate) use self::table::rehearsal;
pub(crate) use self::table::{displaced, is_there, subscribe, subscribed, unsubscribe};
