//! The memory of the process on each device: what was allocated, what the driver took by itself, and the rest of pages.
//!
//! NVML shows the same sum for the process. The driver's memory is a second list of blocks, because it was not allocated: no
//! count, no peak and no list of memory that was not freed contains it.

use std::{collections::BTreeMap, fmt, time::Duration};

use gpumem_core::{
    derive::Names,
    ledger::DeviceStats,
    model::{Bytes, Device, DriverGauge, Key, MappedPages, MemKind, one_line},
    report::{ROUNDING, cause_in_words},
};
use serde::{Serialize, Serializer};

use super::{
    block_lives::Change,
    driver_blocks::{Changed, DriverChange, index},
    names::Origin,
    recorded::History,
    time::{Moment, nanos},
};

/// The memory of the process on one device.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceMemory {
    /// The blocks of the driver that the program or its libraries allocated.
    pub(crate) allocated: u64,
    pages: MappedPages,
    /// The live bytes of stream-ordered pools.
    pool: u64,
    /// What the driver took of each kind, in the order of [`MemKind::ALL`], as it was read last.
    taken: [u64; MemKind::ALL.len()],
    /// The number of pools that keep memory.
    caches: u32,
    /// The memory that pools had reserved when they were read last.
    reserved: u64,
}

impl DeviceMemory {
    /// Returns the bytes of pages that no block asked for.
    pub(crate) fn rounding(&self) -> u64 {
        self.pages.rounding().get()
    }

    /// Returns what the driver has taken of this kind.
    pub(crate) fn taken(&self, kind: MemKind) -> u64 {
        if kind != MemKind::PoolCache {
            return self.taken[kind as usize];
        }
        // Allocations since the reading come from the unused memory, and frees return theirs to it.
        if self.caches == 0 { 0 } else { self.reserved.saturating_sub(self.pool) }
    }

    /// Returns what the driver has taken of all kinds.
    pub(crate) fn taken_by_driver(&self) -> u64 {
        MemKind::ALL.iter().map(|kind| self.taken(*kind)).sum()
    }

    /// Returns the memory of the process.
    pub(crate) fn bytes(&self) -> u64 {
        self.allocated + self.rounding() + self.taken_by_driver()
    }

    /// Changes the size of a block of the driver.
    fn change(&mut self, key: u64, kind: MemKind, before: u64, after: u64) {
        let is_counted = kind.is_on_device() && kind != MemKind::Part;
        if !is_counted {
            return;
        }
        let key = Key::from_raw(key);
        self.pages.remove(key, Bytes::new(before), kind);
        self.pages.add(key, Bytes::new(after), kind);
        self.allocated = (self.allocated + after).saturating_sub(before);
        if kind == MemKind::Pool {
            self.pool = (self.pool + after).saturating_sub(before);
        }
    }

    /// Changes what the driver has taken. `None` is a block that does not exist.
    fn take(&mut self, kind: MemKind, before: Option<u64>, after: Option<u64>) {
        let sum = &mut self.taken[kind as usize];
        *sum = sum.saturating_add(after.unwrap_or(0)).saturating_sub(before.unwrap_or(0));
        if kind == MemKind::PoolCache {
            self.reserved = *sum + self.pool;
            self.caches = (self.caches + u32::from(after.is_some())).saturating_sub(u32::from(before.is_some()));
        }
    }
}

/// A moment on a device: how many changes of each list come before it.
#[derive(Clone, Copy, Debug, Default)]
struct Position {
    lives: u32,
    driver: u32,
}

/// The name of the sum of all parts.
const SUM: &str = "the process";

/// One part of the memory of the process on one device over time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ProcessSeries {
    /// The index of the device in the history.
    pub(crate) device: u16,
    pub(crate) name: &'static str,
    /// The nanoseconds since the recording started, and the bytes from then on.
    pub(crate) values: Vec<(u64, u64)>,
}

impl ProcessSeries {
    /// Returns whether this is the sum of all parts.
    pub(crate) fn is_sum(&self) -> bool {
        self.name == SUM
    }
}

/// A moment after a change of the memory of the process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessStep {
    /// The index of the device in the history.
    pub(crate) device: u16,
    /// Nanoseconds since the recording started.
    pub(crate) time: u64,
    position: Position,
}

/// The memory of the process on a device at one moment, or its increase since another one. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ProcessMemory {
    /// How the driver's memory was measured: `process`, `device`, or `at most` if the values are upper bounds.
    pub(crate) measured_by: &'static str,
    /// The time of the moment. `None` for the difference of two moments.
    #[serde(rename = "seconds", serialize_with = "as_seconds")]
    pub(crate) time: Option<Duration>,
    /// The sum of the three values below.
    pub(crate) bytes: i64,
    pub(crate) allocated_bytes: i64,
    /// The bytes of pages that no block asked for.
    pub(crate) rounding_bytes: i64,
    pub(crate) driver_bytes: i64,
    /// What the driver took by itself, the largest first.
    pub(crate) taken_by_driver: Vec<DriverSum>,
}

/// Memory that the driver took by itself, of one kind, for one cause. The field names are those in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct DriverSum {
    #[serde(serialize_with = "name_of_kind")]
    pub(crate) kind: MemKind,
    /// The name of the kernel, the library or the pool.
    pub(crate) label: Option<String>,
    /// The bytes of local memory that the kernel needs for each thread.
    pub(crate) bytes_per_thread: Option<u64>,
    /// The line or the library whose call was the cause. For `not known`, the line or the library of the latest allocation before the growth.
    pub(crate) place: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) scope: Vec<String>,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
    /// When it grew for the last time.
    pub(crate) grew_seconds: f64,
}

impl ProcessMemory {
    /// Returns whether the values are upper bounds.
    pub(crate) fn is_at_most(&self) -> bool {
        self.measured_by == DriverGauge::AtMost.name()
    }

    /// Returns what no call asked for: the driver's memory, and the rest of pages.
    pub(crate) fn besides_allocations(&self) -> i64 {
        self.driver_bytes + self.rounding_bytes
    }

    /// Returns this memory without that of an earlier moment.
    fn since(self, earlier: &Self) -> Self {
        let mut sums = self.taken_by_driver;
        for before in &earlier.taken_by_driver {
            match sums.iter_mut().find(|sum| sum.cause() == before.cause()) {
                Some(sum) => (sum.bytes, sum.blocks) = (sum.bytes - before.bytes, sum.blocks - before.blocks),
                None => sums.push(DriverSum { bytes: -before.bytes, blocks: -before.blocks, ..before.clone() }),
            }
        }
        sums.retain(|sum| (sum.bytes, sum.blocks) != (0, 0));
        Self {
            measured_by: self.measured_by,
            time: None,
            bytes: self.bytes - earlier.bytes,
            allocated_bytes: self.allocated_bytes - earlier.allocated_bytes,
            rounding_bytes: self.rounding_bytes - earlier.rounding_bytes,
            driver_bytes: self.driver_bytes - earlier.driver_bytes,
            taken_by_driver: largest_first(sums),
        }
    }
}

/// Returns the bytes of each kind that the driver has taken on a device by now, as it was measured last.
pub(crate) fn taken_now(stats: &DeviceStats) -> impl Iterator<Item = (&'static str, u64)> {
    let kinds = MemKind::ALL.iter().zip(&stats.kinds).filter(|(kind, _)| kind.is_taken_by_driver());
    kinds.map(|(kind, stat)| (kind.name(), stat.bytes.current)).filter(|(_, bytes)| *bytes > 0)
}

/// The kind, the label, the place, the caller and the scope of a sum.
type Cause = (MemKind, Option<String>, Option<String>, Option<String>, Vec<String>);

#[expect(clippy::ref_option, reason = "serde passes a reference")]
fn as_seconds<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(to)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn name_of_kind<S: Serializer>(kind: &MemKind, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(kind.name())
}

impl DriverSum {
    /// Returns what tells this sum from others.
    fn cause(&self) -> Cause {
        (self.kind, self.label.clone(), self.place.clone(), self.caller.clone(), self.scope.clone())
    }

    /// Returns the cause and its line, such as `local memory of deep (x.cu:43)`. A module is known by its file.
    pub(crate) fn cause_in_words(&self) -> String {
        self.words_with(self.place.as_deref().filter(|_| self.kind != MemKind::Modules))
    }

    fn words_with(&self, place: Option<&str>) -> String {
        let [label, place] = [self.label.as_deref(), place].map(|text| text.map(one_line));
        cause_in_words(self.kind, label.as_deref(), place.as_deref())
    }

    /// Returns a name that is the same in each run of a program. Addresses of pools and lines are not.
    pub(crate) fn stable_name(&self) -> String {
        let label = self.label.as_deref().filter(|_| self.kind != MemKind::PoolCache);
        cause_in_words(self.kind, label, None)
    }
}

impl fmt::Display for DriverSum {
    /// Writes the cause, such as `local memory of deep (x.cu:43), 16 KiB per thread`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == MemKind::NotKnown {
            write!(f, "{}, grew at {:.2} s", self.kind, self.grew_seconds)?;
            self.scope.last().map_or(Ok(()), |scope| write!(f, " in {}", one_line(scope)))?;
            return self
                .place
                .as_deref()
                .map_or(Ok(()), |place| write!(f, ", after an allocation at {}", one_line(place)));
        }
        f.write_str(&self.words_with(self.place.as_deref()))?;
        self.bytes_per_thread.map_or(Ok(()), |bytes| write!(f, ", {} per thread", Bytes::new(bytes)))
    }
}

fn largest_first(mut sums: Vec<DriverSum>) -> Vec<DriverSum> {
    sums.sort_by_cached_key(|sum| (std::cmp::Reverse(sum.bytes.unsigned_abs()), sum.cause()));
    sums
}

impl History {
    /// Returns how the memory that the driver takes on a device was measured; `None` if it was not.
    pub(crate) fn driver_measured_by(&self, device: Device) -> Option<DriverGauge> {
        let stats = self.ledger().stats();
        stats.iter().find(|stats| stats.device == device)?.driver_measured_by
    }

    /// Returns the memory of the process on each device at its highest value, in the order of [`History::devices`]. `None` if
    /// the driver's memory was not measured. A recording of the peaks only has the moment when most was allocated.
    pub(crate) fn process_peaks(&self) -> Vec<Option<ProcessMemory>> {
        if self.has_only_peaks() {
            return self.process_at(Moment::Peak);
        }
        let mut highest: Vec<Option<((u64, u64), ProcessStep)>> = vec![None; self.devices.len()];
        self.walk_process(|step, memory| {
            // Memory that a pool keeps is part of an equal sum before and after its blocks are freed; no program needs it afterwards.
            let (highest, bytes) = (&mut highest[usize::from(step.device)], (memory.bytes(), memory.taken_by_driver()));
            if highest.is_none_or(|(known, _)| known < bytes) {
                *highest = Some((bytes, step));
            }
        });
        let position = |highest: &Option<((u64, u64), ProcessStep)>| {
            highest.map_or((Position::default(), 0), |(_, step)| (step.position, step.time))
        };
        self.process_after(&highest.iter().map(position).collect::<Vec<_>>())
    }

    /// Returns the memory of the process on each device at a moment; `None` if the driver's memory was not measured.
    pub(crate) fn process_at(&self, moment: Moment) -> Vec<Option<ProcessMemory>> {
        self.process_after(&self.positions_at(moment))
    }

    /// Returns how much the memory of the process grew on each device between two moments; `None` if the driver's memory was
    /// not measured.
    pub(crate) fn process_between(&self, from: Moment, to: Moment) -> Vec<Option<ProcessMemory>> {
        let [before, after] = [from, to].map(|moment| self.process_at(moment));
        before.into_iter().zip(after).map(|(before, after)| Some(after?.since(&before?))).collect()
    }

    /// Calls `each` after each change of the memory of the process, in order. Devices on which the driver's memory was not
    /// measured are left out.
    pub(crate) fn walk_process(&self, each: impl FnMut(ProcessStep, &DeviceMemory)) {
        let all = Position { lives: u32::MAX, driver: u32::MAX };
        self.walk_until(&vec![all; self.devices.len()], each);
    }

    /// Returns the memory of the process over time on each device where the driver's memory was measured: its sum, each kind
    /// that the driver took, and the rest of pages. Values are left out if the recording does not contain all of their blocks.
    pub(crate) fn process_series(&self) -> Vec<ProcessSeries> {
        let mut all: BTreeMap<(u16, usize), ProcessSeries> = BTreeMap::new();
        let Some(first) = self.complete_from() else { return Vec::new() };
        let kinds: Vec<_> = MemKind::ALL.into_iter().filter(|kind| kind.is_taken_by_driver()).collect();
        self.walk_process(|step, memory| {
            if (step.position.lives as usize) < first {
                return;
            }
            let taken = kinds.iter().map(|kind| (kind.name(), memory.taken(*kind)));
            let rest = [(SUM, memory.bytes()), (ROUNDING, memory.rounding())];
            for (at, (name, bytes)) in rest.into_iter().chain(taken).enumerate() {
                let series = all.entry((step.device, at)).or_insert_with(|| ProcessSeries {
                    device: step.device,
                    name,
                    values: Vec::new(),
                });
                if series.values.last().map_or(0, |(_, known)| *known) != bytes {
                    series.values.push((step.time, bytes));
                }
            }
        });
        all.into_values().filter(|series| !series.values.is_empty()).collect()
    }

    /// Returns how the driver's memory was measured on each device.
    fn gauges(&self) -> Vec<Option<DriverGauge>> {
        self.devices.iter().map(|device| self.driver_measured_by(device.device)).collect()
    }

    /// Returns the moment on each device, and its time.
    fn positions_at(&self, moment: Moment) -> Vec<(Position, u64)> {
        let changes = &self.driver.changes;
        let before = |is_before: &dyn Fn(&DriverChange) -> bool| index(changes.partition_point(is_before));
        let position = |change: Option<u32>| {
            let lives = change.map_or(0, |change| change + 1);
            let (driver, time) = match moment {
                Moment::Start => (0, 0),
                // The driver may take more until the next change, which is no part of the peak.
                Moment::Peak => (
                    change.map_or(0, |change| before(&|at| at.after <= change)),
                    change.map_or(0, |at| self.time_of(at)),
                ),
                Moment::End => (u32::MAX, self.end_nanos()),
                Moment::Oom => self
                    .oom()
                    .map_or((0, 0), |rejected| (before(&|change| change.when.number < rejected.number), rejected.time)),
                Moment::Time(time) => (before(&|change| change.when.time <= nanos(time)), nanos(time)),
            };
            (Position { lives, driver }, time)
        };
        self.changes_at(moment).into_iter().map(position).collect()
    }

    fn process_after(&self, positions: &[(Position, u64)]) -> Vec<Option<ProcessMemory>> {
        let until: Vec<_> = positions.iter().map(|(position, _)| *position).collect();
        let memory = self.walk_until(&until, |_, _| ());
        let sums = self.driver_sums(&until, &memory);
        let parts = self.gauges().into_iter().zip(memory).zip(sums).zip(positions);
        parts
            .map(|(((gauge, memory), sums), (_, time))| {
                let signed = u64::cast_signed;
                Some(ProcessMemory {
                    measured_by: gauge?.name(),
                    time: Some(Duration::from_nanos(*time)),
                    bytes: signed(memory.bytes()),
                    allocated_bytes: signed(memory.allocated),
                    rounding_bytes: signed(memory.rounding()),
                    driver_bytes: signed(memory.taken_by_driver()),
                    taken_by_driver: sums,
                })
            })
            .collect()
    }

    /// Applies the changes of each device up to its position. Returns the memory of each device then.
    fn walk_until(&self, until: &[Position], mut each: impl FnMut(ProcessStep, &DeviceMemory)) -> Vec<DeviceMemory> {
        let mut devices: Vec<_> = self.devices.iter().map(|_| DeviceMemory::default()).collect();
        let is_measured: Vec<_> = self.gauges().iter().map(Option::is_some).collect();
        if !is_measured.contains(&true) {
            return devices;
        }
        let mut sizes: Vec<Option<u64>> = vec![None; self.driver.blocks.len()];
        let last = index(self.lives.change_count());
        let mut lives = (0_u32..).zip(self.lives.changes());
        let ends = self.driver.changes.iter().map(|change| change.after).chain([last]);
        let mut done = 0;
        for (driver, end) in (0_u32..).zip(ends) {
            for (at, change) in lives.by_ref().take((end - done) as usize) {
                let device = self.lives.block(change.block).device;
                if at < until[usize::from(device)].lives && is_measured[usize::from(device)] {
                    let memory = &mut devices[usize::from(device)];
                    self.apply(memory, at, &change);
                    let position = Position { lives: at + 1, driver };
                    each(ProcessStep { device, time: change.time, position }, memory);
                }
            }
            done = end;
            let Some(change) = self.driver.changes.get(driver as usize) else { continue };
            let device = match change.what {
                Changed::Taken { block, .. } => self.driver.blocks[block as usize].device,
                Changed::OfPool { device, .. } => device,
            };
            if driver >= until[usize::from(device)].driver || !is_measured[usize::from(device)] {
                continue;
            }
            let memory = &mut devices[usize::from(device)];
            match change.what {
                Changed::Taken { block, bytes } => {
                    let before = std::mem::replace(&mut sizes[block as usize], bytes);
                    memory.take(self.driver.blocks[block as usize].kind, before, bytes);
                }
                Changed::OfPool { key, kind, before, after, .. } => memory.change(key, kind, before, after),
            }
            let position = Position { lives: end, driver: driver + 1 };
            each(ProcessStep { device, time: change.when.time, position }, memory);
        }
        devices
    }

    /// Applies a change of the list of allocations.
    fn apply(&self, memory: &mut DeviceMemory, at: u32, change: &Change) {
        let block = self.lives.block(change.block);
        let kind = self.origins[block.origin as usize].kind;
        let (before, after) = match change.kind.blocks() {
            1.. => (0, change.delta.unsigned_abs()),
            0 => {
                let after = self.lives.bytes_after(change.block, at);
                ((after.cast_signed() - change.delta).unsigned_abs(), after)
            }
            _ => (change.delta.unsigned_abs(), 0),
        };
        memory.change(block.key, kind, before, after);
    }

    /// Returns what the driver had taken on each device at its position, by cause.
    fn driver_sums(&self, until: &[Position], memory: &[DeviceMemory]) -> Vec<Vec<DriverSum>> {
        // The size of each live block, and the change by which it grew last.
        let mut sizes: BTreeMap<u32, (u64, &DriverChange)> = BTreeMap::new();
        for (at, change) in (0_u32..).zip(&self.driver.changes) {
            let Changed::Taken { block, bytes } = change.what else { continue };
            if at >= until[usize::from(self.driver.blocks[block as usize].device)].driver {
                continue;
            }
            let Some(bytes) = bytes else {
                sizes.remove(&block);
                continue;
            };
            let (known, grew) = sizes.entry(block).or_insert((0, change));
            if bytes > *known {
                *grew = change;
            }
            *known = bytes;
        }
        let mut sums: Vec<BTreeMap<Cause, DriverSum>> = vec![BTreeMap::new(); self.devices.len()];
        for (number, (bytes, grew)) in sizes {
            let block = self.driver.blocks[number as usize];
            let origin = &self.origins[block.origin as usize];
            let sum = self.driver_sum(number, origin, bytes, grew);
            let known = sums[usize::from(block.device)].entry(sum.cause()).or_insert(DriverSum {
                bytes: 0,
                blocks: 0,
                ..sum.clone()
            });
            (known.bytes, known.blocks) = (known.bytes + sum.bytes, known.blocks + 1);
            known.grew_seconds = known.grew_seconds.max(sum.grew_seconds);
        }
        let sums = sums.into_iter().map(|sums| sums.into_values().collect());
        sums.zip(memory).map(|(sums, memory)| largest_first(with_unused_now(sums, memory))).collect()
    }

    fn driver_sum(&self, number: u32, origin: &Origin, bytes: u64, grew: &DriverChange) -> DriverSum {
        let (name, bytes_per_thread) = self.driver.label_of(number);
        let mut sum = DriverSum {
            kind: origin.kind,
            label: name.map(str::to_owned),
            bytes_per_thread,
            place: origin.line.clone().or_else(|| origin.library.clone()),
            caller: origin.caller.clone(),
            scope: origin.path.clone(),
            bytes: bytes.cast_signed(),
            blocks: 1,
            grew_seconds: Duration::from_nanos(grew.when.time).as_secs_f64(),
        };
        if sum.kind == MemKind::NotKnown && sum.place.is_none() {
            // A reading found this growth, and not a call. What ran then may lead to the cause.
            sum.scope = self.scope_at(grew.when.time).into_iter().collect();
            sum.place = self.allocated_before(grew.after).and_then(|near| near.line.clone().or(near.library.clone()));
        }
        sum
    }

    /// Returns the name of the scope that was opened last and is open at this time, in nanoseconds.
    fn scope_at(&self, time: u64) -> Option<String> {
        /// A recording may have millions of scopes.
        const MOST: usize = 1000;
        let opened = self.scopes.partition_point(|scope| scope.opened <= time);
        let mut latest = self.scopes[..opened].iter().rev().take(MOST);
        let scope = latest.find(|scope| scope.closed.is_none_or(|closed| time <= closed))?;
        Some(self.definitions().callsite(scope.callsite).to_string())
    }

    /// Returns the origin of the last block that was allocated in the first `count` changes.
    fn allocated_before(&self, count: u32) -> Option<&Origin> {
        let block = self.lives.last_born_until(count.checked_sub(1)?)?;
        Some(self.origin(&block))
    }
}

/// Replaces what pools did not use at their readings by what they do not use now. If there are several pools, their common
/// memory is one sum, because it is not known which of them an allocation came from.
fn with_unused_now(mut sums: Vec<DriverSum>, memory: &DeviceMemory) -> Vec<DriverSum> {
    let is_cache = |sum: &DriverSum| sum.kind == MemKind::PoolCache;
    let unused = memory.taken(MemKind::PoolCache).cast_signed();
    let pools: Vec<_> = sums.extract_if(.., |sum| is_cache(sum)).collect();
    let Some(last) = pools.iter().max_by(|a, b| a.grew_seconds.total_cmp(&b.grew_seconds)) else { return sums };
    let blocks = pools.iter().map(|pool| pool.blocks).sum();
    let label = match pools.len() {
        1 => last.label.clone(),
        several => Some(format!("{several} pools")),
    };
    sums.push(DriverSum { label, blocks, bytes: unused, ..last.clone() });
    sums
}
