//! A picture of the memory over time on the device with the highest peak, for notebooks, READMEs and bug reports. It
//! has its own background and loads nothing.

use std::{
    cmp::Reverse,
    collections::BTreeSet,
    fmt::Display,
    io::{self, Write},
    time::Duration,
};

use gpumem_core::{
    export::{shortened, shortened_command},
    model::{Bytes, Device, Family, bounded, one_line},
    report::counted,
};

use crate::{
    history::{Change, DeviceHistory, History, RejectedRequest, in_words, step_of, step_peaks},
    report::{
        overview::{DeviceOverview, Overview},
        place_peaks::Placed,
    },
    wrap::wrapped,
};

/// At most this many places have an area each; the others share one.
const MOST_PLACES: usize = 8;
/// At most this many lines about missing data are below the picture.
const MOST_MISSING: usize = 4;

const WIDTH: usize = 820;
const LEFT: usize = 66;
const TOP: usize = 62;
const BOTTOM: usize = 232;
/// The time has this many columns of pixels. Each shows its highest moment, so no peak is lost.
const COLUMNS: usize = 430;
const LEGEND: usize = LEFT + COLUMNS + 22;
const RIGHT: usize = WIDTH - 14;

/// The colours of places, as on the page.
const COLOURS: [&str; MOST_PLACES] =
    ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7"];
const OTHERS: &str = "#c0c6cc";
const TEXT: &str = "#1c1f23";
const FAINT: &str = "#5d6670";
const LINE: &str = "#d5dae0";
const ALARM: &str = "#b3261e";

/// The memory of the largest places of a device. The last area is the sum of all other places.
struct Areas {
    names: Vec<String>,
    at_peak: Vec<i64>,
    /// The memory in each column. `None` if the recording does not contain it.
    columns: Vec<Option<Vec<i64>>>,
    peak: u64,
    peak_time: u64,
    is_of_tensors: bool,
}

impl Areas {
    /// Returns the areas of a device. With `has_only_peak`, the recording contains only its peak and the end.
    fn of(placed: &Placed<'_>, device: usize, end: u64, known_from: Option<u64>, has_only_peak: bool) -> Option<Self> {
        let &DeviceHistory { peak, peak_at: Some(peak_at), .. } = placed.devices[device] else { return None };
        let (lives, (names, of_origin)) = (placed.lives, placed.numbered());
        let place_of = |change: &Change| {
            let block = lives.block(change.block);
            // The index that PyTorch's segments have instead of an origin is higher than those of all origins.
            let place = of_origin.get(block.origin as usize).copied().flatten();
            place.filter(|_| usize::from(block.device) == device)
        };
        let mut at_peak = vec![0_i64; names.len()];
        for change in lives.changes().take(peak_at as usize + 1) {
            if let Some(place) = place_of(&change) {
                at_peak[place] = at_peak[place].saturating_add(change.delta);
            }
        }
        let mut shown: Vec<_> = (0..names.len()).filter(|place| at_peak[*place] > 0).collect();
        shown.sort_by_key(|place| Reverse(at_peak[*place]));
        shown.truncate(MOST_PLACES);
        let mut area_of = vec![shown.len(); names.len()];
        shown.iter().enumerate().for_each(|(area, place)| area_of[*place] = area);

        let changes = lives.changes().map(|change| (change.time, place_of(&change).map_or(0, |_| change.delta)));
        let mut moments = step_peaks(changes, end, COLUMNS).into_iter().peekable();
        let (mut live, mut columns) = (vec![0_i64; shown.len() + 1], Vec::new());
        for (before, change) in lives.changes().map(Some).chain([None]).enumerate() {
            while moments.next_if(|moment| moment.changes == before).is_some() {
                columns.push(Some(live.clone()));
            }
            if let Some((change, place)) = change.and_then(|change| Some((change, place_of(&change)?))) {
                live[area_of[place]] = live[area_of[place]].saturating_add(change.delta);
            }
        }
        let peak_time = lives.time_of(peak_at).unwrap_or(end);
        let column = |time| step_of(time, end, COLUMNS);
        if has_only_peak {
            // The peak is wide enough to be seen.
            let peak = columns[column(peak_time)].take();
            columns[..COLUMNS - 1].fill(None);
            columns[column(peak_time).saturating_sub(2)..]
                .iter_mut()
                .take(5)
                .for_each(|column| column.clone_from(&peak));
        }
        columns[..known_from.map_or(0, column)].fill(None);
        let others = shown.iter().fold(peak.cast_signed(), |rest, place| rest.saturating_sub(at_peak[*place]));
        Some(Self {
            names: shown.iter().map(|place| names[*place].to_owned()).collect(),
            at_peak: shown.iter().map(|place| at_peak[*place]).chain([others]).collect(),
            columns,
            peak,
            peak_time,
            is_of_tensors: placed.is_of_tensors,
        })
    }
}

/// Writes the picture.
pub(super) fn write(history: &History, out: &mut dyn Write) -> io::Result<()> {
    let overview = Overview::of(history);
    let picture = Picture::of(history, &overview);
    let unknown = overview.why_empty();
    let headline = match &picture {
        Some(picture) => picture.headline(),
        None if unknown.is_some() => "The memory is not known".to_owned(),
        None => "Nothing was allocated".to_owned(),
    };
    let missing =
        overview.missing_in_words().iter().map(|line| wrapped(&one_line(line), 125) + "\n").collect::<String>();
    let missing: Vec<_> = missing.lines().take(MOST_MISSING).collect();
    let bottom = if picture.is_some() { BOTTOM } else { TOP - 36 };
    let height = bottom + 26 + 15 * missing.len();
    let file = shortened(&overview.file, 60);
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"11\" fill=\"{TEXT}\">\n<title>{}</title>",
        escaped(&format!("{file}: {headline}"))
    )?;
    writeln!(out, "<rect width=\"{WIDTH}\" height=\"{height}\" rx=\"6\" fill=\"#fff\"/>")?;
    text(out, (16, 24), "font-size=\"15\" font-weight=\"600\"", &headline)?;
    let device = picture.as_ref().map(|picture| match overview.devices.len() {
        0 | 1 => picture.words.clone(),
        several => format!("{}, of {several} devices", picture.words),
    });
    let command = Some(shortened_command(&overview.command.join(" "), 50)).filter(|command| !command.is_empty());
    let about: Vec<_> = [device, unknown.map(str::to_owned), command, Some(file)].into_iter().flatten().collect();
    text(out, (16, 41), &format!("fill=\"{FAINT}\""), &about.join("; "))?;
    if let Some(picture) = &picture {
        picture.write(history, out)?;
    }
    for (at, line) in (bottom + 34..).step_by(15).zip(missing) {
        text(out, (16, at), &format!("fill=\"{ALARM}\""), line)?;
    }
    writeln!(out, "</svg>")
}

/// The memory of one device.
struct Picture {
    /// The name of the device.
    words: String,
    device: Device,
    areas: Areas,
    /// The driver's blocks, if the areas are those of PyTorch's tensors.
    driver: Option<Areas>,
}

impl Picture {
    /// Returns the picture of the device with the highest peak. As in the summary, PyTorch's tensors replace the driver's blocks if these are
    /// mostly PyTorch's cache. They also replace the blocks if they are larger: blocks that are older than the recording are not in it.
    fn of(history: &History, overview: &Overview) -> Option<Self> {
        let end = history.end_nanos();
        let about = overview.busiest();
        let number = about.and_then(|about| {
            history.devices.iter().position(|DeviceHistory { device, .. }| {
                (device.ordinal, device.family == Family::Simulated) == (about.device, about.simulated)
            })
        });
        let blocks = number.and_then(|number| {
            let placed = Placed::blocks(history, None, true);
            Areas::of(&placed, number, end, history.known_from(), history.has_only_peaks())
        });
        let tensors = history.tensors.iter().flat_map(|tensors| &tensors.devices).enumerate();
        let device = number.map(|number| history.devices[number].device);
        let tensors = tensors.filter(|(_, all)| device.is_none_or(|device| all.about.device == device));
        let (number, tensors) = tensors.max_by_key(|(_, all)| all.live.peak).unzip();
        let is_larger = tensors.is_some_and(|all| blocks.as_ref().is_none_or(|blocks| all.live.peak > blocks.peak));
        let areas = number.zip(tensors).filter(|_| is_larger || about.is_some_and(DeviceOverview::holds_cache));
        let areas = areas.and_then(|(number, all)| {
            Areas::of(&Placed::tensors(history, None)?, number, end, all.known_from(), false)
        });
        let device = device.or_else(|| Some(tensors?.about.device))?;
        let words = about.map_or_else(|| format!("device {}", device.ordinal), DeviceOverview::words);
        Some(match areas {
            Some(areas) => Self { words, device, areas, driver: blocks },
            None => Self { words, device, areas: blocks?, driver: None },
        })
    }

    /// Returns how much memory there was at the peak, and who had most of it.
    fn headline(&self) -> String {
        let of = if self.areas.is_of_tensors { "PyTorch's tensors: " } else { "" };
        let most = self.areas.names.iter().zip(&self.areas.at_peak).next();
        let most =
            most.map(|(name, bytes)| format!("; {} held {}", shortened(name, 30), Bytes::new(bytes.unsigned_abs())));
        format!("{of}{} at the peak{}", Bytes::new(self.areas.peak), most.unwrap_or_default())
    }

    fn write(&self, history: &History, out: &mut dyn Write) -> io::Result<()> {
        let Self { words: _, device, areas, driver } = self;
        let end = history.end_nanos();
        let highest = driver.as_ref().map_or(0, |driver| driver.peak).max(areas.peak);
        #[expect(clippy::cast_precision_loss, reason = "a tenth of a pixel is much less precise")]
        let y = |bytes: u64| {
            let height = (BOTTOM - TOP) as f64 * (bytes as f64 / (highest as f64 * 1.04));
            (BOTTOM as f64 * 10.0 - height * 10.0).round() / 10.0
        };
        let x = |time: u64| LEFT + step_of(time, end, COLUMNS);

        if areas.columns.contains(&None) {
            let unknown = areas.columns.iter().map(|known| known.is_none().then_some(TOP));
            writeln!(out, "<path fill=\"#eef1f4\" d=\"{}\"/>", outline(true, unknown))?;
        }
        for bytes in multiples((highest / 5).next_power_of_two(), highest) {
            let (at, words) = (y(bytes), if bytes == 0 { "0".to_owned() } else { Bytes::new(bytes).to_string() });
            writeln!(out, "<path stroke=\"{LINE}\" d=\"M{LEFT} {at}h{COLUMNS}\"/>")?;
            text(out, (LEFT - 6, at + 4.0), &format!("text-anchor=\"end\" fill=\"{FAINT}\""), &words)?;
        }
        let rough = (end / 5).max(1);
        let power = 10_u64.pow(rough.ilog10());
        let step = [1, 2, 5].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        for time in multiples(step.unwrap_or(power * 10), end) {
            let (at, words) = (x(time), if time == 0 { "0".to_owned() } else { time_in_words(time) });
            writeln!(out, "<path stroke=\"{FAINT}\" d=\"M{at} {BOTTOM}v4\"/>")?;
            text(out, (at, BOTTOM + 17), &format!("text-anchor=\"middle\" fill=\"{FAINT}\""), &words)?;
        }

        text(out, (RIGHT, 56), &format!("text-anchor=\"end\" fill=\"{FAINT}\""), "at the peak")?;
        let mut rows = (74..).step_by(17);
        let mut entry = |out: &mut dyn Write, swatch: &str, name: &str, bytes: u64| {
            let at = rows.next().unwrap_or(BOTTOM);
            writeln!(
                out,
                "<g><title>{}</title><path d=\"M{LEGEND} {}{swatch}/>",
                escaped(&bounded(name, 300)),
                at - 4
            )?;
            text(out, (LEGEND + 17, at), "font-family=\"ui-monospace, monospace\"", &shortened(name, 31))?;
            text(out, (RIGHT, at), "text-anchor=\"end\"", &Bytes::new(bytes).to_string())?;
            writeln!(out, "</g>")
        };
        let has_others = areas.columns.iter().flatten().any(|live| live.last() > Some(&0));
        let others = has_others.then(|| "other places".to_owned());
        // Each area is drawn down to the axis, the highest one first. Otherwise there would be thin gaps between them.
        let colour = |area: usize| if area < areas.names.len() { COLOURS[area] } else { OTHERS };
        for area in (0..areas.names.len() + usize::from(has_others)).rev() {
            let top = |live: &Vec<i64>| y(sum(&live[..=area]));
            let tops = areas.columns.iter().map(|live| live.as_ref().map(top));
            writeln!(out, "<path fill=\"{}\" d=\"{}\"/>", colour(area), outline(true, tops))?;
        }
        for (area, (name, bytes)) in areas.names.iter().chain(&others).zip(&areas.at_peak).enumerate() {
            let swatch = format!("h11\" stroke-width=\"11\" stroke=\"{}\"", colour(area));
            entry(out, &swatch, name, bytes.unsigned_abs())?;
        }
        if let Some(driver) = driver {
            let line = format!("fill=\"none\" stroke=\"{TEXT}\"");
            let tops = driver.columns.iter().map(|live| Some(y(sum(live.as_ref()?))));
            writeln!(out, "<path {line} d=\"{}\"/>", outline(false, tops))?;
            entry(out, &format!("h11\" {line}"), "the driver's blocks, at most", driver.peak)?;
        }
        let is_here = |rejected: &&RejectedRequest| rejected.device_in(history).is_none_or(|on| on == *device);
        let rejections: Vec<_> = history.rejections.iter().filter(is_here).collect();
        for at in rejections.iter().map(|rejected| x(rejected.time)).collect::<BTreeSet<_>>() {
            writeln!(out, "<path stroke=\"{ALARM}\" stroke-opacity=\".7\" d=\"M{at}.5 {TOP}V{BOTTOM}\"/>")?;
        }
        if let Some(largest) = rejections.iter().map(|rejected| rejected.bytes).max() {
            let count = counted(rejections.len() as u64, "rejected allocation", "rejected, the largest");
            entry(out, &format!("m5 -6v12\" stroke=\"{ALARM}\""), &count, largest)?;
        }

        let (at, top) = (x(areas.peak_time), y(areas.peak));
        writeln!(out, "<path stroke=\"{TEXT}\" stroke-dasharray=\"2 2\" d=\"M{at}.5 {TOP}V{top}\"/>")?;
        writeln!(out, "<circle cx=\"{at}.5\" cy=\"{top}\" r=\"3\" stroke=\"#fff\"/>")?;
        // The label is on the side with more room.
        let anchor = if at < LEFT + COLUMNS / 2 { "start" } else { "end" };
        let words = format!("{} after {}", Bytes::new(areas.peak), time_in_words(areas.peak_time));
        text(out, (at, TOP - 4), &format!("text-anchor=\"{anchor}\""), &words)
    }
}

/// Returns the multiples of a step up to a number.
fn multiples(step: u64, most: u64) -> impl Iterator<Item = u64> {
    (0..=most / step).map(move |number| number * step)
}

fn sum(live: &[i64]) -> u64 {
    live.iter().fold(0, |sum, bytes| sum.saturating_add_signed(*bytes))
}

fn time_in_words(nanos: u64) -> String {
    in_words(Duration::from_nanos(nanos))
}

/// Returns an SVG path along the tops of the columns. An area is closed at the axis. Columns without a top are left out.
fn outline<Y: Copy + PartialEq + Display>(is_area: bool, tops: impl Iterator<Item = Option<Y>>) -> String {
    let (mut path, mut now) = (Vec::new(), None);
    for (x, top) in (LEFT..).zip(tops.chain([None])) {
        path.push(match (now, top) {
            _ if now == top => continue,
            (None, Some(top)) if is_area => format!("M{x} {BOTTOM}V{top}"),
            (None, Some(top)) => format!("M{x} {top}"),
            (Some(_), Some(top)) => format!("H{x}V{top}"),
            (Some(_), None) if is_area => format!("H{x}V{BOTTOM}"),
            _ => format!("H{x}"),
        });
        now = top;
    }
    path.concat()
}

fn text<Y: Display>(out: &mut dyn Write, (x, y): (usize, Y), attributes: &str, words: &str) -> io::Result<()> {
    writeln!(out, "<text x=\"{x}\" y=\"{y}\" {attributes}>{}</text>", escaped(words))
}

/// Returns text for XML, which has neither control characters nor U+FFFE and U+FFFF, also not as escapes.
fn escaped(text: &str) -> String {
    let text = one_line(text).replace(['\u{fffe}', '\u{ffff}'], "\u{fffd}");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
