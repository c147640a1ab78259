/// Numbers that look random and are the same in each run with the same seed (splitmix64).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Creates the generator for a seed. Any seed is allowed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number from 0 on that is less than `end`, or 0 if `end` is 0.
    ///
    /// # Panics
    /// Panics if `end` is negative.
    pub fn below<T: TryInto<u64> + TryFrom<u64>>(&mut self, end: T) -> T {
        let end = end.try_into().ok().expect("an end is not negative");
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        T::try_from((mixed ^ (mixed >> 31)) % end.max(1)).ok().expect("it is below what fits")
    }
}
