//! Receives NVTX, with which programs and libraries mark ranges of their time.
//!
//! Each library that uses NVTX has a copy of it. At its first use a copy loads the library that `NVTX_INJECTION64_PATH` names, and calls
//! `InitializeInjectionNvtx2` there with a function that returns its tables. A tool writes its functions into these tables. The
//! types, the numbers of the functions and this protocol are those of `nvtx3/nvtxDetail/nvtxTypes.h`.
//!
//! If another tool has to observe the ranges as well, it gets tables of ours in the place of the copy's, and each call is passed on to
//! it.
//!
//! A range may end with a function of the extension for payloads, as those of NCCL's communicators do. An extension has a table and an
//! initialization of its own, `InitializeInjectionNvtxExtension` of `nvtx3/nvtxDetail/nvtxExtTypes.h`.

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
        Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use super::injection;

/// The events that a tool receives. A domain is a number; that of ranges without a domain is 0.
///
/// The functions are called on the thread that has the range, inside of the program's call.
pub struct RangeObserver {
    /// A range begins, which lies inside of all ranges of the same thread that have not ended.
    pub pushed: fn(domain: usize, name: &str),
    /// The newest range of this domain ends.
    pub popped: fn(domain: usize),
    /// The program marks this moment, or a range that may end on another thread begins, or ends (`is_end`).
    pub marked: fn(name: &str, is_end: bool),
}

/// The type of `nvtxGetExportTable`, which a copy of NVTX passes to its tool.
pub type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type InitializeInjection = unsafe extern "C" fn(GetExportTable) -> c_int;
type GetModuleFunctionTable = unsafe extern "C" fn(c_uint, *mut *const *mut usize, *mut c_uint) -> c_int;

/// `NVTX_ETID_CALLBACKS`
const CALLBACKS: u32 = 1;
/// These are `NVTX_CB_MODULE_CORE` and `NVTX_CB_MODULE_CORE2`: the functions without and with a domain.
const CORE: c_uint = 1;
const CORE2: c_uint = 5;
/// The number of functions of each of the two, including the number 0, which means none. The extension for payloads is observed up
/// to number 6.
const FUNCTIONS: usize = COUNT as usize;
const COUNT: c_uint = 16;
/// `NVTX_EXT_PAYLOAD_MODULEID`, and its place in [`OTHER`].
const PAYLOAD: u16 = 2;
const PAYLOADS: usize = 2;

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

/// The longest name that is read, in characters of the program. A longer one is cut.
const MOST_CHARACTERS: usize = 256;
/// The largest number of names of domains, and of registered strings. Without a limit, a program that registers names without
/// end would fill its memory twice.
const MOST_NAMES: usize = 1 << 16;
/// The text in the place of an unknown name.
const NO_NAME: &str = "(no name)";

static OBSERVER: OnceLock<RangeObserver> = OnceLock::new();

/// The functions of the other tool, by module and number. 0 if it has none.
static OTHER: [[AtomicUsize; FUNCTIONS]; 3] = [const { [const { AtomicUsize::new(0) }; FUNCTIONS] }; 3];

/// Names by handle. The other tool may give a domain and a string the same handle.
type Names = RwLock<Option<HashMap<usize, Box<str>>>>;
static DOMAINS: Names = RwLock::new(None);
static STRINGS: Names = RwLock::new(None);
/// The names of ranges that may end on another thread, by their ids, until they end.
static STARTED: Names = RwLock::new(None);
/// The newest handle that is ours, if there is no other tool to make one. NVTX's own handles are pointers, so 0 is none.
static HANDLES: AtomicUsize = AtomicUsize::new(0);

/// Sets the observer of the ranges of all copies of NVTX with our functions. Only the first call has an effect.
pub fn set_observer(observer: RangeObserver) {
    _ = OBSERVER.set(observer);
}

// A copy of NVTX that is linked into the program beside gpumem finds the functions in these variables, and calls them at its first use if
// `NVTX_INJECTION64_PATH` names no tool. NVTX defines the variables weakly, for a tool that is linked statically: `nvtx3/nvtxDetail/nvtxInit.h`.
// Copies in shared libraries have variables of their own. The section is one that linkers keep once: a program may have two versions of gpumem.
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

/// Returns 1 if the functions of this copy are ours from now on. Else they do nothing, and cost nothing.
///
/// # Safety
/// It is called by NVTX.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" fn initialize_linked(get_export_table: GetExportTable) -> c_int {
    // SAFETY: NVTX passes this function, and waits for the answer.
    c_int::from(records_itself() && guarded(|| unsafe { observe_ranges(get_export_table, None) }).is_ok())
}

/// The same for an extension.
///
/// # Safety
/// It is called by NVTX.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" fn initialize_linked_extension(module: *const ExtensionModule) -> c_int {
    // SAFETY: NVTX passes this module, and waits for the answer.
    c_int::from(records_itself() && guarded(|| unsafe { observe_extension(module, None) }) == Ok(true))
}

/// Ranges are scopes only in programs that record themselves.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn records_itself() -> bool {
    env::var_os("GPUMEM_CAPTURE").is_some_and(|file| !file.is_empty())
}

/// Nothing unwinds into NVTX.
///
/// # Errors
/// Returns the errors of the function, or that it panicked.
pub fn guarded<T>(observe: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(std::panic::AssertUnwindSafe(observe)).unwrap_or_else(|_| Err("gpumem panicked".to_owned()))
}

/// Copies of NVTX in several libraries may come at once, and the other tool has one set of tables.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Puts functions into the tables of a copy of NVTX, so that the observer is told of its ranges. `other` is the file of another tool,
/// which gets each call as well.
///
/// # Errors
/// Returns an error if the copy does not have the needed tables, or if the other tool cannot be loaded. That tool gets no ranges then,
/// but the observer does.
///
/// # Safety
/// `get_export_table` is the function that NVTX has passed to `InitializeInjectionNvtx2`, and this is called inside of that call.
pub unsafe fn observe_ranges(get_export_table: GetExportTable, other: Option<&Path>) -> Result<(), String> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = other.and_then(|other| chain(get_export_table, other).err());
    for (module, functions) in [CORE, CORE2].into_iter().zip(all_functions()) {
        // SAFETY: the caller passes NVTX's function. The table that it returns lives as long as the copy of NVTX.
        let table = unsafe { table_of(get_export_table, module) }.ok_or("this version of NVTX has no such tables")?;
        for (entry, function) in table.iter().zip(functions).skip(1) {
            if !entry.is_null() && function != 0 {
                // SAFETY: the entry points to the variable through which this copy calls the function. NVTX lets its tool write it
                // inside of the initialization, while its other threads wait. The function has the type of that number.
                unsafe { entry.write(function) };
            }
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Puts functions into the table of an extension of a copy of NVTX, if it is the one for payloads. `other` is as in [`observe_ranges`].
/// Returns whether anybody uses the extension.
///
/// # Errors
/// Returns an error if the other tool cannot be loaded. That tool does not get the calls of the extension then, but the
/// observer does.
///
/// # Safety
/// The module is the one that NVTX has passed to `InitializeInjectionNvtxExtension`, and this is called inside of that call.
pub unsafe fn observe_extension(module: *const ExtensionModule, other: Option<&Path>) -> Result<bool, String> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let asked = other.map_or(Ok(false), |other| {
        // Tools of older versions do not know extensions.
        let Ok(initialize) = injection::function(other, "InitializeInjectionNvtxExtension") else { return Ok(false) };
        // SAFETY: this is the type that NVTX documents for this name.
        let initialize = unsafe { transmute::<*const c_void, InitializeExtension>(initialize.as_ptr()) };
        // SAFETY: it gets the arguments of NVTX, at the place where NVTX would have called it.
        if unsafe { initialize(module) } == 0 {
            return Err(format!("{} refused an extension of NVTX, and gets no calls of it", other.display()));
        }
        Ok(true)
    });
    // SAFETY: the caller passes NVTX's module, which lives during the call.
    let Some(module) = (unsafe { module.as_ref() }) else { return asked };
    if module.module != PAYLOAD || module.segment_count == 0 || module.segments.is_null() {
        return asked;
    }
    // SAFETY: NVTX says that there is a segment.
    let Segment { slot_count, slots, .. } = unsafe { &*module.segments };
    for (number, function) in all_functions()[PAYLOADS].into_iter().enumerate().take(*slot_count) {
        if function == 0 {
            continue;
        }
        // SAFETY: there are this number of slots, through which this copy calls the functions. NVTX lets its tool write them inside
        // of the initialization, while its other threads wait. The function has the type of that number.
        unsafe {
            let slot = slots.add(number);
            if asked == Ok(true) {
                OTHER[PAYLOADS][number].store(slot.read(), Relaxed);
            }
            slot.write(function);
        }
    }
    asked.map(|_| true)
}

/// Returns the table of a module: the place of the pointer to each function.
///
/// # Safety
/// The function is that of a copy of NVTX, or of ours.
unsafe fn table_of<'a>(get_export_table: GetExportTable, module: c_uint) -> Option<&'a [*mut usize]> {
    // SAFETY: NVTX returns null, or a table that is never freed and begins with its size.
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
    // SAFETY: NVTX returns the number of entries. Newer versions of NVTX append entries.
    Some(unsafe { slice::from_raw_parts(table, (size as usize).min(FUNCTIONS)) })
}

/// NVTX's own function of the copy that is being initialized, for other questions of the other tool.
static REAL: Mutex<Option<GetExportTable>> = Mutex::new(None);

/// Makes the other tool put its functions into [`OTHER`].
fn chain(get_export_table: GetExportTable, other: &Path) -> Result<(), String> {
    let failed = |why: String| format!("NVTX_INJECTION64_PATH names {}, which gets no ranges: {why}", other.display());
    let initialize = injection::function(other, "InitializeInjectionNvtx2").map_err(failed)?;
    // SAFETY: this is the type that NVTX documents for this name.
    let initialize = unsafe { transmute::<*const c_void, InitializeInjection>(initialize.as_ptr()) };
    *REAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(get_export_table);
    // SAFETY: our function behaves as NVTX's own. The tool stores only functions of the types that NVTX documents.
    if unsafe { initialize(export_table) } == 0 {
        return Err(failed("it refused".to_owned()));
    }
    Ok(())
}

extern "C" fn export_table(id: u32) -> *const c_void {
    static OURS: Callbacks =
        Callbacks { size: size_of::<Callbacks>(), get_module_function_table: Some(module_function_table) };
    if id == CALLBACKS { (&raw const OURS).cast() } else { real_table(id) }
}

/// Returns the answer of the copy of NVTX that is being initialized for this number.
fn real_table(id: u32) -> *const c_void {
    let real = *REAL.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: it is the function of a copy of NVTX, and a number is all that it takes.
    real.map_or(ptr::null(), |real| unsafe { real(id) })
}

/// Gives the other tool [`OTHER`] for the two modules that we observe, and the copy's own table for the rest.
unsafe extern "C" fn module_function_table(module: c_uint, table: *mut *const *mut usize, size: *mut c_uint) -> c_int {
    let which = match module {
        CORE => 0,
        CORE2 => 1,
        _ => {
            // SAFETY: NVTX returns null, or a table that is never freed.
            let Some(real) = (unsafe { real_table(CALLBACKS).cast::<Callbacks>().as_ref() }) else { return 0 };
            let Some(real) = real.get_module_function_table else { return 0 };
            // SAFETY: the tool's pointers are passed on as they are.
            return unsafe { real(module, table, size) };
        }
    };
    // The table is never released, because the tool may keep it. Each copy of NVTX asks once for each module.
    let entries = Box::leak(Box::new(OTHER[which].each_ref().map(AtomicUsize::as_ptr)));
    // SAFETY: the tool passes pointers to its variables, or null for a size that it does not need.
    unsafe {
        *table = entries.as_ptr();
        if let Some(size) = size.as_mut() {
            *size = COUNT;
        }
    }
    1
}

/// Calls the observer. Calls of NVTX that the observer makes itself are not observed.
fn tell(what: impl FnOnce(&RangeObserver)) {
    thread_local! {
        static IS_TOLD: Cell<bool> = const { Cell::new(false) };
    }
    // While a thread ends, its locals may be gone.
    let is_first = IS_TOLD.try_with(|is_told| !is_told.replace(true)).unwrap_or(false);
    if is_first {
        // A panic must not unwind into the program.
        _ = catch_unwind(std::panic::AssertUnwindSafe(|| OBSERVER.get().map(what)));
        _ = IS_TOLD.try_with(|is_told| is_told.set(false));
    }
}

fn push(domain: usize, name: &str) {
    tell(|observer| (observer.pushed)(domain, &with_domain(domain, name)));
}

/// The name as NVIDIA's tools write it.
fn with_domain(domain: usize, name: &str) -> Cow<'_, str> {
    name_of(&DOMAINS, domain).map_or(Cow::Borrowed(name), |domain| Cow::Owned(format!("{domain}:{name}")))
}

fn mark(domain: usize, name: &str) {
    tell(|observer| (observer.marked)(&with_domain(domain, name), false));
}

/// Returns the id of the range: the other tool's, or else a new one.
fn start(domain: usize, name: &str, of_other: Option<usize>) -> usize {
    mark(domain, name);
    let id = of_other.unwrap_or_else(new_handle);
    set_name(&STARTED, id, &with_domain(domain, name));
    id
}

fn end(id: usize) {
    let mut started = STARTED.write().unwrap_or_else(PoisonError::into_inner);
    let name = started.as_mut().and_then(|started| started.remove(&id));
    drop(started);
    if let Some(name) = name {
        tell(|observer| (observer.marked)(&name, true));
    }
}

fn pop(domain: usize) {
    tell(|observer| (observer.popped)(domain));
}

/// Returns the name of a handle.
fn name_of(names: &Names, handle: usize) -> Option<String> {
    if handle == 0 {
        return None;
    }
    names.read().unwrap_or_else(PoisonError::into_inner).as_ref()?.get(&handle).map(|name| name.as_ref().to_owned())
}

/// Gives this name to the other tool's handle, or else to a new one.
fn handle(names: &Names, of_other: Option<usize>, name: &str) -> usize {
    let handle = of_other.filter(|handle| *handle != 0).unwrap_or_else(new_handle);
    set_name(names, handle, name);
    handle
}

fn new_handle() -> usize {
    HANDLES.fetch_add(1, Relaxed) + 1
}

fn set_name(names: &Names, handle: usize, name: &str) {
    let mut names = names.write().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    if names.len() < MOST_NAMES || names.contains_key(&handle) {
        names.insert(handle, name.into());
    }
}

/// Reads a text of the program.
///
/// # Safety
/// The pointer is null, or to a string that ends with a zero.
unsafe fn text_a(text: *const c_char) -> String {
    if text.is_null() {
        return NO_NAME.to_owned();
    }
    // SAFETY: the caller says that the string ends with a zero. No byte after that is read.
    let length = unsafe { libc::strnlen(text, MOST_CHARACTERS) };
    // SAFETY: there are this many bytes, which the program does not change during the call.
    String::from_utf8_lossy(unsafe { slice::from_raw_parts(text.cast(), length) }).into_owned()
}

/// Reads a text like [`text_a`], of wide characters, which have 32 bits on Linux.
///
/// # Safety
/// The same as for [`text_a`].
unsafe fn text_w(text: *const u32) -> String {
    if text.is_null() {
        return NO_NAME.to_owned();
    }
    // SAFETY: the caller says that the string ends with a zero. No character after that is read.
    let characters =
        (0..MOST_CHARACTERS).map(|at| unsafe { text.add(at).read() }).take_while(|character| *character != 0);
    characters.map(|character| char::from_u32(character).unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
}

/// Returns the message of a range.
///
/// # Safety
/// The pointer is null or to the attributes of a range, as NVTX documents them.
unsafe fn message(attributes: *const EventAttributes) -> String {
    if attributes.is_null() {
        return NO_NAME.to_owned();
    }
    // SAFETY: all versions begin with these two numbers.
    let size = unsafe { (*attributes).size };
    if usize::from(size) < size_of::<EventAttributes>() {
        return NO_NAME.to_owned();
    }
    // SAFETY: the attributes have at least this size.
    let attributes = unsafe { &*attributes };
    match attributes.message_type {
        // SAFETY: `NVTX_MESSAGE_TYPE_ASCII`: it is such a string.
        1 => unsafe { text_a(attributes.message.cast()) },
        // SAFETY: `NVTX_MESSAGE_TYPE_UNICODE`: it is a string of wide characters.
        2 => unsafe { text_w(attributes.message.cast()) },
        // `NVTX_MESSAGE_TYPE_REGISTERED`
        3 => name_of(&STRINGS, attributes.message.addr()).unwrap_or_else(|| NO_NAME.to_owned()),
        _ => NO_NAME.to_owned(),
    }
}

/// The result of a push or a pop if there is no other tool: `NVTX_NO_PUSH_POP_TRACKING`.
const NOT_TRACKED: c_int = -2;

/// Our functions, by module (0 is [`CORE`], 1 is [`CORE2`]) and number. `$other` calls that of the other tool, if it has one. The other tool's
/// own function is taken for all other numbers.
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

        /// The functions for the tables of a copy of NVTX: ours, and the other tool's if we have none.
        fn all_functions() -> [[usize; FUNCTIONS]; 3] {
            let mut functions = OTHER.each_ref().map(|module| module.each_ref().map(|other| other.load(Relaxed)));
            $(functions[$module][$number] = $name as *const () as usize;)*
            functions
        }
    };
}

// The program passes the arguments that NVTX documents to each of them. The content of a payload is not read, so its range has no name. The
// id of a range, `nvtxRangeId_t`, has 64 bits.
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
        push(0, &unsafe { message(attributes) });
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 9) range_push_a(name: *const c_char) -> c_int |other| {
        // SAFETY: see above.
        push(0, &unsafe { text_a(name) });
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 10) range_push_w(name: *const u32) -> c_int |other| {
        // SAFETY: see above.
        push(0, &unsafe { text_w(name) });
        other().unwrap_or(NOT_TRACKED)
    }
    (0, 11) range_pop() -> c_int |other| {
        pop(0);
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
        push(domain, &unsafe { message(attributes) });
        other().unwrap_or(NOT_TRACKED)
    }
    (1, 5) domain_range_pop(domain: usize) -> c_int |other| {
        pop(domain);
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
    (2, 3) range_push_payload(domain: usize, _data: *const c_void, _count: usize) -> c_int |other| {
        push(domain, NO_NAME);
        other().unwrap_or(NOT_TRACKED)
    }
    (2, 4) range_pop_payload(domain: usize, _data: *const c_void, _count: usize) -> c_int |other| {
        pop(domain);
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
