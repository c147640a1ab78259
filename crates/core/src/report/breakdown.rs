//! The parts of a device's used memory. They are derived from readings and from live blocks; nothing is measured here.

use std::{cmp::Reverse, collections::BTreeMap};

use super::{DriverMemory, InUse, LargestOfDriver};
use crate::model::{Bytes, Device, DriverGauge, Family, GpuMemory, GpuProcess, MemKind, PoolUsage};

/// The parts of a device's used memory, which `gpumem::breakdown` returns.
///
/// The parts always add up to the used memory of the driver's report: memory that cannot be attributed is a separate part with
/// its own name. `Display` is a table of at most 80 columns.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Breakdown {
    /// The CUDA ordinal of the device.
    pub device: u32,
    /// The device's name.
    pub name: Option<String>,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The reading that the parts add up to.
    pub memory: GpuMemory,
    /// First other processes, then this process, then memory that cannot be attributed to a process.
    pub parts: Vec<Part>,
    /// The parts, added up by who has the memory.
    pub in_use: InUse,
}

/// A part of a device's used memory.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::builder().silent(true).start()?;
/// # drop(trace);
/// let block = gpu.alloc(gpumem::Bytes::mib(256))?;
/// for part in gpumem::breakdown(0)?.parts {
///     println!("{} {}", part.bytes, part.name); // 256 MiB outside of all scopes
/// }
/// # assert_eq!(gpumem::breakdown(0)?.parts[0].name, "outside of all scopes");
/// # drop(block);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// The kind of the part's holder.
    pub kind: PartKind,
    /// The holder of the part as text: the path of scopes, the library, or the use by the driver.
    pub name: String,
    /// The path of scopes of a [`PartKind::Scope`]. Empty outside all scopes.
    pub path: Vec<String>,
    /// Its size.
    pub bytes: Bytes,
    /// The number of allocations or of processes; 0 if neither applies.
    pub count: u64,
}

/// The holder of a part of a device's used memory.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, report::PartKind};
/// drop(gpu.alloc_async(Bytes::mib(64))?);
/// let parts = gpumem::breakdown(0)?.parts;
/// let cache = parts.iter().find(|part| part.kind == PartKind::PoolCache).unwrap();
/// assert_eq!(cache.bytes, Bytes::mib(64));
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PartKind {
    /// Other processes.
    Others,
    /// Live allocations of this process that are not a [`Library`](Self::Library)'s, by the path of scopes in which they were made.
    Scope,
    /// Live allocations of this process that the code of a library made (cuBLAS, PyTorch…), as
    /// [`LiveBlock::library`](super::LiveBlock::library).
    Library,
    /// Memory of this process that the stream-ordered pool keeps and no allocation uses. `gpumem::torch::empty_cache`
    /// returns it to the device.
    PoolCache,
    /// Memory of this process that one of its own pools keeps and no part uses (`gpumem::pool`).
    RegisteredPool,
    /// Memory that the driver took for itself in this process, by cause ([`DriverMemory`]), and the rounding of allocations to the
    /// driver's pages. One part is what has no cause, such as blocks that are older than the first trace.
    Driver,
    /// Used memory that the driver does not attribute to a process.
    Unknown,
}

/// Live allocations of one scope, library and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The path of scopes.
    pub path: Vec<String>,
    /// The library that allocated them. `None` for the program.
    pub library: Option<String>,
    /// The line of the program, or where the scope was opened.
    pub place: Option<String>,
    /// The line that called the function of that line.
    pub caller: Option<String>,
    /// The number of live blocks.
    pub blocks: u64,
    /// The sum of their requested sizes.
    pub bytes: Bytes,
    /// True if this is the unused memory of a registered pool; `library` is then its name.
    pub is_cache: bool,
}

/// The data of the driver and NVML about a device at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReading {
    /// The device.
    pub device: Device,
    /// The driver's name for the device.
    pub name: Option<String>,
    /// All processes together.
    pub memory: GpuMemory,
    /// Each process, if the driver lists them.
    pub processes: Option<Vec<GpuProcess>>,
    /// The current pool, if it could be read.
    pub pool: Option<PoolUsage>,
    /// What the driver took for itself in this process, and the rounding of allocations. Empty if it is not measured.
    pub taken: Vec<DriverMemory>,
    /// How `taken` was measured.
    pub driver_gauge: Option<DriverGauge>,
}

impl DeviceReading {
    /// Returns what the driver took, without the unused memory of pools, which is a part of its own.
    fn taken_besides_pools(&self) -> impl Iterator<Item = &DriverMemory> {
        self.taken.iter().filter(|row| row.kind != MemKind::PoolCache && row.bytes > Bytes::ZERO)
    }

    /// Adds up the parts by who has the memory. `is_listed` is true if the memory of this process is known as a whole, and
    /// `are_others_listed` if the memory of each other process is.
    fn in_use(&self, parts: &[Part], is_listed: bool, are_others_listed: bool) -> InUse {
        let sum = |kinds: &[PartKind]| -> Bytes {
            parts.iter().filter(|part| kinds.contains(&part.kind)).map(|part| part.bytes).sum()
        };
        let allocations = sum(&[PartKind::Scope, PartKind::Library, PartKind::RegisteredPool]);
        let is_measured = self.taken_besides_pools().next().is_some();
        let driver = (is_listed || is_measured).then(|| sum(&[PartKind::PoolCache, PartKind::Driver]));
        let cache = LargestOfDriver::new(POOL_CACHE, sum(&[PartKind::PoolCache]));
        let rows = self.taken_besides_pools().map(|row| LargestOfDriver::new(&row.cause(), row.bytes));
        let largest = rows.chain([cache]).max_by_key(|row| row.bytes);
        // Memory without a known cause may be more than each part with one.
        let with_cause: Bytes =
            self.taken_besides_pools().map(|row| row.bytes).sum::<Bytes>() + sum(&[PartKind::PoolCache]);
        let without = driver.unwrap_or_default().checked_sub(with_cause).unwrap_or_default();
        let largest = largest.filter(|row| row.bytes > without && driver.is_some_and(|driver| row.bytes <= driver));
        let is_at_most = driver.is_some() && !is_listed && self.driver_gauge == Some(DriverGauge::AtMost);
        let read = [Some(self.memory.free), Some(self.memory.used)];
        let in_use = InUse::of_process(read, allocations, (driver, is_at_most), largest);
        match in_use.rest.filter(|_| is_listed && are_others_listed) {
            Some(rest) => {
                let others = sum(&[PartKind::Others]);
                InUse { others: Some(others), rest: rest.checked_sub(others), ..in_use }
            }
            None => in_use,
        }
    }
}

/// The name of the part of the stream-ordered pool.
const POOL_CACHE: &str = "kept by the pool, unused";

/// Returns a path of scopes as text.
pub fn path_in_words(path: &[String]) -> String {
    if path.is_empty() { "outside of all scopes".to_owned() } else { path.join(" > ") }
}

impl Breakdown {
    /// Creates the breakdown from this reading and from the live memory on the device of the process with this id.
    #[doc(hidden)]
    pub fn of(reading: &DeviceReading, own_pid: u32, live: &[Group]) -> Self {
        let DeviceReading { device, memory, processes, pool, .. } = reading;
        let simulated = device.family == Family::Simulated;
        let mut parts = Vec::new();
        let mut own = own_parts(live, pool.as_ref());
        own.extend(reading.taken_besides_pools().map(|row| Part {
            kind: PartKind::Driver,
            name: row.to_string(),
            path: Vec::new(),
            bytes: row.bytes,
            count: 0,
        }));
        let reported = |own: bool| {
            let all = processes.as_ref()?;
            let some: Vec<_> = all.iter().filter(|process| (process.pid == own_pid) == own).collect();
            // The sum is not known if the driver does not report the memory of one process.
            let sum = some.iter().map(|process| process.used).sum::<Option<Bytes>>()?;
            Some((sum, some.len() as u64))
        };
        // In a container the driver may list this process under another id. Then its memory cannot be separated from the memory of
        // others.
        let this = reported(true).filter(|(_, count)| *count > 0).map(|(bytes, _)| bytes);
        let others = reported(false);
        let mut left = memory.used;
        let mut take = |part: Part| {
            // The readings come from different moments, so their sum may exceed the memory of the device.
            let bytes = part.bytes.min(left);
            left = left.checked_sub(bytes).unwrap_or_default();
            parts.push(Part { bytes, ..part });
        };
        // First the parts that are certain.
        let accounted: Bytes = own.iter().map(|part| part.bytes).sum();
        own.into_iter().for_each(&mut take);
        if let (Some((bytes, count @ 1..)), Some(_)) = (others, this) {
            let name = if count == 1 { "another process" } else { "other processes" }.to_owned();
            take(Part { kind: PartKind::Others, name, path: Vec::new(), bytes, count });
        }
        if let Some(rest) = this.and_then(|this| this.checked_sub(accounted)) {
            let name = if simulated {
                "the rounding to the device's pages"
            } else {
                match reading.taken[..] {
                    [] => "CUDA context, kernels, modules; what is unknown",
                    _ => "what is unknown",
                }
            };
            let name = name.to_owned();
            take(Part { kind: PartKind::Driver, name, path: Vec::new(), bytes: rest, count: 0 });
        }
        let name = match (this, others) {
            (Some(_), Some(_)) => "the driver's, of no process",
            (Some(_), None) => "other processes, and the driver's",
            (None, _) => "other processes and the CUDA context",
        };
        let rest = Part { kind: PartKind::Unknown, name: name.to_owned(), path: Vec::new(), bytes: left, count: 0 };
        parts.push(rest);
        parts.retain(|part| part.bytes > Bytes::ZERO);
        parts.sort_by_key(|part| part.kind);
        let in_use = reading.in_use(&parts, this.is_some(), others.is_some());
        Self { device: device.ordinal, name: reading.name.clone(), simulated, memory: *memory, parts, in_use }
    }

    /// Returns the memory that trimming the pool would return to the device.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// drop(gpu.alloc_async(Bytes::mib(64))?);
    /// assert_eq!(gpumem::breakdown(0)?.trimmable(), Bytes::mib(64));
    /// gpumem::torch::empty_cache()?;
    /// assert_eq!(gpumem::breakdown(0)?.trimmable(), Bytes::ZERO);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn trimmable(&self) -> Bytes {
        self.parts.iter().filter(|part| part.kind == PartKind::PoolCache).map(|part| part.bytes).sum()
    }
}

/// Returns the live memory of this process by library and by path of scopes, the largest first, and the memory that its pool
/// keeps.
fn own_parts(live: &[Group], pool: Option<&PoolUsage>) -> Vec<Part> {
    let mut sums: BTreeMap<(PartKind, String, Vec<String>), (Bytes, u64)> = BTreeMap::new();
    for group in live {
        let owner = match &group.library {
            Some(pool) if group.is_cache => (PartKind::RegisteredPool, pool.clone(), Vec::new()),
            Some(library) => (PartKind::Library, library.clone(), Vec::new()),
            None => (PartKind::Scope, path_in_words(&group.path), group.path.clone()),
        };
        let (bytes, blocks) = sums.entry(owner).or_default();
        *bytes = *bytes + group.bytes;
        *blocks += group.blocks;
    }
    let mut parts: Vec<_> =
        sums.into_iter().map(|((kind, name, path), (bytes, count))| Part { kind, name, path, bytes, count }).collect();
    parts.sort_by_key(|part| (part.kind, Reverse(part.bytes)));
    let cached = pool.and_then(|pool| pool.reserved.checked_sub(pool.used)).unwrap_or_default();
    parts.push(Part {
        kind: PartKind::PoolCache,
        name: POOL_CACHE.to_owned(),
        path: Vec::new(),
        bytes: cached,
        count: 0,
    });
    parts
}
