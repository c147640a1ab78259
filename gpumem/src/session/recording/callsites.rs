//! The callsites of scopes, by number.

use std::{
    borrow::Cow,
    collections::HashMap,
    panic::Location,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{derive::Callsite, model::CallsiteId};

/// The most names of one source location. A program may create names without end.
const MAX_PER_LOCATION: usize = 1 << 10;
/// The most names of all locations together.
const MAX_NAMES: usize = 1 << 16;

#[derive(Default)]
struct Callsites {
    /// The index is the number minus 2.
    all: Vec<Callsite>,
    /// A name is one callsite wherever it is opened, because reports show only the name.
    by_name: HashMap<Box<str>, CallsiteId>,
    by_location: HashMap<&'static Location<'static>, LocationNames>,
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
    /// The number of a callsite. Equal callsites have one number.
    pub(in crate::session) fn number(&self, ctx: Option<&str>, location: &'static Location<'static>) -> CallsiteId {
        self.lock().number(ctx, location)
    }

    /// The callsite with this number.
    pub(in crate::session) fn get(&self, number: CallsiteId) -> Callsite {
        self.lock().callsite(number)
    }

    fn lock(&self) -> MutexGuard<'_, Callsites> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Callsites {
    fn number(&mut self, ctx: Option<&str>, location: &'static Location<'static>) -> CallsiteId {
        let ctx = ctx.filter(|ctx| !ctx.is_empty());
        if let Some(known) = ctx.and_then(|ctx| self.by_name.get(ctx)) {
            return *known;
        }
        let Self { all, by_name, by_location } = self;
        let place = by_location.entry(location).or_default();
        let mut add = |ctx: Option<Box<str>>| {
            let number = u32::try_from(all.len() + 2).map_or(CallsiteId::OTHERS, CallsiteId);
            let name = ctx.map(|ctx| Cow::Owned(ctx.into_string()));
            all.push(Callsite { name, file: location.file().into(), line: location.line() });
            number
        };
        match ctx {
            None => *place.unnamed.get_or_insert_with(|| add(None)),
            Some(_) if place.names == MAX_PER_LOCATION || by_name.len() == MAX_NAMES => {
                *place.more.get_or_insert_with(|| {
                    let (file, line) = (location.file(), location.line());
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

    fn callsite(&self, number: CallsiteId) -> Callsite {
        Callsite::built_in(number).unwrap_or_else(|| self.all[number.0 as usize - 2].clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callsite_has_one_number() {
        let (mut callsites, here) = (Callsites::default(), Location::caller());
        let (unnamed, named) = (callsites.number(None, here), callsites.number(Some("epoch"), here));
        assert_eq!((callsites.number(Some(""), here), callsites.number(Some("epoch"), here)), (unnamed, named));
        assert_ne!(unnamed, named);
        assert_eq!(callsites.callsite(named).to_string(), "epoch");
        assert!(callsites.callsite(unnamed).to_string().ends_with(&format!("callsites.rs:{}", here.line())));
        assert_ne!(callsites.number(None, Location::caller()), unnamed, "another line");
        assert_eq!(callsites.number(Some("epoch"), Location::caller()), named, "a name is one callsite at any line");
    }

    #[test]
    fn a_location_with_too_many_names_leaves_room_for_others() {
        let (mut callsites, here) = (Callsites::default(), Location::caller());
        for name in 0..MAX_PER_LOCATION + 100 {
            callsites.number(Some(&name.to_string()), here);
        }
        assert_eq!(callsites.all.len(), MAX_PER_LOCATION + 1);
        let late = callsites.number(Some("one more"), here);
        assert_eq!(callsites.callsite(late).to_string(), format!("(more names at {}:{})", here.file(), here.line()));
        let other = callsites.number(Some("validate"), Location::caller());
        assert_eq!(callsites.callsite(other).to_string(), "validate");
        let known = callsites.number(Some("7"), here);
        assert_eq!(callsites.callsite(known).to_string(), "7");
    }
}
