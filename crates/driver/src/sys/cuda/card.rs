//! The simulated GPU that a thread uses, if several of them share one context, as in programs that use the CUDA runtime.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

thread_local! {
    /// The GPU that the thread has selected. `None` until the thread selects one or asks for its own.
    static SELECTED: Cell<Option<u32>> = const { Cell::new(None) };
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// One bit for each GPU that a thread has selected. There are at most 64.
static USED: AtomicU64 = AtomicU64::new(0);

/// Selects this GPU for the thread.
pub(in crate::sys) fn select_card(card: u32) {
    SELECTED.set(Some(card));
    USED.fetch_or(1 << card, Relaxed);
}

/// Returns the GPU that the program sees as current, which is the first one until the thread selects another.
pub(in crate::sys) fn selected_card() -> u32 {
    let card = SELECTED.get().unwrap_or(0);
    SELECTED.set(Some(card));
    card
}

/// Returns whether a thread has selected this GPU since its last reset.
pub(in crate::sys) fn is_card_used(card: u32) -> bool {
    USED.load(Relaxed) & 1 << card != 0
}

/// Notes that the GPU was reset, so no thread uses it any more.
pub(in crate::sys) fn reset_card(card: u32) {
    USED.fetch_and(!(1 << card), Relaxed);
}

/// Returns the GPU on which the thread allocates. Threads of libraries select none; they use the only GPU that is used, or else the first
/// one. Returns 0 if there are no simulated GPUs.
#[inline]
pub(crate) fn card_of_thread() -> u32 {
    SELECTED.get().unwrap_or_else(|| match USED.load(Relaxed) {
        used if used.is_power_of_two() => used.trailing_zeros(),
        _ => 0,
    })
}

/// Runs `action` with this GPU selected.
pub(super) fn on_card<T>(card: u32, action: impl FnOnce() -> T) -> T {
    let before = SELECTED.replace(Some(card));
    let done = action();
    SELECTED.set(before);
    done
}

/// Runs gpumem's own driver calls: gpumem sees the simulated GPUs. NVIDIA's libraries may see the devices of the machine.
pub(in crate::sys) fn own<T>(question: impl FnOnce() -> T) -> T {
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            IS_OWN.set(self.0);
        }
    }

    let _restore = Restore(IS_OWN.replace(true));
    question()
}

/// Returns whether the thread is in [`own`].
pub(in crate::sys) fn is_own() -> bool {
    IS_OWN.get()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_without_a_card_has_the_only_one() {
        let of_others = |ask: fn() -> u32| thread::spawn(ask).join().unwrap();
        assert_eq!([card_of_thread(), selected_card(), of_others(card_of_thread)], [0, 0, 0]);
        select_card(5);
        assert_eq!([card_of_thread(), of_others(card_of_thread), of_others(selected_card)], [5, 5, 0]);
        select_card(0);
        assert_eq!([card_of_thread(), of_others(card_of_thread)], [0, 0], "two are used");
        assert_eq!([on_card(3, card_of_thread), card_of_thread()], [3, 0]);
        reset_card(0);
        assert_eq!((of_others(card_of_thread), is_card_used(0), is_card_used(5)), (5, false, true));
    }
}
