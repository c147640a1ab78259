//! Finds the calling thread's stack as addresses, which is cheap, and the functions and lines at addresses, which is slow.

use std::{
    fs,
    path::PathBuf,
    ptr,
    sync::{Arc, OnceLock},
};

use object::{Object, ObjectSegment, ObjectSymbol, ReadCache, SymbolKind};

pub(crate) use super::loader::files_of;
use super::loader::{self, LoadedFile};
use crate::model::Frame;

/// The maximum number of functions that are found without the walker. Each costs 0.16 µs, so a stack costs at most 5 µs.
const MAX_CAPTURED: usize = 32;

/// The page size at which files are mapped, or a divisor of it.
const PAGE: u64 = 4096;

/// Returns the id of the calling thread's stack. For a new stack this is the result of `number`, which must return the same id for equal
/// stacks. `number` receives the return addresses, innermost first and at most 128. Functions of files for which `is_skipped` is true are
/// left out, and so are all functions that these call.
///
/// For a stack in the thread's cache, this compares the words of the stack; it takes no lock and allocates nothing. If stacks cannot be
/// walked by tables, `number` receives the result of [`unwind`]: fewer functions, because it is slow, and none left out.
#[inline]
pub(crate) fn number(is_skipped: fn(&[u8]) -> bool, number: impl Fn(&[usize]) -> u32) -> u32 {
    #[cfg(all(target_os = "linux", target_pointer_width = "64", any(target_arch = "x86_64", target_arch = "aarch64")))]
    if let Some(number) = super::walker::number(is_skipped, &number) {
        return number;
    }
    let _ = is_skipped;
    as_observer_cold(|| unwound(number)).unwrap_or(0)
}

/// Returns an id for the function that called the driver: the innermost one on the calling thread's stack that is neither in this library
/// nor in a file for which `is_skipped` is true. `number` receives its return address. Returns 0 if the stack cannot be walked by tables.
#[inline]
pub(crate) fn caller(is_skipped: fn(&[u8]) -> bool, number: impl Fn(usize) -> u32) -> u32 {
    #[cfg(all(
        target_os = "linux",
        target_pointer_width = "64",
        any(target_arch = "x86_64", target_arch = "aarch64")
    ))]
    return super::walker::caller(is_skipped, number).unwrap_or(0);
    #[cfg(not(all(
        target_os = "linux",
        target_pointer_width = "64",
        any(target_arch = "x86_64", target_arch = "aarch64")
    )))]
    0
}

#[cfg(feature = "cuda")]
pub(crate) use super::calls::as_observer_cold;

/// Runs the code. Without a source that intercepts calls, there is no state of the thread to change.
#[expect(clippy::unnecessary_wraps, reason = "with such a source, the code may have panicked")]
#[cfg(not(feature = "cuda"))]
pub(crate) fn as_observer_cold<T>(code: impl FnOnce() -> T) -> Option<T> {
    Some(code())
}

/// Empties the calling thread's cache of stacks.
pub fn forget() {
    #[cfg(all(
        target_os = "linux",
        target_pointer_width = "64",
        any(target_arch = "x86_64", target_arch = "aarch64")
    ))]
    super::walker::forget();
}

/// Returns the id of a stack that is not in the cache.
#[cold]
#[inline(never)]
pub(crate) fn unwound(number: impl Fn(&[usize]) -> u32) -> u32 {
    let mut addresses = [0; MAX_CAPTURED];
    let count = unwind(&mut addresses, 1);
    number(&addresses[..count])
}

/// Writes the return addresses of the calling thread's stack to `addresses`, innermost first, until it is full. Returns their number. The
/// first one is in the function that calls this one; `skip` leaves out as many more.
///
/// This may be called anywhere, even in a callback from C: it allocates nothing, takes no lock (except on Windows), and does not panic.
/// Each frame costs the same, so a short `addresses` is cheap.
#[inline(never)]
pub(crate) fn unwind(addresses: &mut [usize], mut skip: usize) -> usize {
    // Stacks grow downwards, so this frame and the frames of the unwinder start below the address of a local variable.
    let local = 0_u8;
    let here = ptr::from_ref(&local).addr();
    let mut free = addresses.iter_mut();
    let mut count = 0;
    let visit = |frame: &backtrace::Frame| {
        if frame.sp().addr() <= here {
            return true;
        }
        if skip > 0 {
            skip -= 1;
            return true;
        }
        // The outermost frame of a thread may be in no function.
        let (address @ 1.., Some(address_out)) = (frame.ip().addr(), free.next()) else { return false };
        *address_out = address;
        count += 1;
        free.len() > 0
    };
    // `dbghelp.dll` must not be used on two threads at once.
    #[cfg(windows)]
    backtrace::trace(visit);
    // SAFETY: this is `_Unwind_Backtrace`, which any thread may call at any time, and `visit` does not unwind through it.
    #[cfg(not(windows))]
    unsafe {
        backtrace::trace_unsynchronized(visit);
    }
    count
}

/// Returns the functions at an address that [`unwind`] wrote, innermost first and without their module: several if functions were inlined
/// there, none if none is known. This is slow, because it reads debug information from files while it holds a lock. Therefore it is used
/// only for printing.
///
/// For libraries that were loaded after the first call, it finds functions but no lines.
pub(crate) fn resolve(address: usize) -> Vec<Frame> {
    /// The files that were loaded just before `backtrace` created its list of files, which it does only once. The list is older if the
    /// program itself has used `backtrace`.
    static LISTED: OnceLock<Vec<Arc<LoadedFile>>> = OnceLock::new();
    let listed = LISTED.get_or_init(loader::files);
    let file = files_of(&[address]).pop().flatten();
    let mut frames = Vec::new();
    // A file that was loaded later may be at the addresses of an unloaded file on the list. `backtrace` would then return the functions of
    // the unloaded file.
    if file.as_ref().is_none_or(|file| listed.contains(file)) {
        backtrace::resolve(ptr::without_provenance_mut(address), |symbol| {
            frames.push(Frame {
                function: symbol.name().map(|name| format!("{name:#}")),
                file: symbol.filename().map(|file| file.to_string_lossy().into_owned()),
                line: symbol.lineno(),
                column: symbol.colno(),
                module: None,
            });
        });
    }
    if frames.is_empty() {
        let function = file.and_then(|file| function_in(&file, address));
        frames.extend(function.map(|name| Frame { function: Some(name), ..Frame::default() }));
    }
    frames
}

/// Returns the function that contains a return address, by the symbols in its file.
fn function_in(loaded: &LoadedFile, address: usize) -> Option<String> {
    // The return address is after the call.
    let before = address.checked_sub(loaded.base)?.checked_sub(1)? as u64;
    in_file(loaded, |first, object| {
        let at = before.checked_add(first)?;
        let symbols = object.symbols().chain(object.dynamic_symbols());
        let mut functions = symbols.filter(|symbol| symbol.kind() == SymbolKind::Text);
        let function =
            functions.find(|symbol| at.checked_sub(symbol.address()).is_some_and(|after| after < symbol.size()))?;
        Some(format!("{:#}", backtrace::SymbolName::new(function.name_bytes().ok()?)))
    })
}

/// Returns the address of the first symbol that has one of these names, as the compiler has written them, in the file of a library that is
/// loaded. The library need not export the symbol. `None` without a symbol, for example if the file was stripped.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub fn address_of(library: &str, names: &[&str]) -> Option<usize> {
    let files = loader::files();
    let loaded = files.iter().find(|file| file.path.file_name().is_some_and(|name| name == library))?;
    in_file(loaded, |first, object| {
        let is_it = |name: &[u8]| names.iter().any(|known| known.as_bytes() == name);
        let mut symbols = object.symbols().chain(object.dynamic_symbols());
        let found = symbols.find(|symbol| !symbol.is_undefined() && symbol.name_bytes().is_ok_and(is_it))?;
        loaded.base.checked_add(found.address().checked_sub(first)? as usize)
    })
}

/// Calls `search` with the address of a file's first page, and with the file.
fn in_file<T>(
    loaded: &LoadedFile,
    search: impl FnOnce(u64, &object::File<'_, &ReadCache<fs::File>>) -> Option<T>,
) -> Option<T> {
    if !fs::metadata(&loaded.path).ok()?.is_file() {
        return None;
    }
    let data = ReadCache::new(fs::File::open(&loaded.path).ok()?);
    let object = object::File::parse(&data).ok()?;
    let first = object.segments().map(|segment| segment.address()).min()? / PAGE * PAGE;
    search(first, &object)
}

/// Returns the file of the program or library that contains an address. Hooks and callbacks may call it.
pub(crate) fn module_of(address: usize) -> Option<PathBuf> {
    files_of(&[address]).pop()?.map(|file| file.path.clone())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn functions(address: usize) -> Vec<String> {
        resolve(address).into_iter().filter_map(|symbol| symbol.function).collect()
    }

    #[inline(never)]
    fn here(addresses: &mut [usize], skip: usize) -> (usize, u32) {
        (unwind(addresses, skip), line!())
    }

    #[test]
    fn the_first_frame_is_the_caller_with_its_line() {
        let mut addresses = [0; 16];
        let (count, line) = here(&mut addresses, 0);
        assert!(count > 2, "{count} frames");
        let symbols = resolve(addresses[0]);
        let last = symbols.last().expect("something is known of this test");
        assert!(last.function.as_ref().unwrap().contains("here"), "{last:?}");
        assert!(last.file.as_ref().unwrap().ends_with("sys/stack.rs"), "{last:?}");
        assert_eq!(last.line, Some(line), "{last:?}");
        assert!(functions(addresses[1]).iter().any(|function| function.contains("the_first_frame_is")));
    }

    #[test]
    fn skipped_frames_are_the_innermost_ones() {
        let [all, fewer, none] = [0, 3, 10_000].map(|skip| {
            let mut addresses = [0; 64];
            let (count, _) = here(&mut addresses, skip);
            addresses[..count].to_vec()
        });
        assert!(all.len() > 5 && all[3..] == fewer && none.is_empty(), "{all:x?} {fewer:x?} {none:x?}");
    }

    #[test]
    fn module_of_returns_the_file() {
        let program = module_of(here as *const () as usize).expect("this test is in a file");
        assert_eq!(program, std::env::current_exe().unwrap());
        let malloc = {
            unsafe extern "C" {
                fn malloc(size: usize) -> *mut std::ffi::c_void;
            }
            malloc as *const () as usize
        };
        let library = module_of(malloc + 1).expect("the C library is a file");
        assert!(library.is_absolute() && library.file_name() != Path::new("libc.so").file_name(), "{library:?}");
        assert!(library.to_string_lossy().contains("libc"), "{library:?}");
        for nowhere in [0, 1, 4096, usize::MAX, ptr::from_ref(&library).addr()] {
            assert_eq!((module_of(nowhere), resolve(nowhere)), (None, Vec::new()), "{nowhere:#x}");
        }
    }
}
