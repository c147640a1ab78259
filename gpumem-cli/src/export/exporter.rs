//! Follows the recordings of all processes, and makes samples for collectors: those who scrape, and the push.

use std::{
    cmp::Reverse,
    collections::HashMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use gpumem_core::{
    derive::{Names, Paths},
    export::{shortened, shortened_command},
    ledger::GroupUsage,
    model::{Device, MemKind},
    recording::Follower,
};
use gpumem_driver::source::machine::accounted_peaks;

use super::{
    cgroup::container,
    metrics::{OTHER, largest},
    sample::{DeviceSample, GpuId, GpuSample, Hidden, LiveSample, ProcessId, RecordingSample, Sample, UsageSample},
    windows::Windows,
};
use crate::{
    history::Origin,
    machine::{self, Known, Machine, Process, Recorded, Recording, Usage},
    watch::Live,
};

/// At most so many recordings are followed.
const MOST_RECORDINGS: usize = 512;
/// At most so many recordings of one process are followed.
const MOST_OF_PROCESS: usize = 4;
/// At most so many devices of a recording are exported, those with the highest peaks.
const MOST_DEVICES: usize = 16;
/// At most so many collectors are told apart. The one that has not collected for the longest time is forgotten.
const MOST_COLLECTORS: usize = 16;
/// One round reads at most so many bytes of all recordings, and at least the second number of each.
const MOST_BYTES: u64 = 64 << 20;
const LEAST_BYTES: u64 = 1 << 20;
/// So many groups of blocks get names, the largest ones. The rest is added up.
const MOST_GROUPS: usize = 1_000;
/// A group with longer names gets none.
const LONGEST_NAMES: u64 = 1 << 12;
/// The most columns of a value of a label.
const WIDEST: usize = 128;
/// The most columns of a command.
const WIDEST_COMMAND: usize = 60;
/// After the end of a process, its recording may get what was still in memory.
const READ_AFTER_END: Duration = Duration::from_secs(10);
/// What an ended process had is kept so long for a collector that has not got it.
const KEPT_AFTER_END: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Exporter {
    /// How many places, scopes and libraries of a process are named.
    places: usize,
    known: Known,
    /// The processes, and when each began.
    processes: HashMap<u32, (u64, ProcessId)>,
    followed: Vec<Followed>,
    /// How many recordings were too many in the newest round.
    not_followed: usize,
    /// The names of collectors with their numbers. The last one has collected last.
    collectors: Vec<(String, u32)>,
    next_collector: u32,
}

/// A recording that is followed.
#[derive(Debug)]
struct Followed {
    live: Live,
    pid: u32,
    process: ProcessId,
    windows: Vec<(Device, Windows)>,
    /// When its process was found to have ended.
    ended: Option<Instant>,
    /// Since then: the collectors that were handed it, and those with which it has arrived.
    handed: Vec<u32>,
    arrived: Vec<u32>,
    /// Whether lines at addresses are looked up: only in files that a process of the same user names.
    looks_up: bool,
}

/// The number of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Collector(u32);

impl Exporter {
    pub(super) fn new(places: usize) -> Self {
        Self {
            places,
            known: Known::default(),
            processes: HashMap::new(),
            followed: Vec::new(),
            not_followed: 0,
            collectors: Vec::new(),
            next_collector: 0,
        }
    }

    /// Reads what recordings have got since.
    pub(super) fn follow(&mut self) {
        self.follow_all(&machine::recorded());
    }

    fn follow_all(&mut self, recorded: &[Recorded]) {
        let wanted = recorded.iter().flat_map(|of| of.files.iter().take(MOST_OF_PROCESS).map(|file| (of.pid, file)));
        let wanted: Vec<(u32, &PathBuf)> = wanted.collect();
        let is_wanted = |of: &Followed| wanted.iter().any(|(pid, file)| *pid == of.pid && **file == *of.live.path());
        // Another process has taken the file over.
        let is_taken = |of: &Followed| wanted.iter().any(|(pid, file)| *pid != of.pid && **file == *of.live.path());
        self.followed.retain(|of| !is_taken(of));
        let now = Instant::now();
        for of in &mut self.followed {
            of.ended = if is_wanted(of) { None } else { of.ended.or(Some(now)) };
        }
        self.not_followed = 0;
        for (pid, file) in &wanted {
            if self.followed.iter().any(|of| *of.live.path() == **file) {
                continue;
            }
            if self.followed.len() == MOST_RECORDINGS {
                self.not_followed += 1;
                continue;
            }
            let process = self.process(*pid);
            self.followed.push(Followed::new((*file).clone(), *pid, process));
        }
        let collectors: Vec<u32> = self.collectors.iter().map(|(_, number)| *number).collect();
        let is_over = |of: &Followed| {
            let has_arrived = !collectors.is_empty() && collectors.iter().all(|number| of.arrived.contains(number));
            of.ended.is_some_and(|ended| has_arrived || now - ended > KEPT_AFTER_END)
        };
        self.followed.retain(|of| !is_over(of));
        let most = (MOST_BYTES / self.followed.len().max(1) as u64).max(LEAST_BYTES);
        for of in &mut self.followed {
            if of.ended.is_none_or(|ended| now - ended <= READ_AFTER_END) {
                of.read(most);
            }
        }
        self.processes.retain(|pid, (began, _)| machine::began(*pid) == Some(*began));
    }

    /// What is known of a process.
    fn process(&mut self, pid: u32) -> ProcessId {
        let Some(began) = machine::began(pid) else { return ProcessId { pid: Some(pid), ..ProcessId::default() } };
        if let Some((known, process)) = self.processes.get(&pid)
            && *known == began
        {
            return process.clone();
        }
        let container = container(&machine::cgroups(pid).unwrap_or_default());
        let process = ProcessId {
            pid: Some(pid),
            command: machine::command(pid).map(|line| shortened_command(&line, WIDEST_COMMAND)),
            owner: machine::user(pid),
            container: container.id,
            pod: container.pod,
        };
        self.processes.insert(pid, (began, process.clone()));
        process
    }

    /// A reading for the collector with this name, and its number.
    pub(super) fn collect(&mut self, name: &str) -> (Sample, Collector) {
        let collector = self.collector(name);
        let mut hidden = Hidden::default();
        let machine = Machine::read().unwrap_or_else(|_| {
            hidden.readings = 1;
            Machine::default()
        });
        let usage = Usage::read(&machine, &mut self.known);
        self.follow_all(&usage.recorded);
        let not_read = machine.not_read.iter().chain(&usage.not_read);
        hidden.readings += not_read.filter(|not_read| not_read.is_error).count();
        hidden.recordings = self.not_followed;
        let gpus = gpus_of(&machine);
        let usages = usage.processes.iter().map(|process| {
            let is_unknown = process.recording == Recording::Unknown;
            match process.is_visible {
                Some(false) => hidden.processes += 1,
                _ => hidden.unknown += usize::from(is_unknown),
            }
            self.usage(process, &gpus)
        });
        let mut usages: Vec<_> = usages.collect();
        add_accounts(&machine, &mut usages);
        let places = self.places;
        let mut recordings = Vec::new();
        for of in &mut self.followed {
            if of.ended.is_some() && of.arrived.contains(&collector.0) {
                continue;
            }
            if of.live.is_read() {
                recordings.push(of.sample(collector, &gpus, places));
            } else {
                hidden.recordings += 1;
            }
        }
        (Sample { gpus, usages, recordings, hidden }, collector)
    }

    fn usage(&mut self, process: &Process, gpus: &[GpuSample]) -> UsageSample {
        let id = process.gpu.to_string();
        let gpu = gpus.iter().find(|gpu| gpu.gpu.id.as_ref() == Some(&id)).map(|gpu| gpu.gpu.clone());
        let of_driver = || ProcessId {
            pid: Some(process.pid),
            command: process.command.as_deref().map(|line| shortened_command(line, WIDEST_COMMAND)),
            ..ProcessId::default()
        };
        UsageSample {
            process: if process.is_visible == Some(false) { of_driver() } else { self.process(process.pid) },
            gpu: gpu.unwrap_or_default(),
            used: process.used_bytes,
            accounted_peak: None,
        }
    }

    fn collector(&mut self, name: &str) -> Collector {
        let known = self.collectors.iter().position(|(known, _)| known == name);
        let (name, number) = match known {
            Some(at) => self.collectors.remove(at),
            None => {
                self.next_collector += 1;
                (name.to_owned(), self.next_collector)
            }
        };
        self.collectors.push((name, number));
        if self.collectors.len() > MOST_COLLECTORS {
            self.forget(Collector(self.collectors[0].1));
        }
        Collector(number)
    }

    /// This collector does not collect any more.
    pub(super) fn forget(&mut self, Collector(collector): Collector) {
        self.collectors.retain(|(_, number)| *number != collector);
        let windows = self.followed.iter_mut().flat_map(|of| &mut of.windows);
        windows.for_each(|(_, windows)| windows.forget(collector));
    }

    /// What this collector has got last has arrived.
    pub(super) fn confirm(&mut self, Collector(collector): Collector) {
        for of in &mut self.followed {
            of.windows.iter_mut().for_each(|(_, windows)| windows.confirm(collector));
            if of.handed.contains(&collector) && !of.arrived.contains(&collector) {
                of.arrived.push(collector);
            }
        }
    }
}

impl Followed {
    fn new(file: PathBuf, pid: u32, process: ProcessId) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self {
            live: Live::new(file),
            pid,
            process,
            windows: Vec::new(),
            ended: None,
            handed: Vec::new(),
            arrived: Vec::new(),
            looks_up: machine::uid(pid) == Some(own),
        }
    }

    fn read(&mut self, most: u64) {
        self.live.read(most);
        let devices = self.live.follower().ledger().stats();
        for device in devices.iter().map(|stats| stats.device) {
            let recent = self.live.take_recent_peak(device);
            self.windows_of(device).note(recent);
        }
    }

    fn windows_of(&mut self, device: Device) -> &mut Windows {
        let at = self.windows.iter().position(|(known, _)| *known == device).unwrap_or_else(|| {
            self.windows.push((device, Windows::default()));
            self.windows.len() - 1
        });
        &mut self.windows[at].1
    }

    fn sample(&mut self, Collector(collector): Collector, gpus: &[GpuSample], places: usize) -> RecordingSample {
        let is_running = self.ended.is_none();
        if !is_running {
            self.handed.push(collector);
        } else if self.looks_up {
            self.live.look_up_lines();
        }
        let mut devices = self.live.follower().ledger().stats();
        let totals = self.live.follower().totals();
        let peak_of = |device| totals.peaks.iter().find(|peak| peak.device == device).map(|peak| peak.bytes);
        devices.sort_by_key(|stats| Reverse(peak_of(stats.device)));
        devices.truncate(MOST_DEVICES);
        let mut lives = if is_running { lives(self.live.follower(), places) } else { HashMap::new() };
        let has_only_peaks = self.live.follower().beginning().is_peaks;
        let devices = devices.into_iter().map(|stats| {
            let device = stats.device;
            let interval_peak = self.windows_of(device).collect(collector, stats.on_device.bytes.current);
            let uuid = self.live.follower().definitions().device(device).and_then(|known| known.uuid.clone());
            DeviceSample {
                gpu: gpu_of(uuid, device, gpus),
                peak: peak_of(device),
                interval_peak: Some(interval_peak).filter(|_| !has_only_peaks),
                live: is_running.then(|| lives.remove(&device).unwrap_or_default()),
            }
        });
        let devices = devices.collect();
        RecordingSample {
            process: self.process.clone(),
            refused: totals.refused,
            retried: totals.obtained,
            lost: totals.lost + self.live.unread(),
            devices,
        }
    }
}

/// What is live on each device. Names cost time, so only the largest groups have some.
fn lives(follower: &Follower, places: usize) -> HashMap<Device, LiveSample> {
    #[derive(Default)]
    struct Sums {
        kinds: [u64; MemKind::ALL.len()],
        libraries: HashMap<String, u64>,
        scopes: HashMap<String, u64>,
        places: HashMap<(String, String), u64>,
    }
    let (ledger, definitions) = (follower.ledger(), follower.definitions());
    let mut groups = ledger.groups();
    groups.sort_by_key(|of| Reverse(of.bytes));
    let paths = Paths::now(ledger, definitions);
    let mut sums: HashMap<Device, Sums> = HashMap::new();
    for (at, GroupUsage { device, group, bytes, .. }) in groups.into_iter().enumerate() {
        let (sums, bytes) = (sums.entry(device).or_default(), bytes.get());
        sums.kinds[group.kind as usize] += bytes;
        let length = || paths.length_of(group.node) as u64 + definitions.length_of(group.stack);
        let [library, scope, place] = if at < MOST_GROUPS && length() <= LONGEST_NAMES {
            let origin = Origin::of(&group, &paths, definitions);
            [origin.library_or_program(), origin.scope(), origin.place()].map(|name| shortened(&name, WIDEST))
        } else {
            [OTHER, OTHER, OTHER].map(str::to_owned)
        };
        *sums.libraries.entry(library).or_default() += bytes;
        *sums.scopes.entry(scope.clone()).or_default() += bytes;
        *sums.places.entry((place, scope)).or_default() += bytes;
    }
    let mut pools: HashMap<Device, HashMap<String, [u64; 2]>> = HashMap::new();
    for pool in ledger.pools() {
        let name = shortened(&definitions.pool(pool.pool), WIDEST);
        let sum = pools.entry(pool.device).or_default().entry(name).or_default();
        *sum = [sum[0] + pool.part_bytes.get(), sum[1] + pool.reserved.get()];
    }
    let mut lives: HashMap<Device, LiveSample> = HashMap::new();
    for (device, sums) in sums {
        let kinds = MemKind::ALL.iter().zip(sums.kinds).filter(|(_, bytes)| *bytes > 0);
        let other = || OTHER.to_owned();
        lives.insert(
            device,
            LiveSample {
                kinds: kinds.map(|(kind, bytes)| (kind.name(), bytes)).collect(),
                libraries: largest(sums.libraries, places, other),
                scopes: largest(sums.scopes, places, other),
                places: largest(sums.places, places, || (other(), other())),
                pools: Vec::new(),
            },
        );
    }
    for (device, pools) in pools {
        let mut pools: Vec<_> = pools.into_iter().collect();
        pools.sort_by(|(a, [_, x]), (b, [_, y])| y.cmp(x).then_with(|| a.cmp(b)));
        pools.truncate(places);
        lives.entry(device).or_default().pools = pools;
    }
    lives
}

/// The GPUs and their slices.
fn gpus_of(machine: &Machine) -> Vec<GpuSample> {
    let mut all = Vec::new();
    for gpu in &machine.gpus {
        let id = gpu.index.map(|index| index.to_string());
        all.push(GpuSample {
            gpu: GpuId { id: id.clone(), uuid: gpu.uuid.clone(), ordinal: None },
            parent: None,
            model: gpu.name.clone(),
            memory: gpu.memory,
        });
        let slices = (0..).zip(&gpu.mig_devices).map(|(at, slice): (u32, _)| GpuSample {
            gpu: GpuId {
                id: id.as_ref().map(|id| format!("{id}:{at}")),
                uuid: Some(slice.uuid.clone()),
                ordinal: None,
            },
            parent: id.clone(),
            model: slice.name.clone(),
            memory: slice.memory,
        });
        all.extend(slices);
    }
    all
}

/// The GPU with this UUID. A recording may have it without the part before the first dash.
fn gpu_of(uuid: Option<String>, device: Device, gpus: &[GpuSample]) -> GpuId {
    let is_it = |known: &str| {
        let uuid = uuid.as_deref().unwrap_or_default();
        known == uuid || known.split_once('-').is_some_and(|(_, known)| known == uuid)
    };
    let known = gpus.iter().find(|gpu| gpu.gpu.uuid.as_deref().is_some_and(is_it)).map(|gpu| gpu.gpu.clone());
    let ordinal = Some(device.ordinal).filter(|_| uuid.is_none());
    known.unwrap_or_else(|| GpuId { id: None, uuid: uuid.map(|uuid| shortened(&uuid, WIDEST)), ordinal })
}

/// Adds what the driver's accounts say, where it keeps some.
fn add_accounts(machine: &Machine, usages: &mut [UsageSample]) {
    for index in machine.gpus.iter().filter_map(|gpu| gpu.index) {
        let id = Some(index.to_string());
        let on_gpu = || usages.iter().filter(|usage| usage.gpu.id == id).filter_map(|usage| usage.process.pid);
        if on_gpu().next().is_none() {
            continue;
        }
        let peaks = accounted_peaks(index, on_gpu());
        for usage in usages.iter_mut().filter(|usage| usage.gpu.id == id) {
            usage.accounted_peak = usage.process.pid.and_then(|pid| peaks.get(&pid).copied());
        }
    }
}
