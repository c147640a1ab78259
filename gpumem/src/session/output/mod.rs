//! The output of a session: what it prints, and where.

pub(super) mod exit_reports;
mod notice;
mod notices;
pub(super) mod oom;
mod sink;
mod sink_state;

pub(crate) use self::notices::Notice;
pub(super) use self::{notices::Notices, oom::Refusals, sink_state::SinkState};
pub use self::{
    oom::{on_oom, retry_after_trim},
    sink::set_sink,
};
