//! Where things come from, by number: what a number stands for is kept by the session, outside of the fold.

/// Where a scope was opened, and under which name. 0 is nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallsiteId(pub u32);

impl CallsiteId {
    pub const NONE: Self = Self(0);
    /// Stands for scopes that are too deep or too many to be told apart.
    pub const OTHERS: Self = Self(1);
}

/// The stack that a call was made from. 0 if nobody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    pub const NONE: Self = Self(0);
}
