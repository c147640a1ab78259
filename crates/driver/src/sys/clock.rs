//! A counter that rises with time and costs little to read: the timestamp counter of the processor, if there is one.

/// Reads the counter. It rises evenly, on all processors alike. Its speed is found by reading a clock beside it.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and it only reads a register. An operating system that forbids it to
    // programs would stop the C library's own clock too.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Reads the counter. It rises evenly, on all processors alike. Its speed is found by reading a clock beside it.
#[cfg(target_arch = "aarch64")]
#[inline]
pub fn ticks() -> u64 {
    let ticks;
    // SAFETY: the instruction reads the virtual counter into a register, and nothing else. Linux lets programs read it, as the C
    // library's own clock does.
    unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags)) };
    ticks
}

/// Reads the counter: the nanoseconds of a slower clock.
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
