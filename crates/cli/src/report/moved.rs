//! Finds the places that have moved to another line of their file, for `gpumem diff` and `gpumem baseline`.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashSet},
    iter::successors,
};

use super::{
    annotations::position,
    change::{Change, Limit, signed},
};

/// Amounts that differ by no more than this may belong to one place.
const NEAR: Limit = Limit::Percent(2.0);
/// The number of candidates for a place around the line where it should be.
const AHEAD: usize = 8;
/// A change inserts or removes this many lines more often than it changes an amount.
const FEW_LINES: u64 = 8;
/// The number of chains of pairs that are followed: the best ones.
const CHAINS: usize = 8;

/// A line of a file that allocated memory.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: u32,
    bytes: u64,
    name: &'a str,
}

/// The lines of one file in order: before, and after.
type Sides<'a> = [Vec<Line<'a>>; 2];

/// Returns the places whose line has changed, each with its name before and after. All other places keep their names.
/// `limit` is the increase that the user allows.
///
/// If lines are inserted or removed, the places of a file keep their order, and those below move by the same number of
/// lines. Where that explains nothing, a place is found by its amount. The time needed is roughly proportional to the
/// number of places.
pub(super) fn moved<'a>(
    sides: [impl IntoIterator<Item = (&'a str, u64)>; 2],
    limit: Option<Limit>,
) -> Vec<[&'a str; 2]> {
    let mut files: BTreeMap<(&str, Option<u32>), Sides<'a>> = BTreeMap::new();
    for (at, side) in sides.into_iter().enumerate() {
        for (name, bytes) in side {
            if let Some((file, number, column)) = position(name) {
                files.entry((file, column)).or_default()[at].push(Line { number, bytes, name });
            }
        }
    }
    let is_near = |before: u64, after: u64| {
        let [before, after] = [before, after].map(signed);
        let exceeds = |limit| Change::new(before, after).exceeds(limit) || Change::new(after, before).exceeds(limit);
        !exceeds(NEAR) || limit.is_some_and(|limit| !exceeds(limit))
    };
    files.into_values().flat_map(|sides| of_file(sides, &is_near)).collect()
}

fn of_file<'a>(mut sides: Sides<'a>, is_near: &dyn Fn(u64, u64) -> bool) -> Vec<[&'a str; 2]> {
    // A baseline contains no lines for small places.
    let least = sides.each_ref().map(|side| side.iter().map(|line| line.bytes).min().unwrap_or(0));
    let numbers = numbers_of(&sides);
    for side in &mut sides {
        side.retain(|line| line.bytes >= least[0].max(least[1]) / 2 || is_on_both(&numbers, line));
        side.sort_by_key(|line| line.number);
    }
    let mut pairs = in_order(&sides, is_near);
    // The places that this order leaves without a partner.
    let paired: [HashSet<u32>; 2] = [0, 1].map(|side| pairs.iter().map(|pair| pair[side].number).collect());
    for (side, paired) in sides.iter_mut().zip(&paired) {
        side.retain(|line| !paired.contains(&line.number));
    }
    // A place that is on both sides has grown or shrunk.
    let numbers = numbers_of(&sides);
    for side in &mut sides {
        side.retain(|line| !is_on_both(&numbers, line));
        side.sort_by_key(|line| (line.bytes, line.number));
    }
    pairs.extend(by_amount(&mut sides, |before, after| before == after));
    pairs.extend(by_amount(&mut sides, is_near));
    pairs.retain(|[before, after]| before.number != after.number);
    pairs.into_iter().map(|pair| pair.map(|line| line.name)).collect()
}

fn numbers_of(sides: &Sides<'_>) -> [HashSet<u32>; 2] {
    sides.each_ref().map(|side| side.iter().map(|line| line.number).collect())
}

fn is_on_both(numbers: &[HashSet<u32>; 2], line: &Line<'_>) -> bool {
    numbers.iter().all(|numbers| numbers.contains(&line.number))
}

/// Pairs of places in order, up to some line.
#[derive(Clone, Copy)]
struct Chain {
    score: u32,
    /// The index of the first place that no pair uses yet, among the places after the change.
    next: usize,
    /// The distance between the two lines of the last pair.
    by: i64,
    /// The last pair, and the index in the list of pairs of the one before.
    last: Option<(usize, usize, Option<usize>)>,
    /// The index of the last pair in that list.
    at: Option<usize>,
}

/// Pairs places in the order of their lines. The distance between the two lines of a pair changes where lines were
/// inserted or removed. The best pairs have the same amount and the same distance as the pair before, then the same
/// amount a few lines away, then the same distance.
fn in_order<'a>([before, after]: &Sides<'a>, is_near: &dyn Fn(u64, u64) -> bool) -> Vec<[Line<'a>; 2]> {
    let mut pairs: Vec<(usize, usize, Option<usize>)> = Vec::new();
    let mut chains = vec![Chain { score: 0, next: 0, by: 0, last: None, at: None }];
    for (old, line) in before.iter().enumerate() {
        let longer = chains.iter().flat_map(|chain| {
            let expected = i64::from(line.number) + chain.by;
            let at = after.partition_point(|line| i64::from(line.number) < expected);
            let first = chain.next.max(at.saturating_sub(AHEAD / 2));
            after.iter().enumerate().skip(first).take(AHEAD).filter_map(move |(new, other)| {
                let by = i64::from(other.number) - i64::from(line.number);
                let more = match ((by - chain.by).unsigned_abs(), is_near(line.bytes, other.bytes)) {
                    (0, true) => 8,
                    (1..=FEW_LINES, true) => 6,
                    (0, false) => 4,
                    (_, true) => 3,
                    (_, false) => return None,
                };
                let last = Some((old, new, chain.at));
                Some(Chain { score: chain.score + more, next: new + 1, by, last, at: None })
            })
        });
        let longer: Vec<_> = longer.collect();
        chains.extend(longer);
        chains.sort_by_key(|chain| (chain.next, chain.by, Reverse(chain.score)));
        chains.dedup_by_key(|chain| (chain.next, chain.by));
        chains.sort_by_key(|chain| Reverse(chain.score));
        chains.truncate(CHAINS);
        for chain in &mut chains {
            if let (None, Some(last)) = (chain.at, chain.last) {
                chain.at = Some(pairs.len());
                pairs.push(last);
            }
        }
    }
    let pair = |at: usize| pairs[at];
    let mut chain: Vec<_> = successors(chains[0].at.map(pair), |(.., at)| at.map(pair)).collect();
    chain.reverse();
    chain.into_iter().map(|(old, new, _)| [before[old], after[new]]).collect()
}

/// Removes places whose amounts match from both sides, and returns them as pairs. Both sides are sorted by amount.
fn by_amount<'a>(sides: &mut Sides<'a>, is_same: impl Fn(u64, u64) -> bool) -> Vec<[Line<'a>; 2]> {
    let [mut before, mut after] = sides.each_mut().map(|side| std::mem::take(side).into_iter().peekable());
    let mut pairs = Vec::new();
    while let (Some(old), Some(new)) = (before.peek(), after.peek()) {
        if is_same(old.bytes, new.bytes) {
            pairs.extend(before.next().zip(after.next()).map(<[_; 2]>::from));
        } else if old.bytes < new.bytes {
            sides[0].extend(before.next());
        } else {
            sides[1].extend(after.next());
        }
    }
    sides[0].extend(before);
    sides[1].extend(after);
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each place is its line and its amount in MiB. The pairs are the lines before and after.
    #[test]
    fn places_move_with_the_lines_above_them() {
        for (before, after, expected) in [
            ("10=100 20=50", "10=100 20=50", ""),
            ("10=100 20=50", "10=130 20=20", ""),
            ("10=100 20=50", "12=101 22=50", "10→12 20→22"),
            // The names that are on both sides belong to different places, and one of the places grew.
            ("10=100 12=50 14=70", "12=100 14=50 16=90", "10→12 12→14 14→16"),
            ("10=100 12=50 14=70", "10=5 12=100 14=50 16=70", "10→12 12→14 14→16"),
            // Lines were inserted between them, and others were removed.
            ("10=100 20=50 30=70", "10=100 22=50 32=70", "20→22 30→32"),
            ("10=100 20=50 30=70 40=8", "10=100 25=70 35=9", "30→25 40→35"),
            // A line was inserted above the last one, or removed below an inserted line.
            ("3=100 4=50 5=33 6=20", "3=100 4=50 5=33 6=7 7=20", "6→7"),
            ("3=100 4=50 5=33 6=20", "4=100 5=50 6=20", "3→4 4→5"),
            // All have one amount, and the first one shrank, or a line was inserted above it.
            ("1=20 2=20 3=20 4=20 5=20 6=20", "1=7 2=20 3=20 4=20 5=20 6=20", ""),
            ("1=20 2=20 3=20 4=20 5=20", "1=7 2=20 3=20 4=20 5=20 6=20", "1→2 2→3 3→4 4→5 5→6"),
            // All amounts differ, or a place grew at its line.
            ("10=100", "12=130", ""),
            ("10=100", "10=200 50=100", ""),
            // The functions changed places.
            ("10=100 20=50", "30=50 60=100", "10→60 20→30"),
            ("10=100 20=50", "", ""),
        ] {
            let side = |text: &str| -> Vec<(String, u64)> {
                let place = |place: &str| {
                    let (line, mib) = place.split_once('=').expect("both are there");
                    (format!("a.py:{line}"), mib.parse::<u64>().expect("it is a number") << 20)
                };
                text.split_whitespace().map(place).collect()
            };
            let sides = [before, after].map(side);
            let pairs = moved(sides.each_ref().map(|side| side.iter().map(|(name, bytes)| (&**name, *bytes))), None);
            let line = |name: &str| name.trim_start_matches("a.py:").to_owned();
            let mut found: Vec<_> = pairs.iter().map(|pair| pair.map(line).join("→")).collect();
            found.sort();
            assert_eq!(found.join(" "), expected, "{before} and {after}");
        }
    }

    /// Comparing each place with each other place would take minutes.
    #[test]
    fn the_work_grows_with_the_number_of_places() {
        let side = |by: u64, bytes: fn(u64) -> u64| -> Vec<(String, u64)> {
            (0..30_000).map(|line| (format!("a.py:{}", line * 3 + by), bytes(line))).collect()
        };
        let equal = |_| 1 << 20;
        let other = |line: u64| (line * 7919 % 30_000) << 12;
        for sides in
            [[side(0, equal), side(1, equal)], [side(0, other), side(1, other)], [side(0, other), side(1, equal)]]
        {
            let pairs = moved(sides.each_ref().map(|side| side.iter().map(|(name, bytes)| (&**name, *bytes))), None);
            assert!(pairs.len() <= 30_000);
        }
    }
}
