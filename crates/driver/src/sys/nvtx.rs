//! Receives NVTX ranges, with which programs and libraries mark parts of their running time.
//!
//! Each library that uses NVTX contains a copy of it. At its first use, a copy loads the library that `NVTX_INJECTION64_PATH` names, and
//! calls its function `InitializeInjectionNvtx2` with a function that returns the copy's tables. A tool writes its functions into these
//! tables. The types, the numbers of the functions and this protocol come from `nvtx3/nvtxDetail/nvtxTypes.h`.
//!
//! If another tool observes the ranges as well, it is initialized first, as NVTX would do. Then our functions replace its functions, and
//! pass each call on to them.
//!
//! A program may use NVTX in the child process of a fork, and a tool may use NVTX while it is initialized. Therefore no lock is held while
//! foreign code runs, and the child process of a fork waits for no lock (see `Names`).
//!
//! A range may end with a function of the extension for payloads, such as those of NCCL's communicators. An extension has its own table and
//! its own initialization, `InitializeInjectionNvtxExtension` of `nvtx3/nvtxDetail/nvtxExtTypes.h`.

use std::{
    borrow::Cow,
    cell::Cell,
    collections::HashMap,
    env,
    ffi::{c_char, c_int, c_uint, c_void},
    mem::transmute,
    panic::catch_unwind,
    path::Path,
    ptr, slice,
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{
            AtomicBool, AtomicPtr, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed},
        },
    },
};

use super::{injection, process};

/// The functions that receive events. A domain is an id; ranges without a domain have the domain 0.
///
/// The functions are called on the thread that has the range, inside the program's call.
pub struct RangeObserver {
    /// A range starts. It is inside all ranges of the same thread that have not ended.
    pub pushed: fn(domain: usize, name: &str, payload: Option<Payload>),
    /// The latest range of this domain ends.
    pub popped: fn(domain: usize, payload: Option<Payload>),
    /// The program marks this moment, or a range that may end on another thread starts, or ends (`is_end`).
    pub marked: fn(name: &str, is_end: bool),
}

/// The type of `nvtxGetExportTable`, which a copy of NVTX passes to its tool.
pub type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type InitializeInjection = unsafe extern "C" fn(GetExportTable) -> c_int;
type GetModuleFunctionTable = unsafe extern "C" fn(c_uint, *mut *const *mut usize, *mut c_uint) -> c_int;
/// The functions of a module, by number.
type Functions = [usize; FUNCTIONS];

/// `NVTX_ETID_CALLBACKS`
const CALLBACKS: u32 = 1;
/// `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`: the functions without and with a domain.
const CORE: c_uint = 1;
const CORE2: c_uint = 5;
/// The number of functions of each of the two, including number 0, which is unused. The extension for payloads is observed up to number 6.
const FUNCTIONS: usize = 16;
/// `NVTX_EXT_PAYLOAD_MODULEID`, and its index in [`OTHER`].
const PAYLOAD: u16 = 2;
const PAYLOADS: usize = 2;

/// The first bytes of the data that a program attached to a range. If there are fewer, the rest is 0.
pub type Payload = [u8; 24];

/// `nvtxPayloadData_t`
#[repr(C)]
struct PayloadData {
    schema: u64,
    size: usize,
    bytes: *const u8,
}

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks {
    size: usize,
    get_module_function_table: Option<GetModuleFunctionTable>,
}

/// `nvtxEventAttributes_t`. Later versions may have more at its end.
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    /// The number of payloads, if they are of the extension.
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_void,
}

/// `nvtxExtModuleInfo_t`. Later versions may have more at its end.
#[repr(C)]
pub struct ExtensionModule {
    version: u16,
    size: u16,
    module: u16,
    compatible: u16,
    segment_count: usize,
    segments: *const Segment,
}

/// `nvtxExtModuleSegment_t`
#[repr(C)]
struct Segment {
    id: usize,
    slot_count: usize,
    slots: *mut usize,
}

type InitializeExtension = unsafe extern "C" fn(*const ExtensionModule) -> c_int;

/// The maximum number of characters of a name that are read. Longer names are truncated.
const MOST_CHARACTERS: usize = 256;
/// The maximum number of names of domains, and of registered strings. Without a limit, a program that registers names endlessly would fill
/// its memory twice as fast.
const MOST_NAMES: usize = 1 << 16;
/// The text for an unknown name.
const NO_NAME: &str = "(no name)";

static OBSERVER: AtomicPtr<RangeObserver> = AtomicPtr::new(ptr::null_mut());

/// The functions of the other tool, by module and number. 0 if it has no such function.
static OTHER: [[AtomicUsize; FUNCTIONS]; 3] = [const { [const { AtomicUsize::new(0) }; FUNCTIONS] }; 3];

/// Names by handle. The other tool may use the same handle for a domain and a string.
///
/// A fork copies the names to the child process. If another thread holds the lock at that time, it stays locked in the child process
/// forever, so the child process starts with no names.
struct Names(AtomicPtr<Mutex<NameMap>>);
type NameMap = HashMap<usize, Box<str>>;
static DOMAINS: Names = Names::new();
static STRINGS: Names = Names::new();
/// The names of ranges that may end on another thread, by their ids, until they end.
static STARTED: Names = Names::new();
/// The latest handle of our own, for the case that no other tool creates handles. NVTX's own handles are pointers, so 0 is never one.
static HANDLES: AtomicUsize = AtomicUsize::new(0);

/// Sets the observer for the ranges of all copies of NVTX that have our functions.
pub fn set_observer(observer: &'static RangeObserver) {
    OBSERVER.store(ptr::from_ref(observer).cast_mut(), Relaxed);
}

// A copy of NVTX that is linked into the program together with gpumem finds the functions in these variables. It calls them at its first
// use if `NVTX_INJECTION64_PATH` names no tool. NVTX defines the variables weakly, for a tool that is linked statically:
// `nvtx3/nvtxDetail/nvtxInit.h`. Copies in shared libraries have their own variables. Linkers keep this section only once, because a
// program may contain two gpumem versions.
macro_rules! linked {
    ($variable:literal, $function:ident) => {
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        core::arch::global_asm!(
            concat!(".pushsection .data.rel.ro.gpumem_nvtx,\"awG\",@progbits,", $variable, ",comdat"),
            concat!(".globl ", $variable),
            concat!(".type ", $variable, ",@object"),
            concat!(".size ", $variable, ",8"),
            ".p2align 3",
            concat!($variable, ":"),
            ".quad {initialize}",
            ".popsection",
            initialize = sym $function,
        );
    };
}
linked!("InitializeInjectionNvtx2_fnptr", initialize_linked);
linked!("InitializeInjectionNvtxExtension_fnptr", initialize_linked_extension);

/// Puts our functions into a linked copy, if the program records itself. Returns 1 if they are in use. Otherwise the copy's functions do
/// nothing, and cost nothing.
///
/// # Safety
/// Only NVTX may call this.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" fn initialize_linked(get_export_table: GetExportTable) -> c_int {
    // SAFETY: NVTX passes this function and waits for the result.
    c_int::from(records_itself() && guarded(|| unsafe { observe_ranges(get_export_table, None) }).is_ok())
}

/// Like [`initialize_linked`], but for an extension.
///
/// # Safety
/// Only NVTX may call this.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" fn initialize_linked_extension(module: *const ExtensionModule) -> c_int {
    // SAFETY: NVTX passes this module and waits for the result.
    c_int::from(records_itself() && guarded(|| unsafe { observe_extension(module, None) }) == Ok(true))
}

/// Returns whether the program records itself. Only then are ranges scopes.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn records_itself() -> bool {
    env::var_os("GPUMEM_CAPTURE").is_some_and(|file| !file.is_empty())
}

/// Calls `observe` and catches its panics, because nothing may unwind into NVTX.
///
/// # Errors
/// Returns the error of `observe`, or an error if it panicked.
pub fn guarded<T>(observe: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(std::panic::AssertUnwindSafe(observe)).unwrap_or_else(|_| Err("gpumem panicked".to_owned()))
}

/// Puts our functions into the tables of a copy of NVTX, so that the observer receives its ranges. `other` is the library of another tool,
/// which receives each call as well.
///
/// # Errors
/// Returns an error if the copy lacks the needed tables, or if the other tool cannot be loaded. In the second case only the observer
/// receives the ranges.
///
/// # Safety
/// `get_export_table` must be the function that NVTX has passed to `InitializeInjectionNvtx2`, and this must be called inside that call.
pub unsafe fn observe_ranges(get_export_table: GetExportTable, other: Option<&Path>) -> Result<(), String> {
    Names::keep_in_children();
    // SAFETY: the caller passes NVTX's function. The tables that it returns live as long as the copy of NVTX.
    let tables = [CORE, CORE2].map(|module| unsafe { table_of(get_export_table, module) });
    // SAFETY: as below.
    let before = tables.map(|table| table.map(|table| unsafe { functions_of(table) }));
    let failed = other.and_then(|other| chain(get_export_table, other).err());
    for (module, (table, before)) in tables.into_iter().zip(before).enumerate() {
        let (table, before) = table.zip(before).ok_or("this version of NVTX has no such tables")?;
        // SAFETY: the entries point to the variables through which this copy calls the functions. NVTX lets its tool write them during the
        // initialization.
        unsafe { replace(module, table, failed.is_none().then_some(&before)) };
    }
    failed.map_or(Ok(()), Err)
}

/// Puts our functions into the table of an extension of a copy of NVTX, if it is the extension for payloads. `other` is as in
/// [`observe_ranges`]. Returns whether any tool uses the extension.
///
/// # Errors
/// Returns an error if the other tool cannot be loaded. Then only the observer receives the calls of the extension.
///
/// # Safety
/// The module must be the one that NVTX has passed to `InitializeInjectionNvtxExtension`, and this must be called inside that call.
pub unsafe fn observe_extension(module: *const ExtensionModule, other: Option<&Path>) -> Result<bool, String> {
    Names::keep_in_children();
    // SAFETY: the caller passes NVTX's module, which lives during the call.
    let module_info = unsafe { module.as_ref() }.filter(|info| info.module == PAYLOAD && info.segment_count > 0);
    // SAFETY: there is a segment, as NVTX says.
    let segment = module_info.and_then(|info| unsafe { info.segments.as_ref() }).filter(|of| !of.slots.is_null());
    let slots_of =
        |of: &Segment| (0..of.slot_count.min(FUNCTIONS)).map(|at| of.slots.wrapping_add(at)).collect::<Vec<_>>();
    let slots = segment.map(slots_of);
    // SAFETY: as below.
    let before = slots.as_ref().map(|slots| unsafe { functions_of(slots) });
    let forwarded = other.map_or(Ok(false), |other| {
        // SAFETY: the user named the tool for NVTX, which calls this.
        let initialize = unsafe { injection::function(other, "InitializeInjectionNvtxExtension") };
        // Tools of older versions do not know extensions.
        let Ok(initialize) = initialize else { return Ok(false) };
        // SAFETY: this is the type that NVTX documents for this name.
        let initialize = unsafe { transmute::<*const c_void, InitializeExtension>(initialize.as_ptr()) };
        // SAFETY: the function is called with NVTX's arguments, at the time when NVTX would have called it.
        if unsafe { initialize(module) } == 0 {
            return Err(format!("{} rejected an extension of NVTX, and gets no calls from it", other.display()));
        }
        Ok(true)
    });
    let Some((slots, before)) = slots.zip(before) else { return forwarded };
    // SAFETY: NVTX lets its tool write the slots during the initialization.
    unsafe { replace(PAYLOADS, &slots, (forwarded == Ok(true)).then_some(&before)) };
    forwarded.map(|_| true)
}

/// Returns the functions that a copy of NVTX currently calls.
///
/// # Safety
/// Each entry must be null, or the address of a pointer to a function.
unsafe fn functions_of(entries: &[*mut usize]) -> Functions {
    let mut functions = [0; FUNCTIONS];
    for (function, entry) in functions.iter_mut().zip(entries).filter(|(_, entry)| !entry.is_null()) {
        // SAFETY: required by this function's contract.
        *function = unsafe { entry.read() };
    }
    functions
}

/// Puts our functions into the entries. `before` contains the functions from before the other tool wrote its own, which ours call; `None`
/// if there is no other tool.
///
/// # Safety
/// Each entry must be null, or the address of a pointer to the function of this module with that number, and NVTX must allow writing it
/// now.
unsafe fn replace(module: usize, entries: &[*mut usize], before: Option<&Functions>) {
    // SAFETY: required by this function's contract.
    let now = unsafe { functions_of(entries) };
    for (number, (entry, ours)) in entries.iter().zip(our_functions()[module]).enumerate() {
        if entry.is_null() || ours == 0 {
            continue;
        }
        if before.is_some_and(|before| before[number] != now[number]) && now[number] != ours {
            OTHER[module][number].store(now[number], Relaxed);
        }
        // SAFETY: required by this function's contract. The function has the type of that number.
        unsafe { entry.write(ours) };
    }
}

/// Returns the table of a module, which contains the address of the pointer to each function.
///
/// # Safety
/// `get_export_table` must be the function of a copy of NVTX, or ours.
unsafe fn table_of<'a>(get_export_table: GetExportTable, module: c_uint) -> Option<&'a [*mut usize]> {
    // SAFETY: NVTX returns null, or a table that is never freed and starts with its size.
    let callbacks = unsafe { get_export_table(CALLBACKS).cast::<Callbacks>().as_ref() }?;
    if callbacks.size < size_of::<Callbacks>() {
        return None;
    }
    let (mut table, mut size) = (ptr::null(), 0);
    // SAFETY: both pointers are to our variables.
    let is_known = unsafe { callbacks.get_module_function_table?(module, &raw mut table, &raw mut size) };
    if is_known == 0 || table.is_null() {
        return None;
    }
    // SAFETY: NVTX returns the number of entries. Later versions of NVTX append entries.
    Some(unsafe { slice::from_raw_parts(table, (size as usize).min(FUNCTIONS)) })
}

/// Makes the other tool put its functions into the tables of the copy.
fn chain(get_export_table: GetExportTable, other: &Path) -> Result<(), String> {
    let failed = |why: String| format!("NVTX_INJECTION64_PATH names {}, which gets no ranges: {why}", other.display());
    // SAFETY: the user named the tool for NVTX, which has called `InitializeInjectionNvtx2` of this library.
    let initialize = unsafe { injection::function(other, "InitializeInjectionNvtx2") }.map_err(failed)?;
    // SAFETY: this is the type that NVTX documents for this name.
    let initialize = unsafe { transmute::<*const c_void, InitializeInjection>(initialize.as_ptr()) };
    // SAFETY: the function is called with NVTX's arguments, at the time when NVTX would have called it. The tool stores only functions of
    // the types that NVTX documents.
    if unsafe { initialize(get_export_table) } == 0 {
        return Err(failed("its initialization failed".to_owned()));
    }
    Ok(())
}

/// Calls the observer. NVTX calls that the observer makes itself are not observed. Neither are calls in a process that was forked from a
/// recorded process.
fn notify(what: impl FnOnce(&RangeObserver)) {
    thread_local! {
        static IS_NOTIFYING: Cell<bool> = const { Cell::new(false) };
    }
    // SAFETY: it is null, or a reference that lives as long as the process.
    let Some(observer) = (unsafe { OBSERVER.load(Relaxed).as_ref() }).filter(|_| !process::is_forked()) else { return };
    // While a thread ends, its thread-local variables may be gone.
    let is_first = IS_NOTIFYING.try_with(|is_notifying| !is_notifying.replace(true)).unwrap_or(false);
    if is_first {
        // A panic must not unwind into the program.
        _ = catch_unwind(std::panic::AssertUnwindSafe(|| what(observer)));
        _ = IS_NOTIFYING.try_with(|is_notifying| is_notifying.set(false));
    }
}

fn push(domain: usize, name: &str, payload: Option<Payload>) {
    notify(|observer| (observer.pushed)(domain, &with_domain(domain, name), payload));
}

/// Returns the name in the form that NVIDIA's tools use.
fn with_domain(domain: usize, name: &str) -> Cow<'_, str> {
    DOMAINS.get(domain).map_or(Cow::Borrowed(name), |domain| Cow::Owned(format!("{domain}:{name}")))
}

fn mark(domain: usize, name: &str) {
    notify(|observer| (observer.marked)(&with_domain(domain, name), false));
}

/// Starts a range. Returns its id, which is the other tool's, or else a new one.
fn start(domain: usize, name: &str, of_other: Option<usize>) -> usize {
    mark(domain, name);
    let id = of_other.unwrap_or_else(new_handle);
    STARTED.set(id, &with_domain(domain, name));
    id
}

fn end(id: usize) {
    let name = STARTED.lock().remove(&id);
    if let Some(name) = name {
        notify(|observer| (observer.marked)(&name, true));
    }
}

fn pop(domain: usize, payload: Option<Payload>) {
    notify(|observer| (observer.popped)(domain, payload));
}

/// Assigns this name to the other tool's handle, or else to a new one. Returns the handle.
fn handle(names: &Names, of_other: Option<usize>, name: &str) -> usize {
    let handle = of_other.filter(|handle| *handle != 0).unwrap_or_else(new_handle);
    names.set(handle, name);
    handle
}

fn new_handle() -> usize {
    HANDLES.fetch_add(1, Relaxed) + 1
}

impl Names {
    const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Makes sure that the child process of a fork waits for none of the locks.
    fn keep_in_children() {
        static DONE: AtomicBool = AtomicBool::new(false);
        unsafe extern "C" fn in_child() {
            [&DOMAINS, &STRINGS, &STARTED].into_iter().for_each(Names::leave_if_locked);
        }
        process::run_in_children(&DONE, in_child);
    }

    /// Starts with no names if a thread holds the lock. This is called in the child process of a fork, where that thread does not exist.
    fn leave_if_locked(&self) {
        // SAFETY: it is null, or was made in `lock` and is never released.
        let names = unsafe { self.0.load(Relaxed).as_ref() };
        if names.is_some_and(|names| matches!(names.try_lock(), Err(TryLockError::WouldBlock))) {
            self.0.store(ptr::null_mut(), Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'static, NameMap> {
        let mut names = self.0.load(Acquire);
        if names.is_null() {
            let new = Box::into_raw(Box::default());
            names = self.0.compare_exchange(names, new, AcqRel, Acquire).map_or_else(
                |first| {
                    // SAFETY: the box was created above, and no other thread has it.
                    drop(unsafe { Box::from_raw(new) });
                    first
                },
                |_| new,
            );
        }
        // SAFETY: the names were created here, and are never released.
        unsafe { &*names }.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name of a handle.
    fn get(&self, handle: usize) -> Option<String> {
        if handle == 0 {
            return None;
        }
        self.lock().get(&handle).map(|name| name.as_ref().to_owned())
    }

    fn set(&self, handle: usize, name: &str) {
        let mut names = self.lock();
        if names.len() < MOST_NAMES || names.contains_key(&handle) {
            names.insert(handle, name.into());
        }
    }
}

/// Reads a string of the program.
///
/// # Safety
/// The pointer must be null, or point to a string that ends with a zero.
unsafe fn text_a(text: *const c_char) -> String {
    if text.is_null() {
        return NO_NAME.to_owned();
    }
    // SAFETY: this function's contract requires that the string ends with a zero. No byte after that is read.
    let length = unsafe { libc::strnlen(text, MOST_CHARACTERS) };
    // SAFETY: the string has this many bytes, and the program does not change them during the call.
    String::from_utf8_lossy(unsafe { slice::from_raw_parts(text.cast(), length) }).into_owned()
}

/// Like [`text_a`], but for wide characters, which have 32 bits on Linux.
///
/// # Safety
/// The same as for [`text_a`].
unsafe fn text_w(text: *const u32) -> String {
    if text.is_null() {
        return NO_NAME.to_owned();
    }
    // SAFETY: this function's contract requires that the string ends with a zero. No character after that is read.
    let characters =
        (0..MOST_CHARACTERS).map(|at| unsafe { text.add(at).read() }).take_while(|character| *character != 0);
    characters.map(|character| char::from_u32(character).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

/// Returns the attributes of a range, unless their version is too old.
///
/// # Safety
/// The pointer must be null, or point to the attributes of a range, as NVTX documents them.
unsafe fn known<'a>(attributes: *const EventAttributes) -> Option<&'a EventAttributes> {
    if attributes.is_null() {
        return None;
    }
    // SAFETY: all versions start with these two numbers.
    let size = unsafe { (*attributes).size };
    // SAFETY: the attributes have at least this size.
    (usize::from(size) >= size_of::<EventAttributes>()).then(|| unsafe { &*attributes })
}

/// Returns the first payload of a range.
///
/// # Safety
/// The same as for [`known`].
unsafe fn payload_of(attributes: *const EventAttributes) -> Option<Payload> {
    /// `NVTX_PAYLOAD_TYPE_EXT`
    const OF_EXTENSION: i32 = 0xDFBD_0009_u32.cast_signed();
    // SAFETY: required by this function's contract.
    let attributes = unsafe { known(attributes) }.filter(|attributes| attributes.payload_type == OF_EXTENSION)?;
    let count = usize::try_from(attributes.reserved).ok()?;
    // SAFETY: with this type, `payload` points to `reserved` payloads.
    unsafe { first_payload(attributes.payload as *const PayloadData, count) }
}

/// Copies the start of the first payload.
///
/// # Safety
/// The pointer must be null, or point to this many payloads, as NVTX documents them.
unsafe fn first_payload(payloads: *const PayloadData, count: usize) -> Option<Payload> {
    if count == 0 {
        return None;
    }
    // SAFETY: required by this function's contract.
    let PayloadData { size, bytes, .. } = unsafe { payloads.as_ref() }?;
    // The size of a payload may be left to its schema.
    if bytes.is_null() || [0, usize::MAX].contains(size) {
        return None;
    }
    let mut payload = Payload::default();
    let length = payload.len().min(*size);
    // SAFETY: the payload has `size` bytes, and the program does not change them during the call.
    payload[..length].copy_from_slice(unsafe { slice::from_raw_parts(*bytes, length) });
    Some(payload)
}

/// Returns the message of a range.
///
/// # Safety
/// The same as for [`known`].
unsafe fn message(attributes: *const EventAttributes) -> String {
    // SAFETY: required by this function's contract.
    let Some(attributes) = (unsafe { known(attributes) }) else { return NO_NAME.to_owned() };
    match attributes.message_type {
        // SAFETY: `NVTX_MESSAGE_TYPE_ASCII`: it is such a string.
        1 => unsafe { text_a(attributes.message.cast()) },
        // SAFETY: `NVTX_MESSAGE_TYPE_UNICODE`: it is a string of wide characters.
        2 => unsafe { text_w(attributes.message.cast()) },
        // `NVTX_MESSAGE_TYPE_REGISTERED`
        3 => STRINGS.get(attributes.message.addr()).unwrap_or_else(|| NO_NAME.to_owned()),
        _ => NO_NAME.to_owned(),
    }
}

/// The result of a push or a pop without another tool: `NVTX_NO_PUSH_POP_TRACKING`.
const NOT_TRACKED: c_int = -2;

/// Defines our functions, by module (0 is [`CORE`], 1 is [`CORE2`]) and number. `$other` calls the function of the other tool, if it has
/// one. For all other numbers, the other tool's own function stays in the tables.
macro_rules! functions {
    ($(($module:literal, $number:literal) $name:ident($($argument:ident: $ty:ty),*) $(-> $result:ty)? |$other:ident| $body:block)*) => {
        $(unsafe extern "C" fn $name($($argument: $ty),*) $(-> $result)? {
            let $other = || {
                let function = OTHER[$module][$number].load(Relaxed);
                (function != 0).then(|| {
                    // SAFETY: the tool has stored a function of the type that NVTX documents for this number, and the arguments are
                    // those of the program.
                    unsafe { transmute::<usize, unsafe extern "C" fn($($ty),*) $(-> $result)?>(function)($($argument),*) }
                })
            };
            $body
        })*

        /// Our functions, by module and number. 0 if there is none.
        fn our_functions() -> [Functions; 3] {
            let mut functions = [[0; FUNCTIONS]; 3];
            $(functions[$module][$number] = $name as *const () as usize;)*
            functions
        }
    };
}

// The program calls each function with the arguments that NVTX documents. A payload is not a name, so a range that has only a payload has none.
// The id of a range, `nvtxRangeId_t`, has 64 bits.
functions! {
    (0, 1) mark_ex(attributes: *const EventAttributes) |other| {
        // SAFETY: see above.
        mark(0, &unsafe { message(attributes) });
        other();
    }
    (0, 2) mark_a(name: *const c_char) |other| {
        // SAFETY: see above.
        mark(0, &unsafe { text_a(name) });
        other();
    }
    (0, 3) mark_w(name: *const u32) |other| {
        // SAFETY: see above.
        mark(0, &unsafe { text_w(name) });
        other();
    }
    (0, 4) range_start_ex(attributes: *const EventAttributes) -> usize |other| {
        // SAFETY: see above.
        start(0, &unsafe { message(attributes) }, other())
    }
    (0, 5) range_start_a(name: *const c_char) -> usize |other| {
        // SAFETY: see above.
        start(0, &unsafe { text_a(name) }, other())
    }
    (0, 6) range_start_w(name: *const u32) -> usize |other| {
        // SAFETY: see above.
        start(0, &unsafe { text_w(name) }, other())
    }
    (0, 7) range_end(id: usize) |other| {
        end(id);
        other();
    }
    (0, 8) range_push_ex(attributes: *const EventAttributes) -> c_int |other| {
        // SAFETY: see above.
        push(0, &unsafe { message(attributes) }, unsafe { payload_of(attributes) });
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 9) range_push_a(name: *const c_char) -> c_int |other| {
        // SAFETY: see above.
        push(0, &unsafe { text_a(name) }, None);
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 10) range_push_w(name: *const u32) -> c_int |other| {
        // SAFETY: see above.
        push(0, &unsafe { text_w(name) }, None);
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 11) range_pop() -> c_int |other| {
        pop(0, None);
        other().unwrap_or(NOT_TRACKED)
    }
    (1, 1) domain_mark_ex(domain: usize, attributes: *const EventAttributes) |other| {
        // SAFETY: see above.
        mark(domain, &unsafe { message(attributes) });
        other();
    }
    (1, 2) domain_range_start_ex(domain: usize, attributes: *const EventAttributes) -> usize |other| {
        // SAFETY: see above.
        start(domain, &unsafe { message(attributes) }, other())
    }
    (1, 3) domain_range_end(_domain: usize, id: usize) |other| {
        end(id);
        other();
    }
    (1, 4) domain_range_push_ex(domain: usize, attributes: *const EventAttributes) -> c_int |other| {
        // SAFETY: see above.
        push(domain, &unsafe { message(attributes) }, unsafe { payload_of(attributes) });
        other().unwrap_or(NOT_TRACKED)
    }
    (1, 5) domain_range_pop(domain: usize) -> c_int |other| {
        pop(domain, None);
        other().unwrap_or(NOT_TRACKED)
    }
    (1, 10) domain_register_string_a(domain: usize, text: *const c_char) -> usize |other| {
        // SAFETY: see above.
        handle(&STRINGS, other(), &unsafe { text_a(text) })
    }
    (1, 11) domain_register_string_w(domain: usize, text: *const u32) -> usize |other| {
        // SAFETY: see above.
        handle(&STRINGS, other(), &unsafe { text_w(text) })
    }
    (1, 12) domain_create_a(name: *const c_char) -> usize |other| {
        // SAFETY: see above.
        handle(&DOMAINS, other(), &unsafe { text_a(name) })
    }
    (1, 13) domain_create_w(name: *const u32) -> usize |other| {
        // SAFETY: see above.
        handle(&DOMAINS, other(), &unsafe { text_w(name) })
    }
    (2, 2) mark_payload(domain: usize, _data: *const c_void, _count: usize) |other| {
        mark(domain, NO_NAME);
        other();
    }
    (2, 3) range_push_payload(domain: usize, payloads: *const PayloadData, count: usize) -> c_int |other| {
        // SAFETY: see above.
        push(domain, NO_NAME, unsafe { first_payload(payloads, count) });
        other().unwrap_or(NOT_TRACKED)
    }
    (2, 4) range_pop_payload(domain: usize, payloads: *const PayloadData, count: usize) -> c_int |other| {
        // SAFETY: see above.
        pop(domain, unsafe { first_payload(payloads, count) });
        other().unwrap_or(NOT_TRACKED)
    }
    (2, 5) range_start_payload(domain: usize, _data: *const c_void, _count: usize) -> usize |other| {
        start(domain, NO_NAME, other())
    }
    (2, 6) range_end_payload(_domain: usize, id: usize, _data: *const c_void, _count: usize) |other| {
        end(id);
        other();
    }
}
