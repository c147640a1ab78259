//! Writes an estimate as a recording: the events of the step, in the format of the recordings of programs.

use gpumem_core::model::{CallsiteId, Device, EventKind, Source, StackId, ThreadId, Time};
use gpumem_recording::{
    CallsiteDefinition, CodeAddress, DeviceDefinition, Interception, Item, ModuleDefinition, Process, RecordedEvent,
    StackDefinition, Writer,
};

use crate::{Bytes, Class};

const IN_MEMORY: &str = "a recording in memory can be written";

/// Writes a recording.
#[derive(Debug)]
pub(crate) struct Recording {
    writer: Writer<Vec<u8>>,
}

impl Recording {
    /// Starts a recording. `limit` is the memory that the allocator may take.
    pub(crate) fn new(model: &str, device: Device, limit: Option<Bytes>) -> Self {
        let mut recording = Self { writer: Writer::new(Vec::new()).expect(IN_MEMORY) };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let executable = format!("estimate of {model}");
        recording.write(&Item::Process(Process { executable, version, ..Process::default() }));
        let name = Some("estimate".to_owned());
        recording.write(&Item::Device(DeviceDefinition { device, name, total: limit, uuid: None }));
        let library = "gpumem-estimate".to_owned();
        recording.write(&Item::Interception(Interception { source: Source::Simulation, library }));
        // The classes replace the allocating libraries of a program's recording.
        for &class in Class::ALL {
            let (StackId(module), path) = (stack(class), class.name().to_owned());
            recording.write(&Item::Module(ModuleDefinition { id: module, path, build_id: Vec::new(), base: 0 }));
            let addresses = vec![CodeAddress { module, offset: 0 }];
            recording.write(&Item::Stack(StackDefinition { id: stack(class), addresses }));
        }
        recording
    }

    /// Defines the name of a scope, before it is opened.
    pub(crate) fn define(&mut self, id: CallsiteId, name: &str) {
        let (name, file, line, column, module_path) = (Some(name.to_owned()), String::new(), 0, 0, None);
        self.write(&Item::Callsite(CallsiteDefinition { id, name, file, line, column, module_path }));
    }

    /// Writes an event. Its number serves as the time, as in the ledger of the estimate.
    pub(crate) fn event(&mut self, number: u64, thread: ThreadId, kind: EventKind) {
        let event = RecordedEvent { number, ticks: number, time: Time::from_nanos(number), thread, kind };
        self.writer.write_event(&event).expect(IN_MEMORY);
    }

    /// Returns the contents of the file.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.writer.finish().expect(IN_MEMORY)
    }

    fn write(&mut self, item: &Item) {
        self.writer.write(item).expect(IN_MEMORY);
    }
}

/// Returns the stack id of the blocks of a class. In a running program it identifies the origin of a block.
pub(crate) fn stack(class: Class) -> StackId {
    StackId(class as u32 + 1)
}
