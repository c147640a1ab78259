//! Writes the holders of memory: when an allocation is rejected, at a peak, and at process exit.

use std::fmt;

use unicode_width::UnicodeWidthStr;

use super::{
    amounts::Amounts,
    paint::{Paint, Role, Show},
    part_table::{amounts_of, part_table, table},
    pools::cache_of,
    table::shortened,
    tree::{Leaf, Row, Tree},
};
use crate::{
    model::{Bytes, one_line},
    report::{
        Leaks, LiveBlock, OutOfMemory, PartKind, PeakHolder, PeakHolders, Place, PoolAtPeak, SharedNames, counted,
        missing_in_words, path_in_words,
    },
};

/// The largest number of rows of a peak.
const MOST_AT_PEAK: usize = 24;
/// The largest number of listed places.
const MOST_PLACES: usize = 20;

/// Writes several lines: the request, the parts of the device's memory, and its holders.
impl Show for OutOfMemory {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let Self { device, requested, kind, path, line, breakdown, scopes, places, peak } = self;
        let title = format_args!("device {device} is out of memory: {requested} ({kind}) were requested");
        write!(f, "{}", paint.on(Role::Alarm, title))?;
        if let Ok(breakdown) = breakdown {
            for line in in_lines(&breakdown.in_use.to_string(), 78) {
                write!(f, "\n  {line}")?;
            }
        }
        if let Some(line) = line {
            write!(f, "\n  at {}", shortened(line, 75))?;
        }
        write!(f, "\n  {}{}", if path.is_empty() { "" } else { "in " }, shortened(&path_in_words(path), 75))?;
        match breakdown {
            Ok(breakdown) => {
                f.write_str("\n")?;
                breakdown.show(f, paint)?;
                let trimmable = breakdown.trimmable();
                if trimmable > Bytes::ZERO {
                    write!(f, "\ngpumem::torch::empty_cache() would return {trimmable}")?;
                }
            }
            Err(why) => write!(f, "\nthe holders of the memory cannot be read: {}", one_line(&why.to_string()))?,
        }
        // The breakdown already contains the scopes, without the blocks of libraries.
        let has_them =
            breakdown.as_ref().is_ok_and(|breakdown| breakdown.parts.iter().all(|part| part.kind != PartKind::Library));
        if !has_them && !scopes.is_empty() {
            write!(f, "\n{}\n", paint.on(Role::Heading, "scopes that hold the most:"))?;
            table("scope", &rows(scopes)).show(f, paint)?;
        }
        if !places.is_empty() {
            write!(f, "\n{}\n", paint.on(Role::Heading, "places that hold the most:"))?;
            table("place", &rows(places)).show(f, paint)?;
        }
        match peak {
            // A peak that equals the memory in use now would add no information.
            Some(peak) if peak.bytes > places.iter().map(|place| place.bytes).sum::<Bytes>() => {
                f.write_str("\n")?;
                peak.show(f, paint)
            }
            _ => Ok(()),
        }
    }
}

/// Breaks a sentence between its parts into lines of at most this many columns. A longer part is truncated.
fn in_lines(sentence: &str, most: usize) -> Vec<String> {
    let marked = sentence.replace(", ", ",\n").replace("; ", ";\n").replace(" (", "\n(");
    let mut lines: Vec<String> = Vec::new();
    for part in marked.lines() {
        let part = shortened(part, most);
        match lines.last_mut().filter(|line| line.width() + 1 + part.width() <= most) {
            Some(line) => *line = format!("{line} {part}"),
            None => lines.push(part),
        }
    }
    lines
}

fn rows(places: &[Place]) -> Vec<Row> {
    let row = |place: &Place| Row {
        depth: 0,
        name: place.name.clone(),
        bytes: place.bytes.signed(),
        blocks: place.blocks,
        each: place.each,
        note: place.caller.clone(),
    };
    places.iter().map(row).collect()
}

/// Writes the scopes, each with its lines. All rows add up to the peak.
impl Show for PeakHolders {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let Self { device, simulated, bytes, is_over_start, untracked, lost, .. } = self;
        let simulated = if *simulated { "simulated " } else { "" };
        let over_start = if *is_over_start { " over the start" } else { "" };
        let title = format_args!("{simulated}device {device}: the peak was {bytes}{over_start}");
        write!(f, "{}", paint.on(Role::Heading, title))?;
        let rows = self.rows();
        // The rows of a peak over the start may be far larger than their sum.
        let amounts = Amounts::of(rows.iter().map(|row| row.bytes).chain([bytes.signed()]));
        if !rows.is_empty() {
            f.write_str("\n")?;
            let title = if self.has_scopes() { "allocated in, and at" } else { "allocated at" };
            part_table(title, &rows, amounts).show(f, paint)?;
        }
        for PoolAtPeak { name, used, reserved } in &self.pools {
            write!(f, "\n{}", paint.on(Role::Faint, cache_of(name, *used, *reserved, amounts)))?;
        }
        if untracked + lost > 0 {
            write!(f, "\n{}", paint.on(Role::Alarm, missing_in_words(*untracked, *lost)))?;
        }
        Ok(())
    }
}

impl PeakHolders {
    /// Returns whether any holder is in a scope. Without scopes, "outside of all scopes" is not shown.
    fn has_scopes(&self) -> bool {
        self.holders.iter().any(|holder| !holder.path.is_empty())
    }

    fn rows(&self) -> Vec<Row> {
        let has_scopes = self.has_scopes();
        let names = SharedNames::of(self.holders.iter().map(|holder| &*holder.path));
        let shared = |holder: &PeakHolder| PeakHolder { path: names.path(&holder.path).into(), ..holder.clone() };
        let mut tree = Tree::new();
        for holder in &PeakHolder::largest(self.holders.iter().map(shared)) {
            let PeakHolder { path, caller, is_older, bytes, .. } = holder;
            let leaf = Leaf { name: holder.who(), bytes: bytes.get(), blocks: 0, note: caller.clone() };
            if *is_older || !has_scopes {
                tree.leaf(&[], leaf);
            } else if !path.is_empty() {
                tree.leaf(path, leaf);
            } else {
                tree.leaf(&[path_in_words(path)], leaf);
            }
        }
        tree.rows(MOST_AT_PEAK)
    }
}

/// Writes a heading line, and a line for each place. Blocks of equal size are written as `3 × 512 MiB`.
impl Show for Leaks {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        if self.blocks == 0 {
            f.write_str("everything that was allocated has been freed")?;
        } else {
            let rows = self.rows();
            let were = if self.blocks == 1 { "was" } else { "were" };
            let bytes = amounts_of(&rows).in_words(self.bytes.signed());
            let title = format_args!("{} ({bytes}) {were} not freed:", counted(self.blocks, "block", "blocks"));
            writeln!(f, "{}", paint.on(Role::Heading, title))?;
            table("place", &rows).show(f, paint)?;
        }
        if self.gone > 0 {
            write!(
                f,
                "\n{} disappeared with their CUDA context, without a free",
                counted(self.gone, "block", "blocks")
            )?;
        }
        if !self.is_intercepted {
            let text = "allocations are not intercepted: there may be more";
            write!(f, "\n{}", paint.on(Role::Alarm, text))?;
        }
        Ok(())
    }
}

impl Leaks {
    fn rows(&self) -> Vec<Row> {
        // If only one is left, its own row takes no more space than the shared row.
        let most = if self.places.len() > MOST_PLACES + 1 { MOST_PLACES } else { self.places.len() };
        let (shown, rest) = self.places.split_at(most);
        let mut rows = rows(shown);
        if !rest.is_empty() {
            rows.push(Row {
                name: format!("({} more places)", rest.len()),
                bytes: rest.iter().map(|place| place.bytes).sum::<Bytes>().signed(),
                blocks: rest.iter().map(|place| place.blocks).sum(),
                ..Row::default()
            });
        }
        rows
    }
}

/// Writes a line such as `1 MiB device, allocated at src/train.rs:15, in train > step`.
impl fmt::Display for LiveBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.bytes, self.kind)?;
        if let Some(library) = &self.library {
            write!(f, " of {}", one_line(library))?;
        }
        match (&self.line, &self.scope_place) {
            (Some(line), _) => {
                write!(f, ", allocated at {}", one_line(line))?;
                if let Some(caller) = &self.caller {
                    write!(f, " from {}", one_line(caller))?;
                }
            }
            (None, Some(place)) if !self.path.is_empty() => {
                write!(f, ", allocated in the scope of {}", one_line(place))?;
            }
            _ => {}
        }
        write!(f, ", {}{}", if self.path.is_empty() { "" } else { "in " }, one_line(&path_in_words(&self.path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        error::Kind,
        export::samples,
        model::{ByteDelta, MemKind},
        report::by_place,
    };

    fn holder(path: &[&str], line: Option<&str>, mib: i64) -> PeakHolder {
        PeakHolder {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            line: line.map(str::to_owned),
            caller: line.map(|_| "src/main.rs:3".to_owned()),
            bytes: ByteDelta::new(mib << 20),
            ..PeakHolder::default()
        }
    }

    fn peak(mib: u64, holders: impl IntoIterator<Item = PeakHolder>) -> PeakHolders {
        PeakHolders {
            bytes: Bytes::mib(mib),
            holders: PeakHolder::largest(holders),
            pools: Vec::new(),
            untracked: 0,
            lost: 0,
            ..samples::peak("x")
        }
    }

    #[test]
    fn a_peak_adds_up_and_is_readable() {
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
        let text = peak(641, holders).to_string();
        assert_eq!(
            text,
            "\
device 0: the peak was 641 MiB over the start
 allocated in, and at               MiB
 ────────────────────────────────────────────────
 train                              563  ████████
   forward                          531  ███████▌
     src/model.rs:12                500  ███████
       from src/main.rs:3
     src/model.rs:14                 31  ▍
       from src/main.rs:3
   cuBLAS                            32  ▍
 outside of all scopes               94  █▎
   line not known                    94  █▎
 freed, older than the first trace  -16",
            "\n{text}\n"
        );
        assert_eq!(peak(0, []).to_string(), "device 0: the peak was 0 B over the start");
    }

    #[test]
    fn the_smallest_of_many_at_a_peak_are_summed_up() {
        // Names that differ only in numbers would share a row.
        let name = |mib: u32| format!("scope {}", char::from_u32(0x100 + mib).expect("it is a letter"));
        let holders = (1..=100).map(|mib| holder(&[&name(mib)], Some("src/a.rs:1"), mib.into()));
        let text = PeakHolders { lost: 2, ..peak(5050, holders) }.to_string();
        assert!(
            text.contains(&format!("\n {} ", name(100))) && text.contains("\n (") && text.contains(" more scopes) "),
            "{text}"
        );
        assert!(text.ends_with("\n0 frees of unknown blocks, 2 lost events: some numbers may be wrong"), "{text}");
        let sum: i64 = text
            .lines()
            .filter(|line| line.starts_with(" scope") || line.starts_with(" ("))
            .map(|line| line.trim_end_matches(|c: char| !c.is_ascii_digit()).rsplit(' ').next().unwrap())
            .map(|value| value.parse::<i64>().unwrap())
            .sum();
        assert_eq!(sum, 5050, "{text}");
    }

    fn block(mib: u64, line: &str) -> LiveBlock {
        LiveBlock {
            bytes: Bytes::mib(mib),
            path: vec!["train".to_owned()],
            scope_place: None,
            line: Some(line.to_owned()),
            caller: Some("src/main.rs:3".to_owned()),
            library: None,
            ..samples::block("x")
        }
    }

    #[test]
    fn the_peak_chooses_the_unit_of_its_table_and_of_its_pools() {
        let mut peak = peak(12_288, [6144, 6143].map(|mib| holder(&[], Some(&format!("src/a.rs:{mib}")), mib)));
        let (used, reserved) = (Bytes::mib(256), Bytes::mib(512));
        peak.pools.push(PoolAtPeak { name: "arena".to_owned(), used, reserved });
        let text = peak.to_string();
        assert!(text.contains(" allocated at ") && text.contains("  GiB\n") && text.contains("  6.000  "), "{text}");
        assert!(text.contains("\ncache of arena: 0.25 GiB of 0.50 GiB"), "{text}");
    }

    #[test]
    fn identical_blocks_are_grouped() {
        let blocks = [512, 512, 512].map(|mib| block(mib, "src/a.rs:1"));
        let others = [block(3, "src/a.rs:2"), block(1, "src/a.rs:2"), block(2, "src/a.rs:3")];
        let text = Leaks::of(&[&blocks[..], &others[..]].concat()).to_string();
        assert_eq!(
            text,
            "\
6 blocks (1542 MiB) were not freed:
 place                  MiB       blocks
 ─────────────────────────────────────────────────
 src/a.rs:1, in train  1536  3 × 512 MiB  ████████
   from src/main.rs:3
 src/a.rs:2, in train     4            2  ▏
   from src/main.rs:3
 src/a.rs:3, in train     2            1  ▏
   from src/main.rs:3",
            "\n{text}\n"
        );
        let one = Leaks::of(&[block(1, "src/a.rs:1")]).to_string();
        assert!(one.starts_with("1 block (1 MiB) was not freed:\n"), "{one}");
        let many: Vec<_> = (1..=30).map(|mib| block(mib, &format!("src/a.rs:{mib}"))).collect();
        let text = Leaks::of(&many).to_string();
        assert!(text.contains("\n (10 more places) "), "{text}");
    }

    #[test]
    fn out_of_memory_says_who_holds_it() {
        let blocks = [block(512, "src/a.rs:1"), block(512, "src/a.rs:1")];
        let oom = OutOfMemory {
            requested: Bytes::gib(75),
            kind: MemKind::Device,
            path: vec!["train".to_owned()],
            line: Some("src/a.rs:9:1".to_owned()),
            breakdown: Err(Kind::Forked.into()),
            scopes: Vec::new(),
            places: by_place(&blocks),
            peak: Some(peak(1025, [holder(&["train"], Some("src/a.rs:1"), 1025)])),
            ..samples::out_of_memory("x")
        };
        let text = oom.to_string();
        let expected = "\
device 0 is out of memory: 75 GiB (device) were requested
  at src/a.rs:9:1
  in train
the holders of the memory cannot be read: ";
        assert!(text.starts_with(expected), "{text}");
        let places = "\
places that hold the most:
 place                  MiB       blocks
 ─────────────────────────────────────────────────
 src/a.rs:1, in train  1024  2 × 512 MiB  ████████
   from src/main.rs:3
device 0: the peak was 1.00 GiB over the start
";
        assert!(text.contains(places), "{text}");
        assert!(!text.ends_with('\n'));
        // The peak equals the memory in use now.
        let now =
            OutOfMemory { peak: oom.peak.clone().map(|peak| PeakHolders { bytes: Bytes::gib(1), ..peak }), ..oom };
        assert!(!now.to_string().contains("the peak was"), "{now}");
    }
}
