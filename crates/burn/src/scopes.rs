//! The scopes of one device, with their memory.
//!
//! A *point* is a moment at which the device was read: the start or the end of a scope. A *stretch* is the time between two points. During
//! a stretch, cubecl reports its reservations, but not its frees. Therefore only two bounds of its peak are known. The lower bound is the
//! memory in use at the first or at the second point, whichever is higher. The upper bound is the memory in use at the first point plus all
//! reservations in the stretch. For pools that report no sizes, the upper bound is all their memory, including the pages that they got
//! between the points. The peak of a scope is the highest peak of its stretches.

use std::thread::{self, ThreadId};

use super::{
    reservations::Reserved,
    summary::{CallMemory, Calls, Row, Summary},
};

/// The memory of a device at a point, as cubecl reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The bytes in use in pages that several tensors share. The size of each reservation in them is known.
    pub(crate) shared: u64,
    /// The bytes in use in pools that do not report the sizes of reservations.
    pub(crate) other: u64,
    /// The bytes that these pools hold from the driver.
    pub(crate) other_pages: u64,
    /// The largest allocation that one of these pools ever made.
    pub(crate) other_largest: u64,
    /// Some of these pools return pages to the driver before all unused memory is released. This is the most memory that they may have
    /// held.
    pub(crate) returned_at_most: u64,
    /// The bytes that cubecl holds from the driver.
    pub(crate) pages: u64,
}

impl Reading {
    pub(crate) fn in_use(&self) -> u64 {
        self.shared + self.other
    }
}

/// The bounds of a peak. The upper bound may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The lower bound, in bytes.
    pub at_least: u64,
    /// The upper bound, in bytes, if it is known.
    pub at_most: Option<u64>,
}

impl Peak {
    fn exactly(bytes: u64) -> Self {
        Self { at_least: bytes, at_most: Some(bytes) }
    }

    pub(crate) fn max(self, other: Self) -> Self {
        let at_most = self.at_most.zip(other.at_most).map(|(one, two)| one.max(two));
        Self { at_least: self.at_least.max(other.at_least), at_most }
    }

    /// Applies another upper bound, if it is known.
    fn limited_to(self, bound: Option<u64>) -> Self {
        let at_most = self.at_most.into_iter().chain(bound).min();
        // An upper bound below the reading must be wrong.
        Self { at_most: at_most.filter(|&most| most >= self.at_least), ..self }
    }

    /// Returns the peak of a stretch.
    fn of_stretch(first: &Reading, last: &Reading, reserved: &Reserved) -> Self {
        let at_least = first.in_use().max(last.in_use());
        let at_most = (first.shared + reserved.bytes).saturating_add(other_at_most(first, last, reserved));
        // If nothing was reserved, the peak is the memory in use at the first point.
        let at_most = if reserved.count == 0 { first.in_use() } else { at_most };
        // If memory grew by more than the reservations that the layer saw, the layer did not see all of them.
        Self { at_least, at_most: Some(at_most).filter(|&most| most >= at_least) }
    }
}

/// Returns the most memory that may have been in use in pools that report no sizes.
fn other_at_most(first: &Reading, last: &Reading, reserved: &Reserved) -> u64 {
    if reserved.unsized_count == 0 {
        return first.other;
    }
    let by_number = first.other_pages.saturating_add(reserved.unsized_pages.saturating_mul(last.other_largest));
    if reserved.unsized_pages == 0 || reserved.cleaned_up {
        return by_number;
    }
    by_number.min(first.other_pages.max(last.other_pages).saturating_add(last.returned_at_most))
}

struct Open {
    row: usize,
    start: Reading,
    peak: Peak,
    reserved: Reserved,
}

struct Node {
    parent: Option<usize>,
    name: String,
    calls: Calls,
}

/// The scopes of a device.
#[derive(Default)]
pub(crate) struct Scopes {
    nodes: Vec<Node>,
    open: Vec<Open>,
    /// The thread that opened the open scopes.
    thread: Option<ThreadId>,
    last: Reading,
    /// True if the layer has seen a reservation. Without that, there is no upper bound.
    is_observed: bool,
    unmeasured: u64,
}

impl Scopes {
    /// Returns whether a scope of this thread can be measured: no other thread has one open. If it cannot, it is counted as unmeasured.
    pub(crate) fn is_free(&mut self) -> bool {
        let is_free = self.open.is_empty() || self.thread == Some(thread::current().id());
        self.unmeasured += u64::from(!is_free);
        is_free
    }

    pub(crate) fn count_unmeasured(&mut self) {
        self.unmeasured += 1;
    }

    /// Adds a point. `reserved` contains the reservations since the last point.
    fn point(&mut self, reading: Reading, reserved: &Reserved) {
        self.is_observed |= reserved.count > 0;
        let mut peak = Peak::of_stretch(&self.last, &reading, reserved);
        if !self.is_observed {
            peak.at_most = None;
        }
        for open in &mut self.open {
            open.peak = open.peak.max(peak);
            open.reserved.add(reserved);
        }
        self.last = reading;
    }

    pub(crate) fn start(&mut self, name: &str, reading: Reading, reserved: &Reserved) {
        self.point(reading, reserved);
        self.thread = Some(thread::current().id());
        let parent = self.open.last().map(|open| open.row);
        let known = self.nodes.iter().position(|node| node.parent == parent && node.name == name);
        let row = known.unwrap_or_else(|| {
            self.nodes.push(Node { parent, name: name.to_owned(), calls: Calls::default() });
            self.nodes.len() - 1
        });
        let peak = Peak::exactly(reading.in_use());
        self.open.push(Open { row, start: reading, peak, reserved: Reserved::default() });
    }

    /// Ends the innermost scope. `pages_at_most` is the most memory from the driver, if it is known.
    pub(crate) fn end(&mut self, reading: Reading, reserved: &Reserved, pages_at_most: Option<u64>) {
        self.point(reading, reserved);
        let Some(open) = self.open.pop() else { return };
        let used = signed(reading.in_use()) - signed(open.start.in_use());
        let Reserved { count, unsized_count, bytes, largest, .. } = open.reserved;
        let peak = open.peak.limited_to(pages_at_most);
        self.nodes[open.row].calls.add(CallMemory {
            used,
            peak,
            reservations: count,
            without_size: unsized_count,
            reserved: bytes,
            largest,
        });
    }

    /// Ends the innermost scope without a measurement, because its code panicked or the device could not be read.
    pub(crate) fn abandon(&mut self) {
        self.open.pop();
        self.unmeasured += 1;
    }

    pub(crate) fn summary(&self, reading: Reading) -> Summary {
        let mut rows = Vec::with_capacity(self.nodes.len());
        self.add_rows(None, &mut Vec::new(), &mut rows);
        Summary {
            rows,
            in_use: reading.in_use(),
            pages: reading.pages,
            unmeasured: self.unmeasured,
            is_observed: self.is_observed,
        }
    }

    fn add_rows(&self, parent: Option<usize>, path: &mut Vec<String>, rows: &mut Vec<Row>) {
        for (index, node) in self.nodes.iter().enumerate().filter(|(_, node)| node.parent == parent) {
            path.push(node.name.clone());
            rows.push(Row { path: path.clone(), calls: node.calls.clone() });
            self.add_rows(Some(index), path, rows);
            path.pop();
        }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(shared: u64) -> Reading {
        Reading { shared, pages: 1000, ..Reading::default() }
    }

    fn reserved(sizes: &[u64]) -> Reserved {
        let largest = sizes.iter().copied().max().unwrap_or(0);
        Reserved { count: sizes.len() as u64, bytes: sizes.iter().sum(), largest, ..Reserved::default() }
    }

    fn peak(at_least: u64, at_most: Option<u64>) -> Peak {
        Peak { at_least, at_most }
    }

    fn last(scopes: &Scopes, row: usize) -> CallMemory {
        *scopes.nodes[row].calls.last().unwrap()
    }

    #[test]
    fn a_scope_that_frees_nothing_has_an_exact_peak() {
        let mut scopes = Scopes::default();
        scopes.start("load", reading(10), &reserved(&[10]));
        scopes.end(reading(60), &reserved(&[20, 30]), None);
        let call = CallMemory {
            used: 50,
            peak: Peak::exactly(60),
            reservations: 2,
            without_size: 0,
            reserved: 50,
            largest: 30,
        };
        assert_eq!(last(&scopes, 0), call);
    }

    #[test]
    fn a_scope_that_frees_has_two_bounds_and_its_parent_the_highest_of_its_stretches() {
        let mut scopes = Scopes::default();
        scopes.start("step", reading(100), &reserved(&[100]));
        scopes.start("forward", reading(100), &reserved(&[]));
        scopes.end(reading(160), &reserved(&[60]), None);
        scopes.start("backward", reading(160), &reserved(&[]));
        scopes.end(reading(120), &reserved(&[40, 40]), None);
        scopes.end(reading(100), &reserved(&[]), None);
        assert_eq!(last(&scopes, 1).peak, Peak::exactly(160));
        assert_eq!(last(&scopes, 2).peak, peak(160, Some(240)));
        let step = last(&scopes, 0);
        assert_eq!((step.used, step.peak, step.reservations, step.largest), (0, peak(160, Some(240)), 3, 60));
    }

    #[test]
    fn the_pages_of_the_driver_are_a_bound_too() {
        let mut scopes = Scopes::default();
        scopes.start("step", reading(100), &reserved(&[100]));
        scopes.end(reading(100), &reserved(&[900]), Some(512));
        assert_eq!(last(&scopes, 0).peak, peak(100, Some(512)));
        scopes.start("step", reading(100), &reserved(&[]));
        scopes.end(reading(100), &reserved(&[30]), Some(512));
        assert_eq!(last(&scopes, 0).peak, peak(100, Some(130)));
        assert_eq!(scopes.nodes[0].calls.peak(), Some(peak(100, Some(512))));
    }

    #[test]
    fn pools_without_sizes_count_with_all_that_they_can_have() {
        let first = Reading { other: 40, other_pages: 50, other_largest: 20, ..reading(100) };
        let last = Reading { other: 65, other_pages: 80, other_largest: 30, ..first };
        let at_most = |last, unsized_count, unsized_pages, cleaned_up| {
            let reserved = Reserved { count: 2, unsized_count, unsized_pages, cleaned_up, ..reserved(&[7]) };
            Peak::of_stretch(&first, &last, &reserved).at_most
        };
        assert_eq!(at_most(first, 0, 0, false), Some(100 + 7 + 40));
        assert_eq!(at_most(first, 1, 0, true), Some(100 + 7 + 50), "of what they had");
        assert_eq!(at_most(last, 1, 1, false), Some(100 + 7 + 80));
        assert_eq!(at_most(Reading { returned_at_most: 900, ..last }, 2, 2, false), Some(100 + 7 + 50 + 2 * 30));
        assert_eq!(at_most(Reading { other_pages: 60, ..last }, 2, 2, true), Some(100 + 7 + 50 + 2 * 30));
    }

    #[test]
    fn there_is_no_upper_bound_without_the_layer() {
        let mut scopes = Scopes::default();
        scopes.start("load", reading(0), &reserved(&[]));
        scopes.end(reading(0), &reserved(&[]), None);
        assert_eq!(last(&scopes, 0).peak, peak(0, None));
        // No reservation explains this memory.
        scopes.start("load", reading(10), &reserved(&[10]));
        scopes.end(reading(30), &reserved(&[5]), None);
        assert_eq!(last(&scopes, 0).peak, peak(30, None));
    }

    #[test]
    fn scopes_of_a_second_thread_are_not_measured_while_one_is_open() {
        let mut scopes = Scopes::default();
        assert!(scopes.is_free());
        scopes.start("step", reading(0), &reserved(&[]));
        assert!(scopes.is_free(), "a scope inside of it");
        let mut scopes = std::thread::spawn(move || {
            assert!(!scopes.is_free());
            scopes
        })
        .join()
        .unwrap();
        scopes.end(reading(0), &reserved(&[]), None);
        let mut scopes = std::thread::spawn(move || {
            assert!(scopes.is_free(), "no scope is open");
            scopes
        })
        .join()
        .unwrap();
        assert!(scopes.is_free());
        assert_eq!(scopes.summary(reading(0)).unmeasured, 1);
    }

    #[test]
    fn a_panic_leaves_the_outer_scope_as_it_is() {
        let mut scopes = Scopes::default();
        scopes.start("step", reading(0), &reserved(&[1]));
        scopes.start("forward", reading(0), &reserved(&[]));
        scopes.abandon();
        scopes.end(reading(5), &reserved(&[5]), None);
        let summary = scopes.summary(reading(5));
        assert_eq!((summary.rows[1].calls.count(), summary.unmeasured), (0, 1));
        assert_eq!(last(&scopes, 0).used, 5);
    }

    /// Compares the bounds with the true peak in random histories.
    #[test]
    fn bounds_hold() {
        let mut random = 1_u64;
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for _ in 0..10_000 {
            let mut live: Vec<u64> = (0..next(4)).map(|_| next(100)).collect();
            let mut scopes = Scopes::default();
            scopes.start("one", reading(live.iter().sum()), &reserved(&live));
            let mut true_peak: u64 = live.iter().sum();
            for _ in 0..next(4) {
                scopes.start("inner", reading(live.iter().sum()), &reserved(&[]));
                let mut sizes = Vec::new();
                for _ in 0..next(6) {
                    if next(2) == 0 && !live.is_empty() {
                        live.swap_remove(usize::try_from(next(live.len() as u64)).unwrap());
                    } else {
                        let size = next(100);
                        live.push(size);
                        sizes.push(size);
                    }
                    true_peak = true_peak.max(live.iter().sum());
                }
                scopes.end(reading(live.iter().sum()), &reserved(&sizes), None);
            }
            scopes.end(reading(live.iter().sum()), &reserved(&[]), None);
            let Peak { at_least, at_most } = last(&scopes, 0).peak;
            assert!(at_least <= true_peak && at_most.is_none_or(|most| true_peak <= most));
        }
    }
}
