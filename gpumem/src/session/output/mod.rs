//! The output of a session: what it prints, and where.

pub(super) mod exit_reports;
mod notice;
pub(super) mod oom;
mod sink;

pub(crate) use self::notice::Notice;
pub(super) use self::{notice::Notices, oom::Refusals, sink::SinkState};
pub use self::{
    oom::{on_oom, retry_after_trim},
    sink::set_sink,
};
