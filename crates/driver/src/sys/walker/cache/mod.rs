//! A thread's cache of stacks that it has walked. The result of a walk depends only on the stack pointer where it starts and on the words
//! that it reads. If these words are the same, the stack is the same and need not be walked again.

use std::ops::Range;

/// The number of entries in a set. All callers of one function at one depth have the same stack pointer, so they share a set.
const WAYS: usize = 16;
const SETS: usize = 8;

/// The number of words of all entries together, of 12 bytes each. This is half of the memory that a thread uses for stacks.
const WORDS: usize = 2304;

/// The maximum number of words of a stack in the cache. A stack that reads more words is walked each time.
pub(super) const MAX_WORDS: usize = 512;

/// One stack in the cache.
#[derive(Clone, Copy, Default)]
struct CacheEntry {
    sp: u64,
    /// The number of the entry's first word, as counted by [`StackCache::next`].
    first: u64,
    /// The index of the entry's first word in the ring.
    start: u32,
    count: u32,
    /// The word that differed when this entry was last compared with another stack. It is compared first.
    distinctive: u32,
    /// The bytes from `sp` to the end of the highest word.
    reach: u32,
    number: u32,
}

impl CacheEntry {
    /// Returns the indexes of the entry's words in the ring.
    fn words(&self) -> Range<usize> {
        self.start as usize..self.start as usize + self.count as usize
    }
}

/// The words of a walk that has not ended.
#[derive(Clone, Copy)]
pub(super) struct PendingWalk {
    entry: CacheEntry,
    is_complete: bool,
}

/// A stack in the cache: its id and its words.
#[derive(Clone, Copy)]
pub(super) struct CachedStack<'a> {
    pub(super) number: u32,
    /// The distance of each word from the stack pointer.
    pub(super) offsets: &'a [u32],
    pub(super) values: &'a [u64],
}

pub(super) struct StackCache {
    entries: Box<[CacheEntry]>,
    /// The words of all entries: the offset of each from the stack pointer, and its value. Both arrays are rings, in which new words
    /// overwrite the oldest ones.
    offsets: Box<[u32]>,
    values: Box<[u64]>,
    /// The number of the next word. Words are numbered from 1; a gap at the end of the ring counts as words.
    next: u64,
}

impl StackCache {
    /// Allocates all memory that the cache will ever use.
    pub(super) fn new() -> Self {
        Self {
            entries: vec![CacheEntry::default(); WAYS * SETS].into(),
            offsets: vec![0; WORDS].into(),
            values: vec![0; WORDS].into(),
            next: 1,
        }
    }

    /// Returns the stack that starts at `sp`, if it is in the cache. `read` is called for words from `sp` up to `end`.
    #[inline]
    pub(super) fn find(&mut self, sp: u64, end: u64, read: impl Fn(u64) -> u64) -> Option<CachedStack<'_>> {
        let room = end.checked_sub(sp)?;
        let at = set_of(sp).find(|at| self.is_valid(&self.entries[*at], sp, room) && self.is_same(*at, sp, &read))?;
        let entry = &self.entries[at];
        let words = entry.words();
        Some(CachedStack { number: entry.number, offsets: &self.offsets[words.clone()], values: &self.values[words] })
    }

    /// Returns whether all words of an entry are on the stack.
    fn is_same(&mut self, at: usize, sp: u64, read: &impl Fn(u64) -> u64) -> bool {
        let entry = &mut self.entries[at];
        let is_same = |(offset, value): (&u32, &u64)| read(sp + u64::from(*offset)) == *value;
        let (offsets, values) = (&self.offsets[entry.words()], &self.values[entry.words()]);
        // Stacks that differ usually differ in this word.
        let distinctive = entry.distinctive as usize;
        if !is_same((&offsets[distinctive], &values[distinctive])) {
            return false;
        }
        let differs = offsets.iter().zip(values).position(|word| !is_same(word));
        entry.distinctive = differs.map_or(entry.distinctive, |differs| u32::try_from(differs).unwrap_or(0));
        differs.is_none()
    }

    /// Returns whether the words of an entry were not overwritten, and the entry is a stack that starts at `sp` and fits into `room` bytes.
    #[inline]
    fn is_valid(&self, entry: &CacheEntry, sp: u64, room: u64) -> bool {
        entry.sp == sp && entry.count > 0 && self.next - entry.first <= WORDS as u64 && u64::from(entry.reach) <= room
    }

    /// Starts a walk at `sp`.
    pub(super) fn start(&mut self, sp: u64) -> PendingWalk {
        let left = WORDS - index(self.next);
        // The words of one stack must not wrap around the end of the ring.
        self.next += if left < MAX_WORDS { left as u64 } else { 0 };
        let start = u32::try_from(index(self.next)).unwrap_or(0);
        PendingWalk { entry: CacheEntry { sp, first: self.next, start, ..CacheEntry::default() }, is_complete: true }
    }

    /// Notes a word that the walk has read. It overwrites the oldest word at once, even if the walk fails later.
    pub(super) fn add_word(&mut self, walk: &mut PendingWalk, address: u64, value: u64) {
        let entry = &mut walk.entry;
        let offset = address.checked_sub(entry.sp).and_then(|offset| u32::try_from(offset).ok());
        let reach = offset.and_then(|offset| offset.checked_add(8));
        let (Some(offset), Some(reach)) = (offset, reach) else {
            walk.is_complete = false;
            return;
        };
        if entry.count as usize == MAX_WORDS {
            walk.is_complete = false;
            return;
        }
        let at = index(self.next);
        (self.offsets[at], self.values[at]) = (offset, value);
        entry.reach = entry.reach.max(reach);
        entry.count += 1;
        self.next += 1;
    }

    /// Ends a walk that has succeeded, and stores the stack under this id. The stack is cached only if all of its words are.
    pub(super) fn insert(&mut self, walk: PendingWalk, number: u32) {
        if walk.is_complete && walk.entry.count > 0 {
            // An empty entry has the lowest number of all.
            if let Some(oldest) = self.entries[set_of(walk.entry.sp)].iter_mut().min_by_key(|entry| entry.first) {
                *oldest = CacheEntry { number, ..walk.entry };
            }
        }
    }

    /// Returns a number that increases with each walk.
    #[cfg(test)]
    pub(super) fn words_ever(&self) -> u64 {
        self.next
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        self.next += WORDS as u64;
    }
}

/// Returns the index of a word in the ring.
#[allow(clippy::cast_possible_truncation, reason = "it is less than `WORDS`")]
#[inline]
fn index(word: u64) -> usize {
    (word % WORDS as u64) as usize
}

/// The indexes of the entries in which a stack with this stack pointer may be.
#[inline]
fn set_of(sp: u64) -> Range<usize> {
    // Stack pointers are multiples of 16, and the distance between two of them is rarely a multiple of a much larger power of two.
    let hash = (sp >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let first = hash as usize % SETS * WAYS;
    first..first + WAYS
}

#[cfg(test)]
mod tests;
