//! The attribute `#[gpu_mem_trace]` of gpumem.
