//! Tests on simulated devices. Each test has its own device, because the tests of a process run in parallel.

mod adoption;
mod api;
mod burn;
mod custom_gauge;
mod places;
mod pools;
mod statistics;
mod traces;
mod traces_off;
mod tracker;
