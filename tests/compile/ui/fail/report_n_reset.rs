//! The error shows the signature of the function, which names the function that takes a text.
fn main() {
    let mut trace = gpumem::GpuMemTrace::new();
    trace.report_n_reset("x");
}
