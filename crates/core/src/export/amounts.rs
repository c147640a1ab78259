//! A column of amounts with one unit.

use crate::model::ByteDelta;

const MIB: (&str, u32) = ("MiB", 20);
const UNITS: [(&str, u32); 5] = [("B", 0), ("KiB", 10), MIB, ("GiB", 30), ("TiB", 40)];

fn largest(bytes: &[i64]) -> u64 {
    bytes.iter().copied().map(i64::unsigned_abs).max().unwrap_or(0)
}

/// The format of the amounts of one column: one unit, with enough decimals for four significant digits of the largest amount.
/// Trailing decimals that are 0 in all rows are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amounts {
    /// The unit of all amounts of the column.
    pub unit: &'static str,
    shift: u32,
    decimals: usize,
}

impl Amounts {
    /// Returns the format for a column with these amounts.
    pub fn of(bytes: impl IntoIterator<Item = i64>) -> Self {
        let bytes: Vec<i64> = bytes.into_iter().collect();
        let largest = largest(&bytes);
        // 9,999 MiB is easy to compare with other amounts in MiB; 9.76 GiB is not.
        let is_too_large = |shift: u32| shift >= 20 && largest >> shift >= 10_000;
        let fits = |(_, shift): &(&str, u32)| largest >> shift >= 1 && (*shift <= 20 || is_too_large(shift - 10));
        let (unit, shift) = UNITS.into_iter().rev().find(fits).unwrap_or(MIB);
        Self::in_unit((unit, shift), &bytes)
    }

    /// Returns the format for amounts below a line that is in MiB, such as the line of a trace.
    pub(super) fn in_mib(bytes: impl IntoIterator<Item = i64>) -> Self {
        Self::in_unit(MIB, &bytes.into_iter().collect::<Vec<_>>())
    }

    /// Returns the format for another column of the same table: the same unit, and separate decimals.
    #[must_use]
    pub fn for_others(self, bytes: impl IntoIterator<Item = i64>) -> Self {
        Self::in_unit((self.unit, self.shift), &bytes.into_iter().collect::<Vec<_>>())
    }

    fn in_unit((unit, shift): (&'static str, u32), bytes: &[i64]) -> Self {
        let largest = largest(bytes);
        let most = match largest >> shift {
            _ if shift == 0 => 0,
            1000.. => 0,
            100.. => 1,
            10.. => 2,
            _ => 3,
        };
        let is_whole = |decimals: usize| {
            let scale = 10_i128.pow(u32::try_from(decimals).unwrap_or(0));
            bytes.iter().all(|bytes| i128::from(*bytes) * scale % (1 << shift) == 0)
        };
        let decimals = (0..most).find(|decimals| is_whole(*decimals)).unwrap_or(most);
        Self { unit, shift, decimals }
    }

    /// Returns an amount for a sentence above or below the table, such as `28 MiB` or `1.50 MiB`. An amount below `0.01` gets its own
    /// unit.
    pub fn in_words(self, bytes: i64) -> String {
        if (i128::from(bytes.unsigned_abs()) * 100) >> self.shift == 0 {
            return ByteDelta::new(bytes).to_string();
        }
        let is_whole = i128::from(bytes) % (1 << self.shift) == 0;
        format!("{} {}", Self { decimals: if is_whole { 0 } else { 2 }, ..self }.show(bytes), self.unit)
    }

    /// Formats an amount. One that is not 0 but would round to 0 is shown as less than the last digit.
    pub fn show(self, bytes: i64) -> String {
        if bytes == 0 {
            return "0".to_owned();
        }
        #[expect(clippy::cast_precision_loss, reason = "four digits are printed")]
        let amount = bytes as f64 / (1_u64 << self.shift) as f64;
        let decimals = self.decimals;
        let text = format!("{amount:.decimals$}");
        if text.contains(|digit: char| matches!(digit, '1'..='9')) {
            return text;
        }
        let smallest = 0.1_f64.powi(i32::try_from(decimals).unwrap_or(0));
        format!("{}<{smallest:.decimals$}", if bytes < 0 { "-" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::Amounts;

    #[track_caller]
    fn check(bytes: &[i64], unit: &str, expected: &[&str]) {
        let amounts = Amounts::of(bytes.iter().copied());
        let shown: Vec<_> = bytes.iter().map(|bytes| amounts.show(*bytes)).collect();
        assert_eq!((amounts.unit, shown.as_slice()), (unit, expected.map_to_owned().as_slice()));
    }

    trait Owned {
        fn map_to_owned(&self) -> Vec<String>;
    }

    impl Owned for &[&str] {
        fn map_to_owned(&self) -> Vec<String> {
            self.iter().map(|text| (*text).to_owned()).collect()
        }
    }

    const KIB: i64 = 1 << 10;
    const MIB: i64 = 1 << 20;
    const GIB: i64 = 1 << 30;

    #[test]
    fn whole_amounts_have_no_decimals() {
        check(&[798 * MIB, 286 * MIB, 0], "MiB", &["798", "286", "0"]);
        check(&[0], "MiB", &["0"]);
        check(&[], "MiB", &[]);
    }

    #[test]
    fn the_largest_has_four_digits_and_the_others_as_many_decimals() {
        check(&[45 * MIB, 4608 * KIB, 1152 * KIB], "MiB", &["45.00", "4.50", "1.12"]);
        check(&[143_771 * MIB, 5 * MIB], "GiB", &["140.4", "<0.1"]);
        check(&[9_999 * MIB, 1536 * KIB], "MiB", &["9999", "2"]);
        check(&[10_000 * MIB, 10 * GIB], "GiB", &["9.77", "10.00"]);
        check(&[-3 * MIB / 2, MIB], "MiB", &["-1.5", "1.0"]);
    }

    #[test]
    fn small_amounts_have_small_units() {
        check(&[1000, 7], "B", &["1000", "7"]);
        check(&[1536, 512], "KiB", &["1.5", "0.5"]);
        check(&[1023 * KIB], "KiB", &["1023"]);
    }

    #[test]
    fn what_is_not_0_is_not_shown_as_0() {
        check(&[500 * MIB, 1, -1], "MiB", &["500.0", "<0.1", "-<0.1"]);
        check(&[5000 * MIB, KIB], "MiB", &["5000", "<1"]);
    }

    #[test]
    fn other_amounts_have_the_same_unit() {
        let table = Amounts::of([45 * MIB, 4608 * KIB]);
        let column = table.for_others([20 * GIB, 5 * MIB]);
        assert_eq!((column.unit, column.show(20 * GIB)), ("MiB", "20480".to_owned()));
        let words = [3 * GIB, 4608 * KIB, 1, 0, -MIB].map(|bytes| table.in_words(bytes));
        assert_eq!(words, ["3072 MiB", "4.50 MiB", "1 B", "0 B", "-1 MiB"]);
        let below_a_line = Amounts::in_mib([7680]);
        assert_eq!((below_a_line.unit, below_a_line.show(7680)), ("MiB", "0.007".to_owned()));
        assert_eq!(Amounts::in_mib([20 * GIB]).show(20 * GIB), "20480");
    }

    #[test]
    fn the_largest_amounts_are_shown() {
        check(&[i64::MAX], "TiB", &["8388608"]);
        check(&[i64::MIN], "TiB", &["-8388608"]);
    }
}
