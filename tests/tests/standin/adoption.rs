//! Tests threads without a scope whose allocations count for a scope of another thread. gpumem's hook reads the name of the
//! thread.

use gpumem_tests::{CONTEXT, Standin, check};

#[test]
fn the_hook_reads_the_name_of_its_thread() {
    // The probe does not name its threads, so Linux gives each thread the name of the thread that started it.
    for (adopt, adopted) in [("probe", 20), ("*", 20), ("prober", 0), ("", 0)] {
        let script = format!(
            "{CONTEXT}; of_thread; call cuMemAlloc_v2 &a 7; other_thread call cuCtxSetCurrent ctx | call cuMemAlloc_v2 &b 20; \
             figures 0 = {} 0; call cuMemFree_v2 b; figures 0 = 7 {adopted}",
            7 + adopted
        );
        for machine in Standin::new().env("GPUMEM_ADOPT", adopt).with_each_source().all() {
            check(machine, &script);
        }
    }
}
