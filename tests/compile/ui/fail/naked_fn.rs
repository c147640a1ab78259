use gpumem::gpu_mem_trace;

#[gpu_mem_trace]
#[unsafe(naked)]
extern "C" fn naked() {
    std::arch::naked_asm!("ret")
}

fn main() {
    naked();
}
