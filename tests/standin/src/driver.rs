//! The one driver of the process: its cards, what CUDA sees of them, and the way into every call.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::config::{Card, Config};
use crate::device_model::{DeviceModel, ModelError};
use crate::ffi::code_of;
use crate::{cuda, nvml};

pub(crate) struct Driver {
    pub(crate) config: Config,
    pub(crate) gpus: Vec<Gpu>,
    /// The cards that CUDA sees, by CUDA ordinal.
    pub(crate) visible: Vec<usize>,
    pub(crate) cuda_initialised: AtomicBool,
    pub(crate) nvml_users: AtomicUsize,
    pub(crate) contexts_created: AtomicU32,
    pub(crate) objects: Mutex<Objects>,
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
                contents: HashMap::new(),
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
}

impl Memory {
    /// What CUDA works on: the slice, if the card is split.
    pub(crate) fn cuda(&mut self) -> &mut DeviceModel {
        self.slice.as_mut().unwrap_or(&mut self.whole)
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

/// Streams and events that are alive, by handle.
#[derive(Default)]
pub(crate) struct Objects {
    created: usize,
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashSet<usize>,
}

pub(crate) struct Stream {
    pub(crate) card: usize,
    /// Whether it waits for the legacy stream, which then knows of it.
    pub(crate) blocking: bool,
    pub(crate) capture: Capture,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capture {
    None,
    Active,
    /// By a call that is not legal while capturing.
    Broken,
}

impl Objects {
    /// A handle that was never given out, and looks like a pointer.
    pub(crate) fn new_handle(&mut self) -> usize {
        self.created += 1;
        0x10_0000 + self.created * 16
    }
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

/// The driver, set up from the environment by the first call.
pub(crate) fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        Driver::from_env().unwrap_or_else(|why| {
            eprintln!("gpumem-standin: {why}");
            process::abort()
        })
    })
}

impl Driver {
    fn from_env() -> Result<Self, String> {
        let functions: Vec<_> = [nvml::FUNCTIONS, cuda::FUNCTIONS].concat();
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
            cuda_initialised: AtomicBool::new(false),
            nvml_users: AtomicUsize::new(0),
            contexts_created: AtomicU32::new(0),
            objects: Mutex::default(),
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
            // A line that cannot be written is missed by the test that reads the log.
            _ = lock(log).write_all(format!("{what}{card}={code}\n").as_bytes());
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
        self.driver.cuda_initialised.load(Ordering::Relaxed)
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
