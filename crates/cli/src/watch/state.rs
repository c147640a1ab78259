//! The state that the terminal shows. `State::after` depends only on the state and an event.

use std::collections::{HashMap, VecDeque};

use ratatui::{
    crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, MouseButton, MouseEventKind},
    layout::Rect,
};

use super::{
    live::{DeviceView, RecordingView},
    sample::Sample,
};
use crate::machine::Gpu;

/// The number of readings of a GPU that are kept, which is more than a terminal has columns.
const MOST_READINGS: usize = 1_000;

#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is switched by a key of its own")]
pub(crate) struct State {
    pub(crate) sample: Option<Sample>,
    /// The graphs of the GPUs, by NVML's index.
    pub(crate) gpus: HashMap<u32, Readings>,
    /// The selected row.
    pub(crate) selected: usize,
    pub(crate) shows: Shows,
    pub(crate) shows_help: bool,
    pub(crate) is_paused: bool,
    pub(crate) is_over: bool,
    /// True if the user wants to return to the shell for a while.
    pub(crate) is_suspended: bool,
    /// The area of the rows, and the index of the first visible one.
    pub(crate) rows_at: (Rect, usize),
}

/// The memory in use on a GPU over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readings {
    /// The bytes in use at each reading, the latest last; `None` if they could not be read.
    pub(crate) used: VecDeque<Option<u64>>,
    /// The highest of all readings.
    pub(crate) most: u64,
}

/// Which places of a recording are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shows {
    /// The places that are in use.
    #[default]
    Now,
    /// The places at the peak.
    Peak,
}

/// A row of the list: a process on a GPU, another recorded process on one of its devices, or another dormant one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessRow {
    pub(crate) pid: Option<u32>,
    pub(crate) gpu: Option<u32>,
    pub(crate) user: Option<String>,
    pub(crate) command: Option<String>,
    pub(crate) used: Option<u64>,
    /// True if `used` comes from the recording, which does not include the context and other memory that the recording
    /// does not see.
    pub(crate) is_of_recording: bool,
    pub(crate) is_visible: bool,
    pub(crate) is_dormant: bool,
    /// The index of the recording in the sample.
    pub(crate) recording: Option<usize>,
}

/// Returns NVML's index of a program's device. The UUID identifies the GPU.
pub(super) fn index_of(device: &DeviceView, gpus: &[Gpu]) -> Option<u32> {
    let bare = |uuid: &str| uuid.trim_start_matches("GPU-").to_owned();
    let uuid = bare(device.uuid.as_deref()?);
    gpus.iter().find(|gpu| gpu.uuid.as_deref().map(bare).as_ref() == Some(&uuid))?.index
}

impl State {
    /// Takes over a new reading.
    pub(crate) fn with(mut self, sample: Sample) -> Self {
        if self.is_paused {
            return self;
        }
        for gpu in &sample.machine.gpus {
            let Some(index) = gpu.index else { continue };
            let readings = self.gpus.entry(index).or_default();
            readings.used.push_back(gpu.memory.used_bytes);
            readings.most = readings.most.max(gpu.memory.used_bytes.unwrap_or(0));
            if readings.used.len() > MOST_READINGS {
                readings.used.pop_front();
            }
        }
        // Keep the same process selected.
        let selected = self.rows().get(self.selected).map(|row| (row.pid, row.gpu));
        let is_first = self.sample.is_none();
        self.sample = Some(sample);
        let rows = self.rows();
        let same = rows.iter().position(|row| Some((row.pid, row.gpu)) == selected);
        let recorded = || rows.iter().position(|row| row.recording.is_some()).filter(|_| is_first);
        self.selected = same.or_else(recorded).unwrap_or(self.selected).min(rows.len().saturating_sub(1));
        self
    }

    /// Handles a key or the mouse.
    pub(crate) fn after(mut self, event: &Event) -> Self {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.key(*key),
            Event::Mouse(mouse) => match mouse.kind {
                MouseEventKind::ScrollDown => self.move_by(1),
                MouseEventKind::ScrollUp => self.move_by(-1),
                MouseEventKind::Down(MouseButton::Left) => {
                    let (area, first) = self.rows_at;
                    let row = first + usize::from(mouse.row.saturating_sub(area.y));
                    if area.contains((mouse.column, mouse.row).into()) && row < self.rows().len() {
                        self.selected = row;
                    }
                }
                _ => {}
            },
            _ => {}
        }
        self
    }

    fn key(&mut self, key: KeyEvent) {
        if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
            let is_ctrl = |letter| key.code == KeyCode::Char(letter) && key.modifiers.contains(KeyModifiers::CONTROL);
            self.is_over |= is_ctrl('c');
            self.is_suspended |= is_ctrl('z');
            return;
        }
        let was_help = std::mem::take(&mut self.shows_help);
        match key.code {
            KeyCode::Char('q') => self.is_over = true,
            // Esc first closes the help.
            KeyCode::Esc => self.is_over = !was_help,
            KeyCode::Char('?' | 'h') => self.shows_help = !was_help,
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Tab => self.shows = if self.shows == Shows::Now { Shows::Peak } else { Shows::Now },
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            KeyCode::PageDown => self.move_by(10),
            KeyCode::PageUp => self.move_by(-10),
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.move_by(isize::MAX),
            _ => self.shows_help = was_help,
        }
    }

    fn move_by(&mut self, rows: isize) {
        let last = self.rows().len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(rows).min(last);
    }

    /// Returns the processes by memory, then the recordings of other processes.
    pub(crate) fn rows(&self) -> Vec<ProcessRow> {
        let Some(sample) = &self.sample else { return Vec::new() };
        let of_pid = |pid: u32| sample.recordings.iter().position(|recording| recording.pid == Some(pid));
        let gpus = &sample.machine.gpus;
        // If the driver does not report how much the process uses on a GPU, the recording's value is shown.
        let recorded = |recording: Option<usize>, gpu: u32| {
            let devices = &sample.recordings.get(recording?)?.devices;
            devices.iter().find(|device| index_of(device, gpus) == Some(gpu)).map(|device| device.used_bytes)
        };
        let mut rows: Vec<ProcessRow> = sample
            .usage
            .processes
            .iter()
            .map(|process| {
                let recording = of_pid(process.pid).filter(|_| process.is_visible != Some(false));
                ProcessRow {
                    pid: Some(process.pid),
                    gpu: Some(process.gpu),
                    user: process.user.clone(),
                    command: process.command.clone(),
                    used: process.used_bytes.or_else(|| recorded(recording, process.gpu)),
                    is_of_recording: process.used_bytes.is_none(),
                    is_visible: process.is_visible != Some(false),
                    is_dormant: process.recording == crate::machine::Recording::Dormant,
                    recording,
                }
            })
            .collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.used));
        for (at, recording) in sample.recordings.iter().enumerate() {
            if rows.iter().any(|row| row.recording == Some(at)) {
                continue;
            }
            let row = ProcessRow {
                pid: recording.pid,
                command: recording.command.clone(),
                is_of_recording: true,
                is_visible: true,
                recording: Some(at),
                ..ProcessRow::default()
            };
            let on = |device: &DeviceView| ProcessRow {
                gpu: index_of(device, gpus),
                used: Some(device.used_bytes),
                ..row.clone()
            };
            let devices: Vec<_> = recording.devices.iter().filter(|device| device.peak_bytes > 0).map(on).collect();
            rows.extend(if devices.is_empty() { vec![row] } else { devices });
        }
        rows.extend(sample.usage.dormant_besides.iter().map(|dormant| ProcessRow {
            pid: Some(dormant.pid),
            command: dormant.command.clone(),
            is_visible: true,
            is_dormant: true,
            ..ProcessRow::default()
        }));
        rows
    }

    /// Returns the recording of the selected row.
    pub(crate) fn recording(&self) -> Option<&RecordingView> {
        let at = self.rows().get(self.selected)?.recording?;
        self.sample.as_ref()?.recordings.get(at)
    }
}
