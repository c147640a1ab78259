//! The holders of memory, the status of the measurement, and the statistics of allocators.

mod collector;
mod places;
pub(crate) mod statistics;
mod status;

pub use self::{
    collector::{Collected, Collector},
    places::{breakdown, summary, summary_n_reset},
    status::{LiveMemory, Status, status},
};
pub(super) use self::{
    places::{folder, path_of_this_thread, read},
    status::{NewTrace, unsubscribed_error, why_not_intercepted},
};
