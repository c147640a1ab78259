//! Replays the requests of a recorded program in the model of PyTorch's caching allocator.

use std::collections::HashMap;

use gpumem_recording::AllocatorSettings;

pub use super::caching::Sharing;
use super::{
    caching::Caching,
    placement::{Allocator, Placement},
};

/// One request. Blocks have ids, starting at 0, in the order of allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// A segment that the allocator already held, with blocks that the program held. Each has its address and its size.
    Old {
        /// The segment.
        segment: (u64, u64),
        /// The stream and the pool that its free blocks are for.
        sharing: Sharing,
        /// The blocks, in the order of their addresses.
        blocks: Vec<(u64, u64)>,
    },
    /// A new block.
    Alloc {
        /// The bytes that the program requests.
        bytes: u64,
        /// The stream and the pool that may reuse the block after it is freed.
        sharing: Sharing,
        /// The address and the size of the segment that the driver allocated for it.
        segment: Option<(u64, u64)>,
    },
    /// The program frees a block.
    Free(u32),
    /// The program frees a block that work on another stream may still use.
    RequestFree(u32),
    /// The work on the other stream is done.
    CompleteFree(u32),
    /// The cache is emptied.
    EmptyCache,
    /// A request that was rejected, with the bytes that the program requested. In the model, it is allocated and freed
    /// at once.
    Rejected(u64, Sharing),
}

/// The memory that the requests need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The most memory that the allocator held from the driver.
    pub reserved: u64,
    /// The part of it that the program did not hold at that time.
    pub unused: u64,
    /// The number of times that the allocator emptied its cache because the driver did not have enough memory.
    pub retries: u64,
}

/// Replays all requests in an allocator that may hold `limit` bytes. `None` if that is not enough.
pub fn replay(requests: &[Request], settings: &AllocatorSettings, limit: u64) -> Option<Outcome> {
    let mut caching = Caching::new(settings.clone(), limit);
    let mut blocks: Vec<Placement> = Vec::new();
    // For each block whose free was requested, the number of times that the cache had been emptied before. If the cache
    // has been emptied again since then, the block is already free, and another block may have its id in the model.
    let mut requested = HashMap::new();
    for request in requests {
        match *request {
            Request::Old { segment, sharing, blocks: ref old } => {
                blocks.extend(caching.add_old(segment, sharing, old)?);
            }
            Request::Alloc { bytes, sharing, segment } => {
                blocks.push(caching.alloc_for(bytes, sharing, segment)?);
            }
            Request::Free(block) => caching.free(blocks[block as usize]),
            Request::RequestFree(block) => {
                requested.insert(block, caching.emptied);
                caching.request_free(blocks[block as usize].block);
            }
            Request::CompleteFree(block) => {
                if requested.remove(&block) == Some(caching.emptied) {
                    caching.complete_free(blocks[block as usize].block);
                }
            }
            Request::EmptyCache => caching.empty_cache(),
            Request::Rejected(bytes, sharing) => {
                let block = caching.alloc_for(bytes, sharing, None)?;
                caching.free(block);
            }
        }
    }
    Some(Outcome { reserved: caching.reserved_peak, unused: caching.unused_at_peak, retries: caching.retries })
}

#[cfg(test)]
mod tests {
    use super::{AllocatorSettings, Outcome, Request, Sharing, replay};

    /// Parses a script of requests: `+30` is a block of 30 MiB, `+30@1` on stream 1, `+30/1` in private pool 1, and
    /// `x30` is rejected. `-0` frees the block with id 0, `?0` requests its free, and `!0` completes that. `empty`
    /// empties the cache. `old80:10-20,30-35` is a segment of 80 MiB with blocks from 10 to 20 MiB and from 30 to 35
    /// MiB.
    fn requests(script: &str) -> Vec<Request> {
        let bytes = |text: &str| {
            let (whole, half) = text.strip_suffix(".5").map_or((text, 0), |whole| (whole, 1 << 19));
            whole.parse::<u64>().unwrap() * (1 << 20) + half
        };
        let of = |word: &str| {
            let (size, number) = word.split_once(['@', '/']).unwrap_or((word, "0"));
            let number = number.parse().unwrap();
            let [stream, pool] = if word.contains('@') { [number, 0] } else { [0, number] };
            (bytes(size), Sharing { stream, pool })
        };
        let request = |word: &str| match word.split_at(1) {
            _ if word == "empty" => Request::EmptyCache,
            ("o", old) => {
                let (segment, blocks) = old.trim_start_matches("ld").split_once(':').unwrap();
                let block =
                    |text: &str| text.split_once('-').map(|(start, end)| (bytes(start), bytes(end) - bytes(start)));
                let blocks = blocks.split(',').filter_map(block).collect();
                Request::Old { segment: (0, bytes(segment)), sharing: Sharing::default(), blocks }
            }
            ("+", size) => {
                let (bytes, sharing) = of(size);
                Request::Alloc { bytes, sharing, segment: None }
            }
            ("x", size) => Request::Rejected(of(size).0, Sharing::default()),
            ("-", block) => Request::Free(block.parse().unwrap()),
            ("?", block) => Request::RequestFree(block.parse().unwrap()),
            ("!", block) => Request::CompleteFree(block.parse().unwrap()),
            other => panic!("{other:?}"),
        };
        script.split_whitespace().map(request).collect()
    }

    /// PyTorch's defaults, `expandable_segments:True`, `max_split_size_mb:128` and `roundup_power2_divisions:4`.
    fn settings() -> [AllocatorSettings; 4] {
        let plain = AllocatorSettings::default;
        [
            plain(),
            AllocatorSettings { is_expandable: true, ..plain() },
            AllocatorSettings { max_split: 128 << 20, ..plain() },
            AllocatorSettings { divisions: vec![4; 16], ..plain() },
        ]
    }

    /// The numbers are the MiB that are reserved with each of the settings. Comments name functions of `CUDACachingAllocator.cpp` in
    /// PyTorch 2.11.
    #[test]
    fn as_much_is_reserved_as_pytorch_reserves() {
        for (script, expected) in [
            // `get_allocation_size`; expandable segments have pages of 2 MiB and of 20 MiB (`find_expandable_block`).
            ("+0.5", [2, 2, 2, 2]),
            ("+1 +1.5", [22, 22, 22, 22]),
            ("+25", [26, 40, 26, 28]),
            // `alloc_block`, `should_split`: a large rest is used, and one of 1 MiB is not, unless segments are expandable.
            ("+24.5 +1.5", [26, 40, 26, 48]),
            ("+25 +1.5", [46, 40, 46, 48]),
            ("+1.5 +40 -1 +39.5 +19", [80, 60, 80, 80]),
            // `get_free_block`, `try_merge_blocks`: the smallest block that is large enough, and neighbours are joined. A block that can
            // grow is the last choice.
            ("+4 +2 +6 -0 -1 +5 +8", [20, 20, 20, 20]),
            ("+4 +2 +6 -0 -1 -2 +20", [20, 20, 20, 20]),
            ("+6 +9 -0 +4 +25", [46, 40, 46, 48]),
            // `get_free_block`: each stream has its own blocks, and so has each private pool (`get_pool`).
            ("+30 -0 +30@1 -1 +30 +30", [90, 100, 90, 96]),
            ("+30/1 -0 +30 +30/1", [60, 80, 60, 64]),
            ("+30/1 -0 +30/2", [60, 80, 60, 64]),
            // `get_free_block`: oversize blocks are for oversize requests, which leave less than 20 MiB of them unused.
            ("+200 -0 +100", [200, 200, 300, 224]),
            ("+200 -0 +180", [200, 200, 380, 224]),
            ("+200 -0 +181", [200, 200, 200, 224]),
            // `free`, `process_events`: a block that another stream uses is free once that use has ended.
            ("+30 ?0 +30 !0 +30", [60, 60, 60, 64]),
            ("+30 ?0 !0 +30", [30, 40, 30, 32]),
            // `release_cached_blocks`, `release_blocks`: whole segments and whole pages. Private pools are kept.
            ("+30 -0 empty +40", [40, 40, 40, 40]),
            ("+5 +5 -0 empty +60", [80, 80, 80, 84]),
            ("+30 +70 -0 empty +35", [106, 120, 106, 120]),
            ("+30/1 -0 empty +30", [60, 80, 60, 64]),
            ("+30 ?0 empty +30 !0 +30", [60, 60, 60, 64]),
            // A rejected request gets memory, and is freed.
            ("+30 x50 +50", [80, 80, 80, 88]),
            // A history may start with existing segments. They have ordinary blocks, which are split with all settings.
            ("old80:10-20,30-35 +10 +40 -0 +18", [80, 80, 80, 80]),
        ] {
            let reserved =
                settings().map(|settings| replay(&requests(script), &settings, u64::MAX).unwrap().reserved >> 20);
            assert_eq!(reserved, expected, "{script}");
        }
    }

    /// Returns how often the cache is emptied on a GPU of 400 MiB. `None` if the requests do not fit.
    #[test]
    fn the_cache_is_emptied_when_the_card_is_full() {
        for (script, expected) in [
            ("+200 -0 +300", [Some(1), Some(0), Some(1), Some(1)]),
            ("+200 -0 +100 +300", [None, Some(0), Some(1), None]),
            // The whole pages of a free block are returned; what is before and after them is used again.
            ("+5 +125 +150 -1 +220 +15", [Some(1), Some(1), Some(1), None]),
            ("+125 +150 -0 +220 +5 +5 +20", [None, Some(1), None, None]),
            // `release_available_cached_blocks`: oversize blocks go first, as many as are needed.
            ("+200 +150 -0 -1 +300", [Some(1), Some(0), Some(0), Some(1)]),
            ("+300 -0 +250", [Some(0), Some(0), Some(0), Some(0)]),
            ("+200 +250 -0", [None; 4]),
            // `synchronize_and_free_events` waits for blocks that other streams use. They are freed once.
            ("+200 ?0 +300 !0 +60 -1 +200", [Some(1), Some(1), Some(1), Some(1)]),
            ("+200/1 -0 +300", [None; 4]),
        ] {
            let retries = |settings| replay(&requests(script), &settings, 400 << 20).map(|outcome| outcome.retries);
            assert_eq!(settings().map(retries), expected, "{script}");
        }
    }

    #[test]
    fn what_was_unused_at_the_peak_is_counted() {
        let [settings, ..] = settings();
        let outcome = replay(&requests("+30 +50 -0 +40 -1 +10"), &settings, u64::MAX).unwrap();
        assert_eq!(outcome, Outcome { reserved: 120 << 20, unused: 30 << 20, retries: 0 });
    }
}
