//! The output of a session: what it prints, and where.

pub(super) mod call_stats;
pub(super) mod exit_reports;
mod notice;
pub(super) mod oom;
mod sink;

pub(crate) use self::notice::Notice;
pub(super) use self::{call_stats::StatsTable, notice::Notices, oom::Refusals, sink::SinkState};
pub use self::{
    call_stats::{stats, stats_n_reset},
    oom::{on_oom, retry_after_trim},
    sink::set_sink,
};
