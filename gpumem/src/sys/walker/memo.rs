//! Stacks that were walked before. A walk is decided by the stack pointer it begins at and by the words that it reads, so
//! whoever finds the same words at the same addresses needs no second walk.

/// Stacks to one set. Callers at one depth of one function share a stack pointer, and so a set.
const WAYS: usize = 16;
const SETS: usize = 8;

/// Words of all stacks together. Twelve bytes each, half of what a thread spends on this.
const WORDS: usize = 2560;

/// Words of one stack. One that has more is walked each time.
pub(super) const MOST_WORDS: usize = 512;

/// One stack: its words are those from `first` on, as [`Memo::next`] counts.
#[derive(Clone, Copy, Default)]
struct Way {
    sp: u64,
    first: u64,
    count: u32,
    /// The word that told this stack from another the last time: it is compared first.
    telling: u32,
    /// From `sp` to the end of the highest word.
    reach: u32,
    number: u32,
}

/// A walk that is being noted down.
#[derive(Clone, Copy)]
pub(super) struct Note {
    way: Way,
    is_whole: bool,
}

pub(super) struct Memo {
    ways: Box<[Way]>,
    /// Where words are, from the stack pointer on, and what they were. A ring: the oldest stacks give way.
    offsets: Box<[u32]>,
    values: Box<[u64]>,
    /// The number of the next word. They are counted from 1 on and never anew, gaps at the end of the ring included.
    next: u64,
}

impl Memo {
    /// Allocates all that it will ever need.
    pub(super) fn new() -> Self {
        Self {
            ways: vec![Way::default(); WAYS * SETS].into(),
            offsets: vec![0; WORDS].into(),
            values: vec![0; WORDS].into(),
            next: 1,
        }
    }

    /// The number of the stack that begins at `sp`, if it was walked before. `read` is asked for words from `sp` up to `end`.
    #[inline]
    pub(super) fn find(&mut self, sp: u64, end: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        let room = end.checked_sub(sp)?;
        for way in &mut self.ways[set(sp)] {
            let is_kept = way.count > 0 && self.next - way.first <= WORDS as u64;
            if way.sp != sp || !is_kept || u64::from(way.reach) > room {
                continue;
            }
            let first = place(way.first);
            let offsets = &self.offsets[first..first + way.count as usize];
            let values = &self.values[first..first + way.count as usize];
            let is_same = |offset: u32, value: u64| read(sp + u64::from(offset)) == value;
            let telling = way.telling as usize;
            if !is_same(offsets[telling], values[telling]) {
                continue;
            }
            match offsets.iter().zip(values).position(|(offset, value)| !is_same(*offset, *value)) {
                None => return Some(way.number),
                Some(differs) => way.telling = u32::try_from(differs).unwrap_or(0),
            }
        }
        None
    }

    /// A walk begins at `sp`.
    pub(super) fn begin(&mut self, sp: u64) -> Note {
        let left = WORDS - place(self.next);
        // The words of a stack lie side by side.
        self.next += if left < MOST_WORDS { left as u64 } else { 0 };
        Note { way: Way { sp, first: self.next, ..Way::default() }, is_whole: true }
    }

    /// It has read a word. The oldest stacks are forgotten at once, also if this walk comes to nothing.
    pub(super) fn note(&mut self, note: &mut Note, address: u64, value: u64) {
        let way = &mut note.way;
        let offset = address.checked_sub(way.sp).and_then(|offset| u32::try_from(offset).ok());
        let reach = offset.and_then(|offset| offset.checked_add(8));
        let (Some(offset), Some(reach)) = (offset, reach) else {
            note.is_whole = false;
            return;
        };
        if way.count as usize == MOST_WORDS {
            note.is_whole = false;
            return;
        }
        let at = place(self.next);
        (self.offsets[at], self.values[at]) = (offset, value);
        way.reach = way.reach.max(reach);
        way.count += 1;
        self.next += 1;
    }

    /// It has come to its end, and the stack has this number. Without all of its words it is not kept.
    pub(super) fn keep(&mut self, note: Note, number: u32) {
        if note.is_whole && note.way.count > 0 {
            // Empty ones are older than all.
            if let Some(oldest) = self.ways[set(note.way.sp)].iter_mut().min_by_key(|way| way.first) {
                *oldest = Way { number, ..note.way };
            }
        }
    }

    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        self.ways.fill(Way::default());
    }
}

/// Where in the ring a word is.
#[allow(clippy::cast_possible_truncation, reason = "it is less than `WORDS`")]
fn place(word: u64) -> usize {
    (word % WORDS as u64) as usize
}

fn set(sp: u64) -> std::ops::Range<usize> {
    // Stack pointers are multiples of 16, and the frames between two of them are rarely a multiple of much more.
    let hash = (sp >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let first = hash as usize % SETS * WAYS;
    first..first + WAYS
}
