//! The difference of the live blocks at two points of a program.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::SystemTime,
};

use super::SourceLine;
use crate::model::{ByteDelta, Bytes, Device, Family, Label, MemKind, ShortNames};

/// One point of a tracker. `gpumem::tracker::MemTracker::track` returns it.
///
/// `Display` is the text that the tracker prints, with at most 80 columns unless a single name is longer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tracked {
    /// The time of the call.
    pub time: SystemTime,
    /// The line of the call.
    pub at: SourceLine,
    /// The name given in the call, such as that of its function. Never empty.
    pub ctx: Option<String>,
    /// The device's CUDA ordinal.
    pub device: u32,
    /// True if the device is simulated.
    pub simulated: bool,
    /// The memory in use on the device by all processes. `None` if it could not be read.
    pub used: Option<Bytes>,
    /// The memory of the blocks of this process on the device that gpumem knows. `None` if allocations are not
    /// intercepted.
    pub live: Option<Bytes>,
    /// The blocks allocated and freed since the last call, or all blocks at the first call. Allocated ones come first, then
    /// freed ones, the largest first. `None` if allocations are not intercepted.
    pub changes: Option<Vec<Change>>,
    /// The number of events since the last call that could not be recorded. If not 0, `live` and `changes` may be
    /// wrong.
    pub lost: u64,
    /// True if this is the first call of the tracker.
    pub is_first: bool,
}

/// Blocks of one size and place, or of one label, of which there are more or fewer than before.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::Bytes;
/// # let mut tracker = gpumem::tracker::MemTracker::new();
/// let blocks = [gpu.alloc(Bytes::mib(9))?, gpu.alloc(Bytes::mib(9))?];
/// let changes = tracker.track().changes.unwrap();
/// assert_eq!((changes[0].count, changes[0].each), (2, Bytes::mib(9)));
/// # drop(blocks);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// The increase in the number of blocks; negative if there are fewer.
    pub count: i64,
    /// The requested size of each.
    pub each: Bytes,
    /// [`MemKind::Device`] for all memory that is certainly on the device, [`MemKind::Managed`] or [`MemKind::PinnedHost`]. Only
    /// the first counts as [`live`](Tracked::live).
    pub kind: MemKind,
    /// The element type of their label. `None` if they have no label.
    pub dtype: Option<String>,
    /// The shape of their label.
    pub shape: Option<Vec<usize>>,
    /// The names of their labels, and the number of blocks with each.
    pub names: Vec<(String, u64)>,
    /// The path of scopes in which blocks without a label were allocated, the outermost first. Empty outside all scopes.
    pub path: Vec<String>,
    /// The line that allocated blocks without a label, as [`LiveBlock::line`](super::LiveBlock::line).
    pub line: Option<String>,
    /// The library whose code allocated blocks without a label, as [`LiveBlock::library`](super::LiveBlock::library).
    pub library: Option<String>,
}

impl Change {
    /// Returns the total size of these blocks; negative if there are fewer.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// # let mut tracker = gpumem::tracker::MemTracker::new();
    /// let block = gpu.alloc(Bytes::mib(9))?;
    /// tracker.track();
    /// drop(block);
    /// let changes = tracker.track().changes.unwrap();
    /// assert_eq!(changes[0].total().mb(), -9);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn total(&self) -> ByteDelta {
        ByteDelta::new(self.count.saturating_mul(self.each.signed()))
    }
}

/// The common properties of the blocks of one group.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sort {
    /// The requested size of each block.
    pub each: Bytes,
    /// The place of the memory, as [`place_of`] returns it.
    pub kind: MemKind,
    /// The label, or the place of the allocations.
    pub what: What,
}

/// The identity of blocks for a tracker, in addition to size and kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// The program gave this label to the blocks.
    Labelled(Arc<Label>),
    /// The blocks have no label. They were allocated here.
    Unlabelled(Arc<AllocatedAt>),
}

/// The place of a block's allocation, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocatedAt {
    /// Full names: short ones would change when other scopes are opened.
    pub path: Vec<String>,
    /// The line of the program, as [`LiveBlock::line`](super::LiveBlock::line).
    pub line: Option<String>,
    /// The library, as [`LiveBlock::library`](super::LiveBlock::library).
    pub library: Option<String>,
}

/// The number of blocks of each sort.
pub type Groups = HashMap<Sort, u64>;

/// Returns the kind, reduced to the place of the memory: all kinds on the device are [`MemKind::Device`].
pub const fn place_of(kind: MemKind) -> MemKind {
    if kind.is_on_device() { MemKind::Device } else { kind }
}

/// Returns the size of all blocks that are certainly on the device.
pub fn live(groups: &Groups) -> Bytes {
    let on_device = groups.iter().filter(|(sort, _)| sort.kind == MemKind::Device);
    Bytes::new(on_device.map(|(sort, count)| sort.each.get() * count).sum())
}

/// The key of a line of the difference. Labels that differ only in their names share a line.
type Line = (bool, Reverse<Bytes>, MemKind, Option<(String, Vec<usize>)>, Option<Arc<AllocatedAt>>);

/// Returns the increased groups, then the decreased ones, each with the largest first.
pub fn difference(before: &Groups, now: &Groups) -> Vec<Change> {
    let scopes = |sort: &'_ Sort| match &sort.what {
        What::Labelled(_) => None,
        What::Unlabelled(place) => Some(Arc::clone(place)),
    };
    let places: Vec<_> = before.keys().chain(now.keys()).filter_map(scopes).collect();
    let short = ShortNames::of(places.iter().flat_map(|place| place.path.iter().map(String::as_str)));
    let mut lines: BTreeMap<Line, BTreeMap<&str, u64>> = BTreeMap::new();
    let gone = before.keys().filter(|sort| !now.contains_key(sort));
    for sort in now.keys().chain(gone) {
        let count = |groups: &Groups| groups.get(sort).copied().unwrap_or(0);
        let (had, has) = (count(before), count(now));
        if had == has {
            continue;
        }
        let (label, place, name) = match &sort.what {
            What::Labelled(label) => (Some((label.dtype.clone(), label.shape.clone())), None, label.name.as_str()),
            What::Unlabelled(place) => (None, Some(Arc::clone(place)), ""),
        };
        let names = lines.entry((has < had, Reverse(sort.each), sort.kind, label, place)).or_default();
        *names.entry(name).or_default() += has.abs_diff(had);
    }
    let change = |((is_less, Reverse(each), kind, label, place), names): (Line, BTreeMap<&str, u64>)| {
        let count = names.values().sum::<u64>().try_into().unwrap_or(i64::MAX);
        let names = names.into_iter().filter(|(name, _)| !name.is_empty());
        let mut names: Vec<_> = names.map(|(name, count)| (name.to_owned(), count)).collect();
        // Names are sorted by length first, so that 9 comes before 10.
        names.sort_by_key(|(name, _)| name.len());
        let (dtype, shape) = label.unzip();
        let AllocatedAt { path, line, library } = place.map(|place| (*place).clone()).unwrap_or_default();
        let path = path.iter().map(|name| short.get(name).to_owned()).collect();
        Change { count: if is_less { -count } else { count }, each, kind, dtype, shape, names, path, line, library }
    };
    let mut changes: Vec<_> = lines.into_iter().map(change).collect();
    // The sort is stable: changes of one size keep the order of the lines.
    changes.sort_by_key(|change| (change.count < 0, Reverse(change.total().get().unsigned_abs())));
    changes
}

impl Tracked {
    /// Creates a point with all other fields unknown.
    #[doc(hidden)]
    pub fn at(time: SystemTime, at: SourceLine, ctx: Option<String>, device: Device) -> Self {
        Self {
            time,
            at,
            ctx: ctx.filter(|ctx| !ctx.is_empty()),
            device: device.ordinal,
            simulated: device.family == Family::Simulated,
            used: None,
            live: None,
            changes: None,
            lost: 0,
            is_first: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses a grouping with one sort per line: `7 * 9 device f32 512x3 conv1.weight`, or `2 * 64 pool > train > step` for
    /// blocks without a label. Sizes are in bytes.
    fn groups(script: &str) -> Groups {
        let mut groups = Groups::new();
        for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (head, place) = line.split_once(" >").unwrap_or((line, ""));
            let words: Vec<_> = head.split_whitespace().collect();
            let [count, "*", each, kind, label @ ..] = words.as_slice() else { panic!("{line}") };
            let kind = MemKind::ALL.into_iter().find(|known| known.name() == *kind).expect(line);
            let place = place.split(" > ").map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned);
            let what = match label {
                [dtype, shape, name @ ..] => {
                    let shape = shape.split('x').filter_map(|size| size.parse().ok()).collect();
                    What::Labelled(Arc::new(Label { name: name.join(" "), shape, dtype: (*dtype).to_owned() }))
                }
                _ => What::Unlabelled(Arc::new(AllocatedAt { path: place.collect(), ..AllocatedAt::default() })),
            };
            let sort = Sort { each: Bytes::new(each.parse().expect(line)), kind: place_of(kind), what };
            *groups.entry(sort).or_default() += count.parse::<u64>().expect(line);
        }
        groups
    }

    fn text(change: &Change) -> String {
        let Change { count, each, kind, dtype, shape, names, path, .. } = change;
        let what = dtype.as_ref().zip(shape.as_ref()).map(|(dtype, shape)| {
            let names: Vec<_> = names.iter().map(|(name, count)| format!(" {name}:{count}")).collect();
            format!("{dtype} {}{}", crate::model::Shape(shape), names.concat())
        });
        format!("{count:+} * {} {kind} {}", each.get(), what.unwrap_or_else(|| format!(">{}", path.join(">"))))
    }

    #[track_caller]
    fn check(before: &str, now: &str, expected: &[&str]) {
        let (before, now) = (groups(before), groups(now));
        let changes: Vec<_> = difference(&before, &now).iter().map(text).collect();
        assert_eq!(changes, expected);
        let sum: i64 = difference(&before, &now)
            .iter()
            .filter(|change| change.kind == MemKind::Device)
            .map(|change| change.total().get())
            .sum();
        assert_eq!(sum, live(&now).get().cast_signed() - live(&before).get().cast_signed());
    }

    #[test]
    fn equal_groups_have_no_change() {
        check("", "", &[]);
        check("7 * 9 device f32 3x3 w\n2 * 64 pool > train", "2 * 64 device > train\n7 * 9 pool f32 3x3 w", &[]);
    }

    #[test]
    fn a_change_has_the_difference_of_the_counts() {
        check("7 * 9 device f32 3x3 w", "8 * 9 device f32 3x3 w", &["+1 * 9 device f32 (3, 3) w:1"]);
        check("8 * 9 device f32 3x3 w", "7 * 9 device f32 3x3 w", &["-1 * 9 device f32 (3, 3) w:1"]);
        check("3 * 9 pool", "1 * 9 pool", &["-2 * 9 device >"]);
        check("", "7 * 9 device", &["+7 * 9 device >"]);
        check("7 * 9 device", "", &["-7 * 9 device >"]);
    }

    #[test]
    fn what_differs_in_anything_but_its_name_is_apart() {
        check(
            "",
            "1 * 8 device f32 2 a
             1 * 8 device i32 2 a
             1 * 8 device f32 1x2 a
             1 * 8 managed f32 2 a
             1 * 16 device f32 2 a
             1 * 8 device > a
             1 * 8 device > a > b",
            &[
                "+1 * 16 device f32 (2,) a:1",
                "+1 * 8 device >a",
                "+1 * 8 device >a>b",
                "+1 * 8 device f32 (1, 2) a:1",
                "+1 * 8 device f32 (2,) a:1",
                "+1 * 8 device i32 (2,) a:1",
                "+1 * 8 managed f32 (2,) a:1",
            ],
        );
    }

    #[test]
    fn names_share_a_line() {
        check(
            "1 * 9 device f32 3x3 a\n1 * 9 device f32 3x3 z",
            "1 * 9 device f32 3x3 a\n2 * 9 device f32 3x3 c\n1 * 9 pool f32 3x3 b\n1 * 9 device f32 3x3",
            &["+4 * 9 device f32 (3, 3) b:1 c:2", "-1 * 9 device f32 (3, 3) z:1"],
        );
        check("", "1 * 9 device f32 3 w10\n1 * 9 device f32 3 w9", &["+2 * 9 device f32 (3,) w9:1 w10:1"]);
    }

    #[test]
    fn a_label_that_comes_late_takes_its_block_to_another_group() {
        check(
            "2 * 9 device > load",
            "1 * 9 device > load\n1 * 9 device f32 9 w",
            &["+1 * 9 device f32 (9,) w:1", "-1 * 9 device >load"],
        );
        check(
            "1 * 9 device f32 9 w",
            "1 * 9 device f32 9 v",
            &["+1 * 9 device f32 (9,) v:1", "-1 * 9 device f32 (9,) w:1"],
        );
    }

    #[test]
    fn more_comes_before_less_and_large_before_small() {
        check(
            "1 * 100 device > gone\n1 * 300 device > gone",
            "1 * 50 device\n10 * 20 device\n1 * 4000 managed",
            &[
                "+1 * 4000 managed >",
                "+10 * 20 device >",
                "+1 * 50 device >",
                "-1 * 300 device >gone",
                "-1 * 100 device >gone",
            ],
        );
    }

    #[test]
    fn lines_and_libraries_are_apart() {
        let place = |line: Option<&str>, library: Option<&str>| {
            let place =
                AllocatedAt { path: vec![], line: line.map(str::to_owned), library: library.map(str::to_owned) };
            Sort { each: Bytes::new(8), kind: MemKind::Device, what: What::Unlabelled(Arc::new(place)) }
        };
        let now = [place(None, None), place(Some("a.rs:1"), None), place(Some("a.rs:1"), Some("cuBLAS"))];
        let changes = difference(&Groups::new(), &now.into_iter().map(|sort| (sort, 1)).collect());
        let found: Vec<_> = changes.iter().map(|change| (change.line.as_deref(), change.library.as_deref())).collect();
        assert_eq!(found, [(None, None), (Some("a.rs:1"), None), (Some("a.rs:1"), Some("cuBLAS"))]);
    }

    #[test]
    fn numbers_are_whole() {
        let line = difference(&Groups::new(), &groups(&format!("3 * {} device", u64::MAX / 2))).remove(0);
        assert_eq!((line.count, line.total().get()), (3, i64::MAX), "not wrapped");
    }
}
