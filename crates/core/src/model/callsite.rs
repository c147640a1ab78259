//! The ids of callsites and stacks. The ledger knows only these ids; the session or the recording knows what they mean.

/// The id of a scope in the program. It stands for the scope's full name, or for the source line where the scope is opened if it
/// has no name. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallsiteId(pub u32);

impl CallsiteId {
    /// No callsite.
    pub const NONE: Self = Self(0);
    /// The callsite that stands for all scopes beyond the limits of depth and number.
    pub const OTHERS: Self = Self(1);
}

/// The stack of a call. 0 if it was not recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack.
    pub const NONE: Self = Self(0);
}
