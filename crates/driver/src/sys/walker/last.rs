//! The last stack that a thread looked up.

use super::cache::CachedStack;

/// The last stack that a thread looked up, which is likely to be the next one as well. Its words are stored next to each other.
#[repr(C, align(64))]
pub(super) struct LastStack {
    sp: u64,
    /// A multiple of [`Self::STEP`]. The last word is repeated to fill a step.
    count: u32,
    number: u32,
    values: [u64; Self::CAPACITY],
    offsets: [u32; Self::CAPACITY],
}

impl LastStack {
    /// A stack with more words than this is looked up in the [`StackCache`](super::cache::StackCache) each time.
    pub(super) const CAPACITY: usize = 32;
    /// The number of words that are compared without a branch between them.
    const STEP: usize = 2;

    pub(super) const NONE: Self =
        Self { sp: 0, count: 0, number: 0, values: [0; Self::CAPACITY], offsets: [0; Self::CAPACITY] };

    /// Returns the id of the stack that starts at `sp`, if it is this one. Reads only addresses that were on the stack when this was set.
    #[inline]
    pub(super) fn find(&self, sp: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        if self.sp != sp {
            return None;
        }
        let count = (self.count as usize).min(Self::CAPACITY);
        let steps = self.offsets[..count].chunks_exact(Self::STEP).zip(self.values[..count].chunks_exact(Self::STEP));
        let mut differ = 0;
        for (offsets, values) in steps {
            // All words are almost always equal, so stopping early would save nothing.
            for (offset, value) in offsets.iter().zip(values) {
                differ |= read(sp + u64::from(*offset)) ^ value;
            }
        }
        (differ == 0).then_some(self.number)
    }

    pub(super) fn set(&mut self, sp: u64, stack: CachedStack<'_>) {
        // No stack starts at address 0, so this counts as empty until it is complete.
        self.sp = 0;
        let (count, Some(last)) = (stack.offsets.len(), stack.offsets.len().checked_sub(1)) else { return };
        if count > Self::CAPACITY {
            return;
        }
        let filled = count.next_multiple_of(Self::STEP);
        for at in 0..filled {
            (self.offsets[at], self.values[at]) = (stack.offsets[at.min(last)], stack.values[at.min(last)]);
        }
        self.count = u32::try_from(filled).unwrap_or(0);
        self.number = stack.number;
        self.sp = sp;
    }
}
