//! Tests who holds memory on the stand-in driver: the reports of failed allocations, and the breakdown of a device's memory with
//! NVML's list of processes.

use std::thread;

use gpumem::Bytes;
use gpumem_tests::{CONTEXT, Library, Outcome, Standin, ensure_answer, ensure_clean};

use super::with_cupti;

/// Records no stacks, because finding their lines takes most of the time of a report in a build without optimisation.
const NO_STACKS: (&str, &str) = ("GPUMEM_BACKTRACE", "0");

/// Runs a script, and checks that nothing panics and that no callback calls the driver.
#[track_caller]
fn run(machine: &Standin, script: &str) -> Outcome {
    let outcome = machine.run(&format!("{CONTEXT}; {script}"));
    ensure_clean(&outcome);
    let called = outcome.calls.iter().filter_map(|call| call.strip_prefix("callback>"));
    let harmful: Vec<_> = called.filter(|call| !call.starts_with("cuptiGetDeviceId")).collect();
    assert!(harmful.is_empty(), "called in a callback: {harmful:?}\n{outcome}");
    outcome
}

/// Like [`run`], but gpumem may call the driver in its hooks.
#[track_caller]
fn run_any(machine: &Standin, script: &str) -> Outcome {
    let outcome = machine.run(&format!("{CONTEXT}; {script}"));
    ensure_clean(&outcome);
    outcome
}

/// Runs the script until the hook of `on_oom` gets a complete report. On a busy machine, the first reports may be incomplete. No
/// stacks are recorded, because looking them up takes longer than the hook waits.
#[track_caller]
fn in_time(machine: &Standin, script: &str) -> Outcome {
    let machine = &machine.clone().env(NO_STACKS.0, NO_STACKS.1);
    let outcomes = (0..200).map(|_| run(machine, script));
    let reported = outcomes.into_iter().find(|outcome| !outcome.stdout.contains("was not found out within"));
    reported.expect("the stand-in driver answers soon")
}

/// Calls that may fail for lack of memory, with the requested bytes and the kind of memory.
const CALLS: &[(&str, u64, &str)] = &[
    ("cuMemAlloc_v2 &a 500", 500, "device"),
    // The rows of a pitched block may be longer than requested, but the report contains the requested bytes.
    ("cuMemAllocPitch_v2 &a &pitch 1000 10 4", 10_000, "device"),
    ("cuMemAllocManaged &a 600 1", 600, "managed"),
    ("cuMemAllocAsync &a 700 0", 700, "pool"),
    ("cuMemAllocAsync_ptsz &a 700 0", 700, "pool"),
    ("cuMemAllocFromPoolAsync &a 800 pool 0", 800, "pool"),
    ("cuMemAllocFromPoolAsync_ptsz &a 800 pool 0", 800, "pool"),
    ("cuMemCreate &a 2097152 on:0 0", 2_097_152, "vmm"),
];

#[test]
fn a_rejection_is_reported_with_its_bytes_kind_and_device_and_counts_nothing() {
    for (call, bytes, kind) in CALLS {
        let function = call.split(' ').next().unwrap_or_default();
        // These two functions have been called once before: by the script for `live`, and by gpumem, which creates a page to
        // learn the driver's latest block id.
        let from = if ["cuMemAlloc_v2", "cuMemCreate"].contains(&function) { 2 } else { 1 };
        let script = format!(
            "subscribe; print_refusals; scope train; call cuDeviceGetDefaultMemPool &pool 0; call cuMemAlloc_v2 &live 1000; \
             call {call}; figures; summary; breakdown; status"
        );
        let outcome = in_time(&with_cupti().fail(format!("{function}=2@{from}")), &script);
        ensure_answer(&outcome, &format!("call {call}"), "2");
        assert!(outcome.answer("breakdown").contains(", adds up: scope `train` 1000 B (1), "), "{outcome}");
        let rejected = outcome.answers("refused");
        let [reported] = rejected[..] else { panic!("not reported once\n{outcome}") };
        let values = reported.strip_prefix(&format!("{bytes} {kind}, device 0, [\"train\"]; "));
        let values = values.unwrap_or_else(|| panic!("`{call}`\n{outcome}"));
        let (in_use, in_parts) = values.split_once(" in use, ").unwrap_or_else(|| panic!("no breakdown\n{outcome}"));
        assert_eq!(in_parts, format!("{in_use} in parts"));
        ensure_answer(&outcome, "figures", "1000 0");
        ensure_answer(&outcome, "summary", "all 0 1000 1000 1000 1, train 1 1000 1000 1000 1");
        assert!(
            outcome
                .answer("status")
                .starts_with("gauge=exact source=cupti events=1 untracked=0 lost=0 device=1000/1 by="),
            "{outcome}"
        );
        // The failed allocation is also reported on stderr.
        let report: Vec<_> = outcome.stderr.lines().collect();
        let bytes = Bytes::new(*bytes);
        assert_eq!(
            report[0],
            format!("gpumem: device 0 is out of memory: {bytes} ({kind}) were requested"),
            "{outcome}"
        );
        assert!(report.iter().any(|line| line.starts_with("device 0 (Stand-in GPU 0): ")), "{outcome}");
        assert!(report.iter().any(|line| line.starts_with("   train ") && line.contains("1       1  ▏")), "{outcome}");
        assert!(report.iter().all(|line| line.chars().count() <= 80), "{outcome}");
    }
}

#[test]
fn what_is_freed_on_a_rejection_is_counted() {
    let script = "exact; call cuMemAlloc_v2 &live 1000; on_refusal cuMemFree_v2 live; \
                  call cuMemAlloc_v2 &a 99999999999999; figures; status; call cuMemAlloc_v2 &a 500; figures";
    let outcome = with_cupti().run(&format!("{CONTEXT}; {script}"));
    assert!(outcome.is_clean(), "{outcome}");
    ensure_answer(&outcome, "on_refusal", "0");
    assert_eq!(outcome.answers("figures"), ["0 1000", "500 500"], "{outcome}");
    assert!(outcome.answer("status").contains("events=2 untracked=0 lost=0"), "{outcome}");
}

#[test]
fn without_exact_traces_nothing_is_intercepted() {
    for gauge in ["sampled", "off"] {
        let outcome =
            run(&with_cupti().env("GPUMEM_GAUGE", gauge), "breakdown; retry cuMemAlloc_v2 &a 99999999999999; status");
        ensure_answer(&outcome, "retry cuMemAlloc_v2 &a 99999999999999", "2 2");
        assert!(outcome.answer("status").contains(" by=nothing "), "{outcome}");
    }
}

#[test]
fn other_failures_are_not_reported() {
    for (call, ..) in CALLS {
        let function = call.split(' ').next().unwrap_or_default();
        for code in [1, 3, 101, 201, 400, 801, 999] {
            let machine = with_cupti().fail(format!("{function}={code}"));
            let script = format!("print_refusals; exact; call cuDeviceGetDefaultMemPool &pool 0; call {call}; figures");
            let outcome = run(&machine, &script);
            ensure_answer(&outcome, &format!("call {call}"), &code.to_string());
            ensure_answer(&outcome, "figures", "0 0");
            assert!(outcome.answers("refused").is_empty() && outcome.stderr.is_empty(), "{outcome}");
        }
    }
    // Failed allocations of host memory are not reported either, because gpumem does not know who holds the memory of the host.
    for call in ["cuMemAllocHost_v2 &a 1000", "cuMemHostAlloc &a 1000 0", "cuMemCreate &a 2097152 on:host 0"] {
        let function = call.split(' ').next().unwrap_or_default();
        let outcome = run(&with_cupti().fail(format!("{function}=2")), &format!("print_refusals; exact; call {call}"));
        ensure_answer(&outcome, &format!("call {call}"), "2");
        assert!(outcome.answers("refused").is_empty() && outcome.stderr.is_empty(), "{outcome}");
    }
    // The same is true for pools of the host, and for a pool whose device is not known because it is older than the subscription.
    let pools = ["exact; call cuMemPoolCreate &pool on:host", "call cuMemPoolCreate &pool on:0; exact"];
    for (call, pool) in ["cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz"].into_iter().zip(pools) {
        let script = format!("print_refusals; {pool}; call {call} &a 800 pool 0; retry {call} &a 800 pool 0");
        for machine in Standin::new().fail(format!("{call}=2")).with_each_source().all() {
            let outcome = run(machine, &script);
            ensure_answer(&outcome, &format!("retry {call} &a 800 pool 0"), "2 2");
            assert!(outcome.answers("refused").is_empty() && outcome.stderr.is_empty(), "{outcome}");
        }
    }
    // The same is true for frees that fail, for allocations that fail before the subscription, and for allocations that fail
    // without interception.
    let outcome = run(
        &with_cupti().fail("cuMemFree_v2=2@1..2"),
        "print_refusals; call cuMemAlloc_v2 &a 99999999999999; exact; call cuMemAlloc_v2 &a 1000; call cuMemFree_v2 a; figures",
    );
    assert!(outcome.answers("refused").is_empty() && outcome.stderr.is_empty(), "{outcome}");
    let outcome = run(&Standin::new(), "print_refusals; sampled; call cuMemAlloc_v2 &a 99999999999999");
    assert!(outcome.answers("refused").is_empty(), "{outcome}");
}

#[test]
fn a_rejection_is_of_the_device_that_was_asked() {
    let outcome = run(
        &with_cupti().devices(2),
        "subscribe; print_refusals; call cuDevicePrimaryCtxRetain &second 1; call cuCtxSetCurrent second; scope second; \
         call cuMemAlloc_v2 &a 99999999999991; call cuStreamCreate &stream 0; call cuCtxSetCurrent ctx; \
         call cuMemAlloc_v2 &a 99999999999992; call cuMemAllocAsync &a 99999999999993 stream; \
         call cuMemPoolCreate &pool on:1; call cuMemAllocFromPoolAsync &a 99999999999994 pool 0; \
         call cuMemCreate &a 104857600000000 on:1 0; \
         other_thread call cuCtxSetCurrent second | call cuMemAlloc_v2 &a 99999999999995",
    );
    let rejected: Vec<_> =
        outcome.answers("refused").iter().filter_map(|reported| reported.split(';').next()).collect();
    assert_eq!(
        rejected,
        [
            "99999999999991 device, device 1, [\"second\"]",
            "99999999999992 device, device 0, [\"second\"]",
            "99999999999993 pool, device 1, [\"second\"]",
            "99999999999994 pool, device 1, [\"second\"]",
            "104857600000000 vmm, device 1, [\"second\"]",
            "99999999999995 device, device 1, []",
        ],
        "{outcome}"
    );
    assert_eq!(outcome.stderr.matches("is out of memory").count(), 3, "{outcome}");
    assert!(outcome.stderr.ends_with("gpumem: further failed allocations are not reported\n"), "{outcome}");
}

/// Allocators with a cache do this: when an allocation fails, they empty the cache and allocate again.
#[test]
fn what_is_obtained_soon_calls_the_hook_and_is_not_reported() {
    const CACHE: &str = "exact; print_refusals; call cuStreamCreate &s 0; call cuMemAllocAsync &x 512 s; \
                         call cuMemAllocAsync &y 512 s; call cuMemAlloc_v2 &cache 10737418240";
    for (rejected, reports, script) in [
        (1, 0, "call ALLOC 8589934592; call cuMemFree_v2 cache; call ALLOC 8589934592"),
        (1, 0, "call ALLOC 8589934592; call cuMemFree_v2 cache; call ALLOC 9663676416"),
        (1, 0, "call ALLOC 8589934592; call cuMemAllocAsync &z 512 s; call cuMemFree_v2 cache; call ALLOC 8589934592"),
        (2, 0, "call ALLOC 8589934592; call ALLOC 8589934592; call cuMemFree_v2 cache; call ALLOC 8589934592"),
        (2, 0, "call ALLOC 8589934592; call ALLOC 9663676416; call cuMemFree_v2 cache; call ALLOC 9663676416"),
        (2, 1, "call ALLOC 8589934592; call ALLOC 9663676416; call cuMemFree_v2 cache; call ALLOC 8589934592"),
        (1, 1, "call ALLOC 8589934592; call cuMemFree_v2 cache; call ALLOC 6442450944"),
        (3, 1, "call ALLOC 8589934592; call ALLOC 8589934592; call ALLOC 8589934592"),
        (
            1,
            1,
            "call ALLOC 8589934592; call cuMemFree_v2 cache; other_thread call cuCtxSetCurrent ctx | call ALLOC 8589934592",
        ),
        (1, 1, "call ALLOC 8589934592; call cuMemFree_v2 cache; call cuMemAllocHost_v2 &h 8589934592"),
    ] {
        // If there is nothing to report, the process does not wait for lines at its end. Therefore only these cases test each way
        // to allocate.
        let ways = [("cuMemAlloc_v2 &a", ""), ("cuMemAllocAsync &a", " s"), ("cuMemCreate &a", " on:0 0")];
        for (alloc, stream) in &ways[..if reports == 0 { 3 } else { 1 }] {
            let sizes = ["8589934592", "9663676416", "6442450944"];
            let call =
                |script: &str, size| script.replace(&format!("ALLOC {size}"), &format!("{alloc} {size}{stream}"));
            let script = sizes.into_iter().fold(script.to_owned(), |script, size| call(&script, size));
            for machine in Standin::new().env(NO_STACKS.0, NO_STACKS.1).with_each_source().all() {
                let outcome = run_any(machine, &format!("{CACHE}; {script}"));
                assert_eq!(outcome.answers("refused").len(), rejected, "{outcome}");
                assert_eq!(outcome.stderr.matches("is out of memory").count(), reports, "{outcome}");
            }
        }
    }
}

/// The report is printed while the process runs, so it does not matter how the process ends.
#[test]
fn what_is_not_obtained_is_reported_after_a_while() {
    let outcome =
        with_cupti().run(&format!("{CONTEXT}; exact; call cuMemAlloc_v2 &a 99999999999999; await stderr; abort"));
    assert!(!outcome.succeeded() && outcome.answer("await stderr") == "so", "{outcome}");
    assert_eq!(outcome.stderr.matches("is out of memory").count(), 1, "{outcome}");
}

/// The thread whose allocation failed continues, while the report waits for the driver.
#[test]
fn a_slow_driver_does_not_block_the_program() {
    // At its end, the process waits for reports, but at most 5 s. Looking up stacks takes longer, so there are none.
    let machine = |slow| with_cupti().set(slow).env(NO_STACKS.0, NO_STACKS.1);
    let slow = || {
        run(
            &machine("slow=nvmlDeviceGetMemoryInfo_v2:1000"),
            "scope train; print_refusals; call cuMemAlloc_v2 &a 99999999999999",
        )
    };
    let stuck =
        || run(&machine("slow=nvmlDeviceGetMemoryInfo_v2:20000"), "scope train; call cuMemAlloc_v2 &a 99999999999999");
    let (outcome, of_stuck) = thread::scope(|scope| {
        let of_stuck = scope.spawn(stuck);
        (slow(), of_stuck.join().expect("it ends well"))
    });
    let reported = outcome.answer("refused");
    assert!(reported.starts_with("99999999999999 device, device 0, ") && reported.contains("within 50ms"), "{outcome}");
    assert!(outcome.stderr.contains("\n  in train\n") && outcome.stderr.contains(" in use, "), "{outcome}");
    // gpumem does not wait long for a driver that does not answer.
    let says = "the holders of the memory cannot be read: no answer within 2s";
    assert!(of_stuck.stderr.contains(says), "{of_stuck}");
}

#[test]
fn a_second_try_after_the_pool_gave_back() {
    // The GPU has 16 GiB. A context and the driver use about 1 GiB of them.
    let keep = "call cuMemAllocAsync &p 10737418240 0; call cuMemFreeAsync p 0";
    let outcome = run(
        &with_cupti(),
        &format!(
            "exact; print_refusals; {keep}; retry cuMemAlloc_v2 &a 10737418240; retry cuMemAlloc_v2 &b 99999999999999; retry cuMemAlloc_v2 0 0"
        ),
    );
    ensure_answer(&outcome, "retry cuMemAlloc_v2 &a 10737418240", "2 0");
    ensure_answer(&outcome, "retry cuMemAlloc_v2 &b 99999999999999", "2 2");
    ensure_answer(&outcome, "retry cuMemAlloc_v2 0 0", "1");
    assert_eq!(outcome.answers("refused").len(), 1, "{outcome}");
    // If the pool cannot be trimmed, the second try is made nevertheless, and its failure is reported.
    let outcome = run(
        &with_cupti().fail("cuMemPoolTrimTo=999").fail("cuCtxSynchronize=999"),
        "exact; print_refusals; retry cuMemAlloc_v2 &b 99999999999999",
    );
    ensure_answer(&outcome, "retry cuMemAlloc_v2 &b 99999999999999", "2 2");
    assert_eq!(outcome.answers("refused").len(), 1, "{outcome}");
    // Without interception, gpumem treats any error as a lack of memory.
    let outcome = run(&Standin::new(), "retry cuMemAlloc_v2 0 0");
    ensure_answer(&outcome, "retry cuMemAlloc_v2 0 0", "1 1");
}

#[test]
fn a_report_without_numbers_has_the_size_of_the_request() {
    let machine = with_cupti()
        .fail("nvmlDeviceGetMemoryInfo_v2=15")
        .fail("nvmlDeviceGetMemoryInfo=15")
        .fail("cuMemGetInfo_v2=999");
    let outcome = run(&machine, "scope train; print_refusals; call cuMemAlloc_v2 &a 99999999999999");
    let reported = outcome.answer("refused");
    assert!(reported.starts_with("99999999999999 device, device 0, [\"train\"]; "), "{outcome}");
    assert!(outcome.stderr.contains("the holders of the memory cannot be read: "), "{outcome}");
    assert!(
        outcome.stderr.starts_with("gpumem: device 0 is out of memory: 90.95 TiB (device) were requested\n"),
        "{outcome}"
    );
}

#[test]
fn parts_add_up_whatever_nvml_knows_of_processes() {
    let script = "subscribe; scope train; call cuMemAlloc_v2 &a 104857600; scope step; call cuMemAlloc_v2 &b 52428800; \
                  call cuMemAllocAsync &p 20971520 0; drop; call cuMemAllocManaged &m 1048576 1; \
                  call cuMemAllocHost_v2 &h 1048576; breakdown; breakdown 0; summary";
    let own = "scope `train` 100 MiB (1), scope `train > step` 70 MiB (2), cache `kept by the pool, unused` 12 MiB";
    let rest = "driver `CUDA context, kernels, modules; what is unknown` 518 MiB";
    let not_separated = "unknown `other processes and the CUDA context`";
    let of_driver = "unknown `the driver's, of no process`";
    let (one, another) = ("compute=4000000001:300MiB:python", "graphics=4000000002:45MiB:Xorg");
    let lists = ["nvmlDeviceGetComputeRunningProcesses_v3=4", "nvmlDeviceGetComputeRunningProcesses_v2=4"];
    for (machine, expected) in [
        (with_cupti(), format!("709 MiB, adds up: {own}, {rest}, {of_driver} 9 MiB")),
        (
            with_cupti().set("used=300MiB").set(one),
            format!("1009 MiB, adds up: others `another process` 300 MiB (1), {own}, {rest}, {of_driver} 9 MiB"),
        ),
        (
            with_cupti().set("used=315MiB").set(one).set("graphics=4000000002:15MiB:Xorg"),
            format!("1 GiB, adds up: others `other processes` 315 MiB (2), {own}, {rest}, {of_driver} 9 MiB"),
        ),
        // Processes that NVML does not list, or lists without their memory, are not shown separately.
        (with_cupti().set("processes=unavailable"), format!("709 MiB, adds up: {own}, {not_separated} 527 MiB")),
        (
            with_cupti().set("used=300MiB").set("compute=4000000001:na"),
            format!("1009 MiB, adds up: {own}, {rest}, unknown `other processes, and the driver's` 309 MiB"),
        ),
        (
            with_cupti().set("processes=empty").set("used=300MiB"),
            format!("1009 MiB, adds up: {own}, {not_separated} 827 MiB"),
        ),
        // In a container, the listed process may be this process under another process id.
        (
            with_cupti().set("processes=empty").set("used=300MiB").set(one),
            format!("1009 MiB, adds up: {own}, {not_separated} 827 MiB"),
        ),
        (with_cupti().fail(lists[0]).fail(lists[1]), format!("709 MiB, adds up: {own}, {not_separated} 527 MiB")),
        (with_cupti().without(Library::Nvml), format!("709 MiB, adds up: {own}, {not_separated} 527 MiB")),
        // NVML lists more memory than is in use, because its values are from two moments. Only the part that is certain is shown.
        (
            with_cupti().set("compute=4000000001:20GiB:python").set(another),
            format!("709 MiB, adds up: others `other processes` 527 MiB (2), {own}"),
        ),
    ] {
        let outcome = run(&machine.env(NO_STACKS.0, NO_STACKS.1), script);
        ensure_answer(&outcome, "breakdown", &expected);
        ensure_answer(&outcome, "breakdown 0", &expected);
        // Memory that may not be on the device is in no scope of the summary.
        ensure_answer(
            &outcome,
            "summary",
            "all 0 178257920 178257920 178257920 3, train 1 178257920 178257920 178257920 3, train/step 1 73400320 73400320 73400320 2",
        );
    }
}

#[test]
fn a_device_that_is_not_there_or_cannot_be_read_is_an_error() {
    let outcome = run(&with_cupti(), "breakdown 7");
    assert!(outcome.answer("breakdown 7").starts_with("error[unknown device"), "{outcome}");
    let machine = with_cupti()
        .fail("nvmlDeviceGetMemoryInfo_v2=15")
        .fail("nvmlDeviceGetMemoryInfo=15")
        .fail("cuMemGetInfo_v2=999");
    let outcome = run(&machine, "breakdown");
    assert!(outcome.answer("breakdown").starts_with("error["), "{outcome}");
    let outcome = Standin::new().without(Library::Cuda).without(Library::Nvml).run("breakdown; summary");
    assert!(outcome.answer("breakdown").starts_with("error[unavailable"), "{outcome}");
    assert!(outcome.answer("summary").ends_with("|the allocated memory is not known"), "{outcome}");
}

/// The sentence behind the first line, which is broken into lines.
fn who_has_the_memory(outcome: &Outcome) -> String {
    let lines =
        outcome.stderr.lines().skip(1).take_while(|line| !line.starts_with("  at ") && !line.starts_with("  in "));
    let lines: Vec<_> = lines.take_while(|line| line.starts_with("  ")).map(str::trim).collect();
    assert!(outcome.stderr.lines().all(|line| line.chars().count() <= 80), "{outcome}");
    lines.join(" ")
}

#[test]
fn a_rejection_says_who_has_the_memory() {
    let machine = || Standin::new().dispatch().driver_memory().env(NO_STACKS.0, NO_STACKS.1);
    let script = format!(
        "call cuInit 0; scope train; {CONTEXT}; call cuModuleLoadData &m text:module:6291456/deep:2097152:8192; \
         call cuModuleGetFunction &deep m text:deep; call cuLaunchKernel deep 1 1 1 32 1 1 0 0 0 0; \
         call cuMemAlloc_v2 &a 104857600; call cuMemAlloc_v2 &b 99999999999999"
    );
    let another = "compute=4000000001:300MiB:python";
    let said = |machine: Standin| {
        let outcome = machine.run(&script);
        ensure_clean(&outcome);
        who_has_the_memory(&outcome)
    };
    let taken =
        "in use by allocations 100 MiB, by the driver for this process 2.32 GiB (most: local memory of deep 1.80 GiB)";
    assert_eq!(said(machine()), format!("free 12.98 GiB; {taken}, by no process 9 MiB"));
    let expected = format!("free 12.68 GiB; {taken}, by other processes 300 MiB, by no process 9 MiB");
    assert_eq!(said(machine().set(another).set("used=300MiB")), expected);
    // Without the list, the values are upper bounds if others used the device when the first context was created.
    let expected = format!("free 12.98 GiB; {taken}, by others 3.25 MiB");
    assert_eq!(said(machine().set("processes=unavailable")), expected);
    let taken = taken.replace("2.32", "≤ 2.32").replace("1.80", "≤ 1.80");
    let expected = format!("free 12.68 GiB; {taken}, by others ≥ 303.25 MiB");
    assert_eq!(said(machine().set("processes=unavailable").set("used=300MiB")), expected);
    // CUPTI does not measure the driver.
    let outcome = run(
        &with_cupti().set("processes=unavailable").env(NO_STACKS.0, NO_STACKS.1),
        "scope train; call cuMemAlloc_v2 &a 104857600; call cuMemAlloc_v2 &b 99999999999999",
    );
    let expected = "free 14.79 GiB; in use by allocations 100 MiB, by other processes and the driver 527 MiB";
    assert_eq!(who_has_the_memory(&outcome), expected, "{outcome}");
}
