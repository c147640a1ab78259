//! One reading of everything that is shown.

use std::{
    collections::HashSet,
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::live::{Live, RecordingView};
use crate::machine::{Known, Machine, NotRead, Usage};

/// One reading. The field names are those in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    /// The time of the reading, in seconds since 1970.
    pub(crate) time: f64,
    #[serde(flatten)]
    pub(crate) machine: Machine,
    pub(crate) usage: Usage,
    pub(crate) recordings: Vec<RecordingView>,
}

/// Makes readings from NVML, `/proc` and recordings. The programs themselves are not contacted.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    known: Known,
    lives: Vec<Live>,
    /// The recordings that the user named, which are shown whether or not a process writes them.
    named: Vec<PathBuf>,
}

impl Sampler {
    pub(crate) fn new(named: Vec<PathBuf>) -> Self {
        Self { named, ..Self::default() }
    }

    pub(crate) fn sample(&mut self) -> Sample {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let machine = Machine::read().unwrap_or_else(|why| {
            let not_read = vec![NotRead::error("GPUs", &why)];
            Machine { not_read, ..Machine::default() }
        });
        let usage = Usage::read(&machine, &mut self.known);
        let recordings = self.recordings(&usage, time);
        Sample { time, machine, usage, recordings }
    }

    fn recordings(&mut self, usage: &Usage, now: f64) -> Vec<RecordingView> {
        let running = || usage.recorded.iter().flat_map(|of| of.files.iter().map(move |file| (file, of)));
        let requested: Vec<&PathBuf> = running().map(|(file, _)| file).chain(&self.named).collect();
        let mut kept: HashSet<PathBuf> = HashSet::new();
        self.lives.retain(|live| requested.contains(&&live.path().to_owned()));
        kept.extend(self.lives.iter().map(|live| live.path().to_owned()));
        for file in requested {
            if kept.insert(file.clone()) {
                self.lives.push(Live::new(file.clone()));
            }
        }
        let view = |live: &mut Live| {
            live.read(u64::MAX);
            let mut view = live.view();
            let writer = running().find(|(file, _)| **file == view.file).map(|(_, of)| of);
            view.is_running = writer.is_some();
            // The program continues even without an event.
            if let Some(started) = view.started.filter(|_| view.is_running) {
                view.seconds = Some(view.seconds.unwrap_or_default().max(now - started));
            }
            // In a container, the process has another id.
            view.pid = writer.map(|of| of.pid).or(view.pid);
            view.command = writer.and_then(|of| of.command.clone()).or(view.command);
            view
        };
        self.lives.iter_mut().map(view).collect()
    }
}
