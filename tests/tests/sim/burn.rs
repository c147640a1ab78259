//! Runs the unit tests of those modules of `gpumem-burn` that do not depend on burn. The crate itself is outside the workspace.

#![allow(dead_code, unreachable_pub, reason = "burn's devices are the users")]

#[path = "../../../crates/burn/src/reservations.rs"]
mod reservations;
#[path = "../../../crates/burn/src/scopes.rs"]
mod scopes;
#[path = "../../../crates/burn/src/summary.rs"]
mod summary;

use self::scopes::Peak;
