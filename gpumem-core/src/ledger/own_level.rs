//! The counts of a scope that counts only its own allocations.

use std::collections::HashMap;

use crate::model::{NumberHashBuilder, OwnerThread, ScopeId};

/// The scopes of each owner thread that count by themselves.
pub(super) type OwnScopes = HashMap<OwnerThread, Vec<ScopeId>, NumberHashBuilder>;

/// The counts of a scope that counts only its own allocations.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnLevel {
    /// The bytes above those that the process had in use when the other trace opened.
    pub(super) in_use: i64,
    /// The highest value since the scope began.
    pub(super) peak: i64,
    /// The scope counted the whole process before the event with this number.
    pub(super) whole_before: u64,
}
