//! The environment variables of gpumem: one list, read once for each process.

mod parse;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod variables;

pub use self::{
    read::{preset, settings},
    values::{Setting, Settings, Stacks},
};
