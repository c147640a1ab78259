//! The arguments of a call, and the C structs that they point to.

use std::ffi::c_int;

use super::call::{Call, IdKind, MemoryKind};

/// The arguments of one call: as many 64-bit words as the call's row in [`CALLS`](super::CALLS) has.
#[derive(Clone, Copy)]
pub(in crate::sys) struct Arguments(*const u64);

impl Arguments {
    /// # Safety
    /// `words` must point to the arguments of a call, and stay valid as long as the returned value is used.
    #[inline]
    pub(in crate::sys) unsafe fn new(words: *const u64) -> Self {
        Self(words)
    }

    /// Returns the argument with this index.
    ///
    /// # Safety
    /// The call must have 64-bit arguments up to this one. This one may be narrower; then the upper half of the word is meaningless.
    #[inline]
    pub(super) unsafe fn word(self, at: usize) -> u64 {
        // SAFETY: the pointer is to the arguments, and this function's contract requires that this is one of them.
        unsafe { self.0.add(at).read() }
    }

    /// Returns the word that the call wrote to the address in its first argument.
    ///
    /// # Safety
    /// The call must have succeeded, and its first argument must be the address of one word that it writes.
    #[inline]
    pub(super) unsafe fn out(self) -> u64 {
        // SAFETY: the call succeeded, so it has written the word.
        unsafe { (self.word(0) as *const u64).read() }
    }
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
pub(super) struct ArrayDescriptor {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) format: u32,
    pub(super) channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
pub(super) struct Array3DDescriptor {
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
    pub(super) format: u32,
    pub(super) channels: u32,
    pub(super) flags: u32,
}

/// The first fields of `CUmemAllocationProp` and of `CUmemPoolProps`, which are the same in both.
#[repr(C)]
pub(super) struct MemoryProperties {
    pub(super) kind: u32,
    pub(super) handle_types: u32,
    pub(super) location: u32,
    pub(super) id: c_int,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<ArrayDescriptor>() == 24);
    assert!(size_of::<Array3DDescriptor>() == 40);
    assert!(std::mem::offset_of!(MemoryProperties, location) == 8);
};

/// Returns the device on which memory with these properties is allocated, or `None` for the host.
///
/// # Safety
/// `properties` must be the address of a `CUmemAllocationProp` or a `CUmemPoolProps`.
pub(super) unsafe fn device_of_properties(properties: u64) -> Option<u32> {
    const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
    // SAFETY: both structs start with these four fields.
    let MemoryProperties { location, id, .. } = unsafe { (properties as *const MemoryProperties).read() };
    (location == CU_MEM_LOCATION_TYPE_DEVICE).then(|| u32::try_from(id).ok()).flatten()
}

/// Returns the allocation of an array. Its size is the sum of the sizes of its elements; the driver may add padding.
pub(super) fn allocated_array(
    id: u64,
    [width, height, depth]: [usize; 3],
    format: u32,
    channels: u32,
    levels: u32,
) -> Call {
    let element = match format {
        // CU_AD_FORMAT_UNSIGNED_INT8 and SIGNED_INT8.
        0x01 | 0x08 => 1_u64,
        // UNSIGNED_INT16, SIGNED_INT16 and HALF.
        0x02 | 0x09 | 0x10 => 2,
        // UNSIGNED_INT32, SIGNED_INT32 and FLOAT.
        0x03 | 0x0a | 0x20 => 4,
        _ => return Call::Uncounted,
    };
    let level = |level: u32| {
        let side = |side: usize| (side as u64).checked_shr(level).unwrap_or(0).max(1);
        side(width).saturating_mul(side(height)).saturating_mul(side(depth))
    };
    let elements = (0..levels.min(64)).map(level).fold(0, u64::saturating_add);
    let bytes = elements.saturating_mul(element).saturating_mul(channels.into());
    Call::Allocated { id_kind: IdKind::Array, id, bytes, memory: MemoryKind::Device }
}
