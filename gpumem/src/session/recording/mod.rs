//! What a session records: scopes, callsites, labels, readings of devices, and the allocations that sources intercept.

mod callsites;
mod labels;
mod pools;
mod process;
mod sampler;
mod scope;
mod subscribe;

#[cfg(feature = "capture")]
pub(super) use self::callsites::DefinedCallsite;
#[cfg(all(feature = "__internal", feature = "dispatch"))]
pub(crate) use self::process::{hook_for_nobody, intercepted, rehearse};
pub(super) use self::{
    callsites::CallsiteTable,
    pools::Pools,
    process::record as record_process,
    sampler::Sampler,
    scope::{OpenScope, ScopeRequest},
};
pub use self::{
    labels::label,
    subscribe::{subscribe, unsubscribe},
};
