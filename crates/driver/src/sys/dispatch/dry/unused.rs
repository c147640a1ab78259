//! Bytes of a kernel's parameters that the program has not written. They contain earlier data from the stack, such as addresses of other
//! tensors. PyTorch passes two such structs by value:
//!
//! - `OffsetCalculator` (aten/src/ATen/cuda/detail/OffsetCalculator.cuh): the number of dimensions, a divider for each of 25 sizes, and 25
//!   rows of strides with a column for each tensor. Only the rows of its dimensions are written. The addresses of the tensors
//!   follow. A reduction has a second calculator in between, which may have no dimensions.
//! - `CatArrInputTensorMetadata` (aten/src/ATen/native/cuda/Shape.cu): the addresses of up to 128 tensors that `torch.cat` joins, and then their sizes.
//!   The grid has a row for each tensor.

use std::ops::Range;

const DIMENSIONS: usize = 25;
/// The words of an `IntDivider`: divisor, factor, shift.
const DIVIDER: usize = 3;

/// Returns the number of words of a calculator for this number of tensors.
const fn words_of(tensors: usize) -> usize {
    1 + DIMENSIONS * (DIVIDER + tensors)
}

/// Returns the part of such a parameter that the kernel with this name does not read as addresses, in words of 4 bytes.
pub(super) fn unused(name: &str, rows: u32, words: &[u32], is_address: impl Fn(u64) -> bool) -> Option<Range<usize>> {
    if !name.starts_with("_ZN2at6native") {
        return None;
    }
    if name.contains("CatArrayBatchedCopy") {
        return Some(2 * rows as usize..words.len());
    }
    let mut starts = (0..words.len()).filter(|start| words[*start] != 0 && is_calculator(&words[*start..]));
    starts.find_map(|start| after_calculators(start, words, &is_address))
}

/// Returns the part from this calculator to the first address.
fn after_calculators(start: usize, words: &[u32], is_address: impl Fn(u64) -> bool) -> Option<Range<usize>> {
    let second = start + words_of(1);
    let has_second = words.get(second..).is_some_and(is_calculator);
    let alone = (1..=8).map(|tensors| start + words_of(tensors));
    let both = (2..=3).filter(|_| has_second).map(|tensors| second + words_of(tensors));
    // The program has written all addresses after the calculator, so the nearest one is at the end of the unused part or before it.
    let ends = alone.chain(both).map(|end| end.next_multiple_of(2));
    ends.filter(|end| {
        let address = words.get(*end..end + 2);
        address.is_some_and(|word| is_address(u64::from(word[0]) | u64::from(word[1]) << 32))
    })
    .min()
    .map(|end| start..end)
}

/// Returns whether a calculator may start here: the dividers of its dimensions are those that PyTorch computes.
fn is_calculator(words: &[u32]) -> bool {
    let dimensions = words[0] as usize;
    let dividers = words.get(1..=dimensions.saturating_mul(DIVIDER));
    dimensions <= DIMENSIONS
        && words.len() > words_of(1)
        && dividers.is_some_and(|dividers| {
            dividers.chunks(DIVIDER).all(|divider| {
                let [divisor, factor, shift] = [divider[0], divider[1], divider[2]].map(u64::from);
                let expected = divisor.checked_next_power_of_two().map_or(0, u64::trailing_zeros);
                divisor != 0
                    && shift == u64::from(expected)
                    && factor == ((1 << 32) * ((1 << shift) - divisor)) / divisor + 1
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: [u32; 2] = [0x515e_6c00, 3];

    fn is_address(address: u64) -> bool {
        address == 0x3_515e_6c00
    }

    fn of_sum(words: &[u32], is_address: impl Fn(u64) -> bool) -> Option<Range<usize>> {
        unused("_ZN2at6native13reduce_kernelILi512E", 1, words, is_address)
    }

    /// Calculators for this number of tensors and with these sizes.
    type Calculators = &'static [(usize, &'static [u32])];

    /// Creates the parameters that PyTorch 2.11 passes, with this number of words before the calculators, and two addresses.
    fn parameters(calculators: Calculators, before: usize) -> Vec<u32> {
        let mut words: Vec<_> = [7, 1, 1, 1, 0].into_iter().cycle().take(before).collect();
        for (tensors, sizes) in calculators {
            let at = words.len();
            words.push(u32::try_from(sizes.len()).unwrap());
            for size in *sizes {
                let shift = size.next_power_of_two().trailing_zeros();
                let factor = ((1_u64 << 32) * ((1_u64 << shift) - u64::from(*size))) / u64::from(*size) + 1;
                words.extend([*size, u32::try_from(factor).unwrap(), shift]);
            }
            words.resize(at + words_of(*tensors), 0xdead);
        }
        words.resize(words.len().next_multiple_of(2), 0);
        words.extend([HERE, HERE].concat());
        words
    }

    #[test]
    fn what_comes_before_the_addresses_is_unused() {
        let cases: [(Calculators, usize, Range<usize>); 5] = [
            (&[(2, &[4, 12, 128])], 0, 0..126),
            (&[(3, &[300, 4])], 0, 0..152),
            (&[(1, &[512])], 5, 5..106),
            // Sums of all elements, and of rows. The calculators follow numbers such as 1, 1, 1, 0.
            (&[(1, &[1200]), (2, &[])], 19, 19..246),
            (&[(1, &[1200]), (3, &[77, 3])], 19, 19..272),
        ];
        for (calculators, before, expected) in cases {
            let words = parameters(calculators, before);
            assert_eq!(of_sum(&words, is_address), Some(expected), "{calculators:?}");
            assert_eq!(of_sum(&words, |_| false), None);
        }
    }

    #[test]
    fn the_grid_says_how_many_tensors_are_joined() {
        let name = "_ZN2at6native40_GLOBAL__N__0f1a8107_8_Shape_cu_49f7391c19CatArrayBatchedCopyINS1_10OpaqueTypeILj4EEEjLi4ELi64ELi64EEE";
        assert_eq!(unused(name, 2, &[7; 680], |_| true), Some(4..680));
        assert_eq!(unused("CatArrayBatchedCopy", 2, &[7; 680], |_| true), None, "it is of another library");
    }

    #[test]
    fn what_is_like_an_address_makes_it_shorter() {
        let mut words = parameters(&[(2, &[4, 12, 128])], 0);
        words[102..104].copy_from_slice(&HERE);
        assert_eq!(of_sum(&words, is_address), Some(0..102));
    }

    #[test]
    fn other_parameters_have_no_unused_part() {
        let mut words = parameters(&[(2, &[12])], 0);
        // These are not calculators: another factor, too many dimensions, and no dimensions.
        words[2] += 1;
        assert_eq!(of_sum(&words, |_| true), None);
        for dimensions in [26, u32::MAX, 0] {
            words[0] = dimensions;
            assert_eq!(of_sum(&words, |_| true), None);
        }
        assert_eq!(of_sum(&[], |_| true), None);
        assert_eq!(of_sum(&[1, 1, 1, 0], |_| true), None);
    }
}
