//! The hash of keys, and of numbers that the ledger counts.

use std::hash::{BuildHasherDefault, Hasher};

use crate::model::Key;

/// 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The bits in which the addresses of a *row* of 512 KiB differ, in steps of 512 bytes. Neighbours of a row are neighbours in the table
/// of their shard, because programs allocate and free neighbours one after the other: if these lay far apart, most events would wait for
/// memory once a million blocks are live.
const ROW: u64 = 0x3ff << STEP;

const STEP: u32 = 9;

pub(in super::super) type KeyHashBuilder = BuildHasherDefault<KeyHasher>;

/// Hashes by one multiplication for each number. Keys are addresses that the driver chooses, and the numbers of nodes, stacks and
/// groups are counted, so no attacker chooses them; a hash that protects against attackers costs more than the rest of an event.
#[derive(Default)]
pub(in super::super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        let number = number ^ self.0;
        // The upper half of the product depends on all bits of the row, the lower half does not. The halves are swapped,
        // because a hash table uses the lower bits first.
        let row = row_product(number).rotate_left(32);
        // The table compares the upper 7 bits before it compares keys, so neighbours differ in these, too.
        self.0 = row.wrapping_add((number & ROW) >> STEP) ^ (number & ROW) << (57 - STEP);
    }

    /// It gets the number of an enum's variant.
    fn write_isize(&mut self, number: isize) {
        self.write_u64(number.cast_unsigned() as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn row_product(number: u64) -> u64 {
    (number & !ROW).wrapping_mul(GOLDEN)
}

/// Returns the upper 8 bits of the key's product, which depend on all bits of the key. They choose the slot of the front
/// cache.
#[inline]
pub(super) fn upper_bits(key: Key) -> usize {
    (key.get().wrapping_mul(GOLDEN) >> 56) as usize
}

/// Returns the shard of a row, among this many. With the upper bits of its product as a number `u` below 1, it is the part `u (4 - u)
/// / 3` of all shards, which grows twice as fast at 0 as at 1.
#[inline]
pub(super) fn shard_of(key: Key, shards: usize) -> usize {
    const ONE: u64 = 1 << 20;
    let u = row_product(key.get()) >> 44;
    ((u * (4 * ONE - u) / 3 * shards as u64) >> 40) as usize
}

/// Returns a word of a filter with `bits` bits, and a bit in it, from the upper bits of the key's product.
pub(super) fn filter_bit(key: Key, bits: usize) -> (usize, u64) {
    let bit = (key.get().wrapping_mul(GOLDEN) >> 48) as usize % bits;
    (bit / 64, 1 << (bit % 64))
}
