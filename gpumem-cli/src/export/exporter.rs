//! Follows the recordings of all processes, and makes samples for scrapers and for the push.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    mem,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpumem_core::{
    derive::{LedgerView, Names, Paths},
    export::{shortened, shortened_command},
    ledger::{GroupUsage, KnownPool},
    model::{Device, MemKind, PoolId},
    recording::{Follower, Totals},
};
use gpumem_driver::source::machine::accounted_peaks;
use gpumem_metrics::{
    schema::{OTHER, largest},
    windows::Windows,
};

use super::{
    cgroup::container,
    sample::{
        Counts, DeviceSample, GpuId, GpuSample, Hidden, LiveSample, PoolSample, ProcessId, RecordingSample, Sample,
        UsageSample,
    },
};
use crate::{
    failure::Failure,
    history::{Origin, pay},
    machine::{self, Found, Known, Machine, Process, Recorded, Recording, Usage},
    run::control::is_stopped,
    terminal,
    watch::Live,
};

/// At most this many recordings are followed.
const MOST_RECORDINGS: usize = 512;
/// At most this many recordings of one process are followed.
const MOST_OF_PROCESS: usize = 4;
/// At most this many devices of a recording are exported, those with the highest peaks.
const MOST_DEVICES: usize = 16;
/// At most this many collectors are told apart. The one that has not collected for the longest time is forgotten.
const MOST_COLLECTORS: usize = 16;
/// One round reads at most this many bytes of all recordings, and at least the second number of each.
const MOST_BYTES: u64 = 64 << 20;
const LEAST_BYTES: u64 = 1 << 20;
/// At most this many groups of blocks get names, the largest ones. The rest is added up.
const MOST_GROUPS: usize = 1_000;
/// The room between more blocks than this takes too long to find.
const MOST_BLOCKS: u64 = 100_000;
/// Finding names reads at most this many bytes of stacks and scopes of all recordings, and at least the second number of each: those of the
/// largest groups come first. A stack of a debug build has some 30 KB.
const MOST_TEXT: u64 = 1 << 29;
const LEAST_TEXT: u64 = 1 << 22;
/// The largest number of columns of the value of a label.
const WIDEST: usize = 128;
/// The largest number of columns of a command.
const WIDEST_COMMAND: usize = 60;
/// After the end of a process, its recording may get what was still in memory.
const READ_AFTER_END: Duration = Duration::from_secs(10);
/// A program writes to its recording at least once a second. If nothing new comes for this time, the recording has ended or cannot be written.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);
/// The figures of an ended process are kept this long for a collector that has not got them.
const KEPT_AFTER_END: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Exporter {
    /// The number of places, scopes and libraries of a process that are named.
    places: usize,
    known: Known,
    /// The processes, and the time at which each began.
    processes: HashMap<u32, (u64, ProcessId)>,
    followed: Vec<Followed>,
    /// The events of recordings that are not followed any more, by their processes: a process may get another recording, and counts of a
    /// process never fall.
    counted: HashMap<ProcessId, Counts>,
    broken: Vec<Broken>,
    /// Those of [`Found::left`] that are or were followed.
    left: Vec<(u32, PathBuf)>,
    /// The number of recordings that the last look did not follow, because there were too many.
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
    began: Option<u64>,
    process: ProcessId,
    windows: Vec<(Device, Windows)>,
    /// The moment at which its process was found to have ended, or not to write it any more.
    ended: Option<Instant>,
    /// True if its process has left nothing more.
    has_all: bool,
    /// True if the ring of its process can be seen here. That of a process in a container cannot.
    sees_ring: bool,
    /// The collectors to which it was handed when it was complete, and those at which it has arrived.
    handed: Vec<u32>,
    arrived: Vec<u32>,
    /// True if lines at addresses are looked up. This is done only in files that a process of the same user names.
    looks_up: bool,
    /// True if the user was told why it is not exported.
    is_said: bool,
}

/// A recording without an end, which its process does not write any more, although it runs on: the disk may be full.
#[derive(Debug)]
struct Broken {
    path: PathBuf,
    pid: u32,
    began: Option<u64>,
    since: Instant,
    error: Option<String>,
    is_said: bool,
}

impl Broken {
    fn is(&self, of: &Followed) -> bool {
        self.pid == of.pid && self.path == of.live.path()
    }
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
            counted: HashMap::new(),
            broken: Vec::new(),
            left: Vec::new(),
            not_followed: 0,
            collectors: Vec::new(),
            next_collector: 0,
        }
    }

    /// Reads the new parts of recordings.
    pub(super) fn follow(&mut self) {
        let found = Found::now();
        let recorded = found.recorded();
        self.take_up(found.left);
        self.follow_all(&recorded);
    }

    /// Reads also the recordings that ended before a look found their processes writing them.
    fn take_up(&mut self, left: Vec<(u32, PathBuf)>) {
        self.left.retain(|known| left.contains(known));
        for of in left {
            if self.left.contains(&of) {
                continue;
            }
            let (pid, file) = &of;
            if !self.followed.iter().any(|followed| followed.is_of(*pid, file)) {
                if self.followed.len() == MOST_RECORDINGS {
                    continue;
                }
                let process = self.process(*pid);
                self.followed
                    .push(Followed { ended: Some(Instant::now()), ..Followed::new(file.clone(), *pid, process) });
            }
            self.left.push(of);
        }
    }

    fn follow_all(&mut self, recorded: &[Recorded]) {
        let wanted = recorded.iter().flat_map(|of| of.files.iter().take(MOST_OF_PROCESS).map(|file| (of.pid, file)));
        let mut wanted: Vec<(u32, PathBuf)> = wanted.map(|(pid, file)| (pid, self.known_path(pid, file))).collect();
        let mut paths = HashSet::new();
        wanted.retain(|(_, file)| paths.insert(file.clone()));
        let now = Instant::now();
        for of in &mut self.followed {
            if of.live.is_past() || !wanted.iter().any(|(pid, file)| of.is_of(*pid, file)) {
                of.ended.get_or_insert(now);
            } else if of.ended.take().is_some() {
                (of.has_all, of.handed, of.arrived) = Default::default();
            }
        }
        self.not_followed = 0;
        for (pid, file) in &wanted {
            if self.followed.iter().any(|of| of.is_of(*pid, file) && !of.live.is_past()) {
                continue;
            }
            if self.followed.len() == MOST_RECORDINGS {
                self.not_followed += 1;
                continue;
            }
            // The process may have become another program, which has another command.
            self.processes.remove(pid);
            let process = self.process(*pid);
            self.followed.push(Followed::new(file.clone(), *pid, process));
        }
        let collectors: Vec<u32> = self.collectors.iter().map(|(_, number)| *number).collect();
        let is_over = |of: &Followed| {
            let has_arrived = !collectors.is_empty() && collectors.iter().all(|number| of.arrived.contains(number));
            of.ended.is_some_and(|ended| of.is_complete() && has_arrived || now - ended > KEPT_AFTER_END)
        };
        for over in self.followed.extract_if(.., |of| is_over(of)) {
            self.counted.entry(over.process.clone()).or_default().add(over.counts());
        }
        let most = (MOST_BYTES / self.followed.len().max(1) as u64).max(LEAST_BYTES);
        for of in &mut self.followed {
            if of.ended.is_none_or(|ended| now - ended <= READ_AFTER_END) {
                of.read(most);
                if let Some(news) = of.news() {
                    terminal::error(&news);
                }
            }
        }
        let recorded: Vec<u32> = wanted.iter().map(|(pid, _)| *pid).collect();
        self.find_broken(&recorded);
        self.processes.retain(|pid, (began, _)| machine::began(*pid) == Some(*began));
        let (followed, processes) = (&self.followed, &self.processes);
        let is_known = |process: &ProcessId| {
            followed.iter().any(|of| of.process == *process) || processes.values().any(|(_, known)| known == process)
        };
        self.counted.retain(|process, _| is_known(process));
    }

    /// Returns the path under which a recording is known here. The system appends a text to that of a removed file, which can still be read
    /// if it was opened before.
    fn known_path(&self, pid: u32, file: &Path) -> PathBuf {
        let removed = file.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(Path::new);
        let known = removed.filter(|path| self.followed.iter().any(|of| of.is_of(pid, path)));
        known.unwrap_or(file).to_owned()
    }

    /// Finds the recordings that broke off. `recorded` are the processes that are recorded.
    fn find_broken(&mut self, recorded: &[u32]) {
        for of in self.followed.iter().filter(|of| of.ended.is_some()) {
            let known = self.broken.iter().position(|broken| broken.is(of));
            match known {
                // `gpumem stop` has ended it, and its end was read now.
                Some(known) if of.live.is_finished() => _ = self.broken.swap_remove(known),
                None if !of.live.is_finished() => self.broken.push(Broken {
                    path: of.live.path().to_owned(),
                    pid: of.pid,
                    began: of.began,
                    since: Instant::now(),
                    error: of.live.error().map(str::to_owned),
                    is_said: of.is_said,
                }),
                _ => {}
            }
        }
        self.broken.retain(|of| {
            let runs_on = of.began.is_some() && machine::began(of.pid) == of.began;
            // A process that was killed, or that has become another program, does not use the driver any more.
            runs_on && !recorded.contains(&of.pid) && machine::uses_driver(of.pid) != Some(false)
        });
        for of in self.broken.iter_mut().filter(|of| of.since.elapsed() > LONGEST_SILENCE) {
            if !mem::replace(&mut of.is_said, true) {
                terminal::error(&hidden(&of.path, of.pid, of.error.as_deref()));
            }
        }
    }

    /// Returns the known facts of a process.
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

    /// Returns a reading for the collector with this name, and the number of the collector.
    pub(super) fn collect(&mut self, name: &str) -> (Sample, Collector) {
        let collector = self.collector(name);
        let mut hidden = Hidden::default();
        let machine = Machine::read().unwrap_or_else(|_| {
            hidden.readings = 1;
            Machine::default()
        });
        let usage = Usage::read(&machine, &mut self.known);
        hidden.dormant = usage.found.dormant().count();
        self.take_up(usage.found.left);
        self.follow_all(&usage.recorded);
        let not_read = machine.not_read.iter().chain(&usage.not_read);
        hidden.readings += not_read.filter(|not_read| not_read.is_error).count();
        hidden.recordings = self.not_followed + self.broken.len();
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
        let (recordings, hidden_recordings) = self.recordings(collector, &gpus);
        hidden.recordings += hidden_recordings;
        (Sample { gpus, usages, recordings, hidden }, collector)
    }

    /// Returns the figures of all recordings, and the number of those that cannot be read.
    fn recordings(&mut self, collector: Collector, gpus: &[GpuSample]) -> (Vec<RecordingSample>, usize) {
        let names = (self.places, (MOST_TEXT / self.followed.len().max(1) as u64).max(LEAST_TEXT));
        let mut counted = self.counted.clone();
        for of in &self.followed {
            counted.entry(of.process.clone()).or_default().add(of.counts());
        }
        let (mut recordings, mut hidden) = (Vec::new(), 0);
        for of in &mut self.followed {
            if of.ended.is_some() && of.arrived.contains(&collector.0) {
                continue;
            }
            if of.is_seen() {
                let counts = counted[&of.process];
                recordings.push(RecordingSample { counts, ..of.sample(collector, gpus, names) });
            } else {
                hidden += usize::from(!self.broken.iter().any(|broken| broken.is(of)));
                // The recording is not read any more, so this collector gets its last figures.
                if of.is_complete() {
                    of.handed.push(collector.0);
                }
            }
        }
        (recordings, hidden)
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
        let (name, number) = if let Some(at) = known {
            self.collectors.remove(at)
        } else {
            self.next_collector += 1;
            (name.to_owned(), self.next_collector)
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

    /// The last answer has reached this collector.
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
    fn is_of(&self, pid: u32, file: &Path) -> bool {
        self.pid == pid && self.live.path() == file
    }

    fn new(file: PathBuf, pid: u32, process: ProcessId) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self {
            live: Live::of_recording(file),
            pid,
            began: machine::began(pid),
            process,
            windows: Vec::new(),
            ended: None,
            has_all: false,
            sees_ring: machine::shares_memory(pid),
            handed: Vec::new(),
            arrived: Vec::new(),
            looks_up: machine::uid(pid) == Some(own),
            is_said: false,
        }
    }

    /// Returns whether nothing more comes: its process does not write it, and what the process left was read.
    fn is_complete(&self) -> bool {
        self.ended.is_some_and(|ended| self.has_all || ended.elapsed() > READ_AFTER_END)
    }

    /// True if its process runs, and nothing new could be read for too long.
    fn is_silent(&self) -> bool {
        self.ended.is_none() && self.live.newest.elapsed() > LONGEST_SILENCE
    }

    fn is_seen(&self) -> bool {
        self.live.is_read() && !self.is_silent()
    }

    /// Returns a message when the recording is no longer exported, with the reason, and one when it is exported again.
    fn news(&mut self) -> Option<String> {
        if !self.is_said && self.is_silent() {
            self.is_said = true;
            return Some(hidden(self.live.path(), self.pid, self.live.error()).to_string());
        }
        let is_again = self.is_said && self.ended.is_none() && self.is_seen();
        self.is_said &= !is_again;
        is_again.then(|| format!("{} is exported again", recording_of(self.live.path(), self.pid)))
    }

    fn read(&mut self, most: u64) {
        // The ring comes first: `gpumem run` adds it to the file, and then removes it.
        let left = (self.ended.is_some() && !self.has_all).then(|| self.live.left_in_ring());
        self.live.read(most);
        if let Some(left) = left.filter(|_| self.live.is_read()) {
            match left {
                Ok(Some(left)) if !self.live.is_finished() => self.live.read_ring(&left),
                // Its process still fills it, or it cannot be read.
                Err(_) => {}
                Ok(_) => self.has_all = self.live.is_finished() || self.sees_ring,
            }
        }
        // A stopped process cannot write, and its figures are right.
        if self.live.newest.elapsed() > LONGEST_SILENCE / 2 && is_stopped(self.pid) {
            self.live.newest = Instant::now();
        }
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

    fn sample(
        &mut self,
        Collector(collector): Collector,
        gpus: &[GpuSample],
        (places, most_text): (usize, u64),
    ) -> RecordingSample {
        let is_running = self.ended.is_none();
        if self.is_complete() {
            self.handed.push(collector);
        }
        if is_running && self.looks_up {
            self.live.look_up_lines();
        }
        let mut devices = self.live.follower().ledger().stats();
        let totals = self.live.totals();
        let peak_of = |device| totals.peaks.iter().find(|peak| peak.device == device).map(|peak| peak.bytes);
        devices.sort_by_key(|stats| Reverse(peak_of(stats.device)));
        devices.truncate(MOST_DEVICES);
        let mut lives = if is_running { lives(self.live.follower(), places, most_text) } else { HashMap::new() };
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
        RecordingSample { process: self.process.clone(), counts: self.counts(), devices }
    }

    fn counts(&self) -> Counts {
        let Totals { refused, obtained, lost, .. } = self.live.totals();
        Counts { refused, retried: obtained, lost: lost + self.live.unread() }
    }
}

fn recording_of(path: &Path, pid: u32) -> String {
    format!("the recording `{}` of process {pid}", path.display())
}

/// Returns the message that the recording of a running process is not exported. Without an error, its process does not write it any more.
fn hidden(path: &Path, pid: u32, error: Option<&str>) -> Failure {
    let (cause, next) = match error {
        Some(error) => (error, "if another program has changed it, record the program again"),
        None => ("nothing new is in it", "the program has printed why, for example that the disk is full"),
    };
    Failure::new(format!("{} is not exported", recording_of(path, pid)), cause, next)
}

/// A panic of another thread leaves no state that would be wrong.
pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the live memory of each device. Names cost time, so only the largest groups have them.
fn lives(follower: &Follower, places: usize, mut most_text: u64) -> HashMap<Device, LiveSample> {
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
        let [library, scope, place] = if at < MOST_GROUPS && pay(&mut most_text, length()) {
            let origin = Origin::of(&group, &paths, definitions);
            [origin.library_or_program(), origin.scope(), origin.place()].map(|name| shortened(&name, WIDEST))
        } else {
            [OTHER, OTHER, OTHER].map(str::to_owned)
        };
        *sums.libraries.entry(library).or_default() += bytes;
        *sums.scopes.entry(scope.clone()).or_default() += bytes;
        *sums.places.entry((place, scope)).or_default() += bytes;
    }
    let holes = largest_holes(ledger);
    let mut pools: HashMap<Device, Vec<PoolSample>> = HashMap::new();
    for KnownPool { pool, device, part_bytes, reserved, .. } in ledger.pools() {
        pools.entry(device).or_default().push(PoolSample {
            name: shortened(&definitions.pool(pool), WIDEST),
            used: part_bytes.get(),
            reserved: reserved.get(),
            largest_hole: holes.get(&pool).copied(),
        });
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
    for (device, mut pools) in pools {
        // If several pools have one name, the largest one counts.
        pools.sort_by_key(|pool| Reverse(pool.reserved));
        pools.truncate(places);
        lives.entry(device).or_default().pools = pools;
    }
    lives
}

/// Returns the largest unused range in the blocks of each pool, if the addresses of all its blocks are known.
fn largest_holes(ledger: &dyn LedgerView) -> HashMap<PoolId, u64> {
    let mut pools = ledger.pools();
    let blocks = ledger.stats().iter().map(|stats| stats.on_device.blocks.current).sum::<u64>();
    if pools.is_empty() || blocks > MOST_BLOCKS {
        return HashMap::new();
    }
    let mut parts: Vec<(u64, u64)> = Vec::new();
    parts.extend(
        ledger.blocks(None).iter().filter(|block| block.key.is_part()).map(|of| (of.key.address(), of.bytes.get())),
    );
    parts.sort_unstable();
    let (mut holes, mut known): (HashMap<PoolId, u64>, HashMap<PoolId, u64>) = Default::default();
    for (pool, Range { start, end }) in ledger.pool_blocks() {
        *known.entry(pool).or_default() += end - start;
        let first = parts.partition_point(|(address, _)| *address < start);
        let inside = parts[first..].iter().take_while(|(address, _)| *address < end);
        let hole = holes.entry(pool).or_default();
        let rest = inside.fold(start, |at, (address, bytes)| {
            *hole = (*hole).max(address.saturating_sub(at));
            at.max(address.saturating_add(*bytes))
        });
        *hole = (*hole).max(end.saturating_sub(rest));
    }
    pools.retain(|pool| known.get(&pool.pool) == Some(&pool.block_bytes.get()));
    holes.retain(|pool, _| pools.iter().any(|of| of.pool == *pool));
    holes
}

/// Returns the GPUs and their slices.
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

/// Returns the GPU with this UUID. A recording may have it without the part before the first dash.
fn gpu_of(uuid: Option<String>, device: Device, gpus: &[GpuSample]) -> GpuId {
    let is_it = |known: &str| {
        let uuid = uuid.as_deref().unwrap_or_default();
        known == uuid || known.split_once('-').is_some_and(|(_, known)| known == uuid)
    };
    let known = gpus.iter().find(|gpu| gpu.gpu.uuid.as_deref().is_some_and(is_it)).map(|gpu| gpu.gpu.clone());
    let ordinal = Some(device.ordinal).filter(|_| uuid.is_none());
    known.unwrap_or_else(|| GpuId { id: None, uuid: uuid.map(|uuid| shortened(&uuid, WIDEST)), ordinal })
}

/// Adds the figures of the driver's accounting, if it is enabled.
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

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use gpumem_core::{
        model::{Block, Bytes, EventKind, Key, StackId},
        recording::{Item, PoolDefinition},
    };

    use gpumem_metrics::schema::{INTERVAL_PEAK, LIVE, REFUSED};

    use super::*;
    use crate::{
        export::metrics::{METRICS, Points},
        made::{DEVICE, MIB, Made},
    };

    /// A recording that this process writes.
    struct File(PathBuf);

    impl File {
        fn new(name: &str, content: &[u8]) -> Self {
            let path = env::temp_dir().join(format!("gpumem-export-{name}-{}", process::id()));
            fs::write(&path, content).unwrap();
            Self(path)
        }

        fn recorded(&self) -> Vec<Recorded> {
            vec![Recorded { pid: process::id(), command: None, files: vec![self.0.clone()] }]
        }
    }

    impl Drop for File {
        fn drop(&mut self) {
            _ = fs::remove_file(&self.0);
        }
    }

    fn sample(exporter: &mut Exporter, name: &str) -> (RecordingSample, Collector) {
        let collector = exporter.collector(name);
        let places = exporter.places;
        let of = exporter.followed.iter_mut().find(|of| of.is_seen()).expect("it is read");
        (of.sample(collector, &[], (places, MOST_TEXT)), collector)
    }

    #[test]
    fn a_process_has_a_bounded_number_of_series() {
        let mut made = Made::new("train");
        for number in 0..500 {
            let stack = made.stack(&[(1, "f", &format!("/home/ada/train/src/file{number}.rs"), number)]);
            made.alloc(MIB * u64::from(number + 1), MemKind::Pool, stack.0 - 1);
        }
        let file = File::new("many", &made.file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let (recording, _) = sample(&mut exporter, "a");
        let live = recording.devices[0].live.as_ref().unwrap();
        assert_eq!(live.places.len(), 11);
        assert_eq!(live.places.iter().map(|(_, bytes)| bytes).sum::<u64>(), 500 * 501 / 2 * MIB);
        assert_eq!(live.places[10].1, (1..=490).sum::<u64>() * MIB);
        let points = Points::of(&Sample { recordings: vec![recording], ..Sample::default() });
        let series: usize = METRICS.iter().map(|metric| points.of_metric(metric).count()).sum();
        // Of these, 4 are about the exporter itself. The page of the book names the bound.
        assert!(series - 4 <= 3 + 72, "{series}");
    }

    /// Stacks of debug builds have dozens of functions with names of hundreds of bytes. Only one line of them is printed.
    #[test]
    fn long_stacks_keep_their_names() {
        let mut made = Made::new("train");
        let function = "core::ops::function::FnOnce::call_once".repeat(10);
        for number in 1..=3 {
            let file = format!("/home/ada/train/src/file{number}.rs");
            let mut frames = vec![(1, "train::forward", &*file, number)];
            frames.extend((0..200).map(|line| (1, &*function, "/rustc/library/core/src/ops/function.rs", line)));
            let stack = made.stack(&frames);
            made.alloc(MIB * u64::from(number), MemKind::Device, stack.0 - 1);
        }
        let file = File::new("long", &made.file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let (recording, _) = sample(&mut exporter, "a");
        let live = recording.devices[0].live.as_ref().unwrap();
        let mut places: Vec<_> = live.places.iter().map(|((place, _), bytes)| (place.as_str(), bytes / MIB)).collect();
        places.sort_unstable();
        assert_eq!(places, [("src/file1.rs:1", 1), ("src/file2.rs:2", 2), ("src/file3.rs:3", 3)]);
    }

    /// Counts of a process go on in its next recording, which begins with 0.
    #[test]
    fn the_next_recording_of_a_process_goes_on() {
        let refused = |count: u64, mib: u64| {
            let mut made = Made::new("train");
            for _ in 0..count {
                let (device, bytes, kind) = (Some(DEVICE), Bytes::new(MIB), MemKind::Device);
                made.event(EventKind::Refused { device, bytes, kind, stack: StackId::NONE });
            }
            let key = Key::from_raw(512);
            made.event(EventKind::Alloc { key, block: Block::new(DEVICE, Bytes::new(mib * MIB), MemKind::Device) });
            made.event(EventKind::Free { key, block: None });
            made.file()
        };
        let (first, second) = (File::new("first", &refused(3, 10)), File::new("second", &refused(1, 50)));
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&first.recorded());
        let values = |exporter: &mut Exporter, recorded: &[Recorded]| {
            exporter.follow_all(recorded);
            let collector = exporter.collector("a");
            let (recordings, _) = exporter.recordings(collector, &[]);
            exporter.confirm(collector);
            let points = Points::of(&Sample { recordings, ..Sample::default() });
            [INTERVAL_PEAK, REFUSED].map(|metric| points.of_metric(&metric).map(|(_, value)| value).collect::<Vec<_>>())
        };
        let mib = |mib: u32| f64::from(mib << 20);
        assert_eq!(values(&mut exporter, &first.recorded()), [[mib(10)], [3.0]]);
        // It has ended the first one and begun the second one since the last scrape.
        assert_eq!(values(&mut exporter, &second.recorded()), [[mib(50)], [4.0]]);
        for _ in 0..2 {
            assert_eq!(values(&mut exporter, &second.recorded()), [[0.0], [4.0]]);
        }
        assert_eq!(exporter.followed.len(), 1);
    }

    #[test]
    fn a_process_without_live_memory_has_a_series_with_0() {
        let mut made = Made::new("train");
        made.event(EventKind::Alloc {
            key: Key::from_raw(512),
            block: Block::new(DEVICE, Bytes::new(MIB), MemKind::Pool),
        });
        made.event(EventKind::Free { key: Key::from_raw(512), block: None });
        let file = File::new("none", &made.file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let live = |exporter: &mut Exporter| {
            let (recording, _) = sample(exporter, "a");
            let points = Points::of(&Sample { recordings: vec![recording], ..Sample::default() });
            points.of_metric(&LIVE).map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(live(&mut exporter), [0.0]);
        // A process that has ended has none.
        exporter.follow_all(&[]);
        assert_eq!(live(&mut exporter), [0.0; 0]);
    }

    #[test]
    fn what_an_ended_process_had_is_handed_over_once_to_each() {
        let file = File::new("ended", &Made::new("train").training(3, 10, 10 * MIB).file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let (running, first) = sample(&mut exporter, "first");
        assert!(running.devices[0].live.is_some() && running.process.pid == Some(process::id()));
        exporter.confirm(first);
        _ = exporter.collector("second");
        exporter.follow_all(&[]);
        let (ended, first) = sample(&mut exporter, "first");
        assert_eq!((ended.devices[0].live.clone(), ended.devices[0].peak), (None, running.devices[0].peak));
        exporter.confirm(first);
        assert!(exporter.followed[0].arrived.contains(&first.0));
        // The recording is found again, so it has not ended yet. Its end is handed over later.
        exporter.follow_all(&file.recorded());
        assert!(exporter.followed[0].arrived.is_empty());
        exporter.follow_all(&[]);
        let (_, first) = sample(&mut exporter, "first");
        exporter.confirm(first);
        // The other collector has not got it yet.
        exporter.follow_all(&[]);
        let (_, second) = sample(&mut exporter, "second");
        exporter.confirm(second);
        exporter.follow_all(&[]);
        assert!(exporter.followed.is_empty());
    }

    #[test]
    fn a_recording_that_ended_before_it_was_found_is_handed_over_once() {
        let file = File::new("unseen", &Made::new("train").training(3, 10, 10 * MIB).file());
        let mut exporter = Exporter::new(10);
        let look = |exporter: &mut Exporter| {
            exporter.take_up(vec![(process::id(), file.0.clone())]);
            exporter.follow_all(&[]);
        };
        look(&mut exporter);
        let (ended, first) = sample(&mut exporter, "first");
        assert!(ended.devices[0].peak.is_some() && ended.devices[0].live.is_none());
        exporter.confirm(first);
        for _ in 0..2 {
            look(&mut exporter);
            assert!(exporter.followed.is_empty());
        }
    }

    #[test]
    fn a_file_is_read_in_parts_and_a_wrong_one_is_not_there() {
        let whole = Made::new("train").varied(20_000).file();
        let file = File::new("parts", &whole);
        let mut exporter = Exporter::new(10);
        let mut followed = Followed::new(file.0.clone(), process::id(), ProcessId::default());
        followed.read(1_000);
        assert!(!followed.live.is_read() && !followed.live.is_finished());
        for _ in 0..whole.len() / 1_000 {
            followed.read(1_000);
        }
        followed.read(1_000);
        assert!(followed.live.is_read());
        exporter.followed.push(followed);
        let peak = sample(&mut exporter, "a").0.devices[0].peak;
        exporter.follow_all(&file.recorded());
        assert_eq!(sample(&mut exporter, "a").0.devices[0].peak, peak);
        exporter.followed.clear();
        let wrong = File::new("wrong", b"this is no recording");
        exporter.follow_all(&wrong.recorded());
        assert!(!exporter.followed[0].live.is_read());
        // Each collector gets the last figures once after the process has ended.
        exporter.followed[0].ended = Instant::now().checked_sub(2 * READ_AFTER_END);
        for expected in [1, 0] {
            let (sample, collector) = exporter.collect("a");
            assert_eq!(sample.hidden.recordings, expected);
            exporter.confirm(collector);
        }
    }

    #[test]
    fn figures_that_stopped_are_hidden() {
        let file = File::new("silent", &Made::new("train").training(3, 10, 10 * MIB).file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        assert!(exporter.followed[0].is_seen());
        exporter.followed[0].live.newest = Instant::now().checked_sub(2 * LONGEST_SILENCE).unwrap();
        exporter.follow_all(&file.recorded());
        assert!(!exporter.followed[0].is_seen() && exporter.followed[0].is_said);
        assert_eq!(exporter.followed[0].news(), None);
        for _ in 0..2 {
            let of = &mut exporter.followed[0];
            of.live.newest = Instant::now();
            assert!(of.news().is_some_and(|news| news.ends_with(" is exported again")));
            assert_eq!(of.news(), None);
            of.live.newest = Instant::now().checked_sub(2 * LONGEST_SILENCE).unwrap();
            assert!(of.news().is_some_and(|news| news.contains(" is not exported: nothing new is in it; ")));
        }
        // A process that ended is not exported again.
        exporter.followed[0].ended = Some(Instant::now());
        assert_eq!(exporter.followed[0].news(), None);
    }

    #[test]
    fn the_largest_hole_of_a_pool() {
        let pool = PoolId(1);
        let mut made = Made::new("train");
        made.item(&Item::Pool(PoolDefinition { pool, name: "arena".to_owned() }));
        made.event(EventKind::PoolRegistered { pool, device: DEVICE });
        let block = |kind, context, bytes| Block {
            device: DEVICE,
            bytes: Bytes::new(bytes),
            kind,
            context,
            stack: StackId::NONE,
        };
        let start = 1 << 40;
        made.alloc_at(Key::from_raw(start), block(MemKind::Device, 1, 64 * MIB));
        // The memory has 4 MiB, then room of 10 MiB, then 30 MiB, and then room of 20 MiB.
        for (at, bytes) in [(0, 4 * MIB), (14 * MIB, 30 * MIB)] {
            made.alloc_at(Key::of_part(pool, start + at), block(MemKind::Part, 1, bytes));
        }
        let file = File::new("pool", &made.file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let live = sample(&mut exporter, "a").0.devices.remove(0).live.unwrap();
        let expected =
            PoolSample { name: "arena".to_owned(), used: 34 * MIB, reserved: 64 * MIB, largest_hole: Some(20 * MIB) };
        assert_eq!(live.pools, [expected]);
        assert_eq!(live.kinds, [("part", 34 * MIB)]);
    }
}
