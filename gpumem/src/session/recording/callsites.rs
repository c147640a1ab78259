//! What the numbers of scopes' callsites stand for.

use std::{
    borrow::Cow,
    collections::HashMap,
    panic::Location,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{derive::Callsite, model::CallsiteId};

/// Names that are made while a program runs may be without end: one place has so many, and all places together.
const MOST_PER_PLACE: usize = 1 << 10;
const MOST: usize = 1 << 16;

#[derive(Default)]
struct Callsites {
    /// By number, from 2 on.
    all: Vec<Callsite>,
    /// A name is the same scope wherever it is opened, as in the line of a report.
    by_name: HashMap<Box<str>, CallsiteId>,
    by_place: HashMap<&'static Location<'static>, Place>,
}

/// The callsites of one place in the code.
#[derive(Default)]
struct Place {
    /// Names that were first met here.
    names: usize,
    unnamed: Option<CallsiteId>,
    /// Stands for the names that are too many.
    more: Option<CallsiteId>,
}

/// The callsites of a session.
#[derive(Default)]
pub(in crate::session) struct CallsiteTable(Mutex<Callsites>);

impl CallsiteTable {
    /// The number of a callsite; the same each time.
    pub(in crate::session) fn number(&self, ctx: Option<&str>, location: &'static Location<'static>) -> CallsiteId {
        self.lock().number(ctx, location)
    }

    /// What a number stands for.
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
        let Self { all, by_name, by_place } = self;
        let place = by_place.entry(location).or_default();
        let mut add = |ctx: Option<Box<str>>| {
            let number = u32::try_from(all.len() + 2).map_or(CallsiteId::OTHERS, CallsiteId);
            let name = ctx.map(|ctx| Cow::Owned(ctx.into_string()));
            all.push(Callsite { name, file: location.file().into(), line: location.line() });
            number
        };
        match ctx {
            None => *place.unnamed.get_or_insert_with(|| add(None)),
            Some(_) if place.names == MOST_PER_PLACE || by_name.len() == MOST => *place.more.get_or_insert_with(|| {
                let (file, line) = (location.file(), location.line());
                add(Some(format!("(more names at {file}:{line})").into()))
            }),
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
    fn a_site_has_one_number() {
        let (mut callsites, here) = (Callsites::default(), Location::caller());
        let (unnamed, named) = (callsites.number(None, here), callsites.number(Some("epoch"), here));
        assert_eq!((callsites.number(Some(""), here), callsites.number(Some("epoch"), here)), (unnamed, named));
        assert_ne!(unnamed, named);
        assert_eq!(callsites.callsite(named).to_string(), "epoch");
        assert!(callsites.callsite(unnamed).to_string().ends_with(&format!("callsites.rs:{}", here.line())));
        assert_ne!(callsites.number(None, Location::caller()), unnamed, "another line");
        assert_eq!(callsites.number(Some("epoch"), Location::caller()), named, "a name is a name");
    }

    #[test]
    fn names_without_end_take_no_names_from_others() {
        let (mut callsites, here) = (Callsites::default(), Location::caller());
        for name in 0..MOST_PER_PLACE + 100 {
            callsites.number(Some(&name.to_string()), here);
        }
        assert_eq!(callsites.all.len(), MOST_PER_PLACE + 1);
        let late = callsites.number(Some("one more"), here);
        assert_eq!(callsites.callsite(late).to_string(), format!("(more names at {}:{})", here.file(), here.line()));
        let other = callsites.number(Some("validate"), Location::caller());
        assert_eq!(callsites.callsite(other).to_string(), "validate");
        let known = callsites.number(Some("7"), here);
        assert_eq!(callsites.callsite(known).to_string(), "7");
    }
}
