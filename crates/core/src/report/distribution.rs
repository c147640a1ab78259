//! The values of a measured quantity, and their quantiles.

use super::Spread;

/// The largest number of different values that are all kept. This bounds the memory of a row of statistics to 16 KiB.
const MOST_EXACT: usize = 1000;

/// The number of leading bits that are kept of a value if there are more: values with the same leading bits differ by less than 1 %.
const ROUNDED_BITS: u32 = 8;

/// Returns the index of a quantile among this many sorted values: the first value that is not below this percentage of them. A
/// quantile is thus always a real value, never an interpolation of two.
#[doc(hidden)]
pub fn nearest_rank(count: u64, percent: u64) -> u64 {
    (u128::from(count) * u128::from(percent)).div_ceil(100).saturating_sub(1).try_into().unwrap_or(u64::MAX)
}

/// Values with their counts. Up to 1,000 different values are kept exactly. After that, values are grouped by their leading bits, and
/// the largest value of a group represents the group.
#[derive(Debug)]
#[doc(hidden)]
pub struct Distribution {
    min: i64,
    /// The largest value of each group, in order, and the number of values in the group.
    groups: Vec<(i64, u64)>,
    /// The number of leading bits that the values of one group share.
    bits: u32,
}

impl Distribution {
    /// Creates the distribution of one value.
    #[doc(hidden)]
    pub fn of(value: i64) -> Self {
        Self { min: value, groups: vec![(value, 1)], bits: u64::BITS }
    }

    /// Adds a value.
    #[doc(hidden)]
    pub fn add(&mut self, value: i64) {
        self.min = self.min.min(value);
        self.insert(value, 1);
    }

    /// Adds the values of another distribution.
    #[doc(hidden)]
    pub fn merge(&mut self, other: &Self) {
        self.min = self.min.min(other.min);
        self.round_to(self.bits.min(other.bits));
        other.groups.iter().for_each(|(value, count)| self.insert(*value, *count));
    }

    fn insert(&mut self, value: i64, count: u64) {
        let bits = self.bits;
        match self.groups.binary_search_by_key(&rounded(value, bits), |(largest, _)| rounded(*largest, bits)) {
            Ok(at) => {
                let (largest, counted) = &mut self.groups[at];
                *largest = value.max(*largest);
                *counted += count;
            }
            Err(at) => self.groups.insert(at, (value, count)),
        }
        while self.groups.len() > MOST_EXACT {
            self.round_to((self.bits - 1).min(ROUNDED_BITS));
        }
    }

    fn round_to(&mut self, bits: u32) {
        self.bits = bits;
        self.groups.dedup_by(|later, kept| {
            let is_same = rounded(later.0, bits) == rounded(kept.0, bits);
            if is_same {
                *kept = (later.0, later.1 + kept.1);
            }
            is_same
        });
    }

    /// Returns the value at this percentage.
    fn quantile(&self, percent: u64) -> i64 {
        let count = self.groups.iter().map(|(_, count)| count).sum();
        let mut before = nearest_rank(count, percent);
        for (value, count) in &self.groups {
            match before.checked_sub(*count) {
                Some(rest) => before = rest,
                None => return *value,
            }
        }
        self.min
    }

    /// Returns the minimum, the median, the 99th percentile and the maximum.
    #[doc(hidden)]
    pub fn spread(&self) -> Spread<i64> {
        Spread::new(self.min, self.quantile(50), self.quantile(99), self.quantile(100))
    }
}

/// Returns the value with only its leading bits; the others are 0.
fn rounded(value: i64, bits: u32) -> i128 {
    let amount = value.unsigned_abs();
    let dropped = (u64::BITS - amount.leading_zeros()).saturating_sub(bits);
    i128::from(value.signum()) * i128::from(amount >> dropped << dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: impl IntoIterator<Item = i64>) -> Distribution {
        let mut values = values.into_iter();
        let mut all = Distribution::of(values.next().unwrap());
        values.for_each(|value| all.add(value));
        all
    }

    #[test]
    fn a_quantile_is_a_value_that_occurred() {
        for (values, [min, median, p99, max]) in [
            (vec![512 << 20], [512 << 20; 4]),
            (vec![1000, 10], [10, 10, 1000, 1000]),
            ((1..=10).map(|call| call * 100).collect(), [100, 500, 1000, 1000]),
            (vec![-192, -192, 1344, -192, -192], [-192, -192, 1344, 1344]),
            ((1..=100).rev().collect(), [1, 50, 99, 100]),
            ((-499..=500).collect(), [-499, 0, 490, 500]),
            // Any number of calls is exact if there are few values.
            ((0..100_000).map(|call| call % 200).collect(), [0, 99, 197, 199]),
            (vec![i64::MIN, i64::MAX, 0], [i64::MIN, 0, i64::MAX, i64::MAX]),
        ] {
            assert_eq!(of(values.iter().copied()).spread(), Spread::new(min, median, p99, max), "{values:?}");
            let (one, other) = values.split_at(values.len() / 2);
            if !one.is_empty() {
                let mut both = of(one.iter().copied());
                both.merge(&of(other.iter().copied()));
                assert_eq!(both.spread(), Spread::new(min, median, p99, max), "merged {values:?}");
            }
        }
    }

    #[test]
    fn more_values_are_right_to_one_percent_and_their_memory_is_bounded() {
        let value = |at: i64| at * 1001;
        let mut all = of((-1000..=1000).map(value));
        let halves = of((-1000..0).map(value));
        let mut merged = of((0..=1000).map(value));
        merged.merge(&halves);
        for spread in [all.spread(), merged.spread()] {
            assert_eq!((spread.min, spread.max), (value(-1000), value(1000)));
            assert_eq!((spread.median % 1001, spread.p99 % 1001), (0, 0), "both occurred: {spread:?}");
            assert!((0..=1001).contains(&spread.median), "{spread:?}");
            assert!((value(980)..=value(988)).contains(&spread.p99), "{spread:?}");
        }
        // All sizes that a device can have.
        let mut numbers = fastrand::Rng::with_seed(7);
        for _ in 0..100_000 {
            let value = numbers.i64(..) >> numbers.u32(24..64);
            all.add(value);
        }
        assert!(all.groups.len() <= MOST_EXACT && all.groups.capacity() <= 2 * MOST_EXACT, "{}", all.groups.len());
        assert!(all.groups.is_sorted());
    }
}
