//! Writes the unused memory of registered pools as one line each.

use std::fmt;

use super::amounts::Amounts;
use crate::{
    model::{Bytes, one_line},
    report::{PoolAtPeak, RegisteredPool, counted},
};

impl fmt::Display for PoolAtPeak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, used, reserved } = self;
        f.write_str(&cache_of(name, *used, *reserved, Amounts::of([used, reserved].map(|bytes| bytes.signed()))))
    }
}

/// Returns the unused memory of a pool in the unit of a table.
pub(super) fn cache_of(name: &str, used: Bytes, reserved: Bytes, table: Amounts) -> String {
    let name = one_line(name);
    let in_words = |bytes: Bytes| table.in_words(bytes.signed());
    let (unused, used, reserved) = (reserved.checked_sub(used).map(in_words), in_words(used), in_words(reserved));
    match unused {
        Some(unused) => format!("cache of {name}: {unused} of {reserved}"),
        None => format!("cache of {name}: not known, because its parts have {used} and its blocks only {reserved}"),
    }
}

impl fmt::Display for RegisteredPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&pool_in_words(self, Amounts::of([self.used, self.reserved].map(Bytes::signed))))
    }
}

/// Returns the line of a pool in the unit of the table above it.
pub fn pool_in_words(pool: &RegisteredPool, table: Amounts) -> String {
    let RegisteredPool { name, used, reserved, reported, unknown_frees, doubled, outside, late, .. } = pool;
    let RegisteredPool { read_early, below, overlapping, counted_twice, .. } = pool;
    let amount = |bytes: &Bytes| table.in_words(bytes.signed());
    let mut parts = vec![match (overlapping, *counted_twice) {
        (0, _) => cache_of(name, *used, *reserved, table),
        (_, Bytes::ZERO) => format!("cache of {}: not known, because parts overlapped", one_line(name)),
        (_, twice) => {
            let twice = amount(&twice);
            format!("cache of {}: not known, because parts overlap: {twice} count twice", one_line(name))
        }
    }];
    if reported != reserved {
        let than = if reported > reserved { "more than its blocks" } else { "less than its parts" };
        parts.push(format!("it reports {}, {than}", amount(reported)));
    }
    let wrong = [
        (unknown_frees, "free of an unknown part", "frees of unknown parts"),
        (doubled, "part at the address of a live part", "parts at the address of a live part"),
        (outside, "part or size outside of its blocks", "parts or sizes outside of its blocks"),
        (late, "block known as its own too late", "blocks known as its own too late"),
        (below, "report of less memory than its parts", "reports of less memory than its parts"),
        (overlapping, "part that overlaps another one", "parts that overlap other ones"),
    ];
    let wrong = wrong.into_iter().filter(|(count, ..)| **count > 0);
    let wrong: Vec<_> = wrong.map(|(count, one, many)| counted(*count, one, many)).collect();
    if !wrong.is_empty() {
        parts.push(format!("wrong calls: {}", wrong.join(", ")));
    }
    if *read_early > 0 {
        let blocks = counted(*read_early, "block", "blocks");
        parts.push(format!("peaks may be too high by {blocks} that counted for the program until the first part"));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::samples::pool;

    #[test]
    fn a_line_has_one_unit_which_is_that_of_the_table() {
        let pool = PoolAtPeak { name: "arena".to_owned(), used: Bytes::mib(512), reserved: Bytes::kib(1_310_720) };
        assert_eq!(pool.to_string(), "cache of arena: 768 MiB of 1280 MiB");
        let line = cache_of("arena", pool.used, pool.reserved, Amounts::of([Bytes::gib(20).signed()]));
        assert_eq!(line, "cache of arena: 0.75 GiB of 1.25 GiB");
    }

    #[test]
    fn wrong_calls_are_in_the_row_one_and_many() {
        let mut pool = pool("arena", Bytes::mib(2), Bytes::mib(8));
        assert_eq!(pool.to_string(), "cache of arena: 6 MiB of 8 MiB");
        (pool.outside, pool.late) = (1, 1);
        let row = pool.to_string();
        assert!(
            row.ends_with("; wrong calls: 1 part or size outside of its blocks, 1 block known as its own too late"),
            "{row}"
        );
        (pool.unknown_frees, pool.doubled, pool.outside, pool.late) = (1, 2, 3, 0);
        let row = pool.to_string();
        let wrong =
            "1 free of an unknown part, 2 parts at the address of a live part, 3 parts or sizes outside of its blocks";
        assert!(row.ends_with(wrong), "{row}");
        pool.reported = Bytes::gib(32);
        let too_much = "cache of arena: 6 MiB of 8 MiB; it reports 32768 MiB, more than its blocks; wrong calls: ";
        assert!(pool.to_string().starts_with(too_much), "{pool}");
        (pool.reserved, pool.reported) = (Bytes::ZERO, Bytes::ZERO);
        let unknown = "cache of arena: not known, because its parts have 2 MiB and its blocks only 0 B; wrong calls: ";
        assert!(pool.to_string().starts_with(unknown), "{pool}");
        pool.reported = Bytes::mib(1);
        (pool.reserved, pool.overlapping, pool.counted_twice) = (Bytes::mib(8), 1, Bytes::mib(1));
        let start = "cache of arena: not known, because parts overlap: 1 MiB count twice; it reports 1 MiB, less than its parts; wrong calls: ";
        assert!(
            pool.to_string().starts_with(start) && pool.to_string().ends_with(", 1 part that overlaps another one"),
            "{pool}"
        );
        pool.counted_twice = Bytes::ZERO;
        let start = "cache of arena: not known, because parts overlapped; it reports";
        assert!(pool.to_string().starts_with(start), "{pool}");
        pool.overlapping = 0;
        pool.read_early = 2;
        let row = pool.to_string();
        let early = "; peaks may be too high by 2 blocks that counted for the program until the first part";
        assert!(row.ends_with(&format!("{wrong}{early}")), "{row}");
    }
}
