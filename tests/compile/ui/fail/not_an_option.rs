use gpumem::gpu_mem_trace;

#[gpu_mem_trace("step")]
fn literal() {}

#[gpu_mem_trace(silent on_exit_report)]
fn comma() {}

#[gpu_mem_trace(, silent)]
fn nothing() {}

fn main() {
    literal();
    comma();
    nothing();
}
