//! Finds an address in the tables that compilers write for exceptions (`.eh_frame`).

use std::{ops::Range, ptr, slice};

use gimli::{
    BaseAddresses, EhFrame, EhFrameHdr, EndianSlice, FrameDescriptionEntry, NativeEndian, ParsedEhFrameHdr, Register,
    UnwindContext, UnwindSection, Vendor,
};

use super::{
    modules::Module,
    rules::{Bytes, CALLEE_SAVED, InPlace, RETURN_ADDRESS, UnwindRule},
};

/// Returns the rule for an address, from the tables of its module. `None` if there is no rule, or if it is not supported here.
///
/// # Safety
/// The file of the module must be loaded, and must not be unloaded during the call.
pub(super) unsafe fn rule_for(
    module: &Module,
    address: u64,
    context: &mut UnwindContext<usize, InPlace>,
) -> Option<UnwindRule> {
    // SAFETY: required by this function's contract.
    let tables = unsafe { Tables::of(module) }?;
    let entry = tables.entry(address)?;
    if entry.is_signal_trampoline()
        || entry.cie().return_address_register() != Register(CALLEE_SAVED[usize::from(RETURN_ADDRESS)])
    {
        return None;
    }
    let row = entry.unwind_info_for_address(&tables.entries, &tables.bases, context, address).ok()?;
    UnwindRule::of(row, &tables.entries, entry.cie().encoding(), module.is_skipped)
}

/// The tables of a module, in its file.
pub(super) struct Tables<'a> {
    pub(super) bases: BaseAddresses,
    /// The entries, sorted by address.
    pub(super) index: ParsedEhFrameHdr<Bytes<'a>>,
    start: u64,
    entries: EhFrame<Bytes<'a>>,
}

impl<'a> Tables<'a> {
    /// # Safety
    /// The file of the module must be loaded, and stay loaded as long as the tables are used.
    pub(super) unsafe fn of(module: &'a Module) -> Option<Self> {
        // SAFETY: the file is loaded, and the ranges are in a segment of it that is readable.
        let bytes = |range: Range<u64>| EndianSlice::new(unsafe { memory(range) }, NativeEndian);
        let bases = BaseAddresses::default().set_eh_frame_hdr(module.index.start);
        let index = EhFrameHdr::from(bytes(module.index.clone())).parse(&bases, 8).ok()?;
        let start = index.eh_frame_ptr().direct().ok()?;
        let mut entries = EhFrame::from(bytes(start..module.readable_up_to(start)?));
        entries.set_address_size(8);
        if cfg!(target_arch = "aarch64") {
            entries.set_vendor(Vendor::AArch64);
        }
        Some(Self { bases: bases.set_eh_frame(start), index, start, entries })
    }

    /// Returns the entry for the function nearest to an address. Its rows contain the addresses to which they apply.
    pub(super) fn entry(&self, address: u64) -> Option<FrameDescriptionEntry<Bytes<'a>>> {
        let offset = self.index.table()?.lookup(address, &self.bases).ok()?.direct().ok()?.checked_sub(self.start)?;
        let offset = usize::try_from(offset).ok()?;
        self.entries.fde_from_offset(&self.bases, offset.into(), EhFrame::cie_from_offset).ok()
    }
}

/// Returns the memory in a range of addresses.
///
/// # Safety
/// The memory must be readable, and must not change while the slice is used.
pub(super) unsafe fn memory<'a>(range: Range<u64>) -> &'a [u8] {
    let length = address_of(range.end.saturating_sub(range.start));
    // SAFETY: required by this function's contract.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(address_of(range.start)), length) }
}

/// Returns an address in this process, or a length.
#[allow(clippy::cast_possible_truncation, reason = "this is built only for 64-bit processors")]
pub(super) fn address_of(word: u64) -> usize {
    word as usize
}
