//! Finds and checks the slots of this process's driver.

use std::{
    ffi::{CString, c_void},
    mem,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst},
};

use libloading::Library;
use once_cell::sync::OnceCell;

use super::{
    image::Image,
    stub::Processor,
    verify::{VerifiedStub, verify},
};
use crate::{
    error::{Error, Kind},
    sys::{calls::CALLS, cuda, dl, loader},
};

/// The names are tried in this order, because programs load the first one. The second may be another library that is installed next to it.
const NAMES: &[&str] = &["libcuda.so.1", "libcuda.so"];

const PROCESSOR: Processor = if cfg!(target_arch = "x86_64") { Processor::X86_64 } else { Processor::Arm64 };

/// The slots of the functions that this driver has.
pub(super) struct DispatchTable {
    /// The path of the driver.
    pub(super) path: String,
    pub(super) slots: Vec<Slot>,
}

pub(super) struct Slot {
    /// The function's row in the list of names.
    pub(super) row: usize,
    /// The pointer in the driver's data. It is always valid, because the driver is never unloaded.
    pointer: &'static AtomicUsize,
    /// The driver's own implementation.
    pub(super) driver: usize,
    /// Our function for the slot; 0 before the first subscription.
    hook: AtomicUsize,
}

impl Slot {
    fn replace(&self, old: usize, new: usize) -> bool {
        self.pointer.compare_exchange(old, new, SeqCst, Relaxed).is_ok()
    }

    /// Returns the bits in which the value of the slot differs from our hook.
    #[inline]
    pub(super) fn difference(&self) -> usize {
        self.pointer.load(Relaxed) ^ self.hook.load(Relaxed)
    }

    /// Sets the function that [`install`](Self::install) will put into the slot.
    pub(super) fn set_hook(&self, hook: usize) {
        self.hook.store(hook, Relaxed);
    }

    /// Puts the hook into the slot. Returns whether the slot holds it. The slot may hold the hook already: when the last subscription
    /// ended, the slot may have held another tool's pointer, and that tool may have restored our hook since.
    pub(super) fn install(&self) -> bool {
        let hook = self.hook.load(Relaxed);
        self.replace(self.driver, hook) || self.pointer.load(SeqCst) == hook
    }

    /// Puts the driver's own implementation back into the slot, if the slot holds the hook.
    pub(super) fn restore(&self) {
        self.replace(self.hook.load(Relaxed), self.driver);
    }
}

pub(super) fn unusable(detail: impl Into<String>) -> Error {
    Kind::NoDispatch { detail: detail.into() }.into()
}

/// Returns the table of this process's driver. The first call finds and checks it.
pub(super) fn table() -> Result<&'static DispatchTable, Error> {
    static TABLE: OnceCell<Result<DispatchTable, Error>> = OnceCell::new();
    let find = || DispatchTable::find(CALLS.iter().map(|(_, name, _)| *name).enumerate());
    TABLE.get_or_init(find).as_ref().map_err(Clone::clone)
}

impl DispatchTable {
    /// Finds the slots of these functions. Each function has a row in a list.
    pub(super) fn find(names: impl Iterator<Item = (usize, &'static str)>) -> Result<Self, Error> {
        let (library, _) = dl::open(cuda::LIBRARY, NAMES.iter().map(PathBuf::from))?;
        // A function that the driver does not have is never called, so it needs no slot.
        let rows: Vec<(usize, &str, usize)> =
            names.filter_map(|(row, name)| Some((row, name, symbol(&library, name)?))).collect();
        let (_, name, address) = rows.first().ok_or_else(|| unusable("the driver has none of the functions"))?;
        let nowhere = || unusable(format!("{name} is in no library"));
        let image = Image::around(*address).ok_or_else(nowhere)?;
        let path = loader::file_of(*address).ok_or_else(nowhere)?;
        let functions: Vec<_> = rows.iter().map(|(_, name, address)| (*name, *address)).collect();
        let stubs = verify(&image, PROCESSOR, &functions).map_err(unusable)?;
        let slot = |((row, ..), verified): (&(usize, &str, usize), VerifiedStub)| {
            // SAFETY: the slot is aligned and in the writable data of the driver, which is never unloaded because `library` is
            // forgotten below. The driver itself reads it as one pointer.
            let pointer = unsafe { AtomicUsize::from_ptr(verified.stub.slot as *mut usize) };
            // In a dry run, this is the function that replaces the driver's.
            Slot { row: *row, pointer, driver: pointer.load(SeqCst), hook: AtomicUsize::new(0) }
        };
        let slots = rows.iter().zip(stubs).map(slot).collect();
        // The slots stay valid, because the library is never unloaded.
        mem::forget(library);
        Ok(Self { path: path.display().to_string(), slots })
    }
}

fn symbol(library: &Library, name: &str) -> Option<usize> {
    let name = CString::new(name).ok()?;
    // SAFETY: the symbol is only looked up, as an address that is not called; the library stays loaded.
    unsafe { library.get::<*const c_void>(name.as_bytes_with_nul()).ok()?.try_as_raw_ptr() }.map(|at| at as usize)
}
