use gpumem::gpu_mem_trace;

#[gpu_mem_trace]
const fn answer() -> u32 {
    42
}

// The function still exists, so this line is not a second error.
const ANSWER: u32 = answer();

fn main() {
    assert_eq!(ANSWER, 42);
}
