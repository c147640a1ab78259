//! A recording that the exporter follows.

use std::{
    cmp::Reverse,
    collections::HashMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpumem_core::{export::shortened, model::Device};
use gpumem_metrics::windows::Windows;
use gpumem_recording::Totals;

use super::{
    live_memory::{WIDEST, live_memory},
    sample::{Counts, DeviceSample, DriverSample, GpuId, GpuSample, LiveSample, ProcessId, RecordingSample},
};
use crate::{failure::Failure, history::taken_now, machine, run::control::is_stopped, watch::Live};

/// At most this many devices of a recording are exported, those with the highest peaks.
const MOST_DEVICES: usize = 16;
/// After a process has ended, the rest of its events may still be added to its recording.
pub(super) const READ_AFTER_END: Duration = Duration::from_secs(10);
/// A program writes to its recording at least once a second. If nothing new arrives for this long, the recording has
/// ended or cannot be written.
pub(super) const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// A recording that is followed.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) live: Live,
    pub(super) pid: u32,
    pub(super) started: Option<u64>,
    pub(super) process: ProcessId,
    pub(super) windows: Vec<(Device, Windows)>,
    /// `None` while its process writes it.
    pub(super) ended: Option<Ended>,
    /// True if the ring of the process is visible here. The ring of a process in a container is not.
    sees_ring: bool,
    /// True if lines are looked up for addresses. This is done only in files named by a process of the same user.
    looks_up: bool,
    /// True if the user has been told why this recording is not exported.
    pub(super) is_warned: bool,
}

/// The end of a recording: its process has ended, or no longer writes it.
#[derive(Debug)]
pub(super) struct Ended {
    /// The moment at which the end was noticed.
    pub(super) at: Instant,
    /// True if nothing is left in the ring of the process.
    pub(super) has_all: bool,
    /// The collectors that were handed the complete recording. `arrived` contains those that received it.
    pub(super) handed: Vec<u32>,
    pub(super) arrived: Vec<u32>,
}

impl Ended {
    pub(super) fn now() -> Self {
        Self { at: Instant::now(), has_all: false, handed: Vec::new(), arrived: Vec::new() }
    }

    /// Returns whether nothing more will be read.
    pub(super) fn is_complete(&self) -> bool {
        self.has_all || self.at.elapsed() > READ_AFTER_END
    }

    pub(super) fn hand_to(&mut self, Collector(collector): Collector) {
        if self.is_complete() {
            self.handed.push(collector);
        }
    }
}

/// The id of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Collector(pub(super) u32);

impl Followed {
    pub(super) fn is_of(&self, pid: u32, file: &Path) -> bool {
        self.pid == pid && self.live.path() == file
    }

    pub(super) fn new(file: PathBuf, pid: u32, process: ProcessId) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Self {
            live: Live::of_recording(file),
            pid,
            started: machine::start_time(pid),
            process,
            windows: Vec::new(),
            ended: None,
            sees_ring: machine::shares_memory(pid),
            looks_up: machine::uid(pid) == Some(own),
            is_warned: false,
        }
    }

    /// Returns whether the process runs, but nothing new could be read for too long.
    pub(super) fn is_silent(&self) -> bool {
        self.ended.is_none() && self.live.latest.elapsed() > LONGEST_SILENCE
    }

    pub(super) fn is_seen(&self) -> bool {
        self.live.is_read() && !self.is_silent()
    }

    /// Returns a message with the reason when the recording is no longer exported, and another when it is exported
    /// again.
    pub(super) fn news(&mut self) -> Option<String> {
        if !self.is_warned && self.is_silent() {
            self.is_warned = true;
            return Some(hidden(self.live.path(), self.pid, self.live.error()).to_string());
        }
        let is_again = self.is_warned && self.ended.is_none() && self.is_seen();
        self.is_warned &= !is_again;
        is_again.then(|| format!("{} is exported again", recording_of(self.live.path(), self.pid)))
    }

    pub(super) fn read(&mut self, most: u64) {
        // Look at the ring first: `gpumem run` adds its contents to the file, and then removes it.
        let left = self.ended.as_ref().filter(|ended| !ended.has_all).map(|_| self.live.left_in_ring());
        self.live.read(most);
        if let (Some(left), Some(ended), true) = (left, &mut self.ended, self.live.is_read()) {
            match left {
                Ok(Some(left)) if !self.live.is_finished() => {
                    self.live.read_ring(&left);
                    ended.has_all = true;
                }
                // The process is still filling the ring, or the ring cannot be read.
                Err(_) => {}
                Ok(_) => ended.has_all = self.live.is_finished() || self.sees_ring,
            }
        }
        // A stopped process cannot write, and its values are right.
        if self.live.latest.elapsed() > LONGEST_SILENCE / 2 && is_stopped(self.pid) {
            self.live.latest = Instant::now();
        }
        let devices = self.live.follower().ledger().stats();
        let peaks = self.live.totals().peaks;
        for device in devices.iter().map(|stats| stats.device) {
            let recent = self.live.take_recent_peak(device);
            let peak = peaks.iter().find(|peak| peak.device == device).map_or(0, |peak| peak.bytes);
            let windows = self.windows_of(device);
            // A file that replaced an earlier one contains the peak since the recording started, but not its events.
            windows.note(if peak > windows.highest() { peak } else { recent });
        }
    }

    pub(super) fn windows_of(&mut self, device: Device) -> &mut Windows {
        let at = self.windows.iter().position(|(known, _)| *known == device).unwrap_or_else(|| {
            self.windows.push((device, Windows::default()));
            self.windows.len() - 1
        });
        &mut self.windows[at].1
    }

    pub(super) fn sample(
        &mut self,
        collector: Collector,
        gpus: &[GpuSample],
        (places, most_text): (usize, u64),
    ) -> RecordingSample {
        let is_running = self.ended.is_none();
        if let Some(ended) = &mut self.ended {
            ended.hand_to(collector);
        }
        if is_running && self.looks_up {
            self.live.look_up_lines();
        }
        let mut devices = self.live.follower().ledger().stats();
        let totals = self.live.totals();
        let peak_of = |device| totals.peaks.iter().find(|peak| peak.device == device).map(|peak| peak.bytes);
        devices.sort_by_key(|stats| Reverse(peak_of(stats.device)));
        devices.truncate(MOST_DEVICES);
        let mut lives = if is_running { live_memory(self.live.follower(), places, most_text) } else { HashMap::new() };
        let has_only_peaks = self.live.follower().file_start().is_peaks;
        let devices = devices.into_iter().map(|stats| {
            let device = stats.device;
            let interval_peak = self.windows_of(device).collect(collector.0, stats.on_device.bytes.current);
            let driver = stats
                .driver_measured_by
                .map(|measured_by| DriverSample { measured_by, kinds: taken_now(&stats).collect() });
            let uuid = self.live.follower().definitions().device(device).and_then(|known| known.uuid.clone());
            DeviceSample {
                gpu: gpu_of(uuid, device, gpus),
                peak: peak_of(device),
                interval_peak: Some(interval_peak).filter(|_| !has_only_peaks),
                live: is_running.then(|| LiveSample { driver, ..lives.remove(&device).unwrap_or_default() }),
            }
        });
        let devices = devices.collect();
        RecordingSample { process: self.process.clone(), counts: self.counts(), devices }
    }

    pub(super) fn counts(&self) -> Counts {
        let Totals { rejected, obtained, lost, .. } = self.live.totals();
        Counts { rejected, retried: obtained, lost: lost + self.live.unread() }
    }
}

fn recording_of(path: &Path, pid: u32) -> String {
    format!("the recording `{}` of process {pid}", path.display())
}

/// Returns the message that the recording of a running process is not exported. Without an error, the reason is that
/// the process no longer writes it.
pub(super) fn hidden(path: &Path, pid: u32, error: Option<&str>) -> Failure {
    let (cause, next) = match error {
        Some(error) => (error, "if another program has changed it, record the program again"),
        None => ("it contains nothing new", "the program has printed the reason, for example a full disk"),
    };
    Failure::new(format!("{} is not exported", recording_of(path, pid)), cause, next)
}

/// Returns the GPU with this UUID. The recording's UUID may lack the part before the first dash.
fn gpu_of(uuid: Option<String>, device: Device, gpus: &[GpuSample]) -> GpuId {
    let is_it = |known: &str| {
        let uuid = uuid.as_deref().unwrap_or_default();
        known == uuid || known.split_once('-').is_some_and(|(_, known)| known == uuid)
    };
    let known = gpus.iter().find(|gpu| gpu.gpu.uuid.as_deref().is_some_and(is_it)).map(|gpu| gpu.gpu.clone());
    let ordinal = Some(device.ordinal).filter(|_| uuid.is_none());
    known.unwrap_or_else(|| GpuId { id: None, uuid: uuid.map(|uuid| shortened(&uuid, WIDEST)), ordinal })
}
