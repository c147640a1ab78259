//! Writes definitions of the ids in a recording, from the tables of the session, before the first event that uses them.

use std::{
    collections::{HashMap, HashSet},
    env, fs, io,
    time::{Duration, Instant, SystemTime},
};

use gpumem_recording::{
    CallsiteDefinition, CodeAddress, ContextDefinition, DeviceDefinition, Interception, Item, Process, StackDefinition,
};

use super::{
    compiled::CompiledCode,
    modules::{ResolvedAddress, symbols},
};
use crate::{
    model::{Block, CallsiteId, Device, EventKind, Family, Frame, MemKind, StackId},
    process,
    session::{Session, events::DefinedCallsite, views},
    source,
};

/// The longest time to read debug information at the end of a recording.
const FOR_SYMBOLS: Duration = Duration::from_secs(5);

/// Returns the file name of the program.
fn program_name() -> Option<String> {
    Some(process::executable().ok()?.file_name()?.to_string_lossy().into_owned())
}

/// The ids that are already defined.
pub(super) struct Definer {
    session: &'static Session,
    callsites: HashSet<CallsiteId>,
    stacks: HashSet<StackId>,
    modules: HashSet<u32>,
    addresses: HashMap<usize, CodeAddress>,
    devices: HashSet<Device>,
    contexts: HashMap<u8, Device>,
    interception: Option<&'static str>,
    compiled: CompiledCode,
}

type Write<'a> = &'a mut dyn FnMut(Item) -> io::Result<()>;

impl DefinedCallsite {
    /// Returns the definition for a recording.
    pub(super) fn definition(self, id: CallsiteId) -> CallsiteDefinition {
        let Self { name, location, module, .. } = self;
        CallsiteDefinition {
            id,
            name: name.map(Into::into),
            file: location.file.to_owned(),
            line: location.line,
            column: location.column,
            module_path: module.map(Into::into),
        }
    }
}

impl Definer {
    pub(super) fn new(session: &'static Session) -> Self {
        Self {
            session,
            callsites: HashSet::new(),
            stacks: HashSet::new(),
            modules: HashSet::new(),
            addresses: HashMap::new(),
            devices: HashSet::new(),
            contexts: HashMap::new(),
            interception: None,
            compiled: CompiledCode::default(),
        }
    }

    /// Returns the definition of the process.
    pub(super) fn process(&self) -> Item {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        // Long command lines are truncated; typed ones are shorter than this.
        let arguments = env::args_os().take(256).map(text).map(|mut argument| {
            argument.truncate(argument.char_indices().nth(1_000).map_or(argument.len(), |(at, _)| at));
            argument
        });
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Item::Process(Process {
            pid: std::process::id(),
            executable: process::executable().map(|path| text(path.into())).unwrap_or_default(),
            arguments: arguments.collect(),
            folder: views::folder().to_owned(),
            own_module: if self.session.recorder.is_injected() { program_name() } else { source::own_module() },
            started: since.saturating_sub(self.session.inbox.age()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ran_before: self.session.recorder.ran_before(),
            cards: source::replaced_cards().map(|(words, _)| words),
            host: process::host(),
            rank: process::rank(),
        })
    }

    /// Defines the ids in an item, unless they are already defined.
    pub(super) fn define(&mut self, item: &mut Item, mut write: impl FnMut(Item) -> io::Result<()>) -> io::Result<()> {
        let write: Write<'_> = &mut write;
        match item {
            Item::Event(event) => match event.kind {
                EventKind::Alloc { block, .. }
                | EventKind::Free { block: Some(block), .. }
                | EventKind::LateLookup { block } => self.block(&block, write),
                EventKind::Rejected { device, stack, .. } => {
                    device.map_or(Ok(()), |device| self.device(device, write))?;
                    self.stack(stack, write)
                }
                EventKind::UnknownValue { stack, .. } => self.stack(stack, write),
                EventKind::Open { spec, .. } => {
                    self.device(spec.device, write)?;
                    self.callsite(spec.callsite, write)
                }
                EventKind::Mark { callsite } => self.callsite(callsite, write),
                EventKind::Sample { device, .. } => self.device(device, write),
                EventKind::PoolRegistered { pool, device } => {
                    self.device(device, write)?;
                    write(self.session.pool_definition(pool))
                }
                _ => Ok(()),
            },
            Item::Inside(path) => path.iter().try_for_each(|callsite| self.callsite(*callsite, write)),
            Item::Callsite(callsite) => {
                self.callsites.insert(callsite.id);
                Ok(())
            }
            Item::Thread(thread) => {
                let name = fs::read(format!("/proc/self/task/{}/comm", thread.os_id));
                thread.name = name.ok().map(|name| String::from_utf8_lossy(&name).trim_end().to_owned());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn block(&mut self, block: &Block, write: Write<'_>) -> io::Result<()> {
        let Block { device, context, stack, kind, .. } = *block;
        if stack != StackId::NONE && !self.stacks.contains(&stack) {
            self.stack(stack, write)?;
        }
        // The context of a part is the id of its pool.
        if context != 0 && kind != MemKind::Part && self.contexts.get(&context) != Some(&device) {
            self.contexts.insert(context, device);
            write(Item::Context(ContextDefinition { context, device }))?;
        }
        self.device(device, write)
    }

    fn device(&mut self, device: Device, write: Write<'_>) -> io::Result<()> {
        if !self.devices.insert(device) {
            return Ok(());
        }
        if device.family == Family::Custom {
            let name = source::custom_devices().and_then(|gauges| gauges.name(device.ordinal).ok());
            return write(Item::Device(DeviceDefinition { device, name, total: None, uuid: None }));
        }
        self.interception(write)?;
        let Ok(devices) = self.session.devices() else { return Ok(()) };
        let card = source::replaced_cards().and_then(|(_, card)| card);
        let total = card.or_else(|| devices.read(device.ordinal).ok().map(|memory| memory.total));
        let (name, uuid) = (devices.name(device.ordinal).ok(), devices.uuid(device.ordinal));
        write(Item::Device(DeviceDefinition { device, name, total, uuid }))
    }

    /// Defines the current source of the interception.
    pub(super) fn interception(&mut self, write: Write<'_>) -> io::Result<()> {
        let Ok(devices) = self.session.devices() else { return Ok(()) };
        let Some(by) = devices.subscribed().filter(|by| self.interception != Some(by.library)) else { return Ok(()) };
        self.interception = Some(by.library);
        write(Item::Interception(Interception { source: by.source, library: by.library.to_owned() }))
    }

    fn callsite(&mut self, id: CallsiteId, write: Write<'_>) -> io::Result<()> {
        if id == CallsiteId::NONE || id == CallsiteId::OTHERS || !self.callsites.insert(id) {
            return Ok(());
        }
        write(Item::Callsite(self.session.callsite_definition(id)))
    }

    fn stack(&mut self, id: StackId, write: Write<'_>) -> io::Result<()> {
        if id == StackId::NONE || !self.stacks.insert(id) {
            return Ok(());
        }
        let stack = self.session.stacks.get(id);
        let new: Vec<usize> = stack.iter().copied().filter(|address| !self.addresses.contains_key(address)).collect();
        for (address, mut resolved) in new.iter().zip(self.session.recorder.modules.resolve(&new)) {
            resolved.line.iter_mut().for_each(|line| self.compiled.name_kernel(line));
            self.address(*address, &resolved, write)?;
        }
        let addresses = stack.iter().filter_map(|address| self.addresses.get(address)).copied().collect();
        write(Item::Stack(StackDefinition { id, addresses }))
    }

    fn address(&mut self, address: usize, resolved: &ResolvedAddress, write: Write<'_>) -> io::Result<()> {
        if self.addresses.insert(address, resolved.address).is_some() {
            return Ok(());
        }
        let ResolvedAddress { address: CodeAddress { module, .. }, line, .. } = resolved;
        // A known line is written now, because the process may not reach its normal exit.
        if (line.is_some() || *module != 0 && self.modules.insert(*module))
            && let Some(definition) = resolved.definition()
        {
            write(definition)?;
        }
        Ok(())
    }

    /// Defines the functions at all addresses, as far as time allows.
    pub(super) fn symbols(&self) -> impl Iterator<Item = Item> {
        let until = Instant::now() + FOR_SYMBOLS;
        let known = self.addresses.iter().take_while(move |_| Instant::now() < until);
        known.filter_map(|(address, known)| {
            let is_known = |frame: &Frame| frame.function.is_some() || frame.file.is_some();
            let frames = source::python_frame(*address).is_none().then(|| source::frames(&[*address]))?;
            frames.iter().any(is_known).then(|| symbols(*known, frames))
        })
    }
}
