//! The processes on the GPUs, and which of them are recorded.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap, HashSet},
    mem,
    path::PathBuf,
};

use gpumem::report::{GpuProcess, ProcessKind};
use gpumem_driver::source::machine as library;
use serde::Serialize;

use crate::report::json;

use super::{
    gpus::{Machine, NotRead},
    system,
};

/// A process on one GPU. The field names are those in JSON. An unknown value is `None`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Process {
    /// NVML's index of the GPU.
    pub(crate) gpu: u32,
    /// The process id that the driver reports. In a container it may be an id from outside.
    pub(crate) pid: u32,
    pub(crate) user: Option<String>,
    pub(crate) command: Option<String>,
    pub(crate) used_bytes: Option<u64>,
    /// The use of the GPU: computing, graphics, or both.
    #[serde(rename = "use")]
    pub(crate) kind: &'static str,
    /// True if the process with this id is the one that the driver means. `None` if that cannot be found out.
    pub(crate) is_visible: Option<bool>,
    pub(crate) recording: Recording,
}

/// Whether a process is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum Recording {
    /// The process is recorded to these files.
    Recorded {
        #[serde(serialize_with = "json::paths")]
        files: Vec<PathBuf>,
    },
    /// The process waits for `gpumem start`.
    Dormant,
    /// The process is not recorded.
    None,
    /// The process belongs to another user, or is not visible here.
    Unknown,
}

/// A process that is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RecordedProcess {
    pub(crate) pid: u32,
    pub(crate) command: Option<String>,
    #[serde(serialize_with = "json::paths")]
    pub(crate) files: Vec<PathBuf>,
}

/// A process that waits for `gpumem start`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Dormant {
    pub(crate) pid: u32,
    pub(crate) command: Option<String>,
}

/// The memory of a GPU, and how much of it the listed processes use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GpuUse {
    pub(crate) gpu: u32,
    pub(crate) used_bytes: Option<u64>,
    /// `None` if the memory of one of them is not known.
    pub(crate) listed_bytes: Option<u64>,
    /// The memory in use that is not listed: that of processes that the driver does not show here, and memory that
    /// belongs to no process.
    pub(crate) not_listed_bytes: Option<u64>,
}

/// The processes on all GPUs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Usage {
    /// The processes by GPU, those with the most memory first.
    pub(crate) processes: Vec<Process>,
    pub(crate) gpus: Vec<GpuUse>,
    /// Recorded processes that the driver does not list.
    pub(crate) recorded_besides: Vec<RecordedProcess>,
    /// Processes that wait for `gpumem start` and that the driver does not list.
    pub(crate) dormant_besides: Vec<Dormant>,
    pub(crate) not_read: Vec<NotRead>,
    /// All processes that are recorded.
    #[serde(skip)]
    pub(crate) recorded: Vec<RecordedProcess>,
    #[cfg(feature = "export")]
    #[serde(skip)]
    pub(crate) found: Found,
}

impl Usage {
    /// Reads the processes on these GPUs. Recorded and dormant processes are found even without a GPU.
    pub(crate) fn read(machine: &Machine, system: &mut Known) -> Self {
        let mut all = Self::default();
        let mut lists = Vec::new();
        for gpu in &machine.gpus {
            let (Some(index), true) = (gpu.index, gpu.uuid.is_some()) else { continue };
            match library::processes_on(index) {
                Ok(processes) => lists.push((index, gpu.memory.used_bytes, processes)),
                Err(why) => all.not_read.push(NotRead::error(format!("the processes on GPU {index}"), &why)),
            }
        }
        // A process may be on several GPUs, but is looked up once.
        system.update(lists.iter().flat_map(|(.., processes)| processes.iter().map(|process| process.pid)).collect());
        let found = Found::now();
        for (index, used, processes) in lists {
            all.add(index, used, processes, system, &found);
        }
        let listed: HashSet<u32> = {
            let visible = all.processes.iter().filter(|process| process.is_visible != Some(false));
            visible.map(|process| process.pid).collect()
        };
        all.recorded = found.recorded();
        all.recorded_besides = all.recorded.iter().filter(|of| !listed.contains(&of.pid)).cloned().collect();
        let besides = found.dormant().filter(|pid| !listed.contains(pid));
        all.dormant_besides = besides.map(|pid| Dormant { pid, command: system::command(pid) }).collect();
        #[cfg(feature = "export")]
        {
            all.found = found;
        }
        all
    }

    fn add(&mut self, gpu: u32, used: Option<u64>, processes: Vec<GpuProcess>, system: &Known, found: &Found) {
        let used_by = processes.iter().map(|process| Some(process.used?.get()));
        let listed_bytes: Option<u64> = used_by.sum();
        let not_listed_bytes = used.zip(listed_bytes).map(|(used, listed)| used.saturating_sub(listed));
        self.gpus.push(GpuUse { gpu, used_bytes: used, listed_bytes, not_listed_bytes });
        let mut processes: Vec<_> = processes
            .into_iter()
            .map(|process| {
                // Nothing else is known about a process that is not visible here.
                let of_system = system.processes.get(&process.pid);
                let is_visible = of_system.map_or(Some(false), |known| known.uses_driver);
                let seen = of_system.filter(|_| is_visible != Some(false));
                Process {
                    gpu,
                    pid: process.pid,
                    user: seen.and_then(|seen| seen.user.clone()),
                    command: seen.and_then(|seen| seen.command.clone()).or(process.name),
                    used_bytes: process.used.map(gpumem::Bytes::get),
                    kind: match process.kind {
                        ProcessKind::Compute => "compute",
                        ProcessKind::Graphics => "graphics",
                        _ => "both",
                    },
                    is_visible,
                    recording: seen
                        .and_then(|_| found.recordings.get(&process.pid).cloned())
                        .unwrap_or(Recording::Unknown),
                }
            })
            .collect();
        processes.sort_by_key(|process| (Reverse(process.used_bytes), process.pid));
        self.processes.extend(processes);
    }
}

/// The system's data about a process.
#[derive(Debug)]
struct OfSystem {
    started: u64,
    user: Option<String>,
    command: Option<String>,
    uses_driver: Option<bool>,
}

/// The processes that the driver lists, with the system's data. These are read again only if they may have changed.
#[derive(Debug, Default)]
pub(crate) struct Known {
    processes: HashMap<u32, OfSystem>,
}

impl Known {
    /// Updates the data of the processes in `pids` that are visible here, and removes the data of all others.
    fn update(&mut self, pids: HashSet<u32>) {
        let mut known = mem::take(&mut self.processes);
        let process = |pid| {
            let started = system::start_time(pid)?;
            let new = || OfSystem {
                started,
                user: system::user(pid),
                command: system::command(pid),
                uses_driver: system::uses_driver(pid),
            };
            Some((pid, known.remove(&pid).filter(|known| known.started == started).unwrap_or_else(new)))
        };
        self.processes = pids.into_iter().filter_map(process).collect();
    }
}

/// One look at all processes that are visible here.
#[derive(Clone, Debug, Default)]
pub(crate) struct Found {
    recordings: BTreeMap<u32, Recording>,
    /// Recordings of `gpumem run` that their processes started and no longer write.
    #[cfg(feature = "export")]
    pub(crate) left: Vec<(u32, PathBuf)>,
}

impl Found {
    pub(crate) fn now() -> Self {
        let mut found = Self::default();
        for pid in system::pids() {
            let recording = match system::open_recordings(pid) {
                Ok(files) if !files.is_empty() => Recording::Recorded { files },
                Ok(_) => {
                    let environment = system::environment(pid);
                    #[cfg(feature = "export")]
                    found.left.extend(system::left_recording(pid, &environment).map(|file| (pid, file)));
                    if system::is_dormant(pid, &environment) { Recording::Dormant } else { Recording::None }
                }
                Err(_) => Recording::Unknown,
            };
            found.recordings.insert(pid, recording);
        }
        found
    }

    /// Returns the ids of the processes that wait for `gpumem start`.
    pub(crate) fn dormant(&self) -> impl Iterator<Item = u32> {
        let dormant = self.recordings.iter().filter(|(_, recording)| **recording == Recording::Dormant);
        dormant.map(|(pid, _)| *pid)
    }

    /// Returns all processes that are recorded.
    pub(crate) fn recorded(&self) -> Vec<RecordedProcess> {
        let recorded = self.recordings.iter().filter_map(|(pid, recording)| match recording {
            Recording::Recorded { files } => {
                Some(RecordedProcess { pid: *pid, command: system::command(*pid), files: files.clone() })
            }
            _ => None,
        });
        recorded.collect()
    }
}
