//! Models of allocators: the bytes that a request takes, and the memory that the allocator holds from the driver.

mod caching;
mod counting;
mod cubecl;
mod placement;
pub mod replay;

use gpumem_recording::AllocatorSettings;
use serde::{Deserialize, Serialize};

pub(crate) use self::placement::Placement;
use self::{caching::Caching, counting::Counting, cubecl::Cubecl};
use crate::Bytes;

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
    /// The pages of cubecl 0.10 on CUDA, as Burn 0.21 uses them. Their sizes depend on the GPU's memory.
    Cubecl {
        /// The GPU's total memory.
        card: Bytes,
    },
}

/// The step in which the stream-ordered pool grows.
const POOL_STEP: u64 = 32 << 20;

#[derive(Debug)]
pub(crate) enum Allocator {
    Counting(Counting),
    Caching(Caching),
    Cubecl(Cubecl),
}

impl Allocator {
    /// Creates an allocator that may take this much memory from the driver.
    pub(crate) fn new(kind: AllocatorKind, limit: u64) -> Self {
        match kind {
            AllocatorKind::Exact => Self::Counting(Counting::new(1, limit)),
            AllocatorKind::PyTorch => Self::Caching(Caching::new(AllocatorSettings::default(), limit)),
            AllocatorKind::PyTorchExpandable => {
                let settings = AllocatorSettings { is_expandable: true, ..AllocatorSettings::default() };
                Self::Caching(Caching::new(settings, limit))
            }
            AllocatorKind::StreamOrdered => Self::Counting(Counting::new(POOL_STEP, limit)),
            AllocatorKind::Cubecl { card } => Self::Cubecl(Cubecl::new(card.get(), limit)),
        }
    }

    /// Allocates a block. `None` if there is not enough memory.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        match self {
            Self::Counting(counting) => counting.alloc(bytes),
            Self::Caching(caching) => caching.alloc(bytes),
            Self::Cubecl(cubecl) => cubecl.alloc(bytes),
        }
    }

    pub(crate) fn free(&mut self, placement: Placement) {
        match self {
            Self::Counting(counting) => counting.free(placement.bytes),
            Self::Caching(caching) => caching.free(placement.block),
            Self::Cubecl(cubecl) => cubecl.free(placement),
        }
    }

    /// Returns the most memory that the allocator held from the driver.
    pub(crate) fn reserved_peak(&self) -> u64 {
        match self {
            Self::Counting(counting) => counting.reserved_peak,
            Self::Caching(caching) => caching.reserved_peak,
            Self::Cubecl(cubecl) => cubecl.reserved_peak(),
        }
    }
}
