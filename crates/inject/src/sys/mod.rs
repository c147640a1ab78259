//! The functions of the library that the driver, NVTX and the loader find by name, and the one that `gpumem attach` calls.

mod nccl;
pub(crate) mod pools;
pub(crate) mod socket;
mod tensors;
mod traces;

use std::{
    env,
    ffi::{CStr, CString, OsStr, c_char, c_int},
    os::unix::ffi::OsStrExt,
    panic::catch_unwind,
    path::{Path, PathBuf},
    ptr,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use gpumem::recording;
use gpumem_driver::{
    dry::{nvml, runtime},
    injection::initialize_injection,
    nvtx::{self, ExtensionModule, GetExportTable, observe_extension, observe_ranges, set_observer},
    print,
};

use crate::{cards, control, options::Options, request::Request, variable};

/// True after the library has started to record the process, or to wait for a command.
///
/// If the driver calls `InitializeInjection` again while gpumem starts, it must not wait: this thread would wait for itself.
static CALLED: AtomicBool = AtomicBool::new(false);

/// The exit code of a program that would use the real GPU, although the user asked for another one.
const EXIT_WITHOUT_CARDS: c_int = 2;

/// The loader calls this function before any other one of the library. After it, the program no longer depends on the library's file, which
/// another process may truncate.
#[cfg(all(target_os = "linux", not(test)))]
#[expect(unsafe_code, reason = "the loader finds the function in this section")]
#[used]
// SAFETY: the section is a list of functions, and this adds one to it. The loader calls each of them once, as a C function.
#[unsafe(link_section = ".init_array")]
static LEAVE_OWN_FILE: extern "C" fn() = {
    extern "C" fn leave_own_file() {
        // The system may forbid this. The file is then like any other library of the program.
        // SAFETY: no other thread runs code of the library yet. Whether the driver, NVTX, Python or the user loads it, the loader hands out
        // its functions only after this returns, except those that replace NVML, NCCL and runtime functions. To call these, a
        // constructor of another library would have to start a thread.
        #[expect(unsafe_code, reason = "the function has a contract")]
        let leave = || unsafe { gpumem_driver::own_file::leave() };
        _ = catch_unwind(leave);
        _ = catch_unwind(name_host);
    }
    leave_own_file
};

/// NCCL does not accept two ranks of one machine on one GPU. Therefore each process that sees several simulated GPUs poses as its own
/// machine. A process that was started by another one gets another name.
#[cfg(all(target_os = "linux", not(test)))]
fn name_host() {
    const HOST: &str = "NCCL_HOSTID";
    const OURS: &str = "gpumem";

    let is_preloaded = env::var("LD_PRELOAD").is_ok_and(|list| list.contains(variable::RUNTIME));
    // A constructor of another library may have started a thread.
    let is_alone = || std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if is_preloaded && env::var(HOST).map_or(true, |name| name.starts_with(OURS)) && is_alone() {
        // SAFETY: the process has no other thread that could read or write the environment.
        #[expect(unsafe_code, reason = "a variable of the environment is set")]
        unsafe {
            env::set_var(HOST, format!("{OURS}{}", std::process::id()));
        }
    }
}

/// Starts gpumem. The driver calls this during `cuInit`. Returns 1, like NVIDIA's examples.
#[expect(unsafe_code, reason = "the driver finds the function by this name")]
// SAFETY: no other function of a program has this name, which is reserved for the libraries that the driver loads. The driver calls it as a
// C function without arguments that returns an `int`.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    if !CALLED.swap(true, Relaxed) {
        let replaced = catch_unwind(cards::start).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        if replaced.is_err() {
            say("", replaced);
            // The user asked for a program that does not use the real GPU.
            std::process::exit(EXIT_WITHOUT_CARDS);
        }
        // A panic must not unwind into C. The panic hook has already printed it.
        let result = catch_unwind(control::start).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        say(" is not recorded", result);
        if let Some(tool) = other_tool(variable::OTHER_INJECTION) {
            // SAFETY: the driver calls this function during `cuInit`, and the user named the tool for that purpose.
            say("", unsafe { initialize_injection(&tool) });
        }
    }
    1
}

/// Returns the library that the user's environment named before `gpumem run` replaced it with ours.
fn other_tool(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Replaces the functions of a copy of NVTX with ours. Each copy of NVTX in the program calls this at its first use, with the function that
/// returns its tables. Returns 1, which tells NVTX that the tables are in use.
///
/// # Safety
/// Only NVTX may call this.
#[expect(unsafe_code, reason = "NVTX finds the function by this name, and passes a pointer")]
// SAFETY: no other function of a program has this name, which is reserved for the libraries that NVTX loads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(get_export_table: GetExportTable) -> c_int {
    set_observer(&recording::NVTX_OBSERVER);
    let other = other_tool(variable::OTHER_NVTX);
    // SAFETY: NVTX passes this function and waits for the result.
    say("", nvtx::guarded(|| unsafe { observe_ranges(get_export_table, other.as_deref()) }));
    1
}

/// Replaces the functions of an extension of NVTX with ours. NVTX calls this for each extension of a copy, with the table of the extension.
/// Returns 0 if no tool uses the extension.
///
/// # Safety
/// Only NVTX may call this.
#[expect(unsafe_code, reason = "NVTX finds the function by this name, and passes a pointer")]
// SAFETY: no other function of a program has this name, which is reserved for the libraries that NVTX loads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtxExtension(module: *const ExtensionModule) -> c_int {
    let other = other_tool(variable::OTHER_NVTX);
    // SAFETY: NVTX passes this module and waits for the result.
    match nvtx::guarded(|| unsafe { observe_extension(module, other.as_deref()) }) {
        Ok(is_used) => c_int::from(is_used),
        Err(why) => {
            say("", Err(why));
            1
        }
    }
}

/// Handles NVML's functions if the GPUs are not the real ones, and the CUDA runtime's if there are several simulated GPUs.
/// `gpumem run` generates libraries that call this with six arguments and the name of the function.
///
/// # Safety
/// The last argument is the text that [`nvml::call`] takes, or the name of a function of the runtime. The others are the arguments of that
/// function.
#[expect(unsafe_code, reason = "the loader finds the function by this name")]
// SAFETY: no other function of a program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gpumem_pass(
    first: usize,
    second: usize,
    third: usize,
    fourth: usize,
    fifth: usize,
    sixth: usize,
    what: *const c_char,
) -> usize {
    let arguments = [first, second, third, fourth, fifth, sixth];
    // SAFETY: this function's contract requires that `what` is a C string and that the arguments belong to the function that it names.
    unsafe {
        let what = CStr::from_ptr(what);
        // The path of the real library follows after a space.
        if what.to_bytes().contains(&b' ') {
            nvml::call(cards::of_nvml(), arguments, what)
        } else {
            runtime::call(arguments, what) as usize
        }
    }
}

/// Prints an error to stderr. `what` is the consequence for the process, such as ` is not recorded`. This may run in the child process of a
/// fork, where a thread that does not exist there may hold the lock of `io::stderr`.
fn say(what: &str, done: Result<(), String>) {
    if let Err(why) = done {
        print::notice_without_lock(format_args!("process {}{what}: {why}", std::process::id()));
    }
}

/// Listens for `gpumem start` in a program that is already running: `gpumem attach` makes Python load the library and call this. The texts
/// are the folder of the socket, the file of the recording, and the [`Options`]. Returns null, or the reason why it does not listen.
///
/// # Safety
/// Each argument must be a C string.
#[expect(unsafe_code, reason = "Python finds the function by this name, and passes strings")]
// SAFETY: no other function of a program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_attach(
    folder: *const c_char,
    file: *const c_char,
    options: *const c_char,
) -> *const c_char {
    // SAFETY: this function's contract requires C strings. They are copied before this returns.
    let bytes = |text: *const c_char| unsafe { CStr::from_ptr(text) }.to_bytes().to_owned();
    let [folder, file, options] = [folder, file, options].map(bytes);
    let listen = || {
        if CALLED.swap(true, Relaxed) {
            return Err("it already contains gpumem's library".to_owned());
        }
        let options = Options::parse(&String::from_utf8_lossy(&options))?;
        let request = Request { file: OsStr::from_bytes(&file).into(), options, is_late: true };
        control::listen(Path::new(OsStr::from_bytes(&folder)), request).inspect_err(|_| CALLED.store(false, Relaxed))
    };
    match catch_unwind(std::panic::AssertUnwindSafe(listen)).unwrap_or_else(|_| Err("gpumem panicked".to_owned())) {
        Ok(()) => ptr::null(),
        // The text is never released, because this function is called only once.
        Err(why) => CString::new(why).map_or(c"the reason is not known".as_ptr(), |why| why.into_raw().cast_const()),
    }
}
