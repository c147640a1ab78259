//! A thread's cache of callers: of which library a function has called the driver.
//!
//! Programs call from many depths, so the stack pointer says nothing. But the words that a walk reads on its way to the caller decide
//! where the next one is: a return address says how large the frame around it is, and a register of a frame has a distance from the
//! stack pointer. So where the same words are at the same distances, the word after them is the caller's return address, and it is on
//! the stack, because all frames before it are.

use std::ops::Range;

use super::unwind::without_signature;

/// A way with more words is not cached.
const MAX_WORDS: usize = 32;

/// Few ways lead from a hook to a caller: through the driver alone, and through each version of NVIDIA's runtime.
const WAYS: usize = 8;

/// Callers in the cache; each has one place in it.
const CALLERS: usize = 256;

#[derive(Clone, Copy, PartialEq)]
struct Word {
    /// Its distance from the stack pointer.
    offset: u64,
    /// It is an address on the stack, and `value` is its distance from the stack pointer.
    is_distance: bool,
    value: u64,
}

/// The words that a walk has read, of which the last one is the return address in the caller.
#[derive(Clone, Copy)]
pub(super) struct Way {
    words: [Word; MAX_WORDS],
    /// More than [`MAX_WORDS`] if there were more.
    count: usize,
    /// The bytes from the stack pointer to the end of the highest word.
    reach: u64,
}

impl Way {
    pub(super) const NONE: Self =
        Self { words: [Word { offset: 0, is_distance: false, value: 0 }; MAX_WORDS], count: 0, reach: 0 };

    /// The walk from `sp` has read a word of this stack, which is not below `sp`.
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

    /// Both have the same words, but for the caller's.
    fn is_like(&self, other: &Self) -> bool {
        let (Some(own), Some(others)) = (self.words.get(..self.count), other.words.get(..other.count)) else {
            return false;
        };
        own.len() == others.len()
            && own.split_last().map(|(_, own)| own) == others.split_last().map(|(_, others)| others)
    }

    /// The return address in the caller, if this way leads there.
    #[inline]
    fn caller(&self, sp: u64, room: u64, read: impl Fn(u64) -> u64) -> Option<u64> {
        if self.reach > room {
            return None;
        }
        let read = |word: &Word| without_signature(read(sp + word.offset));
        let (last, before) = self.words.get(..self.count)?.split_last()?;
        let is_same = |word: &Word| read(word).wrapping_sub(if word.is_distance { sp } else { 0 }) == word.value;
        before.iter().all(is_same).then(|| read(last))
    }
}

pub(super) struct CallerCache {
    /// The thread's stack.
    stack: Range<u64>,
    ways: [Way; WAYS],
    /// The way that the next one replaces.
    next: usize,
    /// Return addresses and their numbers.
    callers: [(u64, u32); CALLERS],
}

impl CallerCache {
    pub(super) const EMPTY: Self = Self { stack: 0..0, ways: [Way::NONE; WAYS], next: 0, callers: [(0, 0); CALLERS] };

    /// The number of the caller. `read` is called with addresses on the stack.
    #[inline]
    pub(super) fn find(&self, sp: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        if !self.stack.contains(&sp) {
            return None;
        }
        let room = self.stack.end - sp;
        self.ways.iter().find_map(|way| {
            // A shorter way may end in the driver, which is no caller.
            let caller = way.caller(sp, room, &read)?;
            let (known, number) = self.callers[place_of(caller)];
            (known == caller).then_some(number)
        })
    }

    /// A walk on this stack has found a caller with this number. `way` has its words.
    pub(super) fn insert(&mut self, stack: &Range<u64>, way: &Way, number: u32) {
        self.stack = stack.clone();
        let Some(last) = way.words.get(..way.count).and_then(<[Word]>::last) else { return };
        self.callers[place_of(last.value)] = (last.value, number);
        if !self.ways.iter().any(|known| known.is_like(way)) {
            self.ways[self.next] = *way;
            self.next = (self.next + 1) % WAYS;
        }
    }
}

#[inline]
fn place_of(address: u64) -> usize {
    (address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % CALLERS
}
