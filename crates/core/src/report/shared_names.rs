//! One name for scopes whose names differ only in numbers.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
};

use crate::model::alike;

/// At most this many names that differ only in numbers have separate rows. If there are more, they share one.
pub const MOST_ALIKE: usize = 16;

/// The names of scopes in the rows of a report: if more than [`MOST_ALIKE`] names in one scope differ only in numbers, such as
/// `request 17`, they become one name, `request #`.
#[derive(Debug, Default)]
pub struct SharedNames<'a> {
    /// The scopes, by their outer scope and by name. The outer scope of the outermost ones is 0.
    scopes: HashMap<(usize, &'a str), usize>,
    /// The names of the scopes that share a name.
    shared: HashMap<usize, Cow<'a, str>>,
}

impl<'a> SharedNames<'a> {
    /// Finds the names that the scopes of these paths share.
    pub fn of(paths: impl IntoIterator<Item = &'a [String]>) -> Self {
        let paths: Vec<_> = paths.into_iter().collect();
        let mut names = Self::default();
        let has_number = |name: &String| name.bytes().any(|byte| byte.is_ascii_digit());
        if !paths.iter().any(|path| path.iter().any(has_number)) {
            return names;
        }
        // The scopes of each depth, with the scope around them.
        let mut depths: Vec<Vec<(usize, &'a str, usize)>> = Vec::new();
        for path in paths {
            let mut around = 0;
            for (depth, name) in path.iter().enumerate() {
                let next = names.scopes.len() + 1;
                let scope = *names.scopes.entry((around, name)).or_insert(next);
                if scope == next {
                    depths.resize_with(depths.len().max(depth + 1), Vec::new);
                    depths[depth].push((around, name, scope));
                }
                around = scope;
            }
        }
        // Scopes inside scopes that share a name also share a row, so the rows of outer scopes are determined first.
        let mut row_of = vec![0; names.scopes.len() + 1];
        let mut rows: HashMap<(usize, Cow<'a, str>), usize> = HashMap::new();
        for scopes in depths {
            let mut like: HashMap<(usize, Cow<'a, str>), HashSet<&'a str>> = HashMap::new();
            for (around, name, _) in &scopes {
                like.entry((row_of[*around], alike(name))).or_default().insert(name);
            }
            for (around, name, scope) in scopes {
                let mut key = (row_of[around], alike(name));
                if like.get(&key).is_some_and(|names| names.len() > MOST_ALIKE) {
                    names.shared.insert(scope, key.1.clone());
                } else {
                    key.1 = Cow::Borrowed(name);
                }
                let next = rows.len() + 1;
                row_of[scope] = *rows.entry(key).or_insert(next);
            }
        }
        names
    }

    /// Returns whether scopes share a name.
    pub fn has_any(&self) -> bool {
        !self.shared.is_empty()
    }

    /// Returns the path as it appears in the rows of the report.
    pub fn path<'p>(&self, path: &'p [String]) -> Cow<'p, [String]> {
        if !self.has_any() {
            return Cow::Borrowed(path);
        }
        let mut around = Some(0);
        let name = |name: &String| {
            around = around.and_then(|around| self.scopes.get(&(around, name.as_str())).copied());
            around.and_then(|scope| self.shared.get(&scope)).map_or_else(|| name.clone(), ToString::to_string)
        };
        path.iter().map(name).collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_that_differ_in_numbers_are_one() {
        let path = |text: String| text.split('/').map(str::to_owned).collect::<Vec<_>>();
        let mut paths: Vec<_> =
            (0..17).map(|number| path(format!("request {number}/token {number}/decode 1"))).collect();
        paths.extend((0..16).map(|number| path(format!("load {number}"))));
        paths.push(path("other/request 1".to_owned()));
        let names = SharedNames::of(paths.iter().map(Vec::as_slice));
        let shown = |text: &str| names.path(&path(text.to_owned())).join("/");
        for (text, expected) in [
            // Each token is in a different request.
            ("request 3/token 3/decode 1", "request #/token #/decode 1"),
            ("load 3", "load 3"),
            ("other/request 1", "other/request 1"),
            ("unknown 1/request 1", "unknown 1/request 1"),
        ] {
            assert_eq!(shown(text), expected);
        }
        assert!(!SharedNames::of([&path("a 1/b 2".to_owned())[..]]).has_any());
    }
}
