//! The memory that the driver takes for itself: contexts, modules, local memory, graphs, unused memory of pools.
//!
//! Calls that can change it are rare. The memory is read before and after each of them, and the difference, less what allocations and other
//! rows explain, becomes a block of the call's kind. Measured on an H200: no byte changes outside of calls, NVML's list of processes is exact
//! at once and takes 28 µs, and NVML's reading of the device takes 6 µs. The list is read only when the device's memory has changed, or when
//! other processes use the device.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use once_cell::sync::Lazy;

use super::{
    super::{
        cards, readings,
        recorder::{self, before_allocation, live, record},
        stacks,
    },
    events::cuda_device,
    rows::Rows,
    state::state,
};
use crate::{
    model::{DriverGauge, EventKind, Label, MemKind, StackId},
    settings::OF_NO_PROCESS,
    sys::{
        calls::{self, DriverWork},
        cuda::{self, LoadedFunction},
        dispatch, loader, nvml,
    },
};

/// If the device had less than this in use before the first context, no other process used it: the driver itself takes 3 MiB.
const UNUSED: u64 = 16 << 20;

/// A change that is smaller than one page of the driver is not searched for.
const PAGE: u64 = 2 << 20;

/// The stacks of large blocks are recorded, and the driver's rows are few.
pub(super) const LARGE: u64 = 1 << 40;

static DEVICES: Lazy<Mutex<BTreeMap<u32, DeviceMemory>>> = Lazy::new(Mutex::default);

thread_local! {
    static BEFORE: CallOfThread = const { CallOfThread(Cell::new(None)) };
}

/// The reading before the call that this thread makes.
struct CallOfThread(Cell<Option<Before>>);

impl Drop for CallOfThread {
    /// A thread that is cancelled inside a call never returns from it.
    fn drop(&mut self) {
        if let Some(before) = self.0.take()
            && let Some(device) = all().get_mut(&before.ordinal)
        {
            device.running -= 1;
        }
    }
}

/// The memory that is in use at one moment.
#[derive(Clone, Copy, Debug, Default)]
struct Reading {
    /// The memory of the device or of this process, in bytes.
    bytes: u64,
    is_of_process: bool,
    /// The bytes of allocations, and of pools.
    allocated: u64,
    /// The number of allocations and frees so far. In a dry run and on a smaller GPU, `None` while another thread makes one.
    changes: Option<u64>,
}

/// The state before a call.
#[derive(Clone, Copy, Debug)]
struct Before {
    ordinal: u32,
    reading: Option<Reading>,
    /// The bytes of all rows.
    rows: u64,
    /// The number of calls that had started.
    starts: u64,
    is_shared: bool,
}

/// The memory of the driver on one device.
#[derive(Debug, Default)]
struct DeviceMemory {
    gauge: Option<DriverGauge>,
    /// True if NVML lists another process, so that changes of the device's memory may be its own.
    has_others: bool,
    /// The number of calls that are being made now, and that have ever started.
    running: u32,
    starts: u64,
    rows: Rows,
    /// The bytes that nothing explained at the last reading of the list of processes. Negative if too much was explained.
    unexplained: i64,
    default_pool: Option<u64>,
    /// The bytes of local memory that the context has for each thread.
    local_bytes: u64,
    /// The bytes of local memory that skipped launches would have taken.
    skipped_local: u64,
    /// A function with more local memory, which was launched while its stream was captured.
    captured: Option<(u64, Option<String>)>,
    /// The addresses of the images of modules and libraries, by handle.
    images: HashMap<u64, u64>,
}

fn all() -> MutexGuard<'static, BTreeMap<u32, DeviceMemory>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the bytes that the driver maps for allocations in addition to their sizes. `None` if they are not known.
fn rounding(ordinal: u32) -> Option<u64> {
    match cards::taken_in_dry_run(ordinal) {
        Some(_) => Some(0),
        None => recorder::rounding(cuda_device(ordinal)),
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Reads the memory before a call that can change the driver's.
pub(super) fn starts(ordinal: Option<u32>, creates_context: bool) {
    // While a thread ends, its thread-local variables may be gone. Its calls then count as not known.
    let Some(ordinal) = ordinal.filter(|_| readings::lists_processes() && BEFORE.try_with(|_| ()).is_ok()) else {
        return;
    };
    let mut all = all();
    let device = all.entry(ordinal).or_default();
    let is_first_context = creates_context && device.starts == 0 && !cuda::has_primary_context(ordinal.cast_signed());
    // The first context takes longer than NVML, which another thread opens: its list then shows what the context took.
    let is_ready = !is_first_context || !nvml::is_opening();
    if device.starts == 0 && is_ready {
        device.meet(ordinal);
    }
    device.running += 1;
    device.starts += 1;
    let before = Before {
        ordinal,
        reading: is_ready.then(|| device.read(ordinal)).flatten(),
        rows: device.rows.bytes(),
        starts: device.starts,
        is_shared: device.running > 1,
    };
    _ = BEFORE.try_with(|call| call.0.set(Some(before)));
}

/// Reads the memory after a call, and records the difference.
pub(super) fn done(ordinal: Option<u32>, work: DriverWork) {
    let before = BEFORE.try_with(|call| call.0.take()).ok().flatten();
    before_allocation();
    let mut all = all();
    if matches!(work, DriverWork::ContextEnded | DriverWork::Unloaded | DriverWork::Limit { .. }) {
        // The driver may give the handles of functions to others, and a launch may take the memory again that a limit gave back.
        calls::forget_launches();
    }
    if work == DriverWork::ContextEnded {
        // If the call does not name the device, the context may have been on any.
        for (known, device) in all.iter_mut().filter(|(known, _)| ordinal.is_none_or(|ended| ended == **known)) {
            if let Some(unexplained) = device.unexplained(*known).filter(Unexplained::is_worth_a_row) {
                device.explain(*known, unexplained);
            }
        }
        return;
    }
    let Some(before) = before else { return };
    if work == DriverWork::Context && all.len() > 1 {
        calls::note_several_devices();
    }
    let Some(device) = all.get_mut(&before.ordinal) else { return };
    device.running -= 1;
    let is_shared = before.is_shared || device.starts != before.starts;
    device.finish(&before, is_shared, work);
    if readings::has_only_list() && device.rows.have_context() {
        cards::set_driver_memory(before.ordinal, device.rows.known_bytes() + OF_NO_PROCESS.get());
    }
}

/// Forgets a pool that is about to be destroyed. No thread reads it while this waits for the lock.
pub(super) fn pool_destroyed(pool: u64) {
    let _all = all();
    state().pools.remove(&pool);
}

/// Compares the memory of this process by NVML with everything that is recorded, and records the rest as not known. A difference that is not
/// the same a moment later is an allocation that another thread is making: it is not recorded yet.
pub(in crate::source) fn compare(ordinal: u32) {
    const MOMENT: Duration = Duration::from_millis(2);
    // In a dry run, the blocks that gpumem puts behind addresses would be found.
    if !readings::lists_processes() || cards::taken_in_dry_run(ordinal).is_some() || dispatch::subscribed().is_none() {
        return;
    }
    calls::as_observer(|| {
        let unexplained = || {
            let mut all = all();
            let device = all.entry(ordinal).or_default();
            // What a call takes is explained at its end.
            if device.running > 0 {
                return None;
            }
            if device.starts == 0 {
                device.starts = 1;
                device.meet(ordinal);
            }
            device.unexplained(ordinal)
        };
        let Some(first) = unexplained().filter(Unexplained::is_worth_a_row) else { return };
        thread::sleep(MOMENT);
        if unexplained() == Some(first)
            && let Some(device) = all().get_mut(&ordinal)
        {
            device.explain(ordinal, first);
        }
    });
}

/// Reads the pools of all devices that the process uses. A pool takes memory in the fast path of an allocation, and returns it while the
/// program waits for a stream; neither is intercepted, so the pools are read often. Reading one takes 0.1 µs.
pub(in crate::source) fn read_pools() {
    calls::as_observer(|| {
        for (ordinal, device) in all().iter_mut() {
            if device.gauge.is_some() {
                device.update_pools(*ordinal);
            }
        }
    });
}

/// Compares all devices that the process uses.
pub(in crate::source) fn compare_all() {
    let known: Vec<u32> = all().keys().copied().collect();
    known.into_iter().for_each(compare);
}

impl DeviceMemory {
    /// Learns how this device is measured, before the first call on it. If the process has a context already, what the driver holds is
    /// older than the recording.
    fn meet(&mut self, ordinal: u32) {
        self.default_pool = cuda::default_pool(ordinal);
        let Some(bytes) = self.listed(ordinal) else { return };
        self.measured_by(ordinal, DriverGauge::Process);
        let allocated = self.allocated(ordinal);
        let earlier = bytes.saturating_sub(allocated + rounding(ordinal).unwrap_or(0));
        self.rows.grow(ordinal, MemKind::Earlier, earlier, StackId::NONE, None);
    }

    fn measured_by(&mut self, ordinal: u32, by: DriverGauge) {
        if self.gauge.replace(by) != Some(by) {
            record(&EventKind::DriverMeasured { device: cuda_device(ordinal), by });
        }
    }

    /// Returns the memory of this process by NVML's list, if it is listed.
    fn listed(&mut self, ordinal: u32) -> Option<u64> {
        let listed = readings::listed_memory(ordinal)?;
        self.has_others = listed.others > 0;
        listed.own
    }

    /// Returns the bytes that allocations explain. A pool explains what it has reserved.
    fn allocated(&self, ordinal: u32) -> u64 {
        if let Some(taken) = cards::taken_in_dry_run(ordinal) {
            return taken;
        }
        let live = live(cuda_device(ordinal));
        let bytes = |kind: MemKind| live.kinds[kind as usize];
        let reserved: u64 = self.pools(ordinal).iter().map(|(_, state)| state.reserved).sum();
        let others = bytes(MemKind::Device) + bytes(MemKind::Vmm) + bytes(MemKind::Graph);
        others + reserved.max(bytes(MemKind::Pool))
    }

    /// Returns the pools of a device.
    fn pools(&self, ordinal: u32) -> Vec<(u64, cuda::PoolState)> {
        let known: Vec<u64> = {
            let state = state();
            let on_device = state.pools.iter().filter(|(_, device)| **device == Some(ordinal)).map(|(pool, _)| *pool);
            self.default_pool.into_iter().chain(on_device.filter(|pool| Some(*pool) != self.default_pool)).collect()
        };
        known.into_iter().filter_map(|pool| Some((pool, cuda::pool_state(pool)?))).collect()
    }

    /// Reads the memory. The device's memory is read in a fraction of the time that the list of processes takes.
    fn read(&mut self, ordinal: u32) -> Option<Reading> {
        let is_of_process = self.gauge == Some(DriverGauge::Process) && self.has_others || readings::has_only_list();
        // The account has a block before the block is recorded.
        let by_account = readings::has_only_list();
        let changes = || {
            if by_account { cards::changes_of_blocks() } else { Some(live(cuda_device(ordinal)).events) }
        };
        let before = changes();
        let bytes = if is_of_process { self.listed(ordinal)? } else { readings::device_memory(ordinal)? };
        let allocated = if by_account { cards::taken_by_account(ordinal) } else { self.allocated(ordinal) };
        Some(Reading { bytes, is_of_process, allocated, changes: before.filter(|_| before == changes()) })
    }

    /// Records what a call has changed.
    fn finish(&mut self, before: &Before, is_shared: bool, work: DriverWork) {
        let ordinal = before.ordinal;
        if work == DriverWork::Context
            && self.gauge.is_none_or(|by| by == DriverGauge::Process)
            && !self.rows.have_context()
        {
            return self.context_created(before);
        }
        // The account does not have the memory that pools of the real GPU keep, and return while another thread waits for a stream.
        let gives_back =
            matches!(work, DriverWork::Limit { .. } | DriverWork::Unloaded | DriverWork::GraphDestroyed { .. });
        let least = if readings::has_only_list() && !gives_back { 0 } else { i64::MIN };
        let change = self.change_since(before, is_shared).map(|change| change.max(least));
        self.record(ordinal, change.unwrap_or(0), is_shared, work);
        self.update_pools(ordinal);
    }

    /// Returns the change of the memory that allocations and other rows do not explain. `None` if it is not known.
    fn change_since(&mut self, before: &Before, is_shared: bool) -> Option<i64> {
        let (first, now) = (before.reading?, self.read(before.ordinal)?);
        // Another thread has allocated or freed during the call, so the two readings cannot be compared. The next comparison with NVML finds
        // the difference. Rows that a call of another thread has added are changes, too, except in an account.
        let is_alone = readings::has_only_list() || !is_shared;
        if is_alone && (first.changes.is_none() || first.changes != now.changes) {
            return None;
        }
        let explained =
            signed(now.allocated) - signed(first.allocated) + signed(self.rows.bytes()) - signed(before.rows);
        let change = signed(now.bytes) - signed(first.bytes) - explained;
        let is_comparable = first.is_of_process == now.is_of_process;
        if is_comparable && (change == 0 || self.gauge != Some(DriverGauge::Process) || now.is_of_process) {
            return Some(change);
        }
        // Another process may have started or ended, whose memory is part of the device's. NVML lists it only some time later.
        let unexplained = self.unexplained_now(before.ordinal)?;
        let of_process = unexplained - self.unexplained;
        let is_same = is_comparable && (of_process - change).abs() < PAGE.cast_signed();
        let change = if is_same { change } else { of_process };
        self.unexplained = unexplained - change;
        Some(change)
    }

    /// Records a context. NVML lists the process with its first context.
    fn context_created(&mut self, before: &Before) {
        let ordinal = before.ordinal;
        self.default_pool = cuda::default_pool(ordinal);
        let stack = stacks::stack_for(LARGE);
        if self.listed(ordinal).is_some() {
            self.local_bytes = 0;
            self.measured_by(ordinal, DriverGauge::Process);
            let Some(unexplained) = self.unexplained_now(ordinal) else { return };
            let context = u64::try_from(unexplained - self.unexplained).unwrap_or(0);
            return self.rows.grow(ordinal, MemKind::Context, context, stack, None);
        }
        if self.gauge.is_some() {
            return;
        }
        let (Some(first), Some(now)) = (before.reading, self.read(ordinal)) else { return };
        let is_alone = first.bytes < UNUSED && !self.has_others;
        self.measured_by(ordinal, if is_alone { DriverGauge::Device } else { DriverGauge::AtMost });
        self.rows.grow(ordinal, MemKind::Context, now.bytes.saturating_sub(first.bytes), stack, None);
    }

    /// Records a change with its cause.
    fn record(&mut self, ordinal: u32, change: i64, is_shared: bool, work: DriverWork) {
        let grown = u64::try_from(change).unwrap_or(0);
        let shrunk = change.min(0).unsigned_abs();
        let stack = if grown > 0 { stacks::stack_for(LARGE) } else { StackId::NONE };
        let preferred = match work {
            DriverWork::Limit { .. } => MemKind::LocalMemory,
            DriverWork::Module { .. }
            | DriverWork::LookedUp { .. }
            | DriverWork::FunctionLoaded { .. }
            | DriverWork::Unloaded
            | DriverWork::Launch { .. } => MemKind::Modules,
            DriverWork::Graph { .. } | DriverWork::GraphDestroyed { .. } => MemKind::ExecutableGraphs,
            DriverWork::Streams => MemKind::Streams,
            _ => MemKind::NotKnown,
        };
        if let DriverWork::GraphDestroyed { graph } = work {
            return self.rows.destroy_graph(ordinal, graph, shrunk);
        }
        self.rows.shrink(preferred, shrunk);
        if let DriverWork::Module { handle, image } = work {
            self.images.insert(handle, image);
        }
        if is_shared && grown > 0 {
            return self.rows.grow(ordinal, MemKind::SharedCalls, grown, stack, None);
        }
        match work {
            DriverWork::Launch { function } => self.launched(ordinal, function, grown, stack),
            DriverWork::Graph { graph } => {
                let local = self
                    .captured
                    .take()
                    .map_or(0, |(bytes, name)| self.raise_local(ordinal, bytes, name.as_deref(), grown, stack));
                self.rows.add_graph(ordinal, graph, grown - local, stacks::stack_for(LARGE));
            }
            DriverWork::Limit { limit, bytes } => self.limit_set(ordinal, limit, bytes, grown, stack),
            DriverWork::Module { handle, .. } | DriverWork::LookedUp { handle } => {
                let name = if grown > 0 { self.file_of(handle) } else { None };
                self.rows.grow(ordinal, MemKind::Modules, grown, stack, name.map(Label::named).as_ref());
            }
            DriverWork::FunctionLoaded { function } if grown > 0 => {
                self.module_grown(ordinal, grown, stack, cuda::loaded_function(function, ordinal));
            }
            DriverWork::Unloaded => self.rows.grow(ordinal, MemKind::Modules, grown, stack, None),
            DriverWork::Streams => self.rows.grow(ordinal, MemKind::Streams, grown, stack, None),
            DriverWork::Context => self.rows.grow(ordinal, MemKind::Context, grown, stack, None),
            _ => self.rows.grow(ordinal, MemKind::NotKnown, grown, stack, None),
        }
    }

    /// Records the first launch of a function: it raises the local memory of the context if it needs more than all before, and the rest is
    /// its module.
    fn launched(&mut self, ordinal: u32, function: u64, grown: u64, stack: StackId) {
        let launched = cuda::loaded_function(function, ordinal);
        if cards::was_launch_skipped() {
            let needed = self.needed_local(ordinal, launched.local_bytes);
            self.skipped_local += needed;
            _ = self.raise_local(ordinal, launched.local_bytes, launched.name.as_deref(), needed, stack);
            return self.module_grown(ordinal, grown, stack, launched);
        }
        let grown = self.besides_skipped_local(ordinal, launched.local_bytes, grown);
        let local = self.raise_local(ordinal, launched.local_bytes, launched.name.as_deref(), grown, stack);
        if local == 0 && launched.local_bytes > self.local_bytes() {
            self.captured = Some((launched.local_bytes, launched.name.clone()));
        }
        if grown > local {
            self.module_grown(ordinal, grown - local, stack, launched);
        }
    }

    /// Returns the bytes that a launch has taken, without the local memory that was recorded already when another launch was skipped.
    fn besides_skipped_local(&mut self, ordinal: u32, bytes: u64, grown: u64) -> u64 {
        let threads = cuda::resident_threads(ordinal).unwrap_or(0);
        let real = threads.saturating_mul(self.local_bytes()).saturating_sub(self.skipped_local);
        let needed = threads.saturating_mul(bytes).saturating_sub(real);
        let recorded = if grown < needed / 2 { 0 } else { grown.min(needed).min(self.skipped_local) };
        self.skipped_local -= recorded;
        grown - recorded
    }

    /// Returns how much the local memory of the context must grow for a function, in bytes for all threads.
    fn needed_local(&mut self, ordinal: u32, bytes: u64) -> u64 {
        let more = bytes.saturating_sub(self.local_bytes());
        cuda::resident_threads(ordinal).unwrap_or(0).saturating_mul(more)
    }

    /// Records a module that grew when one of its functions was loaded.
    fn module_grown(&mut self, ordinal: u32, grown: u64, stack: StackId, of: LoadedFunction) {
        let file = of.module.and_then(|module| self.file_of(module));
        let name = file.or_else(|| Some(format!("compiled kernel {}", of.name?)));
        self.rows.grow(ordinal, MemKind::Modules, grown, stack, name.map(Label::named).as_ref());
    }

    /// Returns the local memory of the context for each thread. It starts with the stack limit.
    fn local_bytes(&mut self) -> u64 {
        if self.local_bytes == 0 {
            self.local_bytes = cuda::stack_limit().unwrap_or(0);
        }
        self.local_bytes
    }

    /// Records the part of `grown` that raised the local memory for a function. Returns that part.
    fn raise_local(&mut self, ordinal: u32, bytes: u64, name: Option<&str>, grown: u64, stack: StackId) -> u64 {
        let needed = self.needed_local(ordinal, bytes);
        if needed == 0 || grown < needed / 2 {
            return 0;
        }
        let raised = grown.min(needed.next_multiple_of(PAGE));
        self.local_bytes = bytes;
        let name = name.map_or_else(|| "a kernel".to_owned(), str::to_owned);
        let label =
            Label { name, shape: vec![usize::try_from(bytes).unwrap_or(0)], dtype: "B for each thread".to_owned() };
        self.rows.grow(ordinal, MemKind::LocalMemory, raised, stack, Some(&label));
        raised
    }

    /// Records the effect of a limit.
    fn limit_set(&mut self, ordinal: u32, limit: u32, bytes: u64, grown: u64, stack: StackId) {
        /// `CU_LIMIT_STACK_SIZE`
        const STACK: u32 = 0;
        /// `CU_LIMIT_PRINTF_FIFO_SIZE`
        const PRINTF: u32 = 1;
        /// `CU_LIMIT_MALLOC_HEAP_SIZE`
        const HEAP: u32 = 2;
        let (kind, name) = match limit {
            STACK => {
                self.local_bytes = bytes;
                (MemKind::LocalMemory, "stack limit")
            }
            PRINTF => (MemKind::Limits, "printf buffer"),
            HEAP => (MemKind::Limits, "device heap"),
            _ => (MemKind::Limits, "another limit"),
        };
        self.rows.grow(ordinal, kind, grown, stack, Some(&Label::named(name)));
    }

    /// Returns the name of the file that contains the image of a module or a library. Images may be in memory only.
    fn file_of(&self, handle: u64) -> Option<String> {
        let file = loader::file_of(usize::try_from(*self.images.get(&handle)?).ok()?)?;
        Some(file.file_name()?.to_string_lossy().into_owned())
    }

    /// Records the memory that the pools keep without using it.
    fn update_pools(&mut self, ordinal: u32) {
        let pools = self.pools(ordinal);
        let used = live(cuda_device(ordinal)).kinds[MemKind::Pool as usize];
        let unused: u64 = pools.iter().map(|(_, state)| state.reserved).sum::<u64>().saturating_sub(used);
        let listed: u64 = pools.iter().map(|(_, state)| state.reserved.saturating_sub(state.used)).sum();
        let largest = pools.iter().max_by_key(|(_, state)| state.reserved).map(|(pool, _)| *pool);
        for (pool, state) in &pools {
            let mut bytes = state.reserved.saturating_sub(state.used);
            if Some(*pool) == largest {
                // The driver rounds the blocks of a pool, and counts them as used until their stream has passed the free.
                bytes = (bytes + unused).saturating_sub(listed);
            }
            let name =
                if Some(*pool) == self.default_pool { "default pool".to_owned() } else { format!("pool {pool:#x}") };
            let threshold = match state.threshold {
                u64::MAX => "keeps all".to_owned(),
                bytes => format!("release threshold {bytes} B"),
            };
            self.rows
                .set_pool(ordinal, (*pool, state.reserved), bytes, || Label::named(format!("{name}, {threshold}")));
        }
        self.rows.keep_pools(|pool| pools.iter().any(|(known, _)| *known == pool));
    }

    /// Returns the memory of the process that nothing explains, after the pools were read. `None` if it is not known.
    fn unexplained(&mut self, ordinal: u32) -> Option<Unexplained> {
        self.update_pools(ordinal);
        if self.gauge != Some(DriverGauge::Process) {
            return None;
        }
        let events = live(cuda_device(ordinal)).events;
        let bytes = self.unexplained_now(ordinal)?;
        self.unexplained = bytes;
        Some(Unexplained { bytes, events })
    }

    /// Returns the bytes of the process that nothing explains. `None` if the account of a dry run or a smaller GPU changed during the reading,
    /// because the account and NVML's list do not change at the same moment.
    fn unexplained_now(&mut self, ordinal: u32) -> Option<i64> {
        let changes = || if readings::has_only_list() { cards::changes_of_blocks() } else { Some(0) };
        let before = changes()?;
        let listed = readings::listed_memory(ordinal)?;
        self.has_others = listed.others > 0;
        let explained = self.allocated(ordinal) + rounding(ordinal)? + self.rows.bytes();
        if changes() != Some(before) {
            return None;
        }
        // Without a context, the process is not in the list.
        Some(signed(listed.own.unwrap_or(0)) - signed(explained))
    }

    /// Records memory that nothing explains.
    fn explain(&mut self, ordinal: u32, Unexplained { bytes, .. }: Unexplained) {
        self.unexplained = 0;
        self.rows.grow(ordinal, MemKind::NotKnown, u64::try_from(bytes).unwrap_or(0), StackId::NONE, None);
        self.rows.shrink(MemKind::NotKnown, bytes.min(0).unsigned_abs());
    }
}

/// Memory of the process that nothing explains. Negative if more is explained than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Unexplained {
    bytes: i64,
    /// The number of allocations and frees at that moment.
    events: u64,
}

impl Unexplained {
    /// Returns whether it is as large as a page of the driver.
    fn is_worth_a_row(&self) -> bool {
        self.bytes.unsigned_abs() >= PAGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_ends_inside_a_call_ends_the_call() {
        const ORDINAL: u32 = 99;
        all().insert(ORDINAL, DeviceMemory { running: 1, starts: 1, ..DeviceMemory::default() });
        let before = Before { ordinal: ORDINAL, reading: None, rows: 0, starts: 1, is_shared: false };
        thread::spawn(move || BEFORE.with(|call| call.0.set(Some(before)))).join().expect("it does not panic");
        assert_eq!(all().remove(&ORDINAL).map(|device| device.running), Some(0));
    }
}
