//! Nested scopes and their memory, as rows from the largest to the smallest.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

use crate::model::Bytes;

/// A tree of rows. The amount of a row is the sum of its inner rows and its own memory.
#[derive(Default)]
pub struct Tree {
    nodes: Vec<Node>,
    /// The child scopes, by node and name.
    scopes: HashMap<(usize, String), usize>,
}

#[derive(Default)]
struct Node {
    name: String,
    is_scope: bool,
    bytes: i64,
    blocks: u64,
    note: Option<String>,
    inside: Vec<usize>,
    /// True if the node gets a row.
    is_kept: bool,
}

/// A row inside a scope or outside all scopes: a line, a library, memory that the driver keeps.
pub struct Leaf {
    /// The name of the line or the library.
    pub name: String,
    /// The bytes.
    pub bytes: i64,
    /// The number of blocks.
    pub blocks: u64,
    /// The line that called the function of the line.
    pub note: Option<String>,
}

/// One row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// The nesting depth.
    pub depth: usize,
    /// The name.
    pub name: String,
    /// The bytes, including those of inner rows.
    pub bytes: i64,
    /// The number of blocks. 0 if it does not apply.
    pub blocks: u64,
    /// The size of each block, if all have the same size.
    pub each: Option<Bytes>,
    /// The caller, on a separate line.
    pub note: Option<String>,
}

impl Tree {
    /// Creates an empty tree.
    pub fn new() -> Self {
        // The root. It has no row.
        Self { nodes: vec![Node::default()], scopes: HashMap::new() }
    }

    /// Adds memory of the scope with this path, excluding inner scopes. Returns its node.
    pub fn scope(&mut self, path: &[String], bytes: i64, blocks: u64) -> usize {
        let mut at = 0;
        self.add(at, bytes, blocks);
        for name in path {
            at = if let Some(known) = self.scopes.get(&(at, name.clone())) {
                *known
            } else {
                let inside = self.push(at, Node { name: name.clone(), is_scope: true, ..Node::default() });
                self.scopes.insert((at, name.clone()), inside);
                inside
            };
            self.add(at, bytes, blocks);
        }
        at
    }

    /// Adds a row inside a scope, or, with an empty path, outside all scopes.
    pub fn leaf(&mut self, path: &[String], leaf: Leaf) {
        let Leaf { name, bytes, blocks, note } = leaf;
        let scope = self.scope(path, bytes, blocks);
        self.push(scope, Node { name, bytes, blocks, note, ..Node::default() });
    }

    fn add(&mut self, at: usize, bytes: i64, blocks: u64) {
        let node = &mut self.nodes[at];
        node.bytes = node.bytes.saturating_add(bytes);
        node.blocks += blocks;
    }

    fn push(&mut self, outer: usize, node: Node) -> usize {
        self.nodes.push(node);
        let at = self.nodes.len() - 1;
        self.nodes[outer].inside.push(at);
        at
    }

    /// Returns the rows, the largest first. If there are more than `most`, the smaller ones of each scope share a row, so that
    /// inner rows still add up to their outer row.
    pub fn rows(self, most: usize) -> Vec<Row> {
        self.pruned(most, usize::MAX, 0)
    }

    /// Like [`rows`](Self::rows), but with at most `depth` levels of nesting. Rows of less than `least` bytes share a row,
    /// unless there is only one.
    pub fn pruned(mut self, most: usize, depth: usize, least: u64) -> Vec<Row> {
        let mut largest = BinaryHeap::from([(u64::MAX, Reverse(0), 0)]);
        let mut left = most.saturating_add(1);
        while let Some((bytes, Reverse(at), outer)) = largest.pop() {
            if left == 0 || bytes < least {
                break;
            }
            left -= 1;
            self.nodes[at].is_kept = true;
            if outer == depth {
                self.nodes[at].inside.clear();
            }
            let inside = self.nodes[at].inside.iter();
            largest.extend(inside.map(|at| (self.nodes[*at].bytes.unsigned_abs(), Reverse(*at), outer + 1)));
        }
        let mut rows = Vec::new();
        self.collect(0, 0, &mut rows);
        rows
    }

    fn collect(&self, outer: usize, depth: usize, rows: &mut Vec<Row>) {
        let mut inside: Vec<_> = self.nodes[outer].inside.iter().map(|at| (*at, &self.nodes[*at])).collect();
        inside.sort_by_key(|(_, node)| Reverse(node.bytes));
        // If only one is left, its own row takes no more space than the shared row. Its inner rows are not shown.
        let keeps_all = inside.iter().filter(|(_, node)| !node.is_kept).count() <= 1;
        let (kept, rest): (Vec<_>, Vec<_>) = inside.into_iter().partition(|(_, node)| node.is_kept || keeps_all);
        for (at, Node { name, bytes, blocks, note, .. }) in kept {
            let (name, note) = (name.clone(), note.clone());
            rows.push(Row { depth, name, bytes: *bytes, blocks: *blocks, each: None, note });
            if self.nodes[at].is_kept {
                self.collect(at, depth + 1, rows);
            }
        }
        if rest.is_empty() {
            return;
        }
        let what = if rest.iter().all(|(_, node)| node.is_scope) { "scopes" } else { "places" };
        rows.push(Row {
            depth,
            name: format!("({} more {what})", rest.len()),
            bytes: rest.iter().fold(0, |sum: i64, (_, node)| sum.saturating_add(node.bytes)),
            blocks: rest.iter().map(|(_, node)| node.blocks).sum(),
            each: None,
            note: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split('/').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    }

    fn rows(scopes: &[(&str, i64)], most: usize) -> Vec<String> {
        pruned(scopes, most, usize::MAX, 0)
    }

    fn pruned(scopes: &[(&str, i64)], most: usize, depth: usize, least: u64) -> Vec<String> {
        let mut tree = Tree::new();
        for (scope, bytes) in scopes {
            tree.scope(&path(scope), *bytes, 1);
        }
        let rows = tree.pruned(most, depth, least);
        rows.iter().map(|row| format!("{}{} {}", " ".repeat(row.depth), row.name, row.bytes)).collect()
    }

    #[test]
    fn a_parent_is_shown_even_if_it_has_nothing_of_its_own() {
        assert_eq!(rows(&[("a/b/c", 3), ("a/d", 4), ("e", 5)], 9), ["a 7", " d 4", " b 3", "  c 3", "e 5"]);
    }

    #[test]
    fn what_is_left_out_is_summed_up_where_it_belongs() {
        let scopes: Vec<_> = (1..=9).map(|at| (format!("a/{at}"), at)).chain([("b/x".to_owned(), 100)]).collect();
        let scopes: Vec<_> = scopes.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        assert_eq!(rows(&scopes, 4), ["b 100", " x 100", "a 45", " 9 9", " (8 more scopes) 36"]);
        // Eight rows fit. Only one is left, so it has its own row.
        assert_eq!(rows(&scopes, 11).len(), 12);
    }

    #[test]
    fn depth_and_size_prune() {
        let scopes = [("a/b/c", 3), ("a/d/e", 4), ("a/d/f", 1), ("a/d/g", 1), ("h", 5)];
        assert_eq!(pruned(&scopes, 9, 1, 0), ["a 9", "h 5"]);
        assert_eq!(pruned(&scopes, 9, 2, 0), ["a 9", " d 6", " b 3", "h 5"]);
        assert_eq!(pruned(&scopes, 9, 9, 3), ["a 9", " d 6", "  e 4", "  (2 more scopes) 2", " b 3", "  c 3", "h 5"]);
        // `b` is alone, so it has a row.
        assert_eq!(pruned(&scopes, 9, 9, 4), ["a 9", " d 6", "  e 4", "  (2 more scopes) 2", " b 3", "h 5"]);
    }

    #[test]
    fn a_leaf_is_not_the_scope_of_its_name() {
        let mut tree = Tree::new();
        tree.scope(&path("x"), 1, 1);
        tree.leaf(&[], Leaf { name: "x".to_owned(), bytes: 2, blocks: 0, note: None });
        assert_eq!(tree.rows(9).iter().map(|row| row.bytes).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn less_than_nothing_comes_last() {
        assert_eq!(rows(&[("a", -5), ("b", 1)], 9), ["b 1", "a -5"]);
    }
}
