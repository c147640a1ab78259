//! The reports of recordings, as data and as text.

pub(crate) mod annotations;
pub(crate) mod baseline;
pub(crate) mod baseline_lines;
pub(crate) mod calls;
pub(crate) mod change;
mod communicators;
pub(crate) mod compared;
pub(crate) mod difference;
pub(crate) mod dry_run;
pub(crate) mod json;
pub(crate) mod limit;
pub(crate) mod modules;
pub(crate) mod moment;
mod moved;
pub(crate) mod overview;
pub(crate) mod place_peaks;
pub(crate) mod place_sums;
pub(crate) mod places;
pub(crate) mod process;
pub(crate) mod ranks;
pub(crate) mod rejected;
mod reserved;
pub(crate) mod run_difference;
pub(crate) mod summary;
pub(crate) mod tensors;
mod text;
mod together;
