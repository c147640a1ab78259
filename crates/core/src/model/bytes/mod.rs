//! Amounts of memory. All arithmetic is in bytes; only printing rounds.

use std::{fmt, iter::Sum, ops, str::FromStr};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// An amount of memory in bytes.
///
/// `Display` prints a unit (`256 MiB`, `1.50 GiB`). [`get`](Bytes::get) is exact. [`mb`](Bytes::mb) is the whole number of
/// MiB (2^20 bytes), which fastai calls MB.
///
/// ```
/// use gpumem::Bytes;
/// assert_eq!("1.5 GiB".parse(), Ok(Bytes::mib(1536)));
/// assert_eq!(Bytes::mib(1536).to_string(), "1.50 GiB");
/// assert_eq!(Bytes::new(161 * 1024 * 1024 + 5).mb(), 161);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::ZERO.get(), 0);
    /// ```
    pub const ZERO: Self = Self(0);

    /// Creates an amount in bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns an amount in KiB (2^10 bytes).
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::kib(2).get(), 2 * (1 << 10));
    /// ```
    ///
    /// # Panics
    /// Panics if the result is 2^64 bytes or more, in every build.
    pub const fn kib(kib: u64) -> Self {
        Self::of(kib, KIB)
    }

    /// Returns an amount in MiB (2^20 bytes).
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::mib(2).get(), 2 * (1 << 20));
    /// ```
    ///
    /// # Panics
    /// Panics if the result is 2^64 bytes or more, in every build.
    pub const fn mib(mib: u64) -> Self {
        Self::of(mib, MIB)
    }

    /// Returns an amount in GiB (2^30 bytes).
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::gib(2).get(), 2 * (1 << 30));
    /// ```
    ///
    /// # Panics
    /// Panics if the result is 2^64 bytes or more, in every build.
    pub const fn gib(gib: u64) -> Self {
        Self::of(gib, GIB)
    }

    const fn of(number: u64, unit: u64) -> Self {
        match number.checked_mul(unit) {
            Some(bytes) => Self(bytes),
            None => panic!("gpumem: an amount of memory is over 2^64 bytes"),
        }
    }

    /// Returns the exact number of bytes.
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::kib(1).get(), 1024);
    /// ```
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the number of bytes as a signed number, at most [`i64::MAX`].
    #[doc(hidden)]
    pub fn signed(self) -> i64 {
        i64::try_from(self.0).unwrap_or(i64::MAX)
    }

    /// Returns whole MiB, rounded down. fastai calls this MB.
    ///
    /// ```
    /// assert_eq!(gpumem::Bytes::new(3 * 1024 * 1024 - 1).mb(), 2);
    /// ```
    pub const fn mb(self) -> u64 {
        self.0 / MIB
    }

    /// Returns this amount minus `other`, or `None` if `other` is larger.
    ///
    /// ```
    /// use gpumem::Bytes;
    ///
    /// assert_eq!(Bytes::mib(3).checked_sub(Bytes::mib(1)), Some(Bytes::mib(2)));
    /// assert_eq!(Bytes::mib(1).checked_sub(Bytes::mib(3)), None);
    /// ```
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }
}

/// A difference of two amounts of memory, in bytes.
///
/// ```
/// use gpumem::ByteDelta;
/// let freed = ByteDelta::new(-10 * 1024 * 1024);
/// assert_eq!((freed.mb(), freed.to_string()), (-10, "-10 MiB".to_string()));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteDelta(i64);

impl ByteDelta {
    /// No difference.
    ///
    /// ```
    /// assert_eq!(gpumem::ByteDelta::ZERO.get(), 0);
    /// ```
    pub const ZERO: Self = Self(0);

    /// Creates a difference in bytes.
    pub const fn new(bytes: i64) -> Self {
        Self(bytes)
    }

    /// Returns the exact number of bytes.
    ///
    /// ```
    /// assert_eq!(gpumem::ByteDelta::new(-5).get(), -5);
    /// ```
    pub const fn get(self) -> i64 {
        self.0
    }

    /// Returns whole MiB, rounded towards zero like Python's `int()`. fastai calls this MB.
    ///
    /// ```
    /// assert_eq!(gpumem::ByteDelta::new(-3 * 1024 * 1024 + 1).mb(), -2);
    /// ```
    pub const fn mb(self) -> i64 {
        self.0 / MIB.cast_signed()
    }
}

/// Converts amounts from and to numbers, and compares them with numbers.
macro_rules! amounts {
    ($($amount:ident($number:ty)),*) => {$(
        impl From<$number> for $amount {
            fn from(bytes: $number) -> Self {
                Self(bytes)
            }
        }

        impl From<$amount> for i128 {
            fn from(amount: $amount) -> Self {
                amount.0.into()
            }
        }

        impl PartialEq<$number> for $amount {
            fn eq(&self, bytes: &$number) -> bool {
                self.0 == *bytes
            }
        }

        impl PartialOrd<$number> for $amount {
            fn partial_cmp(&self, bytes: &$number) -> Option<std::cmp::Ordering> {
                self.0.partial_cmp(bytes)
            }
        }

        impl fmt::Debug for $amount {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($amount), "({})"), self.0)
            }
        }
    )*};
}

amounts!(Bytes(u64), ByteDelta(i64));

impl From<u32> for Bytes {
    fn from(bytes: u32) -> Self {
        Self(bytes.into())
    }
}

impl From<usize> for Bytes {
    fn from(bytes: usize) -> Self {
        Self(bytes as u64)
    }
}

/// A sum of 2^64 bytes or more becomes 2^64 − 1 bytes, because a report must not panic.
impl ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, ops::Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            TIB.. => (TIB, "TiB"),
            GIB.. => (GIB, "GiB"),
            MIB.. => (MIB, "MiB"),
            KIB.. => (KIB, "KiB"),
            _ => (1, "B"),
        };
        let text = if self.0.is_multiple_of(unit) {
            format!("{} {name}", self.0 / unit)
        } else {
            #[expect(clippy::cast_precision_loss, reason = "two decimals are printed")]
            let value = self.0 as f64 / unit as f64;
            format!("{value:.2} {name}")
        };
        f.pad(&text)
    }
}

impl fmt::Display for ByteDelta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        f.pad(&format!("{sign}{}", Bytes(self.0.unsigned_abs())))
    }
}

parse_error! {
    /// The error for a text that is not an amount of memory.
    ///
    /// ```
    /// let error = "16 apples".parse::<gpumem::Bytes>().unwrap_err();
    /// assert!(error.to_string().starts_with("`16 apples` is not an amount of memory"));
    /// ```
    ParseBytesError: "is not an amount of memory; write a number and a unit, such as 512MiB or 16GiB"
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    /// Reads a number, with or without decimals, and a unit: `B`, `KiB`, `MiB`, `GiB` or `TiB`, in upper or lower case, with
    /// or without the `i` (`MB` is 2^20 bytes in this crate). A number without a unit is in bytes.
    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let error = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let number = number.replace('_', "");
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => KIB,
            "m" | "mb" | "mib" => MIB,
            "g" | "gb" | "gib" => GIB,
            "t" | "tb" | "tib" => TIB,
            _ => return Err(error()),
        };
        let (whole, decimals) = number.split_once('.').unwrap_or((&number, ""));
        if whole.is_empty() || (number.contains('.') && decimals.is_empty()) || decimals.len() > 12 {
            return Err(error());
        }
        let whole: u128 = whole.parse().map_err(|_| error())?;
        let part = if decimals.is_empty() {
            0
        } else {
            let digits: u128 = decimals.parse().map_err(|_| error())?;
            let scale = 10_u128.pow(u32::try_from(decimals.len()).map_err(|_| error())?);
            digits * u128::from(unit) / scale
        };
        let bytes =
            whole.checked_mul(u128::from(unit)).and_then(|bytes| u64::try_from(bytes + part).ok()).ok_or_else(error)?;
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests;
