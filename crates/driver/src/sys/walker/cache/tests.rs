//! Tests the cache with made-up stacks.

use std::cell::Cell;

use super::{super::last::LastStack, *};

const SP: u64 = 0x7fff_0000;

/// Inserts a stack that starts at [`SP`].
fn insert(cache: &mut StackCache, words: &[u64], places: &[usize], number: u32) {
    let mut walk = cache.start(SP);
    for at in places {
        cache.add_word(&mut walk, SP + 8 * *at as u64, words[*at]);
    }
    cache.insert(walk, number);
}

fn find(cache: &mut StackCache, words: &[u64]) -> Option<u32> {
    let end = SP + 8 * words.len() as u64;
    let read = |address| words[usize::try_from((address - SP) / 8).unwrap()];
    let found = cache.find(SP, end, read)?;
    // The last stack is found again, and no other one is.
    let mut last = LastStack::NONE;
    last.set(SP, found);
    let (number, is_short) = (found.number, found.offsets.len() <= LastStack::CAPACITY);
    assert_eq!(last.find(SP, read), is_short.then_some(number));
    assert_eq!(last.find(SP + 16, |_| -> u64 { panic!("there is no such stack") }), None);
    Some(number)
}

#[test]
fn a_stack_is_found_only_if_all_its_words_are_the_same() {
    let mut cache = StackCache::new();
    let mut words: Vec<u64> = (100..140).collect();
    let places = [3, 0, 17, 17, 39];
    assert_eq!(find(&mut cache, &words), None);
    insert(&mut cache, &words, &places, 5);
    for at in 0..words.len() {
        for other in [0, u64::MAX, words[at] ^ 1, words[at] ^ (1 << 63)] {
            let was = std::mem::replace(&mut words[at], other);
            let expected = (!places.contains(&at)).then_some(5);
            assert_eq!(find(&mut cache, &words), expected, "word {at} is {other}");
            words[at] = was;
        }
    }
    assert_eq!(find(&mut cache, &words), Some(5));
    let read = |_| -> u64 { panic!("there is no such stack") };
    assert!(cache.find(SP + 8, SP + 400, read).is_none(), "another stack pointer");
}

#[test]
fn nothing_is_read_beyond_the_end() {
    let mut cache = StackCache::new();
    let words = [1, 2, 3, 4];
    insert(&mut cache, &words, &[3, 0], 5);
    let calls = Cell::new(0);
    let read = |address: u64| {
        calls.set(calls.get() + 1);
        words[usize::try_from((address - SP) / 8).unwrap()]
    };
    for end in [0, SP - 1, SP, SP + 8, SP + 31] {
        assert!(cache.find(SP, end, read).is_none() && calls.get() == 0);
    }
    let number = cache.find(SP, SP + 32, read).map(|known| known.number);
    assert_eq!((number, calls.take()), (Some(5), 3));
}

/// No stack is ever mistaken for another one, whichever words were overwritten.
#[test]
fn new_words_overwrite_the_oldest_ones() {
    let mut cache = StackCache::new();
    let length = |number: u32| 1 + number as usize * 37 % MAX_WORDS;
    let stack =
        |number: u32| -> Vec<u64> { (0..length(number) as u64).map(|at| at * 1000 + u64::from(number)).collect() };
    let mut most = 0;
    for number in 0..2000 {
        let words = stack(number);
        let places: Vec<usize> = (0..words.len()).collect();
        insert(&mut cache, &words, &places, number);
        assert_eq!(find(&mut cache, &words), Some(number));
        let known = (0..=number).rev().take(40).filter(|number| {
            let found = find(&mut cache, &stack(*number));
            assert!(found.is_none_or(|found| found == *number), "{found:?} for {number}");
            found.is_some()
        });
        most = most.max(known.count());
    }
    assert!((5..=WAYS).contains(&most), "{most} are known at a time");
}

#[test]
fn a_walk_that_fails_is_not_cached() {
    let mut cache = StackCache::new();
    let words: Vec<u64> = (0..600).collect();
    insert(&mut cache, &words, &[1, 2], 1);
    let mut walk = cache.start(SP);
    cache.add_word(&mut walk, SP, 0);
    assert_eq!(find(&mut cache, &words), Some(1));
    // Stacks with too many words, with a word below the stack pointer, with a word too far from it, and without words.
    let all: Vec<usize> = (0..=MAX_WORDS).collect();
    insert(&mut cache, &words, &all, 2);
    insert(&mut cache, &words, &all[..MAX_WORDS], 3);
    assert_eq!(find(&mut cache, &words), Some(1));
    for outside in [SP - 8, SP + (1 << 32) - 8, u64::MAX - 7] {
        let mut walk = cache.start(SP);
        cache.add_word(&mut walk, SP, 0);
        cache.add_word(&mut walk, outside, 0);
        cache.insert(walk, 4);
    }
    let walk = cache.start(SP);
    cache.insert(walk, 5);
    let mut words = words;
    words[2] = 0;
    assert_eq!(find(&mut cache, &words), None);
    words[0] = 9;
    assert_eq!(find(&mut cache, &words), None);
}
