//! Allocators without a layout: their memory from the driver depends only on the sum of the blocks.

use super::{Allocator, Placement};

/// An allocator whose blocks take the requested bytes, and whose memory from the driver is a multiple of a step.
///
/// With a step of 1, the allocator adds nothing. The driver's stream-ordered pool (`cudaMallocAsync`) has a step of 32
/// MiB: it can assemble blocks from parts that are not adjacent, so that a free part of it is never too small. Its
/// release threshold controls when it returns memory to the driver. That does not change the highest value, because
/// memory is returned before the driver rejects a request.
#[derive(Debug)]
pub(crate) struct Counting {
    step: u64,
    limit: u64,
    next: u64,
    in_use: u64,
    reserved_peak: u64,
}

impl Counting {
    pub(super) fn new(step: u64, limit: u64) -> Self {
        Self { step, limit, next: 0, in_use: 0, reserved_peak: 0 }
    }
}

impl Allocator for Counting {
    fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        let in_use = self.in_use.checked_add(bytes)?;
        let reserved = in_use.checked_next_multiple_of(self.step).filter(|reserved| *reserved <= self.limit)?;
        self.in_use = in_use;
        self.reserved_peak = self.reserved_peak.max(reserved);
        // Here, the address of a block is only a number.
        self.next += 1;
        Some(Placement { address: self.next, bytes, block: 0 })
    }

    fn free(&mut self, placement: Placement) {
        self.in_use -= placement.bytes;
    }

    fn reserved_peak(&self) -> u64 {
        self.reserved_peak
    }
}

#[cfg(test)]
mod tests {
    use super::{Allocator, Counting};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_pool_grows_by_32_mib() {
        let mut pool = Counting::new(32 * MIB, 96 * MIB);
        let first = pool.alloc(1).unwrap();
        assert_eq!((first.bytes, pool.reserved_peak), (1, 32 * MIB));
        let second = pool.alloc(60 * MIB).unwrap();
        assert_eq!(pool.reserved_peak, 64 * MIB);
        assert_eq!(pool.alloc(36 * MIB), None, "96 MiB and 1 byte are in use then");
        pool.free(first);
        assert!(pool.alloc(36 * MIB).is_some());
        assert_eq!(pool.reserved_peak, 96 * MIB);
        pool.free(second);
        assert!(pool.alloc(60 * MIB).is_some(), "what was freed is used again");
    }
}
