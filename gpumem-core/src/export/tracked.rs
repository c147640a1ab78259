//! What `gpumem::MemTracker` prints, in 80 columns.

use std::{borrow::Cow, fmt, io};

use unicode_width::UnicodeWidthStr;

use super::{
    table::{padded, shortened},
    text::one_line,
};
use crate::{
    model::{Bytes, MemKind, Shape},
    report::{Change, Tracked, path_in_words},
};

const WIDTH: usize = 80;
/// What a group's size, type and shape have at most.
const MOST: usize = 48;
/// What the last column has at least.
const LEAST: usize = 16;
/// Of more lines than these, in each direction, the smallest are summed up.
const MOST_LINES: usize = 30;

pub(super) fn write(tracked: &Tracked, to: &mut dyn io::Write) -> io::Result<()> {
    writeln!(to, "{tracked}")
}

impl fmt::Display for Tracked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_first {
            let device = if self.simulated { "simulated device" } else { "device" };
            writeln!(f, "GPU Memory Track | {device} {} | older blocks are not known\n", self.device)?;
        }
        let word = self.word.as_deref().map(|word| format!(": {}", one_line(word))).unwrap_or_default();
        let at = format!("At {}{word}", self.at);
        let used = self.used.map_or_else(|| "?".to_owned(), |used| used.to_string());
        let live = self.live.map(|live| format!(", live: {live}")).unwrap_or_default();
        let amounts = format!("Total Used Memory: {used}{live}");
        let room = WIDTH.saturating_sub(amounts.len());
        if at.width() + 2 > room {
            write!(f, "{at}\n{:room$}{amounts}", "")?;
        } else {
            write!(f, "{}{amounts}", padded(&at, room))?;
        }
        if self.lost > 0 {
            write!(f, "\n? | {} events were missed: what follows may be wrong", self.lost)?;
        }
        let changes = self.changes.as_deref().unwrap_or_default();
        let (more, less) = changes.split_at(changes.partition_point(|change| change.count > 0));
        let lines: Vec<_> = [more, less].into_iter().flat_map(Line::of).collect();
        let wide = |of: fn(&Line<'_>) -> usize| lines.iter().map(of).max().unwrap_or(0);
        let count = wide(|line| line.count.width());
        let what = wide(|line| line.what.width());
        let total = wide(|line| line.total.width());
        for line in &lines {
            let Line { sign, count: c, what: w, total: t, .. } = line;
            write!(f, "\n{sign} | {c:>count$}{} | {t:>total$}", padded(w, what))?;
            let place = line.place(WIDTH.saturating_sub(count + what + total + "+ |  |  | ".len()).max(LEAST));
            if !place.is_empty() {
                write!(f, " | {place}")?;
            }
        }
        if lines.is_empty() { Ok(()) } else { f.write_str("\n") }
    }
}

/// The text of one change, or of the smallest ones together.
struct Line<'a> {
    sign: char,
    count: String,
    what: String,
    total: String,
    change: Option<&'a Change>,
}

impl<'a> Line<'a> {
    fn of(changes: &'a [Change]) -> impl Iterator<Item = Self> {
        // One is not worth a line that stands for it.
        let shown = if changes.len() > MOST_LINES + 1 { MOST_LINES } else { changes.len() };
        let (shown, rest) = changes.split_at(shown);
        let rest = (!rest.is_empty()).then(|| Self {
            sign: sign(&rest[0]),
            count: String::new(),
            what: format!("and {} groups more", rest.len()),
            total: amount(rest.iter().map(Change::total).fold(0, |sum, total| sum + total.get())),
            change: None,
        });
        shown.iter().map(Self::new).chain(rest)
    }

    fn new(change: &'a Change) -> Self {
        let label = change.dtype.as_ref().zip(change.shape.as_ref());
        let label = label.map(|(dtype, shape)| format!(" {} {}", one_line(dtype), Shape(shape))).unwrap_or_default();
        let is_on_device = change.kind == MemKind::Device.name();
        let kind = if is_on_device { String::new() } else { format!(" {}", change.kind) };
        Self {
            sign: sign(change),
            count: format!("{} * ", change.count.unsigned_abs()),
            what: shortened(&format!("{}{label}{kind}", change.each), MOST),
            total: amount(change.total().get()),
            change: Some(change),
        }
    }

    /// The names, or where they were asked for, as much of it as there is room for.
    fn place(&self, room: usize) -> String {
        let Some(change) = self.change else { return String::new() };
        if change.dtype.is_some() {
            return names_in(&change.names, change.count.unsigned_abs(), room);
        }
        let path = path_in_words(&change.path);
        let heads: Vec<_> = [&change.library, &change.line].into_iter().flatten().map(String::as_str).collect();
        if heads.is_empty() {
            return shortened(&path, room);
        }
        let head = shortened(&heads.join(", "), room);
        let whole = format!("{head}, in {}", one_line(&path));
        if change.path.is_empty() || whole.width() > room { head } else { whole }
    }
}

fn sign(change: &Change) -> char {
    if change.count < 0 { '-' } else { '+' }
}

fn amount(bytes: i64) -> String {
    Bytes::new(bytes.unsigned_abs()).to_string()
}

/// `a, 2 * b and 5 more`; of the first one at least the end.
fn names_in(names: &[(String, u64)], count: u64, room: usize) -> String {
    if let [(name, _)] = names {
        return shortened(name, room);
    }
    let (mut best, mut shown, mut left) = (String::new(), String::new(), count);
    for (name, of) in names {
        let name = one_line(name);
        let name = if *of > 1 { Cow::Owned(format!("{of} * {name}")) } else { name };
        shown.push_str(if best.is_empty() { "" } else { ", " });
        shown.push_str(&name);
        left = left.saturating_sub(*of);
        let rest = if left > 0 { format!(" and {left} more") } else { String::new() };
        if best.is_empty() {
            best = format!("{}{rest}", shortened(&shown, room.saturating_sub(rest.len()).max(1)));
        } else if shown.width() > room {
            break;
        } else if shown.width() + rest.len() <= room {
            best = format!("{shown}{rest}");
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use super::*;
    use crate::{
        export::TEXT,
        model::{Device, Family},
    };

    fn change(count: i64, each: Bytes) -> Change {
        let (names, path) = (Vec::new(), Vec::new());
        Change { count, each, kind: "device", dtype: None, shape: None, names, path, line: None, library: None }
    }

    fn labelled(count: i64, each: Bytes, shape: &[usize], names: &[(&str, u64)]) -> Change {
        let names = names.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let (dtype, shape) = (Some("f32".to_owned()), Some(shape.to_vec()));
        Change { dtype, shape, names, ..change(count, each) }
    }

    fn inside(count: i64, each: Bytes, path: &[&str]) -> Change {
        Change { path: path.iter().map(|name| (*name).to_owned()).collect(), ..change(count, each) }
    }

    #[track_caller]
    fn tracked(changes: Vec<Change>) -> Tracked {
        let device = Device { family: Family::Simulated, ordinal: 1 };
        let of_process = Tracked::at(Location::caller().into(), Some("train::step".to_owned()), device);
        Tracked { used: Some(Bytes::mib(538)), live: Some(Bytes::mib(63)), changes: Some(changes), ..of_process }
    }

    #[track_caller]
    fn check(tracked: &Tracked, expected: &str) {
        let text = TEXT.tracked(tracked);
        let text = text.replace(&tracked.at.to_string(), "src/train.rs:42");
        assert_eq!(text, expected);
        assert!(text.lines().all(|line| line.width() <= WIDTH), "{text}");
    }

    #[test]
    fn a_line_tells_where_and_how_much() {
        // The place is longer than what stands for it, so that both are on one line only where it is short.
        let mut tracked = tracked(Vec::new());
        let amounts = "Total Used Memory: 538 MiB, live: 63 MiB\n";
        let space = " ".repeat(39);
        check(&tracked, &format!("At src/train.rs:42: train::step\n{space} {amounts}"));
        tracked.word = None;
        let at = format!("At {}", tracked.at);
        // The path of this file has more than 40 characters: the amounts are on a line of their own.
        assert_eq!(TEXT.tracked(&tracked), format!("{at}\n{space} {amounts}"));
        (tracked.live, tracked.changes) = (None, None);
        assert!(TEXT.tracked(&tracked).ends_with(" Total Used Memory: 538 MiB\n"));
        tracked.used = None;
        assert!(TEXT.tracked(&tracked).ends_with(" Total Used Memory: ?\n"));
    }

    #[test]
    fn the_first_one_says_what_is_told_of() {
        let first = Tracked { is_first: true, ..tracked(Vec::new()) };
        assert!(
            first.to_string().starts_with("GPU Memory Track | simulated device 1 | older blocks are not known\n\nAt ")
        );
    }

    #[test]
    fn changes_stand_in_columns() {
        let changes = vec![
            labelled(7, Bytes::mib(9), &[512, 512, 3, 3], &[("conv4.weight", 7)]),
            labelled(2, Bytes::new(2_359_296), &[256, 256, 3, 3], &[("conv3_1", 1), ("conv3_2", 1)]),
            Change { kind: "pinned host", ..inside(1, Bytes::mib(1), &["load"]) },
            labelled(1, Bytes::new(256), &[64], &[]),
            inside(-12, Bytes::new(1_500_000), &["epoch", "train::step"]),
            Change { line: Some("src/a.rs:7:9".to_owned()), ..inside(-1, Bytes::new(2), &["epoch"]) },
            Change { library: Some("cuBLAS".to_owned()), ..change(-1, Bytes::new(1)) },
        ];
        check(
            &tracked(changes),
            "At src/train.rs:42: train::step
                                        Total Used Memory: 538 MiB, live: 63 MiB
+ |  7 * 9 MiB f32 (512, 512, 3, 3)    |    63 MiB | conv4.weight
+ |  2 * 2.25 MiB f32 (256, 256, 3, 3) |  4.50 MiB | conv3_1, conv3_2
+ |  1 * 1 MiB pinned host             |     1 MiB | load
+ |  1 * 256 B f32 (64,)               |     256 B
- | 12 * 1.43 MiB                      | 17.17 MiB | epoch > train::step
- |  1 * 2 B                           |       2 B | src/a.rs:7:9, in epoch
- |  1 * 1 B                           |       1 B | cuBLAS

",
        );
    }

    #[test]
    fn long_names_and_paths_are_shortened() {
        let names: Vec<_> = (0..40).map(|name| (format!("features.{name}.weight"), 2)).collect();
        let names: Vec<_> = names.iter().map(|(name, count)| (name.as_str(), *count)).collect();
        let inside = inside(1, Bytes::mib(1), &["training", "epoch", "batch", "a_very_long_name", "step"]);
        let line = |line: &str| Change { line: Some(line.to_owned()), ..inside.clone() };
        let changes = vec![
            labelled(80, Bytes::mib(9), &[512, 512, 3, 3], &names),
            line("src/train.rs:100:9"),
            line("/home/someone/code/train/src/layers/attention.rs:100:9"),
            inside,
        ];
        check(
            &tracked(changes),
            "At src/train.rs:42: train::step
                                        Total Used Memory: 538 MiB, live: 63 MiB
+ | 80 * 9 MiB f32 (512, 512, 3, 3) | 720 MiB | …* features.0.weight and 78 more
+ |  1 * 1 MiB                      |   1 MiB | src/train.rs:100:9
+ |  1 * 1 MiB                      |   1 MiB | …n/src/layers/attention.rs:100:9
+ |  1 * 1 MiB                      |   1 MiB | …batch > a_very_long_name > step

",
        );
        let wide =
            [labelled(2, Bytes::mib(1), &[2], &[("重み行列", 1), ("畳み込み層の重み行列とその勾配の和と積", 1)])];
        let wide = wide
            .into_iter()
            .chain([Change { dtype: Some("半精度".to_owned()), ..labelled(1, Bytes::mib(2), &[9], &[]) }]);
        check(
            &tracked(wide.collect()),
            "At src/train.rs:42: train::step
                                        Total Used Memory: 538 MiB, live: 63 MiB
+ | 2 * 1 MiB f32 (2,)    | 2 MiB | 重み行列 and 1 more
+ | 1 * 2 MiB 半精度 (9,) | 2 MiB

",
        );
        assert_eq!(names_in(&[("a".to_owned(), 1), ("b".to_owned(), 1)], 2, 4), "a, b", "nothing is left out");
        assert_eq!(names_in(&[("encoder.weight".to_owned(), 1)], 1, 8), "….weight");
    }

    #[test]
    fn the_smallest_of_very_many_are_summed_up() {
        let more = (0..35).map(|at| inside(1, Bytes::mib(100 - at), &[]));
        let less = (0..31).map(|at| inside(-1, Bytes::mib(100 - at), &[]));
        let text = tracked(more.chain(less).collect()).to_string();
        assert_eq!(text.lines().filter(|line| line.starts_with("+ | 1 *")).count(), 30, "{text}");
        assert!(text.contains("\n+ |     and 5 groups more | 340 MiB\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("- | 1 *")).count(), 31, "one is told itself\n{text}");
    }

    #[test]
    fn names_do_nothing_to_the_terminal() {
        let changes =
            vec![labelled(1, Bytes::mib(1), &[], &[("a\n\u{1b}[1m", 1)]), inside(1, Bytes::mib(1), &["b\nc"])];
        let text = tracked(changes).to_string();
        assert!(text.contains("| a\\n\\u{1b}[1m\n") && text.contains("| b\\nc\n"), "{text}");
    }

    #[test]
    fn what_may_be_wrong_is_told() {
        let text = Tracked { lost: 3, ..tracked(vec![change(1, Bytes::mib(1))]) }.to_string();
        assert!(text.contains("\n? | 3 events were missed: what follows may be wrong\n+ | 1 * 1 MiB"), "{text}");
    }
}
