//! The program's labels of its blocks. The labels are kept outside the ledger, so that allocations stay cheap.

use std::{collections::HashMap, sync::Arc};

use super::LedgerView;
use crate::{
    ledger::KnownBlock,
    model::{Key, Label},
};

/// No sweep runs while there are at most this many labels.
const FEW: usize = 1 << 10;

/// Labels by the key of their block, with the event number of its allocation, which tells blocks with the same key
/// apart.
#[derive(Debug)]
pub struct Labels {
    by_key: HashMap<Key, (u64, Arc<Label>)>,
    /// The number of labels at which the next sweep runs.
    sweep_at: usize,
}

impl Default for Labels {
    fn default() -> Self {
        Self { by_key: HashMap::new(), sweep_at: FEW }
    }
}

impl Labels {
    /// The number of labels, including some of freed blocks.
    #[expect(clippy::len_without_is_empty, reason = "nothing uses it")]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Returns the program's label of a block.
    pub fn get(&self, block: &KnownBlock) -> Option<&Arc<Label>> {
        let (number, label) = self.by_key.get(&block.key)?;
        (*number == block.number).then_some(label)
    }

    /// Returns the labels of these blocks, after a sweep.
    pub fn of_blocks(&mut self, view: &dyn LedgerView, blocks: &[KnownBlock]) -> Vec<Option<Arc<Label>>> {
        self.sweep(view);
        blocks.iter().map(|block| self.get(block).cloned()).collect()
    }

    /// Removes the labels of freed blocks.
    pub fn sweep(&mut self, view: &dyn LedgerView) {
        self.by_key.retain(|key, (number, _)| view.block(*key).is_some_and(|block| block.number == *number));
        self.sweep_at = (self.by_key.len() * 2).max(FEW);
    }

    /// Labels a live block. Returns the block, or `None` if it is not live.
    pub fn set(&mut self, view: &dyn LedgerView, key: Key, label: Label) -> Option<KnownBlock> {
        let block = view.block(key)?;
        if self.by_key.len() >= self.sweep_at {
            self.sweep(view);
        }
        self.by_key.insert(key, (block.number, Arc::new(label)));
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        inbox::Inbox,
        model::{Block, Bytes, Device, EventKind, Family, MemKind, Space},
    };

    const DEVICE: Device = Device { family: Family::Cuda, ordinal: 0 };

    fn key(address: u64) -> Key {
        Key::new(Space::Address, address)
    }

    fn alloc(inbox: &Inbox, address: u64) {
        let block = Block::new(DEVICE, Bytes::new(1), MemKind::Pool);
        inbox.post(&EventKind::Alloc { key: key(address), block });
    }

    fn free(inbox: &Inbox, address: u64) {
        inbox.post(&EventKind::Free { key: key(address), block: None });
    }

    fn named(name: &str) -> Label {
        Label { name: name.to_owned(), shape: vec![1], dtype: "u8".to_owned() }
    }

    fn empty() -> Labels {
        Labels::default()
    }

    fn name_at(labels: &Labels, inbox: &Inbox, address: u64) -> Option<String> {
        inbox.block(key(address)).and_then(|block| Some(labels.get(&block)?.name.clone()))
    }

    #[test]
    fn only_blocks_that_are_known_are_labelled() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        assert!(labels.set(&inbox, key(512), named("a")).is_none());
        alloc(&inbox, 512);
        assert!(labels.set(&inbox, key(513), named("inside")).is_none());
        assert!(labels.set(&inbox, Key::new(Space::Handle, 512), named("a handle")).is_none());
        assert!(labels.set(&inbox, key(512), named("a")).is_some());
        assert_eq!(name_at(&labels, &inbox, 512).as_deref(), Some("a"));
        assert!(labels.set(&inbox, key(512), named("b")).is_some());
        assert_eq!(name_at(&labels, &inbox, 512).as_deref(), Some("b"));
        free(&inbox, 512);
        assert!(labels.set(&inbox, key(512), named("a")).is_none());
    }

    #[test]
    fn an_address_that_is_given_out_again_inherits_nothing() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        alloc(&inbox, 512);
        labels.set(&inbox, key(512), named("a"));
        free(&inbox, 512);
        alloc(&inbox, 512);
        assert_eq!(name_at(&labels, &inbox, 512), None);
        labels.sweep(&inbox);
        assert_eq!(labels.by_key.len(), 0);
    }

    #[test]
    fn a_label_does_not_come_back_after_2_to_the_32_events() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        alloc(&inbox, 512);
        let number = inbox.block(key(512)).unwrap().number;
        labels.set(&inbox, key(512), named("a"));
        free(&inbox, 512);
        inbox.pretend_events(number + (1 << 32) - 1);
        alloc(&inbox, 512);
        assert_eq!(inbox.block(key(512)).unwrap().number, number + (1 << 32));
        assert_eq!(name_at(&labels, &inbox, 512), None);
    }

    #[test]
    fn a_free_that_failed_keeps_the_label() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        alloc(&inbox, 512);
        labels.set(&inbox, key(512), named("a"));
        free(&inbox, 512);
        inbox.post(&EventKind::FreeFailed);
        assert_eq!(name_at(&labels, &inbox, 512).as_deref(), Some("a"));
    }

    #[test]
    fn labels_do_not_pile_up() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        alloc(&inbox, 1);
        labels.set(&inbox, key(1), named("kept"));
        for address in 2..10 * FEW as u64 {
            alloc(&inbox, address);
            assert!(labels.set(&inbox, key(address), named("gone")).is_some());
            free(&inbox, address);
            assert!(labels.by_key.len() <= FEW);
        }
        assert_eq!(name_at(&labels, &inbox, 1).as_deref(), Some("kept"));
        let live = 3 * FEW as u64;
        (10..10 + live).for_each(|address| alloc(&inbox, address << 20));
        assert!((10..10 + live).all(|address| labels.set(&inbox, key(address << 20), named("live")).is_some()));
        assert!(
            (10..10 + live).all(|address| name_at(&labels, &inbox, address << 20).is_some()),
            "none too many is gone"
        );
    }
}
