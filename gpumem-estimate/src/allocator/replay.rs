//! The requests of a recorded program, in the model of PyTorch's caching allocator.

use std::collections::HashMap;

use gpumem_core::recording::AllocatorSettings;

use super::caching::Caching;
pub use super::caching::Sharing;

/// One request. Blocks have numbers from 0 on, in the order in which they come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// A segment that the allocator had before, with blocks that the program had. Each has its address and its size.
    Old {
        /// The segment.
        segment: (u64, u64),
        /// Who may get its free blocks.
        sharing: Sharing,
        /// The blocks, in the order of their addresses.
        blocks: Vec<(u64, u64)>,
    },
    /// A new block.
    Alloc {
        /// What the program asks for.
        bytes: u64,
        /// Who may get the block after it.
        sharing: Sharing,
        /// The address and the size of the segment that the driver gave for it.
        segment: Option<(u64, u64)>,
    },
    /// The program frees a block.
    Free(u32),
    /// The program frees a block that work on another stream may still use.
    RequestFree(u32),
    /// That work is done.
    CompleteFree(u32),
    /// The cache is emptied.
    EmptyCache,
    /// A request that was refused, with the bytes that the program asked for. It is freed at once.
    Refused(u64, Sharing),
}

/// What the requests need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The most that the allocator had from the driver.
    pub reserved: u64,
    /// What of it the program did not have then.
    pub unused: u64,
    /// The most that the program had, in blocks.
    pub allocated: u64,
    /// How often the allocator emptied its cache because the driver had not enough memory.
    pub retries: u64,
}

/// Makes all requests of an allocator that may have `limit` bytes. `None` if that is not enough.
pub fn replay(requests: &[Request], settings: &AllocatorSettings, limit: u64) -> Option<Outcome> {
    let mut caching = Caching::new(settings.clone(), limit);
    let mut blocks: Vec<u32> = Vec::new();
    // How often the cache had been emptied when the free of a block was requested. If it was emptied since, the block is free already, and
    // its place in the model may be that of another one.
    let mut requested = HashMap::new();
    for request in requests {
        match *request {
            Request::Old { segment, sharing, blocks: ref old } => {
                blocks.extend(caching.add_old(segment, sharing, old)?.iter().map(|placed| placed.block));
            }
            Request::Alloc { bytes, sharing, segment } => {
                blocks.push(caching.alloc_for(bytes, sharing, segment)?.block);
            }
            Request::Free(block) => caching.free(blocks[block as usize]),
            Request::RequestFree(block) => {
                requested.insert(block, caching.emptied);
                caching.request_free(blocks[block as usize]);
            }
            Request::CompleteFree(block) => {
                if requested.remove(&block) == Some(caching.emptied) {
                    caching.complete_free(blocks[block as usize]);
                }
            }
            Request::EmptyCache => caching.empty_cache(),
            Request::Refused(bytes, sharing) => {
                let block = caching.alloc_for(bytes, sharing, None)?.block;
                caching.free(block);
            }
        }
    }
    Some(Outcome {
        reserved: caching.reserved_peak,
        unused: caching.unused_at_peak,
        allocated: caching.allocated_peak,
        retries: caching.retries,
    })
}
