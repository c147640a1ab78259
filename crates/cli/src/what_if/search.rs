//! Finds the smallest card, and runs several jobs at a time.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use crate::failure::Failure;

/// The search for the smallest card ends when the error is at most one part in this many of the card.
pub(super) const PRECISION: u64 = 50;

/// Returns the smallest number that fits, up to an error. `enough` fits, and `too_small` does not.
pub(super) fn smallest(
    mut too_small: u64,
    mut enough: u64,
    error: impl Fn(u64) -> u64,
    fits: impl Fn(u64) -> Result<bool, Failure>,
) -> Result<u64, Failure> {
    while enough - too_small > error(enough) {
        let middle = too_small.midpoint(enough);
        if fits(middle)? {
            enough = middle;
        } else {
            too_small = middle;
        }
    }
    Ok(enough)
}

/// Returns the results in the order of the items. The first failure stops the work.
pub(super) fn in_parallel<I: Sync, T: Send>(
    jobs: usize,
    items: &[I],
    work: impl Fn(&I) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Relaxed);
                    let Some(item) = items.get(at) else { return };
                    let result = work(item);
                    if result.is_err() {
                        next.store(items.len(), Relaxed);
                    }
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<u64> = (0..50).collect();
        assert_eq!(
            in_parallel(4, &items, |item| Ok(item * 2)).unwrap(),
            items.iter().map(|item| item * 2).collect::<Vec<_>>()
        );
        let failing = |item: &u64| if *item == 7 { Err(Failure::new("7", "", "")) } else { Ok(*item) };
        assert!(in_parallel(4, &items, failing).is_err());
    }
}
