//! Executes or skips launches, and fills memory of the host with the content of dry memory.

use std::{
    cell::Cell,
    ffi::{CStr, c_char},
    ops::Range,
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Instant,
};

use cudarc::driver::sys;
use once_cell::sync::{Lazy, OnceCell};

use super::{
    contents::Content,
    mode::{IS_ALONE, MODE, Mode, OBSERVER, is_dry_run},
    roles::{Kernel, Kernels, Output, Role},
    state::{
        CUDA_ERROR_INVALID_VALUE, Real, SUCCESS, get, has_any_dry, in_pinned, inside, is_dry, is_on_card,
        is_out_of_reach, memory, watch,
    },
    unused::unused,
};
use crate::{
    model::Bytes,
    sys::{cuda, dl, print},
};

type GetParamInfo = unsafe extern "C" fn(u64, usize, *mut usize, *mut usize) -> u32;
static PARAM_INFO: OnceCell<[Option<GetParamInfo>; 2]> = OnceCell::new();

type GetName = unsafe extern "C" fn(*mut *const c_char, u64) -> u32;
static NAMES: OnceCell<[Option<GetName>; 2]> = OnceCell::new();

/// Looks up the functions that older drivers lack.
pub(super) fn load() {
    const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];
    NAMES.get_or_init(|| {
        // SAFETY: both functions (12.3 and later) have this signature.
        [c"cuFuncGetName", c"cuKernelGetName"].map(|name| unsafe { dl::symbol(LIBRARIES, name) })
    });
    PARAM_INFO.get_or_init(|| {
        // SAFETY: both functions (12.4 and later) have this signature.
        [c"cuFuncGetParamInfo", c"cuKernelGetParamInfo"].map(|name| unsafe { dl::symbol(LIBRARIES, name) })
    });
}

/// Returns the content of dry memory for the host: this byte, repeated.
pub(super) fn fill_byte() -> u8 {
    match MODE.get() {
        Some(Mode::Dry { fill, .. }) => *fill,
        _ => 0,
    }
}

/// Writes values for the host that were not computed.
///
/// # Safety
/// `to` must be valid for writes of `bytes` bytes.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) unsafe fn fill(to: u64, bytes: u64, byte: u8) {
    // SAFETY: required by this function's contract.
    unsafe { ptr::write_bytes(to as *mut u8, byte, bytes as usize) };
    value_read(bytes);
}

/// Sets real memory to zeros, so that an index that a skipped kernel should have written there is valid.
#[allow(clippy::cast_possible_truncation, reason = "a block is as large as `usize` on these targets")]
pub(super) fn clear(address: u64, bytes: u64) {
    // A new stream does not wait for the program's work, and may be used while a stream is captured.
    inside(|| {
        cuda::relaxed(|| {
            let mut stream = ptr::null_mut();
            let non_blocking = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the block was just allocated, and no other code knows its address. The stream lives until this returns.
            unsafe {
                if sys::cuStreamCreate(&raw mut stream, non_blocking).result().is_ok() {
                    let _ = sys::cuMemsetD8Async(address, 0, bytes as usize, stream).result();
                    let _ = sys::cuStreamSynchronize(stream).result();
                    let _ = sys::cuStreamDestroy_v2(stream).result();
                }
            }
        });
    });
}

/// Notes that the program has copied values to the host that are not known.
pub(super) fn value_read(bytes: u64) {
    static IS_SAID: AtomicBool = AtomicBool::new(false);

    if let Some(observer) = OBSERVER.get() {
        (observer.value_read)(Bytes::new(bytes));
    }
    if IS_ALONE.load(Relaxed) && !IS_SAID.swap(true, Relaxed) {
        print::notice(format_args!(
            "dry run: the program has read a value from memory that is not there; sizes that depend on it may differ. `gpumem run --dry` \
             shows the line"
        ));
    }
    note_reading(bytes);
}

/// Prints one line if the GPU has stopped because of what a kernel did: all later calls then fail, and the program does not know that it is a
/// dry run.
pub(super) fn note_failure(code: u32) {
    static IS_NOTED: AtomicBool = AtomicBool::new(false);

    let what = match code {
        700 | 716..=719 => "an access of a kernel was wrong",
        710 => "a kernel failed an assertion",
        _ => return,
    };
    if is_dry_run() && !IS_NOTED.swap(true, Relaxed) {
        print::notice(format_args!(
            "dry run: {what} (CUDA error {code}). It may have used a value that a dry run does not compute. With a larger --real, more \
             values are computed, and with --real 2MiB fewer kernels are executed. Does the program run without --dry?"
        ));
    }
}

/// How often a program has read dry memory without allocating anything.
struct Reading {
    /// The number of dry blocks and handles when this count started.
    dry: u64,
    since: Option<Instant>,
    count: u64,
    is_reported: bool,
}

impl Reading {
    const NONE: Self = Self { dry: 0, since: None, count: 0, is_reported: false };

    /// Counts a reading. After a certain number of readings within a certain time, returns that time in seconds, but only once.
    fn add(&mut self, dry: u64, now: Instant) -> Option<u64> {
        const READINGS: u64 = 20_000;
        const SECONDS: u64 = 60;

        if self.dry != dry {
            *self = Self { dry, is_reported: self.is_reported, ..Self::NONE };
        }
        self.count += 1;
        let seconds = now.duration_since(*self.since.get_or_insert(now)).as_secs();
        let is_new = seconds >= SECONDS && self.count >= READINGS && !self.is_reported;
        self.is_reported |= is_new;
        is_new.then_some(seconds)
    }
}

/// Counts a reading, and prints one line if the program seems to wait for a value that is never computed: it reads dry memory repeatedly
/// while its allocations do not change.
fn note_reading(bytes: u64) {
    static READING: Mutex<Reading> = Mutex::new(Reading::NONE);

    let dry = memory().dry_so_far();
    let mut reading = READING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(seconds) = reading.add(dry, Instant::now()) {
        print::notice(format_args!(
            "dry run: in {seconds} s the program has allocated nothing large, and has read memory that does not exist {} times, the \
             last time {}. It may wait for a value that a dry run does not compute. Ctrl-C ends it, and its recording is complete.",
            reading.count,
            Bytes::new(bytes)
        ));
    }
}

/// An address on a GPU among the parameters of a launch.
#[derive(Clone, Copy, Debug)]
struct Argument {
    address: u64,
    /// The index of the parameter that contains it.
    parameter: usize,
    /// True if the parameter has the address of this one in pinned memory.
    is_in_pinned: bool,
}

/// The addresses in the parameters of a launch.
#[derive(Debug, Default)]
struct Arguments {
    addresses: Vec<Argument>,
    /// The number of parameters. `None` if it is not known.
    parameters: Option<usize>,
}

static KERNELS: Lazy<Mutex<Kernels>> = Lazy::new(Mutex::default);

thread_local! {
    /// True if the latest launch of the thread was skipped.
    static WAS_SKIPPED: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the latest launch of the thread was skipped.
pub(super) fn was_skipped() -> bool {
    WAS_SKIPPED.try_with(Cell::get).unwrap_or(false)
}

/// Returns whether a launch is skipped, and notes which values are unknown after it. It is skipped if one of its parameters contains an
/// address that no kernel may use, if it would use values that are not known as indices, and if it is a collective, which finds its buffers
/// through several tables. If the driver does not report the parameters of a function, it is skipped.
///
/// # Safety
/// The words must be the function, the rows of the grid, and the parameters in one of the two forms, or 0.
pub(super) unsafe fn is_skipped(function: u64, rows: u64, parameters: u64, extra: u64) -> bool {
    if !has_any_dry() {
        return false;
    }
    let name = name_of(function).unwrap_or_default();
    let (kernel, is_first) = KERNELS.lock().unwrap_or_else(PoisonError::into_inner).get(function, &name);
    // SAFETY: required by this function's contract.
    let is_skipped = unsafe { is_skipped_kernel(&kernel, (function, &name), rows, parameters, extra) };
    if is_skipped && is_first {
        // The driver may allocate, which a captured stream forbids unless the thread allows it.
        inside(|| cuda::relaxed(|| cuda::load_function(function)));
    }
    _ = WAS_SKIPPED.try_with(|was_skipped| was_skipped.set(is_skipped));
    is_skipped
}

/// Decides for [`is_skipped`].
///
/// # Safety
/// The same as for [`is_skipped`].
unsafe fn is_skipped_kernel(kernel: &Kernel, function: (u64, &str), rows: u64, parameters: u64, extra: u64) -> bool {
    if kernel.is_collective {
        return true;
    }
    // SAFETY: required by this function's contract.
    let arguments =
        unsafe { if parameters != 0 { addresses_of(function, rows, parameters) } else { addresses_in_buffer(extra) } };
    let Some(Arguments { addresses, parameters }) = arguments else { return true };
    let used = |(at, argument): (usize, &Argument)| {
        // The types are those of the parameters.
        let parameters = parameters.filter(|_| !argument.is_in_pinned);
        (argument.address, kernel.role(at, argument.parameter, parameters))
    };
    let used: Vec<_> = addresses.iter().enumerate().map(used).collect();
    let is_out = used.iter().any(|(address, role)| role.is_used() && is_out_of_reach(*address, role.is_read));
    let is_table = used.iter().any(|(address, role)| !role.is_used() && is_dry(*address));
    let mut memory = memory();
    let content = |(at, (address, role)): (usize, &(u64, Role))| {
        let content = memory.content(*address).filter(|content| role.is_read && content.is_unknown());
        Some((at, content?))
    };
    let unknown: Vec<_> = used.iter().enumerate().filter_map(content).collect();
    let is_skipped = is_out || unknown.iter().any(|(at, _)| kernel.needs(*at));
    let of_executed = match () {
        () if !unknown.is_empty() => kernel.result_of(unknown.iter().map(|(_, content)| *content)),
        () if is_table => Content::Table,
        () => Content::Known,
    };
    for (address, Role { is_read, output }) in used {
        let content = match output {
            None => continue,
            // A kernel that is skipped because of a table leaves it as it is.
            Some(_) if is_read && memory.content(address) == Some(Content::Table) => continue,
            Some(_) if !is_skipped => of_executed,
            Some(Output::Possible) => Content::Unknown,
            Some(Output::Certain) => Content::Missing(kernel.result_of_nothing.unwrap_or_else(fill_byte)),
            Some(Output::Addresses) => Content::Table,
        };
        memory.set_content(address, content);
        if content == Content::Table {
            watch(address, 1);
        }
    }
    is_skipped
}

/// Returns the addresses in the parameters of a launch. `None` if the driver does not report the parameters of the function.
///
/// # Safety
/// As for [`is_skipped`]; `parameters` must not be 0.
#[allow(clippy::cast_possible_truncation, reason = "an int is half a word")]
unsafe fn addresses_of((function, name): (u64, &str), rows: u64, parameters: u64) -> Option<Arguments> {
    let infos = PARAM_INFO.get().into_iter().flatten().flatten();
    let ask = |info: &GetParamInfo, at: usize| {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the program launches this function, so it is a handle that the driver knows. For the other kind of handle, the driver
        // returns an error. Both out-parameters are live.
        let code = inside(|| unsafe { info(function, at, &raw mut offset, &raw mut bytes) });
        (code, bytes as u64)
    };
    let unused = |words: &[u32]| unused(name, rows as u32, words, is_on_card);
    // The program may pass a `CUkernel` as a `CUfunction`.
    let mut is_known = false;
    for info in infos {
        let mut found = Arguments::default();
        for at in 0.. {
            match ask(info, at) {
                // SAFETY: the driver reads the same list when it launches the function: it has an address for each parameter that the
                // function has, where its bytes are.
                (SUCCESS, bytes) => {
                    // SAFETY: the driver reads the same list when it launches the function: it has an address for each parameter that the
                    // function has, where its bytes are.
                    let arguments = unsafe { addresses_in(get(parameters + at as u64 * 8), bytes, at, &unused) };
                    found.addresses.extend(arguments);
                }
                // There are no more parameters.
                (CUDA_ERROR_INVALID_VALUE, _) if at > 0 => {
                    return Some(Arguments { parameters: Some(at), ..found });
                }
                (code, _) if at == 0 => {
                    is_known |= code == CUDA_ERROR_INVALID_VALUE;
                    break;
                }
                _ => return None,
            }
        }
    }
    // The function has no parameters.
    is_known.then(Arguments::default)
}

/// Returns the name of a function, as the compiler has written it. `None` on older drivers.
fn name_of(function: u64) -> Option<String> {
    NAMES.get().into_iter().flatten().flatten().find_map(|get_name| {
        let mut name = ptr::null();
        // SAFETY: as in `addresses_of`.
        let code = inside(|| unsafe { get_name(&raw mut name, function) });
        if code != SUCCESS || name.is_null() {
            return None;
        }
        // SAFETY: the name ends with 0. It lives as long as the module of the function. A program may unload the module after the launch that
        // this is a part of, so the name is copied.
        unsafe { CStr::from_ptr(name) }.to_str().ok().map(str::to_owned)
    })
}

/// Returns the addresses on a GPU among the words, without those that the kernel does not read. An address of pinned memory stands for the
/// one that is stored there: MAGMA passes tables of addresses in pinned memory.
///
/// # Safety
/// `at` must be valid for reads of `bytes` bytes.
#[allow(clippy::cast_possible_truncation, reason = "a parameter has less than 64 KiB")]
unsafe fn addresses_in(
    at: u64,
    bytes: u64,
    parameter: usize,
    unused: &dyn Fn(&[u32]) -> Option<Range<usize>>,
) -> impl Iterator<Item = Argument> {
    // SAFETY: by the contract of this function, `bytes` bytes can be read at `at`, and this reads whole words of them.
    let word = |index: u64| unsafe { get(at + index * 8) };
    let argument = |word| {
        let address = is_on_card(word).then_some(word);
        let in_pinned = || in_pinned(word).filter(|address| is_on_card(*address));
        Some(Argument { address: address.or_else(in_pinned)?, parameter, is_in_pinned: address.is_none() })
    };
    let mut found: Vec<_> = (0..bytes / 8).filter_map(|index| Some((index, argument(word(index))?))).collect();
    if !found.is_empty() {
        // SAFETY: as above.
        let words: Vec<u32> =
            (0..bytes / 4).map(|word| unsafe { (at as *const u32).add(word as usize).read_unaligned() }).collect();
        let unused = unused(&words).unwrap_or_default();
        found.retain(|(index, _)| !unused.contains(&(*index as usize * 2)));
    }
    found.into_iter().map(|(_, argument)| argument)
}

/// Returns the addresses in a buffer of parameters.
///
/// # Safety
/// `extra` must be 0, or the list that `cuLaunchKernel` takes: pairs, until 0.
unsafe fn addresses_in_buffer(extra: u64) -> Option<Arguments> {
    let (mut buffer, mut bytes, mut at) = (0, 0, extra);
    while at != 0 {
        // SAFETY: the list ends with 0.
        let (key, value) = unsafe { (get(at), get(at + 8)) };
        match key {
            0 => break,
            // `CU_LAUNCH_PARAM_BUFFER_POINTER`
            1 => buffer = value,
            // `CU_LAUNCH_PARAM_BUFFER_SIZE` is followed by the address of the size. SAFETY: as above.
            2 => bytes = unsafe { get(value) },
            _ => return None,
        }
        at += 16;
    }
    // SAFETY: the program declared this size of the buffer.
    let found = unsafe { addresses_in(buffer, bytes, 0, &|_| None) };
    Some(Arguments { addresses: found.collect(), parameters: None })
}

/// # Safety
/// `words` must be the arguments of `cuStreamBatchMemOp`.
#[allow(clippy::cast_possible_truncation, reason = "an int is the lower half of the word")]
pub(super) unsafe fn stream_operations(words: &[u64], real: Real<'_>) -> u32 {
    // `CUstreamBatchMemOpParams` has six words. The second one is the address. SAFETY: the program passes this number
    // of them.
    let address = |at: usize| unsafe { (words[2] as *const u64).add(at * 6 + 1).read() };
    if (0..words[1] as u32 as usize).any(|at| is_dry(address(at))) { SUCCESS } else { real() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_program_that_only_reads_is_told_of_once() {
        let (mut reading, start) = (Reading::NONE, Instant::now());
        let mut add = |dry, seconds| reading.add(dry, start + Duration::from_secs(seconds));
        assert!((0..30_000).all(|_| add(1, 59).is_none()), "it is not long enough");
        // The program has allocated in between.
        assert!((0..19_999).all(|_| add(2, 200).is_none()));
        assert_eq!([add(2, 270), add(2, 271)], [Some(70), None]);
        assert!((0..30_000).all(|at| add(3, 300 + at).is_none()), "it is said once");
    }
}
