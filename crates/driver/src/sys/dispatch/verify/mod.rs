//! Checks whether the stubs of a driver can be used. They are not documented, so every address in a stub must be plausible and must belong
//! to that stub only.

use std::{ops::Range, path::PathBuf};

use super::stub::{LENGTH, Processor, Stub};

/// A library in memory.
pub(super) trait Library {
    /// Returns the segment of code that contains an address.
    fn code_around(&self, address: usize) -> Option<Range<usize>>;
    fn is_readable(&self, address: usize, bytes: usize) -> bool;
    /// Returns whether the memory is writable, even after relocation.
    fn is_writable(&self, address: usize, bytes: usize) -> bool;
    /// Returns a copy of this range, or `None` unless all of it is in the library's code.
    fn code(&self, range: Range<usize>) -> Option<Vec<u8>>;
    /// Returns the word at an aligned address in the library's writable data, or `None` for any other address.
    fn pointer(&self, address: usize) -> Option<usize>;
    /// Returns the file that contains an address outside of the library.
    fn owner(&self, address: usize) -> Option<PathBuf>;

    fn is_code(&self, address: usize) -> bool {
        self.code_around(address).is_some()
    }
}

/// A stub that passed all checks, and the pointer in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VerifiedStub {
    pub(super) stub: Stub,
    pub(super) implementation: usize,
}

/// The maximum distance from the start of a stub to its refusal. In known drivers it is at most 176 bytes.
const MAX_ERROR_PATH_DISTANCE: usize = 512;

/// How much code is searched before the first function and after the last one. Stubs are next to each other; in known drivers, the others
/// are within 10 KiB.
const MARGIN: usize = 64 << 10;

/// The maximum distance between two neighbouring slots of stubs. In known drivers it is at most 296 bytes.
const MAX_SLOT_GAP: usize = 1024;

/// Decodes the stubs of all these functions, and checks every address in them. The error is the reason why none of them can be used.
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
            return Err(format!("the stub of {name} checks another flag than the stub of {}", functions[0].0));
        }
    }
    let jumps = jumps(library, processor, functions)?;
    for ((name, address), found) in functions.iter().zip(&found) {
        check_location(&jumps, name, *address, found.stub)?;
    }
    Ok(found)
}

/// Decodes one stub, and checks the addresses in it.
fn check(library: &impl Library, processor: Processor, name: &str, address: usize) -> Result<VerifiedStub, String> {
    let code_at = |address: usize| -> Option<[u8; LENGTH]> {
        library.code(address..address.checked_add(LENGTH)?)?.try_into().ok()
    };
    let code = code_at(address).ok_or_else(|| format!("{name} is not in the driver's code"))?;
    let stub = processor.decode(&code, address).ok_or_else(|| {
        format!(
            "{name} does not start as in the known drivers (470 to 580): the driver is another one, or a tool \
             such as UCX patched the function"
        )
    })?;
    let misplaced = || format!("the pointer of {name} is not in the driver's writable data");
    let implementation = library.pointer(stub.slot).ok_or_else(misplaced)?;
    if !library.is_readable(stub.flag, size_of::<u32>())
        || !code_at(stub.error_path).is_some_and(|code| processor.is_error_path(&code))
    {
        return Err(format!("the stub of {name} does not check whether the driver was shut down"));
    }
    if !library.is_code(implementation) {
        let owner = library.owner(implementation);
        let is_own = owner.as_ref().is_some_and(|file| file.to_string_lossy().contains("libgpumem_inject"));
        let user = if is_own { "`gpumem run`" } else { "another tool" };
        let by = owner.map(|file| format!(", into {}", file.display())).unwrap_or_default();
        return Err(format!("the pointer of {name} leads out of the driver{by}: {user} uses it"));
    }
    Ok(VerifiedStub { stub, implementation })
}

/// A jump or call through a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Jump {
    at: usize,
    slot: usize,
}

/// Returns all jumps through slots in the code around these functions: those of their own stubs, and those of the stubs of functions that
/// are not intercepted.
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

/// Checks that the slot and the refusal belong to this stub only, and are where those of a stub must be.
fn check_location(jumps: &[Jump], name: &str, address: usize, stub: Stub) -> Result<(), String> {
    let mut through = jumps.iter().filter(|jump| jump.slot == stub.slot);
    let (Some(own), None) = (through.next(), through.next()) else {
        return Err(format!("{name} shares its pointer with another function"));
    };
    if !jumps.iter().any(|jump| jump.slot != stub.slot && jump.slot.abs_diff(stub.slot) <= MAX_SLOT_GAP) {
        return Err(format!("the pointer of {name} is not next to other functions' pointers"));
    }
    let between = own.at.min(stub.error_path)..own.at.max(stub.error_path);
    let is_of_another = jumps.iter().any(|jump| jump != own && between.contains(&jump.at));
    if is_of_another || stub.error_path.abs_diff(address) > MAX_ERROR_PATH_DISTANCE {
        return Err(format!("the stub of {name} leads elsewhere when the driver was shut down"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
