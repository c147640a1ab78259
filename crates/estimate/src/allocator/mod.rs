//! Models of allocators: the bytes that a request takes, and the memory that the allocator holds from the driver.

mod caching;
mod counting;
mod cubecl;
pub mod replay;

use gpumem_recording::AllocatorSettings;
use serde::{Deserialize, Serialize};

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

/// The address of a block, and the bytes that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The id that the allocator needs to free the block.
    block: u32,
}

/// A model of an allocator.
pub(crate) trait Allocator: std::fmt::Debug {
    /// Allocates a block. `None` if there is not enough memory.
    fn alloc(&mut self, bytes: u64) -> Option<Placement>;

    fn free(&mut self, placement: Placement);

    /// Returns the most memory that the allocator held from the driver.
    fn reserved_peak(&self) -> u64;
}

/// Creates an allocator that may take this much memory from the driver.
pub(crate) fn allocator(kind: AllocatorKind, limit: u64) -> Box<dyn Allocator> {
    let caching = |is_expandable| {
        let settings = AllocatorSettings { is_expandable, ..AllocatorSettings::default() };
        Box::new(Caching::new(settings, limit))
    };
    match kind {
        AllocatorKind::Exact => Box::new(Counting::new(1, limit)),
        AllocatorKind::PyTorch => caching(false),
        AllocatorKind::PyTorchExpandable => caching(true),
        AllocatorKind::StreamOrdered => Box::new(Counting::new(POOL_STEP, limit)),
        AllocatorKind::Cubecl { card } => Box::new(Cubecl::new(card.get(), limit)),
    }
}
