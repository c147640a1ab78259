//! Whether the stubs of a driver can be relied on: nothing about them is documented, so all that they name has to make sense, and
//! to be theirs alone.

use std::{ops::Range, path::PathBuf};

use super::stub::{LENGTH, Processor, Stub};

/// A library in memory.
pub(super) trait Library {
    /// The segment of code that an address is in.
    fn code_around(&self, address: usize) -> Option<Range<usize>>;
    fn is_readable(&self, address: usize, bytes: usize) -> bool;
    /// It may be written to, also after relocation.
    fn is_writable(&self, address: usize, bytes: usize) -> bool;
    /// A copy of this code; `None` unless all of it is in the library's code.
    fn code(&self, range: Range<usize>) -> Option<Vec<u8>>;
    /// The word at an aligned address in the library's writable data; `None` if it is elsewhere.
    fn pointer(&self, address: usize) -> Option<usize>;
    /// The file that has an address which is not the library's.
    fn owner(&self, address: usize) -> Option<PathBuf>;

    fn is_code(&self, address: usize) -> bool {
        self.code_around(address).is_some()
    }
}

/// What a function's slot is, and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VerifiedStub {
    pub(super) stub: Stub,
    pub(super) implementation: usize,
}

/// How far a stub's refusal may be from its beginning. 176 bytes are the most that was seen.
const FARTHEST_REFUSAL: usize = 512;

/// How much code before the first function and behind the last is looked at. Stubs lie side by side: 10 KiB are the most that was
/// seen.
const MARGIN: usize = 64 << 10;

/// How far apart the slots of two stubs may be that have none between them. 296 bytes are the most that was seen.
const WIDEST_GAP: usize = 1024;

/// Reads the stubs of all these functions, and looks at every address that they name. The error is the reason why none of them
/// is to be used.
pub(super) fn verify(
    library: &impl Library,
    processor: Processor,
    functions: &[(&str, usize)],
) -> Result<Vec<VerifiedStub>, String> {
    let found: Vec<VerifiedStub> =
        functions.iter().map(|(name, address)| check(library, processor, name, *address)).collect::<Result<_, _>>()?;
    let Some(first) = found.first() else { return Err("the driver has none of the functions".to_owned()) };
    for ((name, _), other) in functions.iter().zip(&found) {
        if other.stub.flag != first.stub.flag {
            return Err(format!("the stub of {name} checks another flag than that of {}", functions[0].0));
        }
    }
    let jumps = jumps(library, processor, functions)?;
    for ((name, address), found) in functions.iter().zip(&found) {
        check_place(&jumps, name, *address, found.stub)?;
    }
    Ok(found)
}

/// What one stub says.
fn check(library: &impl Library, processor: Processor, name: &str, address: usize) -> Result<VerifiedStub, String> {
    let code_at = |address: usize| -> Option<[u8; LENGTH]> {
        library.code(address..address.checked_add(LENGTH)?)?.try_into().ok()
    };
    let code = code_at(address).ok_or_else(|| format!("{name} is not in the driver's code"))?;
    let stub = processor.decode(&code, address).ok_or_else(|| {
        format!(
            "{name} does not begin as in the drivers that are known (470 to 580): the driver is another one, or a tool \
             such as UCX patched the function"
        )
    })?;
    let misplaced = || format!("the pointer of {name} is not in the driver's writable data");
    let implementation = library.pointer(stub.slot).ok_or_else(misplaced)?;
    if !library.is_readable(stub.flag, size_of::<u32>())
        || !code_at(stub.refusal).is_some_and(|code| processor.is_refusal(&code))
    {
        return Err(format!("the stub of {name} does not check whether the driver was shut down"));
    }
    if !library.is_code(implementation) {
        let by = library.owner(implementation).map(|file| format!(", into {}", file.display())).unwrap_or_default();
        return Err(format!("the pointer of {name} leads out of the driver{by}: another tool uses it"));
    }
    Ok(VerifiedStub { stub, implementation })
}

/// A place in the code that goes through a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Jump {
    at: usize,
    slot: usize,
}

/// What goes through a slot in the code around these functions: their stubs, and those of the other functions, which are not
/// intercepted.
fn jumps(library: &impl Library, processor: Processor, functions: &[(&str, usize)]) -> Result<Vec<Jump>, String> {
    let addresses = || functions.iter().map(|(_, address)| *address);
    let (first, last) = (addresses().min().unwrap_or(0), addresses().max().unwrap_or(0));
    let scattered = "the driver's functions are in several places";
    let segment = library.code_around(first).filter(|segment| segment.contains(&last)).ok_or(scattered)?;
    let first = first.saturating_sub(MARGIN).max(segment.start);
    let code = library.code(first..last.saturating_add(MARGIN).min(segment.end)).ok_or(scattered)?;
    let leads_into_code =
        |slot: usize| library.pointer(slot).is_some_and(|implementation| library.is_code(implementation));
    let mut jumps = Vec::new();
    processor.each_jump(&code, first, |at, slot| {
        if leads_into_code(slot) {
            jumps.push(Jump { at, slot });
        }
    });
    Ok(jumps)
}

/// That the slot and the refusal are this stub's and nobody else's, and lie where a stub's lie.
fn check_place(jumps: &[Jump], name: &str, address: usize, stub: Stub) -> Result<(), String> {
    let mut through = jumps.iter().filter(|jump| jump.slot == stub.slot);
    let (Some(own), None) = (through.next(), through.next()) else {
        return Err(format!("{name} shares its pointer with another function"));
    };
    if !jumps.iter().any(|jump| jump.slot != stub.slot && jump.slot.abs_diff(stub.slot) <= WIDEST_GAP) {
        return Err(format!("the pointer of {name} is not beside those of other functions"));
    }
    let between = own.at.min(stub.refusal)..own.at.max(stub.refusal);
    let is_anothers = jumps.iter().any(|jump| jump != own && between.contains(&jump.at));
    if is_anothers || stub.refusal.abs_diff(address) > FARTHEST_REFUSAL {
        return Err(format!("the stub of {name} leads elsewhere when the driver was shut down"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
