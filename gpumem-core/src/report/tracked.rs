//! What came and went between two looks at the live blocks: the difference of two groupings.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::SystemTime,
};

use super::SourceLine;
use crate::model::{ByteDelta, Bytes, Device, Family, Label, MemKind, ShortNames};

/// What `gpumem::tracker::MemTracker::track` saw.
///
/// `Display` is the text that it prints, of at most 80 columns unless a single name is longer.
///
/// Example: see `gpumem::tracker::MemTracker::track`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Tracked {
    /// When it was called.
    pub time: SystemTime,
    /// The line that called it.
    pub at: SourceLine,
    /// What the line was called, such as its function. Never empty.
    pub word: Option<String>,
    /// The device's CUDA ordinal.
    pub device: u32,
    /// The device is a simulated one.
    pub simulated: bool,
    /// In use on the device by all processes. `None` if it could not be read.
    pub used: Option<Bytes>,
    /// In use on the device by blocks of this process that are known. `None` if allocations are not intercepted.
    pub live: Option<Bytes>,
    /// What is there more and less than at the last call, or at the first call: all that is known. What there is more of comes
    /// first, then what there is less of, the largest first. `None` if allocations are not intercepted.
    pub changes: Option<Vec<Change>>,
    /// Events since the last call that could not be taken. Not 0: `live` and `changes` may be wrong.
    pub lost: u64,
    /// It is the first call.
    pub is_first: bool,
}

/// Blocks of one sort that there are more or less of.
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Change {
    /// How many more, or where negative, less.
    pub count: i64,
    /// What was asked for with each of them.
    pub each: Bytes,
    /// [`MemKind::Device`] for all memory that is on the device for certain, [`MemKind::Managed`] or [`MemKind::PinnedHost`]. Only
    /// the first counts as [`live`](Tracked::live).
    pub kind: MemKind,
    /// The labels' element type. `None` if they have no label.
    pub dtype: Option<String>,
    /// The labels' shape.
    pub shape: Option<Vec<usize>>,
    /// The labels' names, and how many of the blocks have each.
    pub names: Vec<(String, u64)>,
    /// Of blocks without a label: the path of scopes that they were allocated in, the outermost first. Empty: outside of all
    /// scopes.
    pub path: Vec<String>,
    /// Of blocks without a label: the line that asked for them, as [`LiveBlock::line`](super::LiveBlock::line).
    pub line: Option<String>,
    /// Of blocks without a label: the library that asked for them by itself, as
    /// [`LiveBlock::library`](super::LiveBlock::library).
    pub library: Option<String>,
}

impl Change {
    /// How much more or less that is.
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
        ByteDelta::new(self.count.saturating_mul(self.each.get().try_into().unwrap_or(i64::MAX)))
    }
}

/// What blocks have in common that are counted together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sort {
    pub each: Bytes,
    pub kind: MemKind,
    pub what: What,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    Labelled(Arc<Label>),
    Asked(Arc<Asked>),
}

/// Where a block was asked for, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Asked {
    /// Full names: short ones would change when other scopes are opened.
    pub path: Vec<String>,
    pub line: Option<String>,
    pub library: Option<String>,
}

/// How many blocks of each sort there are.
pub type Groups = HashMap<Sort, u64>;

/// The kind, as far as it says where the memory is.
pub const fn place_of(kind: MemKind) -> MemKind {
    if kind.is_on_device() { MemKind::Device } else { kind }
}

/// All of them, but for what is not on the device for certain.
pub fn live(groups: &Groups) -> Bytes {
    let on_device = groups.iter().filter(|(sort, _)| sort.kind == MemKind::Device);
    Bytes::new(on_device.map(|(sort, count)| sort.each.get() * count).sum())
}

/// What a line of the difference has in common: labels that differ in nothing but their names are on one.
type Line = (bool, Reverse<Bytes>, MemKind, Option<(String, Vec<usize>)>, Option<Arc<Asked>>);

/// What there is more and less of: first more, then less, the largest first.
pub fn difference(before: &Groups, now: &Groups) -> Vec<Change> {
    let scopes = |sort: &'_ Sort| match &sort.what {
        What::Labelled(_) => None,
        What::Asked(asked) => Some(Arc::clone(asked)),
    };
    let asked: Vec<_> = before.keys().chain(now.keys()).filter_map(scopes).collect();
    let short = ShortNames::of(asked.iter().flat_map(|asked| asked.path.iter().map(String::as_str)));
    let mut lines: BTreeMap<Line, BTreeMap<&str, u64>> = BTreeMap::new();
    let gone = before.keys().filter(|sort| !now.contains_key(sort));
    for sort in now.keys().chain(gone) {
        let count = |groups: &Groups| groups.get(sort).copied().unwrap_or(0);
        let (had, has) = (count(before), count(now));
        if had == has {
            continue;
        }
        let (label, asked, name) = match &sort.what {
            What::Labelled(label) => (Some((label.dtype.clone(), label.shape.clone())), None, label.name.as_str()),
            What::Asked(asked) => (None, Some(Arc::clone(asked)), ""),
        };
        let names = lines.entry((has < had, Reverse(sort.each), sort.kind, label, asked)).or_default();
        *names.entry(name).or_default() += has.abs_diff(had);
    }
    let change = |((is_less, Reverse(each), kind, label, asked), names): (Line, BTreeMap<&str, u64>)| {
        let count = names.values().sum::<u64>().try_into().unwrap_or(i64::MAX);
        let names = names.into_iter().filter(|(name, _)| !name.is_empty());
        let mut names: Vec<_> = names.map(|(name, count)| (name.to_owned(), count)).collect();
        // So that 9 comes before 10.
        names.sort_by_key(|(name, _)| name.len());
        let (dtype, shape) = label.unzip();
        let Asked { path, line, library } = asked.map(|asked| (*asked).clone()).unwrap_or_default();
        let path = path.iter().map(|name| short.get(name).to_owned()).collect();
        Change { count: if is_less { -count } else { count }, each, kind, dtype, shape, names, path, line, library }
    };
    let mut changes: Vec<_> = lines.into_iter().map(change).collect();
    // Stable: what is as large stays in the order of the lines.
    changes.sort_by_key(|change| (change.count < 0, Reverse(change.total().get().unsigned_abs())));
    changes
}

impl Tracked {
    /// Nothing is known yet.
    #[doc(hidden)]
    pub fn at(time: SystemTime, at: SourceLine, word: Option<String>, device: Device) -> Self {
        Self {
            time,
            at,
            word: word.filter(|word| !word.is_empty()),
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

    /// A grouping, a line a sort: `7 * 9 device f32 512x3 conv1.weight`, or `2 * 64 pool > train > step` for blocks without a
    /// label. Sizes are in bytes.
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
                _ => What::Asked(Arc::new(Asked { path: place.collect(), ..Asked::default() })),
            };
            let sort = Sort { each: Bytes::new(each.parse().expect(line)), kind: place_of(kind), what };
            *groups.entry(sort).or_default() += count.parse::<u64>().expect(line);
        }
        groups
    }

    fn told(change: &Change) -> String {
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
        let changes: Vec<_> = difference(&before, &now).iter().map(told).collect();
        assert_eq!(changes, expected);
        let sum: i64 = difference(&before, &now)
            .iter()
            .filter(|change| change.kind == MemKind::Device)
            .map(|change| change.total().get())
            .sum();
        assert_eq!(sum, live(&now).get().cast_signed() - live(&before).get().cast_signed());
    }

    #[test]
    fn what_is_the_same_is_not_told() {
        check("", "", &[]);
        check("7 * 9 device f32 3x3 w\n2 * 64 pool > train", "2 * 64 device > train\n7 * 9 pool f32 3x3 w", &[]);
    }

    #[test]
    fn the_difference_is_told_and_not_both_counts() {
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
        let asked = |line: Option<&str>, library: Option<&str>| {
            let asked = Asked { path: vec![], line: line.map(str::to_owned), library: library.map(str::to_owned) };
            Sort { each: Bytes::new(8), kind: MemKind::Device, what: What::Asked(Arc::new(asked)) }
        };
        let now = [asked(None, None), asked(Some("a.rs:1"), None), asked(Some("a.rs:1"), Some("cuBLAS"))];
        let changes = difference(&Groups::new(), &now.into_iter().map(|sort| (sort, 1)).collect());
        let told: Vec<_> = changes.iter().map(|change| (change.line.as_deref(), change.library.as_deref())).collect();
        assert_eq!(told, [(None, None), (Some("a.rs:1"), None), (Some("a.rs:1"), Some("cuBLAS"))]);
    }

    #[test]
    fn numbers_are_whole() {
        let line = difference(&Groups::new(), &groups(&format!("3 * {} device", u64::MAX / 2))).remove(0);
        assert_eq!((line.count, line.total().get()), (3, i64::MAX), "not wrapped");
    }
}
