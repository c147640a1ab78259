//! Makes a loaded library independent of its file, for the library that the driver has loaded into a program.

use std::{ffi::c_int, fs, io, ptr};

use super::loader::headers_of_program;

/// Replaces the pages of the library that contains this code by copies at the same addresses. Otherwise, if another process truncated the
/// file, the next access would kill the program. Pages that cannot be replaced stay unchanged. If this code is in the program itself,
/// nothing is replaced: the kernel allows no process to write to a program's file while it runs.
///
/// # Errors
/// Returns an error if the system forbids code in memory without a file (`SELinux` without `execmem`).
///
/// # Safety
/// No other thread may write to variables of this library during the call, because its writes might be lost.
pub unsafe fn leave() -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let here = leave as unsafe fn() -> io::Result<()> as usize;
    let own = Mapping::with(here, &maps).ok_or(io::ErrorKind::NotFound)?;
    if Mapping::with(headers_of_program(), &maps).is_some_and(|program| program.file == own.file) {
        return Ok(());
    }
    maps.lines()
        .filter_map(Mapping::of)
        .filter(|mapping| mapping.file == own.file)
        // SAFETY: the mapping is of this library, and this function's contract requires that no other thread writes to it.
        .try_for_each(|mapping| unsafe { replace(&mapping) })
}

/// A private, readable mapping of a file.
struct Mapping<'a> {
    start: usize,
    end: usize,
    access: c_int,
    /// The device and the inode, in the form of `/proc/self/maps`.
    file: (&'a str, &'a str),
}

impl<'a> Mapping<'a> {
    /// Returns the mapping that contains this address.
    fn with(address: usize, maps: &'a str) -> Option<Self> {
        maps.lines().filter_map(Self::of).find(|mapping| (mapping.start..mapping.end).contains(&address))
    }

    /// Reads a line such as `7f00-7f01 r-xp 00001000 08:01 123 /path`.
    fn of(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let access = fields.next()?.as_bytes();
        let (_, device, inode) = (fields.next()?, fields.next()?, fields.next()?);
        let [start, end] = [start, end].map(|address| usize::from_str_radix(address, 16).ok());
        let flag = |at: usize, letter: u8, flag| if access.get(at) == Some(&letter) { flag } else { 0 };
        let is_one = access.starts_with(b"r") && access.ends_with(b"p") && inode != "0";
        is_one.then_some(Self {
            start: start?,
            end: end?,
            access: libc::PROT_READ | flag(1, b'w', libc::PROT_WRITE) | flag(2, b'x', libc::PROT_EXEC),
            file: (device, inode),
        })
    }
}

/// # Safety
/// The mapping must be of this library, and no other thread may write to it during the call.
unsafe fn replace(mapping: &Mapping<'_>) -> io::Result<()> {
    let length = mapping.end - mapping.start;
    let at = ptr::with_exposed_provenance_mut::<libc::c_void>(mapping.start);
    // SAFETY: a new mapping, wherever the kernel has room, so it overlaps nothing.
    let copy = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), length, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if copy == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the pages belong to this library, which stays loaded while its code runs, and the kernel lists them as readable. The copy
    // has the same length and does not overlap. This function's contract requires that no other thread writes to the pages during the call,
    // and this thread only writes to its stack. The kernel then puts the copy where the pages were, in one step for all threads. At each
    // moment, each address has the same bytes and the same access rights, so code that runs there, and references to data there, are not
    // affected.
    let is_replaced = unsafe {
        ptr::copy_nonoverlapping(at.cast::<u8>(), copy.cast::<u8>(), length);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mprotect(copy, length, mapping.access) == 0 && libc::mremap(copy, length, length, flags, at) == at
    };
    if is_replaced {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // SAFETY: the copy was made above, no other code knows it, and it was not moved.
    unsafe { libc::munmap(copy, length) };
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise each program that contains gpumem would copy itself at its start.
    #[test]
    fn the_program_itself_is_not_copied() {
        let code = || {
            let maps = fs::read_to_string("/proc/self/maps").expect("a process may read it");
            Mapping::with(leave as unsafe fn() -> io::Result<()> as usize, &maps).map(|own| (own.start, own.end))
        };
        let before = code();
        // SAFETY: the program itself is not changed.
        unsafe { leave() }.expect("there is nothing to do");
        assert!(before.is_some(), "the code of a test is in its file");
        assert_eq!(code(), before);
    }

    #[test]
    fn private_mappings_of_files_are_known() {
        let of = |line| Mapping::of(line).map(|known| (known.start, known.end, known.access, known.file));
        let (r, w, x) = (libc::PROT_READ, libc::PROT_WRITE, libc::PROT_EXEC);
        let file = ("08:01", "123");
        assert_eq!(of("7f00-7f10 r--p 00000000 08:01 123   /a b"), Some((0x7f00, 0x7f10, r, file)));
        assert_eq!(of("7f00-7f10 r-xp 00000000 08:01 123   /a"), Some((0x7f00, 0x7f10, r | x, file)));
        assert_eq!(of("7f00-7f10 rw-p 00000000 08:01 123   /a"), Some((0x7f00, 0x7f10, r | w, file)));
        for other in ["7f00-7f10 ---p 0 08:01 123 /a", "7f00-7f10 rw-s 0 08:01 123 /a", "7f00-7f10 rw-p 0 00:00 0", ""]
        {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
