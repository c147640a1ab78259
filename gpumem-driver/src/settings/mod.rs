//! The environment variables of gpumem: one list, read once for each process.

mod cards;
mod parse;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod variables;

pub use self::{
    cards::{CONTEXT, card, size},
    read::{preset, settings},
    values::{Card, Setting, Settings, Stacks},
};
