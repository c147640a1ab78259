//! The summary of recordings as text.

use std::{
    io::{self, Write},
    path::Path,
    time::Duration,
};

use gpumem_core::{
    derive::NO_STACK,
    export::{InPaint, Paint, Role, shortened, shortened_command},
    model::{Bytes, Phase, one_line},
    report::{Leaks, counted},
};

use super::{
    communicators,
    dry_run::DryRunOverview,
    overview::{DeviceOverview, Overview},
    place_sums::PlaceSum,
    process, ranks,
    rejected::Rejections,
    tensors::{self, TensorsOverview},
    text::{BESIDES_NOT_KNOWN, percent, shares, unit_of},
};
use crate::history::{ProcessMemory, Sum, in_words};

/// Writes one recording in detail, or several side by side.
pub(crate) fn write_all(overviews: &[Overview], out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    match overviews {
        [only] => write_one(only, out, paint),
        several => {
            ranks::write(several, out, paint)?;
            write_dry_run(
                DryRunOverview::together(several.iter().filter_map(|one| one.dry_run.as_ref())).as_ref(),
                out,
                paint,
            )
        }
    }
}

/// Writes about failed allocations. Most users run the command because memory ran out, so this part comes first.
fn write_rejected(rejected: &Rejections, overview: &Overview, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let mut alarm = |line: &str| writeln!(out, "{}", paint.on(Role::Alarm, line));
    rejected.in_words().iter().try_for_each(|line| alarm(line))?;
    if rejected.is_live_known {
        alarm(&format!("The memory at that time: `gpumem report --at oom {}`", overview.file))?;
    }
    let mut lines = overview.torch.iter().flat_map(TensorsOverview::rejection_in_words);
    lines.try_for_each(|(name, text)| tensors::line(out, paint, name, &text))?;
    writeln!(out)
}

fn write_one(overview: &Overview, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    if let Some(rejected) = &overview.rejected {
        write_rejected(rejected, overview, out, paint)?;
    }
    let Overview { file, command, pid, seconds, cards, allocations, frees, sources, devices, torch, leaks, .. } =
        overview;
    let number =
        |count: &Option<u64>, one, many| count.map_or_else(|| format!("? {many}"), |count| counted(count, one, many));
    // A snapshot's blocks are what PyTorch calls segments.
    let [one, many] =
        if overview.missing.has_only_pytorch { ["segment", "segments"] } else { ["allocation", "allocations"] };
    let count = number(allocations, one, many);
    let heading = format!("{}: {count}", shortened(file, paint.width().saturating_sub(2 + count.len())));
    writeln!(out, "{}", paint.on(Role::Heading, heading))?;
    let duration = in_words(Duration::from_secs_f64(seconds.max(0.0)));
    let process = pid.map(|pid| format!("process {pid}, ")).unwrap_or_default();
    let process = format!("{process}{duration}, {}", number(frees, "free", "frees"));
    // The line contains at least the name of the program, and at most 60 characters of the command.
    let room = paint.width().saturating_sub(2 + process.len()).clamp(20, 60);
    let command =
        if command.is_empty() { String::new() } else { format!("{}; ", shortened_command(&command.join(" "), room)) };
    writeln!(out, "{}", paint.on(Role::Text, format!("{command}{process}")))?;
    if let Some(cards) = cards {
        let real = overview.dry_run.as_ref().and_then(DryRunOverview::real_in_words);
        let words: Vec<_> = [Some(cards.clone()), real].into_iter().flatten().collect();
        writeln!(out, "{}", paint.on(Role::Heading, one_line(&words.join("; "))))?;
    }
    let sources: Vec<_> = sources
        .iter()
        .map(|by| {
            let library = Path::new(&by.library).file_name().map(|name| name.to_string_lossy().into_owned());
            library.map_or_else(|| by.source.to_owned(), |library| format!("{} ({library})", by.source))
        })
        .collect();
    if !sources.is_empty() {
        writeln!(out, "recorded by {}", one_line(&sources.join(", ")))?;
    }
    for device in devices {
        let has_tensors = match torch {
            Some(torch) => torch.write_device(device.device, out, paint)?,
            None => false,
        };
        writeln!(out)?;
        // The driver blocks are only those that PyTorch's cache holds for the tensors.
        write_device(device, overview.missing.symbols.is_some(), has_tensors && device.holds_cache(), out, paint)?;
        if torch.is_none() && device.holds_cache() {
            let text = "PyTorch keeps freed memory in a cache: a line is where the cache grew. `gpumem run --modules` shows the tensors.";
            writeln!(out, "{text}")?;
        }
    }
    if *allocations != Some(0) && overview.not_freed.is_some() {
        if is_as_at_peaks(leaks, devices) {
            let (blocks, bytes) = (counted(leaks.blocks, "block", "blocks"), leaks.bytes);
            let text = format!("{blocks} ({bytes}) not freed at the end: as much as at the peak (--leaks shows them)");
            writeln!(out, "\n{}", paint.on(Role::Heading, text))?;
        } else {
            writeln!(out, "\n{}", InPaint(leaks, paint))?;
        }
    }
    if let Some(kept) = process::kept_in_words(&overview.kept_by_driver) {
        writeln!(out, "{}", paint.on(Role::Heading, format!("{kept} at the end (--leaks shows what gives it back)")))?;
    }
    let missing = overview.missing_in_words();
    writeln!(out)?;
    for line in &missing {
        writeln!(out, "{}", paint.on(Role::Alarm, line))?;
    }
    if overview.missing.has_only_pytorch {
        return Ok(());
    }
    let not_seen = if !devices.is_empty() && devices.iter().all(|device| device.process_peak.is_some()) {
        "Not seen: other processes."
    } else {
        "Not seen: CUDA contexts and kernels, other processes, and memory that was allocated before the recording."
    };
    writeln!(out, "{}", paint.on(Role::Faint, not_seen))?;
    write_dry_run(overview.dry_run.as_ref(), out, paint)
}

/// Writes how far the figures of a dry run hold.
fn write_dry_run(dry: Option<&DryRunOverview>, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    let Some(dry) = dry else { return Ok(()) };
    if let Some(needs) = dry.needs_in_words() {
        writeln!(out, "{}", paint.on(Role::Heading, needs))?;
    }
    let role = if dry.unknown_values == 0 { Role::Heading } else { Role::Alarm };
    writeln!(out, "{}", paint.on(role, one_line(&dry.in_words())))
}

/// Returns whether the memory not freed is the memory at the peaks. Programs that keep their memory in a cache free nothing,
/// so a table of it would repeat the peak's table. Other memory, such as a few bytes of pinned host memory, is in no
/// peak.
fn is_as_at_peaks(leaks: &Leaks, devices: &[DeviceOverview]) -> bool {
    let peaks: u64 = devices.iter().filter_map(|device| device.peak_bytes).sum();
    let is_at_peak = |device: &DeviceOverview| device.peak_bytes.is_none_or(|peak| peak == device.live_at_end_bytes);
    let besides = leaks.bytes.get().abs_diff(peaks);
    leaks.is_intercepted && leaks.gone == 0 && besides < peaks / 100 && devices.iter().all(is_at_peak)
}

/// Writes a device. With `is_brief`, the places are left out, because the table of tensors has already shown them.
fn write_device(
    device: &DeviceOverview,
    lacks_symbols: bool,
    is_brief: bool,
    out: &mut dyn Write,
    paint: Paint,
) -> io::Result<()> {
    let process = device.process_peak.as_ref();
    if let Some(process) = process.filter(|process| process::is_much(process)) {
        let line = format!("{}: {}", device.number_in_words(), process::process_in_words(process));
        writeln!(out, "{}", paint.on(Role::Heading, line))?;
    }
    let Some((peak, at)) = device.peak_bytes.zip(device.peak_seconds) else {
        let except = if device.pools.is_empty() { "" } else { " except blocks of pools" };
        writeln!(out, "{}: nothing was allocated{except}", one_line(&device.words()))?;
        write_at_most(process, out, paint)?;
        write_pools(device, out)?;
        return write_samples(device, out);
    };
    let text = match device.holders.as_ref().filter(|_| !is_brief) {
        Some(holders) => InPaint(holders, paint).to_string(),
        None => format!("{}: the peak was {}", one_line(&device.words()), Bytes::new(peak)),
    };
    let (title, table) = text.split_at(text.find('\n').unwrap_or(text.len()));
    let of_driver = |peak| format!(", and the driver's blocks peaked at {}", Bytes::new(peak));
    let of_driver = device.driver_peak_bytes.map(of_driver).unwrap_or_default();
    let with_driver = |process: &ProcessMemory| {
        let (all, largest) = (process::amount(process, process.bytes), process::largest_in_words(process));
        format!(", and {all} with the driver's own memory: {largest}")
    };
    let with_driver = process.filter(|process| !process::is_much(process)).map(with_driver).unwrap_or_default();
    let behind = format!("{of_driver}{with_driver}");
    writeln!(out, "{title}{}{table}", paint.on(Role::Heading, behind))?;
    write_at_most(process, out, paint)?;
    let line = |out: &mut dyn Write, name: &str, text: &str| {
        writeln!(out, "{}{}", paint.on(Role::Faint, format!("{name:<9}")), one_line(text))
    };
    if !is_brief {
        line(out, "when", &format!("after {}", in_words(Duration::from_secs_f64(at))))?;
    }
    line(out, "kind", &shares(&device.peak_by_kind, peak))?;
    line(out, "library", &shares(&device.peak_by_library, peak))?;
    if !device.communicators.is_empty() {
        line(out, "NCCL", &communicators::in_words(&device.communicators))?;
    }
    if let Some(most) = device.most().filter(|_| !is_brief) {
        line(out, "most", &most)?;
    }
    if !device.inside_most.is_empty() && !is_brief {
        line(out, "inside", &shares(&device.inside_most, peak))?;
    }
    // Less than a tenth is not worth mentioning.
    let share = |is_so: fn(&PlaceSum) -> bool| {
        let bytes: i64 = device.peak_by_place.iter().filter(|sum| is_so(sum)).map(|sum| sum.bytes).sum();
        (!is_brief && bytes > 0 && bytes.unsigned_abs() * 10 >= peak).then(|| percent(bytes, peak))
    };
    if let Some(share) =
        share(|sum| sum.library.is_none() && sum.line.as_deref().is_none_or(|line| line.ends_with(NO_STACK)))
    {
        let why = "stacks are recorded for blocks of 1 MiB or more, and for none with --stacks none";
        line(out, "no line", &format!("{share} of the peak has no stack: {why}"))?;
    }
    let no_line = || share(|sum| sum.line.as_deref().is_some_and(is_only_function));
    // Without symbols, a sentence about the whole recording already explains this.
    if let Some(share) = no_line().filter(|_| !lacks_symbols) {
        let how = "build it with -g, or with Cargo's debug = \"line-tables-only\" and strip = false";
        line(out, "no line", &format!("{share} of the peak is from code without debug information: {how}"))?;
    }
    match &device.besides {
        None => line(out, "besides", BESIDES_NOT_KNOWN)?,
        Some(besides) if !besides.is_empty() => {
            let sum = |sum: &Sum| format!("{} at most {}", sum.name, Bytes::new(sum.bytes.unsigned_abs()));
            let words: Vec<_> = besides.iter().map(sum).collect();
            line(out, "besides", &format!("{}, which are not in the peak", words.join(", ")))?;
        }
        Some(_) => {}
    }
    if let Some(words) = device.pinned_by_pytorch.as_deref().and_then(pinned_in_words) {
        line(out, "pinned", &words)?;
    }
    write_pools(device, out)?;
    if let Some(name) = &device.name {
        let total = device.total_bytes.map(|total| format!(", {}", Bytes::new(total))).unwrap_or_default();
        line(out, "device", &format!("{name}{total}"))?;
    }
    write_samples(device, out)
}

/// Writes why the numbers of the driver's memory are upper bounds, if they are.
fn write_at_most(process: Option<&ProcessMemory>, out: &mut dyn Write, paint: Paint) -> io::Result<()> {
    if process.is_some_and(ProcessMemory::is_at_most) {
        writeln!(out, "{}", paint.on(Role::Faint, process::AT_MOST))?;
    }
    Ok(())
}

/// Returns the sentence about how much PyTorch's rounding adds to pinned host memory. The largest places are named.
fn pinned_in_words(by_place: &[Sum]) -> Option<String> {
    const MOST: usize = 3;
    let bytes = by_place.iter().map(|sum| sum.bytes.unsigned_abs()).sum::<u64>();
    let unit = unit_of(bytes);
    let mut places: Vec<_> =
        by_place.iter().take(MOST).map(|sum| format!("{} has {}", sum.name, unit.in_words(sum.bytes))).collect();
    if by_place.len() > MOST {
        places.push("…".to_owned());
    }
    (bytes > 0).then(|| {
        format!(
            "{} for requests of more than {}, because PyTorch rounds each one up to a power of two: {}",
            unit.in_words(Bytes::new(bytes).signed()),
            unit.in_words(Bytes::new(bytes / 2).signed()),
            places.join(", ")
        )
    })
}

fn write_pools(device: &DeviceOverview, out: &mut dyn Write) -> io::Result<()> {
    let unit = unit_of(device.peak_bytes.unwrap_or(0));
    device.pools.iter().try_for_each(|pool| writeln!(out, "{}", pool.in_words(unit)))
}

/// Compares the memory in use on the whole device with the memory that was seen.
fn write_samples(device: &DeviceOverview, out: &mut dyn Write) -> io::Result<()> {
    // Readings that missed the peak are not useful here.
    let highest = device.highest_sample_bytes.filter(|highest| Some(*highest) >= device.peak_bytes);
    if let Some((highest, at)) = highest.zip(device.highest_sample_seconds) {
        let at = in_words(Duration::from_secs_f64(at));
        let readings = counted(device.samples, "reading", "readings");
        writeln!(out, "All processes had {} in use at most, after {at}, by {readings}.", Bytes::new(highest))?;
    }
    Ok(())
}

/// Returns whether a line is only the name of a function, such as `train::step`, because the code has no debug
/// information. `src/train.rs:12`, an operation of the backward pass and a block without a stack are something else.
fn is_only_function(line: &str) -> bool {
    let has_number = line.rsplit_once(':').is_some_and(|(_, number)| number.parse::<u32>().is_ok());
    !has_number && !Phase::is_in(line) && !line.ends_with(NO_STACK)
}
