//! Calls the driver as C does: by name, with arguments from the script.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::fs::File;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{mem, ptr, thread};

use cudarc::driver::sys;

use crate::{PATIENCE, Trouble};

/// The results of calls, by their names in the script.
#[derive(Clone, Default)]
pub(crate) struct Names(Arc<Mutex<HashMap<String, u64>>>);

/// Runs `library function text`: calls a function of a shared library that takes a text.
pub(crate) fn call_library(line: &str) -> Result<String, Trouble> {
    let [file, function, text] = line.split(' ').collect::<Vec<_>>()[..] else {
        return Err("not of the form library function text".into());
    };
    // SAFETY: the library is one of the tests' own libraries.
    let library = Box::leak(Box::new(unsafe { libloading::Library::new(file) }?));
    // SAFETY: all functions of such libraries have this type.
    let function = unsafe { library.get::<unsafe extern "C" fn(*const c_char)>(function) }?;
    let text = CString::new(text)?;
    // SAFETY: the text ends with a zero.
    unsafe { function(text.as_ptr()) };
    Ok("done".to_owned())
}

impl Names {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `name value`: later calls know the name.
    pub(crate) fn set(&self, definition: &str) -> Result<String, Trouble> {
        let (name, value) = definition.split_once(' ').ok_or("not of the form name value")?;
        let value = self.value(value)?;
        self.lock().insert(name.to_owned(), value);
        Ok(format!("{value:#x}"))
    }

    /// Returns the value of a name, or 0 if the name was never set.
    pub(crate) fn get(&self, name: &str) -> u64 {
        self.lock().get(name).copied().unwrap_or(0)
    }

    /// Returns the value of a word of the script.
    pub(crate) fn value(&self, word: &str) -> Result<u64, Trouble> {
        let (word, more) = word.split_once('+').unwrap_or((word, "0"));
        let named = self.lock().get(word).copied();
        let value = match (named, word.strip_prefix("0x")) {
            (Some(value), _) => value,
            (None, Some(digits)) => u64::from_str_radix(digits, 16)?,
            (None, None) => word.parse().map_err(|_| format!("`{word}` is neither a number nor a name"))?,
        };
        Ok(value + more.parse::<u64>()?)
    }

    /// Calls `function argument…`. Returns the result as a number. An argument is
    /// - a number, a name, or either with `+number`;
    /// - `&name`: an address where the call finds the value of the name (0 if it has none), and writes its new value;
    /// - `on:1`: the properties of memory or of a pool on device 1; `on:host`: on the host;
    /// - `node:name:bytes:1`: the parameters of a node that allocates these bytes on device 1; `name` gets the address;
    /// - `zeros`: a struct that the call may write to, or does not read;
    /// - `text:add`: the text `add`, such as the name of a function, or the image of a module;
    /// - `config:s`: a `CUlaunchConfig` with the stream `s`; `instantiate:flags`: a `CUDA_GRAPH_INSTANTIATE_PARAMS` with these flags;
    /// - `array:64x32x1:0x20:4`: the shape of an array, its format and its channels; `array3d:…` likewise.
    pub(crate) fn call(&self, line: &str) -> Result<c_int, Trouble> {
        let mut words = line.split_whitespace();
        let function = words.next().ok_or("no function")?;
        let mut arguments = words.map(|word| self.argument(word)).collect::<Result<Vec<_>, _>>()?;
        let mut values = [0; ARGUMENTS];
        for (value, argument) in values.iter_mut().zip(&mut arguments) {
            *value = argument.register();
        }
        let result = invoke(function, values)?;
        for argument in arguments {
            match argument {
                Argument::Out(name, value) => _ = self.lock().insert(name, *value),
                Argument::Node(name, words) => _ = self.lock().insert(name, words[14]),
                Argument::Value(_) | Argument::Struct(_) | Argument::Text(_) => {}
            }
        }
        Ok(result)
    }

    fn argument(&self, word: &str) -> Result<Argument, Trouble> {
        if let Some(name) = word.strip_prefix('&') {
            return Ok(Argument::Out(name.to_owned(), Box::new(self.get(name))));
        }
        if let Some(place) = word.strip_prefix("on:") {
            // The front of CUmemAllocationProp and of CUmemPoolProps: kind, handle kinds, then kind and id of the location.
            let place = if place == "host" { 2 } else { 1 | place.parse::<u64>()? << 32 };
            let mut words = vec![0; 11];
            (words[0], words[1]) = (1, place);
            return Ok(Argument::Struct(words));
        }
        if let Some(node) = word.strip_prefix("node:") {
            let [name, bytes, device] = node.split(':').collect::<Vec<_>>()[..] else {
                return Err("not of the form name:bytes:device".into());
            };
            // CUDA_MEM_ALLOC_NODE_PARAMS: CUmemPoolProps, accesses, bytes, address.
            let mut words = vec![0; 15];
            (words[0], words[1], words[13]) = (1, 1 | self.value(device)? << 32, self.value(bytes)?);
            return Ok(Argument::Node(name.to_owned(), words));
        }
        if word == "zeros" {
            return Ok(Argument::Struct(vec![0; 16]));
        }
        if let Some(text) = word.strip_prefix("text:") {
            return Ok(Argument::Text(CString::new(text)?));
        }
        if let Some(stream) = word.strip_prefix("config:") {
            let mut words = vec![0; 7];
            words[4] = self.value(stream)?;
            return Ok(Argument::Struct(words));
        }
        if let Some(flags) = word.strip_prefix("instantiate:") {
            return Ok(Argument::Struct(vec![self.value(flags)?, 0, 0, 0]));
        }
        let shape = word.strip_prefix("array3d:").map(|shape| (shape, true));
        if let Some((shape, solid)) = shape.or_else(|| word.strip_prefix("array:").map(|shape| (shape, false))) {
            let [sides, format, channels] = shape.split(':').collect::<Vec<_>>()[..] else {
                return Err("not of the form sides:format:channels".into());
            };
            let mut words = sides.split('x').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            words.resize(if solid { 3 } else { 2 }, 0);
            words.extend([self.value(format)? | self.value(channels)? << 32, 0]);
            return Ok(Argument::Struct(words));
        }
        Ok(Argument::Value(self.value(word)?))
    }
}

enum Argument {
    Value(u64),
    Out(String, Box<u64>),
    Struct(Vec<u64>),
    Node(String, Vec<u64>),
    Text(CString),
}

impl Argument {
    /// Returns the argument of the call: the value, or the address of the data here.
    fn register(&mut self) -> u64 {
        match self {
            Self::Value(value) => *value,
            Self::Out(_, value) => ptr::from_mut(&mut **value) as u64,
            Self::Struct(words) | Self::Node(_, words) => words.as_mut_ptr() as u64,
            Self::Text(text) => text.as_ptr() as u64,
        }
    }
}

/// The number of arguments of `cuLaunchKernel`. No function of the driver that the scripts call has more.
const ARGUMENTS: usize = 11;

/// The type of a function of the driver: eleven integers. The calling conventions of x86-64 and aarch64 pass integers and pointers in
/// registers, and then in words of the stack. A function with fewer arguments reads fewer of them.
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> c_int;

/// Calls a function of the driver. Arguments that are not given are 0.
pub(crate) fn invoke<const COUNT: usize>(function: &str, given: [u64; COUNT]) -> Result<c_int, Trouble> {
    const { assert!(COUNT <= ARGUMENTS) };
    // SAFETY: loading the driver has no preconditions, and all programs here have loaded it already or can.
    let library = unsafe { sys::culib() };
    let name = CString::new(function)?;
    // SAFETY: the symbol exists only in the stand-in driver, where the function has this type. The driver keeps the pointer until
    // the next call.
    let calls =
        unsafe { library.get::<unsafe extern "C" fn(*const c_char) -> *const c_char>(b"standin_program_calls") };
    // SAFETY: the names that are passed are null, or live until the next is passed.
    let mark = |name| calls.as_ref().map_or(ptr::null(), |calls| unsafe { calls(name) });
    // SAFETY: every function that the scripts name takes at most eleven integers and pointers and returns a `CUresult`.
    let function = unsafe { library.get::<Function>(function.as_bytes()) }?;
    let mut all = [0; ARGUMENTS];
    all[..COUNT].copy_from_slice(&given);
    let before = mark(name.as_ptr());
    // SAFETY: pointers are the script's own (which the stand-in driver rejects if they are wrong) or those of arguments that live
    // until the call has returned and are as large as the function writes or reads.
    let code =
        unsafe { function(all[0], all[1], all[2], all[3], all[4], all[5], all[6], all[7], all[8], all[9], all[10]) };
    mark(before);
    Ok(code)
}

impl Names {
    /// Like [`call`](Self::call), but on a thread that is cancelled in the function. The objects on its stack are destroyed while
    /// it unwinds, as in C++: the block `own` of the context `ctx` is freed.
    pub(crate) fn cancelled(&self, line: &str) -> Result<&'static str, Trouble> {
        type UnwindingFunction = unsafe extern "C-unwind" fn(u64, u64, u64, u64, u64, u64) -> c_int;

        struct Thread {
            function: UnwindingFunction,
            registers: [u64; 6],
            context: u64,
            own: u64,
        }

        struct FreeOwn(u64);

        impl Drop for FreeOwn {
            fn drop(&mut self) {
                _ = invoke("cuMemFree_v2", [self.0, 0, 0, 0, 0, 0]);
            }
        }

        // `libc` does not declare the second function, and its `start` may not unwind.
        unsafe extern "C" {
            fn pthread_create(
                thread: *mut c_ulong,
                attributes: *const c_void,
                start: unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void,
                argument: *mut c_void,
            ) -> c_int;
            fn pthread_cancel(thread: c_ulong) -> c_int;
        }

        unsafe extern "C-unwind" fn start(thread: *mut c_void) -> *mut c_void {
            // SAFETY: the pointer belongs to the thread that created this one and waits for it.
            let Thread { function, registers: [first, second, third, fourth, fifth, sixth], context, own } =
                unsafe { &*thread.cast::<Thread>() };
            _ = invoke("cuCtxSetCurrent", [*context, 0, 0, 0, 0, 0]);
            let _own = FreeOwn(*own);
            // SAFETY: as in `invoke`. The call unwinds.
            unsafe { function(*first, *second, *third, *fourth, *fifth, *sixth) };
            ptr::null_mut()
        }

        let mut words = line.split_whitespace();
        let name = words.next().ok_or("no function")?;
        let mut registers = [0; 6];
        let mut arguments = words.map(|word| self.argument(word)).collect::<Result<Vec<_>, _>>()?;
        for (register, argument) in registers.iter_mut().zip(&mut arguments) {
            *register = argument.register();
        }
        // SAFETY: as in `invoke`.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbol exists only in the stand-in driver, where the function has this type.
        let is_blocked = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"standin_is_blocked") }?;
        // SAFETY: as in `invoke`.
        let function = *unsafe { library.get::<UnwindingFunction>(name.as_bytes()) }?;
        let mut thread = Thread { function, registers, context: self.get("ctx"), own: self.get("own") };
        let (mut id, mut result) = (0, ptr::null_mut());
        // SAFETY: the thread uses its arguments until it is joined, and it is cancelled and joined once.
        unsafe {
            if pthread_create(&raw mut id, ptr::null(), start, (&raw mut thread).cast()) != 0 {
                return Err("no thread".into());
            }
            let started = Instant::now();
            while !is_blocked() {
                if started.elapsed() > PATIENCE {
                    return Err("the function has returned".into());
                }
                thread::yield_now();
            }
            pthread_cancel(id);
            libc::pthread_join(id, &raw mut result);
        }
        // `PTHREAD_CANCELED`
        Ok(if result.addr() == usize::MAX { "cancelled" } else { "returned" })
    }
}

/// Runs code when the process exits, after `main`.
pub(crate) fn at_exit(last: impl FnOnce() + Send + 'static) {
    static LAST: Mutex<Vec<Box<dyn FnOnce() + Send>>> = Mutex::new(Vec::new());
    extern "C" fn run() {
        let last = LAST.lock().map(|mut last| last.pop());
        if let Ok(Some(last)) = last {
            last();
        }
    }
    LAST.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(last));
    // SAFETY: the C library keeps the pointer to this function and calls it once, without an argument.
    unsafe { libc::atexit(run) };
}

/// Forks the process. Returns `Ok(None)` in the child, and the child's exit status in the parent.
pub(crate) fn fork() -> Result<Option<c_int>, Trouble> {
    let Some(child) = fork_only()? else { return Ok(None) };
    let mut status = 0;
    // SAFETY: the child is this process's own, and the status is a live `int`.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    if waited == child { Ok(Some(status)) } else { Err("no child to wait for".into()) }
}

/// Forks the process. Returns `Ok(None)` in the child, and the child's process id in the parent.
pub(crate) fn fork_only() -> Result<Option<c_int>, Trouble> {
    // SAFETY: the child has only this thread, and continues with its state. The test checks whether it hangs.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        child if child > 0 => Ok(Some(child)),
        _ => Err("cannot fork".into()),
    }
}

/// Returns the exit status of a child, if it has ended.
pub(crate) fn ended(child: c_int) -> Result<Option<c_int>, Trouble> {
    let mut status = 0;
    // SAFETY: as in `fork`.
    match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
        0 => Ok(None),
        waited if waited == child => Ok(Some(status)),
        _ => Err("no child to wait for".into()),
    }
}

/// Ends a child that hangs.
pub(crate) fn kill(child: c_int) {
    let mut status = 0;
    // SAFETY: the child is this process's own, and was not waited for yet, so its process id belongs to no other process.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0);
    }
}

/// Redirects the output of this process to a descriptor, without the locks that threads of the parent may have held.
pub(crate) fn become_output(to: &impl AsRawFd) {
    for number in [1, 2] {
        // SAFETY: the descriptor is open. Code that writes to stdout and stderr refers to them by number.
        unsafe { libc::dup2(to.as_raw_fd(), number) };
    }
}

/// Closes all descriptors but the first three, as daemons do. The next thousand numbers then belong to a file of this program.
pub(crate) fn close_descriptors(then: &str) -> Result<(), Trouble> {
    for number in 3..1100 {
        // SAFETY: the test is about a program that closes the descriptors of others. This program does not use any of them again.
        unsafe { libc::close(number) };
    }
    while File::options().append(true).create(true).open(then)?.into_raw_fd() < 1010 {}
    Ok(())
}

/// Limits the size of files of this process.
pub(crate) fn limit_files(bytes: u64) -> bool {
    // SAFETY: the structure lives for the call.
    unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &libc::rlimit { rlim_cur: bytes, rlim_max: bytes }) == 0 }
}

/// Ends only the main thread, as `pthread_exit` does.
pub(crate) fn end_main_thread() {
    // SAFETY: the call does not return. The thread's data stays as it is, and no other thread uses it.
    unsafe { libc::syscall(libc::SYS_exit, 0_i64) };
}

/// Ends this process as C does, with or without exit handlers.
pub(crate) fn end(status: c_int, with_handlers: bool) -> ! {
    // SAFETY: the process has one thread, which does nothing else.
    if with_handlers { unsafe { libc::exit(status) } } else { unsafe { libc::_exit(status) } }
}

/// The subscription of another tool, such as a profiler, to CUPTI in this process.
#[derive(Default)]
pub(crate) struct Tool(Option<u64>);

impl Tool {
    /// Returns the code of `cuptiSubscribe` in the library with this name or path.
    pub(crate) fn subscribe(&mut self, library: &str) -> Result<c_int, Trouble> {
        extern "C" fn callback(_: *mut c_void, _: u32, _: u32, _: *const c_void) {}
        type Subscribe =
            unsafe extern "C" fn(*mut u64, extern "C" fn(*mut c_void, u32, u32, *const c_void), *mut c_void) -> c_int;
        let mut subscriber = 0;
        // SAFETY: the library is the stand-in's, whose function has this type; all pointers live for the call, and the callback
        // forever.
        let code =
            unsafe { load::<Subscribe>(library, "cuptiSubscribe")?(&raw mut subscriber, callback, ptr::null_mut()) };
        self.0 = Some(subscriber).filter(|_| code == 0);
        Ok(code)
    }

    pub(crate) fn unsubscribe(&mut self, library: &str) -> Result<c_int, Trouble> {
        type Unsubscribe = unsafe extern "C" fn(u64) -> c_int;
        let subscriber = self.0.take().ok_or("there is no subscription")?;
        // SAFETY: as in `subscribe`; the subscriber is alive.
        Ok(unsafe { load::<Unsubscribe>(library, "cuptiUnsubscribe")?(subscriber) })
    }
}

/// Loads the library that `CUDA_INJECTION64_PATH` names and calls its function, as the driver does in `cuInit` on a machine with
/// a GPU.
pub(crate) fn inject() -> Result<c_int, Trouble> {
    let path = std::env::var("CUDA_INJECTION64_PATH")?;
    // SAFETY: the function has this type: that is the driver's contract with tools.
    Ok(unsafe { load::<unsafe extern "C" fn() -> c_int>(&path, "InitializeInjection")?() })
}

/// Loads a tool's library, calls its function as the driver would, and closes the library.
pub(crate) fn load_and_close(path: &str) -> Result<c_int, Trouble> {
    // SAFETY: the library is gpumem's, whose initialisers have no preconditions.
    let library = unsafe { libloading::Library::new(path) }?;
    // SAFETY: the function has this type, which is the driver's contract with tools.
    let initialize = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"InitializeInjection") }?;
    // SAFETY: the function has no preconditions. The test checks that the library may be closed afterwards.
    let code = unsafe { initialize() };
    library.close()?;
    Ok(code)
}

/// Returns the used memory of the first GPU and that of this process on it, as NVML counts them. The latter is `None` if NVML's list does
/// not tell it.
pub(crate) fn figures() -> Result<(u64, Option<u64>), Trouble> {
    const NVML: &str = "libnvidia-ml.so.1";
    type OnDevice<T> = unsafe extern "C" fn(usize, *mut T) -> c_int;
    type List = unsafe extern "C" fn(usize, *mut c_uint, *mut ProcessInfo) -> c_int;

    /// An `nvmlMemory_v2_t`.
    #[derive(Default)]
    #[repr(C)]
    struct MemoryInfo {
        version: c_uint,
        total: u64,
        reserved: u64,
        free: u64,
        used: u64,
    }

    /// An `nvmlProcessInfo_t`.
    #[derive(Clone, Copy, Default)]
    #[repr(C)]
    struct ProcessInfo {
        pid: c_uint,
        used: u64,
        instances: [c_uint; 2],
    }

    let done = |code: c_int| if code == 0 { Ok(()) } else { Err(Trouble::from(format!("NVML: {code}"))) };
    let mut memory = MemoryInfo { version: 0x0200_0028, ..MemoryInfo::default() };
    let mut processes = [ProcessInfo::default(); 8];
    let (mut device, mut count) = (0, 8);
    // SAFETY: these functions have these types, and all pointers live for the calls. The list has room for `count` entries.
    unsafe {
        done(load::<unsafe extern "C" fn() -> c_int>(NVML, "nvmlInit_v2")?())?;
        done(load::<unsafe extern "C" fn(c_uint, *mut usize) -> c_int>(NVML, "nvmlDeviceGetHandleByIndex_v2")?(
            0,
            &raw mut device,
        ))?;
        done(load::<OnDevice<MemoryInfo>>(NVML, "nvmlDeviceGetMemoryInfo_v2")?(device, &raw mut memory))?;
        let list = load::<List>(NVML, "nvmlDeviceGetComputeRunningProcesses_v3")?;
        done(list(device, &raw mut count, processes.as_mut_ptr()))?;
        done(load::<unsafe extern "C" fn() -> c_int>(NVML, "nvmlShutdown")?())?;
    }
    let own = processes[..count as usize].iter().find(|process| process.pid == std::process::id());
    // `NVML_VALUE_NOT_AVAILABLE` is the largest number.
    Ok((memory.used, own.map(|own| own.used).filter(|used| *used != u64::MAX)))
}

/// Returns a function of a library, which stays loaded.
///
/// # Safety
/// The function must have this type.
unsafe fn load<F: Copy>(library: &str, function: &str) -> Result<F, Trouble> {
    // SAFETY: the stand-in's initialisers have no preconditions.
    let loaded = unsafe { libloading::Library::new(library) }?;
    // SAFETY: the function has this type, as this function's contract requires.
    let found = *unsafe { loaded.get::<F>(function.as_bytes()) }?;
    mem::forget(loaded);
    Ok(found)
}
