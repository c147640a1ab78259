//! The callsites of scopes, by number.

use std::{
    borrow::Cow,
    collections::HashMap,
    hash::BuildHasherDefault,
    panic::Location,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{derive::Callsite, model::CallsiteId, report::SourceLine, source::AddressHasher};

/// The most names of one source location. A program may create names without end.
const MAX_PER_LOCATION: usize = 1 << 10;
/// The most names of all locations together.
const MAX_NAMES: usize = 1 << 16;

/// A line of the program, as the compiler names it. Not a `Location`, because that of another library's macro cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::session) struct CodeLine {
    pub(in crate::session) file: &'static str,
    pub(in crate::session) line: u32,
    pub(in crate::session) column: u32,
}

impl CodeLine {
    #[track_caller]
    pub(in crate::session) fn of_caller() -> Self {
        Location::caller().into()
    }
}

impl From<&'static Location<'static>> for CodeLine {
    fn from(location: &'static Location<'static>) -> Self {
        Self { file: location.file(), line: location.line(), column: location.column() }
    }
}

impl From<CodeLine> for SourceLine {
    fn from(CodeLine { file, line, column }: CodeLine) -> Self {
        Self::new(file, line, column)
    }
}

#[derive(Default)]
struct Callsites {
    /// The index is the number minus 2.
    all: Vec<DefinedCallsite>,
    /// A name is one callsite wherever it is opened, because reports show only the name.
    by_name: HashMap<Box<str>, CallsiteId>,
    by_location: HashMap<CodeLine, LocationNames>,
    /// The callsites without names, by the address of their file's name, the line and the column: hashing an address is faster than
    /// hashing the name. Equal names may have several addresses.
    unnamed_by_address: HashMap<(usize, u32, u32), CallsiteId, BuildHasherDefault<AddressHasher>>,
}

/// What is known of a callsite.
#[derive(Clone)]
pub(in crate::session) struct DefinedCallsite {
    pub(in crate::session) name: Option<Cow<'static, str>>,
    /// Where it was first opened.
    pub(in crate::session) location: CodeLine,
    /// The path of the module of a function under an attribute.
    #[cfg_attr(not(feature = "capture"), expect(dead_code, reason = "only recordings have it"))]
    pub(in crate::session) module: Option<&'static str>,
}

/// The callsites of one source location.
#[derive(Default)]
struct LocationNames {
    /// How many names were first used here.
    names: usize,
    unnamed: Option<CallsiteId>,
    /// The callsite of all further names, if there are too many.
    more: Option<CallsiteId>,
}

/// The callsites of a session.
#[derive(Default)]
pub(in crate::session) struct CallsiteTable(Mutex<Callsites>);

impl CallsiteTable {
    /// The number of a callsite, and whether it is new. Equal callsites have one number.
    pub(in crate::session) fn number(
        &self,
        ctx: Option<&str>,
        location: CodeLine,
        module: Option<&'static str>,
    ) -> (CallsiteId, bool) {
        let mut callsites = self.lock();
        let known = callsites.all.len();
        (callsites.number(ctx, location, module), callsites.all.len() > known)
    }

    /// The callsite with this number.
    pub(in crate::session) fn get(&self, number: CallsiteId) -> Callsite {
        Callsite::built_in(number).unwrap_or_else(|| {
            let DefinedCallsite { name, location, .. } = self.defined(number);
            Callsite { name, file: location.file.into(), line: location.line }
        })
    }

    /// All that is known of a callsite. Not for those that every session has.
    pub(in crate::session) fn defined(&self, number: CallsiteId) -> DefinedCallsite {
        self.lock().all[number.0 as usize - 2].clone()
    }

    fn lock(&self) -> MutexGuard<'_, Callsites> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Callsites {
    fn number(&mut self, ctx: Option<&str>, location: CodeLine, module: Option<&'static str>) -> CallsiteId {
        let ctx = ctx.filter(|ctx| !ctx.is_empty());
        if let Some(known) = ctx.and_then(|ctx| self.by_name.get(ctx)) {
            return *known;
        }
        let address = (location.file.as_ptr().addr(), location.line, location.column);
        if ctx.is_none()
            && let Some(known) = self.unnamed_by_address.get(&address)
        {
            return *known;
        }
        let Self { all, by_name, by_location, unnamed_by_address } = self;
        let place = by_location.entry(location).or_default();
        let mut add = |ctx: Option<Box<str>>| {
            let number = u32::try_from(all.len() + 2).map_or(CallsiteId::OTHERS, CallsiteId);
            let name = ctx.map(|ctx| Cow::Owned(ctx.into_string()));
            all.push(DefinedCallsite { name, location, module });
            number
        };
        match ctx {
            None => {
                let number = *place.unnamed.get_or_insert_with(|| add(None));
                unnamed_by_address.insert(address, number);
                number
            }
            Some(_) if place.names == MAX_PER_LOCATION || by_name.len() == MAX_NAMES => {
                *place.more.get_or_insert_with(|| {
                    let CodeLine { file, line, .. } = location;
                    add(Some(format!("(more names at {file}:{line})").into()))
                })
            }
            Some(ctx) => {
                place.names += 1;
                let number = add(Some(ctx.into()));
                by_name.insert(ctx.into(), number);
                number
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callsite_has_one_number() {
        let (callsites, here) = (CallsiteTable::default(), CodeLine::of_caller());
        let number = |ctx: Option<&str>, location| callsites.number(ctx, location, None).0;
        let (unnamed, named) = (number(None, here), number(Some("epoch"), here));
        assert_eq!((number(Some(""), here), number(Some("epoch"), here)), (unnamed, named));
        assert_ne!(unnamed, named);
        assert_eq!(callsites.get(named).to_string(), "epoch");
        assert!(callsites.get(unnamed).to_string().ends_with(&format!("callsites.rs:{}", here.line)));
        assert_ne!(number(None, CodeLine::of_caller()), unnamed, "another line");
        assert_eq!(number(Some("epoch"), CodeLine::of_caller()), named, "a name is one callsite at any line");
    }

    #[test]
    fn a_location_with_too_many_names_leaves_room_for_others() {
        let (callsites, here) = (CallsiteTable::default(), CodeLine::of_caller());
        let number = |ctx: Option<&str>, location| callsites.number(ctx, location, None).0;
        for name in 0..MAX_PER_LOCATION + 100 {
            number(Some(&name.to_string()), here);
        }
        assert_eq!(callsites.lock().all.len(), MAX_PER_LOCATION + 1);
        let late = number(Some("one more"), here);
        assert_eq!(callsites.get(late).to_string(), format!("(more names at {}:{})", here.file, here.line));
        let other = number(Some("validate"), CodeLine::of_caller());
        assert_eq!(callsites.get(other).to_string(), "validate");
        let known = number(Some("7"), here);
        assert_eq!(callsites.get(known).to_string(), "7");
    }
}
