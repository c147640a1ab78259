//! The events that a session records: scopes, callsites, labels, readings of devices, and intercepted allocations.

mod callsites;
mod custom;
mod labels;
mod process;
mod sampler;
mod sampling;
mod scope;
mod subscribe;

#[cfg(feature = "capture")]
pub(super) use self::callsites::DefinedCallsite;
#[cfg(all(test, feature = "sim"))]
pub(super) use self::labels::label_block;
pub(super) use self::{
    callsites::{CallsiteTable, CodeLine, Numbered, numberless_of},
    process::record as record_process,
    sampler::Sampler,
    scope::{OpenScope, ScopeRequest},
};
pub use self::{
    custom::set_gauge,
    labels::label,
    scope::adopt,
    subscribe::{subscribe, unsubscribe},
};
