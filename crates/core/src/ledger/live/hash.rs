//! The parts of a key's hash that choose its slot.

use crate::model::{GOLDEN, Key};

/// Returns the upper 8 bits of the product, which depend on all bits of the key. They choose the slot of the front
/// cache.
#[inline]
pub(super) fn upper_bits(key: Key) -> usize {
    (key.get().wrapping_mul(GOLDEN) >> 56) as usize
}

/// Returns the shard of a key, among this many. With the upper bits of the product as a number `u` below 1, it is the part `u (4 - u)
/// / 3` of all shards, which grows twice as fast at 0 as at 1.
#[inline]
pub(super) fn shard_of(key: Key, shards: usize) -> usize {
    const ONE: u64 = 1 << 20;
    let u = key.get().wrapping_mul(GOLDEN) >> 44;
    ((u * (4 * ONE - u) / 3 * shards as u64) >> 40) as usize
}

/// Returns a word of a filter with `bits` bits, and a bit in it, from the bits of the product after those that choose the
/// shard.
pub(super) fn filter_bit(key: Key, bits: usize) -> (usize, u64) {
    let bit = (key.get().wrapping_mul(GOLDEN) >> 48) as usize % bits;
    (bit / 64, 1 << (bit % 64))
}
