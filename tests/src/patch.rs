//! Creates other drivers from the stand-in driver's file. Their stubs differ from those that gpumem knows, or cannot be trusted.
//!
//! All of them work as long as they are not intercepted. Functions and data are found through the file's symbols.

use std::collections::HashMap;
use std::ops::Range;

use object::{Object as _, ObjectSection as _, ObjectSegment as _, ObjectSymbol as _};

use crate::Standin;
use crate::stub::{DEINITIALIZED, Stub};

/// The faults of the stubs of a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// All stubs compare with another number.
    Unrecognisable,
    /// The stub of this function begins with a jump, as if another library had put its own code there. Calls go past the slot.
    Overwritten(&'static str),
    /// The slot of this function is in memory that becomes read-only after relocation; see the stand-in driver's `stubs.rs`. At most
    /// one function has such a slot.
    Relro(&'static str),
}

/// Without one of these calls, the stubs cannot be recognised.
impl Standin {
    /// Makes the driver like those since 470: each function is a stub that goes through a slot.
    #[must_use]
    pub fn dispatch(mut self) -> Self {
        self.patches.retain(|patch| *patch != Patch::Unrecognisable);
        self
    }

    /// Makes the driver like those since 470, but with this fault of the stubs.
    #[must_use]
    pub fn patch(self, patch: Patch) -> Self {
        let mut machine = self.dispatch();
        machine.patches.push(patch);
        machine
    }

    /// Makes the driver like those since 470, but with a slot of this function that points out of the library from the start.
    #[must_use]
    pub fn bad_slot(self, function: &str) -> Self {
        self.dispatch().set(format!("foreign_slot={function}"))
    }

    /// Returns whether gpumem can recognise the stubs, apart from faults.
    pub(crate) fn has_dispatch(&self) -> bool {
        !self.patches.contains(&Patch::Unrecognisable)
    }
}

/// The file of the stand-in driver, and its layout, which is the same in all copies.
#[derive(Debug)]
pub(crate) struct Image {
    /// The addresses of its exports.
    symbols: HashMap<String, u64>,
    /// The addresses of the segments, and their offsets in the file.
    segments: Vec<(Range<u64>, u64)>,
    /// The offsets of its relocations and of the names that the loader reads.
    relocations: Range<usize>,
    names: Range<usize>,
    bytes: Vec<u8>,
}

impl Image {
    pub(crate) fn new(bytes: Vec<u8>) -> Result<Self, object::Error> {
        let file = object::File::parse(&*bytes)?;
        let mut symbols = HashMap::new();
        for symbol in file.dynamic_symbols().filter(object::ObjectSymbol::is_definition) {
            symbols.insert(symbol.name()?.to_owned(), symbol.address());
        }
        let segments = file.segments().map(|segment| {
            let (start, bytes) = segment.file_range();
            (segment.address()..segment.address() + bytes, start)
        });
        let section = |name| -> Range<usize> {
            let found = file.section_by_name(name).and_then(|section| section.file_range());
            let (start, bytes) = found.unwrap_or_default();
            as_index(start)..as_index(start + bytes)
        };
        let [relocations, names] = [".rela.dyn", ".dynstr"].map(section);
        let segments = segments.collect();
        Ok(Self { symbols, segments, relocations, names, bytes })
    }

    /// Returns the file with these changes.
    pub(crate) fn patched(&self, patches: &[Patch]) -> Vec<u8> {
        let mut copy = Copy { image: self, bytes: self.bytes.clone() };
        for patch in patches {
            copy.apply(*patch);
        }
        copy.bytes
    }

    /// Returns the offsets of the names that the loader reads.
    pub(crate) fn names(&self) -> Range<usize> {
        self.names.clone()
    }

    fn address(&self, symbol: &str) -> u64 {
        *self.symbols.get(symbol).unwrap_or_else(|| panic!("the stand-in driver has no {symbol}"))
    }

    /// Returns the offset of an address in the file.
    fn offset(&self, address: u64) -> usize {
        let segment = self.segments.iter().find(|(addresses, _)| addresses.contains(&address));
        let (addresses, start) = segment.unwrap_or_else(|| panic!("the stand-in driver has nothing at {address:#x}"));
        as_index(address - addresses.start + start)
    }
}

struct Copy<'image> {
    image: &'image Image,
    bytes: Vec<u8>,
}

impl Copy<'_> {
    fn apply(&mut self, patch: Patch) {
        match patch {
            Patch::Unrecognisable => {
                let functions: Vec<_> =
                    self.image.symbols.keys().filter(|name| self.stub_if_any(name).is_some()).cloned().collect();
                assert!(!cfg!(target_arch = "x86_64") || !functions.is_empty(), "the stand-in driver has no stubs");
                for function in functions {
                    let (at, stub) = self.stub(&function);
                    self.put(at + stub.form.distance_at() as u64 + 4, &(DEINITIALIZED + 1).to_le_bytes());
                }
            }
            Patch::Overwritten(function) => {
                let (at, stub) = self.stub(function);
                let (_, implementation) = self.relocation(stub.slot);
                self.put(at, &[0xe9]);
                self.put_distance(at + 1, at + 5, implementation);
            }
            Patch::Relro(function) => self.move_slot(function),
        }
    }

    fn stub_if_any(&self, function: &str) -> Option<(u64, Stub)> {
        let address = *self.image.symbols.get(function).filter(|_| function.starts_with("cu"))?;
        let bytes = self.bytes.get(self.image.offset(address)..)?;
        Some((address, Stub::read(bytes, address)?))
    }

    /// Returns a function's address, and its stub.
    fn stub(&self, function: &str) -> (u64, Stub) {
        self.stub_if_any(function).unwrap_or_else(|| panic!("the stand-in driver has no stub for {function}"))
    }

    /// Gives a function another slot: the loader writes the function's address there, instead of what it would write into
    /// `standin_relro_slot`.
    fn move_slot(&mut self, function: &str) {
        let relro = self.image.address("standin_relro_slot");
        let (at, stub) = self.stub(function);
        let (_, implementation) = self.relocation(stub.slot);
        let (relocation, _) = self.relocation(relro);
        self.bytes[relocation + 16..relocation + 24].copy_from_slice(&implementation.to_le_bytes());
        let slot_at = at + stub.form.slot_at() as u64;
        self.put_distance(slot_at, slot_at + 4, relro);
    }

    /// Returns the offset of the relocation of this address, and the address that the loader puts there.
    fn relocation(&self, address: u64) -> (usize, u64) {
        const RELATIVE: u64 = 8;
        let found = self.image.relocations.clone().step_by(24).find(|at| self.words(*at) == [address, RELATIVE]);
        let at = found.unwrap_or_else(|| panic!("nothing is relocated at {address:#x}"));
        (at, self.words::<3>(at)[2])
    }

    fn words<const N: usize>(&self, at: usize) -> [u64; N] {
        std::array::from_fn(|word| {
            let bytes = self.bytes[at + word * 8..].first_chunk().copied();
            bytes.map_or(0, u64::from_le_bytes)
        })
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = self.image.offset(address);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes the distance to `target` from the end of the instruction.
    fn put_distance(&mut self, address: u64, end: u64, target: u64) {
        let distance = target.wrapping_sub(end).cast_signed();
        let distance = i32::try_from(distance).unwrap_or_else(|_| panic!("{target:#x} is too far from {end:#x}"));
        self.put(address, &distance.to_le_bytes());
    }
}

fn as_index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
