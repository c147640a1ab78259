//! The form of stack addresses in a recording: offsets in modules, and Python lines.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use gpumem_recording::{
    CodeAddress, Item, ModuleDefinition, RingDefinitions, StackDefinition, Symbol, SymbolsDefinition,
};

use super::build_id;
use crate::{
    model::{Frame, StackId},
    ring_memory::RingPages,
    source::{self, LoadedFile},
};

/// The bit that marks a value on a stack as the id of a whole file. No address has this bit; ids of Python lines have only the
/// bit above it.
const FILE: usize = 1 << (usize::BITS - 2);

/// The ids of modules, which are the same in all recordings of a session and in the ring.
#[derive(Debug, Default)]
pub(super) struct ModuleTable(Mutex<NumberedModules>);

#[derive(Debug, Default)]
struct NumberedModules {
    numbers: HashMap<Arc<LoadedFile>, u32>,
    /// The modules by id; the first one has id 1.
    files: Vec<Arc<LoadedFile>>,
}

impl NumberedModules {
    fn number(&mut self, file: &Arc<LoadedFile>) -> u32 {
        let next = u32::try_from(self.files.len() + 1).unwrap_or(0);
        let number = *self.numbers.entry(Arc::clone(file)).or_insert(next);
        if number == next {
            self.files.push(Arc::clone(file));
        }
        number
    }

    /// Returns the file that a value on a stack identifies, and its id.
    fn file(&self, number: usize) -> Option<(u32, &Arc<LoadedFile>)> {
        let number = number.checked_sub(FILE)?;
        Some((number.try_into().ok()?, self.files.get(number.checked_sub(1)?)?))
    }
}

/// A resolved address of a stack.
#[derive(Clone, Debug)]
pub(super) struct ResolvedAddress {
    pub(super) address: CodeAddress,
    /// The module or line that contains it.
    pub(super) file: Option<Arc<LoadedFile>>,
    /// The Python line, if the address is the id of one.
    pub(super) line: Option<Frame>,
}

impl ModuleTable {
    /// Returns the value that identifies the file with the code before this return address.
    pub(super) fn number_of(&self, address: usize) -> Option<usize> {
        let file = source::files_of(&[address]).pop()??;
        Some(FILE | self.0.lock().unwrap_or_else(PoisonError::into_inner).number(&file) as usize)
    }

    /// Resolves addresses. Takes no other lock while it reads the list of the loader.
    pub(super) fn resolve(&self, addresses: &[usize]) -> Vec<ResolvedAddress> {
        let files = source::files_of(addresses);
        let mut modules = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let resolved = addresses.iter().zip(files).map(|(address, file)| {
            if let Some((module, file)) = modules.file(*address) {
                let address = CodeAddress { module, offset: 0 };
                return ResolvedAddress { address, file: Some(Arc::clone(file)), line: None };
            }
            let Some(file) = file else {
                let known = CodeAddress { module: 0, offset: *address as u64 };
                return ResolvedAddress { address: known, file: None, line: source::python_frame(*address) };
            };
            let module = modules.number(&file);
            let offset = address.wrapping_sub(file.base) as u64;
            ResolvedAddress { address: CodeAddress { module, offset }, file: Some(file), line: None }
        });
        resolved.collect()
    }
}

impl ResolvedAddress {
    /// Returns the definition of its module, or of its line.
    pub(super) fn definition(&self) -> Option<Item> {
        if let Some(line) = &self.line {
            return Some(symbols(self.address, vec![line.clone()]));
        }
        let LoadedFile { path, base, notes } = &**self.file.as_ref()?;
        Some(Item::Module(ModuleDefinition {
            id: self.address.module,
            path: path.to_string_lossy().into_owned(),
            build_id: build_id::in_notes(notes).map(<[u8]>::to_vec).unwrap_or_default(),
            base: *base as u64,
        }))
    }

    /// Returns the key of the definition; equal definitions have equal keys.
    fn defined(&self) -> CodeAddress {
        if self.address.module == 0 { self.address } else { CodeAddress { offset: 0, ..self.address } }
    }
}

pub(super) fn symbols(address: CodeAddress, frames: Vec<Frame>) -> Item {
    let symbol = |Frame { function, file, line, column, .. }| Symbol { function, file, line, column };
    Item::Symbols(SymbolsDefinition { address, symbols: frames.into_iter().map(symbol).collect() })
}

/// Defines stacks in the memory of the ring when they are first seen.
#[derive(Debug)]
pub(super) struct EarlyDefinitions {
    to: RingDefinitions<RingPages>,
    /// The modules and lines that are already defined there.
    defined: HashSet<CodeAddress>,
}

impl EarlyDefinitions {
    pub(super) fn new(to: RingDefinitions<RingPages>) -> Self {
        Self { to, defined: HashSet::new() }
    }

    /// Defines a stack. If there is no space, the thread that writes the recording defines it later.
    pub(super) fn define(&mut self, id: StackId, addresses: &[ResolvedAddress]) {
        let is_new = |address: &&ResolvedAddress| !self.defined.contains(&address.defined());
        let new: Vec<_> = addresses.iter().filter(is_new).collect();
        let mut items: Vec<Item> = new.iter().filter_map(|address| address.definition()).collect();
        let addresses = addresses.iter().map(|known| known.address).collect();
        items.push(Item::Stack(StackDefinition { id, addresses }));
        if self.to.add(&items) {
            self.defined.extend(new.into_iter().map(ResolvedAddress::defined));
        }
    }
}
