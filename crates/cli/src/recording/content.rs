//! The parts of a recording's content that are needed to complete it.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io,
    time::Duration,
};

use gpumem_core::model::EventKind;
use gpumem_recording::{CodeAddress, End, Item, ModuleDefinition, RecordedEvent, for_each_item};

/// The parts of a recording's content that are needed to complete it.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// The id of its process.
    pub(crate) pid: Option<u32>,
    /// When its session started, since 1970.
    pub(super) started: Option<Duration>,
    pub(super) modules: HashMap<u32, ModuleDefinition>,
    /// Addresses in its stacks for which no function is recorded yet.
    pub(super) addresses: BTreeSet<CodeAddress>,
    /// The highest id of a stack.
    pub(super) last_stack: u32,
    /// True if the recording contains the history of a caching allocator.
    pub(super) has_allocator: bool,
    /// True if its process requested memory, whether or not it got any.
    pub(crate) has_requests: bool,
    /// True if its process has written everything, or if the data left in the ring has been added.
    pub(crate) is_finished: bool,
    /// The devices on which its process allocated.
    pub(crate) devices: BTreeSet<u32>,
}

/// At most this many addresses are looked up.
const MOST_ADDRESSES: usize = 1 << 20;

impl Content {
    /// Reads a recording as a stream.
    pub(super) fn read(from: impl io::Read) -> io::Result<(Self, End)> {
        let (mut content, mut known) = (Self::default(), HashSet::new());
        let end = for_each_item(from, |item| {
            content.add(item, &mut known);
            Ok(())
        })?;
        content.addresses.retain(|address| !known.contains(address));
        Ok((content, end))
    }

    fn add(&mut self, item: Item, known: &mut HashSet<CodeAddress>) {
        match item {
            Item::Process(process) => {
                self.pid.get_or_insert(process.pid);
                self.started.get_or_insert(process.started);
            }
            Item::Module(module) => _ = self.modules.insert(module.id, module),
            Item::Stack(stack) => {
                self.last_stack = self.last_stack.max(stack.id.0);
                let room = MOST_ADDRESSES.saturating_sub(self.addresses.len());
                // Offset 0 means a whole file.
                let new = stack.addresses.into_iter().filter(|address| address.offset != 0);
                self.addresses.extend(new.take(room));
            }
            Item::Symbols(symbols) => _ = known.insert(symbols.address),
            Item::Allocator(_) => self.has_allocator = true,
            Item::Finished(_) => self.is_finished = true,
            Item::Event(RecordedEvent { kind: EventKind::Alloc { block, .. }, .. }) => {
                self.has_requests = true;
                // Host memory also has a device number, which has no meaning.
                if block.kind.is_on_device() {
                    self.devices.insert(block.device.ordinal);
                }
            }
            Item::Event(RecordedEvent { kind: EventKind::Rejected { .. }, .. }) => self.has_requests = true,
            _ => {}
        }
    }
}
