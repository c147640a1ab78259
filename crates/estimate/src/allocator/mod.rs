//! Models of allocators: the bytes that a request takes, and the memory that the allocator holds from the driver.

mod caching;
mod placement;
pub mod replay;

use gpumem_recording::AllocatorSettings;
use serde::{Deserialize, Serialize};

use self::caching::Caching;
pub(crate) use self::placement::{Allocator, Placement};

/// The allocator that a step uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AllocatorKind {
    /// Each request takes exactly its bytes.
    Exact,
    /// PyTorch's caching allocator with its default settings.
    #[default]
    #[serde(rename = "pytorch")]
    PyTorch,
    /// PyTorch's caching allocator with `expandable_segments:True`.
    #[serde(rename = "pytorch_expandable")]
    PyTorchExpandable,
    /// The driver's stream-ordered pool (`cudaMallocAsync`), as candle and cudarc use it, and PyTorch with
    /// `backend:cudaMallocAsync`.
    StreamOrdered,
}

/// The step in which the stream-ordered pool grows.
const POOL_STEP: u64 = 32 << 20;

/// Creates an allocator that may take this much memory from the driver.
pub(crate) fn allocator(kind: AllocatorKind, limit: u64) -> Box<dyn Allocator> {
    let caching = |is_expandable| {
        let settings = AllocatorSettings { is_expandable, ..AllocatorSettings::default() };
        Box::new(Caching::new(settings, limit))
    };
    match kind {
        AllocatorKind::Exact => Box::new(Counting { step: 1, limit, ..Counting::default() }),
        AllocatorKind::PyTorch => caching(false),
        AllocatorKind::PyTorchExpandable => caching(true),
        AllocatorKind::StreamOrdered => Box::new(Counting { step: POOL_STEP, limit, ..Counting::default() }),
    }
}

/// An allocator whose blocks take the requested bytes, and whose memory from the driver is a multiple of a step.
///
/// With a step of 1, the allocator adds nothing. The driver's stream-ordered pool (`cudaMallocAsync`) has a step of 32
/// MiB: it can assemble blocks from parts that are not adjacent, so that a free part of it is never too small. Its
/// release threshold controls when it returns memory to the driver. That does not change the highest value, because
/// memory is returned before the driver rejects a request.
#[derive(Debug, Default)]
struct Counting {
    step: u64,
    limit: u64,
    next: u64,
    in_use: u64,
    reserved_peak: u64,
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
    use super::{Allocator, Counting, POOL_STEP};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_pool_grows_by_32_mib() {
        let mut pool = Counting { step: POOL_STEP, limit: 96 * MIB, ..Counting::default() };
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
