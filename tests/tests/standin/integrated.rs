//! Tests GPUs that share the memory of the machine, such as GB10 and Jetson. NVML does not report their memory.

use gpumem_tests::{CONTEXT, Standin, check, ensure, ensure_clean, ensure_error};

/// NVML returns `NVML_ERROR_NOT_SUPPORTED` for both forms of the query.
fn without_memory_info(machine: Standin) -> Standin {
    machine.fail("nvmlDeviceGetMemoryInfo_v2=3").fail("nvmlDeviceGetMemoryInfo=3")
}

fn integrated(machine: Standin) -> Standin {
    without_memory_info(machine.set("integrated=1"))
}

/// Returns the memory of the machine in MiB.
fn memory_of_machine() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("this is Linux");
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("it is there");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") / 1024
}

/// The numbers need no context, and reading them creates none.
#[test]
fn the_numbers_are_those_of_the_machine() {
    let outcome = integrated(Standin::new()).run("try_get; context 0; try_get; status_text");
    ensure_clean(&outcome);
    ensure(outcome.contexts_created() == 1, "created a context", &outcome);
    for answer in outcome.answers("try_get") {
        let values: Vec<u64> =
            answer.split(|sign: char| !sign.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
        let [total, free, used] = values[..] else { panic!("{answer}\n{outcome}") };
        ensure(
            total == memory_of_machine() && free <= total && used.abs_diff(total - free) <= 1,
            "other figures",
            &outcome,
        );
    }
    let says = "device 0 has no separate memory: its values describe the machine's memory";
    ensure(outcome.stdout.contains(says), "status says nothing", &outcome);
    // If NVML does not report a GPU's separate memory, as under WSL, gpumem asks the driver, which needs a context.
    let outcome = without_memory_info(Standin::new()).run("try_get; status_text");
    ensure_error(&outcome, "try_get", ["NVML_ERROR_NOT_SUPPORTED (3)"]);
    ensure(!outcome.stdout.contains("no separate memory"), "takes it for another card", &outcome);
}

/// On these GPUs, pinned and managed memory is the same memory as the device's.
#[test]
fn pinned_and_managed_memory_counts() {
    let calls = "call cuMemAlloc_v2 &a 1000; figures = 1000 0; call cuMemAllocManaged &b 200 1; figures = 1200 0; \
                 call cuMemHostAlloc &c 30 0; figures = 1230 0; call cuMemHostRegister_v2 0x10000 4 0; figures = 1234 0; \
                 call cuMemHostUnregister 0x10000; figures = 1230 4; call cuMemFreeHost c; call cuMemFree_v2 b; figures = 1000 234; \
                 call cuMemAllocHost_v2 &old 500; unsubscribe; subscribe = done; exact = started; call cuMemFreeHost old; figures = -500 0";
    let own = "call cuMemAllocManaged &b 200 1; call cuMemHostAlloc &c 30 0; figures = 0 0";
    for machine in [Standin::new().dispatch(), Standin::new().cupti()] {
        check(&integrated(machine.clone()), &format!("{CONTEXT}; exact = started; {calls}"));
        check(&without_memory_info(machine), &format!("{CONTEXT}; exact = started; {own}"));
    }
}
