//! A counter that increases with time and is cheap to read: the processor's timestamp counter, if it has one.

/// Reads the counter. It increases at a constant rate and is the same on all processors. Its speed must be measured against a clock.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and it only reads a register. An operating system that forbids it would also
    // break the clock of the C library.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Reads the counter. It increases at a constant rate and is the same on all processors. Its speed must be measured against a clock.
#[cfg(target_arch = "aarch64")]
#[inline]
pub fn ticks() -> u64 {
    let ticks;
    // SAFETY: the instruction only reads the virtual counter into a register. Linux allows programs to read it, and the clock of the C
    // library does so as well.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

/// Reads the counter, which here is a slower clock in nanoseconds.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn ticks() -> u64 {
    use std::{sync::OnceLock, time::Instant};
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{thread::sleep, time::Duration};

    use super::*;

    #[test]
    fn the_counter_rises() {
        let before = ticks();
        sleep(Duration::from_millis(1));
        assert!(ticks() > before);
    }
}
