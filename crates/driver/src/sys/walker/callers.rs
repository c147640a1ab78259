//! A thread's cache of callers, the functions that have called the driver, which works at any depth of the stack.
//!
//! On its way to the caller, a walk reads few words of the stack, and these words determine the location of the next one: a return address
//! determines the size of the frame around it, and an address on the stack has a distance from the stack pointer. If the earlier words are
//! the same, the last one is again the caller's return address. It is on the stack, because the frames before it are.

use std::ops::Range;

use super::unwind::without_signature;

/// The maximum number of words of a cached way.
const MAX_WORDS: usize = 32;

/// The number of cached ways. Only few lead from a hook to a caller: through the driver, and through each version of NVIDIA's runtime.
const WAYS: usize = 8;

/// The number of slots for callers. Each caller can be in one slot only.
const CALLERS: usize = 256;

#[derive(Clone, Copy, PartialEq)]
struct Word {
    /// The bytes from the stack pointer to the word.
    offset: u64,
    /// True if it is an address on the stack, and `value` is its distance from the stack pointer.
    is_distance: bool,
    value: u64,
}

/// The words that a walk reads. The last one is the return address in the caller.
#[derive(Clone, Copy)]
pub(super) struct Way {
    words: [Word; MAX_WORDS],
    /// The number of words. Above [`MAX_WORDS`] if not all of them are stored.
    count: usize,
    /// The bytes from the stack pointer to the end of the highest word.
    reach: u64,
}

impl Way {
    pub(super) const NONE: Self =
        Self { words: [Word { offset: 0, is_distance: false, value: 0 }; MAX_WORDS], count: 0, reach: 0 };

    /// Adds a word of this stack that the walk from `sp` has read. The address must not be below `sp`.
    pub(super) fn add(&mut self, sp: u64, stack: &Range<u64>, address: u64, value: u64) {
        let (offset, value) = (address - sp, without_signature(value));
        let is_distance = stack.contains(&value);
        let value = if is_distance { value.wrapping_sub(sp) } else { value };
        if let Some(word) = self.words.get_mut(self.count) {
            *word = Word { offset, is_distance, value };
        }
        self.count += 1;
        self.reach = self.reach.max(offset + 8);
    }

    /// Returns the return address in the caller, and the words before it. `None` if not all words are stored.
    #[inline]
    fn parts(&self) -> Option<(&Word, &[Word])> {
        self.words.get(..self.count)?.split_last()
    }

    /// Returns the last word of the stack with this pointer, if the words before it match this way.
    #[inline]
    fn follow(&self, sp: u64, room: u64, read: impl Fn(u64) -> u64) -> Option<u64> {
        let read = |word: &Word| without_signature(read(sp + word.offset));
        let is_same = |word: &Word| read(word).wrapping_sub(if word.is_distance { sp } else { 0 }) == word.value;
        let (last, before) = self.parts()?;
        (self.reach <= room && before.iter().all(is_same)).then(|| read(last))
    }
}

pub(super) struct CallerCache {
    /// The thread's stack.
    stack: Range<u64>,
    ways: [Way; WAYS],
    /// The way that the next one replaces.
    next: usize,
    /// Return addresses in callers, and their ids.
    callers: [(u64, u32); CALLERS],
}

impl CallerCache {
    pub(super) const EMPTY: Self = Self { stack: 0..0, ways: [Way::NONE; WAYS], next: 0, callers: [(0, 0); CALLERS] };

    /// Returns the id of the caller on the stack with this pointer. `read` is called for words from `sp` up to the end of the thread's
    /// stack.
    #[inline]
    pub(super) fn find(&self, sp: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        if !self.stack.contains(&sp) {
            return None;
        }
        let room = self.stack.end - sp;
        self.ways.iter().find_map(|way| {
            // The start of a longer way may also be a way. Such a way ends in the driver, which contains no caller.
            let address = way.follow(sp, room, &read)?;
            let (known, number) = self.callers[place_of(address)];
            (known == address).then_some(number)
        })
    }

    /// Adds the id of the caller that a walk on this stack has found.
    pub(super) fn insert(&mut self, stack: &Range<u64>, way: &Way, number: u32) {
        let Some((&Word { value: address, .. }, before)) = way.parts() else { return };
        self.stack = stack.clone();
        self.callers[place_of(address)] = (address, number);
        if !self.ways.iter().filter_map(Way::parts).any(|(_, known)| known == before) {
            self.ways[self.next] = *way;
            self.next = (self.next + 1) % WAYS;
        }
    }
}

#[inline]
fn place_of(address: u64) -> usize {
    (address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % CALLERS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread's stack, on which the words of a test start at a multiple of 8.
    const STACK: Range<u64> = 0x7000..0x8000;

    fn cache(ways: &[(u64, &[u64])], number: u32) -> CallerCache {
        let mut cache = CallerCache::EMPTY;
        for (sp, words) in ways {
            let mut way = Way::NONE;
            (*sp..).step_by(8).zip(*words).for_each(|(address, word)| way.add(*sp, &STACK, address, *word));
            cache.insert(&STACK, &way, number);
        }
        cache
    }

    fn find(cache: &CallerCache, sp: u64, words: &[u64]) -> Option<u32> {
        cache.find(sp, |address| {
            assert!(address < STACK.end, "{address:#x} is not on the stack");
            words.get(usize::try_from((address - sp) / 8).unwrap()).copied().unwrap_or(0)
        })
    }

    #[test]
    fn a_caller_is_found_from_another_stack_pointer() {
        // The words are the program counter, a frame's address, a return address in the driver, and one in the caller.
        let cache = cache(&[(0x7100, &[10, 0x7180, 20, 30])], 7);
        assert_eq!(find(&cache, 0x7100, &[10, 0x7180, 20, 30]), Some(7));
        assert_eq!(find(&cache, 0x7740, &[10, 0x77c0, 20, 30]), Some(7));
        for other in [[11, 0x77c0, 20, 30], [10, 0x7180, 20, 30], [10, 0x77c0, 21, 30], [10, 0x77c0, 20, 31]] {
            assert_eq!(find(&cache, 0x7740, &other), None, "{other:x?}");
        }
        // The last word does not fit on the stack, or it is a different stack.
        assert_eq!(find(&cache, 0x7fe8, &[10, 0x8068, 20, 30]), None);
        assert_eq!(find(&cache, 0x6000, &[10, 0x6080, 20, 30]), None);
    }

    #[test]
    fn a_way_may_start_as_another_one() {
        let cache = cache(&[(0x7100, &[10, 30]), (0x7100, &[10, 20, 31]), (0x7100, &[10, 20, 32])], 7);
        for (words, expected) in [(&[10, 30][..], Some(7)), (&[10, 20, 31], Some(7)), (&[10, 20, 33], None)] {
            assert_eq!(find(&cache, 0x7200, words), expected, "{words:?}");
        }
        assert_eq!(cache.next, 2, "two callers have the same way");
    }

    #[test]
    fn long_ways_are_not_cached_and_many_ones_replace_the_oldest() {
        let of = |count: u64| (1..=count).collect::<Vec<_>>();
        let [longest, longer] = [of(32), of(33)];
        assert_eq!(find(&cache(&[(0x7100, &longest)], 7), 0x7100, &longest), Some(7));
        assert_eq!(find(&cache(&[(0x7100, &longer)], 7), 0x7100, &longer), None);
        let many: Vec<_> = (1..=9).map(|pc| [pc, 30]).collect();
        let ways: Vec<_> = many.iter().map(|words| (0x7100, &words[..])).collect();
        let known: Vec<_> = many.iter().map(|words| find(&cache(&ways, 7), 0x7100, words).is_some()).collect();
        assert_eq!(known, [false, true, true, true, true, true, true, true, true]);
    }
}
