//! The callsites of scopes, by id.

use std::{
    borrow::Cow,
    collections::HashMap,
    panic::Location,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    derive::Callsite,
    model::{CallsiteId, GOLDEN, alike, name_in_line},
    report::SourceLine,
    settings::{Filter, Rule},
};

/// The largest number of names of one source location. A program may create an unlimited number of names.
const MAX_PER_LOCATION: usize = 1 << 10;
/// The largest number of names of all locations together.
const MAX_NAMES: usize = 1 << 16;
/// The largest number of overflow callsites of one source location. Each collects names that differ only in numbers.
const MAX_ALIKE_PER_LOCATION: usize = 1 << 4;

/// A line of the program, as the compiler names it. Not a `Location`, because one cannot be constructed for another library's macro.
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
    /// The index is the id minus 2.
    all: Vec<DefinedCallsite>,
    /// A name is one callsite wherever it is opened, because reports show only the name.
    by_name: HashMap<Box<str>, CallsiteId>,
    by_location: HashMap<CodeLine, LocationNames>,
    latest: LatestByAddress,
    /// Group ids, by name with `#` for numbers, or by location.
    alike: HashMap<Box<str>, u32>,
}

/// The callsites that were looked up last, by the address of their name, or by the address of the file name and the line. Hashing an
/// address is faster than hashing a name. Two callsites may share a slot, and the address may later contain another name, so the names are
/// compared.
struct LatestByAddress([CallsiteId; 256]);

impl Default for LatestByAddress {
    fn default() -> Self {
        Self([CallsiteId::NONE; 256])
    }
}

impl LatestByAddress {
    fn slot(ctx: Option<&str>, location: CodeLine) -> usize {
        let (address, more) = match ctx {
            Some(ctx) => (ctx.as_ptr().addr(), ctx.len()),
            None => (location.file.as_ptr().addr(), location.line as usize),
        };
        ((address ^ more.rotate_left(20)) as u64).wrapping_mul(GOLDEN).to_be_bytes()[0].into()
    }
}

/// The known facts of a callsite.
#[derive(Clone)]
pub(in crate::session) struct DefinedCallsite {
    pub(in crate::session) name: Option<Cow<'static, str>>,
    /// The place that opened it first.
    pub(in crate::session) location: CodeLine,
    /// The path of the module of a function under an attribute.
    pub(in crate::session) module: Option<&'static str>,
    /// Its setting in `GPUMEM`.
    rule: Rule,
    alike: u32,
    /// The number of its lines that were large enough to print.
    lines: u64,
}

/// The id of a callsite, with the settings for the output of its traces.
#[derive(Clone, Copy, Debug)]
pub(in crate::session) struct Numbered {
    pub(in crate::session) id: CallsiteId,
    pub(in crate::session) rule: Rule,
    /// Callsites whose names differ only in numbers have the same value.
    pub(in crate::session) alike: u32,
}

/// The callsites of one source location.
#[derive(Default)]
struct LocationNames {
    /// The number of names that this location used first.
    names: usize,
    unnamed: Option<CallsiteId>,
    /// The callsite for all further names, once there are too many.
    more: Option<CallsiteId>,
    /// The number of overflow callsites.
    alike: usize,
}

/// The callsites of a session.
#[derive(Default)]
pub(in crate::session) struct CallsiteTable(Mutex<Callsites>);

impl CallsiteTable {
    /// Returns the id of a callsite, and whether it is new. Equal callsites share an id.
    pub(in crate::session) fn number(
        &self,
        ctx: Option<&str>,
        location: CodeLine,
        module: Option<&'static str>,
        filter: &Filter,
    ) -> (Numbered, bool) {
        let mut callsites = self.lock();
        let known = callsites.all.len();
        let id = callsites.number(ctx, location, module, filter);
        let defined = callsites.get_mut(id);
        let (rule, alike) = defined.map_or_else(Default::default, |callsite| (callsite.rule, callsite.alike));
        (Numbered { id, rule, alike }, callsites.all.len() > known)
    }

    /// Counts a line of this callsite, and returns the number of earlier ones.
    pub(in crate::session) fn next_line(&self, id: CallsiteId) -> u64 {
        self.lock().get_mut(id).map_or(0, |callsite| {
            callsite.lines += 1;
            callsite.lines - 1
        })
    }

    /// Returns the modules and the names of all callsites, as filters match them.
    pub(in crate::session) fn names(&self) -> Vec<(Option<&'static str>, String)> {
        let name = |name: &Option<Cow<'static, str>>| name_in_line(name.as_deref().unwrap_or_default()).into_owned();
        self.lock().all.iter().map(|callsite| (callsite.module, name(&callsite.name))).collect()
    }

    /// Returns whether names like this one are merged, because a source line has too many names.
    pub(in crate::session) fn merges(&self, name: &str) -> bool {
        self.lock().by_name.contains_key(&*more_like(&alike(name)))
    }

    /// Returns the callsite with this id.
    pub(in crate::session) fn get(&self, number: CallsiteId) -> Callsite {
        Callsite::built_in(number).unwrap_or_else(|| {
            let DefinedCallsite { name, location, .. } = self.defined(number);
            Callsite { name, file: location.file.into(), line: location.line }
        })
    }

    /// Returns the definition of a callsite. Panics for the built-in callsites.
    pub(in crate::session) fn defined(&self, number: CallsiteId) -> DefinedCallsite {
        self.lock().all[number.0 as usize - 2].clone()
    }

    fn lock(&self) -> MutexGuard<'_, Callsites> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the name of the overflow callsite for such names.
fn more_like(numberless: &str) -> String {
    format!("(more names like {numberless})")
}

/// Returns the part of an overflow callsite's name that its names have in common.
pub(in crate::session) fn numberless_of(more: &str) -> Option<&str> {
    more.strip_prefix("(more names like ")?.strip_suffix(')')
}

impl Callsites {
    /// Returns `None` for the built-in callsites.
    fn get_mut(&mut self, id: CallsiteId) -> Option<&mut DefinedCallsite> {
        self.all.get_mut((id.0 as usize).checked_sub(2)?)
    }

    fn number(
        &mut self,
        ctx: Option<&str>,
        location: CodeLine,
        module: Option<&'static str>,
        filter: &Filter,
    ) -> CallsiteId {
        let ctx = ctx.filter(|ctx| !ctx.is_empty());
        let slot = LatestByAddress::slot(ctx, location);
        let latest = self.latest.0[slot];
        if self
            .get_mut(latest)
            .is_some_and(|known| known.name.as_deref() == ctx && (ctx.is_some() || known.location == location))
        {
            return latest;
        }
        let number = self.find_or_add(ctx, location, module, filter);
        self.latest.0[slot] = number;
        number
    }

    fn find_or_add(
        &mut self,
        ctx: Option<&str>,
        location: CodeLine,
        module: Option<&'static str>,
        filter: &Filter,
    ) -> CallsiteId {
        if let Some(known) = ctx.and_then(|ctx| self.by_name.get(ctx)) {
            return *known;
        }
        let Self { all, by_name, by_location, alike: known_alike, .. } = self;
        let place = by_location.entry(location).or_default();
        // Filters and groups use the name `like`.
        let mut add = |like: Option<&str>, name: Option<&str>| {
            let number = u32::try_from(all.len() + 2).map_or(CallsiteId::OTHERS, CallsiteId);
            let rule = filter.rule(module, &name_in_line(like.unwrap_or_default()));
            let numberless: Box<str> =
                like.map_or_else(|| SourceLine::from(location).to_string().into(), |like| alike(like).into());
            let next = u32::try_from(known_alike.len() + 1).unwrap_or(0);
            let alike = *known_alike.entry(numberless).or_insert(next);
            let name = name.map(|name| Cow::Owned(name.to_owned()));
            all.push(DefinedCallsite { name, location, module, rule, alike, lines: 0 });
            number
        };
        match ctx {
            None => *place.unnamed.get_or_insert_with(|| add(None, None)),
            Some(ctx) if place.names == MAX_PER_LOCATION || by_name.len() >= MAX_NAMES => {
                // The memory of all these names is counted together, so they are not part of the row `request #`, whose peak is that of a
                // single name.
                let numberless = alike(ctx);
                let more = more_like(&numberless);
                if let Some(known) = by_name.get(&*more) {
                    return *known;
                }
                if numberless != ctx && place.alike < MAX_ALIKE_PER_LOCATION {
                    place.alike += 1;
                    let number = add(Some(&numberless), Some(&more));
                    by_name.insert(more.into(), number);
                    return number;
                }
                *place.more.get_or_insert_with(|| {
                    let CodeLine { file, line, .. } = location;
                    let more = format!("(more names at {file}:{line})");
                    add(Some(&more), Some(&more))
                })
            }
            Some(ctx) => {
                place.names += 1;
                let number = add(Some(ctx), Some(ctx));
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
        let number = |ctx: Option<&str>, location| callsites.number(ctx, location, None, &Filter::default()).0.id;
        let (unnamed, named) = (number(None, here), number(Some("epoch"), here));
        assert_eq!((number(Some(""), here), number(Some("epoch"), here)), (unnamed, named));
        assert_ne!(unnamed, named);
        assert_eq!(callsites.get(named).to_string(), "epoch");
        assert!(callsites.get(unnamed).to_string().ends_with(&format!("callsites.rs:{}", here.line)));
        assert_ne!(number(None, CodeLine::of_caller()), unnamed, "another line");
        assert_eq!(number(Some("epoch"), CodeLine::of_caller()), named, "a name is one callsite at any line");
        let beside = CodeLine { column: here.column + 1, ..here };
        assert_ne!(number(None, beside), unnamed, "another column");
        assert_eq!(number(None, here), unnamed);
        let mut name = "step".to_owned();
        let (step, address) = (number(Some(&name), here), name.as_ptr());
        name.replace_range(.., "load");
        assert_eq!(name.as_ptr(), address);
        assert_ne!(number(Some(&name), here), step, "another name at the same address");
    }

    #[test]
    fn a_location_with_too_many_names_leaves_room_for_others() {
        let (callsites, here) = (CallsiteTable::default(), CodeLine::of_caller());
        let number = |ctx: Option<&str>, location| callsites.number(ctx, location, None, &Filter::default()).0.id;
        for name in 0..MAX_PER_LOCATION + 100 {
            number(Some(&name.to_string()), here);
        }
        assert_eq!(callsites.lock().all.len(), MAX_PER_LOCATION + 1);
        assert_eq!(callsites.get(number(Some("5000"), here)).to_string(), "(more names like #)");
        assert!(callsites.merges("6000") && !callsites.merges("step 6000"));
        let group = |ctx| callsites.number(Some(ctx), here, None, &Filter::default()).0.alike;
        assert_eq!(group("5000"), group("5"));
        // No single location may take all the space.
        for letter in "abcdefghijklmnopqrstuvwxyz".chars() {
            number(Some(&format!("{letter} 1")), here);
        }
        assert_eq!(callsites.lock().all.len(), MAX_PER_LOCATION + MAX_ALIKE_PER_LOCATION + 1);
        let late = number(Some("one more"), here);
        assert_eq!(callsites.get(late).to_string(), format!("(more names at {}:{})", here.file, here.line));
        let other = number(Some("validate"), CodeLine::of_caller());
        assert_eq!(callsites.get(other).to_string(), "validate");
        let known = number(Some("7"), here);
        assert_eq!(callsites.get(known).to_string(), "7");
    }
}
