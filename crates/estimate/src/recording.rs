//! Writes an estimate as a recording: the events of the step, in the format of the recordings of programs.

use std::{collections::HashSet, io};

use gpumem_core::model::{
    Block, Bytes, CallsiteId, Device, EventKind, Key, MemKind, ScopeId, ScopeSpec, Source, Space, StackId, ThreadId,
    Time,
};
use gpumem_recording::{
    CallsiteDefinition, CodeAddress, DeviceDefinition, Interception, Item, ModuleDefinition, Process, RecordedEvent,
    StackDefinition, Writer,
};

use crate::class::Class;

/// Writes a recording. Writing to memory cannot fail; if it does, the error is kept until the end.
#[derive(Debug)]
pub(crate) struct Recording {
    writer: Writer<Vec<u8>>,
    result: io::Result<()>,
    number: u64,
    device: Device,
    /// The names of scopes that are already defined.
    names: HashSet<CallsiteId>,
    /// The addresses of the blocks to which the allocator added bytes.
    rounded: HashSet<u64>,
}

impl Recording {
    /// Starts a recording. `limit` is the memory that the allocator may take.
    pub(crate) fn new(model: &str, device: Device, limit: Option<Bytes>) -> io::Result<Self> {
        let writer = Writer::new(Vec::new())?;
        let (names, rounded) = (HashSet::new(), HashSet::new());
        let mut recording = Self { writer, result: Ok(()), number: 0, device, names, rounded };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let executable = format!("estimate of {model}");
        recording.write(&Item::Process(Process { executable, version, ..Process::default() }));
        let name = Some("estimate".to_owned());
        recording.write(&Item::Device(DeviceDefinition { device, name, total: limit, uuid: None }));
        let library = "gpumem-estimate".to_owned();
        recording.write(&Item::Interception(Interception { source: Source::Simulation, library }));
        // The classes replace the allocating libraries of a program's recording.
        for class in Class::ALL {
            let (StackId(module), path) = (stack(class), class.name().to_owned());
            recording.write(&Item::Module(ModuleDefinition { id: module, path, build_id: Vec::new(), base: 0 }));
            let addresses = vec![CodeAddress { module, offset: 0 }];
            recording.write(&Item::Stack(StackDefinition { id: stack(class), addresses }));
        }
        Ok(recording)
    }

    /// Writes an allocation. The bytes that the allocator adds become a separate block of the class `rounding`.
    pub(crate) fn alloc(&mut self, address: u64, class: Class, requested: u64, taken: u64) {
        let device = self.device;
        let block = |class: Class, bytes| Block {
            stack: stack(class),
            ..Block::new(device, Bytes::new(bytes), MemKind::Device)
        };
        self.event(EventKind::Alloc { key: key(address), block: block(class, requested) });
        if taken > requested {
            self.rounded.insert(address);
            let block = block(Class::Rounding, taken - requested);
            self.event(EventKind::Alloc { key: rounding_key(address), block });
        }
    }

    pub(crate) fn free(&mut self, address: u64) {
        self.event(EventKind::Free { key: key(address), block: None });
        if self.rounded.remove(&address) {
            self.event(EventKind::Free { key: rounding_key(address), block: None });
        }
    }

    pub(crate) fn open(&mut self, scope: ScopeId, spec: ScopeSpec, name: &str) {
        if self.names.insert(spec.callsite) {
            self.write(&Item::Callsite(CallsiteDefinition {
                id: spec.callsite,
                name: Some(name.to_owned()),
                file: String::new(),
                line: 0,
                column: 0,
                module_path: None,
            }));
        }
        self.event(EventKind::Open { scope, spec });
    }

    pub(crate) fn close(&mut self, scope: ScopeId) {
        self.event(EventKind::Close { scope });
    }

    /// Returns the contents of the file.
    pub(crate) fn finish(self) -> io::Result<Vec<u8>> {
        self.result?;
        self.writer.finish()
    }

    fn event(&mut self, kind: EventKind) {
        self.number += 1;
        // The event number serves as the time, as in the ledger of the estimate.
        let time = Time::from_nanos(self.number);
        let event = RecordedEvent { number: self.number, ticks: self.number, time, thread: ThreadId(1), kind };
        if self.result.is_ok() {
            self.result = self.writer.write_event(&event);
        }
    }

    fn write(&mut self, item: &Item) {
        if self.result.is_ok() {
            self.result = self.writer.write(item);
        }
    }
}

fn stack(class: Class) -> StackId {
    StackId(class as u32 + 1)
}

fn key(address: u64) -> Key {
    Key::new(Space::Address, address)
}

fn rounding_key(address: u64) -> Key {
    Key::new(Space::Handle, address)
}
