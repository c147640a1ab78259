//! A lock that a thread which takes it again and again takes without a locked instruction.
//!
//! A locked instruction (`lock cmpxchg`) waits until all earlier stores of the thread have left the processor: 10 to 20 ns for a pair
//! of driver calls, a third of what counting them costs. Programs often allocate on one thread alone. So the first thread that
//! takes the lock many times in a row becomes its owner, and then takes it by plain stores. When another thread comes, it has
//! the kernel put a memory barrier into all threads (`membarrier`) and takes the ownership away. That costs microseconds, so the
//! owner has to wait longer each time until it is the owner again. Where the kernel has no such call, there is no owner.
//!
//! No other thread ever becomes the owner. The owner may be interrupted between its first look and its store to `is_held`, for
//! as long as it takes, and do that store later: nobody else's flag may be overwritten by it.

use std::{
    cell::UnsafeCell,
    fmt,
    ops::{Deref, DerefMut},
    sync::atomic::{
        AtomicBool, AtomicU16, AtomicU32,
        Ordering::{Acquire, Relaxed, Release, SeqCst},
        compiler_fence,
    },
    thread::sleep,
    time::Duration,
};

use crossbeam::utils::Backoff;

/// So many times in a row make the owner. Each time that the ownership is taken away, it takes four times as many.
const FIRST: u16 = 64;
/// From here on there is no owner any more.
const LAST: u16 = 1 << 14;

/// See the head of this file. A thread is a number that no other thread of the process ever has; below 2^31.
#[repr(C)]
pub(crate) struct Lock<T> {
    /// Somebody holds it, and not as its owner.
    is_locked: AtomicBool,
    /// The owner holds it, or is about to look whether it still is the owner. Only the one thread that can be writes this.
    is_held: AtomicBool,
    /// How often in a row the candidate has taken it. Only who holds the lock reads and writes this.
    in_a_row: AtomicU16,
    /// The thread that took it last, shifted by one, and in the lowest bit whether it is the owner. Written by who holds
    /// `is_locked`.
    owner: AtomicU32,
    inside: UnsafeCell<T>,
    /// So many times in a row make the owner.
    needed: AtomicU16,
    /// The one thread that can be the owner; 0 until there was one.
    chosen: AtomicU32,
}

// SAFETY: the lock gives out one reference at a time to what is inside, which may be sent between threads.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T: std::panic::UnwindSafe> std::panic::RefUnwindSafe for Lock<T> {}

/// Holds the lock until it is dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// Which of the two flags says so.
    flag: &'a AtomicBool,
}

const fn candidate(thread: u32) -> u32 {
    thread << 1
}

const fn owner(thread: u32) -> u32 {
    thread << 1 | 1
}

impl<T> Lock<T> {
    pub(crate) fn new(inside: T) -> Self {
        Self {
            is_locked: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
            in_a_row: AtomicU16::new(0),
            owner: AtomicU32::new(0),
            inside: UnsafeCell::new(inside),
            needed: AtomicU16::new(if membarrier::register() { FIRST } else { LAST }),
            chosen: AtomicU32::new(0),
        }
    }

    /// Takes the lock for the calling thread, which does not hold it. Who has to wait spins, then yields, then sleeps, should the
    /// holder have lost its processor meanwhile.
    #[inline]
    pub(crate) fn lock(&self, thread: u32) -> Guard<'_, T> {
        if self.owner.load(Relaxed) == owner(thread) {
            self.is_held.store(true, Relaxed);
            // The processor may still do the load below before this store: who takes the ownership away has the kernel put a barrier
            // between the two, in this thread, wherever it is. Only the compiler must leave them in this order.
            compiler_fence(SeqCst);
            if self.owner.load(Relaxed) == owner(thread) {
                // What was done under the lock before was done by this thread, or before it became the owner.
                return Guard { lock: self, flag: &self.is_held };
            }
            self.is_held.store(false, Release);
        }
        self.lock_for_all(thread)
    }

    #[inline(never)]
    fn lock_for_all(&self, thread: u32) -> Guard<'_, T> {
        if self.is_locked.swap(true, Acquire) {
            // A look first: an attempt takes the line of the cache away from the holder.
            wait_until(|| !self.is_locked.load(Relaxed) && !self.is_locked.swap(true, Acquire));
        }
        // From here on nobody else writes `owner`.
        let last = self.owner.load(Relaxed);
        if last == candidate(thread) {
            let in_a_row = self.in_a_row.load(Relaxed).saturating_add(1);
            self.in_a_row.store(in_a_row, Relaxed);
            let needed = self.needed.load(Relaxed);
            if needed < LAST && in_a_row >= needed {
                self.make_owner(thread);
            }
        } else {
            self.owner.store(candidate(thread), Relaxed);
            self.in_a_row.store(0, Relaxed);
            if last & 1 == 1 {
                self.take_away();
            }
        }
        Guard { lock: self, flag: &self.is_locked }
    }

    /// A thread that holds the lock owns it from the next time on, if it is the one that can.
    #[cold]
    fn make_owner(&self, thread: u32) {
        if self.chosen.load(Relaxed) == 0 {
            self.chosen.store(thread, Relaxed);
        }
        if self.chosen.load(Relaxed) == thread {
            self.owner.store(owner(thread), Relaxed);
        }
    }

    /// Waits until the thread that was the owner does not hold the lock, and knows that it is not the owner any more.
    #[cold]
    fn take_away(&self) {
        self.needed.store(self.needed.load(Relaxed).saturating_mul(4).min(LAST), Relaxed);
        // After this, either the owner's store to `is_held` is seen below, or the owner's second load sees the new owner.
        membarrier::barrier();
        wait_until(|| !self.is_held.load(Acquire));
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let backoff = Backoff::new();
    while !is_so() {
        if backoff.is_completed() {
            sleep(Duration::from_micros(20));
        } else {
            backoff.snooze();
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held by this guard alone, until it is dropped.
        unsafe { &*self.lock.inside.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and the guard is borrowed alone.
        unsafe { &mut *self.lock.inside.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.flag.store(false, Release);
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").finish_non_exhaustive()
    }
}

#[cfg(all(target_os = "linux", any(feature = "backtrace", feature = "dispatch"), not(miri)))]
mod membarrier {
    //! `membarrier(2)`, from Linux 4.14 on.

    use std::{ffi::c_long, thread::sleep, time::Duration};

    const PRIVATE_EXPEDITED: c_long = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: c_long = 1 << 4;

    fn call(command: c_long) -> bool {
        // SAFETY: the call takes a command and flags, and touches no memory of the program.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0 as c_long, 0 as c_long) == 0 }
    }

    /// Whether [`barrier`] can be called from now on.
    pub(super) fn register() -> bool {
        // Tried at once, since a sandbox may forbid one and not the other.
        call(REGISTER_PRIVATE_EXPEDITED) && call(PRIVATE_EXPEDITED)
    }

    /// Every thread of the process has gone through a memory barrier when this returns.
    pub(super) fn barrier() {
        // It has worked before; should it not now, there is nothing else to do than to try again.
        while !call(PRIVATE_EXPEDITED) {
            sleep(Duration::from_micros(20));
        }
    }
}

#[cfg(not(all(target_os = "linux", any(feature = "backtrace", feature = "dispatch"), not(miri))))]
mod membarrier {
    //! Not known elsewhere.

    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn barrier() {
        unreachable!("nobody becomes owner without it")
    }
}

#[cfg(test)]
mod tests {
    use std::{hint, thread};

    use super::*;

    /// Two words that are equal while nobody holds the lock.
    fn check(lock: &Lock<(u64, u64)>, thread: u32) {
        let mut inside = lock.lock(thread);
        assert_eq!(inside.0, inside.1, "two threads hold the lock");
        inside.0 += 1;
        hint::black_box(&mut *inside);
        inside.1 += 1;
    }

    #[test]
    #[cfg(all(target_os = "linux", feature = "dispatch"))]
    fn the_first_thread_that_comes_again_and_again_is_the_owner() {
        let lock = Lock::new((0, 0));
        assert_eq!(lock.needed.load(Relaxed), FIRST, "the kernel has membarrier");
        for _ in 0..=FIRST {
            assert_ne!(lock.owner.load(Relaxed), owner(7));
            check(&lock, 7);
        }
        assert_eq!(lock.owner.load(Relaxed), owner(7));
        let held = lock.lock(7);
        assert!(lock.is_held.load(Relaxed) && !lock.is_locked.load(Relaxed));
        drop(held);
        assert!(!lock.is_held.load(Relaxed));
        // Another takes it away, and the next owner has to wait for longer.
        check(&lock, 8);
        assert_eq!((lock.owner.load(Relaxed), lock.needed.load(Relaxed)), (candidate(8), 4 * FIRST));
        for _ in 0..LAST {
            check(&lock, 8);
        }
        assert_eq!(lock.owner.load(Relaxed), candidate(8), "only one thread ever owns it");
        for owned in 1.. {
            for _ in 0..LAST {
                check(&lock, 7);
            }
            if lock.owner.load(Relaxed) != owner(7) {
                assert!(owned > 3, "{owned}");
                break;
            }
            check(&lock, 8);
        }
        assert_eq!(lock.needed.load(Relaxed), LAST);
    }

    /// Threads that come in bursts, so that one of them is the owner for a while, and is not, by turns.
    #[test]
    fn one_thread_at_a_time() {
        for round in 0..if cfg!(miri) { 1 } else { 200 } {
            let lock = Lock::new((0, 0));
            let threads = 2 + round % 3;
            let times = if cfg!(miri) { 50 } else { 2_000 };
            thread::scope(|scope| {
                for number in 1..=threads {
                    let lock = &lock;
                    scope.spawn(move || {
                        for time in 0..times {
                            // Otherwise ownership ends after a few losses.
                            lock.needed.store(lock.needed.load(Relaxed).min(FIRST), Relaxed);
                            check(lock, number);
                            if time % 300 == u64::from(number) * 40 {
                                thread::yield_now();
                            }
                        }
                    });
                }
            });
            let total = u64::from(threads) * times;
            assert_eq!(*lock.lock(99), (total, total));
        }
    }

    #[test]
    fn it_is_given_back_by_a_panic() {
        let lock = Lock::new((0, 0));
        for _ in 0..2 * FIRST {
            let panicked = std::panic::catch_unwind(|| {
                let _held = lock.lock(1);
                panic!("on purpose");
            });
            assert!(panicked.is_err());
        }
        check(&lock, 2);
    }
}
