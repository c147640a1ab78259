//! The environment variables of gpumem: one list, read once for each process.

mod parse;
mod read;
#[cfg(test)]
mod tests;
mod values;
mod variables;

#[cfg(all(feature = "capture", feature = "dispatch"))]
pub(crate) use self::read::preset;
pub use self::values::Setting;
pub(crate) use self::{
    read::settings,
    values::{Settings, Stacks},
};
