//! Looks up the functions and lines at the addresses of a recording, in the files of the program and its libraries.
//! This is done after the program has ended: it takes time, and would delay the program's exit.

use std::{
    borrow::Cow,
    fs::File,
    io::{self, Seek, SeekFrom},
    path::Path,
};

use addr2line::Loader;
use gpumem_recording::{CodeAddress, Item, ModuleDefinition, Symbol, SymbolsDefinition, Writer};
use object::{Object, ObjectSegment, ReadCache};

use super::content::Content;
use crate::files;

/// Adds the functions and lines of the addresses to a complete recording. `content` is the recording's content.
pub(super) fn add(recording: &Path, content: &Content) -> io::Result<()> {
    let addresses: Vec<_> = content.addresses.iter().collect();
    let mut file = files::open(recording, File::options().append(true))?;
    let end = file.seek(SeekFrom::End(0))?;
    let mut writer = Writer::append(&file, end);
    // The addresses are sorted, so the addresses in one module are adjacent.
    for addresses in addresses.chunk_by(|a, b| a.module == b.module) {
        let Some(module) = content.modules.get(&addresses[0].module) else { continue };
        for symbols in of_module(module, addresses.iter().map(|address| address.offset)) {
            writer.write(&Item::Symbols(symbols))?;
        }
    }
    writer.flush()
}

/// Returns the known functions and lines at these offsets in a module.
pub(crate) fn of_module(module: &ModuleDefinition, offsets: impl Iterator<Item = u64>) -> Vec<SymbolsDefinition> {
    let Some(resolver) = Resolver::new(module) else { return Vec::new() };
    let of = |offset| SymbolsDefinition {
        address: CodeAddress { module: module.id, offset },
        symbols: resolver.symbols(offset),
    };
    let is_known = |of: &SymbolsDefinition| of.symbols.iter().any(|symbol| *symbol != Symbol::default());
    offsets.map(of).filter(is_known).collect()
}

/// Reads the debug information of one file.
struct Resolver {
    loader: Loader,
    /// The address at which the file is mapped if its base address is 0.
    first: u64,
}

impl Resolver {
    /// `None` if the file is missing, or if it is not the one that the program had loaded.
    fn new(module: &ModuleDefinition) -> Option<Self> {
        let cache = ReadCache::new(File::open(&module.path).ok()?);
        let file = object::File::parse(&cache).ok()?;
        let build_id = file.build_id().ok().flatten().unwrap_or_default();
        if build_id != module.build_id {
            return None;
        }
        let first = file.segments().map(|segment| segment.address() & !(segment.align().max(1) - 1)).min()?;
        Some(Self { loader: Loader::new(&module.path).ok()?, first })
    }

    /// Returns the functions at a return address, inlined functions first.
    fn symbols(&self, offset: u64) -> Vec<Symbol> {
        // The call comes before the address to which it returns.
        let Some(at) = self.first.wrapping_add(offset).checked_sub(1) else { return Vec::new() };
        let mut symbols = Vec::new();
        if let Ok(mut frames) = self.loader.find_frames(at) {
            while let Ok(Some(frame)) = frames.next() {
                let name = frame.function.as_ref().and_then(|function| function.demangle().ok());
                let location = frame.location.as_ref();
                symbols.push(Symbol {
                    function: name.map(Cow::into_owned),
                    file: location.and_then(|location| location.file).map(str::to_owned),
                    line: location.and_then(|location| location.line),
                    column: location.and_then(|location| location.column),
                });
            }
        }
        // The table of functions exists even without debug information.
        if symbols.iter().all(|symbol| symbol.function.is_none())
            && let Some(name) = self.loader.find_symbol(at)
        {
            let function = Some(addr2line::demangle_auto(name.into(), None).into_owned());
            match symbols.last_mut() {
                Some(outermost) => outermost.function = function,
                None => symbols.push(Symbol { function, ..Symbol::default() }),
            }
        }
        symbols
    }
}
