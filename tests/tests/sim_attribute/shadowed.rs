//! Tests that user items with names such as `gpumem`, `core` and `Result` do not disturb the attribute.

#![allow(dead_code, unused_macros, non_camel_case_types, non_upper_case_globals)]
use super::check;
use ::gpumem::gpu_mem_trace;

mod gpumem {}
mod std {}
mod core {}
struct Result;
struct Option;
struct Some;
struct String;
struct Box;
struct GpuMemTrace;
struct str;
struct bool;

const _trace: u8 = 0;
const _budget: u8 = 0;
const _line: u8 = 0;
const lines: u8 = 0;
const text: u8 = 0;
static trace: u8 = 0;
struct body;

macro_rules! format {
    () => {};
}

trait Builder: Sized {
    fn builder(&self) {}
    fn ctx(self, _: u8) {}
    fn silent(self, _: u8) {}
    fn start_or_off(self) {}
    fn into(self) {}
}
impl<T> Builder for T {}

#[gpu_mem_trace(silent = false, gauge = "exact")]
fn shadowed() -> Result {
    Result
}

#[gpu_mem_trace(lines, max_peak = 0)]
fn with_lines() -> Result {
    Result
}

#[gpu_mem_trace(lines)]
async fn asynchronous(n: u8) -> Result {
    let _ = ::gpumem::assert_gpu_mem!(peak == 0, { n });
    Result
}

#[test]
fn all_paths_are_absolute() {
    check(shadowed, ["shadowed"]);
    check(with_lines, ["with_lines"]);
    check(|| super::block_on(asynchronous(1)), ["asynchronous"]);
}
