//! What the program calls its blocks. Kept beside the fold and not in it, so that an allocation pays nothing for it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use once_cell::sync::Lazy;

use super::{Inbox, alive, begun, status};
use crate::{
    error::{Kind, Result},
    ledger::KnownBlock,
    model::{Key, Label, Space},
};

/// So many are not worth a sweep.
const FEW: usize = 1 << 10;

/// Labels by the key of their block, with the number of its allocation, which no other block of this key has.
#[derive(Debug)]
pub(super) struct Labels {
    of: HashMap<Key, (u64, Arc<Label>)>,
    /// When there are so many, those of blocks that are gone are forgotten.
    sweep_at: usize,
}

static LABELS: Lazy<Mutex<Labels>> = Lazy::new(|| Mutex::new(Labels { of: HashMap::new(), sweep_at: FEW }));

/// Labels by block. Hold it briefly.
pub(super) fn labels() -> MutexGuard<'static, Labels> {
    LABELS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Labels {
    /// What the program calls a block.
    pub(super) fn get(&self, block: &KnownBlock) -> Option<&Arc<Label>> {
        let (number, label) = self.of.get(&block.key)?;
        (*number == block.number).then_some(label)
    }

    /// Forgets the labels of blocks that are gone.
    pub(super) fn sweep(&mut self, inbox: &Inbox) {
        self.of.retain(|key, (number, _)| inbox.block(*key).is_some_and(|block| block.number == *number));
        self.sweep_at = (self.of.len() * 2).max(FEW);
    }

    /// Whether there is such a block.
    fn set(&mut self, inbox: &Inbox, key: Key, label: Label) -> bool {
        let Some(block) = inbox.block(key) else { return false };
        if self.of.len() >= self.sweep_at {
            self.sweep(inbox);
        }
        self.of.insert(key, (block.number, Arc::new(label)));
        true
    }
}

/// Tells what a block of memory is, so that [`MemTracker`](super::MemTracker) can say so: its name, shape and element type,
/// and the address on the device at which it begins. The label goes when the block is freed; a second one replaces it.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let mut tracker = gpumem::MemTracker::builder().to(std::io::sink()).start()?;
/// # let weights = gpu.alloc(gpumem::Bytes::mib(9))?;
/// # let address = weights.address();
/// gpumem::label("conv1.weight", &[512, 512, 3, 3], "f32", address)?;
/// # assert_eq!(tracker.track().changes.unwrap()[0].names[0].0, "conv1.weight");
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// It costs allocations nothing. With the feature `cudarc`, slices of cudarc have it as a method, which knows the type and
/// the address; blocks of simulated devices have one too.
///
/// # Errors
/// When no block that is known begins at this address: it is freed, older than the first trace, or a part of a larger block (of
/// a framework's own allocator, say), or allocations are not intercepted. Nothing is labelled then.
pub fn label(name: impl Into<String>, shape: &[usize], dtype: impl Into<String>, address: u64) -> Result<()> {
    let label = Label { name: name.into(), shape: shape.to_vec(), dtype: dtype.into() };
    label_block(Key::new(Space::Address, address), label, address)
}

fn label_block(key: Key, label: Label, address: u64) -> Result<()> {
    alive()?;
    if begun().is_some_and(|session| labels().set(&session.inbox, key, label)) {
        return Ok(());
    }
    Err(Kind::UnknownBlock { address, why: status::not_heard().map(Box::new) }.into())
}

#[cfg(feature = "sim")]
impl crate::source::sim::SimBlock {
    /// Tells what it is: see [`label`](crate::label).
    ///
    /// # Errors
    /// When it is older than the first trace.
    pub fn label(&self, name: impl Into<String>, shape: &[usize], dtype: impl Into<String>) -> Result<()> {
        let label = Label { name: name.into(), shape: shape.to_vec(), dtype: dtype.into() };
        label_block(self.key(), label, self.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Block, Bytes, Device, EventKind, Family, MemKind};

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
        Labels { of: HashMap::new(), sweep_at: FEW }
    }

    fn name_at(labels: &Labels, inbox: &Inbox, address: u64) -> Option<String> {
        inbox.block(key(address)).and_then(|block| Some(labels.get(&block)?.name.clone()))
    }

    #[test]
    fn only_blocks_that_are_known_are_labelled() {
        let (inbox, mut labels) = (Inbox::new(), empty());
        assert!(!labels.set(&inbox, key(512), named("a")));
        alloc(&inbox, 512);
        assert!(!labels.set(&inbox, key(513), named("inside")));
        assert!(!labels.set(&inbox, Key::new(Space::Handle, 512), named("a handle")));
        assert!(labels.set(&inbox, key(512), named("a")));
        assert_eq!(name_at(&labels, &inbox, 512).as_deref(), Some("a"));
        assert!(labels.set(&inbox, key(512), named("b")));
        assert_eq!(name_at(&labels, &inbox, 512).as_deref(), Some("b"));
        free(&inbox, 512);
        assert!(!labels.set(&inbox, key(512), named("a")));
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
        assert_eq!(labels.of.len(), 0);
    }

    #[test]
    fn nor_after_as_many_events_as_32_bits_can_count() {
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
            assert!(labels.set(&inbox, key(address), named("gone")));
            free(&inbox, address);
            assert!(labels.of.len() <= FEW);
        }
        assert_eq!(name_at(&labels, &inbox, 1).as_deref(), Some("kept"));
        let live = 3 * FEW as u64;
        (10..10 + live).for_each(|address| alloc(&inbox, address << 20));
        assert!((10..10 + live).all(|address| labels.set(&inbox, key(address << 20), named("live"))));
        assert!(
            (10..10 + live).all(|address| name_at(&labels, &inbox, address << 20).is_some()),
            "none too many is gone"
        );
    }
}
