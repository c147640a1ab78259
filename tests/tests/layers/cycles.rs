//! Tests that no file of a crate imports itself through others.
//!
//! An import is a path in the code of one file to something that another file of the crate defines: in a `use`, or anywhere else.
//! Three things are not imports:
//!
//! - `mod child;`, and a path that names only a module;
//! - a re-export (`pub use`). A path through a re-export is an import of the file that defines the item, so a parent can
//!   re-export what its children define, and the children can import each other through the parent;
//! - code for tests only (`#[cfg(test)]`).
//!
//! A child that uses what its parent's file defines imports the parent. Therefore a parent may either use its children, or define
//! what they use, but not both.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
};

use crate::{
    imports::{Imports, imports_of},
    source_files,
};

/// The folders of the crates without cycles.
const CRATES: [&str; 11] = [
    "crates/core",
    "crates/recording",
    "crates/driver",
    "gpumem",
    "crates/c",
    "gpumem-macros",
    "crates/inject",
    "crates/cli",
    "crates/estimate",
    "crates/metrics",
    "crates/tracing",
];

fn read(name: &str) -> Imports {
    let files: Vec<(String, String)> = source_files(name)
        .into_iter()
        .map(|(inside, path)| {
            (inside.to_string_lossy().replace('\\', "/"), fs::read_to_string(path).expect("sources are text"))
        })
        .collect();
    imports_of(files.iter().map(|(name, text)| (name.as_str(), text.as_str())))
}

/// Returns the shortest path from one file to another, both included.
fn way(edges: &BTreeSet<(usize, usize)>, from: usize, to: usize) -> Option<Vec<usize>> {
    let mut before = BTreeMap::from([(from, from)]);
    let mut queue = VecDeque::from([from]);
    while let Some(file) = queue.pop_front() {
        if file == to {
            let mut way = vec![to];
            while way[way.len() - 1] != from {
                way.push(before[&way[way.len() - 1]]);
            }
            way.reverse();
            return Some(way);
        }
        for (_, next) in edges.range((file, 0)..(file + 1, 0)) {
            before.entry(*next).or_insert_with(|| {
                queue.push_back(*next);
                file
            });
        }
    }
    None
}

/// Returns the cycles of the graph. Each contains an import that no cycle before it contains.
fn cycles(Imports { files, edges }: &Imports) -> Vec<String> {
    let mut found: Vec<Vec<usize>> = Vec::new();
    for (from, to) in edges {
        let is_in = |cycle: &Vec<usize>| cycle.windows(2).any(|pair| pair == [*from, *to]);
        if !found.iter().any(is_in)
            && let Some(back) = way(edges, *to, *from)
        {
            found.push([&[*from], &back[..]].concat());
        }
    }
    let name = |file: &usize| files[*file].as_str();
    found.iter().map(|cycle| cycle.iter().map(name).collect::<Vec<_>>().join(" -> ")).collect()
}

#[test]
fn no_file_imports_itself_through_others() {
    let found: Vec<_> = CRATES
        .iter()
        .flat_map(|name| cycles(&read(name)).into_iter().map(move |cycle| format!("{name}: {cycle}")))
        .collect();
    assert!(found.is_empty(), "these files import each other:\n{}", found.join("\n"));
}

/// Returns the imports of a crate with these files, as `from -> to`.
fn edges(files: &[(&str, &str)]) -> Vec<String> {
    let Imports { files, edges } = imports_of(files.iter().copied());
    edges.iter().map(|(from, to)| format!("{} -> {}", files[*from], files[*to])).collect()
}

#[test]
fn a_path_imports_the_file_that_defines_its_target() {
    let lib = ("lib.rs", "mod a; mod b; mod c; use other::thing;");
    let b = ("b/mod.rs", "mod deep; pub use self::deep::Deep; pub struct Shallow; #[cfg(test)] mod tests;");
    let deep = ("b/deep.rs", "pub struct Deep; pub fn run() {}");
    let c = ("c.rs", "pub mod inner { pub struct Inner; } make!(); pub use crate::b::*;");
    let imports_of_a = |a: &str| edges(&[lib, ("a.rs", a), b, deep, c]);
    for (a, expected) in [
        // The import goes through a re-export, or does not need one.
        ("use crate::b::Deep;", "b/deep.rs"),
        ("use crate::b::{self, Shallow as Other};", "b/mod.rs"),
        ("fn f() { crate::b::deep::run(); }", "b/deep.rs"),
        // The import goes through an imported module, through an alias, or through a glob.
        ("use crate::b::deep; fn f() { deep::run(); }", "b/deep.rs"),
        ("use crate::b as other; type D = other::Deep;", "b/deep.rs"),
        ("type D = crate::c::Deep;", "b/deep.rs"),
        ("mod nested { use super::super::b::Shallow; }", "b/mod.rs"),
        // The path is in a macro, or in an argument of one.
        ("macro_rules! m { () => { $crate::b::deep::run() } }", "b/deep.rs"),
        ("fn f() { println!(\"{}\", crate::b::deep::run()); }", "b/deep.rs"),
        // The name is in a module within a file, or a macro defines it.
        ("use crate::c::inner::Inner;", "c.rs"),
        ("use crate::c::Made;", "c.rs"),
    ] {
        assert_eq!(imports_of_a(a), [format!("a.rs -> {expected}")], "{a}");
    }
    for a in [
        "mod nested { pub struct Own; } use self::nested::Own; fn f() { nested::g(); Own::new(); }",
        "pub use crate::b::Deep;",
        "pub(in crate::b) struct S;",
        "/// [`crate::b::Deep`]\nstruct S; // crate::b::Deep",
        "#[cfg(test)] mod tests { use crate::b::Deep; }",
        "#[cfg(test)] use crate::b::{Deep}; struct S;",
        "use std::fmt; fn f(x: fmt::Error) { x.b::<u8>(); crate::mac!(); b::unknown(); }",
        "use crate::b;",
    ] {
        assert_eq!(imports_of_a(a), [""; 0], "{a}");
    }
}

#[test]
fn a_cycle_is_named_by_its_files() {
    let of = |files: &[(&str, &str)]| cycles(&imports_of(files.iter().copied()));
    let lib = ("lib.rs", "mod a; mod b; mod c; mod d;");
    let [a, c] = [("a.rs", "use crate::b::B;"), ("c.rs", "use crate::a::A;")];
    let d = ("d.rs", "use crate::a::A; use crate::c::C;");
    assert_eq!(of(&[lib, a, ("b.rs", "pub struct B;"), c, d]), [""; 0]);
    assert_eq!(of(&[lib, a, ("b.rs", "use crate::c::C;"), c, d]), ["a.rs -> b.rs -> c.rs -> a.rs"]);
    // The parent uses a child that uses the parent.
    let child = ("a/child.rs", "use super::Parent;");
    let only_exports = ("a.rs", "mod child; pub use child::Child; pub struct Parent;");
    let uses_as_well = ("a.rs", "mod child; use child::Child; pub struct Parent;");
    let lib = ("lib.rs", "mod a;");
    assert_eq!(of(&[lib, only_exports, child]), [""; 0]);
    assert_eq!(of(&[lib, uses_as_well, child]), ["a.rs -> a/child.rs -> a.rs"]);
}
