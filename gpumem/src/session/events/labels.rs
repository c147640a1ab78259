//! The program's names for its blocks.

use std::sync::{MutexGuard, PoisonError};

use crate::session::{Session, alive, current, views};
use crate::{
    derive::Labels,
    error::{Kind, Result},
    model::{Key, Label, Space},
};

impl Session {
    /// Returns the labels of all blocks. Hold the lock only briefly.
    pub(in crate::session) fn labels(&self) -> MutexGuard<'_, Labels> {
        self.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Labels a block of memory, so that [`MemTracker`](crate::session::MemTracker) can print its name, shape and element type.
/// `address` is the start address of the block on the device. A free removes the label; a second label replaces the first.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # let mut tracker = gpumem::tracker::MemTracker::builder().to(std::io::sink()).start()?;
/// # let weights = gpu.alloc(gpumem::Bytes::mib(9))?;
/// # let address = weights.address();
/// gpumem::tracker::label("conv1.weight", &[512, 512, 3, 3], "f32", address)?;
/// # assert_eq!(tracker.track().changes.unwrap()[0].names[0].0, "conv1.weight");
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// Labels do not slow down allocations. With the feature `cudarc`, slices of cudarc have a method of this name, which knows the
/// element type and the address; so do blocks of simulated devices.
///
/// # Errors
/// Returns an error if no known block starts at this address: it is freed, older than the first trace, or part of a larger block
/// (for example of a framework's own allocator), or allocations are not intercepted.
pub fn label(name: impl Into<String>, shape: &[usize], dtype: impl Into<String>, address: u64) -> Result<()> {
    let label = Label { name: name.into(), shape: shape.to_vec(), dtype: dtype.into() };
    label_block(Key::new(Space::Address, address), &label, address)
}

/// Labels the block with this key. The address is for the error message.
pub(in crate::session) fn label_block(key: Key, label: &Label, address: u64) -> Result<()> {
    alive()?;
    let session = current();
    if session.is_started() {
        let labelled = session.labels().set(&session.inbox, key, label.clone());
        #[cfg(feature = "capture")]
        if let Some(block) = &labelled {
            use gpumem_recording::{BlockLabel, Item};
            session.record_item(|| Item::Label(BlockLabel { key, number: block.number, label: label.clone() }));
        }
        if labelled.is_some() {
            return Ok(());
        }
    }
    Err(Kind::UnknownBlock { address, why: views::why_not_intercepted(session).map(Box::new) }.into())
}
