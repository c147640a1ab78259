//! Compares the order of drops with and without the attribute, in a crate of edition 2024.

#![cfg(test)]

#[path = "../../common.rs"]
mod common;

#[test]
fn the_attribute_changes_no_drop() {
    common::compare(2024);
    common::results();
}
