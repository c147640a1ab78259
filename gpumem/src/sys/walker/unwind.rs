//! Walks the calling thread's stack by the tables that compilers write for exceptions (`.eh_frame`), as the unwinder of the
//! system does, but keeps what it understood of a place in a cache. Where a table is missing or says something unusual, it
//! gives up: it never guesses.

use std::{ops::Range, ptr, slice};

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, Encoding, EndianSlice, FrameDescriptionEntry, NativeEndian, Operation,
    ParsedEhFrameHdr, Register, RegisterRule, UnwindContext, UnwindContextStorage, UnwindExpression, UnwindSection,
    UnwindTableRow, Vendor,
};

use super::modules::{Module, Modules};

type Bytes = EndianSlice<'static, NativeEndian>;

/// The registers that functions hand back as they got them, by the numbers of the tables; the last holds, or is, where a
/// function returns to. The first walked function finds them where [`super::Registers`] wrote them down.
#[cfg(target_arch = "x86_64")]
pub(super) const KEPT: [u16; 7] = [3, 6, 12, 13, 14, 15, 16];
#[cfg(target_arch = "aarch64")]
pub(super) const KEPT: [u16; 12] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30];
const STACK_POINTER: u16 = if cfg!(target_arch = "x86_64") { 7 } else { 31 };
#[allow(clippy::cast_possible_truncation, reason = "processors have fewer registers")]
const RETURNS: u8 = KEPT.len() as u8 - 1;

/// The farthest that a walk goes.
const MOST_WALKED: usize = 256;

/// What a place is counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    /// The frame's end: what the stack pointer is in the caller.
    Frame,
    Stack,
    /// The value of one of [`KEPT`].
    Kept(u8),
}

/// So many words from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    base: Base,
    words: i16,
}

/// Where the caller's value of a register is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Saved {
    /// Where it was: this function left it alone.
    Same,
    At(Place),
    Nowhere,
}

/// How to get from a function to its caller, at one place in it.
#[derive(Clone, Copy, Debug)]
struct Rule {
    end: Place,
    /// The frame's end is the word at that place.
    is_read: bool,
    is_skipped: bool,
    kept: [Saved; KEPT.len()],
}

/// Where the values of [`KEPT`] are.
pub(super) type Kept = [u64; KEPT.len()];

/// Where a walk begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start {
    pub(super) pc: u64,
    pub(super) sp: u64,
    pub(super) kept: Kept,
}

/// What a walk tells of a function: the address it is left at, and whether its library is one that nobody wants to see.
pub(super) struct Walked {
    pub(super) address: u64,
    pub(super) is_skipped: bool,
}

const WAYS: usize = 4;
const SETS: usize = 128;

pub(super) struct Unwinder {
    /// By address: sets of [`WAYS`], the newest first. Nothing is at address 0.
    rules: Box<[(u64, Rule)]>,
    context: Box<UnwindContext<usize, InPlace>>,
    /// Of each function that was walked: a place in it, and its frame's end.
    trail: Box<[(u64, u64)]>,
}

/// Room for the rows of a table without the heap. A function that saves more registers than this is not one of a
/// compiler's.
#[derive(Clone, PartialEq, Eq)]
struct InPlace;

impl UnwindContextStorage<usize> for InPlace {
    type Rules = [(Register, RegisterRule<usize>); 24];
    type Stack = [UnwindTableRow<usize, Self>; 4];
}

impl Unwinder {
    /// Allocates all that it will ever need.
    pub(super) fn new() -> Self {
        let nothing = Rule {
            end: Place { base: Base::Stack, words: 0 },
            is_read: false,
            is_skipped: false,
            kept: [Saved::Nowhere; KEPT.len()],
        };
        Self {
            rules: vec![(0, nothing); WAYS * SETS].into(),
            context: Box::new(UnwindContext::new_in()),
            trail: vec![(0, 0); MOST_WALKED].into(),
        }
    }

    /// Forgets what it understood of libraries.
    pub(super) fn clear(&mut self) {
        self.rules.iter_mut().for_each(|(address, _)| *address = 0);
    }

    /// Shows the functions around `start`, innermost first, until the end of the stack or until `show` has enough. `None`
    /// if it cannot go on before that, or if `read` refuses a word.
    pub(super) fn walk(
        &mut self,
        modules: &Modules,
        start: &Start,
        mut read: impl FnMut(u64) -> Option<u64>,
        mut show: impl FnMut(Walked) -> bool,
    ) -> Option<()> {
        let (mut address, mut sp) = (start.pc, start.sp);
        // A call returns behind itself, which may be in the next function already.
        let mut inside = start.pc;
        for depth in 0..MOST_WALKED {
            let &Rule { end, is_read, is_skipped, ref kept } = self.rule(modules, inside)?;
            let returns = kept[usize::from(RETURNS)];
            if depth > 0 && !show(Walked { address, is_skipped }) {
                break;
            }
            let end = match end.base {
                Base::Kept(register) => {
                    let at = self.place(modules, start, depth, register, &mut read)?;
                    read(at)?
                }
                Base::Stack | Base::Frame => sp,
            }
            .checked_add_signed(end.bytes())?;
            let end = if is_read { read(end)? } else { end };
            let is_innermost = depth == 0;
            // Only a function that called nobody may have no frame.
            if end < sp || end == sp && !is_innermost {
                return None;
            }
            self.trail[depth] = (inside, end);
            let at = match returns {
                Saved::At(Place { base: Base::Frame, words }) => end.checked_add_signed(i64::from(words) * 8)?,
                // The same holds of a function that leaves in a register where it returns to.
                Saved::Same if !is_innermost => return None,
                Saved::Same | Saved::At(_) => self.place(modules, start, depth + 1, RETURNS, &mut read)?,
                Saved::Nowhere => break,
            };
            address = without_signature(read(at)?);
            if address == 0 {
                break;
            }
            (inside, sp) = (address - 1, end);
        }
        Some(())
    }

    /// Where the value of a register is that the function so many frames from the innermost one was left with: the nearest
    /// function further inside that saved it says so.
    fn place(
        &mut self,
        modules: &Modules,
        start: &Start,
        depth: usize,
        register: u8,
        read: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Option<u64> {
        for further in (0..depth).rev() {
            let (inside, end) = self.trail[further];
            let saved = match self.rule(modules, inside)?.kept[usize::from(register)] {
                Saved::Same => continue,
                Saved::At(saved) => saved,
                Saved::Nowhere => return None,
            };
            let base = match saved.base {
                Base::Frame => end,
                Base::Stack => further.checked_sub(1).map_or(start.sp, |before| self.trail[before].1),
                Base::Kept(other) => {
                    let at = self.place(modules, start, further, other, read)?;
                    read(at)?
                }
            };
            return base.checked_add_signed(saved.bytes());
        }
        Some(start.kept[usize::from(register)])
    }
}

impl Place {
    fn bytes(self) -> i64 {
        i64::from(self.words) * 8
    }

    fn new(base: Base, bytes: i64) -> Option<Self> {
        let words = i16::try_from(bytes / 8).ok().filter(|_| bytes % 8 == 0)?;
        Some(Self { base, words })
    }

    /// As a table counts, from a register.
    fn from(register: Register, bytes: i64) -> Option<Self> {
        let base = match register.0 {
            STACK_POINTER => Base::Stack,
            register => Base::Kept(u8::try_from(KEPT.iter().position(|kept| *kept == register)?).ok()?),
        };
        Self::new(base, bytes)
    }

    /// What the expressions of compilers come to, where a function aligned its frame: a place, or the word that is there.
    fn of(expression: &UnwindExpression<usize>, entries: &EhFrame<Bytes>, encoding: Encoding) -> Option<(Self, bool)> {
        let mut steps = expression.get(entries).ok()?.operations(encoding);
        let Operation::RegisterOffset { register, offset, .. } = steps.next().ok()?? else { return None };
        let is_read = match steps.next().ok()? {
            None => false,
            Some(Operation::Deref { size: 8, space: false, .. }) => true,
            Some(_) => return None,
        };
        let is_whole = steps.next().ok()?.is_none();
        Self::from(register, offset).filter(|_| is_whole).map(|place| (place, is_read))
    }
}

impl Unwinder {
    /// The rule at an address, from the cache if it is there.
    fn rule(&mut self, modules: &Modules, address: u64) -> Option<&Rule> {
        let hash = address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let first = hash as usize % SETS * WAYS;
        let ways = &mut self.rules[first..first + WAYS];
        let known = ways.iter().position(|(known, _)| *known == address);
        let at = if let Some(known) = known {
            known
        } else {
            let rule = understand(modules.of(address)?, address, &mut self.context)?;
            ways.rotate_right(1);
            ways[0] = (address, rule);
            0
        };
        Some(&ways[at].1)
    }
}

/// What the tables of a module say of an address.
fn understand(module: &Module, address: u64, context: &mut UnwindContext<usize, InPlace>) -> Option<Rule> {
    let tables = Tables::of(module)?;
    let entry = tables.entry(address)?;
    if entry.is_signal_trampoline() || entry.cie().return_address_register() != Register(KEPT[usize::from(RETURNS)]) {
        return None;
    }
    let row = entry.unwind_info_for_address(&tables.entries, &tables.bases, context, address).ok()?;
    Rule::of(row, &tables.entries, entry.cie().encoding(), module.is_skipped)
}

/// The tables of a module.
struct Tables {
    bases: BaseAddresses,
    /// By address.
    index: ParsedEhFrameHdr<Bytes>,
    start: u64,
    entries: EhFrame<Bytes>,
}

impl Tables {
    fn of(module: &Module) -> Option<Self> {
        // SAFETY: the module is loaded: the list was compared with the loader's before this walk, and a function of the module
        // is on this thread's stack, so nobody unloads it meanwhile. The ranges are in a segment that is readable.
        let bytes = |range: Range<u64>| EndianSlice::new(unsafe { memory(range) }, NativeEndian);
        let bases = BaseAddresses::default().set_eh_frame_hdr(module.index.start);
        let index = EhFrameHdr::from(bytes(module.index.clone())).parse(&bases, 8).ok()?;
        let start = index.eh_frame_ptr().direct().ok()?;
        let mut entries = EhFrame::from(bytes(start..module.readable_up_to(start)?));
        entries.set_address_size(8);
        if cfg!(target_arch = "aarch64") {
            entries.set_vendor(Vendor::AArch64);
        }
        Some(Self { bases: bases.set_eh_frame(start), index, start, entries })
    }

    /// What is said of the function that an address is in, if it is in any: its rows say which addresses they are for.
    fn entry(&self, address: u64) -> Option<FrameDescriptionEntry<Bytes>> {
        let offset = self.index.table()?.lookup(address, &self.bases).ok()?.direct().ok()?.checked_sub(self.start)?;
        let offset = usize::try_from(offset).ok()?;
        self.entries.fde_from_offset(&self.bases, offset.into(), EhFrame::cie_from_offset).ok()
    }
}

/// What is in memory, from one address to another.
///
/// # Safety
/// It must be readable and not change for as long as the slice is used.
unsafe fn memory(range: Range<u64>) -> &'static [u8] {
    let length = address(range.end.saturating_sub(range.start));
    // SAFETY: the caller says so.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(address(range.start)), length) }
}

/// An address, or a length, of this process.
#[allow(clippy::cast_possible_truncation, reason = "this is not built where addresses are shorter")]
pub(super) fn address(word: u64) -> usize {
    word as usize
}

impl Rule {
    fn of(
        row: &UnwindTableRow<usize, InPlace>,
        entries: &EhFrame<Bytes>,
        encoding: Encoding,
        is_skipped: bool,
    ) -> Option<Self> {
        if row.register(Register(STACK_POINTER)).is_some() {
            return None;
        }
        let (end, is_read) = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => (Place::from(*register, *offset)?, false),
            CfaRule::Expression(expression) => Place::of(expression, entries, encoding)?,
        };
        let saved = |register: u16| match row.register(Register(register)) {
            None | Some(RegisterRule::SameValue) => Saved::Same,
            Some(RegisterRule::Offset(offset)) => Place::new(Base::Frame, offset).map_or(Saved::Nowhere, Saved::At),
            Some(RegisterRule::Expression(expression)) => match Place::of(&expression, entries, encoding) {
                Some((place, false)) => Saved::At(place),
                _ => Saved::Nowhere,
            },
            // A value that is nowhere in memory: nobody needs it, or the walk ends when somebody does.
            Some(_) => Saved::Nowhere,
        };
        let rule = Self { end, is_read, is_skipped, kept: KEPT.map(saved) };
        // The tables say so where a stack ends. Anything else is said of a function that this does not understand.
        let is_end = row.register(Register(KEPT[usize::from(RETURNS)])) == Some(RegisterRule::Undefined);
        let returns = match rule.kept[usize::from(RETURNS)] {
            Saved::At(_) => true,
            Saved::Nowhere => is_end,
            Saved::Same => cfg!(target_arch = "aarch64"),
        };
        returns.then_some(rule)
    }
}

/// A return address as a branch would use it: processors that sign them have the signature in the upper bits.
fn without_signature(address: u64) -> u64 {
    #[cfg(target_arch = "aarch64")]
    let address = {
        let mut address = address;
        // SAFETY: `xpaclri`, which older processors take for a hint that says nothing. It changes x30 alone.
        unsafe { std::arch::asm!("hint #7", inout("x30") address, options(pure, nomem, nostack, preserves_flags)) };
        address
    };
    address
}

#[cfg(test)]
mod tests;
