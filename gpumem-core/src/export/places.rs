//! Where memory is, in tables of at most 80 columns.

use std::fmt;

use unicode_width::UnicodeWidthStr;

use super::{
    table::{Side, Table, mib, padded, shortened},
    text::one_line,
};
use crate::{
    model::{ByteDelta, Bytes},
    report::{
        Breakdown, Leaks, LiveBlock, OutOfMemory, Part, PartKind, PeakHolders, Place, ScopeSummary, Summary, counted,
        path_in_words,
    },
};

/// What a legend explains.
const LEGEND: &str = "\
amounts in MiB of what was allocated in the scope and the scopes inside it
  used      still in use
  peak      the most in use at one time
  at peak   in use when the whole process had the most in use
  device    the most that the whole process had in use on the device meanwhile
  total     allocated in all, by so many allocations
";

/// With what is less than a MiB as long as that is not wider than this.
fn amount(bytes: Bytes, widest_exact: usize) -> String {
    let exact = mib(ByteDelta::new(bytes.get().cast_signed()));
    if exact.len() <= widest_exact { exact } else { bytes.mb().to_string() }
}

/// A table ordered by peak, with a legend.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.unheard {
            writeln!(f, "allocations are not heard: {why}")?;
        }
        for scopes in self.scopes.chunk_by(|a, b| a.device == b.device) {
            let ScopeSummary { device, simulated, .. } = &scopes[0];
            writeln!(f, "{}device {device}, by scope", if *simulated { "simulated " } else { "" })?;
            let columns =
                ["calls", "used", "peak", "at peak", "device", "total", "allocs"].map(|name| (name, Side::Right));
            // Names have what figures leave, which are not cut off.
            let rows_and_room = |widest_exact: usize| {
                let rows: Vec<_> = scopes.iter().map(|scope| figures(scope, widest_exact)).collect();
                let column =
                    |at: usize| rows.iter().map(|row| row[at].len()).max().unwrap_or(0).max(columns[at].0.len());
                let room = 78_usize.saturating_sub((0..columns.len()).map(|at| column(at) + 2).sum());
                (rows, room)
            };
            // A name is cut off only after the figures of a GiB and more have lost their decimals.
            let longest = scopes.iter().map(|scope| name_of(scope).width()).max().unwrap_or(0);
            let is_enough = |room: usize| room >= longest.min(WHOLE_PROCESS.len());
            let tried = [9, 7].into_iter().map(rows_and_room).find(|(_, room)| is_enough(*room));
            let (rows, room) = tried.unwrap_or_else(|| rows_and_room(0));
            let room = room.max(7);
            let mut table = Table::new(&[&[("scope", Side::Left)][..], &columns].concat());
            for (scope, row) in scopes.iter().zip(&rows) {
                table
                    .row([shortened(&name_of(scope), room).as_str()].into_iter().chain(row.iter().map(String::as_str)));
            }
            write!(f, "{table}")?;
        }
        if self.scopes.is_empty() {
            let nothing = if self.unheard.is_some() {
                "what was allocated is not known"
            } else {
                "no scope was opened and nothing was allocated"
            };
            return writeln!(f, "{nothing}");
        }
        if self.untracked + self.lost > 0 {
            writeln!(
                f,
                "{} frees of unknown blocks, {} lost events: some figures may be wrong",
                self.untracked, self.lost
            )?;
        }
        f.write_str(LEGEND)
    }
}

const WHOLE_PROCESS: &str = "(whole process)";

fn name_of(scope: &ScopeSummary) -> String {
    if scope.path.is_empty() { WHOLE_PROCESS.to_owned() } else { scope.path.join(" > ") }
}

fn figures(scope: &ScopeSummary, widest_exact: usize) -> [String; 7] {
    let calls = if scope.path.is_empty() { String::new() } else { scope.calls.to_string() };
    let ScopeSummary { used, peak, at_peak, device_peak, allocated, .. } = *scope;
    let [used, peak, at_peak, device, total] =
        [used, peak, at_peak, device_peak, allocated].map(|bytes| amount(bytes, widest_exact));
    [calls, used, peak, at_peak, device, total, scope.allocations.to_string()]
}

/// The parts, without more of the scopes than somebody reads: those that hold least are put together.
fn readable(parts: &[Part]) -> Vec<Part> {
    const MOST: usize = 12;
    let is_scope = |part: &&Part| part.kind == PartKind::Scope;
    let mut kept = parts.to_vec();
    let rest: Vec<_> = parts.iter().filter(is_scope).skip(MOST).collect();
    if rest.len() > 1 {
        let first = parts.iter().position(|part| is_scope(&part)).unwrap_or(0) + MOST;
        let together = Part {
            kind: PartKind::Scope,
            name: format!("{} more scopes", rest.len()),
            bytes: rest.iter().map(|part| part.bytes).sum(),
            count: rest.iter().map(|part| part.count).sum(),
        };
        kept.splice(first..first + rest.len(), [together]);
    }
    kept
}

/// A line for each part, the process's own indented.
impl fmt::Display for Breakdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, name, memory, parts, .. } = self;
        let (used, total, free) = (memory.used, memory.total, memory.free);
        let figures = format!(": {used} of {total} in use, {free} free");
        let room = 80_usize.saturating_sub(format!("device {device} ()").len() + figures.len());
        let name = name.as_ref().map(|name| format!(" ({})", shortened(name, room.max(8)))).unwrap_or_default();
        writeln!(f, "device {device}{name}{figures}")?;
        let is_own = |kind| !matches!(kind, PartKind::Others | PartKind::Unknown);
        let own: Bytes = parts.iter().filter(|part| is_own(part.kind)).map(|part| part.bytes).sum();
        let mut own_is_said = false;
        for part in &readable(parts) {
            let own_part = is_own(part.kind);
            if own_part && !own_is_said {
                own_is_said = true;
                line(f, 2, "this process", &own, "")?;
            }
            let count = match (part.kind, part.count) {
                (_, 0) => String::new(),
                (PartKind::Others, count) => counted(count, "process", "processes"),
                (_, count) => counted(count, "block", "blocks"),
            };
            line(f, if own_part { 4 } else { 2 }, &part.name, &part.bytes, &count)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, indent: usize, name: &str, bytes: &impl ToString, count: &str) -> fmt::Result {
    let width = 52 - indent;
    let (name, bytes) = (padded(&shortened(name, width), width), bytes.to_string());
    let text = format!("{:indent$}{name}{bytes:>12}  {count}", "");
    writeln!(f, "{}", text.trim_end())
}

/// Several lines: what was asked for, where the memory is, who holds it.
impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, asked, kind, path, line, breakdown, scopes, places, peak } = self;
        writeln!(f, "device {device} is out of memory: {asked} ({kind}) were asked for")?;
        if let Some(line) = line {
            writeln!(f, "  at {}", shortened(line, 75))?;
        }
        writeln!(f, "  {}{}", if path.is_empty() { "" } else { "in " }, shortened(&path_in_words(path), 75))?;
        match breakdown {
            Ok(breakdown) => {
                write!(f, "{breakdown}")?;
                let trimmable = breakdown.trimmable();
                if trimmable > Bytes::ZERO {
                    writeln!(f, "gpumem::empty_cache() would give back {trimmable}")?;
                }
            }
            Err(why) => writeln!(f, "where the memory is cannot be read: {why}")?,
        }
        // Scopes without the libraries' blocks are in the breakdown.
        let are_told = |told: &Breakdown| told.parts.iter().all(|part| part.kind != PartKind::Library);
        if !breakdown.as_ref().is_ok_and(are_told) {
            holders(f, "scopes that hold most", scopes)?;
        }
        holders(f, "places that hold most", places)?;
        match peak {
            // Else that is what is in use now.
            Some(peak) if peak.bytes > places.iter().map(|place| place.bytes).sum::<Bytes>() => write!(f, "{peak}"),
            _ => Ok(()),
        }
    }
}

fn holders(f: &mut fmt::Formatter<'_>, what: &str, places: &[Place]) -> fmt::Result {
    if places.is_empty() {
        return Ok(());
    }
    writeln!(f, "{what}:")?;
    places.iter().try_for_each(|place| place_lines(f, place))
}

/// What is held, and below it who called the line that asked for it.
fn place_lines(f: &mut fmt::Formatter<'_>, place: &Place) -> fmt::Result {
    line(f, 2, &place.name, &place.bytes, &counted(place.blocks, "block", "blocks"))?;
    let Some(caller) = &place.caller else { return Ok(()) };
    writeln!(f, "    from {}", shortened(caller, 66))
}

/// The scopes, each with its lines; those that had least are put together, so that all adds up.
impl fmt::Display for PeakHolders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 12;
        let Self { device, simulated, bytes, is_over_start, untracked, lost, .. } = self;
        let simulated = if *simulated { "simulated " } else { "" };
        let over_start = if *is_over_start { " over the start" } else { "" };
        let made_of = if self.holders.is_empty() { "" } else { ", made of" };
        writeln!(f, "{simulated}device {device}: the peak was {bytes}{over_start}{made_of}")?;
        let sum = |bytes: &mut dyn Iterator<Item = ByteDelta>| ByteDelta::new(bytes.map(ByteDelta::get).sum());
        let scopes = self.by_scope();
        let (told, rest) = scopes.split_at(if scopes.len() > MOST + 1 { MOST } else { scopes.len() });
        for (scope, bytes, holders) in told {
            line(f, 2, scope, bytes, "")?;
            let (told, rest) = holders.split_at(if holders.len() > MOST + 1 { MOST } else { holders.len() });
            for holder in told {
                line(f, 4, &holder.who(), &holder.bytes, "")?;
                if let Some(caller) = &holder.caller {
                    writeln!(f, "      from {}", shortened(caller, 66))?;
                }
            }
            if !rest.is_empty() {
                line(
                    f,
                    4,
                    &format!("{} more lines", rest.len()),
                    &sum(&mut rest.iter().map(|holder| holder.bytes)),
                    "",
                )?;
            }
        }
        if !rest.is_empty() {
            line(f, 2, &format!("{} more scopes", rest.len()), &sum(&mut rest.iter().map(|(_, bytes, _)| *bytes)), "")?;
        }
        if untracked + lost > 0 {
            writeln!(f, "{untracked} frees of unknown blocks, {lost} lost events: some figures may be wrong")?;
        }
        Ok(())
    }
}

/// One line, and one for each place.
impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 20;
        if self.blocks == 0 {
            return writeln!(f, "all that was allocated is freed");
        }
        let (were, bytes) = (if self.blocks == 1 { "was" } else { "were" }, self.bytes);
        writeln!(f, "{} ({bytes}) {were} not freed:", counted(self.blocks, "block", "blocks"))?;
        let (told, rest) = self.places.split_at(self.places.len().min(MOST));
        told.iter().try_for_each(|place| place_lines(f, place))?;
        if rest.is_empty() { Ok(()) } else { writeln!(f, "  and {} more places", rest.len()) }
    }
}

/// `1 MiB device, asked for at src/train.rs:15, in train > step`.
impl fmt::Display for LiveBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.bytes, self.kind)?;
        if let Some(library) = &self.library {
            write!(f, " of {library}")?;
        }
        match (&self.line, &self.scope_place) {
            (Some(line), _) => {
                write!(f, ", asked for at {line}")?;
                if let Some(caller) = &self.caller {
                    write!(f, " from {caller}")?;
                }
            }
            (None, Some(place)) if !self.path.is_empty() => write!(f, ", asked for in the scope of {place}")?,
            _ => {}
        }
        write!(f, ", {}{}", if self.path.is_empty() { "" } else { "in " }, one_line(&path_in_words(&self.path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::GpuMemory,
        report::{Group, Known, Path, PeakHolder},
    };

    fn scope(path: &[&str], parent: Option<usize>, figures: [u64; 7]) -> Path {
        let [calls, used, peak, at_peak, device_peak, allocated, allocations] = figures;
        let own = ScopeSummary {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            place: None,
            device: 0,
            simulated: false,
            calls,
            used: Bytes::mib(used),
            peak: Bytes::mib(peak),
            at_peak: Bytes::mib(at_peak),
            device_peak: Bytes::mib(device_peak),
            allocated: Bytes::mib(allocated),
            allocations,
        };
        Path { parent, own }
    }

    #[test]
    fn a_summary_reads_well() {
        let paths = vec![
            scope(&[], None, [0, 276, 786, 0, 786, 0, 0]),
            scope(&["load"], Some(0), [1, 256, 256, 256, 256, 256, 1]),
            scope(&["train"], Some(0), [1, 20, 530, 10, 786, 0, 0]),
            scope(&["train", "a scope with a long name"], Some(2), [3, 20, 530, 520, 786, 1566, 6]),
        ];
        let text = Summary::of(paths, 0, 0, None).to_string();
        let table = [
            "device 0, by scope",
            " scope              calls     used     peak  at peak   device     total  allocs",
            " (whole process)           276.000  786.000  786.000  786.000  1822.000       7",
            " train                  1   20.000  530.000  530.000  786.000  1566.000       6",
            " …with a long name      3   20.000  530.000  520.000  786.000  1566.000       6",
            " load                   1  256.000  256.000  256.000  256.000   256.000       1",
        ];
        assert_eq!(text.lines().take(6).collect::<Vec<_>>(), table);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.ends_with(LEGEND));
        // Amounts lose their decimals before a short name is cut off.
        let large = vec![
            scope(&[], None, [0, 13_800, 13_900, 0, 13_900, 39_999, 99]),
            scope(&["train"], Some(0), [12_345, 13_800, 13_900, 13_500, 13_900, 39_000, 3_456_789]),
            scope(&["load"], Some(0), [1, 999, 999, 500, 999, 999, 1]),
        ];
        let text = Summary::of(large, 0, 0, None).to_string();
        assert!(text.contains(" (whole process)  "), "{text}");
        assert!(text.contains(" load                 1  999.000  999.000  500.000  999.000  999.000"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        // Names may be cut off, figures are not.
        let many = [1_000_000_000, 19_999, 99_999, 99_999, 99_999, 99_999, 9_999_999_999];
        let text = Summary::of(vec![scope(&["a name of 20 columns"], None, many)], 0, 0, None).to_string();
        assert!(text.contains("1000000000  19999  99999    99999   99999  99999  9999999999\n"), "{text}");
        let huge = [1000, 134_217_728, 134_217_728, 134_217_728, 134_217_728, 8_589_934_592, 9999];
        let text = Summary::of(vec![scope(&["a name of 20 columns"], None, huge)], 0, 0, None).to_string();
        assert!(text.contains("1000  134217728  134217728  134217728  134217728  8589934592    9999\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn a_peak_adds_up_and_is_readable() {
        let holder = |path: &[&str], line: Option<&str>, mib: i64| PeakHolder {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            line: line.map(str::to_owned),
            caller: line.map(|_| "src/main.rs:3".to_owned()),
            bytes: ByteDelta::new(mib << 20),
            ..PeakHolder::default()
        };
        let older = PeakHolder { is_older: true, ..holder(&[], None, -16) };
        let library = PeakHolder { library: Some("cuBLAS".to_owned()), ..holder(&["train"], None, 32) };
        let train = ["train", "forward"];
        let holders = [
            holder(&train, Some("src/model.rs:12"), 500),
            holder(&train, Some("src/model.rs:14"), 30),
            holder(&[], None, 94),
            older,
            library,
            holder(&train, Some("src/model.rs:14"), 1),
            holder(&["gone"], Some("src/model.rs:20"), 7),
            holder(&["gone"], Some("src/model.rs:20"), -7),
        ];
        let peak = PeakHolders {
            device: 0,
            simulated: false,
            bytes: Bytes::mib(641),
            is_over_start: true,
            holders: PeakHolder::largest(holders),
            untracked: 0,
            lost: 0,
        };
        assert_eq!(
            peak.to_string(),
            "device 0: the peak was 641 MiB over the start, made of\n  \
               train > forward                                        531 MiB\n    \
                 src/model.rs:12                                      500 MiB\n      \
                   from src/main.rs:3\n    \
                 src/model.rs:14                                       31 MiB\n      \
                   from src/main.rs:3\n  \
               outside of all scopes                                   94 MiB\n    \
                 line not known                                        94 MiB\n  \
               train                                                   32 MiB\n    \
                 cuBLAS                                                32 MiB\n  \
               before the first trace                                 -16 MiB\n    \
                 freed, older than the first trace                    -16 MiB\n"
        );
        let nothing = PeakHolders { bytes: Bytes::ZERO, holders: Vec::new(), ..peak.clone() };
        assert_eq!(nothing.to_string(), "device 0: the peak was 0 B over the start\n");
        // Of many those that had least are put together.
        let holders = (1..=100).map(|mib| holder(&[&format!("scope {mib}")], Some("src/a.rs:1"), mib));
        let many = PeakHolders { holders: PeakHolder::largest(holders), lost: 2, ..peak.clone() }.to_string();
        assert_eq!(many.lines().filter(|line| line.starts_with("  s")).count(), 12, "{many}");
        assert!(many.contains("\n  88 more scopes                                        3.82 GiB\n"), "{many}");
        assert!(many.ends_with("0 frees of unknown blocks, 2 lost events: some figures may be wrong\n"), "{many}");
        let holders = (1..=14).map(|line| holder(&[], Some(&format!("src/a.rs:{line}")), line));
        let many = PeakHolders { holders: PeakHolder::largest(holders), ..peak }.to_string();
        assert!(many.ends_with("    2 more lines                                           3 MiB\n"), "{many}");
    }

    #[test]
    fn parts_add_up_and_are_named() {
        let group = |path: &[&str], library: Option<&str>, blocks, mib| Group {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            library: library.map(str::to_owned),
            place: None,
            caller: None,
            blocks,
            bytes: Bytes::mib(mib),
        };
        let memory = GpuMemory { total: Bytes::gib(16), free: Bytes::gib(14), used: Bytes::gib(2), reserved: None };
        let process = |pid, mib: Option<u64>| crate::model::GpuProcess {
            pid,
            name: None,
            used: mib.map(Bytes::mib),
            kind: crate::model::ProcessKind::Compute,
        };
        let known = Known {
            device: 0,
            name: Some("NVIDIA H200".to_owned()),
            simulated: false,
            memory,
            processes: Some(vec![process(1, Some(900)), process(2, Some(100)), process(7, Some(1000))]),
            own_pid: 7,
            pool: None,
            live: vec![
                group(&["train", "forward"], None, 3, 100),
                group(&[], Some("cuBLAS"), 1, 32),
                group(&["train", "forward"], None, 1, 28),
            ],
        };
        let told = Breakdown::of(&known);
        assert_eq!(
            told.to_string(),
            "device 0 (NVIDIA H200): 2 GiB of 16 GiB in use, 14 GiB free\n  \
               other processes                                       1000 MiB  2 processes\n  \
               this process                                          1000 MiB\n    \
                 train > forward                                      128 MiB  4 blocks\n    \
                 cuBLAS                                                32 MiB  1 block\n    \
                 CUDA context, kernels, modules; what is unknown      840 MiB\n  \
               the driver's, of no process                             48 MiB\n"
        );
        let sum = |told: &Breakdown| told.parts.iter().map(|part| part.bytes).sum::<Bytes>();
        assert_eq!(sum(&told), memory.used);
        // Of many scopes those that hold least are put together.
        let live = (1..=100).map(|mib| group(&[&format!("scope {mib}")], None, 1, mib)).collect();
        let memory = GpuMemory { used: Bytes::gib(6), ..memory };
        let many = Breakdown::of(&Known { memory, live, ..known.clone() }).to_string();
        let lines: Vec<_> = many.lines().filter(|line| line.contains("scope")).collect();
        assert_eq!(lines.len(), 13, "{many}");
        assert_eq!(lines[11], "    scope 89                                              89 MiB  1 block");
        assert_eq!(lines[12], "    88 more scopes                                      3.82 GiB  88 blocks");
        let memory = GpuMemory { used: Bytes::gib(2), ..memory };
        // What the driver does not tell is not told apart.
        for processes in
            [None, Some(vec![]), Some(vec![process(7, None)]), Some(vec![process(1, None), process(7, Some(1000))])]
        {
            let told = Breakdown::of(&Known { processes, ..known.clone() });
            assert_eq!(sum(&told), memory.used);
            assert!(told.parts.iter().all(|part| part.kind != PartKind::Others), "{told}");
        }
        // Readings of different moments may be more than there is.
        let less = GpuMemory { used: Bytes::mib(1010), ..memory };
        assert_eq!(sum(&Breakdown::of(&Known { memory: less, ..known })), less.used);
    }
}
