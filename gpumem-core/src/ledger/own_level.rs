//! What a scope counts by itself.

use std::collections::HashMap;

use super::live::hash::KeyHashBuilder;
use crate::model::{OwnerThread, ScopeId};

/// The scopes of each owner thread that count by themselves.
pub(super) type OwnScopes = HashMap<OwnerThread, Vec<ScopeId>, KeyHashBuilder>;

/// What a scope counts by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnLevel {
    /// On top of what the process had in use when the other trace opened.
    pub(super) in_use: i64,
    /// The most since the scope began.
    pub(super) peak: i64,
    /// The scope counted the whole process before the event with this number.
    pub(super) whole_before: u64,
}
