//! The driver of the process: its GPUs, the GPUs that CUDA sees, and the entry of every call.

use std::ffi::c_int;
use std::fs::File;
use std::io::Write as _;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::card::Gpu;
use crate::config::Config;
use crate::cupti::Subscriptions;
use crate::ffi::code_of;
use crate::objects::Objects;
use crate::{cuda, cupti, ffi, graphs, imports, memory, modules, nvml, physical, program, work};

pub(crate) struct Driver {
    pub(crate) config: Config,
    pub(crate) gpus: Vec<Gpu>,
    /// The GPUs that CUDA sees, by CUDA ordinal.
    pub(crate) visible: Vec<usize>,
    /// The process that called `cuInit`. Its forked children may not use the driver.
    pub(crate) initialised_by: AtomicU32,
    pub(crate) nvml_users: AtomicUsize,
    pub(crate) contexts_created: AtomicU32,
    pub(crate) objects: Mutex<Objects>,
    pub(crate) cupti: Mutex<Subscriptions>,
    /// The file is opened for appending. Each line is one write and needs no lock, for which a forked child might wait forever.
    log: Option<File>,
}

/// The data that all copies of this file in a process share. libcupti is a separate file, as NVIDIA's is, and finds the driver in libcuda.
pub(crate) struct Root {
    driver: &'static Driver,
    /// The calling thread's current context; 0 if there is none.
    pub(crate) current: fn() -> usize,
}

pub(crate) fn root() -> &'static Root {
    static ROOT: OnceLock<Root> = OnceLock::new();
    static ELSEWHERE: OnceLock<Option<&'static Root>> = OnceLock::new();
    ELSEWHERE.get_or_init(|| ffi::root_of_libcuda(standin_root)).unwrap_or_else(|| {
        ROOT.get_or_init(|| {
            let driver = Driver::from_env().unwrap_or_else(|why| {
                eprintln!("gpumem-standin: {why}");
                process::abort()
            });
            Root { driver: Box::leak(Box::new(driver)), current: cuda::current_context }
        })
    })
}

/// Returns the root for the other copies of this file.
#[unsafe(no_mangle)]
extern "C" fn standin_root() -> *const Root {
    root()
}

/// Returns the driver. The first call sets it up from the environment.
pub(crate) fn driver() -> &'static Driver {
    root().driver
}

impl Driver {
    /// Returns the GPU of a live context or of a primary context.
    pub(crate) fn context_card(&self, context: usize) -> Option<usize> {
        lock(&self.objects).context_card(context, self.gpus.len())
    }

    /// Returns the id of a context; 0 for no context.
    pub(crate) fn context_uid(&self, context: usize) -> u32 {
        lock(&self.objects).context_uids.get(&context).copied().unwrap_or(0)
    }

    /// Registers a handler that shuts a library down when the process exits, if the settings request it. Later calls are not safe.
    pub(crate) fn tear_down_at_exit(&self) {
        extern "C" fn tear_down() {
            if let Some(mut log) = driver().log.as_ref() {
                _ = log.write_all(b"teardown=0\n");
                // Threads that still call the driver do so during this time.
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        }
        if self.config.teardown {
            // SAFETY: the C library keeps the pointer to this function, and calls it once, without an argument.
            unsafe { libc::atexit(tear_down) };
        }
    }

    fn from_env() -> Result<Self, String> {
        let functions: Vec<_> = [
            nvml::FUNCTIONS,
            cuda::FUNCTIONS,
            memory::FUNCTIONS,
            physical::FUNCTIONS,
            graphs::FUNCTIONS,
            modules::FUNCTIONS,
            work::FUNCTIONS,
            imports::FUNCTIONS,
            cupti::FUNCTIONS,
        ]
        .concat();
        let config = Config::from_env(&functions)?;
        let gpus: Vec<_> = config
            .cards
            .iter()
            .enumerate()
            .map(|(index, card)| Gpu::new(index, *card, &config))
            .collect::<Result<_, _>>()
            .map_err(|_| "GPUMEM_STANDIN: a card has less memory than is reserved and used of it".to_owned())?;
        let log = config.log.as_ref().map(|path| {
            let file = File::options().create(true).append(true).open(path);
            file.map_err(|error| format!("GPUMEM_STANDIN_LOG={}: {error}", path.display()))
        });
        Ok(Self {
            visible: visible(&gpus, config.reversed, config.visible.as_deref()),
            gpus,
            config,
            initialised_by: AtomicU32::new(0),
            nvml_users: AtomicUsize::new(0),
            contexts_created: AtomicU32::new(0),
            objects: Mutex::default(),
            cupti: Mutex::default(),
            log: log.transpose()?,
        })
    }
}

/// Returns the GPUs in `CUDA_VISIBLE_DEVICES`, in its order. Its entries are numbers in CUDA's own order, UUIDs, or unambiguous starts of
/// UUIDs. The list ends before the first entry that names no GPU, or a GPU that was already named.
fn visible(gpus: &[Gpu], reversed: bool, list: Option<&str>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..gpus.len()).collect();
    if reversed {
        order.reverse();
    }
    let Some(list) = list else { return order };
    let mut visible = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let named = |index: &usize| {
            let gpu = &gpus[*index];
            entry.starts_with("GPU-") && gpu.uuid.spelled("GPU-").starts_with(entry)
                || gpu.mig.is_some_and(|mig| entry.starts_with("MIG-") && mig.spelled("MIG-").starts_with(entry))
        };
        let found = match entry.parse::<usize>() {
            Ok(number) => order.get(number).copied(),
            Err(_) => match *(0..gpus.len()).filter(named).collect::<Vec<_>>() {
                [only] => Some(only),
                _ => None,
            },
        };
        match found {
            Some(index) if !visible.contains(&index) => visible.push(index),
            _ => break,
        }
    }
    visible
}

/// One call of one exported function.
pub(crate) struct Call {
    pub(crate) driver: &'static Driver,
    function: &'static str,
    card: std::cell::Cell<Option<usize>>,
}

impl Call {
    /// Runs a function's body, unless the call must fail, and writes the call to the log.
    pub(crate) fn run<E: Into<c_int>>(function: &'static str, body: impl FnOnce(&Self) -> Result<(), E>) -> c_int {
        let call = Self { driver: driver(), function, card: None.into() };
        call.grow_others();
        let code = call.strike(None).unwrap_or_else(|| code_of(body(&call)));
        if let Some((_, time)) = call.driver.config.slow.as_ref().filter(|(slow, _)| slow == function) {
            std::thread::sleep(*time);
        }
        match program::call().filter(|outer| *outer != function) {
            Some(outer) => call.log(&format!("{outer}>{function}"), code),
            None => call.log(function, code),
        }
        code
    }

    /// Writes a line to the log, with the GPU that the call is about, if there is one.
    pub(crate) fn log(&self, what: &str, code: c_int) {
        if let Some(mut log) = self.driver.log.as_ref() {
            let card = self.card.get().map(|card| format!("[{card}]")).unwrap_or_default();
            let within = if cupti::in_callback() { "callback>" } else { "" };
            // If a line cannot be written, the test that reads the log fails.
            _ = log.write_all(format!("{within}{what}{card}={code}\n").as_bytes());
        }
    }

    /// Sets and returns the GPU of the call, unless the call must fail on that GPU.
    pub(crate) fn on(&self, card: usize) -> Result<&'static Gpu, c_int> {
        self.card.set(Some(card));
        match self.strike(Some(card)) {
            Some(code) => Err(code),
            None => Ok(&self.driver.gpus[card]),
        }
    }

    fn strike(&self, card: Option<usize>) -> Option<c_int> {
        self.driver.config.faults.iter().find_map(|fault| fault.strike(self.function, card))
    }

    /// Takes memory for other processes, if the settings say so for this function.
    fn grow_others(&self) {
        let Some((function, bytes)) = &self.driver.config.others_grow else { return };
        if function == self.function {
            self.driver.gpus.iter().for_each(|gpu| gpu.memory().grow_others(*bytes));
        }
    }

    pub(crate) fn is_initialised(&self) -> bool {
        self.driver.initialised_by.load(Ordering::Relaxed) == process::id()
    }
}

/// True if a thread waits in [`block`].
static BLOCKED: AtomicBool = AtomicBool::new(false);

#[unsafe(no_mangle)]
extern "C" fn standin_is_blocked() -> bool {
    BLOCKED.load(Ordering::SeqCst)
}

/// Waits until the thread is cancelled, if the settings say that this function blocks. Nothing here has a destructor.
pub(crate) fn block(function: &str) {
    unsafe extern "C-unwind" {
        fn pause() -> c_int;
    }
    while driver().config.blocks.as_deref() == Some(function) {
        BLOCKED.store(true, Ordering::SeqCst);
        // SAFETY: the function has no preconditions. A thread that is cancelled unwinds from here.
        unsafe { pause() };
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
