#![deny(warnings)]
//! A traced `main`.

#[gpumem::gpu_mem_trace]
fn main() -> Result<(), std::num::ParseIntError> {
    let n: u32 = "1".parse()?;
    std::process::exit(n.saturating_sub(1).cast_signed());
}
