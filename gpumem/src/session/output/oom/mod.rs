//! Reports of rejected allocations: the request, and the breakdown of the device's memory.

mod handler;
mod hook;
mod pending;
mod print;
mod rejection;
mod reporter;
mod retry;

#[cfg(feature = "capture")]
pub(in crate::session) use self::print::print_none;
pub(in crate::session) use self::{
    handler::{obtained, rejected},
    pending::Rejections,
    print::print_pending,
};
pub use self::{hook::on_oom, retry::retry_after_trim};
