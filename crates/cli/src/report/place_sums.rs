//! Sums of bytes and blocks by scope, place and kind.

use std::collections::HashMap;

use gpumem_core::report::SharedNames;
use serde::Serialize;

use crate::history::{OriginSum, library_or_program};

/// Shown instead of the line for tensors that have none.
pub(crate) const NO_LINE: &str = "no line of Python (such as in the backward pass)";

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PlaceSum {
    pub(crate) scope: Vec<String>,
    /// The line, else the library or the place where the scope was opened.
    pub(crate) place: String,
    pub(crate) line: Option<String>,
    pub(crate) caller: Option<String>,
    pub(crate) library: Option<String>,
    pub(crate) kind: &'static str,
    pub(crate) bytes: i64,
    pub(crate) blocks: i64,
}

impl PlaceSum {
    pub(crate) fn library_or_program(&self) -> String {
        library_or_program(self.library.as_deref(), self.line.as_deref())
    }
}

/// Returns the sums by scope, place and kind, the largest first.
pub(crate) fn place_sums(held: &[OriginSum<'_>]) -> Vec<PlaceSum> {
    let mut all: Vec<PlaceSum> = Vec::new();
    let mut known = HashMap::new();
    for OriginSum { origin, bytes, blocks, .. } in held {
        let key = (&origin.path, origin.place(), &origin.caller, origin.kind);
        let at = *known.entry(key).or_insert(all.len());
        match all.get_mut(at) {
            Some(sum) => {
                sum.bytes += bytes;
                sum.blocks += blocks;
            }
            None => all.push(PlaceSum {
                scope: origin.path.clone(),
                place: origin.place(),
                line: origin.line.clone(),
                caller: origin.caller.clone(),
                library: origin.library.clone(),
                kind: origin.kind.name(),
                bytes: *bytes,
                blocks: *blocks,
            }),
        }
    }
    all.sort_by_key(|sum| std::cmp::Reverse(sum.bytes));
    all
}

/// Adds up the places of scopes whose names differ only in numbers, if there are many.
pub(crate) fn shared_sums(sums: &[PlaceSum]) -> Vec<PlaceSum> {
    let names = SharedNames::of(sums.iter().map(|sum| &*sum.scope));
    if !names.has_any() {
        return sums.to_vec();
    }
    let (mut all, mut known) = (Vec::<PlaceSum>::new(), HashMap::new());
    for sum in sums {
        let scope = names.path(&sum.scope).into_owned();
        let at = *known.entry((scope.clone(), &sum.place, &sum.caller, sum.kind)).or_insert(all.len());
        match all.get_mut(at) {
            Some(known) => {
                known.bytes += sum.bytes;
                known.blocks += sum.blocks;
            }
            None => all.push(PlaceSum { scope, ..sum.clone() }),
        }
    }
    all.sort_by_key(|sum| std::cmp::Reverse(sum.bytes));
    all
}
