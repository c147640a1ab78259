//! gpumem's environment variables: one list, read once per process.

mod cards;
mod filter;
mod parse;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod variables;

pub use self::{
    cards::{CONTEXT, OF_NO_PROCESS, card, size, smallest_card},
    filter::{Filter, Rule, What},
    read::{preset, settings},
    values::{Card, Setting, Settings, Stacks},
};
