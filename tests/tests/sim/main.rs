//! The tests on the simulated device. Each test has a device of its own, because tests run in parallel in one process.

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
