//! The pages of 2 MiB behind the blocks outside of pools, by address, as measured on an H200: a block of at most 1 MiB is put into a page
//! of such blocks, which is given back with its last block. Any other block has its own pages.

use std::collections::{BTreeMap, BTreeSet};

use gpumem_core::device_model::{DeviceModel, ModelError};

const PAGE: u64 = 2 << 20;
/// Larger blocks do not share pages.
const LARGEST_SHARING: u64 = 1 << 20;
const ALIGNMENT: u64 = 512;

#[derive(Debug, Default)]
pub(crate) struct Pages {
    /// The requested bytes of each live block.
    blocks: BTreeMap<u64, u64>,
    /// The pages that blocks share. Each is a block of the model.
    shared: BTreeSet<u64>,
}

impl Pages {
    pub(crate) fn alloc(&mut self, model: &mut DeviceModel, bytes: u64) -> Result<u64, ModelError> {
        let address = if bytes == 0 {
            return Err(ModelError::ZeroBytes);
        } else if bytes > LARGEST_SHARING {
            model.alloc(bytes.checked_next_multiple_of(PAGE).ok_or(ModelError::OutOfMemory)?)?
        } else if let Some(address) = self.shared.iter().find_map(|page| self.room(*page, bytes)) {
            address
        } else {
            let page = model.alloc(PAGE)?;
            self.shared.insert(page);
            page
        };
        self.blocks.insert(address, bytes);
        Ok(address)
    }

    /// Returns the first address in a shared page with room for a block.
    fn room(&self, page: u64, bytes: u64) -> Option<u64> {
        let mut start = page;
        for (block, length) in self.blocks.range(page..page + PAGE) {
            if start + bytes <= *block {
                break;
            }
            start = (block + length).next_multiple_of(ALIGNMENT);
        }
        (start + bytes <= page + PAGE).then_some(start)
    }

    pub(crate) fn free(&mut self, model: &mut DeviceModel, address: u64) -> Result<(), ModelError> {
        self.blocks.remove(&address).ok_or(ModelError::UnknownAddress)?;
        let page = address / PAGE * PAGE;
        if !self.shared.contains(&page) {
            return model.free_block(address).map(drop);
        }
        if self.blocks.range(page..page + PAGE).next().is_none() {
            self.shared.remove(&page);
            model.free_block(page)?;
        }
        Ok(())
    }

    /// Returns the start and the size of the live block that contains this address.
    pub(crate) fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        let (start, bytes) = self.blocks.range(..=address).next_back()?;
        (address - start < *bytes).then_some((*start, *bytes))
    }
}
