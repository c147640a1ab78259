//! Follows the recordings of all processes, and takes samples for scrapers and for the push.

use std::{
    collections::{HashMap, HashSet},
    mem,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gpumem_core::export::shortened_command;
use gpumem_driver::source::machine::accounted_peaks;

use super::{
    cgroup::container,
    followed::{Collector, Ended, Followed, LONGEST_SILENCE, READ_AFTER_END, hidden},
    sample::{Counts, GpuId, GpuSample, Hidden, ProcessId, RecordingSample, Sample, UsageSample},
};
use crate::{
    machine::{self, Found, Known, Machine, Process, RecordedProcess, Recording, Usage},
    run::endings::Ending,
    terminal,
};

/// At most this many recordings are followed.
const MOST_RECORDINGS: usize = 512;
/// At most this many recordings of one process are followed.
const MOST_OF_PROCESS: usize = 4;
/// At most this many collectors are distinguished. When there are more, the one whose last collection is oldest is
/// forgotten.
const MOST_COLLECTORS: usize = 16;
/// One round reads at most this many bytes from all recordings together, and at least the second number from each.
const MOST_BYTES: u64 = 64 << 20;
const LEAST_BYTES: u64 = 1 << 20;
/// Finding names reads at most this many bytes of stacks and scopes from all recordings together, and at least the
/// second number from each. The largest groups come first. A stack of a debug build takes about 30 KB.
const MOST_TEXT: u64 = 1 << 29;
const LEAST_TEXT: u64 = 1 << 22;
/// Commands are cut to this many columns.
const WIDEST_COMMAND: usize = 60;
/// The values of an ended process are kept this long for collectors that have not received them.
const KEPT_AFTER_END: Duration = Duration::from_secs(300);

#[derive(Debug)]
pub(super) struct Exporter {
    /// The number of places, scopes and libraries of a process that get names.
    places: usize,
    known: Known,
    /// The processes, each with its start time.
    processes: HashMap<u32, (u64, ProcessId)>,
    followed: Vec<Followed>,
    /// The event counts of recordings that are no longer followed, by process. A process may start another recording,
    /// and its counts must never fall.
    counted: HashMap<ProcessId, Counts>,
    broken: Vec<Broken>,
    /// The entries of [`Found::left`] that are or were followed.
    left: Vec<(u32, PathBuf)>,
    /// The recordings that runs completed since the last look.
    pub(super) endings: Vec<Ending>,
    /// The ids of recordings that are no longer followed, each with the time when they were removed from `followed`.
    past: HashMap<u64, Instant>,
    /// The number of recordings that are not followed, because the last look found too many.
    not_followed: usize,
    /// The names of collectors with their ids. The one that collected last is at the end.
    collectors: Vec<(String, u32)>,
    next_collector: u32,
}

/// A recording without an end that its process no longer writes although it is still running. The disk may be full.
#[derive(Debug)]
struct Broken {
    path: PathBuf,
    pid: u32,
    started: Option<u64>,
    since: Instant,
    error: Option<String>,
    is_warned: bool,
}

impl Broken {
    fn is(&self, of: &Followed) -> bool {
        self.pid == of.pid && self.path == of.live.path()
    }
}

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
            endings: Vec::new(),
            past: HashMap::new(),
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

    /// Also reads the recordings that ended before a look found their processes writing them.
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
                let mut followed = Followed::new(file.clone(), *pid, process);
                followed.ended = Some(Ended::now());
                self.followed.push(followed);
            }
            self.left.push(of);
        }
    }

    /// Also reads the recordings of processes that no look has found.
    fn take_up_endings(&mut self) {
        self.past.retain(|_, since| since.elapsed() < KEPT_AFTER_END);
        for Ending { path, recording, pid } in mem::take(&mut self.endings) {
            let is_known = |of: &Followed| of.live.follower().file_start().recording == Some(recording);
            if self.past.contains_key(&recording)
                || self.followed.iter().any(is_known)
                || self.followed.len() == MOST_RECORDINGS
            {
                continue;
            }
            // `gpumem run` has renamed the file before it could be opened.
            self.followed.retain(|of| of.pid != pid || of.live.follower().file_start().recording.is_some());
            let mut followed = Followed::new(path, pid, ProcessId::default());
            followed.read(MOST_BYTES);
            followed.ended = Some(Ended { has_all: followed.live.is_read(), ..Ended::now() });
            let command = followed.live.follower().definitions().process().arguments.join(" ");
            followed.process = ProcessId {
                pid: Some(pid),
                command: Some(command)
                    .filter(|line| !line.is_empty())
                    .map(|line| shortened_command(&line, WIDEST_COMMAND)),
                ..ProcessId::default()
            };
            self.followed.push(followed);
        }
    }

    fn follow_all(&mut self, recorded: &[RecordedProcess]) {
        let requested = recorded.iter().flat_map(|of| of.files.iter().take(MOST_OF_PROCESS).map(|file| (of.pid, file)));
        let mut requested: Vec<(u32, PathBuf)> =
            requested.map(|(pid, file)| (pid, self.known_path(pid, file))).collect();
        let mut paths = HashSet::new();
        requested.retain(|(_, file)| paths.insert(file.clone()));
        for of in &mut self.followed {
            if of.live.is_past() || !requested.iter().any(|(pid, file)| of.is_of(*pid, file)) {
                of.ended.get_or_insert_with(Ended::now);
            } else {
                of.ended = None;
            }
        }
        self.not_followed = 0;
        for (pid, file) in &requested {
            if self.followed.iter().any(|of| of.is_of(*pid, file) && !of.live.is_past()) {
                continue;
            }
            if self.followed.len() == MOST_RECORDINGS {
                self.not_followed += 1;
                continue;
            }
            // The process may have executed another program, and then has another command.
            self.processes.remove(pid);
            let process = self.process(*pid);
            self.followed.push(Followed::new(file.clone(), *pid, process));
        }
        let collectors: Vec<u32> = self.collectors.iter().map(|(_, number)| *number).collect();
        let is_over = |Ended { at, arrived, .. }: &Ended| {
            let has_arrived = !collectors.is_empty() && collectors.iter().all(|number| arrived.contains(number));
            has_arrived || at.elapsed() > KEPT_AFTER_END
        };
        for over in self.followed.extract_if(.., |of| of.ended.as_ref().is_some_and(is_over)) {
            self.counted.entry(over.process.clone()).or_default().add(over.counts());
            self.past.extend(over.live.follower().file_start().recording.map(|recording| (recording, Instant::now())));
        }
        let most = (MOST_BYTES / self.followed.len().max(1) as u64).max(LEAST_BYTES);
        for of in &mut self.followed {
            if of.ended.as_ref().is_none_or(|ended| ended.at.elapsed() <= READ_AFTER_END) {
                of.read(most);
                if let Some(news) = of.news() {
                    terminal::error(&news);
                }
            }
        }
        self.take_up_endings();
        let recorded: Vec<u32> = requested.iter().map(|(pid, _)| *pid).collect();
        self.find_broken(&recorded);
        self.processes.retain(|pid, (started, _)| machine::start_time(*pid) == Some(*started));
        let (followed, processes) = (&self.followed, &self.processes);
        let is_known = |process: &ProcessId| {
            followed.iter().any(|of| of.process == *process) || processes.values().any(|(_, known)| known == process)
        };
        self.counted.retain(|process, _| is_known(process));
    }

    /// Returns the path under which a recording is known here. For a removed file, the system appends a text to the
    /// path. The file can still be read if it was opened before.
    fn known_path(&self, pid: u32, file: &Path) -> PathBuf {
        let removed = file.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(Path::new);
        let known = removed.filter(|path| self.followed.iter().any(|of| of.is_of(pid, path)));
        known.unwrap_or(file).to_owned()
    }

    /// Finds the recordings that broke off. `recorded` lists the processes that are being recorded.
    fn find_broken(&mut self, recorded: &[u32]) {
        for of in self.followed.iter().filter(|of| of.ended.is_some()) {
            let known = self.broken.iter().position(|broken| broken.is(of));
            match known {
                // `gpumem stop` has ended the recording, and its end has now been read.
                Some(known) if of.live.is_finished() => _ = self.broken.swap_remove(known),
                None if !of.live.is_finished() => self.broken.push(Broken {
                    path: of.live.path().to_owned(),
                    pid: of.pid,
                    started: of.started,
                    since: Instant::now(),
                    error: of.live.error().map(str::to_owned),
                    is_warned: of.is_warned,
                }),
                _ => {}
            }
        }
        self.broken.retain(|of| {
            let runs_on = of.started.is_some() && machine::start_time(of.pid) == of.started;
            // A process that was killed, or that executed another program, no longer uses the driver.
            runs_on && !recorded.contains(&of.pid) && machine::uses_driver(of.pid) != Some(false)
        });
        for of in self.broken.iter_mut().filter(|of| of.since.elapsed() > LONGEST_SILENCE) {
            if !mem::replace(&mut of.is_warned, true) {
                terminal::error(&hidden(&of.path, of.pid, of.error.as_deref()));
            }
        }
    }

    /// Returns the labels of a process.
    fn process(&mut self, pid: u32) -> ProcessId {
        let Some(started) = machine::start_time(pid) else {
            return ProcessId { pid: Some(pid), ..ProcessId::default() };
        };
        if let Some((known, process)) = self.processes.get(&pid)
            && *known == started
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
        self.processes.insert(pid, (started, process.clone()));
        process
    }

    /// Returns a reading for the collector with this name, and the collector's id.
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

    /// Returns the values of all recordings, and the number of recordings that cannot be read.
    fn recordings(&mut self, collector: Collector, gpus: &[GpuSample]) -> (Vec<RecordingSample>, usize) {
        let names = (self.places, (MOST_TEXT / self.followed.len().max(1) as u64).max(LEAST_TEXT));
        let mut counted = self.counted.clone();
        for of in &self.followed {
            counted.entry(of.process.clone()).or_default().add(of.counts());
        }
        let (mut recordings, mut hidden) = (Vec::new(), 0);
        for of in &mut self.followed {
            if of.ended.as_ref().is_some_and(|ended| ended.arrived.contains(&collector.0)) {
                continue;
            }
            if of.is_seen() {
                let counts = counted[&of.process];
                recordings.push(RecordingSample { counts, ..of.sample(collector, gpus, names) });
            } else {
                hidden += usize::from(!self.broken.iter().any(|broken| broken.is(of)));
                // The recording is no longer read, so this collector gets its last values.
                if let Some(ended) = &mut of.ended {
                    ended.hand_to(collector);
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

    /// Forgets a collector that does not collect any more.
    pub(super) fn forget(&mut self, Collector(collector): Collector) {
        self.collectors.retain(|(_, number)| *number != collector);
        let windows = self.followed.iter_mut().flat_map(|of| &mut of.windows);
        windows.for_each(|(_, windows)| windows.forget(collector));
    }

    /// Notes that the last answer has reached this collector.
    pub(super) fn confirm(&mut self, Collector(collector): Collector) {
        for of in &mut self.followed {
            of.windows.iter_mut().for_each(|(_, windows)| windows.confirm(collector));
            if let Some(Ended { handed, arrived, .. }) = &mut of.ended
                && handed.contains(&collector)
                && !arrived.contains(&collector)
            {
                arrived.push(collector);
            }
        }
    }
}

/// Locks even after a panic of another thread, because a panic cannot leave a wrong state behind.
pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the GPUs and their MIG slices.
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

/// Adds the values of the driver's accounting mode, if it is enabled.
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

    use gpumem_core::model::{Block, Bytes, DriverGauge, EventKind, Key, MemKind, PoolId, StackId};
    use gpumem_recording::{Item, PoolDefinition};

    use gpumem_metrics::schema::{INTERVAL_PEAK, LIBRARY, LIVE, PLACE, REJECTED};

    use super::*;
    use crate::{
        export::{
            metrics::{DRIVER, METRICS, Points},
            sample::PoolSample,
        },
        recording_builder::{DEVICE, MIB, RecordingBuilder},
    };

    /// A recording that this process writes.
    struct File(PathBuf);

    impl File {
        fn new(name: &str, content: &[u8]) -> Self {
            let path = env::temp_dir().join(format!("gpumem-export-{name}-{}", process::id()));
            fs::write(&path, content).unwrap();
            Self(path)
        }

        fn recorded(&self) -> Vec<RecordedProcess> {
            vec![RecordedProcess { pid: process::id(), command: None, files: vec![self.0.clone()] }]
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
        let mut made = RecordingBuilder::new("train");
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
        // Four of these series are about the exporter itself. The page of the book states this bound.
        assert!(series - 4 <= 3 + 72, "{series}");
    }

    /// Stacks of debug builds contain dozens of functions whose names take hundreds of bytes. Only one line of each
    /// stack is printed.
    #[test]
    fn long_stacks_keep_their_names() {
        let mut made = RecordingBuilder::new("train");
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

    /// The counts of a process continue in its next recording, which starts at 0.
    #[test]
    fn the_next_recording_of_a_process_goes_on() {
        let rejected = |count: u64, mib: u64| {
            let mut made = RecordingBuilder::new("train");
            for _ in 0..count {
                let (device, bytes, kind) = (Some(DEVICE), Bytes::new(MIB), MemKind::Device);
                made.event(EventKind::Rejected { device, bytes, kind, stack: StackId::NONE });
            }
            let key = Key::from_raw(512);
            made.event(EventKind::Alloc { key, block: Block::new(DEVICE, Bytes::new(mib * MIB), MemKind::Device) });
            made.event(EventKind::Free { key, block: None });
            made.file()
        };
        let (first, second) = (File::new("first", &rejected(3, 10)), File::new("second", &rejected(1, 50)));
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&first.recorded());
        let values = |exporter: &mut Exporter, recorded: &[RecordedProcess]| {
            exporter.follow_all(recorded);
            let collector = exporter.collector("a");
            let (recordings, _) = exporter.recordings(collector, &[]);
            exporter.confirm(collector);
            let points = Points::of(&Sample { recordings, ..Sample::default() });
            [INTERVAL_PEAK, REJECTED]
                .map(|metric| points.of_metric(&metric).map(|(_, value)| value).collect::<Vec<_>>())
        };
        let mib = |mib: u32| f64::from(mib << 20);
        assert_eq!(values(&mut exporter, &first.recorded()), [[mib(10)], [3.0]]);
        // The process has ended its first recording and started its second since the last scrape.
        assert_eq!(values(&mut exporter, &second.recorded()), [[mib(50)], [4.0]]);
        for _ in 0..2 {
            assert_eq!(values(&mut exporter, &second.recorded()), [[0.0], [4.0]]);
        }
        assert_eq!(exporter.followed.len(), 1);
    }

    #[test]
    fn a_process_without_live_memory_has_a_series_with_0() {
        let mut made = RecordingBuilder::new("train");
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
        // An ended process has no values.
        exporter.follow_all(&[]);
        assert_eq!(live(&mut exporter), [0.0; 0]);
    }

    /// The driver's own memory has a separate metric. The metrics of libraries, scopes and places do not count it.
    #[test]
    fn the_drivers_memory_is_exported_by_kind() {
        let file = File::new("driver", &RecordingBuilder::new("train").with_driver_memory(DriverGauge::AtMost).file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        let (recording, _) = sample(&mut exporter, "a");
        let points = Points::of(&Sample { recordings: vec![recording], ..Sample::default() });
        let sum = |metric| points.of_metric(metric).map(|(_, value)| value).sum();
        let sums: Vec<f64> = [&DRIVER, &LIVE, &LIBRARY, &PLACE].into_iter().map(sum).collect();
        let [taken, allocated] = [526 + 140 + 3072 + 100 + 48, 63 + 16].map(|mib: u32| f64::from(mib << 20));
        assert_eq!(sums, [taken, allocated, allocated, allocated]);
        let values = |name| {
            let attributes = points.of_metric(&DRIVER).flat_map(|(attributes, _)| attributes.iter());
            attributes.filter(|(known, _)| *known == name).map(|(_, value)| value.clone()).collect::<Vec<_>>()
        };
        assert_eq!(values("measured_by"), ["at most"; 5]);
        assert!(values("kind").contains(&"local memory".to_owned()));
    }

    #[test]
    fn a_recording_that_is_found_again_has_not_ended() {
        let file = File::new("again", &RecordingBuilder::new("train").training(3, 10, 10 * MIB).file());
        let mut exporter = Exporter::new(10);
        for (recorded, has_ended) in [(file.recorded(), false), (Vec::new(), true), (file.recorded(), false)] {
            exporter.follow_all(&recorded);
            assert_eq!(exporter.followed[0].ended.is_some(), has_ended);
        }
    }

    #[test]
    fn a_recording_that_ended_before_it_was_found_is_handed_over_once() {
        let file = File::new("unseen", &RecordingBuilder::new("train").training(3, 10, 10 * MIB).file());
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
        let whole = RecordingBuilder::new("train").varied(20_000).file();
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
        let wrong = File::new("wrong", b"this is not a recording");
        exporter.follow_all(&wrong.recorded());
        assert!(!exporter.followed[0].live.is_read());
        // After the process has ended, each collector gets the last values once.
        let at = Instant::now().checked_sub(2 * READ_AFTER_END).unwrap();
        exporter.followed[0].ended = Some(Ended { at, ..Ended::now() });
        for expected in [1, 0] {
            let (sample, collector) = exporter.collect("a");
            assert_eq!(sample.hidden.recordings, expected);
            exporter.confirm(collector);
        }
    }

    #[test]
    fn numbers_that_stopped_are_hidden() {
        let file = File::new("silent", &RecordingBuilder::new("train").training(3, 10, 10 * MIB).file());
        let mut exporter = Exporter::new(10);
        exporter.follow_all(&file.recorded());
        assert!(exporter.followed[0].is_seen());
        exporter.followed[0].live.latest = Instant::now().checked_sub(2 * LONGEST_SILENCE).unwrap();
        exporter.follow_all(&file.recorded());
        assert!(!exporter.followed[0].is_seen() && exporter.followed[0].is_warned);
        assert_eq!(exporter.followed[0].news(), None);
        for _ in 0..2 {
            let of = &mut exporter.followed[0];
            of.live.latest = Instant::now();
            assert!(of.news().is_some_and(|news| news.ends_with(" is exported again")));
            assert_eq!(of.news(), None);
            of.live.latest = Instant::now().checked_sub(2 * LONGEST_SILENCE).unwrap();
            assert!(of.news().is_some_and(|news| news.contains(" is not exported: it contains nothing new; ")));
        }
        // A process that ended is not exported again.
        exporter.followed[0].ended = Some(Ended::now());
        assert_eq!(exporter.followed[0].news(), None);
    }

    #[test]
    fn the_largest_hole_of_a_pool() {
        let pool = PoolId(1);
        let mut made = RecordingBuilder::new("train");
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
        // The memory contains 4 MiB, a gap of 10 MiB, then 30 MiB, and then a gap of 20 MiB.
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
