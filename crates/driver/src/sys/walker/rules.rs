//! Rules for getting from a function to its caller: the decoded rows of a table.

use gimli::{
    CfaRule, EhFrame, Encoding, EndianSlice, NativeEndian, Operation, Register, RegisterRule, UnwindContextStorage,
    UnwindExpression, UnwindTableRow,
};

pub(super) type Bytes<'a> = EndianSlice<'a, NativeEndian>;

/// The registers that a function must preserve, by their numbers in the tables. The last one is the return address: a separate register, or
/// a word on the stack. For the innermost function they are in [`super::Registers`].
#[cfg(target_arch = "x86_64")]
pub(super) const CALLEE_SAVED: [u16; 7] = [3, 6, 12, 13, 14, 15, 16];
#[cfg(target_arch = "aarch64")]
pub(super) const CALLEE_SAVED: [u16; 12] = [19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30];
pub(super) const STACK_POINTER: u16 = if cfg!(target_arch = "x86_64") { 7 } else { 31 };
#[allow(clippy::cast_possible_truncation, reason = "processors have fewer registers")]
pub(super) const RETURN_ADDRESS: u8 = CALLEE_SAVED.len() as u8 - 1;

/// The address from which a location is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Base {
    /// The end of the frame: the stack pointer of the caller.
    FrameEnd,
    StackPointer,
    /// The value of one of [`CALLEE_SAVED`].
    Register(u8),
}

/// A distance from a base, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub(super) base: Base,
    pub(super) words: i16,
}

/// The location of a register's value in the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavedRegister {
    /// The value is in the register, because the function does not use it.
    Unchanged,
    At(Location),
    /// The value is not stored, or the table does not contain its location.
    Unknown,
}

/// The rule for getting from a function to its caller, at one address in the function.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnwindRule {
    pub(super) end: Location,
    /// True if the end of the frame is the word at this location, instead of the location itself.
    pub(super) is_read: bool,
    pub(super) is_skipped: bool,
    pub(super) registers: [SavedRegister; CALLEE_SAVED.len()],
}

/// Storage for the rows of a table, not on the heap. Functions that compilers generate do not save more registers.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct InPlace;

impl UnwindContextStorage<usize> for InPlace {
    type Rules = [(Register, RegisterRule<usize>); 24];
    type Stack = [UnwindTableRow<usize, Self>; 4];
}

impl Location {
    pub(super) fn bytes(self) -> i64 {
        i64::from(self.words) * 8
    }

    fn new(base: Base, bytes: i64) -> Option<Self> {
        let words = i16::try_from(bytes / 8).ok().filter(|_| bytes % 8 == 0)?;
        Some(Self { base, words })
    }

    /// Returns the location at a distance from a register, as in a table.
    fn from(register: Register, bytes: i64) -> Option<Self> {
        let base = match register.0 {
            STACK_POINTER => Base::StackPointer,
            register => Base::Register(u8::try_from(CALLEE_SAVED.iter().position(|kept| *kept == register)?).ok()?),
        };
        Self::new(base, bytes)
    }

    /// Returns the location that an expression computes, and whether the value is the word at that location. Compilers write such
    /// expressions for functions that align their frames.
    fn of(
        expression: &UnwindExpression<usize>,
        entries: &EhFrame<Bytes<'_>>,
        encoding: Encoding,
    ) -> Option<(Self, bool)> {
        let mut steps = expression.get(entries).ok()?.operations(encoding);
        let Operation::RegisterOffset { register, offset, .. } = steps.next().ok()?? else { return None };
        let is_read = match steps.next().ok()? {
            None => false,
            Some(Operation::Deref { size: 8, space: false, .. }) => true,
            Some(_) => return None,
        };
        let is_complete = steps.next().ok()?.is_none();
        Self::from(register, offset).filter(|_| is_complete).map(|place| (place, is_read))
    }
}

impl UnwindRule {
    pub(super) fn of(
        row: &UnwindTableRow<usize, InPlace>,
        entries: &EhFrame<Bytes<'_>>,
        encoding: Encoding,
        is_skipped: bool,
    ) -> Option<Self> {
        if row.register(Register(STACK_POINTER)).is_some() {
            return None;
        }
        let (end, is_read) = match row.cfa() {
            CfaRule::RegisterAndOffset { register, offset } => (Location::from(*register, *offset)?, false),
            CfaRule::Expression(expression) => Location::of(expression, entries, encoding)?,
        };
        let saved = |register: u16| match row.register(Register(register)) {
            None | Some(RegisterRule::SameValue) => SavedRegister::Unchanged,
            Some(RegisterRule::Offset(offset)) => {
                Location::new(Base::FrameEnd, offset).map_or(SavedRegister::Unknown, SavedRegister::At)
            }
            Some(RegisterRule::Expression(expression)) => match Location::of(&expression, entries, encoding) {
                Some((place, false)) => SavedRegister::At(place),
                _ => SavedRegister::Unknown,
            },
            // The value is not in memory. If the walk needs it, the walk ends.
            Some(_) => SavedRegister::Unknown,
        };
        let rule = Self { end, is_read, is_skipped, registers: CALLEE_SAVED.map(saved) };
        // This marks the outermost function of a stack. In any other function it means something that is not supported here.
        let is_end = row.register(Register(CALLEE_SAVED[usize::from(RETURN_ADDRESS)])) == Some(RegisterRule::Undefined);
        let returns = match rule.registers[usize::from(RETURN_ADDRESS)] {
            SavedRegister::At(_) => true,
            SavedRegister::Unknown => is_end,
            SavedRegister::Unchanged => cfg!(target_arch = "aarch64"),
        };
        returns.then_some(rule)
    }
}
