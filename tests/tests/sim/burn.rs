//! The part of `gpumem-burn` that needs no burn, with its unit tests. The crate itself is outside of the workspace.

#![allow(dead_code, unreachable_pub, reason = "burn's devices are the users")]

#[path = "../../../crates/burn/src/reservations.rs"]
mod reservations;
#[path = "../../../crates/burn/src/scopes.rs"]
mod scopes;
#[path = "../../../crates/burn/src/summary.rs"]
mod summary;

use self::scopes::Peak;
