//! What the numbers of scopes' sites stand for.

use std::{
    borrow::Cow,
    collections::HashMap,
    fmt,
    panic::Location,
    sync::{Mutex, MutexGuard, PoisonError},
};

use once_cell::sync::Lazy;

use crate::model::SiteId;

/// Names that are made while a program runs may be without end; more are known by their place alone.
const MOST: usize = 1 << 14;

/// Where a scope is opened, and under which name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub(crate) ctx: Option<Box<str>>,
    /// None is a site of this crate's own making.
    pub(crate) location: Option<&'static Location<'static>>,
}

impl Site {
    /// `src/main.rs:12`: nobody needs the column.
    pub(super) fn place(&self) -> Option<String> {
        self.location.map(|location| format!("{}:{}", location.file(), location.line()))
    }
}

#[derive(Default)]
struct Sites {
    /// By number, from 2 on.
    all: Vec<Site>,
    by_place: HashMap<&'static Location<'static>, Names>,
}

/// The sites of one place in the code: most have one name.
#[derive(Default)]
struct Names {
    unnamed: Option<SiteId>,
    named: HashMap<Box<str>, SiteId>,
}

static SITES: Lazy<Mutex<Sites>> = Lazy::new(Mutex::default);

fn sites() -> MutexGuard<'static, Sites> {
    SITES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of a site; the same each time.
pub(super) fn number(ctx: Option<&str>, location: &'static Location<'static>) -> SiteId {
    sites().number(ctx, location)
}

/// What a number stands for.
pub(super) fn site(number: SiteId) -> Site {
    sites().site(number)
}

impl Sites {
    fn number(&mut self, ctx: Option<&str>, location: &'static Location<'static>) -> SiteId {
        let Self { all, by_place } = self;
        let names = by_place.entry(location).or_default();
        let ctx = ctx.filter(|ctx| !ctx.is_empty());
        if let Some(known) = ctx.map_or(names.unnamed, |ctx| names.named.get(ctx).copied()) {
            return known;
        }
        let ctx = ctx.filter(|_| all.len() < MOST);
        if let (None, Some(unnamed)) = (ctx, names.unnamed) {
            return unnamed;
        }
        let Ok(number) = u32::try_from(all.len() + 2).map(SiteId) else { return SiteId::OTHERS };
        all.push(Site { ctx: ctx.map(Into::into), location: Some(location) });
        match ctx {
            Some(ctx) => {
                names.named.insert(ctx.into(), number);
            }
            None => names.unnamed = Some(number),
        }
        number
    }

    fn site(&self, number: SiteId) -> Site {
        let own = |name: &str| Site { ctx: Some(name.into()), location: None };
        match number {
            SiteId::NONE => own("(outside of all scopes)"),
            SiteId::OTHERS => own("(scopes too deep or too many to be told apart)"),
            SiteId(number) => self.all[number as usize - 2].clone(),
        }
    }
}

/// The name, else the place.
impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.ctx.as_deref().map(Cow::Borrowed);
        f.pad(&name.or_else(|| self.place().map(Cow::Owned)).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_has_one_number() {
        let (mut sites, here) = (Sites::default(), Location::caller());
        let (unnamed, named) = (sites.number(None, here), sites.number(Some("epoch"), here));
        assert_eq!((sites.number(Some(""), here), sites.number(Some("epoch"), here)), (unnamed, named));
        assert_ne!(unnamed, named);
        assert_eq!(sites.site(named).to_string(), "epoch");
        assert!(sites.site(unnamed).to_string().ends_with(&format!("sites.rs:{}", here.line())));
        assert_ne!(sites.number(None, Location::caller()), unnamed, "another line");
    }

    #[test]
    fn names_without_end_are_known_by_their_place() {
        let (mut sites, here) = (Sites::default(), Location::caller());
        for name in 0..MOST + 100 {
            sites.number(Some(&name.to_string()), here);
        }
        assert_eq!(sites.all.len(), MOST + 1);
        let late = sites.number(Some("one more"), here);
        assert_eq!(sites.site(late).ctx, None);
    }
}
