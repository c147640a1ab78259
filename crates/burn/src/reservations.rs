//! cubecl's reservations, observed through its `tracing` spans.
//!
//! The span of `MemoryManagement::reserve` does not contain the size. Inside it, pools that divide pages open one span with the size for
//! each page that they try. Therefore the number of `reserve` spans is counted, and the size is taken from a span inside. Other pools
//! report no size; for these, the spans of newly allocated pages are counted.

use std::{
    cell::{OnceCell, RefCell},
    collections::HashMap,
    fmt::Debug,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use tracing::{
    Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, filter_fn},
    layer::Context,
    registry::LookupSpan,
};

/// The cubecl module that makes reservations.
const MODULE: &str = "cubecl_server::memory_management";

/// The reservations on a device since the last [`take`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reserved {
    /// The number of times that `reserve` ran.
    pub(crate) count: u64,
    /// The number of reservations of unknown size.
    pub(crate) unsized_count: u64,
    /// The number of pages that these reservations allocated from the driver.
    pub(crate) unsized_pages: u64,
    /// The sum of the known sizes.
    pub(crate) bytes: u64,
    /// The largest known size.
    pub(crate) largest: u64,
    /// True if the program made cubecl release all unused memory.
    pub(crate) cleaned_up: bool,
}

impl Reserved {
    pub(crate) fn add(&mut self, more: &Self) {
        self.count += more.count;
        self.unsized_count += more.unsized_count;
        self.unsized_pages += more.unsized_pages;
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.largest = self.largest.max(more.largest);
        self.cleaned_up |= more.cleaned_up;
    }
}

/// The device of a device thread, from the two numbers in the thread's name, such as `DSD-0-0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceThread {
    pub(crate) kind: u16,
    pub(crate) index: u32,
}

impl DeviceThread {
    /// The lower bits of a kind. The other bits may identify the runtime.
    const KIND: u16 = 0x1f;

    pub(crate) fn new(kind: u16, index: u32) -> Self {
        Self { kind: kind & Self::KIND, index }
    }

    fn of_name(name: &str) -> Option<Self> {
        let (kind, index) = name.strip_prefix("DSD-")?.split_once('-')?;
        Some(Self::new(kind.parse().ok()?, index.parse().ok()?))
    }
}

type Shared = Arc<Mutex<Reserved>>;

static DEVICES: Mutex<Option<HashMap<DeviceThread, Shared>>> = Mutex::new(None);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of_device(device: DeviceThread) -> Shared {
    lock(&DEVICES).get_or_insert_default().entry(device).or_default().clone()
}

/// Returns the reservations on the device since the last call, and resets them.
pub(crate) fn take(device: DeviceThread) -> Reserved {
    std::mem::take(&mut *lock(&of_device(device)))
}

/// Returns the reservations on the device since the last call of [`take`], without resetting them.
pub(crate) fn peek(device: DeviceThread) -> Reserved {
    lock(&of_device(device)).clone()
}

#[derive(Default)]
struct ThisThread {
    /// The reservations of this thread's device, looked up once. `None` if this thread does not belong to a device.
    device: OnceCell<Option<Shared>>,
    /// The open span of `reserve`.
    open: Option<Reservation>,
}

struct Reservation {
    id: Id,
    size: Option<u64>,
    new_pages: u64,
}

thread_local! {
    static THIS_THREAD: RefCell<ThisThread> = RefCell::default();
}

impl ThisThread {
    fn count(&mut self, more: &Reserved) {
        let device = self.device.get_or_init(|| Some(of_device(DeviceThread::of_name(thread::current().name()?)?)));
        if let Some(device) = device {
            lock(device).add(more);
        }
    }
}

/// The two fields of a span that the layer reads.
#[derive(Default)]
struct Fields {
    size: Option<u64>,
    cleans_up: bool,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "size" {
            self.size = Some(value);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Other fields are not formatted, because they are long.
        if field.name() == "cleanup" {
            self.cleans_up = format!("{value:?}") == "Explicit";
        }
    }
}

struct Reservations;

impl<S: Subscriber> Layer<S> for Reservations {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        THIS_THREAD.with_borrow_mut(|this| {
            if fields.cleans_up {
                this.count(&Reserved { cleaned_up: true, ..Reserved::default() });
            } else if attributes.metadata().name() == "reserve" {
                this.open = Some(Reservation { id: id.clone(), size: None, new_pages: 0 });
            } else if let Some(open) = &mut this.open {
                open.new_pages += u64::from(is_of_storage(attributes.metadata()));
                open.size = fields.size.or(open.size);
            }
        });
    }

    fn on_close(&self, id: Id, _: Context<'_, S>) {
        THIS_THREAD.with_borrow_mut(|this| {
            let Some(closed) = this.open.take_if(|open| open.id == id) else { return };
            this.count(&match closed.size {
                Some(size) => Reserved { count: 1, bytes: size, largest: size, ..Reserved::default() },
                None => Reserved { count: 1, unsized_count: 1, unsized_pages: closed.new_pages, ..Reserved::default() },
            });
        });
    }
}

/// Returns whether a runtime allocates device memory from the driver in this span, for example `cubecl_cuda::compute::storage::gpu`.
fn is_of_storage(metadata: &Metadata<'_>) -> bool {
    let module = metadata.target();
    module.starts_with("cubecl_") && module.contains("::storage") && !module.ends_with("::cpu")
}

fn is_taken(metadata: &Metadata<'_>) -> bool {
    let reserves = metadata.target().starts_with(MODULE)
        && matches!(metadata.name(), "reserve" | "try_reserve" | "alloc" | "cleanup");
    metadata.is_span() && (reserves || metadata.name() == "alloc" && is_of_storage(metadata))
}

/// Returns the layer that observes cubecl's reservations, for the program's subscriber. Without this layer, peaks have no upper bound.
///
/// The layer receives only the spans of cubecl's memory management, whatever other layers receive:
///
/// ```
/// use tracing_subscriber::prelude::*;
///
/// tracing_subscriber::registry().with(gpumem_burn::layer()).init();
/// ```
pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    Reservations.with_filter(filter_fn(is_taken).with_max_level_hint(LevelFilter::TRACE))
}

#[cfg(test)]
mod tests {
    use tracing::{Level, span};
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Opens a span like cubecl's own macro.
    macro_rules! cubecl {
        ($module:literal, $name:literal $($field:tt)*) => {
            span!(target: concat!("cubecl_", $module), Level::TRACE, $name $($field)*)
        };
    }

    fn on_thread(name: &str, code: impl FnOnce() + Send + 'static) {
        let code = || tracing::subscriber::with_default(tracing_subscriber::registry().with(layer()), code);
        thread::Builder::new().name(name.to_owned()).spawn(code).unwrap().join().unwrap();
    }

    fn reserve(tries: &[u64]) {
        let _reserve = cubecl!("server::memory_management::memory_manage", "reserve").entered();
        for &size in tries {
            let _page = cubecl!("server::memory_management::memory_pool::memory_page", "try_reserve", size).entered();
        }
    }

    #[test]
    fn a_reservation_counts_once_however_many_pages_are_tried() {
        on_thread("DSD-0-7", || {
            reserve(&[4096, 4096, 4096]);
            reserve(&[100]);
            reserve(&[]); // The reservation comes from a pool without a span.
            let _reserve = cubecl!("server::memory_management::memory_manage", "reserve").entered();
            let _host = cubecl!("cuda::compute::storage::cpu", "alloc").entered();
            let _page = cubecl!("cuda::compute::storage::gpu", "alloc").entered();
        });
        let device = DeviceThread::new(0, 7);
        let sized = Reserved { count: 2, bytes: 4196, largest: 4096, ..Reserved::default() };
        let reserved = Reserved { count: 4, unsized_count: 2, unsized_pages: 1, ..sized };
        assert_eq!(peek(device), reserved);
        assert_eq!(take(device), reserved);
        assert_eq!(take(device), Reserved::default());
    }

    #[test]
    fn a_size_outside_of_a_reservation_and_spans_of_others_do_not_count() {
        on_thread("DSD-0-8", || {
            let _page = cubecl!("server::memory_management::memory_pool::memory_page", "try_reserve", size = 4096_u64)
                .entered();
            let _mine = span!(target: "my_program", Level::TRACE, "reserve", size = 4096_u64).entered();
        });
        assert_eq!(take(DeviceThread::new(0, 8)), Reserved::default());
    }

    #[test]
    fn only_an_explicit_cleanup_is_one() {
        #[derive(Debug)]
        enum Cleanup {
            Periodic,
            Explicit,
        }
        let cleanup = |cleanup: Cleanup| {
            move || drop(cubecl!("server::memory_management::memory_pool::sliced_pool", "cleanup", ?cleanup).entered())
        };
        let device = DeviceThread::new(0, 9);
        on_thread("DSD-0-9", cleanup(Cleanup::Periodic));
        assert!(!take(device).cleaned_up);
        on_thread("DSD-0-9", cleanup(Cleanup::Explicit));
        assert!(take(device).cleaned_up);
    }

    #[test]
    fn the_name_of_a_device_thread_says_its_device() {
        assert_eq!(DeviceThread::of_name("DSD-97-2"), Some(DeviceThread::new(1, 2)));
        for other in ["DSU-0-0", "main", "DSD-0", "DSD-a-0"] {
            assert_eq!(DeviceThread::of_name(other), None, "{other}");
        }
    }
}
