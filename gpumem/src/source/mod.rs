//! What brings facts in. A family of devices can be asked (a reading, the current device), and some also tell: they
//! post each allocation as it happens.

#[cfg(all(feature = "bench", feature = "cupti", feature = "dispatch"))]
mod both;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cupti", feature = "dispatch"))]
mod driver;
#[cfg(any(feature = "cupti", feature = "dispatch"))]
mod graphs;
#[cfg(feature = "nvml")]
mod processes;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "backtrace")]
mod stack;
mod stacks;

#[cfg(all(feature = "bench", feature = "cupti", feature = "dispatch"))]
pub use self::both::told_by_both;
#[cfg(all(feature = "bench", feature = "dispatch"))]
pub(crate) use self::driver::{hook_for_nobody, rehearse};
#[cfg(all(feature = "bench", feature = "backtrace"))]
pub(crate) use self::stacks::WAYS_TO_A_STACK;
pub(crate) use self::stacks::{frames, own_module, take_down as here};

use std::{cell::Cell, panic::RefUnwindSafe};

use once_cell::sync::OnceCell;

use crate::{
    error::{Error, Result},
    model::{
        Answer, Block, Bytes, Device, EventKind, Family, GpuMemory, GpuProcess, Key, MemKind, PoolUsage, Source, Tag,
    },
};

/// Devices of one kind, by number.
pub(crate) trait Devices: Send + Sync + RefUnwindSafe {
    fn family(&self) -> Family;

    fn count(&self) -> Result<u32>;

    /// The calling thread's current device; 0 if it has chosen none.
    fn current(&self) -> Result<u32>;

    /// The one with this number, else the current one. Whether there is such a device is not asked.
    fn device(&self, id: Option<u32>) -> Result<Device> {
        let ordinal = id.map_or_else(|| self.current(), Ok)?;
        Ok(Device { family: self.family(), ordinal })
    }

    /// Whether there is such a device.
    fn check(&self, ordinal: u32) -> Result<()>;

    fn name(&self, ordinal: u32) -> Result<String>;

    /// One reading of the whole device. Never creates a context.
    fn read(&self, ordinal: u32) -> Result<GpuMemory>;

    /// The processes that use the device, by pid. This one may be missing, or be there under another number, in a
    /// container; unknown is not 0.
    fn processes(&self, ordinal: u32) -> Result<Vec<GpuProcess>>;

    /// One reading of the device's current stream-ordered pool: its high marks, then what is in use, so that the mark is
    /// never of a later time. Never creates a context.
    fn read_pool(&self, ordinal: u32) -> Result<PoolUsage>;

    /// As [`read_pool`](Self::read_pool), and the mark of what is used is reset as soon as it is read. What is in use is read
    /// after that, so the mark is not below it from then on.
    fn reset_pool(&self, ordinal: u32) -> Result<PoolUsage>;

    /// Has the mark of what that pool took from the device begin anew, from what it holds now.
    fn reset_pool_reserved(&self, ordinal: u32) -> Result<()>;

    /// Waits for the device and gives the unused memory of its pools back.
    fn trim(&self, ordinal: u32) -> Result<()>;

    /// Pays now for what the first use of the device would cost.
    fn preload(&self, ordinal: u32) -> Result<()>;

    /// Intercepts every allocation on its devices from now on, if that is not so already: through the wanted source, else
    /// through the best.
    fn subscribe(&self, wanted: Option<Source>) -> Result<Interception>;

    /// Through which source that would be, without doing it.
    fn can_subscribe(&self, wanted: Option<Source>) -> Result<Source>;

    /// Ends that.
    fn unsubscribe(&self);

    /// What intercepts allocations; `None` if nothing does.
    fn subscribed(&self) -> Option<Interception>;

    /// Posts what can only be asked and concerns traces of this device; before one begins and at each of its readings.
    fn look_at(&self, _: u32) {}

    /// Which functions are not intercepted any more, since another tool took them, a bit for each: calls of them may be missed.
    fn displaced(&self) -> u128 {
        0
    }
}

/// What intercepts allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interception {
    pub(crate) source: Source,
    /// The library in which it does so.
    pub(crate) library: &'static str,
}

/// A family's answer to whether the process uses it: not, yes, or it would but cannot.
type Chosen = Option<Result<&'static dyn Devices>>;

/// The one list of what can be asked, first come first served.
const FAMILIES: &[fn() -> Chosen] = &[
    #[cfg(feature = "sim")]
    sim::chosen,
    #[cfg(feature = "cuda")]
    cuda::chosen,
];

/// The devices of this process: simulated ones if there are any, else CUDA's.
pub(crate) fn devices() -> Result<&'static dyn Devices> {
    FAMILIES.iter().find_map(|chosen| chosen()).unwrap_or_else(|| {
        let feature = "cuda";
        Err(Error::from(crate::error::Kind::NotBuilt { feature }))
    })
}

/// Where sources post what they intercept. It is a type, not a value, so that its functions become a part of the hooks.
pub(crate) trait Listen: 'static {
    /// A block was allocated. Not called in the child of a fork.
    fn alloc(key: Key, bytes: Bytes, tag: Tag);

    /// A block is about to be given back. Not called in the child of a fork.
    fn free(key: Key) -> Answer;

    /// Everything, these two as well.
    fn post(fact: &EventKind) -> Answer;
}

/// The functions of who listens.
struct Listener {
    post: fn(&EventKind) -> Answer,
    /// Has the driver's calls told to it.
    #[cfg(any(feature = "cupti", feature = "dispatch"))]
    subscribe: fn(Source) -> Result<()>,
}

/// Set by the session when it begins. Until then nobody listens, and a fact costs one load.
static LISTENER: OnceCell<Listener> = OnceCell::new();

/// Has everything posted to `L` from now on.
pub(crate) fn listen<L: Listen>() {
    // The session is one for the process, and its type is always the same.
    let _ = LISTENER.set(Listener {
        post: L::post,
        #[cfg(any(feature = "cupti", feature = "dispatch"))]
        subscribe: driver::subscribe_to::<L>,
    });
    stacks::begin();
}

/// Who is told of allocations that were refused for want of memory.
pub(crate) struct Refusals {
    /// No device if it is not known, or if it is the host's memory.
    pub(crate) refused: fn(Option<Device>, Bytes, MemKind),
    /// So much was allocated on a device by a thread that waits for it.
    pub(crate) obtained: fn(Device, Bytes),
}

static REFUSALS: OnceCell<Refusals> = OnceCell::new();

pub(crate) fn listen_to_refusals(listener: Refusals) {
    let _ = REFUSALS.set(listener);
}

thread_local! {
    /// This thread was refused something, and it matters whether it is given it after all.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Has the allocations of this thread told as `obtained`, or no longer.
pub(crate) fn wait_for_memory(wait: bool) {
    WAITS.set(wait);
}

fn refused(device: Option<Device>, bytes: Bytes, kind: MemKind) {
    if let Some(listener) = REFUSALS.get() {
        (listener.refused)(device, bytes, kind);
    }
}

/// A block was allocated.
fn obtained(block: &Block) {
    if WAITS.get() {
        obtained_after_all(block);
    }
}

#[cold]
fn obtained_after_all(block: &Block) {
    if let Some(listener) = REFUSALS.get().filter(|_| block.kind != MemKind::PinnedHost) {
        (listener.obtained)(block.device, block.bytes);
    }
}

fn tell(fact: &EventKind) -> Answer {
    LISTENER.get().map_or(Answer::Applied, |listener| (listener.post)(fact))
}
