//! Finds the imports between the files of a crate, from the tokens of its sources.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

/// The files of one crate, and their imports.
pub(crate) struct Imports {
    /// The paths are relative to the folder of the sources.
    pub(crate) files: Vec<String>,
    /// Each pair is a file that imports and the file that defines the imported item.
    pub(crate) edges: BTreeSet<(usize, usize)>,
}

/// A path of modules, from the root of the crate.
type ModulePath = Vec<String>;

/// One module: a file, or a part of one.
#[derive(Default)]
struct Module {
    file: usize,
    children: BTreeSet<String>,
    definitions: BTreeSet<String>,
    /// The meaning of each name that the module imports or re-exports.
    aliases: BTreeMap<String, Vec<String>>,
    /// The modules from which this module imports all names.
    globs: Vec<Vec<String>>,
}

/// A path in the code of a module.
struct Reference {
    file: usize,
    module: ModulePath,
    path: Vec<String>,
}

enum Target {
    Module(ModulePath),
    /// An item that this file defines.
    Item(usize),
}

#[derive(Default)]
struct Crate<'a> {
    sources: BTreeMap<&'a str, &'a str>,
    files: Vec<String>,
    modules: BTreeMap<ModulePath, Module>,
    references: Vec<Reference>,
}

/// Reads a crate from the name of each file, relative to `lib.rs`, and its text. Modules for tests only are left out.
pub(crate) fn imports_of<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>) -> Imports {
    let mut read = Crate { sources: sources.into_iter().collect(), ..Crate::default() };
    read.add_file(&ModulePath::new(), Some("lib.rs".to_owned()));
    let edges = read.references.iter().filter_map(|reference| {
        let definer = match read.resolve(&reference.module, &reference.path, 0)? {
            Target::Item(file) => file,
            // The path names a module and nothing in it.
            Target::Module(_) => return None,
        };
        Some((reference.file, definer)).filter(|(from, to)| from != to)
    });
    let edges = edges.collect();
    Imports { files: read.files, edges }
}

/// Returns the names that code uses below the root of its crate, two names deep: `a::b` of `crate::a::b::c`. Macros are left out.
pub(crate) fn named_below_root(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for tokens in groups(code.parse().expect("it is Rust")) {
        for at in (0..tokens.len()).filter(|at| word(&tokens, *at).is_some_and(|word| word == "crate")) {
            let (path, next) = path_at(&tokens, at + 3);
            if !is_colons(&tokens, at + 1) || is_punct(tokens.get(next), '!') {
                continue;
            }
            // The tree of a `use`.
            let tree = if path.is_empty() { next } else { next + 2 };
            let has_tree = path.is_empty() || is_colons(&tokens, next);
            let paths = match tokens.get(tree).filter(|_| has_tree) {
                Some(group @ TokenTree::Group(_)) => leaves(&path, std::slice::from_ref(group)),
                _ => vec![(path, String::new())],
            };
            found.extend(paths.iter().map(|(path, _)| path[..path.len().min(2)].join("::")));
        }
    }
    found
}

/// Returns the tokens of some code, and those in each pair of brackets.
fn groups(tokens: TokenStream) -> Vec<Vec<TokenTree>> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let inside = |token: &TokenTree| if let TokenTree::Group(group) = token { groups(group.stream()) } else { vec![] };
    let inside: Vec<_> = tokens.iter().flat_map(inside).collect();
    [vec![tokens], inside].concat()
}

impl Crate<'_> {
    /// Adds the file of a module. `named` is the file that an attribute `#[path]` names, which must be in the folder of `lib.rs`.
    fn add_file(&mut self, module: &[String], named: Option<String>) {
        let path = module.join("/");
        let candidates = [named.unwrap_or_default(), format!("{path}.rs"), format!("{path}/mod.rs")];
        let name = candidates.into_iter().find(|name| self.sources.contains_key(name.as_str()));
        let name = name.unwrap_or_else(|| panic!("no file of the module {module:?}"));
        let text = self.sources[name.as_str()];
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
        self.files.push(name);
        let file = self.files.len() - 1;
        // A module may also be inline, for another system.
        self.modules.insert(module.to_vec(), Module { file, ..Module::default() });
        self.add_tokens(file, module, tokens, true);
    }

    fn module(&mut self, file: usize, path: &[String]) -> &mut Module {
        self.modules.entry(path.to_vec()).or_insert_with(|| Module { file, ..Module::default() })
    }

    fn add_tokens(&mut self, file: usize, module: &[String], tokens: TokenStream, is_items: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let (mut at, mut is_public, mut named) = (0, false, None);
        while at < tokens.len() {
            let word = word(&tokens, at);
            match (word.as_deref(), &tokens[at]) {
                (None, TokenTree::Punct(punct)) if punct.as_char() == '#' && is_test_only(tokens.get(at + 1)) => {
                    at = end_of_item(&tokens, at + 2);
                    continue;
                }
                (None, TokenTree::Punct(punct))
                    if punct.as_char() == '#' && path_attribute(tokens.get(at + 1)).is_some() =>
                {
                    named = path_attribute(tokens.get(at + 1));
                    at += 2;
                    continue;
                }
                (Some("mod"), _) if is_items => {
                    let name = self::word(&tokens, at + 1).expect("a module has a name");
                    let child = [module, std::slice::from_ref(&name)].concat();
                    self.module(file, module).children.insert(name);
                    match &tokens[at + 2] {
                        TokenTree::Group(body) => {
                            self.module(file, &child);
                            self.add_tokens(file, &child, body.stream(), true);
                        }
                        _ => self.add_file(&child, named.take()),
                    }
                    at += 3;
                    is_public = false;
                    continue;
                }
                (Some("use"), _) => {
                    let end = (at..tokens.len()).find(|end| is_punct(tokens.get(*end), ';')).unwrap_or(tokens.len());
                    self.add_use(file, module, &tokens[at + 1..end], is_public);
                    at = end + 1;
                    is_public = false;
                    continue;
                }
                (Some("pub"), _) => {
                    is_public = true;
                    // `pub(crate)`, `pub(in a::b)`
                    let is_restricted = matches!(tokens.get(at + 1), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
                    at += if is_restricted { 2 } else { 1 };
                    continue;
                }
                (Some("struct" | "enum" | "trait" | "fn" | "const" | "static" | "type" | "union"), _) if is_items => {
                    if let Some(name) = self::word(&tokens, at + 1) {
                        self.module(file, module).definitions.insert(name);
                    }
                }
                (Some(_), _) if is_path_start(&tokens, at) => {
                    let (path, next) = path_at(&tokens, at);
                    let is_macro = is_punct(tokens.get(next), '!');
                    if path.len() > 1 && !is_macro {
                        self.references.push(Reference { file, module: module.to_vec(), path });
                    }
                    at = next;
                    is_public = false;
                    continue;
                }
                (None, TokenTree::Group(group)) => self.add_tokens(file, module, group.stream(), false),
                _ => {}
            }
            is_public = false;
            at += 1;
        }
    }

    /// Adds the paths of a `use`. A re-export (`pub use`) is not an import: a file that uses an item through it imports the file
    /// that defines the item.
    fn add_use(&mut self, file: usize, module: &[String], tree: &[TokenTree], is_public: bool) {
        for (path, alias) in leaves(&[], tree) {
            if alias == "*" {
                self.module(file, module).globs.push(path.clone());
            } else {
                self.module(file, module).aliases.insert(alias, path.clone());
            }
            if !is_public {
                self.references.push(Reference { file, module: module.to_vec(), path });
            }
        }
    }

    fn resolve(&self, module: &[String], path: &[String], depth: usize) -> Option<Target> {
        // Two modules may import all names of each other.
        if depth > 16 {
            return None;
        }
        let (mut here, mut rest) = (module.to_vec(), path);
        let mut is_relative = true;
        loop {
            match rest {
                [first, after @ ..] if first == "crate" => (here, rest) = (ModulePath::new(), after),
                [first, after @ ..] if first == "self" => rest = after,
                [first, after @ ..] if first == "super" => {
                    here.pop();
                    rest = after;
                }
                _ => break,
            }
            is_relative = false;
        }
        for (at, name) in rest.iter().enumerate() {
            let module = self.modules.get(&here)?;
            if module.children.contains(name) {
                here.push(name.clone());
                continue;
            }
            let rest = &rest[at + 1..];
            if let Some(alias) = module.aliases.get(name) {
                return match self.resolve_alias(&here, name, alias, depth)? {
                    Target::Module(target) if !rest.is_empty() => self.resolve(&target, &with_self(rest), depth + 1),
                    target => Some(target),
                };
            }
            if module.definitions.contains(name) {
                return Some(Target::Item(module.file));
            }
            let of_globs = module.globs.iter().find_map(|glob| {
                let Target::Module(target) = self.resolve(&here, glob, depth + 1)? else { return None };
                let known = self.modules.get(&target)?;
                let has = known.definitions.contains(name) || known.aliases.contains_key(name);
                has.then(|| self.resolve(&target, &with_self(std::slice::from_ref(name)), depth + 1)).flatten()
            });
            if of_globs.is_some() {
                return of_globs;
            }
            // The first name of a path may be a crate, a variant or a parameter. A macro of the module may define other names.
            let is_unknown = at == 0 && is_relative || here.is_empty();
            return (!is_unknown).then_some(Target::Item(module.file));
        }
        Some(Target::Module(here))
    }

    /// Resolves a name that a module imports. The name may be a crate's, which is imported under its own name.
    fn resolve_alias(&self, module: &[String], name: &str, alias: &[String], depth: usize) -> Option<Target> {
        let is_itself = alias.len() == 1 && alias[0] == name;
        if is_itself { None } else { self.resolve(module, alias, depth + 1) }
    }
}

fn with_self(path: &[String]) -> Vec<String> {
    [&["self".to_owned()], path].concat()
}

/// Returns the paths of a `use`, and the name that each gets in the module.
fn leaves(before: &[String], tree: &[TokenTree]) -> Vec<(Vec<String>, String)> {
    let mut path = before.to_vec();
    let mut at = 0;
    while at < tree.len() {
        match &tree[at] {
            TokenTree::Group(group) => {
                let tokens: Vec<TokenTree> = group.stream().into_iter().collect();
                return tokens.split(|token| is_punct(Some(token), ',')).flat_map(|part| leaves(&path, part)).collect();
            }
            TokenTree::Punct(punct) if punct.as_char() == '*' => return vec![(path, "*".to_owned())],
            TokenTree::Ident(ident) if ident == "as" => {
                let alias = word(tree, at + 1).unwrap_or_default();
                return vec![(path, alias)];
            }
            // `a::{self, b}`
            TokenTree::Ident(ident) if ident == "self" && !path.is_empty() => {}
            TokenTree::Ident(ident) => path.push(ident.to_string()),
            _ => {}
        }
        at += 1;
    }
    path.last().cloned().map(|name| (path, name)).into_iter().collect()
}

/// Returns the names of the path that starts here, and the index after it.
fn path_at(tokens: &[TokenTree], at: usize) -> (Vec<String>, usize) {
    let (mut path, mut next) = (Vec::new(), at);
    while let Some(name) = word(tokens, next) {
        path.push(name);
        next += 1;
        if !(is_colons(tokens, next) && word(tokens, next + 2).is_some()) {
            break;
        }
        next += 2;
    }
    (path, next)
}

fn is_path_start(tokens: &[TokenTree], at: usize) -> bool {
    let is_after_colons = at >= 2 && is_colons(tokens, at - 2);
    let is_after_dot = at >= 1 && is_punct(tokens.get(at - 1), '.');
    !is_after_colons && !is_after_dot
}

fn is_colons(tokens: &[TokenTree], at: usize) -> bool {
    let is_joint = matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':' && punct.spacing() == Spacing::Joint);
    is_joint && is_punct(tokens.get(at + 1), ':')
}

fn is_punct(token: Option<&TokenTree>, c: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == c)
}

fn word(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at) {
        Some(TokenTree::Ident(ident)) => Some(ident.to_string()),
        _ => None,
    }
}

/// Returns whether these are the brackets of `#[cfg(test)]` or `#[cfg(all(test, …))]`.
fn is_test_only(attribute: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = attribute else { return false };
    let text: String = group.stream().to_string().split_whitespace().collect();
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// Returns the file in `#[path = "…"]`.
fn path_attribute(attribute: Option<&TokenTree>) -> Option<String> {
    let Some(TokenTree::Group(group)) = attribute else { return None };
    let text = group.stream().to_string();
    let (_, value) = text.split_once('=').filter(|(name, _)| name.trim() == "path")?;
    Some(value.trim().trim_matches('"').to_owned())
}

/// Returns the index after the item that starts here: after its `;` or its braces.
fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        token => is_punct(Some(token), ';'),
    };
    let end = tokens[at..].iter().position(is_end);
    // The braces of a `use` are followed by its `;`.
    let end = end.map_or(tokens.len(), |end| at + end + 1);
    if is_punct(tokens.get(end), ';') { end + 1 } else { end }
}
