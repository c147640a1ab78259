//! Stacks that were walked before. A walk is decided by the stack pointer it begins at and by the words that it reads, so
//! whoever finds the same words at the same addresses needs no second walk.

use std::ops::Range;

/// Stacks to one set. Callers at one depth of one function share a stack pointer, and so a set.
const WAYS: usize = 16;
const SETS: usize = 8;

/// Words of all stacks together. Twelve bytes each, half of what a thread spends on this.
const WORDS: usize = 2304;

/// Words of one stack. One that has more is walked each time.
pub(super) const MOST_WORDS: usize = 512;

/// One stack: its words are those from `first` on, as [`Memo::next`] counts.
#[derive(Clone, Copy, Default)]
struct Way {
    sp: u64,
    first: u64,
    /// Where in the ring the first word is.
    start: u32,
    count: u32,
    /// The word that told this stack from another the last time: it is compared first.
    telling: u32,
    /// From `sp` to the end of the highest word.
    reach: u32,
    number: u32,
}

impl Way {
    /// Where in the ring its words are.
    fn words(&self) -> Range<usize> {
        self.start as usize..self.start as usize + self.count as usize
    }
}

/// A walk that is being noted down.
#[derive(Clone, Copy)]
pub(super) struct Note {
    way: Way,
    is_whole: bool,
}

/// A stack that was walked before, and its words.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) number: u32,
    offsets: &'a [u32],
    values: &'a [u64],
}

/// The stack that a thread had last, which is likely to come again: its words lie side by side.
#[repr(C, align(64))]
pub(super) struct Recent {
    sp: u64,
    /// A multiple of [`Self::STEP`]: the last word is repeated to fill a step.
    count: u32,
    number: u32,
    values: [u64; Self::MOST],
    offsets: [u32; Self::MOST],
}

impl Recent {
    /// One with more words is looked for in the [`Memo`] each time.
    const MOST: usize = 32;
    /// So many words are compared without a branch in between.
    const STEP: usize = 2;

    pub(super) const NONE: Self =
        Self { sp: 0, count: 0, number: 0, values: [0; Self::MOST], offsets: [0; Self::MOST] };

    /// The number of the stack that begins at `sp`, if it is this one. It reads no word that was not there when this was kept.
    #[inline]
    pub(super) fn find(&self, sp: u64, read: impl Fn(u64) -> u64) -> Option<u32> {
        if self.sp != sp {
            return None;
        }
        let count = (self.count as usize).min(Self::MOST);
        let steps = self.offsets[..count].chunks_exact(Self::STEP).zip(self.values[..count].chunks_exact(Self::STEP));
        let mut differ = 0;
        for (offsets, values) in steps {
            // They are almost always equal, so that nothing is won by stopping early.
            for (offset, value) in offsets.iter().zip(values) {
                differ |= read(sp + u64::from(*offset)) ^ value;
            }
        }
        (differ == 0).then_some(self.number)
    }

    pub(super) fn keep(&mut self, sp: u64, known: Known<'_>) {
        // Nothing is at this address.
        self.sp = 0;
        let (count, Some(last)) = (known.offsets.len(), known.offsets.len().checked_sub(1)) else { return };
        if count > Self::MOST {
            return;
        }
        let filled = count.next_multiple_of(Self::STEP);
        for at in 0..filled {
            (self.offsets[at], self.values[at]) = (known.offsets[at.min(last)], known.values[at.min(last)]);
        }
        self.count = u32::try_from(filled).unwrap_or(0);
        self.number = known.number;
        self.sp = sp;
    }
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
    pub(super) fn find(&mut self, sp: u64, end: u64, read: impl Fn(u64) -> u64) -> Option<Known<'_>> {
        let room = end.checked_sub(sp)?;
        let at = set(sp).find(|at| self.is_kept(&self.ways[*at], sp, room) && self.is_same(*at, sp, &read))?;
        let way = &self.ways[at];
        let words = way.words();
        Some(Known { number: way.number, offsets: &self.offsets[words.clone()], values: &self.values[words] })
    }

    /// Whether all words of a stack are there.
    fn is_same(&mut self, at: usize, sp: u64, read: &impl Fn(u64) -> u64) -> bool {
        let way = &mut self.ways[at];
        let is_same = |(offset, value): (&u32, &u64)| read(sp + u64::from(*offset)) == *value;
        let (offsets, values) = (&self.offsets[way.words()], &self.values[way.words()]);
        // Most of those that differ do so in this word.
        let telling = way.telling as usize;
        if !is_same((&offsets[telling], &values[telling])) {
            return false;
        }
        let differs = offsets.iter().zip(values).position(|word| !is_same(word));
        way.telling = differs.map_or(way.telling, |differs| u32::try_from(differs).unwrap_or(0));
        differs.is_none()
    }

    /// Its words are still there, and are of a stack that begins at `sp` and has so much room.
    #[inline]
    fn is_kept(&self, way: &Way, sp: u64, room: u64) -> bool {
        way.sp == sp && way.count > 0 && self.next - way.first <= WORDS as u64 && u64::from(way.reach) <= room
    }

    /// A walk begins at `sp`.
    pub(super) fn begin(&mut self, sp: u64) -> Note {
        let left = WORDS - place(self.next);
        // The words of a stack lie side by side.
        self.next += if left < MOST_WORDS { left as u64 } else { 0 };
        let start = u32::try_from(place(self.next)).unwrap_or(0);
        Note { way: Way { sp, first: self.next, start, ..Way::default() }, is_whole: true }
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

    /// It grows with each walk that begins.
    #[cfg(test)]
    pub(super) fn words_ever(&self) -> u64 {
        self.next
    }

    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        self.next += WORDS as u64;
    }
}

/// Where in the ring a word is.
#[allow(clippy::cast_possible_truncation, reason = "it is less than `WORDS`")]
fn place(word: u64) -> usize {
    (word % WORDS as u64) as usize
}

fn set(sp: u64) -> Range<usize> {
    // Stack pointers are multiples of 16, and the frames between two of them are rarely a multiple of much more.
    let hash = (sp >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    let first = hash as usize % SETS * WAYS;
    first..first + WAYS
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const SP: u64 = 0x7fff_0000;

    /// A stack from [`SP`] on.
    fn notes(memo: &mut Memo, words: &[u64], places: &[usize], number: u32) {
        let mut note = memo.begin(SP);
        for at in places {
            memo.note(&mut note, SP + 8 * *at as u64, words[*at]);
        }
        memo.keep(note, number);
    }

    fn find(memo: &mut Memo, words: &[u64]) -> Option<u32> {
        let end = SP + 8 * words.len() as u64;
        let read = |address| words[usize::try_from((address - SP) / 8).unwrap()];
        let found = memo.find(SP, end, read)?;
        // Who keeps it finds it again, and nothing else.
        let mut recent = Recent::NONE;
        recent.keep(SP, found);
        let (number, is_short) = (found.number, found.offsets.len() <= Recent::MOST);
        assert_eq!(recent.find(SP, read), is_short.then_some(number));
        assert_eq!(recent.find(SP + 16, |_| -> u64 { panic!("there is nothing of this stack") }), None);
        Some(number)
    }

    #[test]
    fn it_is_known_while_all_words_that_were_read_are_the_same() {
        let mut memo = Memo::new();
        let mut words: Vec<u64> = (100..140).collect();
        let places = [3, 0, 17, 17, 39];
        assert_eq!(find(&mut memo, &words), None);
        notes(&mut memo, &words, &places, 5);
        for at in 0..words.len() {
            for other in [0, u64::MAX, words[at] ^ 1, words[at] ^ (1 << 63)] {
                let was = std::mem::replace(&mut words[at], other);
                let expected = (!places.contains(&at)).then_some(5);
                assert_eq!(find(&mut memo, &words), expected, "word {at} is {other}");
                words[at] = was;
            }
        }
        assert_eq!(find(&mut memo, &words), Some(5));
        let read = |_| -> u64 { panic!("there is nothing of this stack") };
        assert!(memo.find(SP + 8, SP + 400, read).is_none(), "another stack pointer");
    }

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let mut memo = Memo::new();
        let words = [1, 2, 3, 4];
        notes(&mut memo, &words, &[3, 0], 5);
        let asked = Cell::new(0);
        let read = |address: u64| {
            asked.set(asked.get() + 1);
            words[usize::try_from((address - SP) / 8).unwrap()]
        };
        for end in [0, SP - 1, SP, SP + 8, SP + 31] {
            assert!(memo.find(SP, end, read).is_none() && asked.get() == 0);
        }
        let number = memo.find(SP, SP + 32, read).map(|known| known.number);
        assert_eq!((number, asked.take()), (Some(5), 3));
    }

    #[test]
    fn callers_at_one_stack_pointer_are_told_apart_by_any_word() {
        let mut memo = Memo::new();
        let places: Vec<usize> = (0..30).collect();
        let stacks: Vec<Vec<u64>> = (0..WAYS)
            .map(|other| {
                let mut words = vec![7; 30];
                words[other] = 8;
                words
            })
            .collect();
        for (number, words) in (0..).zip(&stacks) {
            assert_eq!(find(&mut memo, words), None);
            notes(&mut memo, words, &places, number);
        }
        for round in 0..100 {
            for turn in 0..WAYS {
                let number = (turn * (2 * round + 1)) % WAYS;
                assert_eq!(find(&mut memo, &stacks[number]), u32::try_from(number).ok());
            }
        }
        assert_eq!(find(&mut memo, &[7; 30]), None);
        // One more than there is room for: the oldest gives way.
        let mut words = vec![7; 30];
        words[29] = 8;
        notes(&mut memo, &words, &places, 99);
        assert_eq!(find(&mut memo, &words), Some(99));
        let known: Vec<bool> = stacks.iter().map(|words| find(&mut memo, words).is_some()).collect();
        assert_eq!(known, (0..WAYS).map(|number| number > 0).collect::<Vec<_>>());
    }

    /// Whatever was forgotten meanwhile, nothing is taken for another stack.
    #[test]
    fn the_oldest_words_give_way_to_new_ones() {
        let mut memo = Memo::new();
        let length = |number: u32| 1 + number as usize * 37 % MOST_WORDS;
        let stack =
            |number: u32| -> Vec<u64> { (0..length(number) as u64).map(|at| at * 1000 + u64::from(number)).collect() };
        let mut most = 0;
        for number in 0..2000 {
            let words = stack(number);
            let places: Vec<usize> = (0..words.len()).collect();
            notes(&mut memo, &words, &places, number);
            assert_eq!(find(&mut memo, &words), Some(number));
            let known = (0..=number).rev().take(40).filter(|number| {
                let found = find(&mut memo, &stack(*number));
                assert!(found.is_none_or(|found| found == *number), "{found:?} for {number}");
                found.is_some()
            });
            most = most.max(known.count());
        }
        assert!((5..=WAYS).contains(&most), "{most} are known at a time");
    }

    #[test]
    fn a_walk_that_comes_to_nothing_leaves_nothing() {
        let mut memo = Memo::new();
        let words: Vec<u64> = (0..600).collect();
        notes(&mut memo, &words, &[1, 2], 1);
        let mut note = memo.begin(SP);
        memo.note(&mut note, SP, 0);
        assert_eq!(find(&mut memo, &words), Some(1));
        // Too many words, one below the stack pointer, one too far from it, none.
        let all: Vec<usize> = (0..=MOST_WORDS).collect();
        notes(&mut memo, &words, &all, 2);
        notes(&mut memo, &words, &all[..MOST_WORDS], 3);
        assert_eq!(find(&mut memo, &words), Some(1));
        for outside in [SP - 8, SP + (1 << 32) - 8, u64::MAX - 7] {
            let mut note = memo.begin(SP);
            memo.note(&mut note, SP, 0);
            memo.note(&mut note, outside, 0);
            memo.keep(note, 4);
        }
        let note = memo.begin(SP);
        memo.keep(note, 5);
        let mut words = words;
        words[2] = 0;
        assert_eq!(find(&mut memo, &words), None);
        words[0] = 9;
        assert_eq!(find(&mut memo, &words), None);
    }

    #[test]
    fn all_is_forgotten_at_once() {
        let mut memo = Memo::new();
        for number in 0..3 {
            notes(&mut memo, &[u64::from(number)], &[0], number);
        }
        memo.clear();
        assert!((0..3).all(|word| find(&mut memo, &[word]).is_none()));
        notes(&mut memo, &[1], &[0], 7);
        assert_eq!((find(&mut memo, &[1]), find(&mut memo, &[2])), (Some(7), None));
    }
}
