//! The origins of blocks as text.

use std::collections::HashMap;

use gpumem_core::{
    derive::{LedgerView, Names, Paths},
    ledger::AllocGroup,
    model::{MemKind, StackId},
    report::{path_in_words, place_in_words},
};
use gpumem_recording::Definitions;

/// Where blocks come from: the scope, the stack, and the kind of memory.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// The path of scopes, the outermost first.
    pub(crate) path: Vec<String>,
    /// The library that allocated, unless the program itself did.
    pub(crate) library: Option<String>,
    /// The user's line, unless the library is shown instead.
    pub(crate) line: Option<String>,
    /// The line that called the function that contains the user's line.
    pub(crate) caller: Option<String>,
    /// The place where the innermost scope was opened.
    pub(crate) scope_place: Option<String>,
    pub(crate) kind: MemKind,
    pub(crate) stack: StackId,
}

/// Subtracts `cost` from `left`. Returns false if less is left.
pub(crate) fn pay(left: &mut u64, cost: u64) -> bool {
    let rest = left.checked_sub(cost);
    *left = rest.unwrap_or(0);
    rest.is_some()
}

impl Origin {
    /// An origin whose names would take too much memory.
    pub(crate) fn unnamed(kind: MemKind) -> Self {
        Self {
            path: Vec::new(),
            library: Some("(too many long names)".to_owned()),
            line: None,
            caller: None,
            scope_place: None,
            kind,
            stack: StackId::NONE,
        }
    }

    pub(crate) fn of(group: &AllocGroup, paths: &Paths, definitions: &Definitions) -> Self {
        let stack = definitions.stack(group.stack);
        let has_library_as_place = stack.library_as_place().is_some();
        Self {
            path: paths.names_of(group.node),
            caller: stack.caller.filter(|_| !has_library_as_place),
            line: stack.line.filter(|_| !has_library_as_place),
            library: stack.library,
            scope_place: paths.place_of(group.node),
            kind: group.kind,
            stack: group.stack,
        }
    }

    /// Returns the line, else the library, else the place where the scope was opened.
    pub(crate) fn place(&self) -> String {
        let scope_place = self.scope_place.as_deref().filter(|_| !self.path.is_empty());
        let place = || place_in_words(None, scope_place);
        let known = self.line.clone().or_else(|| self.library.clone()).or_else(place);
        known.unwrap_or_else(|| "line not known".to_owned())
    }

    /// Returns whether the blocks are parts of PyTorch's expandable segments. Without a stack this cannot be ruled out.
    pub(crate) fn is_expandable_segment(&self) -> bool {
        let is_of_pytorch = self.library.as_ref().map_or(self.line.is_none(), |library| library == "PyTorch");
        self.kind == MemKind::Vmm && is_of_pytorch
    }

    pub(crate) fn scope(&self) -> String {
        path_in_words(&self.path)
    }

    pub(crate) fn library_or_program(&self) -> String {
        library_or_program(self.library.as_deref(), self.line.as_deref())
    }
}

/// Returns the name of the library. If only the line is known, the program allocated. Without a stack, the code that
/// allocated is not known.
pub(crate) fn library_or_program(library: Option<&str>, line: Option<&str>) -> String {
    library.or(line.map(|_| "the program")).unwrap_or("not known").to_owned()
}

/// The number of origins that can be found without a large table.
const RECENT: usize = 1 << 10;

/// Origins, by their group in the ledger.
#[derive(Debug, Default)]
pub(super) struct Origins {
    known: HashMap<AllocGroup, u32>,
    all: Vec<AllocGroup>,
    /// Some of the known origins, by a short hash. Looking here is faster than looking in the table.
    recent: Vec<Option<(AllocGroup, u32)>>,
}

impl Origins {
    /// Returns the id of an origin, and whether it is new.
    pub(super) fn number(&mut self, group: AllocGroup) -> (u32, bool) {
        self.recent.resize(RECENT, None);
        let at = (group.stack.0 as usize * 31 + group.kind as usize * 7 + group.node.0 as usize) % RECENT;
        if let Some((recent, number)) = self.recent[at]
            && recent == group
        {
            return (number, false);
        }
        let next = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        let number = *self.known.entry(group).or_insert(next);
        let is_new = number == next;
        if is_new {
            self.all.push(group);
        }
        self.recent[at] = Some((group, number));
        (number, is_new)
    }

    /// Returns the stack of an origin.
    pub(super) fn stack(&self, number: u32) -> StackId {
        self.all.get(number as usize).map_or(StackId::NONE, |group| group.stack)
    }

    /// Returns the origins with their names, which may take `left` bytes. Origins for which no bytes are left stay
    /// unnamed.
    pub(super) fn in_words(&self, ledger: &dyn LedgerView, definitions: &Definitions, left: &mut u64) -> Vec<Origin> {
        let paths = Paths::now(ledger, definitions);
        let origin = |group: &AllocGroup| {
            let length = paths.length_of(group.node) as u64 + definitions.length_of(group.stack);
            if pay(left, length) { Origin::of(group, &paths, definitions) } else { Origin::unnamed(group.kind) }
        };
        self.all.iter().map(origin).collect()
    }
}
