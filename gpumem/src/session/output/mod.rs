//! What a session prints, and where.

mod notice;
pub(super) mod oom;
pub(super) mod peaks;
mod sink;

pub(crate) use self::notice::Notice;
pub(super) use self::{notice::Notices, oom::Refusals, sink::SinkState};
pub use self::{
    oom::{on_oom, retry_after_trim},
    sink::set_sink,
};
