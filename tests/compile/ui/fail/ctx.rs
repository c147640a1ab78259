use gpumem::gpu_mem_trace;

#[gpu_mem_trace(ctx)]
fn alone() {}

#[gpu_mem_trace(ctx, silent)]
fn no_value() {}

#[gpu_mem_trace(ctx =)]
fn no_value_after_equals() {}

#[gpu_mem_trace(ctx = 1)]
fn number() {}

#[gpu_mem_trace(ctx = STEP)]
fn constant() {}

#[gpu_mem_trace(ctx("step"))]
fn parentheses() {}

const STEP: &str = "step";

fn main() {
    alone();
    no_value();
    no_value_after_equals();
    number();
    constant();
    parentheses();
    println!("{STEP}");
}
