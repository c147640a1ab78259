//! Tests of states and their drawings, with fixed data.

use std::time::Duration;

use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind},
};

use super::{
    draw::{Looks, draw},
    live::{DeviceView, PlaceView, RecordingView},
    sample::Sample,
    state::{Shows, State},
};
use crate::machine::{Dormant, Gpu, Machine, Memory, NotRead, Process, Recording, Usage};

const GIB: u64 = 1 << 30;
const MIB: i64 = 1 << 20;

fn sample(used: u64) -> Sample {
    let gpu = |index: u32, used: Option<u64>| Gpu {
        index: Some(index),
        name: Some("NVIDIA H200".to_owned()),
        uuid: Some(format!("GPU-{index}")),
        memory: Memory { total_bytes: Some(140 * GIB), used_bytes: used, free_bytes: None, reserved_bytes: None },
        ..Gpu::default()
    };
    let process = |pid: u32, gpu: u32, used: Option<u64>, recording: Recording| Process {
        gpu,
        pid,
        user: (pid != 99).then(|| "ada".to_owned()),
        command: (pid != 99).then(|| format!("python program-{pid}.py --epochs 3")),
        used_bytes: used,
        kind: "compute",
        is_visible: Some(pid != 99),
        recording,
    };
    let place = |scope: &[&str], place: &str, mib: i64| PlaceView {
        scope: scope.iter().map(|&name| name.to_owned()).collect(),
        place: place.to_owned(),
        bytes: mib * MIB,
    };
    let device = DeviceView {
        device: 0,
        uuid: Some("GPU-0".to_owned()),
        used_bytes: 300 << 20,
        peak_bytes: 437 << 20,
        driver_bytes: Some(526 << 20),
        now: vec![place(&["train", "step"], "src/adam.rs:30", 200), place(&[], "cuBLAS", 100)],
        at_peak: vec![place(&["train", "backward"], "src/model.rs:77", 437)],
        ..DeviceView::default()
    };
    let recordings = [(7, 12.5), (8, 0.0)].map(|(pid, seconds)| RecordingView {
        file: format!("/home/ada/runs/train.pid{pid}.capture").into(),
        pid: Some(pid),
        command: Some("python train.py".to_owned()),
        is_running: true,
        seconds: Some(seconds),
        devices: if pid == 7 { vec![device.clone()] } else { Vec::new() },
        ..RecordingView::default()
    });
    let processes = vec![
        process(7, 0, Some(used), Recording::Recorded { files: Vec::new() }),
        process(99, 0, None, Recording::Unknown),
        process(6, 1, Some(2 * GIB), Recording::Dormant),
    ];
    Sample {
        time: 0.0,
        machine: Machine { gpus: vec![gpu(0, Some(used)), gpu(1, None)], ..Machine::default() },
        usage: Usage { processes, ..Usage::default() },
        recordings: recordings.into(),
    }
}

fn state() -> State {
    (0..10).fold(State::default(), |state, step| state.with(sample(step * 14 * GIB)))
}

fn drawn(state: &mut State, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let looks = Looks { has_colours: true, every: Duration::from_secs(1) };
    terminal.draw(|frame| draw(frame, state, looks)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

fn key(code: KeyCode) -> Event {
    Event::Key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn press(state: State, codes: &[KeyCode]) -> State {
    codes.iter().fold(state, |state, code| state.after(&key(*code)))
}

#[test]
fn a_terminal_of_80_columns() {
    let lines = drawn(&mut state(), 80, 24).join("\n");
    let expected = "\
gpumem watch  every 1 s
GPU 0  NVIDIA H200  126 GiB of 140 GiB (90 %)  most 126 GiB
";
    assert!(lines.starts_with(expected), "{lines}");
    for text in [
        "GPU 1  NVIDIA H200  - of 140 GiB  most -\n",
        "     pid  user       GPU        used  command\n",
        "       7  ada          0     126 GiB  ● python program-7.py --epochs 3\n",
        "      99  -            0           -  (not visible here) -\n",
        "       6  ada          1       2 GiB  ○ python program-6.py --epochs 3\n",
        "       8  -            -           -  ● python train.py\n",
        "● /home/ada/runs/train.pid7.capture  12.5 s\n",
        "device 0: 300 MiB in use, peak 437 MiB, driver 526 MiB · in use now\n",
        "    200 MiB  66 % ██████████ train > step: src/adam.rs:30\n",
        "    100 MiB  33 % █████      cuBLAS\n",
    ] {
        assert!(lines.contains(text), "{text}\n{lines}");
    }
    assert!(lines.ends_with("q end  ↑↓ select  Tab now/peak  p pause  ? help"), "{lines}");
}

/// CUDA's ordinal in a program differs from NVML's index if the program sees other devices.
#[test]
fn the_gpu_of_a_programs_device() {
    let mut other = sample(GIB);
    other.recordings[0].devices[0].uuid = Some("GPU-1".to_owned());
    let lines = drawn(&mut State::default().with(other), 80, 24).join("\n");
    assert!(lines.contains("\nGPU 1, device 0: 300 MiB in use"), "{lines}");
}

#[test]
fn small_and_large_terminals() {
    let small = drawn(&mut state(), 40, 12).join("\n");
    for text in [
        "GPU 0  126 GiB of 140 GiB (90 %)",
        "     pid        used  command\n",
        "       7     126 GiB  ● python",
        "q end",
    ] {
        assert!(small.contains(text), "{text}\n{small}");
    }
    let large = drawn(&mut state(), 200, 50);
    assert_eq!(large.len(), 50);
    assert!(large.join("\n").contains("train > step: src/adam.rs:30"));
    // Without room, nothing is drawn, and nothing panics.
    for (width, height) in [(1, 1), (5, 3), (10, 2), (80, 4), (20, 100), (300, 5)] {
        let mut state = press(state(), &[KeyCode::Char('?')]);
        assert_eq!(drawn(&mut state, width, height).len(), usize::from(height));
        drawn(&mut State::default(), width, height);
    }
}

#[test]
fn what_cannot_be_read_is_said() {
    let mut failed = sample(GIB);
    failed.machine.not_read = vec![NotRead::error("GPU 1", &"it is lost")];
    failed.recordings[0].error = Some("it is damaged".to_owned());
    (failed.recordings[0].lost_events, failed.recordings[0].unread_events) = (Some(1), Some(2));
    let lines = drawn(&mut State::default().with(failed), 80, 24).join("\n");
    for text in [
        "  GPU 1: it is lost\n",
        "it cannot be read: it is damaged\n",
        "1 event was lost: ",
        "2 events were not read in time: ",
    ] {
        assert!(lines.contains(text), "{text}\n{lines}");
    }
    let empty = drawn(&mut State::default().with(Sample::default()), 80, 24).join("\n");
    assert!(empty.contains("no process is listed here, and none is recorded"), "{empty}");
}

#[test]
fn keys_change_the_state() {
    // The first recorded process is selected.
    assert_eq!(state().selected, 0);
    assert_eq!(press(state(), &[KeyCode::Down, KeyCode::Char('j'), KeyCode::Up]).selected, 1);
    assert_eq!(press(state(), &[KeyCode::End]).selected, 3);
    assert_eq!(press(state(), &[KeyCode::PageDown, KeyCode::PageDown, KeyCode::Home]).selected, 0);
    assert_eq!(press(state(), &[KeyCode::Tab]).shows, Shows::Peak);
    assert_eq!(press(state(), &[KeyCode::Tab, KeyCode::Tab]).shows, Shows::Now);
    for end in [KeyCode::Char('q'), KeyCode::Esc] {
        assert!(press(state(), &[end]).is_over);
    }
    let suspended = state().after(&Event::Key(KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL)));
    assert!(suspended.is_suspended && !suspended.is_over);
    let interrupted = Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(state().after(&interrupted).is_over);
    // Keys pressed with Ctrl are not the plain keys: a terminal sends Ctrl-Space for a 0 byte.
    for code in [' ', 'q', 'p'] {
        let with_ctrl = state().after(&Event::Key(KeyEvent::new(KeyCode::Char(code), KeyModifiers::CONTROL)));
        assert!(!with_ctrl.is_over && !with_ctrl.is_paused, "{code}");
    }
    // Esc first closes the help.
    let helped = press(state(), &[KeyCode::Char('?')]);
    assert!(helped.shows_help && !helped.is_over);
    let closed = press(helped, &[KeyCode::Esc]);
    assert!(!closed.shows_help && !closed.is_over);
    assert!(!press(state(), &[KeyCode::Char('c'), KeyCode::Char('x'), KeyCode::F(1)]).is_over);
}

#[test]
fn a_stopped_state_keeps_its_sample() {
    let stopped = press(state(), &[KeyCode::Char('p')]);
    let readings = stopped.gpus[&0].used.len();
    let later = stopped.with(sample(GIB));
    assert_eq!(later.gpus[&0].used.len(), readings);
    assert_eq!(press(later, &[KeyCode::Char(' ')]).with(sample(GIB)).gpus[&0].used.len(), readings + 1);
}

#[test]
fn the_same_process_stays_selected() {
    let state = press(state(), &[KeyCode::Down]);
    let pid = state.rows()[state.selected].pid;
    assert_eq!(pid, Some(6));
    let mut other = sample(GIB);
    other.usage.processes.remove(0);
    let state = state.with(other);
    assert_eq!(state.rows()[state.selected].pid, pid);
    let state = state.with(Sample::default());
    assert_eq!((state.selected, state.rows().len()), (0, 0));
}

#[test]
fn the_mouse_selects() {
    let mut state = state();
    let lines = drawn(&mut state, 80, 24);
    let row = lines.iter().position(|line| line.contains("program-6.py")).unwrap();
    let at = |row: usize, kind| {
        Event::Mouse(MouseEvent { kind, column: 12, row: u16::try_from(row).unwrap(), modifiers: KeyModifiers::NONE })
    };
    let click = MouseEventKind::Down(MouseButton::Left);
    let clicked = state.clone().after(&at(row, click));
    assert_eq!(clicked.rows()[clicked.selected].pid, Some(6));
    // A click outside the list selects nothing.
    assert_eq!(state.clone().after(&at(0, click)).selected, state.selected);
    assert_eq!(state.clone().after(&at(row, MouseEventKind::ScrollDown)).selected, state.selected + 1);
}

/// In a container, the driver may list no processes. The recording shows where a process allocates, and how much.
#[test]
fn what_the_driver_does_not_list_is_known_from_the_recording() {
    let mut other = sample(GIB);
    other.usage.processes.clear();
    other.usage.dormant_besides = vec![Dormant { pid: 5, command: Some("python dormant.py".to_owned()) }];
    let second = DeviceView { uuid: Some("1".to_owned()), peak_bytes: 1, ..DeviceView::default() };
    other.recordings[0].devices.push(second);
    let lines = drawn(&mut State::default().with(other), 80, 24).join("\n");
    for text in [
        "       7  -            0   ≥ 300 MiB  ● python train.py\n",
        "       7  -            1       ≥ 0 B  ● python train.py\n",
        "       8  -            -           -  ● python train.py\n",
        "       5  -            -           -  ○ python dormant.py\n",
    ] {
        assert!(lines.contains(text), "{text}\n{lines}");
    }
    // The driver lists a process without its memory.
    let mut unknown = sample(GIB);
    unknown.usage.processes[0].used_bytes = None;
    let lines = drawn(&mut State::default().with(unknown), 80, 24).join("\n");
    assert!(lines.contains("       7  ada          0   ≥ 300 MiB  ● python program-7"), "{lines}");
}

#[test]
fn a_small_screen_keeps_the_places() {
    for (width, height) in [(80, 8), (40, 8), (80, 10), (60, 12), (80, 16)] {
        let lines = drawn(&mut state(), width, height).join("\n");
        assert!(lines.contains("adam.rs:30") && lines.contains("       7 "), "{width} × {height}:\n{lines}");
    }
    // With many devices, those that use most memory show their places.
    let mut many = sample(GIB);
    let device = many.recordings[0].devices[0].clone();
    many.recordings[0].devices = (0..8)
        .map(|device_of| DeviceView { device: device_of, used_bytes: u64::from(device_of) << 20, ..device.clone() })
        .collect();
    let lines = drawn(&mut State::default().with(many), 80, 16).join("\n");
    assert!(
        lines.contains("device 7: 7 MiB in use") && lines.contains("adam.rs:30") && lines.contains(" more devices"),
        "{lines}"
    );
}

/// A terminal would execute some characters, and others reverse the text.
#[test]
fn names_are_shown_and_not_obeyed() {
    let name = "x\u{1b}[31m\n\r\t\u{7f}\u{9b}\u{202e}\u{2066}\u{200b}\u{2028}y".to_owned();
    let mut hostile = sample(GIB);
    let some = || Some(name.clone());
    hostile.machine.gpus[0].name = some();
    hostile.machine.not_read = vec![NotRead::error(name.clone(), &name)];
    (hostile.usage.processes[0].user, hostile.usage.processes[0].command) = (some(), some());
    hostile.usage.dormant_besides = vec![Dormant { pid: 5, command: some() }];
    let recording = &mut hostile.recordings[0];
    (recording.file, recording.command, recording.error) = (name.clone().into(), some(), some());
    let device = &mut recording.devices[0];
    for place in device.now.iter_mut().chain(&mut device.at_peak) {
        (place.scope, place.place) = (vec![name.clone()], name.clone());
    }
    for (width, height) in [(300, 40), (80, 24), (40, 12)] {
        for keys in [&[][..], &[KeyCode::Tab]] {
            let mut state = press(State::default().with(hostile.clone()), keys);
            let lines = drawn(&mut state, width, height).join("\n");
            let acts = |c: char| c != '\n' && !gpumem_core::model::is_printable(c);
            assert!(!lines.contains(acts), "{lines:?}");
            assert!(width < 300 || lines.matches("x\\u{1b}[31m\\n").count() > 6, "{lines}");
        }
    }
}
