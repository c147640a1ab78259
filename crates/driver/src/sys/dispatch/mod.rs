//! The driver's dispatch table. Each function that `libcuda` exports is a stub, which calls the implementation through a pointer in
//! libcuda's writable data: the slot. A hook in the slot sees every call, however the caller found the function, and no code is patched.
//!
//! NVIDIA does not document the table. Therefore each function is checked before a slot is replaced: the instructions of its stub
//! ([`stub`]), the location of its slot ([`image`]), that no other function uses the slot, and that the slot still points into the driver's
//! own code ([`verify`]). If one check fails, no slot is replaced.

#[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub mod dry;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod hooks;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod image;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod slots;
#[cfg(any(test, all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod stub;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod subscription;
#[cfg(any(test, all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod verify;

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod subscription {
    //! On other systems the table is not known.

    use crate::{
        error::{Error, Kind},
        sys::calls::Observe,
    };

    pub(crate) fn check_available() -> Result<(), Error> {
        let detail = "it is known only on Linux on x86-64 and arm64".to_owned();
        Err(Kind::NoDispatch { detail }.into())
    }

    pub(crate) fn subscribe<O: Observe>() -> Result<(), Error> {
        check_available()
    }

    pub(crate) fn unsubscribe() {}

    pub(crate) fn subscribed() -> Option<&'static str> {
        None
    }

    pub(crate) fn displaced() -> u128 {
        0
    }

    #[cfg(feature = "dry")]
    pub(crate) fn replace_cards(_: crate::settings::Card) -> Result<(), Error> {
        check_available()
    }
}

#[cfg(all(feature = "dry", target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use self::dry::replace_cards;
#[cfg(all(feature = "dry", not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))))]
pub(crate) use self::subscription::replace_cards;
pub(crate) use self::subscription::{check_available, displaced, subscribe, subscribed, unsubscribe};
