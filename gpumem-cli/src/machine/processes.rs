//! The processes on the GPUs, and which of them are recorded.

use std::{cmp::Reverse, collections::HashMap, path::PathBuf};

use gpumem::report::ProcessKind;
use gpumem_driver::source::machine as library;
use serde::Serialize;

use crate::report::json;

use super::{
    gpus::{Machine, NotRead},
    system,
};

/// A process on one GPU. The names of the fields are those in JSON. An unknown value is `None`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Process {
    /// NVML's number.
    pub(crate) gpu: u32,
    /// The number that the driver reports. In a container it may be a number outside of it.
    pub(crate) pid: u32,
    pub(crate) user: Option<String>,
    pub(crate) command: Option<String>,
    pub(crate) used_bytes: Option<u64>,
    /// The use of the GPU: computing, graphics, or both.
    #[serde(rename = "use")]
    pub(crate) kind: &'static str,
    /// True if the process with this number is the one that the driver means. `None` if that cannot be found out.
    pub(crate) is_visible: Option<bool>,
    pub(crate) recording: Recording,
}

/// A process is recorded, dormant, not recorded, or not visible.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum Recording {
    /// The process is recorded to these files.
    Recorded {
        #[serde(serialize_with = "json::paths")]
        files: Vec<PathBuf>,
    },
    /// It waits for `gpumem start`.
    Dormant,
    /// The process is not recorded.
    None,
    /// It is the process of another user, or not visible here.
    Unknown,
}

/// A process that is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Recorded {
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

/// The memory of a GPU, and how much of it the listed processes have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GpuUse {
    pub(crate) gpu: u32,
    pub(crate) used_bytes: Option<u64>,
    /// `None` if the memory of one of them is not known.
    pub(crate) listed_bytes: Option<u64>,
    /// The memory in use that is not listed: that of processes that the driver does not show here, and that of no
    /// process.
    pub(crate) not_listed_bytes: Option<u64>,
}

/// The processes on all GPUs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Usage {
    /// The processes by GPU, those with the most memory first.
    pub(crate) processes: Vec<Process>,
    pub(crate) gpus: Vec<GpuUse>,
    /// Processes that are recorded and that the driver does not list.
    pub(crate) recorded_besides: Vec<Recorded>,
    /// Processes that wait for `gpumem start` and that the driver does not list.
    pub(crate) dormant_besides: Vec<Dormant>,
    pub(crate) not_read: Vec<NotRead>,
    /// All processes that are recorded.
    #[serde(skip)]
    pub(crate) recorded: Vec<Recorded>,
}

impl Usage {
    /// Reads the processes on these GPUs. Recorded and dormant processes are found without any GPU.
    pub(crate) fn read(machine: &Machine, system: &mut Known) -> Self {
        let mut all = Self::default();
        for gpu in &machine.gpus {
            let (Some(index), true) = (gpu.index, gpu.uuid.is_some()) else { continue };
            match library::processes_on(index) {
                Ok(processes) => all.add(index, gpu.memory.used_bytes, processes, system),
                Err(why) => all.not_read.push(NotRead::error(format!("the processes on GPU {index}"), &why)),
            }
        }
        let listed =
            |pid: u32| all.processes.iter().any(|process| process.pid == pid && process.is_visible != Some(false));
        let (recorded, mut dormant) = of_gpumem();
        dormant.retain(|dormant| !listed(dormant.pid));
        all.recorded_besides = recorded.iter().filter(|recorded| !listed(recorded.pid)).cloned().collect();
        (all.recorded, all.dormant_besides) = (recorded, dormant);
        all
    }

    fn add(&mut self, gpu: u32, used: Option<u64>, processes: Vec<gpumem::report::GpuProcess>, system: &mut Known) {
        let used_by = processes.iter().map(|process| Some(process.used?.get()));
        let listed_bytes: Option<u64> = used_by.sum();
        let not_listed_bytes = used.zip(listed_bytes).map(|(used, listed)| used.saturating_sub(listed));
        self.gpus.push(GpuUse { gpu, used_bytes: used, listed_bytes, not_listed_bytes });
        let mut processes: Vec<_> = processes
            .into_iter()
            .map(|process| {
                let of_system = system.process(process.pid);
                let is_visible = of_system.uses_driver;
                let seen = Some(&of_system).filter(|_| is_visible != Some(false));
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
                    recording: seen.map_or(Recording::Unknown, |seen| seen.recording.clone()),
                }
            })
            .collect();
        processes.sort_by_key(|process| (Reverse(process.used_bytes), process.pid));
        self.processes.extend(processes);
    }
}

/// The system's data of a process.
#[derive(Clone, Debug)]
struct OfSystem {
    began: u64,
    user: Option<String>,
    command: Option<String>,
    uses_driver: Option<bool>,
    recording: Recording,
}

/// The known processes of the system. The system is asked again only for values that may have changed.
#[derive(Debug, Default)]
pub(crate) struct Known {
    processes: HashMap<u32, OfSystem>,
}

impl Known {
    /// Returns the process with this number. Nothing else is known of a process that is not visible here.
    fn process(&mut self, pid: u32) -> OfSystem {
        let Some(began) = system::began(pid) else {
            self.processes.remove(&pid);
            let recording = Recording::Unknown;
            return OfSystem { began: 0, user: None, command: None, uses_driver: Some(false), recording };
        };
        let known = self.processes.get(&pid).filter(|known| known.began == began).cloned();
        let process = OfSystem {
            recording: recording_of(pid),
            ..known.unwrap_or_else(|| OfSystem {
                began,
                user: system::user(pid),
                command: system::command(pid),
                uses_driver: system::uses_driver(pid),
                recording: Recording::Unknown,
            })
        };
        self.processes.insert(pid, process.clone());
        process
    }
}

fn recording_of(pid: u32) -> Recording {
    match system::open_recordings(pid) {
        Ok(files) if !files.is_empty() => Recording::Recorded { files },
        Ok(_) if system::is_dormant(pid) => Recording::Dormant,
        Ok(_) => Recording::None,
        Err(_) => Recording::Unknown,
    }
}

/// All processes of this user that are recorded.
#[cfg(feature = "export")]
pub(crate) fn recorded() -> Vec<Recorded> {
    of_gpumem().0
}

/// All processes of this user that are recorded, and those that wait for `gpumem start`, whether or not the driver lists them.
fn of_gpumem() -> (Vec<Recorded>, Vec<Dormant>) {
    let (mut recorded, mut dormant): (Vec<Recorded>, Vec<Dormant>) = Default::default();
    for pid in system::pids() {
        let Ok(files) = system::open_recordings(pid) else { continue };
        if !files.is_empty() {
            recorded.push(Recorded { pid, command: system::command(pid), files });
        } else if system::is_dormant(pid) {
            dormant.push(Dormant { pid, command: system::command(pid) });
        }
    }
    (recorded, dormant)
}
