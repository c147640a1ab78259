use std::hash::{BuildHasherDefault, Hasher};

/// The odd number next to 2^64 divided by the golden ratio. The upper bits of a product with it depend on all bits of the number.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The hash of numbers and addresses: one multiplication for each.
pub type NumberHashBuilder = BuildHasherDefault<NumberHasher>;

/// Hashes by one multiplication for each number. Addresses are chosen by the driver and the loader, and other numbers are consecutive
/// ids, so no attacker chooses them. A hash that resists attackers would cost more than the rest of an event.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for word in bytes.chunks(8) {
            let mut eight = [0; 8];
            eight[..word.len()].copy_from_slice(word);
            self.write_u64(u64::from_ne_bytes(eight));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        // The upper half of the product depends on all bits of the number; the lower half does not. The halves are swapped, because a
        // hash table uses the lower bits first.
        self.0 = (number ^ self.0).wrapping_mul(GOLDEN).rotate_left(32);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
