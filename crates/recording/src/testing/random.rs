//! Random values for recordings.

/// A small generator with a fixed seed, so each failure can be repeated.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 16) % bound
    }

    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).expect("it is below a length")
    }

    pub fn is(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    /// Returns mostly small numbers, and some large ones.
    pub fn any(&mut self) -> u64 {
        let bits = self.below(65);
        if bits == 0 { 0 } else { self.next() >> (64 - bits) }
    }

    pub fn small(&mut self) -> u32 {
        u32::try_from(self.any() & 0xffff_ffff).expect("it has 32 bits")
    }

    /// Returns mostly one of eight numbers, so that several items have the same one.
    pub fn few(&mut self) -> u32 {
        if self.is(10) { self.small() } else { self.small() % 8 }
    }

    pub fn text(&mut self) -> String {
        const TEXTS: [&str; 9] = [
            "",
            "epoch",
            "src/train.py",
            "△ Used\n\"quoted\" \\",
            "/usr/lib/libcublas.so.12",
            "λ::<T>",
            "a;b",
            "</script>",
            "\u{1b}[31m\n",
        ];
        TEXTS[self.index(TEXTS.len())].to_owned()
    }

    pub fn option<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        if self.is(3) { None } else { Some(value(self)) }
    }

    pub fn list<T>(&mut self, mut value: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(4)).map(|_| value(self)).collect()
    }
}
