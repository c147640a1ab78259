//! The live blocks, by device and address.

use std::collections::HashMap;

use crate::model::{Block, Bytes, Device};

#[derive(Debug, Default)]
pub(crate) struct Live {
    blocks: HashMap<(Device, u64), Bytes>,
}

impl Live {
    /// Enters a block; gives back the size of one that was entered at the same address and whose free was not heard.
    pub(crate) fn insert(&mut self, block: &Block) -> Option<Bytes> {
        self.blocks.insert((block.device, block.address), block.bytes)
    }

    /// Takes a block out, if it is known.
    pub(crate) fn remove(&mut self, device: Device, address: u64) -> Option<Bytes> {
        self.blocks.remove(&(device, address))
    }
}
