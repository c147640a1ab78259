//! The memory management of cubecl 0.10 on CUDA, which Burn uses: pages that are cut into slices (`cubecl-runtime`,
//! `memory_management/memory_manage.rs`, `MemoryConfiguration::SubSlices`; `cubecl-cuda`, `runtime.rs`).
//!
//! The sizes of pages depend on the GPU's memory. The largest page takes a quarter of it; the next one takes a quarter
//! of that, and so on, down to the first one below 32 MiB. A request takes a slice from the pool with the smallest
//! pages that accepts it. Pages are never returned.

use std::collections::BTreeMap;

use super::{Allocator, Placement};

/// The alignment of slices on CUDA.
const ALIGNMENT: u64 = 512;
/// There are no smaller pages below a page that is smaller than this.
const SMALL_PAGE: u64 = 32 << 20;
/// The size of the address range of each pool.
const ADDRESSES: u64 = 1 << 52;

/// Pages of one size.
#[derive(Debug)]
struct PagePool {
    page: u64,
    /// Larger slices are accepted only if they fill most of a page.
    most: u64,
    pages: Vec<Page>,
}

#[derive(Debug)]
struct Page {
    address: u64,
    /// The sizes of free slices by address. Adjacent free slices are joined.
    free: BTreeMap<u64, u64>,
}

#[derive(Debug)]
pub(crate) struct Cubecl {
    /// The pools, those with the smallest pages first.
    pools: Vec<PagePool>,
    limit: u64,
    reserved: u64,
}

impl Cubecl {
    /// Creates the pools for a GPU with this much memory.
    pub(super) fn new(card: u64, limit: u64) -> Self {
        let largest = card / 4;
        let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
        let (mut page, mut pools) = (largest, Vec::new());
        // In cubecl, the first pool has number 0 and is for empty requests.
        for number in 1.. {
            if page < SMALL_PAGE {
                break;
            }
            page = aligned(page / 4);
            pools.push(PagePool { page, most: page >> number, pages: Vec::new() });
        }
        pools.reverse();
        let largest = largest / ALIGNMENT * ALIGNMENT;
        pools.push(PagePool { page: largest, most: largest, pages: Vec::new() });
        Self { pools, limit, reserved: 0 }
    }
}

impl Allocator for Cubecl {
    fn alloc(&mut self, bytes: u64) -> Option<Placement> {
        let size = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let (number, pool) = self.pools.iter_mut().enumerate().find(|(_, pool)| pool.accepts(bytes))?;
        let in_a_page = pool.pages.iter_mut().find_map(|page| page.cut(size));
        let address = if let Some(address) = in_a_page {
            address
        } else {
            let reserved = self.reserved.checked_add(pool.page).filter(|sum| *sum <= self.limit)?;
            // The pages of a pool are consecutive, so that the page of an address can be found.
            let first = (number as u64 + 1) * ADDRESSES;
            let address = pool.pages.last().map_or(first, |last| last.address + pool.page);
            if address + pool.page > first + ADDRESSES {
                return None;
            }
            self.reserved = reserved;
            pool.pages.push(Page { address, free: BTreeMap::from([(address, pool.page)]) });
            pool.pages.last_mut().and_then(|page| page.cut(size))?
        };
        Some(Placement { address, bytes: size, block: u32::try_from(number).unwrap_or(u32::MAX) })
    }

    fn free(&mut self, Placement { address, bytes, block }: Placement) {
        let Some(pool) = self.pools.get_mut(block as usize) else { return };
        let at = pool.pages.partition_point(|page| page.address <= address);
        if let Some(page) = at.checked_sub(1).and_then(|at| pool.pages.get_mut(at)) {
            page.insert(address, bytes);
        }
    }

    /// Returns the most memory that was held from the driver. That is the current amount, because pages are never
    /// returned.
    fn reserved_peak(&self) -> u64 {
        self.reserved
    }
}

impl PagePool {
    fn accepts(&self, bytes: u64) -> bool {
        // A slice may leave less than 20 % of a page unused.
        bytes <= self.most || self.page.checked_sub(bytes).is_some_and(|rest| rest.saturating_mul(5) < self.page)
    }
}

impl Page {
    /// Cuts this size from the first free slice that is large enough, and returns its start.
    fn cut(&mut self, size: u64) -> Option<u64> {
        let (address, free) = self.free.iter().find(|(_, free)| **free >= size).map(|(at, free)| (*at, *free))?;
        self.free.remove(&address);
        if free > size {
            self.free.insert(address + size, free - size);
        }
        Some(address)
    }

    fn insert(&mut self, mut address: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(address + bytes)) {
            bytes += after;
        }
        if let Some((before, size)) = self.free.range(..address).next_back().map(|(at, size)| (*at, *size))
            && before + size == address
        {
            self.free.remove(&before);
            (address, bytes) = (before, bytes + size);
        }
        self.free.insert(address, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::{Allocator, Cubecl, Placement};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    #[test]
    fn pages_have_a_quarter_of_the_next_larger_ones() {
        let cubecl = Cubecl::new(16 * GIB, u64::MAX);
        let pools: Vec<_> = cubecl.pools.iter().map(|pool| (pool.page / MIB, pool.most / MIB)).collect();
        assert_eq!(pools, [(16, 1), (64, 8), (256, 64), (1024, 512), (4096, 4096)]);
    }

    #[test]
    fn a_request_takes_a_slice_of_the_smallest_page_that_accepts_it() {
        let mut cubecl = Cubecl::new(16 * GIB, u64::MAX);
        let mut reserved = |bytes| {
            let before = cubecl.reserved;
            let taken = cubecl.alloc(bytes).unwrap().bytes;
            (taken, (cubecl.reserved - before) / MIB)
        };
        assert_eq!(reserved(1), (512, 16));
        assert_eq!(reserved(MIB), (MIB, 0), "it is in the same page");
        assert_eq!(reserved(MIB + 1), (MIB + 512, 64));
        assert_eq!(reserved(13 * MIB), (13 * MIB, 0), "it is more than 80 % of 16 MiB, and the page has room");
        assert_eq!(reserved(14 * MIB), (14 * MIB, 16), "no page of 16 MiB has room for it");
        assert_eq!(reserved(25 * MIB / 2), (25 * MIB / 2, 256), "16 MiB leave 22 % unused, and 64 MiB accept 8 MiB");
        assert_eq!(reserved(512 * MIB), (512 * MIB, 1024));
        assert_eq!(reserved(3 * GIB), (3 * GIB, 4096));
        assert_eq!([4 * GIB + 1, u64::MAX].map(|bytes| cubecl.alloc(bytes)), [None; 2]);
    }

    #[test]
    fn free_neighbours_are_one_slice_and_the_first_that_fits_is_used() {
        let mut cubecl = Cubecl::new(16 * GIB, 64 * MIB);
        let slices: Vec<Placement> = (0..8).map(|_| cubecl.alloc(8 * MIB).unwrap()).collect();
        assert_eq!(cubecl.alloc(2 * MIB), None, "another page is more than the limit");
        for slice in [&slices[2], &slices[4], &slices[3]] {
            cubecl.free(*slice);
        }
        let page = &cubecl.pools[1].pages[0];
        assert_eq!(page.free.values().collect::<Vec<_>>(), [&(24 * MIB)]);
        assert_eq!(cubecl.alloc(5 * MIB).unwrap().address, slices[2].address);
        cubecl.free(slices[0]);
        assert_eq!(cubecl.alloc(8 * MIB).unwrap().address, slices[0].address, "the first, though not the smallest");
        assert_eq!(cubecl.reserved_peak(), 64 * MIB);
    }
}
