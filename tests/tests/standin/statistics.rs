//! Tests the allocator's statistics under PyTorch's names. `gpu_exact` compares the statistics with the sums of a random program.

use gpumem_tests::{CONTEXT, Standin, check_answers};

use super::with_cupti;

#[test]
fn each_kind_is_counted_separately() {
    check_answers(
        &with_cupti(),
        &format!(
            "memory_allocated = 0; {CONTEXT}; call cuMemAlloc_v2 &a 1000; call cuMemAllocAsync &b 70 0; \
             call cuMemCreate &h 2097152 on:0 0; call cuMemAllocManaged &m 50 1; call cuMemAllocHost_v2 &p 60; \
             call cuMemFree_v2 a; memory_stats = all=2097222/2098222/2098222/1000,2/3/3/1 device=0/1000/1000/1000,0/1/1/1 \
             pool=70/70/70/0,1/1/1/0 vmm=2097152/2097152/2097152/0,1/1/1/0 managed=50/50/50/0,1/1/1/0 \
             pinned_host=60/60/60/0,1/1/1/0 untracked=0 lost=0; \
             memory_snapshot = 2097152 vmm, 70 pool, 60 pinned host, 50 managed; \
             reset_peaks = done; max_memory_allocated = 2097222; memory_allocated = 2097222"
        ),
    );
}

/// The pool grows by 32 MiB at a time. The program requested less.
#[test]
fn reserved_is_more_than_allocated() {
    check_answers(
        &with_cupti(),
        &format!(
            "memory_reserved = 0; {CONTEXT}; call cuMemAllocAsync &a 40000000 0; memory_allocated = 40000000; memory_reserved = 67108864; \
             max_memory_reserved = 67108864 to 67108864; call cuMemFreeAsync a 0; memory_allocated = 0; memory_reserved = 67108864; \
             empty_cache; memory_reserved = 0; call cuMemAlloc_v2 &b 1000; memory_reserved = 1000; \
             max_memory_reserved = 67108864 to 67109864; reset_peaks = done; max_memory_reserved = 1000 to 1000; \
             call cuMemPoolCreate &p on:0; call cuMemAllocFromPoolAsync &c 5000 p 0; memory_reserved = 6000"
        ),
    );
    check_answers(
        &with_cupti().set("pools=0"),
        &format!("{CONTEXT}; memory_allocated = 0; call cuMemAlloc_v2 &a 10; memory_reserved = 10; reset_peaks = done"),
    );
    let broken =
        with_cupti().fail("cuMemPoolGetAttribute=999").run(&format!("{CONTEXT}; memory_reserved; memory_allocated"));
    assert!(broken.answer("memory_reserved").starts_with("error["), "{broken}");
    assert_eq!(broken.answer("memory_allocated"), "0", "{broken}");
}

const ALL: [&str; 7] = [
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peaks",
    "memory_stats",
    "memory_snapshot",
];

/// If allocations are not intercepted, every value is an error with the reason, and none is zero.
#[test]
fn without_interception_every_number_is_an_error() {
    for (machine, first, says) in [
        (Standin::new(), "count", "cannot load libcupti"),
        (with_cupti().env("GPUMEM_GAUGE", "sampled"), "count", "GPUMEM_GAUGE is sampled"),
        (with_cupti().env("GPUMEM_GAUGE", "off"), "count", "GPUMEM_GAUGE is off"),
        (with_cupti().env("GPUMEM_GAUGE", "nonsense"), "count", "`nonsense` is not a gauge"),
        (with_cupti(), "unsubscribe", "gpumem::intercept::unsubscribe() was called"),
    ] {
        let outcome = machine.run(&format!("{first}; {}", ALL.join("; ")));
        for command in ALL {
            let answer = outcome.answer(command);
            assert!(
                answer.starts_with("error[") && answer.contains(says),
                "`{command}` does not say `{says}`\n{outcome}"
            );
        }
        assert!(outcome.is_clean(), "{outcome}");
    }
    // After `subscribe`, the values are available, no matter which gauge traces use.
    check_answers(
        &with_cupti().env("GPUMEM_GAUGE", "sampled"),
        &format!("subscribe = done; {CONTEXT}; call cuMemAlloc_v2 &a 10; memory_allocated = 10"),
    );
}

/// Blocks from before the subscription are not known. They do not count, and their frees change no value.
#[test]
fn counting_starts_with_the_first_call() {
    check_answers(
        &with_cupti(),
        &format!(
            "{CONTEXT}; call cuMemAlloc_v2 &old 1000; memory_allocated = 0; call cuMemAlloc_v2 &new 10; call cuMemFree_v2 old; \
             memory_stats = all=10/10/10/0,1/1/1/0 device=10/10/10/0,1/1/1/0 untracked=0 lost=0"
        ),
    );
}
