//! The output of a session, and its target.

pub(super) mod call_stats;
pub(super) mod exit_reports;
mod notice;
mod notices;
pub(super) mod oom;
mod repeats;
mod sink;
mod sink_state;
mod stats_table;

pub(crate) use self::notices::Notice;
pub use self::{
    call_stats::{stats, stats_n_reset},
    oom::{on_oom, retry_after_trim},
    sink::set_sink,
};
pub(super) use self::{notices::Notices, oom::Rejections, sink_state::SinkState, stats_table::StatsTable};
