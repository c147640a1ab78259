//! Tests on the stand-in driver: a child process, `probe`, runs a script on it. `gpumem_tests::Standin` says more.

mod calls;
mod cupti;
mod dispatch;
mod faults;
mod graphs;
mod inject;
mod pool;
mod refusals;
mod statistics;
mod stubs;
mod torch;
mod tracker;
