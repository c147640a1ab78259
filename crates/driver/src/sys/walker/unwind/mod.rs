//! Walks the calling thread's stack by the tables that compilers write for exceptions, like the unwinder of the system, and caches the rule
//! for each address. If a table is missing or contains something unusual, the walk fails: it never guesses.

use gimli::UnwindContext;

use super::{
    modules::Modules,
    rules::{Base, CALLEE_SAVED, InPlace, Location, RETURN_ADDRESS, SavedRegister, UnwindRule},
    tables::rule_for,
};

/// The number of functions after which a walk stops.
const MAX_DEPTH: usize = 256;

/// The address of the value of each register in [`CALLEE_SAVED`].
pub(super) type RegisterAddresses = [u64; CALLEE_SAVED.len()];

/// The start of a walk.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkStart {
    pub(super) pc: u64,
    pub(super) sp: u64,
    pub(super) registers: RegisterAddresses,
}

/// One function on the stack: its return address, and whether its library is left out.
pub(super) struct WalkedFrame {
    pub(super) address: u64,
    pub(super) is_skipped: bool,
}

const WAYS: usize = 4;
const SETS: usize = 128;

pub(super) struct Unwinder {
    /// A cache by address: sets of [`WAYS`] rules, the latest first. Address 0 means an empty entry.
    rules: Box<[(u64, UnwindRule)]>,
    context: Box<UnwindContext<usize, InPlace>>,
    /// An address in each function of this walk, and the end of its frame.
    frames: Box<[(u64, u64)]>,
}

impl Unwinder {
    /// Allocates all memory that walks will ever use.
    pub(super) fn new() -> Self {
        let empty = UnwindRule {
            end: Location { base: Base::StackPointer, words: 0 },
            is_read: false,
            is_skipped: false,
            registers: [SavedRegister::Unknown; CALLEE_SAVED.len()],
        };
        Self {
            rules: vec![(0, empty); WAYS * SETS].into(),
            context: Box::new(UnwindContext::new_in()),
            frames: vec![(0, 0); MAX_DEPTH].into(),
        }
    }

    /// Empties the cache.
    pub(super) fn clear(&mut self) {
        self.rules.iter_mut().for_each(|(address, _)| *address = 0);
    }

    /// Calls `visit` with each function around `start`, innermost first, until the end of the stack or until `visit` returns `false`.
    /// Returns `None` if a function has no table or an unusual one, or if `read` returns `None`.
    ///
    /// # Safety
    /// The files of the functions on this stack must be loaded as in `modules`, and must not be unloaded during the walk.
    pub(super) unsafe fn walk(
        &mut self,
        modules: &Modules,
        start: &WalkStart,
        mut read: impl FnMut(u64) -> Option<u64>,
        mut visit: impl FnMut(WalkedFrame) -> bool,
    ) -> Option<()> {
        let (mut address, mut sp) = (start.pc, start.sp);
        // A return address is the address after the call, which may be in the next function. Therefore the address before it is looked up
        // in the table.
        let mut inside = start.pc;
        for depth in 0..MAX_DEPTH {
            // SAFETY: the address is on the stack.
            let &UnwindRule { end, is_read, is_skipped, ref registers } = unsafe { self.rule(modules, inside) }?;
            let returns = registers[usize::from(RETURN_ADDRESS)];
            if depth > 0 && !visit(WalkedFrame { address, is_skipped }) {
                break;
            }
            let end = match end.base {
                Base::Register(register) => {
                    // SAFETY: as above.
                    let at = unsafe { self.locate(modules, start, depth, register, &mut read) }?;
                    read(at)?
                }
                Base::StackPointer | Base::FrameEnd => sp,
            }
            .checked_add_signed(end.bytes())?;
            let end = if is_read { read(end)? } else { end };
            let is_innermost = depth == 0;
            // Only the innermost function may have no frame.
            if end < sp || end == sp && !is_innermost {
                return None;
            }
            self.frames[depth] = (inside, end);
            let at = match returns {
                SavedRegister::At(Location { base: Base::FrameEnd, words }) => {
                    end.checked_add_signed(i64::from(words) * 8)?
                }
                // Only the innermost function may have its return address in a register.
                SavedRegister::Unchanged if !is_innermost => return None,
                SavedRegister::Unchanged | SavedRegister::At(_) => {
                    // SAFETY: as above.
                    unsafe { self.locate(modules, start, depth + 1, RETURN_ADDRESS, &mut read) }?
                }
                SavedRegister::Unknown => break,
            };
            address = without_signature(read(at)?);
            if address == 0 {
                break;
            }
            (inside, sp) = (address - 1, end);
        }
        Some(())
    }

    /// Returns the address of the value that a register had in the function at this depth. The nearest function further inside that saved
    /// the register determines it.
    ///
    /// # Safety
    /// The same as for [`walk`](Self::walk).
    unsafe fn locate(
        &mut self,
        modules: &Modules,
        start: &WalkStart,
        depth: usize,
        register: u8,
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Option<u64> {
        for further in (0..depth).rev() {
            let (inside, end) = self.frames[further];
            // SAFETY: the address is on the stack.
            let saved = match unsafe { self.rule(modules, inside) }?.registers[usize::from(register)] {
                SavedRegister::Unchanged => continue,
                SavedRegister::At(saved) => saved,
                SavedRegister::Unknown => return None,
            };
            let base = match saved.base {
                Base::FrameEnd => end,
                Base::StackPointer => further.checked_sub(1).map_or(start.sp, |before| self.frames[before].1),
                Base::Register(other) => {
                    // SAFETY: as for this function.
                    let at = unsafe { self.locate(modules, start, further, other, read) }?;
                    read(at)?
                }
            };
            return base.checked_add_signed(saved.bytes());
        }
        Some(start.registers[usize::from(register)])
    }

    /// Returns the rule for an address, from the cache if it is there.
    ///
    /// # Safety
    /// The file with this address must be loaded as in `modules`, and must not be unloaded during the call.
    unsafe fn rule(&mut self, modules: &Modules, address: u64) -> Option<&UnwindRule> {
        let hash = address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let first = hash as usize % SETS * WAYS;
        let ways = &mut self.rules[first..first + WAYS];
        let known = ways.iter().position(|(known, _)| *known == address);
        let at = if let Some(known) = known {
            known
        } else {
            // SAFETY: required by this function's contract.
            let rule = unsafe { rule_for(modules.of(address)?, address, &mut self.context) }?;
            ways.rotate_right(1);
            ways[0] = (address, rule);
            0
        };
        Some(&ways[at].1)
    }
}

/// Returns a return address without its signature. Arm processors that sign return addresses put the signature into the
/// upper bits.
#[inline]
pub(super) fn without_signature(address: u64) -> u64 {
    #[cfg(target_arch = "aarch64")]
    let address = {
        let mut address = address;
        // SAFETY: `xpaclri`, which older processors ignore. It changes only x30.
        unsafe { std::arch::asm!("hint #7", inout("x30") address, options(pure, nomem, nostack, preserves_flags)) };
        address
    };
    address
}

#[cfg(test)]
mod tests;
