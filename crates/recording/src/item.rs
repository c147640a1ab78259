//! The items of a recording: definitions of ids, and events.

use std::time::Duration;

use super::{
    allocator::{AllocatorDefinition, AllocatorEvents, TensorGroup, TensorHolder},
    bytes::{Input, Malformed, Result, put_number},
    event::{EventReader, EventWriter, RecordedEvent, is_short},
    totals::Totals,
    wire::{Wire, fields},
};
use gpumem_core::model::{Bytes, CallsiteId, Device, Key, Label, PoolId, Source, StackId, ThreadId, Time};

/// One entry of a recording. Items are in the order of the program's actions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Item {
    /// The recorded process. This item is near the start of a file.
    Process(Process),
    /// The meaning of the processor's counter.
    Clock(ClockPair),
    /// A thread.
    Thread(ThreadDefinition),
    /// The place where a scope is opened, and its name.
    Callsite(CallsiteDefinition),
    /// The program or a library.
    Module(ModuleDefinition),
    /// A stack of return addresses.
    Stack(StackDefinition),
    /// The functions at an address in a module. This item may come long after the stack that contains the address.
    Symbols(SymbolsDefinition),
    /// A device.
    Device(DeviceDefinition),
    /// A CUDA context.
    Context(ContextDefinition),
    /// The source that intercepts allocations.
    Interception(Interception),
    /// The program's label of a block.
    Label(BlockLabel),
    /// An event.
    Event(RecordedEvent),
    /// Another thread reuses the id of a thread that has ended.
    ThreadReused(ThreadId),
    /// This many items are not in the recording, because the writer did not keep up.
    Missed(u64),
    /// Only a part of the events is in the recording.
    Part(PartDefinition),
    /// A caching allocator of the program, and its data.
    Allocator(AllocatorDefinition),
    /// The steps of a caching allocator.
    AllocatorEvents(AllocatorEvents),
    /// Tensors that belong together.
    TensorGroup(TensorGroup),
    /// The object that refers to a tensor at the end.
    TensorHolder(TensorHolder),
    /// The place where the process keeps data that it has not written yet. The recording may lack this data until
    /// [`Finished`](Self::Finished).
    Ring(RingDefinition),
    /// A pool that the program registered.
    Pool(PoolDefinition),
    /// The owner of a block. Only a shortened recording contains this item, because it may lack the event that decides the owner.
    PoolBlock(PoolBlock),
    /// The end of the initial state in a recording of the latest events, and the totals up to that point.
    Totals(Totals),
    /// The scopes that the thread of the next event was in, the outermost first: an allocation or the opening of a scope. If the event
    /// enters a scope, the path includes this scope.
    Inside(Vec<CallsiteId>),
    /// The file contains everything that the process recorded.
    Finished(Finished),
}

/// The place where a process keeps data that is not in its recording yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingDefinition {
    /// The id of a segment of shared memory, which outlives the process. `None` for memory that is lost with the process.
    pub segment: Option<u64>,
    /// A random number that is also in the segment, because another segment may get the same id later.
    pub recording: u64,
}

/// See [`Item::Finished`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// The end of a process that could not write it. `None` if the process wrote this item, or if nobody knows.
    pub ended: Option<ProcessEnd>,
}

/// The time at which a process ended, as others saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessEnd {
    /// The latest time at which the process may have ended, since the session started.
    pub latest: Time,
    /// How long before `latest` the process may have ended.
    pub within: Time,
}

/// The part of the events that is in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartDefinition {
    /// True if the recording contains the blocks that were live at the peak of each device and at the end. Otherwise it contains
    /// the latest events and the blocks that were live before them.
    pub is_peaks: bool,
    /// Of the events up to this number, the recording contains only the allocations of these blocks, rejected allocations, and
    /// events that mean that numbers may be wrong. All later events are included.
    pub after: u64,
}

/// The recorded process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// The path of its file.
    pub executable: String,
    /// The command-line arguments.
    pub arguments: Vec<String>,
    /// The folder in which the process ran. Files below it are shown relative to it.
    pub folder: String,
    /// The file name of the module that contains gpumem, which is shown as part of the program.
    pub own_module: Option<String>,
    /// The time when the session started, since 1970.
    pub started: Duration,
    /// gpumem's version.
    pub version: String,
    /// How long the process had run when the recording started, if the recording did not start with the process. Earlier
    /// allocations are not known.
    pub ran_before: Option<Duration>,
    /// How the GPUs that the process saw differ from the real ones, such as `dry run, GPU of 24 GiB`.
    pub cards: Option<String>,
    /// The name of the machine or the container.
    pub host: Option<String>,
    /// The rank of the process in its job.
    pub rank: Option<u64>,
}

/// The same moment on two clocks. Times between two pairs are interpolated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockPair {
    /// The value of the processor's counter.
    pub ticks: u64,
    /// The time since the session started.
    pub time: Time,
}

/// A thread. Another thread may reuse its id later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadDefinition {
    /// The id by which events refer to the thread.
    pub thread: ThreadId,
    /// The id in the operating system.
    pub os_id: u64,
    /// Its name.
    pub name: Option<String>,
}

/// The place where a scope is opened, and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallsiteDefinition {
    /// The id by which events refer to the callsite.
    pub id: CallsiteId,
    /// The name of the scope.
    pub name: Option<String>,
    /// The file, as the compiler names it.
    pub file: String,
    /// The line, starting at 1.
    pub line: u32,
    /// The column, starting at 1. 0 if it is not known.
    pub column: u32,
    /// The path of the Rust module, such as `app::train`. Known only for functions with an attribute.
    pub module_path: Option<String>,
}

/// A file that contains code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleDefinition {
    /// The id by which stacks refer to the module. 0 means no module.
    pub id: u32,
    /// The path of its file.
    pub path: String,
    /// The linker's id of this build. Empty if there is none.
    pub build_id: Vec<u8>,
    /// The address of its offset 0 in the process.
    pub base: u64,
}

/// One address of a stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CodeAddress {
    /// The module; 0 if it is not known, and the offset is then the address.
    pub module: u32,
    /// The offset from the module's base.
    pub offset: u64,
}

/// A stack, innermost first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackDefinition {
    /// The id by which events refer to the stack.
    pub id: StackId,
    /// The return addresses.
    pub addresses: Vec<CodeAddress>,
}

/// A function that contains an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbol {
    /// The demangled name.
    pub function: Option<String>,
    /// The source file.
    pub file: Option<String>,
    /// The line, starting at 1.
    pub line: Option<u32>,
    /// The column, starting at 1.
    pub column: Option<u32>,
}

/// The functions at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolsDefinition {
    /// The address.
    pub address: CodeAddress,
    /// The functions that were inlined there, the innermost first, and the function that they were inlined into.
    pub symbols: Vec<Symbol>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDefinition {
    /// The device, as events refer to it.
    pub device: Device,
    /// The driver's name for the device.
    pub name: Option<String>,
    /// The total memory of the device.
    pub total: Option<Bytes>,
    /// The UUID, as `nvidia-smi -L` prints it, such as `GPU-f3a9…` or `MIG-1c8b…`; without `GPU-` or `MIG-` if NVML could
    /// not be used.
    pub uuid: Option<String>,
}

/// A CUDA context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextDefinition {
    /// The id by which blocks refer to the context. A later context may reuse the id of a destroyed one.
    pub context: u8,
    /// The device of the context.
    pub device: Device,
}

/// A pool that the program registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolDefinition {
    /// The id by which events refer to the pool. A later pool may reuse the id of a closed one.
    pub pool: PoolId,
    /// Its name.
    pub name: String,
}

/// See [`Item::PoolBlock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBlock {
    /// The number of the event that allocated the block of the driver.
    pub number: u64,
    /// The pool that it belongs to.
    pub pool: PoolId,
}

/// The source that intercepts allocations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interception {
    /// The source.
    pub source: Source,
    /// The library.
    pub library: String,
}

/// The program's label of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLabel {
    /// The key of the block.
    pub key: Key,
    /// The number of the event that allocated the block, because a key may be reused.
    pub number: u64,
    /// The label.
    pub label: Label,
}

/// A process that wrote its end itself writes no fields.
impl Wire for Finished {
    fn put(&self, to: &mut Vec<u8>) {
        if let Some(ended) = &self.ended {
            ended.put(to);
        }
    }

    fn get(from: &mut Input<'_>) -> Result<Self> {
        let ended = if from.len() == 0 { None } else { Some(Wire::get(from)?) };
        Ok(Self { ended })
    }
}

fields!(Process { pid, executable, arguments, folder, own_module, started, version, ran_before, cards, host, rank });
fields!(PartDefinition { is_peaks, after });
fields!(RingDefinition { segment, recording });
fields!(ProcessEnd { latest, within });
fields!(ClockPair { ticks, time });
fields!(ThreadDefinition { thread, os_id, name });
fields!(CallsiteDefinition { id, name, file, line, column, module_path });
fields!(ModuleDefinition { id, path, build_id, base });
fields!(CodeAddress { module, offset });
fields!(StackDefinition { id, addresses });
fields!(Symbol { function, file, line, column });
fields!(SymbolsDefinition { address, symbols });
fields!(DeviceDefinition { device, name, total, uuid });
fields!(ContextDefinition { context, device });
fields!(PoolDefinition { pool, name });
fields!(PoolBlock { number, pool });
fields!(Interception { source, library });
fields!(BlockLabel { key, number, label });

/// The type code of each item. Codes from 128 on are allocations and frees.
macro_rules! items {
    ($($variant:ident = $code:literal),* $(,)?) => {
        fn code(item: &Item) -> u8 {
            match item {
                Item::Event(_) => EVENT,
                $(Item::$variant(_) => $code,)*
            }
        }

        fn put_fields(item: &Item, events: &mut EventWriter, to: &mut Vec<u8>) {
            match item {
                Item::Event(event) => events.put_plain(event, to),
                $(Item::$variant(value) => value.put(to),)*
            }
        }

        fn get_fields(code: u8, events: &mut EventReader, from: &mut Input<'_>) -> Result<Option<Item>> {
            Ok(Some(match code {
                EVENT => return Ok(events.get_plain(from)?.map(Item::Event)),
                $($code => Item::$variant(Wire::get(from)?),)*
                _ => return Err(Malformed("a number matches no item")),
            }))
        }

        /// Any item except an event. All kinds are equally frequent.
        #[cfg(any(test, feature = "testing"))]
        impl crate::testing::Any for Item {
            fn any(random: &mut crate::testing::Random) -> Self {
                use crate::testing::{Any, Random};

                let all: &[fn(&mut Random) -> Self] = &[$(|random| Self::$variant(Any::any(random))),*];
                all[random.index(all.len())](random)
            }
        }
    };
}

const EVENT: u8 = 1;

items! {
    Process = 2,
    Clock = 3,
    Thread = 4,
    Callsite = 5,
    Module = 6,
    Stack = 7,
    Symbols = 8,
    Device = 9,
    Context = 10,
    Interception = 12,
    Label = 13,
    ThreadReused = 14,
    Missed = 16,
    Part = 18,
    Allocator = 19,
    AllocatorEvents = 20,
    Ring = 21,
    Finished = 22,
    TensorGroup = 23,
    TensorHolder = 24,
    Pool = 25,
    PoolBlock = 26,
    Totals = 27,
    Inside = 28,
}

/// Appends an item. `scratch` is a buffer for the bytes after its length.
pub(super) fn put(item: &Item, events: &mut EventWriter, scratch: &mut Vec<u8>, to: &mut Vec<u8>) {
    if let Item::Event(event) = item
        && events.put_short(event, to)
    {
        return;
    }
    scratch.clear();
    put_fields(item, events, scratch);
    to.push(code(item));
    put_number(to, scratch.len() as u64);
    to.extend_from_slice(scratch);
}

/// Reads an item. Returns `Ok(None)` if nothing needs it, or if this version does not understand it. After an error, the rest of
/// the record cannot be read.
pub(super) fn get(events: &mut EventReader, from: &mut Input<'_>) -> Result<Option<Item>> {
    let first = from.byte()?;
    if is_short(first) {
        return events.get_short(first, from).map(|event| Some(Item::Event(event)));
    }
    let length = from.number()?;
    let mut fields = from.part(length)?;
    let item = get_fields(first, events, &mut fields);
    from.cut_texts += fields.cut_texts;
    from.not_understood += u64::from(item.is_err());
    Ok(item.unwrap_or(None))
}
