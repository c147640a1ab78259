//! The segments of a library that the loader has mapped: code, writable segments, and segments that are read-only after relocation.

use std::{
    ffi::c_int,
    ops::Range,
    path::PathBuf,
    ptr, slice,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

#[cfg(feature = "dry")]
use super::dry::replaced;
use super::verify::Library;
use crate::sys::loader;

/// A mapped library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Image {
    /// Executable segments.
    code: Vec<Range<usize>>,
    /// Readable segments, which include the code and the writable ones.
    readable: Vec<Range<usize>>,
    /// Writable segments.
    writable: Vec<Range<usize>>,
    /// `PT_GNU_RELRO`: segments that are read-only after relocation.
    relro: Vec<Range<usize>>,
}

impl Image {
    /// Returns the library that contains an address.
    pub(super) fn around(address: usize) -> Option<Self> {
        struct Search {
            address: usize,
            found: Option<Image>,
        }

        unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: libc::size_t, search: *mut libc::c_void) -> c_int {
            // SAFETY: the loader passes the entry of a library, which is valid during this call, and the pointer that `dl_iterate_phdr`
            // received. It points to the only `Search`, which nothing else uses during this call.
            let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
            if info.dlpi_phdr.is_null() {
                return 0;
            }
            // SAFETY: these are the library's program headers; the loader passes their number.
            let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
            #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
            let image = Image::of(info.dlpi_addr as usize, headers);
            if !image.is_readable(search.address, 1) {
                return 0;
            }
            search.found = Some(image);
            1
        }

        let mut search = Search { address, found: None };
        // SAFETY: `visit` is called only during this call, with the live `search`. It does not unwind: it has no index, and a failed
        // allocation aborts.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found
    }

    #[expect(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
    fn of(base: usize, headers: &[libc::Elf64_Phdr]) -> Self {
        let mut image = Self::default();
        for header in headers {
            let start = base.wrapping_add(header.p_vaddr as usize);
            let range = start..start.saturating_add(header.p_memsz as usize);
            match header.p_type {
                libc::PT_GNU_RELRO => image.relro.push(range),
                libc::PT_LOAD => {
                    for (flag, segments) in [
                        (libc::PF_R, &mut image.readable),
                        (libc::PF_X, &mut image.code),
                        (libc::PF_W, &mut image.writable),
                    ] {
                        if header.p_flags & flag != 0 {
                            segments.push(range.clone());
                        }
                    }
                }
                _ => {}
            }
        }
        image
    }
}

impl Library for Image {
    fn code_around(&self, address: usize) -> Option<Range<usize>> {
        self.code.iter().find(|segment| segment.contains(&address)).cloned()
    }

    fn is_readable(&self, address: usize, bytes: usize) -> bool {
        has(&self.readable, address, bytes)
    }

    fn is_writable(&self, address: usize, bytes: usize) -> bool {
        let end = address.saturating_add(bytes);
        has(&self.writable, address, bytes) && self.relro.iter().all(|relro| end <= relro.start || address >= relro.end)
    }

    fn code(&self, range: Range<usize>) -> Option<Vec<u8>> {
        let length = range.end.checked_sub(range.start).filter(|length| has(&self.code, range.start, *length))?;
        let mut bytes = Vec::with_capacity(length);
        // SAFETY: the range is in a segment of a library that stays loaded, because the caller holds a handle to it. Only tools that
        // patch code write to it, and every byte is a valid value. The vector has room for `length` bytes.
        unsafe {
            ptr::copy_nonoverlapping(range.start as *const u8, bytes.as_mut_ptr(), length);
            bytes.set_len(length);
        }
        Some(bytes)
    }

    fn pointer(&self, address: usize) -> Option<usize> {
        let is_pointer =
            address.is_multiple_of(align_of::<AtomicUsize>()) && self.is_writable(address, size_of::<AtomicUsize>());
        // SAFETY: the address is aligned, and in the writable data of a library that stays loaded, as above. All code that writes a pointer
        // there writes the whole pointer at once.
        let pointer = is_pointer.then(|| unsafe { AtomicUsize::from_ptr(address as *mut usize) }.load(SeqCst));
        #[cfg(feature = "dry")]
        let pointer = pointer.map(replaced::driver_below);
        pointer
    }

    fn owner(&self, address: usize) -> Option<PathBuf> {
        loader::file_of(address)
    }
}

fn has(ranges: &[Range<usize>], address: usize, bytes: usize) -> bool {
    let Some(last) = address.checked_add(bytes) else { return false };
    ranges.iter().any(|range| range.start <= address && last <= range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: u32, flags: u32, address: u64, bytes: u64) -> libc::Elf64_Phdr {
        libc::Elf64_Phdr {
            p_type: kind,
            p_flags: flags,
            p_offset: 0,
            p_vaddr: address,
            p_paddr: 0,
            p_filesz: 0,
            p_memsz: bytes,
            p_align: 0,
        }
    }

    #[test]
    fn segments_are_distinguished() {
        let image = Image::of(
            0x10_0000,
            &[
                header(libc::PT_LOAD, libc::PF_R, 0, 0x1000),
                header(libc::PT_LOAD, libc::PF_R | libc::PF_X, 0x1000, 0x1000),
                header(libc::PT_LOAD, libc::PF_R | libc::PF_W, 0x3000, 0x2000),
                header(libc::PT_GNU_RELRO, libc::PF_R, 0x3000, 0x1000),
                header(libc::PT_DYNAMIC, libc::PF_R | libc::PF_W, 0x8000, 0x1000),
            ],
        );
        assert!(image.is_code(0x10_1000) && image.is_code(0x10_1fff) && !image.is_code(0x10_2000));
        assert!(!image.is_code(0x10_0fff) && image.is_readable(0x10_0fff, 1) && !image.is_readable(0x10_0fff, 2));
        for (address, is_writable) in [(0x10_3000, false), (0x10_3ffc, false), (0x10_4000, true), (0x10_4ff8, true)] {
            assert_eq!(image.is_writable(address, 8), is_writable, "{address:#x}");
        }
        assert!(!image.is_writable(0x10_4ffc, 8), "behind the end");
        assert!(!image.is_writable(0x10_1000, 8) && !image.is_writable(0x10_8000, 8));
        assert!(!image.is_readable(usize::MAX, 8));
    }

    #[test]
    fn the_program_is_a_library_as_well() {
        static DATA: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let here = the_program_is_a_library_as_well as *const () as usize;
        let image = Image::around(here).expect("the loader knows the program");
        assert!(image.is_code(here) && image.code(here..here + 16).is_some_and(|code| code.len() == 16));
        let data = (&raw const DATA) as usize;
        assert!(image.is_writable(data, 8) && !image.is_code(data) && image.code(data..data + 1).is_none());
        assert_eq!((image.pointer(data), image.pointer(data + 4), image.pointer(here & !7)), (Some(1), None, None));
        let local = 0_u8;
        assert!(Image::around(&raw const local as usize).is_none(), "a stack is in no library");
        assert!(Image::around(0).is_none());
    }
}
