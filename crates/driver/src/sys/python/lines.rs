//! The table of lines in a code object, as Python 3.11 and later write it (`Objects/locations.md` in their sources).

/// The maximum size of a table that is read completely. A table of this size belongs to a function with more than 100,000 lines.
pub(super) const MAX_TABLE: usize = 1 << 20;

/// The bytes of an instruction, or of a part of one.
const CODE_UNIT: usize = 2;

/// Returns the line of the instruction at this offset, in bytes. A negative offset is before the first instruction and means the first line
/// of the function. Returns `None` if the instruction belongs to no line, or if the table does not contain it.
///
/// From 3.12 on, Python's own `PyCode_Addr2Line` reads more than the table: records that coverage tools have requested, which another
/// thread may be changing.
pub fn line_at(table: &[u8], first_line: i32, offset: isize) -> Option<u32> {
    let known = |line: i64| u32::try_from(line).ok().filter(|line| *line > 0);
    let mut line = i64::from(first_line);
    let Ok(offset) = usize::try_from(offset) else { return known(line) };
    let (mut rest, mut end) = (table, 0);
    while let [head, after @ ..] = rest {
        // Only the first byte of an entry has this bit.
        if head & 0x80 == 0 {
            return None;
        }
        let details = after.iter().position(|byte| byte & 0x80 != 0).unwrap_or(after.len());
        let kind = head >> 3 & 0xf;
        line += match kind {
            // The entry is on the same line as the previous one.
            0..=9 | 15 => 0,
            10..=12 => i64::from(kind - 10),
            _ => signed_number(&after[..details])?,
        };
        end += (usize::from(head & 7) + 1) * CODE_UNIT;
        if offset < end {
            return if kind == 15 { None } else { known(line) };
        }
        rest = &after[details..];
    }
    None
}

/// Reads a number that is stored in groups of six bits, the lowest first. Each group except the last has the next higher bit set. The
/// lowest bit of the number is the sign.
fn signed_number(bytes: &[u8]) -> Option<i64> {
    let mut number = 0;
    // A line has 31 bits.
    for (byte, shift) in bytes.iter().zip((0..=30).step_by(6)) {
        number |= i64::from(byte & 0x3f) << shift;
        if byte & 0x40 == 0 {
            return Some(if number & 1 == 0 { number >> 1 } else { -(number >> 1) });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table that Python 3.11 to 3.13 create for a function on line 10 with two lines, a line before both, and an instruction without a
    /// line.
    const TABLE: [u8; 12] = [
        0b1000_0000 | 15 << 3, // no line, one unit
        0b1000_0001 | 10 << 3, // one line, two units, columns
        4,
        9,
        0b1000_0000 | 13 << 3, // a line, without columns
        0b0110_1000,           // the lower six bits of 2 * 52, and more follow
        1,
        0b1000_0000 | 14 << 3, // a line, with all columns
        3,                     // - 1
        0,
        1,
        1,
    ];

    #[test]
    fn each_instruction_has_its_line() {
        let lines: Vec<_> = (-1..12).map(|offset| line_at(&TABLE, 10, offset)).collect();
        let (first, second, third) = (Some(10), Some(10 + 52), Some(10 + 51));
        let none = None;
        assert_eq!(
            lines,
            [first, none, none, first, first, first, first, second, second, third, third, none, none],
            "one before the first instruction, and two behind the last"
        );
    }

    #[test]
    fn any_bytes_are_a_table() {
        let mut random = 0x9E37_79B9_7F4A_7C15_u64;
        for length in 0..2000 {
            let mut byte = || {
                random = random.wrapping_mul(0xD120_0000_0000_5DEB).rotate_left(23) ^ 0xA5A5;
                random.to_le_bytes()[3]
            };
            let table: Vec<u8> = (0..length).map(|_| byte()).collect();
            for first in [i32::MIN, -1, 0, 1, i32::MAX] {
                for offset in [isize::MIN, -1, 0, 1, 2, 1 << 10, isize::MAX] {
                    assert_ne!(line_at(&table, first, offset), Some(0));
                }
            }
        }
        // A number without an end, and one that is too long.
        assert_eq!(line_at(&[0b1110_1000, 0x7f], 1, 0), None);
        assert_eq!(line_at(&[0b1110_1000, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 0], 1, 0), None);
    }
}
