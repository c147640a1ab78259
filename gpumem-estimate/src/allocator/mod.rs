//! Models of allocators: how many bytes a request takes, and how much the allocator has from the driver.

mod caching;
mod exact;

use serde::{Deserialize, Serialize};

use self::{caching::Caching, exact::Exact};

/// Which allocator a step uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AllocatorKind {
    /// Each request takes its bytes.
    Exact,
    /// PyTorch's caching allocator with its default settings.
    #[default]
    #[serde(rename = "pytorch")]
    PyTorch,
}

/// Where a block is, and how many bytes it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) enum Allocator {
    Exact(Exact),
    Caching(Caching),
}

impl Allocator {
    /// An allocator that may have this much memory.
    pub(crate) fn new(kind: AllocatorKind, limit: u64) -> Self {
        match kind {
            AllocatorKind::Exact => Self::Exact(Exact::new(limit)),
            AllocatorKind::PyTorch => Self::Caching(Caching::new(limit)),
        }
    }

    /// `None` if there is not enough memory.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        match self {
            Self::Exact(exact) => exact.alloc(bytes),
            Self::Caching(caching) => caching.alloc(bytes),
        }
    }

    pub(crate) fn free(&mut self, address: u64) {
        match self {
            Self::Exact(exact) => exact.free(address),
            Self::Caching(caching) => caching.free(address),
        }
    }

    /// The most that the allocator had from the driver at one time.
    pub(crate) fn reserved_peak(&self) -> u64 {
        match self {
            Self::Exact(exact) => exact.peak,
            Self::Caching(caching) => caching.reserved_peak,
        }
    }
}
