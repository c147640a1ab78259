//! The functions that the driver and NVTX find in the library, and the one that `gpumem attach` calls.

mod nccl;
pub(crate) mod pools;
pub(crate) mod socket;

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

use crate::{cards, control, request::Request, variable};

/// True once the library records the process, or waits for a command to do so.
///
/// A driver that comes here again while gpumem begins must not wait for it: this thread would wait for itself.
static CALLED: AtomicBool = AtomicBool::new(false);

/// The exit code of a program that would use the real card although it must not.
const EXIT_WITHOUT_CARDS: c_int = 2;

/// The loader calls this before any function of the library. After it, the program does not depend on the library's file any more,
/// which somebody may truncate.
#[cfg(all(target_os = "linux", not(test)))]
#[expect(unsafe_code, reason = "the loader finds the function in this section")]
#[used]
// SAFETY: the section is a list of functions, to which this adds one. The loader calls each once, as a C function.
#[unsafe(link_section = ".init_array")]
static LEAVE_OWN_FILE: extern "C" fn() = {
    extern "C" fn leave_own_file() {
        // A system may forbid it. In that case the file is like any other library of the program.
        // SAFETY: no other thread runs code of the library yet. Whether the driver, NVTX, Python or the user loads it, the loader gives its
        // functions to nobody before this returns, except those that stand before functions of NVML, NCCL and the runtime. A constructor of
        // another library would have to start a thread that calls these.
        #[expect(unsafe_code, reason = "the function has a contract")]
        let leave = || unsafe { gpumem_driver::own_file::leave() };
        _ = catch_unwind(leave);
        _ = catch_unwind(name_host);
    }
    leave_own_file
};

/// NCCL refuses two ranks of one machine on one GPU. So each process that sees several simulated cards is a machine. A process that another one
/// has started gets another name.
#[cfg(all(target_os = "linux", not(test)))]
fn name_host() {
    const HOST: &str = "NCCL_HOSTID";
    const OURS: &str = "gpumem";

    let is_preloaded = env::var("LD_PRELOAD").is_ok_and(|list| list.contains(variable::RUNTIME));
    // A constructor of another library may have started a thread.
    let is_alone = || std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    if is_preloaded && env::var(HOST).map_or(true, |name| name.starts_with(OURS)) && is_alone() {
        // SAFETY: no other thread of the program reads or writes the environment, because there is none.
        #[expect(unsafe_code, reason = "a variable of the environment is set")]
        unsafe {
            env::set_var(HOST, format!("{OURS}{}", std::process::id()));
        }
    }
}

/// The driver calls this inside of `cuInit`. It returns 1, as NVIDIA's examples do.
#[expect(unsafe_code, reason = "the driver finds the function by this name")]
// SAFETY: no other function of a program has this name: it belongs to the libraries that the driver loads. The driver calls it as a C
// function without arguments that returns an `int`.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjection() -> c_int {
    if !CALLED.swap(true, Relaxed) {
        let replaced = catch_unwind(cards::begin).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        if replaced.is_err() {
            say("", replaced);
            // The user asked for a program that does not use the real card.
            std::process::exit(EXIT_WITHOUT_CARDS);
        }
        // A panic must not unwind into C. The panic hook has printed it.
        let begun = catch_unwind(control::begin).unwrap_or_else(|_| Err("gpumem panicked".to_owned()));
        say(" is not recorded", begun);
        if let Some(tool) = other_tool(variable::OTHER_INJECTION) {
            // SAFETY: the driver calls this function inside of `cuInit`, and the user named the tool for it.
            say("", unsafe { initialize_injection(&tool) });
        }
    }
    1
}

/// Passes the call on to the library that the environment of `gpumem run` named in the place of ours.
fn other_tool(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Each copy of NVTX in the program calls this at its first use, with the function that returns its tables. It returns 1 if the tables
/// are ours from now on.
///
/// # Safety
/// It is called by NVTX.
#[expect(unsafe_code, reason = "NVTX finds the function by this name, and passes a pointer")]
// SAFETY: no other function of a program has this name: it belongs to the libraries that NVTX loads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(get_export_table: GetExportTable) -> c_int {
    set_observer(&recording::NVTX_OBSERVER);
    let other = other_tool(variable::OTHER_NVTX);
    // SAFETY: NVTX passes this function, and waits for the answer.
    say("", nvtx::guarded(|| unsafe { observe_ranges(get_export_table, other.as_deref()) }));
    1
}

/// NVTX calls this for each extension of the copy, with the table of the extension. It returns 0 if nobody uses the
/// extension.
///
/// # Safety
/// It is called by NVTX.
#[expect(unsafe_code, reason = "NVTX finds the function by this name, and passes a pointer")]
// SAFETY: no other function of a program has this name: it belongs to the libraries that NVTX loads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtxExtension(module: *const ExtensionModule) -> c_int {
    let other = other_tool(variable::OTHER_NVTX);
    // SAFETY: NVTX passes this module, and waits for the answer.
    match nvtx::guarded(|| unsafe { observe_extension(module, other.as_deref()) }) {
        Ok(is_used) => c_int::from(is_used),
        Err(why) => {
            say("", Err(why));
            1
        }
    }
}

/// Handles the functions of NVML if cards are not the real ones, and those of the CUDA runtime if there are several cards. `gpumem run`
/// makes libraries that pass six arguments and name the function.
///
/// # Safety
/// The last argument is the text that [`nvml::call`] takes, or the name of a function of the runtime; the others are those of the function.
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
    // SAFETY: `what` is a C string and the arguments are those of the function that it names, by the contract of this function.
    unsafe {
        let what = CStr::from_ptr(what);
        // The path of the real library is behind a space.
        if what.to_bytes().contains(&b' ') {
            nvml::call(cards::of_nvml(), arguments, what)
        } else {
            runtime::call(arguments, what) as usize
        }
    }
}

/// Prints on stderr what failed, and the consequence for the process. NVTX may come here in the child of a fork, where a thread that does not
/// exist may hold the lock of `io::stderr`.
fn say(what: &str, done: Result<(), String>) {
    if let Err(why) = done {
        print::notice_without_lock(format_args!("process {}{what}: {why}", std::process::id()));
    }
}

/// Waits for `gpumem start` in a program that runs already: `gpumem attach` has Python load the library and call this. The texts are the
/// folder of the socket, the file of the recording, and the options of the recording, as in the variables of [`crate::variable`].
/// Returns null, or the reason why it does not wait.
///
/// # Safety
/// Each argument is a string that ends with a zero.
#[expect(unsafe_code, reason = "Python finds the function by this name, and passes strings")]
// SAFETY: no other function of a program has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpumem_attach(
    folder: *const c_char,
    file: *const c_char,
    backtrace: *const c_char,
    keep: *const c_char,
    torch: *const c_char,
) -> *const c_char {
    // SAFETY: the caller passes strings, which are copied before this returns.
    let bytes = |text: *const c_char| unsafe { CStr::from_ptr(text) }.to_bytes().to_owned();
    let text = |text| String::from_utf8_lossy(&bytes(text)).into_owned();
    let request = Request {
        file: OsStr::from_bytes(&bytes(file)).into(),
        backtrace: text(backtrace),
        keep: text(keep),
        torch: text(torch),
        is_late: true,
    };
    let folder = bytes(folder);
    let listen = || {
        if CALLED.swap(true, Relaxed) {
            return Err("the library of gpumem is in it already".to_owned());
        }
        control::listen(Path::new(OsStr::from_bytes(&folder)), request).inspect_err(|_| CALLED.store(false, Relaxed))
    };
    match catch_unwind(std::panic::AssertUnwindSafe(listen)).unwrap_or_else(|_| Err("gpumem panicked".to_owned())) {
        Ok(()) => ptr::null(),
        // The text is never released, because this is called once.
        Err(why) => CString::new(why).map_or(c"it is not known why".as_ptr(), |why| why.into_raw().cast_const()),
    }
}
