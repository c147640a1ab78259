//! Executes or skips copies. A copy of dry memory to the host writes one byte, repeated.
//!
//! A skipped copy returns the same error as the driver would. The program may have mixed up addresses, and gpumem must not touch memory
//! that the driver would not touch.

use std::{
    io::{self, ErrorKind},
    mem::MaybeUninit,
};

use cudarc::driver::sys;

use super::{
    behind::is_freed,
    contents::Content,
    memory::Backing,
    state::{ALWAYS_REAL, CUDA_ERROR_INVALID_VALUE, Real, SUCCESS, get, has_any_dry, inside, is_dry, memory, watch},
    table::Place,
    work::{fill, fill_byte, value_read},
};

/// Addresses on one side of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    place: Place,
    address: u64,
    bytes: u64,
}

impl Range {
    pub(super) fn new(place: Place, address: u64, bytes: u64) -> Self {
        Self { place, address, bytes }
    }

    /// Returns whether the copy must not be executed because of this side.
    fn is_skipped(&self) -> bool {
        matches!(self.place, Place::Device | Place::Either) && is_dry(self.address)
    }

    /// Returns whether this side is memory of the host.
    fn is_on_host(&self) -> bool {
        match self.place {
            Place::Host => true,
            Place::Either => !is_dry(self.address) && attribute(self.address, KIND) != Some(CU_MEMORYTYPE_DEVICE),
            Place::Device | Place::Array => false,
        }
    }

    /// Returns whether the driver would use all of these addresses.
    fn is_valid(&self) -> bool {
        let Self { place, address, bytes } = *self;
        if bytes == 0 || place == Place::Array {
            return true;
        }
        let around = memory().around(address, bytes);
        let is_known = || attribute(address, KIND).is_some();
        match (around, place) {
            // The host may access managed memory, but no other memory of a GPU.
            (Some((backing, is_inside)), Place::Host) => is_inside && backing == Backing::Managed,
            (Some((_, is_inside)), _) => is_inside,
            (None, Place::Device) => is_known(),
            (None, Place::Host) => {
                let is_device = attribute(address, KIND) == Some(CU_MEMORYTYPE_DEVICE);
                (!is_device || attribute(address, IS_MANAGED) == Some(1)) && self.is_mapped()
            }
            (None, _) => is_known() || self.is_mapped(),
        }
    }

    /// Returns whether the process has memory or reserved addresses at both ends of the range. At the address of a freed dry block it has
    /// none.
    fn is_mapped(&self) -> bool {
        // SAFETY: the call has no memory arguments.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let is_mapped = |address: u64| {
            let mut resident = MaybeUninit::<u8>::uninit();
            // SAFETY: the call reads no memory at the address, and writes one byte for one page.
            let code = unsafe { libc::mincore((address - address % page) as *mut _, 1, resident.as_mut_ptr()) };
            // A sandbox may not allow the call.
            code == 0 || io::Error::last_os_error().kind() != ErrorKind::OutOfMemory
        };
        let last = self.address.checked_add(self.bytes.saturating_sub(1));
        last.is_some_and(|last| is_mapped(self.address) && is_mapped(last))
    }
}

const KIND: sys::CUpointer_attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
const IS_MANAGED: sys::CUpointer_attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED;
const CU_MEMORYTYPE_DEVICE: u32 = 2;

/// Returns an attribute of an address, which is an int or a boolean. `None` if the driver does not know the address.
fn attribute(address: u64, attribute: sys::CUpointer_attribute) -> Option<u32> {
    let mut value = 0_u32;
    // SAFETY: the out-parameter is live, and at least as wide as these attributes.
    let answer = inside(|| unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) });
    answer.result().ok().map(|()| value)
}

/// Returns the byte, repeated, that the host gets if skipped work should have written all of these values. A copy that may be wrong is left
/// to the driver.
fn missing(to: Range, from: Range) -> Option<u8> {
    let Range { place, address, bytes } = from;
    if place == Place::Host || bytes == 0 || !has_any_dry() {
        return None;
    }
    let content = memory().content_of(address..address.saturating_add(bytes));
    match content {
        Some(Content::Missing(byte)) if to.is_on_host() && to.is_valid() && from.is_valid() => Some(byte),
        _ => None,
    }
}

/// Executes a copy that does not consist of rows, or skips it and fills memory of the host.
///
/// # Safety
/// The program must have requested a copy from one range to the other, and `real` must make it.
pub(super) unsafe fn copy(to: Range, from: Range, real: Real<'_>) -> u32 {
    let sides = [to, from];
    let is_skipped = sides.iter().any(Range::is_skipped);
    // The driver does not know dry addresses, and would treat them as addresses of the host.
    let is_wrong = |side: &Range| match side.place {
        Place::Host if !is_skipped => side.bytes > 0 && (is_dry(side.address) || !side.is_mapped()) && !side.is_valid(),
        Place::Device | Place::Either if side.bytes > 0 && is_freed(side.address) => true,
        _ => is_skipped && !side.is_valid(),
    };
    if sides.iter().any(is_wrong) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let byte = if is_skipped { Some(fill_byte()) } else { missing(to, from) };
    let Some(byte) = byte else {
        let result = real();
        if result == SUCCESS {
            // SAFETY: the driver has just read these bytes.
            unsafe { note_contents(to, from) };
        }
        return result;
    };
    if to.bytes > 0 && to.is_on_host() {
        // SAFETY: the program requested a copy to this range, which is valid.
        unsafe { fill(to.address, to.bytes, byte) };
    } else {
        set_contents(to, Content::Missing(byte));
    }
    SUCCESS
}

/// Notes what is known after a copy that was executed. Counts a copy of unknown values to the host.
///
/// # Safety
/// If `from` is a valid range of the host, its bytes must be readable.
unsafe fn note_contents(to: Range, from: Range) {
    if !has_any_dry() || to.bytes == 0 {
        return;
    }
    let Range { address, bytes, .. } = from;
    let range = || address..address.saturating_add(bytes);
    let on_card = if from.place == Place::Host { None } else { memory().content_of(range()) };
    let content = match on_card {
        Some(content) => content,
        // SAFETY: required by this function's contract.
        None if unsafe { has_dry_addresses(from) } => Content::Table,
        None => Content::Known,
    };
    if !set_contents(to, content) && content.is_unknown() && to.is_on_host() {
        value_read(to.bytes);
    }
    if content == Content::Table {
        watch(to.address, to.bytes);
    }
}

/// Sets what is known about a range in real memory. Returns false if it is elsewhere.
fn set_contents(to: Range, content: Content) -> bool {
    let Range { place, address, bytes } = to;
    place != Place::Host && has_any_dry() && memory().set_contents(address..address.saturating_add(bytes), content)
}

/// Executes a call that sets memory, or skips it if the memory is dry. `bytes` is `None` if there are too many.
pub(super) fn set(address: u64, bytes: Option<u64>, real: Real<'_>) -> u32 {
    let Some(to) = bytes.map(|bytes| Range::new(Place::Device, address, bytes)) else {
        return CUDA_ERROR_INVALID_VALUE;
    };
    if to.is_skipped() {
        return if to.is_valid() { SUCCESS } else { CUDA_ERROR_INVALID_VALUE };
    }
    if to.bytes > 0 && is_freed(address) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let result = real();
    if result == SUCCESS {
        set_contents(to, Content::Known);
    }
    result
}

/// Returns the bytes from the first to the last one that a call sets in rows, with elements of this size.
pub(super) fn bytes_of_rows(words: &[u64], element: u64) -> Option<u64> {
    let (pitch, width, height) = (words[1], words[3].checked_mul(element)?, words[4]);
    match height {
        0 => Some(0),
        _ => pitch.checked_mul(height - 1)?.checked_add(width),
    }
}

/// Returns whether bytes of the host contain dry addresses.
///
/// # Safety
/// If the range is valid, its bytes must be readable.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
unsafe fn has_dry_addresses(from: Range) -> bool {
    if from.place != Place::Host || from.bytes > ALWAYS_REAL || !from.is_valid() {
        return false;
    }
    let Range { address, bytes, .. } = from;
    // SAFETY: required by this function's contract.
    (0..bytes / 8).any(|at| is_dry(unsafe { (address as *const u64).add(at as usize).read_unaligned() }))
}

/// # Safety
/// `words` must be the arguments of `cuMemcpyBatchAsync`.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) unsafe fn copy_batch(words: &[u64], real: Real<'_>) -> u32 {
    // SAFETY: the first three are lists of this number of words.
    let copies: Vec<[u64; 3]> =
        (0..words[3]).map(|at| [0, 1, 2].map(|list: usize| unsafe { get(words[list] + at * 8) })).collect();
    if copies.iter().flat_map(|[to, from, _]| [to, from]).any(|address| is_freed(*address)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let ranges = |[to, from, bytes]: [u64; 3]| [to, from].map(|address| Range::new(Place::Either, address, bytes));
    let copies: Vec<_> = copies.into_iter().map(ranges).collect();
    let is_skipped = |[to, from]: &[Range; 2]| to.is_skipped() || from.is_skipped() || missing(*to, *from).is_some();
    if !copies.iter().any(is_skipped) {
        let result = real();
        if result == SUCCESS {
            for [to, from] in copies {
                // SAFETY: bytes of the host are not read for this kind of place.
                unsafe { note_contents(to, from) };
            }
        }
        return result;
    }
    let stream = words[words.len() - 1];
    for [to, from] in copies {
        // SAFETY: the program requested this copy on this stream.
        let code = unsafe {
            copy(to, from, &|| {
                inside(|| sys::cuMemcpyAsync(to.address, from.address, to.bytes as usize, stream as *mut _)) as u32
            })
        };
        if code != SUCCESS {
            return code;
        }
    }
    SUCCESS
}

/// One side of a copy of rows.
struct Side {
    place: Place,
    address: u64,
    /// The number of bytes, rows and planes before the first one.
    before: [u64; 3],
    /// The distance between two rows in bytes, and between two planes in rows.
    pitch: u64,
    rows: u64,
}

/// A copy of rows.
pub(super) struct Rows {
    to: Side,
    from: Side,
    /// The number of bytes in a row, of rows in a plane, and of planes.
    size: [u64; 3],
}

impl Side {
    /// Creates a side from the words of a struct. `sort` is a `CUmemorytype`. Returns `None` if it is unknown.
    #[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
    fn new(sort: u64, [host, device]: [u64; 2], before: [u64; 3], [pitch, rows]: [u64; 2]) -> Option<Self> {
        let (place, address) = match sort as u32 {
            1 => (Place::Host, host),
            2 => (Place::Device, device),
            3 => (Place::Array, 0),
            4 => (Place::Either, device),
            _ => return None,
        };
        Some(Self { place, address, before, pitch, rows })
    }

    /// Returns the addresses of all rows, or `None` if the rows of this side overlap or exceed the address space.
    fn range(&self, [width, height, depth]: [u64; 3]) -> Option<Range> {
        let Self { place, address, before: [x, y, z], pitch, rows } = *self;
        // The driver allows 0 where the distance does not matter.
        let is_wide = pitch == 0 || x.checked_add(width)? <= pitch;
        let is_high = rows == 0 || depth < 2 || y.checked_add(height)? <= rows;
        if place == Place::Array || [width, height, depth].contains(&0) {
            return Some(Range::new(place, address, 0));
        }
        let of_plane = pitch.checked_mul(rows)?;
        let offset =
            |x: u64, y: u64, z: u64| x.checked_add(y.checked_mul(pitch)?)?.checked_add(z.checked_mul(of_plane)?);
        let first = address.checked_add(offset(x, y, z)?)?;
        let bytes = offset(width, height - 1, depth - 1)?;
        // The offset alone is not an address.
        (is_wide && is_high && address != 0).then_some(Range::new(place, first, bytes))
    }
}

impl Rows {
    /// # Safety
    /// `at` must be the address of a `CUDA_MEMCPY2D`.
    pub(super) unsafe fn of_2d(at: u64) -> Option<Self> {
        // SAFETY: the struct has 16 words.
        let word = |index: u64| unsafe { get(at + index * 8) };
        let from = Side::new(word(2), [word(3), word(4)], [word(0), word(1), 0], [word(6), 0])?;
        let to = Side::new(word(9), [word(10), word(11)], [word(7), word(8), 0], [word(13), 0])?;
        Some(Self { to, from, size: [word(14), word(15), 1] })
    }

    /// # Safety
    /// `at` must be the address of a `CUDA_MEMCPY3D` or of a `CUDA_MEMCPY3D_PEER`.
    pub(super) unsafe fn of_3d(at: u64) -> Option<Self> {
        // SAFETY: both structs have 25 words.
        let word = |index: u64| unsafe { get(at + index * 8) };
        let from = Side::new(word(4), [word(5), word(6)], [word(0), word(1), word(2)], [word(9), word(10)])?;
        let to = Side::new(word(15), [word(16), word(17)], [word(11), word(12), word(13)], [word(20), word(21)])?;
        Some(Self { to, from, size: [word(22), word(23), word(24)] })
    }

    /// Returns the addresses of all rows on both sides.
    fn ranges(&self) -> Option<(Range, Range)> {
        Some((self.to.range(self.size)?, self.from.range(self.size)?))
    }

    /// Returns the result of a copy that is skipped, and the range that it would write. Returns `None` if the copy is executed.
    fn skipped(&self) -> Option<Result<Range, u32>> {
        // Only the driver knows whether a wrong copy of real memory is an error.
        let sides = [&self.to, &self.from].into_iter().filter(|side| side.place != Place::Array);
        if sides.clone().any(|side| is_freed(side.address)) {
            return Some(Err(CUDA_ERROR_INVALID_VALUE));
        }
        if !sides.clone().any(|side| is_dry(side.address)) {
            return None;
        }
        let Some((to, from)) = self.ranges() else { return Some(Err(CUDA_ERROR_INVALID_VALUE)) };
        if !to.is_valid() || !from.is_valid() {
            return Some(Err(CUDA_ERROR_INVALID_VALUE));
        }
        [to, from].iter().any(Range::is_skipped).then_some(Ok(to))
    }
}

/// # Safety
/// The program must have requested this copy.
pub(super) unsafe fn copy_rows(rows: Option<&Rows>, real: Real<'_>) -> u32 {
    let Some(rows) = rows else { return real() };
    let ranges = rows.ranges();
    let skipped = match rows.skipped() {
        Some(Err(code)) => return code,
        Some(Ok(to)) => Some((to, fill_byte())),
        None => ranges.and_then(|(to, from)| Some((to, missing(to, from)?))),
    };
    let Some((to, byte)) = skipped else {
        let result = real();
        if let (SUCCESS, Some((to, from))) = (result, ranges) {
            // The bytes between rows may not be there, so rows of the host are not read.
            let from = Range { place: Place::Either, ..from };
            // SAFETY: as in `copy_batch`.
            unsafe { note_contents(to, from) };
        }
        return result;
    };
    if to.bytes > 0 && to.is_on_host() {
        let [width, height, depth] = rows.size;
        let Side { pitch, rows, .. } = rows.to;
        for (z, y) in (0..depth).flat_map(|z| (0..height).map(move |y| (z, y))) {
            // SAFETY: the program requested a copy to these rows, and their range is valid.
            unsafe { fill(to.address + (z * rows + y) * pitch, width, byte) };
        }
    } else {
        set_contents(to, Content::Missing(byte));
    }
    SUCCESS
}

/// Returns the result of the call for a node that copies rows and is skipped. Returns `None` if the driver gets the node.
pub(super) fn skipped_node(rows: Option<&Rows>) -> Option<u32> {
    Some(rows?.skipped()?.map_or_else(|code| code, |_| SUCCESS))
}
