//! The one driver of the process: its cards, what CUDA sees of them, and the way into every call.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_int;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::process;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::config::{Card, Config};
use crate::cupti::Subscriptions;
use crate::device_model::{DeviceModel, ModelError};
use crate::ffi::code_of;
use crate::{cuda, cupti, ffi, memory, nvml};

pub(crate) struct Driver {
    pub(crate) config: Config,
    pub(crate) gpus: Vec<Gpu>,
    /// The cards that CUDA sees, by CUDA ordinal.
    pub(crate) visible: Vec<usize>,
    /// The process that called `cuInit`; what it forks may not go on with it.
    pub(crate) initialised_by: AtomicU32,
    pub(crate) nvml_users: AtomicUsize,
    pub(crate) contexts_created: AtomicU32,
    pub(crate) objects: Mutex<Objects>,
    pub(crate) cupti: Mutex<Subscriptions>,
    log: Option<Mutex<File>>,
}

/// One card.
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) uuid: Uuid,
    /// The slice's own, if the card is split.
    pub(crate) mig: Option<Uuid>,
    /// What other processes hold of what CUDA works on.
    pub(crate) others: u64,
    memory: Mutex<Memory>,
}

impl Gpu {
    fn new(index: usize, card: Card, mig: bool) -> Result<Self, ModelError> {
        let mut whole = DeviceModel::new(card.total).with_reserved(card.reserved);
        whole.hold(card.used)?;
        Ok(Self {
            name: format!("Stand-in GPU {index}"),
            uuid: Uuid::new(*b"stand-in gpu", index),
            mig: mig.then(|| Uuid::new(*b"stand-in mig", index)),
            others: if mig { 0 } else { card.used },
            memory: Mutex::new(Memory {
                whole,
                slice: mig.then(|| DeviceModel::new(card.total / 2)),
                retained: 0,
                owners: HashMap::new(),
                contents: HashMap::new(),
                pools: BTreeMap::new(),
            }),
        })
    }

    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }
}

/// What a card holds.
pub(crate) struct Memory {
    whole: DeviceModel,
    slice: Option<DeviceModel>,
    /// How often the primary context is retained; it exists while this is not 0.
    pub(crate) retained: u32,
    /// What was written to a block, by its address, up to the last byte written; the rest reads as 0.
    pub(crate) contents: HashMap<u64, Vec<u8>>,
    /// The context that each block ends with.
    owners: HashMap<u64, usize>,
    /// The pools besides the default one, by the number that their addresses have.
    pools: BTreeMap<u64, ExtraPool>,
}

/// A pool that was created: it has the card's size and one pool in it, whose backing the card holds.
struct ExtraPool {
    model: DeviceModel,
    /// Destroyed, and there until its last block is freed.
    dying: bool,
}

/// The addresses of a card: those of its model, and above them those of the pools that were created.
const POOLED_ADDRESSES: u64 = 0x7800_0000_0000;
const POOL_SPAN: u64 = 1 << 38;
const MOST_POOLS: u64 = 31;

/// The pool that an address of the card is in, and what that pool's model calls it.
fn pool_and_place(address: u64) -> (u64, u64) {
    let pool = address.checked_sub(POOLED_ADDRESSES).map_or(0, |above| above / POOL_SPAN);
    (pool, address - pool * POOL_SPAN)
}

impl Memory {
    /// What CUDA works on: the slice, if the card is split.
    pub(crate) fn cuda(&mut self) -> &mut DeviceModel {
        self.slice.as_mut().unwrap_or(&mut self.whole)
    }

    /// The model that has this pool's blocks; number 0 is the default pool, and all that is in no pool.
    pub(crate) fn pool(&mut self, pool: u64) -> Option<&mut DeviceModel> {
        if pool == 0 { Some(self.cuda()) } else { Some(&mut self.pools.get_mut(&pool)?.model) }
    }

    /// Does something to a pool, whose backing the card then has more or less of.
    pub(crate) fn in_pool<T>(
        &mut self,
        pool: u64,
        act: impl FnOnce(&mut DeviceModel) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        if pool == 0 {
            return act(self.cuda());
        }
        let extra = self.pools.get_mut(&pool).ok_or(ModelError::UnknownAddress)?;
        let before = extra.model.pool_reserved();
        let outcome = act(&mut extra.model);
        if extra.dying && extra.model.pool_used() == 0 {
            extra.model.synchronize();
            extra.model.trim_to(0);
        }
        let after = extra.model.pool_reserved();
        if extra.dying && after == 0 {
            self.pools.remove(&pool);
        }
        self.cuda().release(before.saturating_sub(after));
        self.cuda().hold(after.saturating_sub(before))?;
        outcome
    }

    pub(crate) fn create_pool(&mut self) -> Result<u64, ModelError> {
        let number = (1..=MOST_POOLS).find(|number| !self.pools.contains_key(number)).ok_or(ModelError::OutOfMemory)?;
        let model = DeviceModel::new(self.cuda().total());
        self.pools.insert(number, ExtraPool { model, dying: false });
        Ok(number)
    }

    pub(crate) fn destroy_pool(&mut self, pool: u64) {
        if let Some(extra) = self.pools.get_mut(&pool) {
            extra.dying = true;
        }
        // Nothing to do to it, but to see whether it is empty.
        _ = self.in_pool(pool, |_| Ok(()));
    }

    /// Allocates in no pool.
    pub(crate) fn alloc(&mut self, bytes: u64, owner: usize) -> Result<u64, ModelError> {
        let address = self.cuda().alloc(bytes)?;
        self.owners.insert(address, owner);
        Ok(address)
    }

    pub(crate) fn alloc_in_pool(&mut self, pool: u64, bytes: u64, owner: usize) -> Result<u64, ModelError> {
        let before = self.pools.get(&pool).map(|extra| extra.model.clone());
        let outcome = self.in_pool(pool, |model| model.alloc_async(bytes));
        if let (Err(_), Some(before), Some(extra)) = (&outcome, before, self.pools.get_mut(&pool)) {
            // It may be the card that had no room for the backing.
            extra.model = before;
        }
        let address = outcome? + pool * POOL_SPAN;
        self.owners.insert(address, owner);
        Ok(address)
    }

    /// Frees a block in stream order, if it is in a pool.
    pub(crate) fn free_async(&mut self, address: u64) -> Result<(), ModelError> {
        let (pool, place) = pool_and_place(address);
        self.in_pool(pool, |model| model.free_async(place))?;
        self.forget(address);
        Ok(())
    }

    /// Frees any block, at once.
    pub(crate) fn free(&mut self, address: u64) -> Result<(), ModelError> {
        if self.cuda().free_block(address).is_err() {
            self.free_async(address)?;
            self.synchronize();
        }
        self.forget(address);
        Ok(())
    }

    fn forget(&mut self, address: u64) {
        self.contents.remove(&address);
        self.owners.remove(&address);
    }

    /// The block that an address points into.
    pub(crate) fn block_at(&mut self, address: u64) -> Option<(u64, u64)> {
        let (pool, place) = pool_and_place(address);
        let (start, bytes) = self.pool(pool)?.block_at(place)?;
        Some((start + pool * POOL_SPAN, bytes))
    }

    pub(crate) fn synchronize(&mut self) {
        self.cuda().synchronize();
        for pool in self.pools.keys().copied().collect::<Vec<_>>() {
            _ = self.in_pool(pool, |model| {
                model.synchronize();
                Ok(())
            });
        }
    }

    /// Frees all that ends with a context.
    pub(crate) fn end(&mut self, owner: usize) {
        let ending = self.owners.iter().filter(|(_, whose)| **whose == owner).map(|(address, _)| *address);
        for address in ending.collect::<Vec<_>>() {
            // Each is alive, or it would have no owner.
            _ = self.free(address);
        }
        self.synchronize();
    }

    /// What NVML shows of the slice, or of the whole card.
    pub(crate) fn figures(&self, slice: bool) -> Figures {
        let of = |model: &DeviceModel| Figures {
            total: model.total(),
            free: model.free(),
            used: model.used(),
            reserved: model.reserved(),
        };
        let whole = of(&self.whole);
        match &self.slice {
            Some(model) if slice => of(model),
            // A part of the card that is in use by its slice is in use.
            Some(model) => Figures { used: whole.used + model.used(), free: whole.free - model.used(), ..whole },
            None => whole,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
    pub(crate) reserved: u64,
}

/// What is alive besides blocks, by handle or address. A handle that was given back is given out again, as those of a
/// real driver are.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashSet<usize>,
    /// The contexts that were created; primary ones are the cards' own.
    pub(crate) contexts: HashMap<usize, usize>,
    /// The number that is a context's own, of primary ones too.
    pub(crate) context_uids: HashMap<usize, u32>,
    /// The card and the number there of each pool that was created.
    pub(crate) pools: HashMap<usize, (usize, u64)>,
    /// The pool that is each card's current one, where it is not the default.
    pub(crate) current_pools: HashMap<usize, usize>,
    pub(crate) arrays: HashMap<usize, Array>,
    pub(crate) physical: HashMap<usize, Physical>,
    /// Addresses that were reserved, and what is mapped there: bytes, and the handle of what they are of.
    pub(crate) ranges: BTreeMap<u64, u64>,
    pub(crate) mapped: BTreeMap<u64, (u64, usize)>,
    /// Managed blocks: bytes, and the context that they end with.
    pub(crate) managed: BTreeMap<u64, (u64, usize)>,
    /// Pinned memory of the host.
    pub(crate) pinned: HashMap<usize, Vec<u8>>,
    pub(crate) registered: HashSet<usize>,
}

pub(crate) struct Stream {
    pub(crate) card: usize,
    pub(crate) context: usize,
    /// Whether it waits for the legacy stream, which then knows of it.
    pub(crate) blocking: bool,
    pub(crate) capture: Capture,
}

pub(crate) struct Array {
    pub(crate) card: usize,
    pub(crate) context: usize,
    pub(crate) block: u64,
    pub(crate) mipmapped: bool,
}

/// What `cuMemCreate` made: alive while it is referred to or mapped.
pub(crate) struct Physical {
    /// The card that it is on, if it is on one.
    pub(crate) card: Option<usize>,
    pub(crate) bytes: u64,
    pub(crate) references: usize,
    pub(crate) mappings: usize,
}

/// The first handle from `start` on that nobody has.
pub(crate) fn free_handle(start: usize, is_taken: impl Fn(&usize) -> bool) -> usize {
    (start..).step_by(16).find(|handle| !is_taken(handle)).unwrap_or(start)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capture {
    None,
    Active,
    /// By a call that is not legal while capturing.
    Broken,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

impl Uuid {
    fn new(kind: [u8; 12], index: usize) -> Self {
        let mut bytes = [0; 16];
        bytes[..12].copy_from_slice(&kind);
        bytes[15] = u8::try_from(index).unwrap_or(u8::MAX);
        Self(bytes)
    }

    /// As NVML and `CUDA_VISIBLE_DEVICES` write it: `GPU-7374616e-642d-696e-2067-707500000000`.
    pub(crate) fn spelled(self, prefix: &str) -> String {
        let mut text = prefix.to_owned();
        for (index, byte) in self.0.iter().enumerate() {
            let dash = if matches!(index, 4 | 6 | 8 | 10) { "-" } else { "" };
            _ = write!(text, "{dash}{byte:02x}");
        }
        text
    }
}

/// What all copies of this file in a process share: libcupti lies in a file of its own, as NVIDIA's does, and finds the
/// driver in libcuda.
pub(crate) struct Root {
    driver: &'static Driver,
    /// The calling thread's current context, 0 for none.
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

/// For the other copies.
#[unsafe(no_mangle)]
extern "C" fn standin_root() -> *const Root {
    root()
}

/// The driver, set up from the environment by the first call.
pub(crate) fn driver() -> &'static Driver {
    root().driver
}

impl Driver {
    /// The card of a context that is alive, or of a primary one.
    pub(crate) fn context_card(&self, context: usize) -> Option<usize> {
        let primary = context.checked_sub(cuda::CONTEXTS).filter(|card| *card < self.gpus.len());
        primary.or_else(|| lock(&self.objects).contexts.get(&context).copied())
    }

    /// A context's own number, 0 for no context.
    pub(crate) fn context_uid(&self, context: usize) -> u32 {
        lock(&self.objects).context_uids.get(&context).copied().unwrap_or(0)
    }

    fn from_env() -> Result<Self, String> {
        let functions: Vec<_> = [nvml::FUNCTIONS, cuda::FUNCTIONS, memory::FUNCTIONS, cupti::FUNCTIONS].concat();
        let config = Config::from_env(&functions)?;
        let gpus: Vec<_> = config
            .cards
            .iter()
            .enumerate()
            .map(|(index, card)| Gpu::new(index, *card, config.mig))
            .collect::<Result<_, _>>()
            .map_err(|_| "GPUMEM_STANDIN: a card has less memory than is reserved and used of it".to_owned())?;
        let log = config.log.as_ref().map(|path| {
            let file = File::options().create(true).append(true).open(path);
            file.map(Mutex::new).map_err(|error| format!("GPUMEM_STANDIN_LOG={}: {error}", path.display()))
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

/// What `CUDA_VISIBLE_DEVICES` leaves of the cards, in its order: numbers in CUDA's own order, or UUIDs or unambiguous
/// beginnings of them, up to the first entry that names no card, or one that was named already.
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
    /// Runs a function's body, unless a fault strikes, and writes the call to the log.
    pub(crate) fn run<E: Into<c_int>>(function: &'static str, body: impl FnOnce(&Self) -> Result<(), E>) -> c_int {
        let call = Self { driver: driver(), function, card: None.into() };
        let code = call.strike(None).unwrap_or_else(|| code_of(body(&call)));
        call.log(function, code);
        code
    }

    /// Writes a line to the log, with the card that the call is about, if there is one.
    pub(crate) fn log(&self, what: &str, code: c_int) {
        if let Some(log) = &self.driver.log {
            let card = self.card.get().map(|card| format!("[{card}]")).unwrap_or_default();
            let within = if cupti::in_callback() { "callback>" } else { "" };
            // A line that cannot be written is missed by the test that reads the log.
            _ = lock(log).write_all(format!("{within}{what}{card}={code}\n").as_bytes());
        }
    }

    /// The card that the call turned out to be about, unless a fault of that card strikes.
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

    pub(crate) fn is_initialised(&self) -> bool {
        self.driver.initialised_by.load(Ordering::Relaxed) == process::id()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::{Gpu, visible};
    use crate::config::Card;

    #[test]
    fn visible_devices() {
        let card = Card { total: 1 << 30, reserved: 0, used: 0 };
        let gpus: Vec<Gpu> = (0..3).map(|index| Gpu::new(index, card, true).unwrap()).collect();
        let second = gpus[1].uuid.spelled("GPU-");
        let third_slice = gpus[2].mig.unwrap().spelled("MIG-");
        assert_eq!(second, "GPU-7374616e-642d-696e-2067-707500000001");
        for (reversed, list, expected) in [
            (false, None, &[0, 1, 2][..]),
            (true, None, &[2, 1, 0]),
            (false, Some(""), &[]),
            (false, Some("1"), &[1]),
            (true, Some("0"), &[2]),
            (false, Some("2,0"), &[2, 0]),
            (false, Some("0,-1,1"), &[0]),
            (false, Some("0,9,1"), &[0]),
            (false, Some("0,0,1"), &[0]),
            (false, Some(&second), &[1]),
            (true, Some(&format!("{third_slice},0")), &[2]),
            (true, Some(&format!("{third_slice}, 1")), &[2, 1]),
            (false, Some(&second[..12]), &[]),
            (false, Some("stand-in"), &[]),
        ] {
            assert_eq!(visible(&gpus, reversed, list), expected, "{list:?}");
        }
    }
}
