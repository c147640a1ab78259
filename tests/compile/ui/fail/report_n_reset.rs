//! The error shows the line of the function, which names the one that takes a text.
fn main() {
    let mut trace = gpumem::GpuMemTrace::new();
    trace.report_n_reset("x");
}
