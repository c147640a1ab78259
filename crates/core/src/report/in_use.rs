//! Who has the memory of a device, in one sentence. Nothing is measured here.

use std::fmt;

use crate::model::{Bytes, one_line};

/// Above this size, the largest part of the driver's memory is named.
const MUCH: Bytes = Bytes::gib(1);

/// Who has the memory of a device. A value that is not known is `None`.
///
/// `Display` is a sentence without a full stop, such as `free 312 MiB; in use by allocations 61 GiB, by the driver for this process
/// 4.9 GiB (most: local memory of deep (x.cu:43) 3.9 GiB), by other processes 13 GiB`.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let trace = gpumem::GpuMemTrace::builder().silent(true).start()?;
/// # use gpumem::Bytes;
/// let block = gpu.alloc(Bytes::gib(2))?;
/// let in_use = gpumem::breakdown(0)?.in_use;
/// assert_eq!(in_use.to_string(), "free 14 GiB; in use by allocations 2 GiB");
/// # drop(block);
/// # drop(trace);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InUse {
    /// The free memory of the device.
    pub free: Option<Bytes>,
    /// The memory of this process that its allocations use, and that its own pools keep.
    pub allocations: Bytes,
    /// The memory that the driver took by itself for this process, with the unused memory of stream-ordered pools.
    pub driver: Option<Bytes>,
    /// True if `driver` is an upper bound, because other processes may have used the device. `rest` is then a lower bound.
    pub is_at_most: bool,
    /// The largest part of `driver`, if one is known.
    pub largest: Option<LargestOfDriver>,
    /// The memory of other processes.
    pub others: Option<Bytes>,
    /// The memory in use that is in none of the values above: if `driver` or `others` is not known, it contains their memory, else it
    /// belongs to no process.
    pub rest: Option<Bytes>,
}

/// The largest part of the memory that the driver took by itself.
///
/// Example: see [`InUse`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LargestOfDriver {
    /// The cause, such as `local memory of deep (x.cu:43)`.
    pub name: String,
    /// Its size.
    pub bytes: Bytes,
}

impl LargestOfDriver {
    /// Creates a part of the driver's memory.
    #[doc(hidden)]
    pub fn new(name: &str, bytes: Bytes) -> Self {
        Self { name: one_line(name).into_owned(), bytes }
    }
}

impl InUse {
    /// Returns the values that add up to the used memory of the device. `used` and `free` are `None` if the device was not read.
    #[doc(hidden)]
    pub fn of_process(
        [free, used]: [Option<Bytes>; 2],
        allocations: Bytes,
        (driver, is_at_most): (Option<Bytes>, bool),
        largest: Option<LargestOfDriver>,
    ) -> Self {
        let known = allocations + driver.unwrap_or_default();
        let rest = used.map(|used| used.checked_sub(known).unwrap_or_default());
        Self { free, allocations, driver, is_at_most, largest, others: None, rest }
    }

    /// Returns the largest part of the driver's memory, if the driver has more than all others or much.
    fn named_largest(&self) -> Option<&LargestOfDriver> {
        let driver = self.driver?;
        let rest = [Some(self.allocations), self.others, self.rest];
        let is_largest = rest.into_iter().flatten().all(|bytes| bytes < driver);
        self.largest.as_ref().filter(|_| is_largest || driver > MUCH)
    }
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(free) = self.free {
            write!(f, "free {free}; ")?;
        }
        write!(f, "in use by allocations {}", self.allocations)?;
        let (at_most, at_least) = if self.is_at_most { ("≤ ", "≥ ") } else { ("", "") };
        if let Some(driver) = self.driver.filter(|driver| *driver > Bytes::ZERO) {
            write!(f, ", by the driver for this process {at_most}{driver}")?;
            if let Some(LargestOfDriver { name, bytes }) = self.named_largest() {
                write!(f, " (most: {name} {at_most}{bytes})")?;
            }
        }
        if let Some(others) = self.others.filter(|others| *others > Bytes::ZERO) {
            write!(f, ", by other processes {others}")?;
        }
        let rest = match (self.driver, self.others) {
            (Some(_), Some(_)) => "by no process",
            (Some(_), None) => "by others",
            (None, _) => "by other processes and the driver",
        };
        match self.rest.filter(|bytes| *bytes > Bytes::ZERO) {
            Some(bytes) => write!(f, ", {rest} {at_least}{bytes}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_not_zero() {
        let [free, used] = [Some(Bytes::mib(300)), Some(Bytes::gib(80))];
        let of = |driver, is_at_most| {
            let largest = Some(LargestOfDriver::new("local memory of deep (x.cu:43)", Bytes::gib(4)));
            InUse::of_process([free, used], Bytes::gib(61), (driver, is_at_most), largest)
        };
        let start = "free 300 MiB; in use by allocations 61 GiB, by";
        assert_eq!(of(None, false).to_string(), format!("{start} other processes and the driver 19 GiB"));
        let driver = Some(Bytes::gib(5));
        let most = "(most: local memory of deep (x.cu:43)";
        assert_eq!(
            of(driver, false).to_string(),
            format!("{start} the driver for this process 5 GiB {most} 4 GiB), by others 14 GiB")
        );
        assert_eq!(
            of(driver, true).to_string(),
            format!("{start} the driver for this process ≤ 5 GiB {most} ≤ 4 GiB), by others ≥ 14 GiB")
        );
        let all = InUse { others: Some(Bytes::gib(13)), rest: Some(Bytes::mib(9)), ..of(driver, false) };
        assert!(all.to_string().ends_with(", by other processes 13 GiB, by no process 9 MiB"), "{all}");
        assert!(!of(Some(Bytes::mib(600)), false).to_string().contains("most"));
        let not_read = InUse::of_process([None, None], Bytes::gib(1), (driver, false), None);
        assert_eq!(not_read.to_string(), "in use by allocations 1 GiB, by the driver for this process 5 GiB");
    }

    #[test]
    fn the_largest_part_is_named_if_the_driver_has_more_than_others() {
        let largest = Some(LargestOfDriver::new("context", Bytes::mib(526)));
        let of = |used| {
            let driver = (Some(Bytes::mib(600)), false);
            InUse::of_process([None, Some(Bytes::mib(used))], Bytes::mib(10), driver, largest.clone()).to_string()
        };
        assert!(of(700).contains("(most: context 526 MiB), by others 90 MiB"), "{}", of(700));
        assert!(!of(2000).contains("most"), "{}", of(2000));
    }
}
