//! What the memory of one GPU does, as measured on a real one, and nothing else: no clock, no lock, no I/O.
//!
//! The simulated device is this model behind safe guards; the stand-in driver of the tests is the same file behind the
//! C ABI. It therefore names nothing but `std`, and counts in plain `u64` bytes.
//!
//! The figures are those of NVML's second version: `total = free + used + reserved`.

use std::{collections::BTreeMap, iter, ops::Range};

/// What the device hands out to `cuMemAlloc`, and so the step in which `used` moves.
const PAGE: u64 = 2 << 20;
/// The step in which the backing of a stream-ordered pool grows and shrinks.
const POOL_STEP: u64 = 32 << 20;
/// Every address is a multiple of this.
const ALIGNMENT: u64 = 512;
/// Blocks and pooled blocks live in address ranges of their own, far from 0. The second ends below 2^48.
const BLOCKS: Range<u64> = 0x7000_0000_0000..0x7800_0000_0000;
const POOLED: Range<u64> = 0x7800_0000_0000..0x8000_0000_0000;

/// Why the device refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelError {
    /// The backing that the request needs is more than what is free.
    OutOfMemory,
    /// No live block starts at this address.
    UnknownAddress,
    /// A block of 0 bytes was asked for, which CUDA calls an invalid value.
    ZeroBytes,
}

/// The memory of one device: blocks, one stream-ordered pool, and what others hold.
#[derive(Debug, Clone)]
pub struct DeviceModel {
    total: u64,
    reserved: u64,
    held: u64,
    blocks: Blocks,
    /// What `blocks` of at least a page take, each rounded up to pages.
    large_backing: u64,
    /// What `blocks` of less than a page add up to: they share pages, packed without gaps.
    small_bytes: u64,
    pool: Pool,
}

impl DeviceModel {
    /// A device with nothing in use.
    pub fn new(total: u64) -> Self {
        Self {
            total,
            reserved: 0,
            held: 0,
            blocks: Blocks::within(BLOCKS),
            large_backing: 0,
            small_bytes: 0,
            pool: Pool::new(),
        }
    }

    /// Sets what the driver keeps for itself, which is neither free nor used.
    #[must_use]
    pub fn with_reserved(mut self, bytes: u64) -> Self {
        self.reserved = bytes.min(self.total);
        self
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// The backing of everything on the device: what NVML shows, not what was asked for.
    pub fn used(&self) -> u64 {
        self.held + self.large_backing + self.small_backing() + self.pool.reserved
    }

    pub fn free(&self) -> u64 {
        self.total - self.reserved - self.used()
    }

    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// `cuMemAlloc`. The address of the last freed block of this size is given out again, as a real driver does.
    pub fn alloc(&mut self, bytes: u64) -> Result<u64, ModelError> {
        if bytes == 0 {
            return Err(ModelError::ZeroBytes);
        }
        let growth = if bytes < PAGE {
            round_up(self.small_bytes + packed(bytes)?, PAGE)? - self.small_backing()
        } else {
            round_up(bytes, PAGE)?
        };
        if growth > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        let address = self.blocks.insert(bytes)?;
        if bytes < PAGE {
            self.small_bytes += packed(bytes)?;
        } else {
            self.large_backing += growth;
        }
        Ok(address)
    }

    /// `cuMemFree`: what the block took is free at once. Returns the bytes that were asked for.
    pub fn free_block(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.blocks.remove(address)?;
        if bytes < PAGE {
            self.small_bytes -= packed(bytes)?;
        } else {
            self.large_backing -= round_up(bytes, PAGE)?;
        }
        Ok(bytes)
    }

    /// `cuMemAllocAsync` from the device's pool, on the one stream that this model has.
    pub fn alloc_async(&mut self, bytes: u64) -> Result<u64, ModelError> {
        if bytes == 0 {
            return Err(ModelError::ZeroBytes);
        }
        let pool = &self.pool;
        let used = add(pool.used, bytes)?;
        // What was freed in stream order may be given out again in stream order, before any synchronise.
        let freed = pool.freed.saturating_sub(bytes);
        let backing = round_up(add(used, freed)?, POOL_STEP)?;
        if backing.saturating_sub(pool.reserved) > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        let address = self.pool.blocks.insert(bytes)?;
        self.pool.used = used;
        self.pool.freed = freed;
        self.pool.reserved = self.pool.reserved.max(backing);
        self.pool.used_high = self.pool.used_high.max(used);
        self.pool.reserved_high = self.pool.reserved_high.max(self.pool.reserved);
        Ok(address)
    }

    /// `cuMemFreeAsync`: the pool's `used` falls now, its backing stays. Returns the bytes that were asked for.
    pub fn free_async(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.pool.blocks.remove(address)?;
        self.pool.used -= bytes;
        self.pool.freed += bytes;
        Ok(bytes)
    }

    /// The work in flight is done: unused backing above the release threshold goes back to the device.
    pub fn synchronize(&mut self) {
        self.pool.freed = 0;
        self.pool.shrink_to(self.pool.release_threshold);
    }

    /// `cuMemPoolTrimTo`. Memory that was freed since the last synchronise may still be in use by the work in flight,
    /// so trimming before synchronising recovers nothing.
    pub fn trim_to(&mut self, keep: u64) {
        self.pool.shrink_to(keep);
    }

    /// The bytes that are live in the pool.
    pub fn pool_used(&self) -> u64 {
        self.pool.used
    }

    /// The backing that the pool holds of the device.
    pub fn pool_reserved(&self) -> u64 {
        self.pool.reserved
    }

    pub fn pool_used_high(&self) -> u64 {
        self.pool.used_high
    }

    pub fn pool_reserved_high(&self) -> u64 {
        self.pool.reserved_high
    }

    /// The mark starts again from what is in use now.
    pub fn reset_pool_used_high(&mut self) {
        self.pool.used_high = self.pool.used;
    }

    /// The mark starts again from what is held now.
    pub fn reset_pool_reserved_high(&mut self) {
        self.pool.reserved_high = self.pool.reserved;
    }

    /// How much unused backing a synchronise leaves with the pool; 0 unless set.
    pub fn pool_release_threshold(&self) -> u64 {
        self.pool.release_threshold
    }

    pub fn set_pool_release_threshold(&mut self, bytes: u64) {
        self.pool.release_threshold = bytes;
    }

    /// Takes memory that is no block of ours: a context, another process.
    pub fn hold(&mut self, bytes: u64) -> Result<(), ModelError> {
        if bytes > self.free() {
            return Err(ModelError::OutOfMemory);
        }
        self.held += bytes;
        Ok(())
    }

    /// Gives back what [`hold`](Self::hold) took, at most all of it.
    pub fn release(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }

    /// Frees every block, pooled or not, as the end of a context does.
    pub fn clear(&mut self) {
        let (total, reserved, held) = (self.total, self.reserved, self.held);
        *self = Self { held, ..Self::new(total).with_reserved(reserved) };
    }

    /// The start and size of the live block that this address points into, as `cuMemGetAddressRange` tells.
    pub fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        self.blocks.containing(address).or_else(|| self.pool.blocks.containing(address))
    }

    fn small_backing(&self) -> u64 {
        self.small_bytes.next_multiple_of(PAGE)
    }
}

/// The device's stream-ordered pool.
#[derive(Debug, Clone)]
struct Pool {
    blocks: Blocks,
    used: u64,
    /// Freed in stream order since the last synchronise: no longer used, not yet returnable.
    freed: u64,
    reserved: u64,
    used_high: u64,
    reserved_high: u64,
    release_threshold: u64,
}

impl Pool {
    fn new() -> Self {
        Self {
            blocks: Blocks::within(POOLED),
            used: 0,
            freed: 0,
            reserved: 0,
            used_high: 0,
            reserved_high: 0,
            release_threshold: 0,
        }
    }

    fn shrink_to(&mut self, keep: u64) {
        let keep = round_up(keep.max(self.used + self.freed), POOL_STEP).unwrap_or(u64::MAX);
        self.reserved = self.reserved.min(keep);
    }
}

/// Live blocks by address, and the addresses that may be given out again.
#[derive(Debug, Clone)]
struct Blocks {
    live: BTreeMap<u64, u64>,
    /// Freed addresses by the span they cover, the last freed on top.
    reusable: BTreeMap<u64, Vec<u64>>,
    /// Addresses that are not in use, and not in `reusable`.
    fresh: Range<u64>,
    all: Range<u64>,
}

impl Blocks {
    fn within(all: Range<u64>) -> Self {
        Self { live: BTreeMap::new(), reusable: BTreeMap::new(), fresh: all.clone(), all }
    }

    fn insert(&mut self, bytes: u64) -> Result<u64, ModelError> {
        let span = packed(bytes)?;
        let address = if let Some(freed) = self.reusable.get_mut(&span).and_then(Vec::pop) {
            freed
        } else {
            if self.fresh.end - self.fresh.start < span {
                self.find_fresh();
            }
            if self.fresh.end - self.fresh.start < span {
                return Err(ModelError::OutOfMemory);
            }
            let address = self.fresh.start;
            self.fresh.start += span;
            address
        };
        self.live.insert(address, bytes);
        Ok(address)
    }

    /// Takes the widest gap between live blocks, in place of all freed addresses.
    fn find_fresh(&mut self) {
        self.reusable.clear();
        let Range { mut start, end } = self.all;
        self.fresh = start..start;
        let live = self.live.iter().map(|(address, bytes)| *address..address + bytes.next_multiple_of(ALIGNMENT));
        for block in live.chain(iter::once(end..end)) {
            let gap = start..block.start;
            if gap.end - gap.start > self.fresh.end - self.fresh.start {
                self.fresh = gap;
            }
            start = block.end;
        }
    }

    fn remove(&mut self, address: u64) -> Result<u64, ModelError> {
        let bytes = self.live.remove(&address).ok_or(ModelError::UnknownAddress)?;
        self.reusable.entry(packed(bytes)?).or_default().push(address);
        Ok(bytes)
    }

    fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.live.range(..=address).next_back()?;
        (address - start < bytes).then_some((start, bytes))
    }
}

/// What a block covers of the addresses, and of a page that it shares.
fn packed(bytes: u64) -> Result<u64, ModelError> {
    round_up(bytes, ALIGNMENT)
}

fn add(a: u64, b: u64) -> Result<u64, ModelError> {
    a.checked_add(b).ok_or(ModelError::OutOfMemory)
}

fn round_up(bytes: u64, step: u64) -> Result<u64, ModelError> {
    bytes.checked_next_multiple_of(step).ok_or(ModelError::OutOfMemory)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{ALIGNMENT, DeviceModel, ModelError};

    const MIB: u64 = 1 << 20;

    /// Runs a script, one step for each `;`, on a device of 1024 MiB. Sizes are in MiB, or in bytes with a `b`; names
    /// stand for addresses. A step that is a figure's name checks that figure; `!oom`, `!unknown` and `!zero` in front
    /// of a step say that it is refused, and a refused step must change no figure.
    fn check(script: &str) {
        let mut device = DeviceModel::new(1024 * MIB);
        let mut addresses: HashMap<&str, u64> = HashMap::new();
        for step in script.split(';').map(str::trim).filter(|step| !step.is_empty()) {
            let mut words = step.split_whitespace().peekable();
            let refused = words.next_if(|word| word.starts_with('!'));
            let (verb, words) = (words.next().unwrap(), words.collect::<Vec<_>>());
            let size = |at: usize| match words[at].strip_suffix('b') {
                Some(bytes) => bytes.parse().unwrap(),
                None => words[at].parse::<u64>().unwrap() * MIB,
            };
            let before = figures(&device);
            let outcome = match verb {
                "alloc" => device.alloc(size(1)),
                "async" => device.alloc_async(size(1)),
                "free" => device.free_block(addresses[words[0]]),
                "free_async" => device.free_async(addresses[words[0]]),
                "hold" => device.hold(size(0)).map(|()| 0),
                _ => Ok(0),
            };
            match (verb, outcome) {
                ("alloc" | "async", Ok(address)) => {
                    addresses.insert(words[0], address);
                }
                ("alloc" | "async" | "free" | "free_async" | "hold", _) => (),
                ("release", _) => device.release(size(0)),
                ("sync", _) => device.synchronize(),
                ("trim", _) => device.trim_to(size(0)),
                ("threshold", _) => device.set_pool_release_threshold(size(0)),
                ("reset_high", _) => device.reset_pool_used_high(),
                ("clear", _) => device.clear(),
                ("same", _) => assert_eq!(addresses[words[0]], addresses[words[1]], "`{step}` in `{script}`"),
                (figure, _) => {
                    let (_, value) = before.iter().find(|(name, _)| *name == figure).expect(figure);
                    assert_eq!(*value, size(0), "`{step}` in `{script}`");
                }
            }
            let expected = match refused {
                None => None,
                Some("!oom") => Some(ModelError::OutOfMemory),
                Some("!unknown") => Some(ModelError::UnknownAddress),
                Some("!zero") => Some(ModelError::ZeroBytes),
                Some(other) => panic!("no such refusal: {other}"),
            };
            assert_eq!(outcome.err(), expected, "`{step}` in `{script}`");
            if refused.is_some() {
                assert_eq!(figures(&device), before, "`{step}` in `{script}` was refused but changed a figure");
            }
            assert_eq!(device.total(), device.free() + device.used() + device.reserved(), "`{step}` in `{script}`");
        }
    }

    fn figures(device: &DeviceModel) -> [(&'static str, u64); 6] {
        [
            ("used", device.used()),
            ("left", device.free()),
            ("pool_used", device.pool_used()),
            ("pool_reserved", device.pool_reserved()),
            ("pool_used_high", device.pool_used_high()),
            ("pool_reserved_high", device.pool_reserved_high()),
        ]
    }

    #[test]
    fn blocks_take_pages() {
        for script in [
            "used 0; left 1024",
            "alloc a 1b; used 2; left 1022; free a; used 0; left 1024",
            // Small blocks share pages.
            "alloc a 1b; alloc b 1; used 2; alloc c 1; used 4; free b; used 2; free a; used 2; free c; used 0",
            "alloc a 2; used 2; alloc b 2097153b; used 6; free a; used 4; free b; used 0",
            "alloc a 256; used 256; alloc b 256; used 512; free a; used 256",
            // The device is full by its pages, not by what was asked for.
            "alloc a 1023; used 1024; !oom alloc b 1b; free a; alloc b 1b; used 2",
            "alloc a 1024; left 0; free a; !oom alloc b 1025; alloc c 1024",
            "!oom alloc a 18446744073709551615b; !zero alloc a 0; !zero async a 0",
            "alloc a 1; free a; !unknown free a",
            "alloc a 1; async b 1; !unknown free b; !unknown free_async a",
        ] {
            check(script);
        }
    }

    #[test]
    fn the_last_freed_address_of_a_size_comes_first() {
        for script in [
            "alloc a 4; free a; alloc b 4; same a b",
            "alloc a 4; alloc b 4; free a; free b; alloc c 4; same b c; alloc d 4; same a d",
            "async a 4; free_async a; async b 4; same a b",
        ] {
            check(script);
        }
    }

    #[test]
    fn the_pool_grows_in_steps_and_shrinks_when_synchronised() {
        for script in [
            "async a 1b; pool_used 1b; pool_reserved 32; used 32; free_async a; pool_used 0; used 32; sync; used 0",
            "async a 32; used 32; async b 1b; used 64; free_async b; sync; used 32",
            // Freed memory is given out again in stream order, without growing.
            "async a 32; free_async a; async b 32; used 32; pool_used 32",
            "async a 32; free_async a; async b 1; used 32; pool_used 1; sync; used 32",
            // Trimming before synchronising recovers nothing; afterwards it keeps what is used.
            "threshold 1024; async a 64; free_async a; trim 0; used 64; sync; used 64; trim 33; used 64; trim 32; used 32; trim 0; used 0",
            "threshold 1024; async a 33; async b 64; free_async b; sync; used 128; trim 0; used 64; pool_used 33",
            "threshold 64; async a 128; free_async a; sync; used 64; threshold 0; sync; used 0",
            // A full device refuses the next step of backing, not what fits into the last.
            "hold 992; async a 1; used 1024; async b 31; !oom async c 1b; free_async b; async c 31; !oom alloc d 1b",
            "!oom async a 18446744073709551615b; async a 1; !oom async b 18446744073709551615b",
        ] {
            check(script);
        }
    }

    #[test]
    fn the_high_water_mark_starts_again_from_what_is_in_use() {
        for script in [
            "async a 64; async b 512; free_async b; pool_used_high 576; reset_high; pool_used_high 64; pool_reserved_high 576",
            "async a 64; reset_high; free_async a; pool_used_high 64; reset_high; pool_used_high 0; async b 1; pool_used_high 1",
        ] {
            check(script);
        }
    }

    /// 16 TiB in all, of which no two blocks have the same size: no address can be given out again as it is.
    #[test]
    fn live_blocks_never_share_an_address() {
        const TIB: u64 = 1 << 40;
        let mut device = DeviceModel::new(8 * TIB);
        let pooled = device.alloc_async(TIB / 2).unwrap();
        let mut kept = vec![(pooled, TIB / 2)];
        for round in 0..64 {
            let bytes = TIB / 4 + round * MIB;
            let address = device.alloc(bytes).unwrap();
            if round % 16 == 0 {
                kept.push((address, bytes));
            } else {
                device.free_block(address).unwrap();
            }
            let in_pool = device.alloc_async(bytes).unwrap();
            device.free_async(in_pool).unwrap();
            device.synchronize();
            for new in [(address, bytes), (in_pool, bytes)] {
                assert!(new.0 + new.1 <= 1 << 48);
                for old in kept.iter().filter(|old| **old != new) {
                    assert!(new.0 >= old.0 + old.1 || old.0 >= new.0 + new.1, "{new:x?} lies in {old:x?}");
                }
            }
        }
        for (address, bytes) in kept {
            assert_eq!(device.block_at(address), Some((address, bytes)));
        }
    }

    /// Not even where the device has room for more than its addresses.
    #[test]
    fn addresses_end() {
        let mut device = DeviceModel::new(1 << 50);
        let blocks: Vec<_> = std::iter::from_fn(|| device.alloc(1 << 40).ok()).collect();
        assert_eq!((blocks.len(), device.alloc(1 << 40)), (8, Err(ModelError::OutOfMemory)));
        device.free_block(blocks[3]).unwrap();
        assert_eq!(device.alloc((1 << 40) - MIB), Ok(blocks[3]));
    }

    #[test]
    fn others_hold_memory_too() {
        for script in [
            "hold 527; used 527; !oom alloc a 498; alloc a 496; !oom hold 2; release 527; used 496; release 1; used 496",
            "hold 100; alloc a 100; async b 1; clear; used 100; pool_used 0; pool_reserved 0; !unknown free a",
        ] {
            check(script);
        }
    }

    #[test]
    fn what_the_driver_reserves_is_neither_free_nor_used() {
        let mut device = DeviceModel::new(1024 * MIB).with_reserved(615 * MIB);
        assert_eq!((device.free(), device.used(), device.reserved()), (409 * MIB, 0, 615 * MIB));
        assert_eq!(device.alloc(410 * MIB), Err(ModelError::OutOfMemory));
        assert_eq!(DeviceModel::new(MIB).with_reserved(u64::MAX).free(), 0);
    }

    #[test]
    fn addresses_are_aligned_and_lead_back_to_their_block() {
        let mut device = DeviceModel::new(1024 * MIB);
        let blocks = [(device.alloc(1).unwrap(), 1), (device.alloc(3 * MIB).unwrap(), 3 * MIB)];
        let pooled = [(device.alloc_async(1000).unwrap(), 1000), (device.alloc_async(1).unwrap(), 1)];
        for (address, bytes) in blocks.into_iter().chain(pooled) {
            assert_eq!(address % ALIGNMENT, 0);
            assert_eq!(device.block_at(address), Some((address, bytes)));
            assert_eq!(device.block_at(address + bytes - 1), Some((address, bytes)));
            assert_eq!(device.block_at(address + bytes), None);
        }
        assert_eq!(device.block_at(0), None);
        assert_eq!(device.free_block(blocks[1].0), Ok(3 * MIB));
        assert_eq!(device.free_async(pooled[0].0), Ok(1000));
        assert_eq!(device.block_at(blocks[1].0), None);
    }
}
