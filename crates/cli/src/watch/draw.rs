//! Draws a state.

use std::time::Duration;

use gpumem_core::{
    export::{Amounts, shortened, shortened_command},
    model::{Bytes, one_line},
    report::{counted, path_in_words},
};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style, Stylize},
    text::{Line, Span},
    widgets::{Block, Clear, Paragraph, Sparkline},
};

use super::{
    live::{DeviceView, RecordingView},
    state::{ProcessRow, Shows, State, index_of},
};
use crate::{history::in_words, machine::Gpu};

const HELP: &[(&str, &str)] = &[
    ("q, Ctrl-C", "end"),
    ("↑ ↓ j k, wheel, click", "select a process"),
    ("Tab", "memory in use now, or at the peak"),
    ("p, Space", "pause and continue"),
    ("Ctrl-Z", "back to the shell, until fg"),
    ("?", "this help"),
];

/// The settings of the drawing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Looks {
    /// True if colours are shown: `NO_COLOR` is not set.
    pub(crate) has_colours: bool,
    pub(crate) every: Duration,
}

impl Looks {
    fn colour(self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }
}

/// Draws the state, and notes in it where the rows are.
pub(crate) fn draw(frame: &mut Frame<'_>, state: &mut State, looks: Looks) {
    let area = frame.area();
    let rows = state.rows();
    let gpus = state.sample.as_ref().map(|sample| sample.machine.gpus.clone()).unwrap_or_default();
    let [top, middle, bottom] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)]).areas(area);
    header(frame, top, state, looks);
    frame.render_widget(footer(area.width), bottom);
    // A recording gets half of the lines below the GPUs, but at least enough for its name, a device and two places. The
    // list of processes gets at least three lines, or two on a small screen.
    let height = usize::from(middle.height);
    let (of_recording, of_rows) = match state.recording() {
        Some(_) => (4, if height < 9 { 2 } else { 3 }),
        None => (0, 4),
    };
    let shown = gpus.len().min(height.saturating_sub(of_recording + of_rows).max(1));
    let needed = rows.len().clamp(1, 8) + 1 + if state.recording().is_some() { 8 } else { 0 };
    let graph =
        height.saturating_sub(needed).checked_div(shown).unwrap_or(0).saturating_sub(1).min((height / 8).max(6));
    let of_gpus = u16::try_from(shown * (1 + graph)).unwrap_or(u16::MAX);
    let rest = middle.height.saturating_sub(of_gpus);
    let of_list = match state.recording() {
        Some(_) => {
            let rest = usize::from(rest);
            let most = (rest / 2).max(of_rows).min(rest.saturating_sub(of_recording).max(of_rows)).min(rest);
            u16::try_from((rows.len() + 1).min(most)).unwrap_or(u16::MAX)
        }
        None => rest,
    };
    let [above, list, below] =
        Layout::vertical([Constraint::Length(of_gpus), Constraint::Length(of_list), Constraint::Fill(1)]).areas(middle);
    let parts = Layout::vertical(vec![Constraint::Length(u16::try_from(1 + graph).unwrap_or(1)); shown]).split(above);
    for (gpu, part) in gpus.iter().zip(parts.iter()) {
        draw_gpu(frame, *part, gpu, state, looks);
    }
    draw_list(frame, list, &rows, state, looks);
    if let Some(recording) = state.recording() {
        frame.render_widget(Paragraph::new(recording_lines(recording, &gpus, state.shows, below, looks)), below);
    }
    if state.shows_help {
        help(frame, area);
    }
}

fn header(frame: &mut Frame<'_>, area: Rect, state: &State, looks: Looks) {
    let mut spans = vec!["gpumem watch".bold()];
    if state.is_paused {
        spans.push(Span::styled("  paused: p continues", looks.colour(Color::Yellow)));
    } else {
        spans.push(Span::from(format!("  every {}", in_words(looks.every))).dim());
    }
    match &state.sample {
        None => spans.push(Span::from("  reading…").dim()),
        Some(sample) => {
            let failed =
                sample.machine.not_read.iter().chain(&sample.usage.not_read).find(|not_read| not_read.is_error);
            if let Some(not_read) = failed {
                let text = format!("  {}: {}", not_read.what, not_read.why);
                spans.push(Span::styled(one_line(&text).into_owned(), looks.colour(Color::Red)));
            }
        }
    }
    frame.render_widget(Line::from(spans), area);
}

fn footer(width: u16) -> Line<'static> {
    let keys = ["q end", "↑↓ select", "Tab now/peak", "p pause", "? help"];
    let mut text = String::new();
    for key in keys {
        if text.chars().count() + key.chars().count() + 2 <= usize::from(width) {
            text.push_str(if text.is_empty() { "" } else { "  " });
            text.push_str(key);
        }
    }
    Line::from(text).dim()
}

/// Returns bytes as text, such as `38.12 GiB`; `-` if they are not known.
fn amount(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes::new(bytes).to_string())
}

fn draw_gpu(frame: &mut Frame<'_>, area: Rect, gpu: &Gpu, state: &State, looks: Looks) {
    let readings = gpu.index.and_then(|index| state.gpus.get(&index)).cloned().unwrap_or_default();
    let (used, total) = (gpu.memory.used_bytes, gpu.memory.total_bytes);
    let index = gpu.index.map_or_else(|| "-".to_owned(), |index| index.to_string());
    let mut spans = vec![format!("GPU {index}  ").bold()];
    let percent = used.zip(total).map(|(used, total)| format!(" ({} %)", used * 100 / total.max(1)));
    let usage = format!("{} of {}{}", amount(used), amount(total), percent.unwrap_or_default());
    let most = format!("  most {}", amount((!readings.used.iter().all(Option::is_none)).then_some(readings.most)));
    let room = usize::from(area.width).saturating_sub(spans[0].width() + usage.chars().count());
    let name = one_line(gpu.name.as_deref().unwrap_or("not known"));
    if room >= name.chars().count() + 2 + most.chars().count() {
        spans.push(Span::from(format!("{name}  ")));
    }
    let is_full = used.zip(total).is_some_and(|(used, total)| used * 10 >= total * 9);
    spans.push(Span::styled(usage, if is_full { looks.colour(Color::Red).bold() } else { Style::new() }));
    if room >= most.chars().count() {
        spans.push(Span::from(most).dim());
    }
    let [line, graph] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    frame.render_widget(Line::from(spans), line);
    if graph.height > 0 {
        // The latest reading is on the right.
        let width = usize::from(graph.width);
        let known = readings.used.len().min(width);
        let latest = readings.used.iter().skip(readings.used.len() - known).copied();
        let data = std::iter::repeat_n(None, width - known).chain(latest);
        let line = Sparkline::default().data(data).max(total.unwrap_or(readings.most).max(1));
        frame.render_widget(line.style(looks.colour(if is_full { Color::Red } else { Color::Cyan })), graph);
    }
}

fn draw_list(frame: &mut Frame<'_>, area: Rect, rows: &[ProcessRow], state: &mut State, looks: Looks) {
    if area.height == 0 {
        return;
    }
    let width = usize::from(area.width);
    let is_wide = width >= 60;
    let heading = if is_wide {
        format!("{:>8}  {:<10} {:>3} {:>11}  {}", "pid", "user", "GPU", "used", "command")
    } else {
        format!("{:>8} {:>11}  {}", "pid", "used", "command")
    };
    let visible = usize::from(area.height - 1);
    let first = (state.selected + 1).saturating_sub(visible);
    state.rows_at = (Rect { y: area.y + 1, height: area.height - 1, ..area }, first);
    let mut lines = vec![Line::from(heading).bold()];
    if rows.is_empty() && state.sample.is_some() {
        lines.push(Line::from("no process is listed here, and none is recorded").dim());
    }
    for (at, row) in rows.iter().enumerate().skip(first).take(visible) {
        let pid = row.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let least = if row.is_of_recording && row.used.is_some() { "≥ " } else { "" };
        let used = format!("{least}{}", amount(row.used));
        let command = row.command.as_deref().unwrap_or("-");
        let note = match row {
            ProcessRow { recording: Some(_), .. } => "● ",
            ProcessRow { is_dormant: true, .. } => "○ ",
            ProcessRow { is_visible: false, .. } => "(not visible here) ",
            _ => "",
        };
        let before = if is_wide {
            let gpu = row.gpu.map_or_else(|| "-".to_owned(), |gpu| gpu.to_string());
            let owner: String = one_line(row.user.as_deref().unwrap_or("-")).chars().take(10).collect();
            format!("{pid:>8}  {owner:<10} {gpu:>3} {used:>11}  ")
        } else {
            format!("{pid:>8} {used:>11}  ")
        };
        let room = width.saturating_sub(before.chars().count() + note.chars().count());
        let line = Line::from(vec![
            Span::from(before),
            Span::styled(note, looks.colour(Color::Green)),
            Span::from(shortened_command(command, room)),
        ]);
        lines.push(if at == state.selected { line.add_modifier(Modifier::REVERSED) } else { line });
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns NVML's index, such as `GPU 3, `, if it differs from the ordinal in the program.
fn number_of(device: &DeviceView, gpus: &[Gpu]) -> String {
    let index = index_of(device, gpus).filter(|index| *index != device.device);
    index.map(|index| format!("GPU {index}, ")).unwrap_or_default()
}

/// A device of a recording takes a line and two places at least.
const LEAST_OF_DEVICE: usize = 3;

fn recording_lines(
    recording: &RecordingView,
    gpus: &[Gpu],
    shows: Shows,
    area: Rect,
    looks: Looks,
) -> Vec<Line<'static>> {
    let width = usize::from(area.width);
    let file = recording.file.display().to_string();
    let state = if recording.is_running { "● " } else { "ended: " };
    let seconds =
        recording.seconds.map(|seconds| in_words(Duration::from_secs_f64(seconds.max(0.0)))).unwrap_or_default();
    let room = width.saturating_sub(state.chars().count() + seconds.chars().count() + 2);
    let mut lines = vec![Line::from(vec![
        Span::styled(state, looks.colour(Color::Green)),
        Span::from(shortened(&file, room)).bold(),
        Span::from(format!("  {seconds}")).dim(),
    ])];
    if let Some(error) = &recording.error {
        lines.push(Line::styled(format!("it cannot be read: {}", one_line(error)), looks.colour(Color::Red)));
    }
    if let Some(lost) = recording.lost_events.filter(|lost| *lost > 0) {
        let text = counted(lost, "event was lost", "events were lost");
        lines.push(Line::styled(format!("{text}: some numbers may be wrong"), looks.colour(Color::Red)));
    }
    if let Some(unread) = recording.unread_events.filter(|unread| *unread > 0) {
        let text = counted(unread, "event was not read in time", "events were not read in time");
        lines.push(Line::styled(format!("{text}: a peak may be missing"), looks.colour(Color::Yellow)));
    }
    if recording.devices.is_empty() && recording.error.is_none() {
        lines.push(Line::from("nothing was allocated yet").dim());
    }
    // If there is no room for all devices, show those that use most.
    let left = usize::from(area.height).saturating_sub(lines.len());
    let mut devices: Vec<_> = recording.devices.iter().collect();
    if left < devices.len() * LEAST_OF_DEVICE {
        devices.sort_by_key(|device| {
            std::cmp::Reverse(if shows == Shows::Now { device.used_bytes } else { device.peak_bytes })
        });
    }
    let count = devices.len().min((left / LEAST_OF_DEVICE).max(1));
    let more = devices.len() - count;
    let left = if more > 0 && left > LEAST_OF_DEVICE { left - 1 } else { left };
    for device in &devices[..count] {
        let all = device_lines(device, &number_of(device, gpus), shows, width, looks);
        lines.extend(all.into_iter().take(left / count));
    }
    if more > 0 {
        lines.push(Line::from(counted(more as u64, "more device", "more devices")).dim());
    }
    lines
}

fn device_lines(device: &DeviceView, gpu: &str, shows: Shows, width: usize, looks: Looks) -> Vec<Line<'static>> {
    let simulated = if device.simulated { "simulated " } else { "" };
    // The places below use the same unit.
    let unit = Amounts::of([Bytes::new(device.peak_bytes.max(device.used_bytes)).signed()]);
    let in_words = |bytes: u64| unit.in_words(Bytes::new(bytes).signed());
    let at_most = if device.driver_is_at_most { "≤ " } else { "" };
    let driver = device.driver_bytes.map(|bytes| format!(", driver {at_most}{}", in_words(bytes))).unwrap_or_default();
    let usage = format!(
        "{gpu}{simulated}device {}: {} in use, peak {}{driver}",
        device.device,
        in_words(device.used_bytes),
        in_words(device.peak_bytes)
    );
    let (title, places, whole) = match shows {
        Shows::Now => ("in use now", &device.now, device.used_bytes),
        Shows::Peak => ("at the peak", &device.at_peak, device.peak_bytes),
    };
    let title = if usage.chars().count() + title.len() + 4 <= width { format!(" · {title}") } else { String::new() };
    let mut lines = vec![Line::from(vec![Span::from(usage), Span::from(title).dim()])];
    if places.is_empty() && whole > 0 {
        lines.push(Line::from("its places are not in the recording any more").dim());
    }
    let most = places.first().map_or(1, |place| place.bytes.max(1));
    let bar_width = if width >= 60 { 10 } else { 4 };
    for place in places {
        let share = i128::from(place.bytes.max(0)) * 100 / i128::from(whole.max(1));
        let scope = if place.scope.is_empty() { String::new() } else { format!("{}: ", path_in_words(&place.scope)) };
        let before = format!("{:>11} {share:>3} % ", in_words(place.bytes.unsigned_abs()));
        let room = width.saturating_sub(before.chars().count() + bar_width + 1);
        let filled =
            usize::try_from(i128::from(place.bytes.max(0)) * bar_width as i128 / i128::from(most)).unwrap_or(0);
        let bar = format!("{:<bar_width$} ", "█".repeat(filled.max(1)));
        lines.push(Line::from(vec![
            Span::from(before),
            Span::styled(bar, looks.colour(Color::Cyan)),
            Span::from(shortened(&format!("{scope}{}", place.place), room)),
        ]));
    }
    lines
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let width = area.width.min(76);
    let height = area.height.min(u16::try_from(HELP.len()).unwrap_or(u16::MAX) + 5);
    let at = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    let mut lines: Vec<_> =
        HELP.iter().map(|(keys, does)| Line::from(vec![format!("{keys:<23}").bold(), Span::from(*does)])).collect();
    lines.push(Line::default());
    lines.push(Line::from("●: recorded.  ○: waits for gpumem start PID.").dim());
    lines.push(Line::from("Lines are known when debug information was read, which takes a while.").dim());
    frame.render_widget(Clear, at);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys ")), at);
}
