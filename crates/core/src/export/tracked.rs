//! Writes the text that `gpumem::tracker::MemTracker` prints, in 80 columns.

use std::{borrow::Cow, fmt};

use unicode_width::UnicodeWidthStr;

use super::{
    amounts::Amounts,
    marks::or_unknown,
    paint::{Paint, Role, Show},
    table::{Cell, Fit, Table, shortened},
    time::clock,
};
use crate::{
    model::{MemKind, Shape, one_line},
    report::{Change, Tracked, counted, path_in_words},
};

/// The largest number of columns of a label's type and shape.
const MOST: usize = 36;
/// The least width of the last column.
const LEAST: usize = 16;
/// The largest number of lines for new blocks, and for freed blocks. If there are more, the smallest share one line.
const MOST_LINES: usize = 30;

/// Writes a line with the time, the place and the memory in use, and the allocated and freed blocks below it.
impl Show for Tracked {
    fn show(&self, f: &mut fmt::Formatter<'_>, paint: Paint) -> fmt::Result {
        let ctx = self.ctx.as_deref().map(|ctx| format!(" ({})", one_line(ctx))).unwrap_or_default();
        let used = or_unknown(self.used);
        let live = self.live.map(|live| format!(", {live} live")).unwrap_or_default();
        let amounts = format!("device {}: {used} used{live}", self.device);
        let time = clock(self.time);
        let room = paint.width().saturating_sub(time.len() + amounts.len() + "   ".len());
        let at = without_folders(&format!("{}{ctx}", one_line(&self.at.to_string())), room.max(LEAST));
        write!(f, "{}", paint.on(Role::Heading, format_args!("{time} {at}  {amounts}")))?;
        if self.is_first {
            write!(f, "\n  {}", paint.on(Role::Faint, "the first call: blocks from before the tracing are not known"))?;
        }
        if self.lost > 0 {
            let missed = counted(self.lost, "event was missed", "events were missed");
            write!(f, "\n  {}", paint.on(Role::Alarm, format_args!("{missed}: later values may be wrong")))?;
        }
        let changes = self.changes.as_deref().unwrap_or_default();
        if changes.is_empty() {
            return Ok(());
        }
        f.write_str("\n")?;
        table(changes, paint.width()).show(f, paint)
    }
}

fn table(changes: &[Change], width: usize) -> Table {
    let (more, less) = changes.split_at(changes.partition_point(|change| change.count > 0));
    let lines: Vec<_> = [more, less].into_iter().flat_map(ChangeRow::of).collect();
    let amounts = Amounts::of(lines.iter().map(|line| line.total));
    let wide = |of: &dyn Fn(&ChangeRow<'_>) -> usize| lines.iter().map(of).max().unwrap_or(0);
    let total = wide(&|line| amounts.show(line.total).len()).max(amounts.unit.len());
    let blocks = wide(&|line| line.blocks.width()).max("blocks".len());
    let what = wide(&|line| line.what.width());
    let room = width.saturating_sub(" +  ".len() + total + 2 + blocks + 2 + if what > 0 { what + 2 } else { 0 });
    let mut table = Table::new().column("", Fit::Left).amounts("", amounts).column("blocks", Fit::Left);
    if what > 0 {
        table = table.column("", Fit::Left);
    }
    table = table.column("", Fit::LeftCutFront);
    for line in &lines {
        let (sign, role) = if line.is_less { ("-", Role::Less) } else { ("+", Role::More) };
        let cells = [Cell::from(sign).role(role), amounts.show(line.total).into(), Cell::from(&line.blocks)];
        let what = (what > 0).then(|| Cell::from(&line.what));
        table.row(cells.into_iter().chain(what).chain([Cell::from(line.place(room.max(LEAST)))]));
    }
    table
}

/// The row of one change, or of the smallest ones together.
struct ChangeRow<'a> {
    is_less: bool,
    /// The amount without a sign.
    total: i64,
    blocks: String,
    /// The type and the shape of a label, and the kind of memory that is not on the device.
    what: String,
    change: Option<&'a Change>,
}

impl<'a> ChangeRow<'a> {
    fn of(changes: &'a [Change]) -> impl Iterator<Item = Self> {
        // If only one is left, its own line takes no more space than the shared line.
        let shown = if changes.len() > MOST_LINES + 1 { MOST_LINES } else { changes.len() };
        let (shown, rest) = changes.split_at(shown);
        let rest = (!rest.is_empty()).then(|| Self {
            is_less: rest[0].count < 0,
            total: rest.iter().fold(0, |sum: i64, change| sum.saturating_add(size(change))),
            blocks: format!("({} more groups)", rest.len()),
            what: String::new(),
            change: None,
        });
        shown.iter().map(Self::new).chain(rest)
    }

    fn new(change: &'a Change) -> Self {
        let label = change.dtype.as_ref().zip(change.shape.as_ref());
        let label = label.map(|(dtype, shape)| format!("{} {}", one_line(dtype), Shape(shape)));
        let kind = (change.kind != MemKind::Device).then(|| change.kind.to_string());
        let what: Vec<_> = label.into_iter().chain(kind).collect();
        Self {
            is_less: change.count < 0,
            total: size(change),
            blocks: format!("{} × {}", change.count.unsigned_abs(), change.each),
            what: shortened(&what.join(" "), MOST),
            change: Some(change),
        }
    }

    /// Returns the names, or the places of the allocations, truncated to the remaining width.
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

/// Returns a place, without the first folders if it does not fit.
fn without_folders(place: &str, room: usize) -> String {
    if place.width() <= room {
        return place.to_owned();
    }
    let ends = place.match_indices('/').map(|(at, _)| &place[at..]);
    ends.map(|end| format!("…{end}")).find(|end| end.width() <= room).unwrap_or_else(|| shortened(place, room))
}

fn size(change: &Change) -> i64 {
    change.total().get().saturating_abs()
}

/// Returns a text such as `a, 2 × b and 5 more`. If it does not fit, only the end of the first name is shown.
fn names_in(names: &[(String, u64)], count: u64, room: usize) -> String {
    if let [(name, _)] = names {
        return shortened(name, room);
    }
    let (mut best, mut shown, mut left) = (String::new(), String::new(), count);
    for (name, of) in names {
        let name = one_line(name);
        let name = if *of > 1 { Cow::Owned(format!("{of} × {name}")) } else { name };
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
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::{
        model::{Bytes, Device, Family},
        report::SourceLine,
    };

    fn change(count: i64, each: Bytes) -> Change {
        let (names, path) = (Vec::new(), Vec::new());
        let kind = MemKind::Device;
        Change { count, each, kind, dtype: None, shape: None, names, path, line: None, library: None }
    }

    fn labelled(count: i64, each: Bytes, shape: &[usize], names: &[(&str, u64)]) -> Change {
        let names = names.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let (dtype, shape) = (Some("f32".to_owned()), Some(shape.to_vec()));
        Change { dtype, shape, names, ..change(count, each) }
    }

    fn inside(count: i64, each: Bytes, path: &[&str]) -> Change {
        Change { path: path.iter().map(|name| (*name).to_owned()).collect(), ..change(count, each) }
    }

    fn tracked(changes: Vec<Change>) -> Tracked {
        let device = Device { family: Family::Simulated, ordinal: 1 };
        let time = UNIX_EPOCH + Duration::from_secs(1_537_019_943);
        let at = SourceLine::new("src/train.rs", 42, 9);
        let nothing = Tracked::at(time, at, Some("train::step".to_owned()), device);
        Tracked { used: Some(Bytes::mib(538)), live: Some(Bytes::mib(63)), changes: Some(changes), ..nothing }
    }

    #[track_caller]
    fn check(tracked: &Tracked, expected: &str) {
        let text = tracked.to_string();
        assert_eq!(text, expected, "\n{text}\n");
        assert!(text.lines().all(|line| line.width() <= 80), "\n{text}\n");
    }

    #[test]
    fn the_header_is_one_line_with_time_and_place() {
        check(&tracked(vec![]), "13:59:03Z src/train.rs:42 (train::step)  device 1: 538 MiB used, 63 MiB live");
        let unknown = Tracked { used: None, live: None, changes: None, ctx: None, ..tracked(vec![]) };
        check(&unknown, "13:59:03Z src/train.rs:42  device 1: ? used");
        check(
            &Tracked { is_first: true, ..unknown },
            "13:59:03Z src/train.rs:42  device 1: ? used\n  the first call: blocks from before the tracing are not known",
        );
        let far = SourceLine::new("crates/training/src/train.rs", 42, 9);
        check(
            &Tracked { at: far, ..tracked(vec![]) },
            "13:59:03Z …/src/train.rs:42 (train::step)  device 1: 538 MiB used, 63 MiB live",
        );
    }

    #[test]
    fn changes_stand_in_columns() {
        let changes = vec![
            labelled(7, Bytes::mib(9), &[512, 512, 3, 3], &[("conv4.weight", 7)]),
            labelled(2, Bytes::new(2_359_296), &[256, 256, 3, 3], &[("conv3_1", 1), ("conv3_2", 1)]),
            Change { kind: MemKind::PinnedHost, ..inside(1, Bytes::mib(1), &["load"]) },
            labelled(1, Bytes::new(256), &[64], &[]),
            inside(-12, Bytes::new(1_500_000), &["epoch", "train::step"]),
            Change { line: Some("src/a.rs:7:9".to_owned()), ..inside(-1, Bytes::new(2), &["epoch"]) },
            Change { library: Some("cuBLAS".to_owned()), ..change(-1, Bytes::new(1)) },
        ];
        check(
            &tracked(changes),
            "\
13:59:03Z src/train.rs:42 (train::step)  device 1: 538 MiB used, 63 MiB live
      MiB  blocks
 ─────────────────────────────────────────────────────────────────────
 +  63.00  7 × 9 MiB      f32 (512, 512, 3, 3)  conv4.weight
 +   4.50  2 × 2.25 MiB   f32 (256, 256, 3, 3)  conv3_1, conv3_2
 +   1.00  1 × 1 MiB      pinned host           load
 +  <0.01  1 × 256 B      f32 (64,)
 -  17.17  12 × 1.43 MiB                        epoch > train::step
 -  <0.01  1 × 2 B                              src/a.rs:7:9, in epoch
 -  <0.01  1 × 1 B                              cuBLAS",
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
            "\
13:59:03Z src/train.rs:42 (train::step)  device 1: 538 MiB used, 63 MiB live
    MiB  blocks
 ───────────────────────────────────────────────────────────────────────────────
 +  720  80 × 9 MiB  f32 (512, 512, 3, 3)  2 × features.0.weight and 78 more
 +    1  1 × 1 MiB                         src/train.rs:100:9
 +    1  1 × 1 MiB                         …/train/src/layers/attention.rs:100:9
 +    1  1 × 1 MiB                         …ch > batch > a_very_long_name > step",
        );
        let wide = [labelled(
            2,
            Bytes::mib(1),
            &[2],
            &[("重み行列", 1), ("畳み込み層の重み行列とその勾配の和と積と差と商", 1)],
        )];
        let wide = wide
            .into_iter()
            .chain([Change { dtype: Some("半精度".to_owned()), ..labelled(1, Bytes::mib(2), &[9], &[]) }]);
        check(
            &tracked(wide.collect()),
            "\
13:59:03Z src/train.rs:42 (train::step)  device 1: 538 MiB used, 63 MiB live
    MiB  blocks
 ───────────────────────────────────────────────────
 +    2  2 × 1 MiB  f32 (2,)     重み行列 and 1 more
 +    2  1 × 2 MiB  半精度 (9,)",
        );
        assert_eq!(names_in(&[("a".to_owned(), 1), ("b".to_owned(), 1)], 2, 4), "a, b", "nothing is left out");
        assert_eq!(names_in(&[("encoder.weight".to_owned(), 1)], 1, 8), "….weight");
    }

    #[test]
    fn the_smallest_of_very_many_are_summed_up() {
        let more = (0..35).map(|at| inside(1, Bytes::mib(100 - at), &[]));
        let less = (0..31).map(|at| inside(-1, Bytes::mib(100 - at), &[]));
        let text = tracked(more.chain(less).collect()).to_string();
        assert_eq!(text.lines().filter(|line| line.starts_with(" + ") && line.contains("1 ×")).count(), 30, "{text}");
        assert!(text.contains("\n +  340  (5 more groups)\n"), "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with(" - ")).count(), 31, "one is shown itself\n{text}");
    }

    #[test]
    fn what_may_be_wrong_is_reported() {
        let text = Tracked { lost: 3, ..tracked(vec![change(1, Bytes::mib(1))]) }.to_string();
        assert!(text.contains("\n  3 events were missed: later values may be wrong\n"), "{text}");
    }
}
