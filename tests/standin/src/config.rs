//! The settings of this driver, which are read from the environment once. An invalid setting ends the process.
//!
//! - `GPUMEM_STANDIN="devices=2,total=16GiB,reserved=615MiB,used[1]=4GiB,mig=1"`: see [`Config::read`] for every key;
//! - `GPUMEM_STANDIN_FAIL="nvmlDeviceGetMemoryInfo_v2[1]=15@3;cuInit=803"`: a function returns this code, optionally only for one device
//!   (by NVML index), and only from its N-th call on, or from its N-th call up to but not including its M-th call (`@3..5`);
//! - `GPUMEM_STANDIN_LOG=file`: a line for each call, such as `cuInit=0` or `cuCtxSynchronize[1]=0` if the GPU is known,
//!   `callback>cuCtxGetDevice[0]=0` if it was called from a CUPTI callback, `cuMemFree_v2>cuCtxGetDevice[0]=0` if it was called while
//!   the probe's `call` was in another function, and `context_created[1]=0` for each new context;
//! - `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and `CUDA_MODULE_LOADING=EAGER` have the same meaning as for CUDA.

use std::env;
use std::ffi::c_int;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The settings of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    /// The memory of other processes.
    pub(crate) used: u64,
}

/// The content of NVML's list of compute processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Processes {
    /// This process, once it has a context.
    Own,
    /// The list is empty, as in many containers.
    Empty,
    /// The list contains this process with a value that is not available, as under WSL2.
    Unavailable,
    /// The list contains this process under another id, as in a container with its own process ids.
    Renamed,
}

/// The lists that contain another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    Compute,
    Graphics,
    Mps,
}

/// Another process that NVML lists on every GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) list: List,
    pub(crate) pid: u32,
    /// `None` if the value is not available.
    pub(crate) used: Option<u64>,
    /// `None` if NVML does not find a name.
    pub(crate) name: Option<String>,
}

/// The settings of libcupti.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cupti {
    /// The version that `cuptiGetVersion` returns.
    pub(crate) version: u32,
    /// The tool that already holds the subscription.
    pub(crate) subscriber: Option<String>,
    /// True if that tool allows other subscribers.
    pub(crate) shared: bool,
}

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // The switches can be combined freely.
pub(crate) struct Config {
    pub(crate) cards: Vec<Card>,
    pub(crate) context: u64,
    /// True if the driver takes memory by itself, as described in `taken.rs`.
    pub(crate) driver_memory: bool,
    /// True if modules are loaded completely when they are opened (`CUDA_MODULE_LOADING=EAGER`).
    pub(crate) eager: bool,
    pub(crate) mig: bool,
    pub(crate) pools: bool,
    pub(crate) integrated: bool,
    pub(crate) processes: Processes,
    pub(crate) others: Vec<Other>,
    /// A function that other processes take memory during, and the bytes that each call adds on each GPU.
    pub(crate) others_grow: Option<(String, u64)>,
    /// True if CUDA's own order of the GPUs is the reverse of NVML's.
    pub(crate) reversed: bool,
    pub(crate) cupti: Cupti,
    /// True if other threads may run between a call and its callbacks.
    pub(crate) yields: bool,
    /// True if some functions that allocate call `cuMemAlloc_v2` through its slot.
    pub(crate) nested: bool,
    pub(crate) teardown: bool,
    /// The name of a function that does not return.
    pub(crate) blocks: Option<String>,
    /// A function that returns this much later than it does its work.
    pub(crate) slow: Option<(String, Duration)>,
    pub(crate) figures_max: bool,
    /// The peak of each process in the driver's accounting.
    pub(crate) accounted: Option<u64>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) log: Option<PathBuf>,
    /// The value of `CUDA_VISIBLE_DEVICES`.
    pub(crate) visible: Option<String>,
}

impl Config {
    pub(crate) fn from_env(functions: &[&str]) -> Result<Self, String> {
        let var = |name: &str| env::var(name).ok();
        let mut config = Self::read(&var("GPUMEM_STANDIN").unwrap_or_default())?;
        config.faults = read_faults(&var("GPUMEM_STANDIN_FAIL").unwrap_or_default(), functions)?;
        config.log = env::var_os("GPUMEM_STANDIN_LOG").map(PathBuf::from);
        config.visible = var("CUDA_VISIBLE_DEVICES");
        config.eager = var("CUDA_MODULE_LOADING").as_deref() == Some("EAGER");
        config.reversed &= var("CUDA_DEVICE_ORDER").as_deref() != Some("PCI_BUS_ID");
        Ok(config)
    }

    /// Reads `GPUMEM_STANDIN`: `key=value`, separated by commas.
    ///
    /// | key | default | |
    /// |---|---|---|
    /// | `devices` | `1` | the number of GPUs |
    /// | `total` | `16GiB` | the memory of GPU 0; each further GPU has 1 GiB more than the previous one |
    /// | `reserved` | `615MiB` | the memory that the driver keeps on each GPU |
    /// | `used` | `0MiB` | the memory that other processes hold on each GPU |
    /// | `context` | `527MiB` | the memory that a context takes |
    /// | `driver_memory` | `0` | `1`: the driver takes memory by itself, for `cuInit`, modules, stacks, heaps, streams and graphs; see `taken.rs` |
    /// | `mig` | `0` | `1`: each GPU is split, and CUDA sees its only slice, which has half of the memory |
    /// | `pools` | `1` | `0`: no stream-ordered pools |
    /// | `processes` | `own` | `empty`, `unavailable`, `renamed`: how NVML's process list shows this process |
    /// | `compute`, `graphics`, `mps` | | `4242:300MiB:python`: another process on that list; `na` if its memory is not available, and its name may be missing |
    /// | `others_grow` | | `cuModuleGetFunction:64MiB`: other processes take as much on each GPU while this function runs, each time |
    /// | `cupti` | `130202` | CUPTI's version; before 130200, it allows only one subscriber |
    /// | `subscriber` | | a tool such as `nsys` that already holds CUPTI's subscription |
    /// | `shared` | `0` | `1`: that tool allows other subscribers |
    /// | `yields` | `0` | `1`: other threads may run between a call and its callbacks |
    /// | `nested` | `0` | `1`: `cuMemAllocPitch_v2` and `cuMemAllocManaged` call `cuMemAlloc_v2` as a program does, and managed memory is on the GPU |
    /// | `teardown` | `0` | `1`: each library is torn down when the process exits, as by a handler that it registers at its start, and writes `teardown` to the log |
    /// | `figures_max` | `0` | `1`: every memory value is `u64::MAX` |
    /// | `accounted` | | the driver's accounting is on, and reports this peak for each process |
    /// | `slow` | | `cuGraphInstantiateWithFlags:300`: this function returns so many milliseconds after its work |
    /// | `integrated` | `0` | `1`: the GPUs have no separate memory, but use the machine's |
    /// | `blocks` | | a function that does not return: a thread that calls it waits until it is cancelled |
    /// | `foreign_slot` | | a function whose slot points out of the library; see `foreign.rs` |
    /// | `fastest` | `pci` | `reversed`: CUDA's own order of the GPUs is the reverse of NVML's |
    ///
    /// `total[1]`, `reserved[1]` and `used[1]` set the value for one GPU.
    fn read(text: &str) -> Result<Self, String> {
        let mut config = Self {
            cards: Vec::new(),
            context: 527 * MIB,
            driver_memory: false,
            eager: false,
            mig: false,
            pools: true,
            integrated: false,
            processes: Processes::Own,
            others: Vec::new(),
            others_grow: None,
            reversed: false,
            yields: false,
            nested: false,
            cupti: Cupti { version: 130_202, subscriber: None, shared: false },
            teardown: false,
            blocks: None,
            slow: None,
            figures_max: false,
            accounted: None,
            faults: Vec::new(),
            log: None,
            visible: None,
        };
        let (mut devices, mut single) = (1, Vec::new());
        let mut common = Card { total: 16 * GIB, reserved: 615 * MIB, used: 0 };
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let invalid = |why: &str| format!("GPUMEM_STANDIN: `{entry}`: {why}");
            let (key, value) = entry.split_once('=').ok_or_else(|| invalid("not of the form key=value"))?;
            let flag = || match value {
                "0" => Ok(false),
                "1" => Ok(true),
                _ => Err(invalid("neither 0 nor 1")),
            };
            match key {
                "devices" => {
                    devices = value.parse().ok().filter(|count| *count <= 64).ok_or_else(|| invalid("0 to 64"))?;
                }
                "context" => {
                    config.context = size(value).ok_or_else(|| invalid("no size, such as 527MiB"))?;
                }
                "driver_memory" => config.driver_memory = flag()?,
                "mig" => config.mig = flag()?,
                "pools" => config.pools = flag()?,
                "cupti" => config.cupti.version = value.parse().map_err(|_| invalid("no version, such as 130202"))?,
                "subscriber" => config.cupti.subscriber = Some(value.to_owned()),
                "yields" => config.yields = flag()?,
                "teardown" => config.teardown = flag()?,
                "slow" => {
                    let found = of_function(value, |millis| millis.parse().ok().map(Duration::from_millis));
                    config.slow = Some(found.ok_or_else(|| invalid("not of the form function:300"))?);
                }
                "nested" => config.nested = flag()?,
                "accounted" => config.accounted = Some(size(value).ok_or_else(|| invalid("no size, such as 1GiB"))?),
                "integrated" => config.integrated = flag()?,
                "figures_max" => config.figures_max = flag()?,
                "blocks" => config.blocks = Some(value.to_owned()),
                // `foreign.rs` reads this setting while the library is loaded.
                "foreign_slot" => {}
                "shared" => config.cupti.shared = flag()?,
                "processes" => {
                    config.processes = shown(value).ok_or_else(|| invalid("own, empty, unavailable or renamed"))?;
                }
                "compute" | "graphics" | "mps" => {
                    let list = match key {
                        "compute" => List::Compute,
                        "graphics" => List::Graphics,
                        _ => List::Mps,
                    };
                    let other = other(list, value).ok_or_else(|| invalid("no process, such as 4242:300MiB:python"))?;
                    config.others.push(other);
                }
                "others_grow" => {
                    let found = of_function(value, size);
                    config.others_grow = Some(found.ok_or_else(|| invalid("not of the form function:64MiB"))?);
                }
                "fastest" => {
                    config.reversed = match value {
                        "pci" => false,
                        "reversed" => true,
                        _ => return Err(invalid("pci or reversed")),
                    }
                }
                _ => {
                    let (name, card) = indexed(key).ok_or_else(|| invalid("a bad index"))?;
                    let bytes = size(value).ok_or_else(|| invalid("no such key, or no size, such as 16GiB"))?;
                    match card {
                        Some(card) => single.push((entry, card, name, bytes)),
                        None => {
                            *bytes_of(&mut common, name).ok_or_else(|| invalid("no such key"))? = bytes;
                        }
                    }
                }
            }
        }
        config.cards = (0..devices).map(|card| Card { total: common.total + card * GIB, ..common }).collect();
        for (entry, card, name, bytes) in single {
            let field = config.cards.get_mut(card).and_then(|card| bytes_of(card, name));
            *field.ok_or_else(|| format!("GPUMEM_STANDIN: `{entry}`: no such card or key"))? = bytes;
        }
        Ok(config)
    }
}

/// Reads a setting of a function, such as `cuModuleGetFunction:64MiB`.
fn of_function<T>(text: &str, read: impl Fn(&str) -> Option<T>) -> Option<(String, T)> {
    let (name, value) = text.split_once(':')?;
    Some((name.to_owned(), read(value)?))
}

fn bytes_of<'card>(card: &'card mut Card, name: &str) -> Option<&'card mut u64> {
    match name {
        "total" => Some(&mut card.total),
        "reserved" => Some(&mut card.reserved),
        "used" => Some(&mut card.used),
        _ => None,
    }
}

/// Parses the name of a way to show this process.
fn shown(text: &str) -> Option<Processes> {
    match text {
        "own" => Some(Processes::Own),
        "empty" => Some(Processes::Empty),
        "unavailable" => Some(Processes::Unavailable),
        "renamed" => Some(Processes::Renamed),
        _ => None,
    }
}

/// Parses `4242:300MiB:python` or `4242:na`.
fn other(list: List, text: &str) -> Option<Other> {
    let mut parts = text.splitn(3, ':');
    let pid = parts.next()?.parse().ok()?;
    let used = match parts.next()? {
        "na" => None,
        used => Some(size(used)?),
    };
    Some(Other { list, pid, used, name: parts.next().map(str::to_owned) })
}

/// Parses `16GiB`, `615MiB`, `1KiB` or `12B`.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|sign: char| !sign.is_ascii_digit())?);
    let unit = match unit {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => MIB,
        "GiB" => GIB,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// Parses `name` or `name[index]`.
fn indexed(text: &str) -> Option<(&str, Option<usize>)> {
    match text.strip_suffix(']') {
        None => Some((text, None)),
        Some(text) => {
            let (name, index) = text.split_once('[')?;
            Some((name, Some(index.parse().ok()?)))
        }
    }
}

/// A function that fails.
#[derive(Debug)]
pub(crate) struct Fault {
    function: String,
    card: Option<usize>,
    code: c_int,
    /// The calls that fail, counted from 1.
    failing: Range<u64>,
    calls: AtomicU64,
}

impl Fault {
    /// Returns the code for this call, if it is one of those that fail. A fault of one GPU counts only the calls for that GPU, as soon as
    /// the GPU of a call is known.
    pub(crate) fn strike(&self, function: &str, card: Option<usize>) -> Option<c_int> {
        if self.function != function || self.card != card {
            return None;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.failing.contains(&call).then_some(self.code)
    }
}

fn read_faults(text: &str, functions: &[&str]) -> Result<Vec<Fault>, String> {
    let entries = text.split(';').map(str::trim).filter(|entry| !entry.is_empty());
    entries
        .map(|entry| {
            let invalid = |why: &str| format!("GPUMEM_STANDIN_FAIL: `{entry}`: {why}");
            let form =
                || invalid("not of the form function=code, function[card]=code or either with @call or @call..call");
            let (place, what) = entry.split_once('=').ok_or_else(form)?;
            let (function, card) = indexed(place).ok_or_else(form)?;
            let (code, calls) = what.split_once('@').unwrap_or((what, "1"));
            let (from, to) = calls.split_once("..").map_or((calls, None), |(from, to)| (from, Some(to)));
            if !functions.contains(&function) {
                return Err(invalid("the stand-in driver has no such function"));
            }
            Ok(Fault {
                function: function.to_owned(),
                card,
                code: code.parse().map_err(|_| form())?,
                failing: from.parse().map_err(|_| form())?..to.map_or(Ok(u64::MAX), str::parse).map_err(|_| form())?,
                calls: AtomicU64::new(0),
            })
        })
        .collect()
}
