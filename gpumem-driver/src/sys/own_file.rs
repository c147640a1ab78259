//! The file of the library that this code is in, when the driver has loaded it into a program.

use std::{ffi::c_int, fs, io, ptr};

/// Replaces the pages of that file by copies, at the same addresses: a file that somebody truncates would end the program at the next
/// access. Pages that cannot be replaced stay as they are.
///
/// It must be called before another thread runs code of this library: its writes might be lost.
///
/// # Errors
/// Returns an error if the system forbids code in memory that is not a file (`SELinux` without `execmem`).
pub fn leave() -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let here = leave as fn() -> io::Result<()> as usize;
    let Some(own) = maps.lines().filter_map(Mapping::of).find(|mapping| (mapping.begin..mapping.end).contains(&here))
    else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let of_file = maps.lines().filter_map(Mapping::of).filter(|mapping| mapping.file == own.file);
    let of_file: Vec<_> = of_file.collect();
    of_file.iter().try_for_each(replace)
}

/// A private mapping of a file, which can be read.
struct Mapping<'a> {
    begin: usize,
    end: usize,
    access: c_int,
    /// The device and the inode, as the kernel writes them.
    file: (&'a str, &'a str),
}

impl<'a> Mapping<'a> {
    /// Reads a line such as `7f00-7f01 r-xp 00001000 08:01 123 /path`.
    fn of(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (begin, end) = fields.next()?.split_once('-')?;
        let access = fields.next()?.as_bytes();
        let (_, device, inode) = (fields.next()?, fields.next()?, fields.next()?);
        let [begin, end] = [begin, end].map(|address| usize::from_str_radix(address, 16).ok());
        let flag = |at: usize, letter: u8, flag| if access.get(at) == Some(&letter) { flag } else { 0 };
        let is_one = access.starts_with(b"r") && access.ends_with(b"p") && inode != "0";
        is_one.then_some(Self {
            begin: begin?,
            end: end?,
            access: libc::PROT_READ | flag(1, b'w', libc::PROT_WRITE) | flag(2, b'x', libc::PROT_EXEC),
            file: (device, inode),
        })
    }
}

fn replace(mapping: &Mapping<'_>) -> io::Result<()> {
    let length = mapping.end - mapping.begin;
    let at = ptr::with_exposed_provenance_mut::<libc::c_void>(mapping.begin);
    // SAFETY: a new mapping, wherever the kernel has room, so it overlaps nothing.
    let copy = unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(ptr::null_mut(), length, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if copy == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the pages are those of this library, which stays loaded while its code runs, and may be read, as the kernel says. The copy is
    // as long and does not overlap. By the contract of `leave` nobody else writes to the pages meanwhile, and this thread writes only to
    // its stack. Then the kernel puts the copy in the place of the pages, in one step for all threads: at each moment each address has
    // the same bytes and may be accessed in the same way, so code that runs there, and references to data there, are not affected.
    let is_replaced = unsafe {
        ptr::copy_nonoverlapping(at.cast::<u8>(), copy.cast::<u8>(), length);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mprotect(copy, length, mapping.access) == 0 && libc::mremap(copy, length, length, flags, at) == at
    };
    if is_replaced {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // SAFETY: the copy was made above, nobody else knows it, and it was not moved.
    unsafe { libc::munmap(copy, length) };
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_mappings_of_files_are_known() {
        let of = |line| Mapping::of(line).map(|known| (known.begin, known.end, known.access, known.file));
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
