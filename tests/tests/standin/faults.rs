//! Tests gpumem with faults of the driver: it never panics, hangs or ends the program, it never reports 0 for a failed
//! reading, it creates no context without a request, and its errors name the cause and the next step.
//!
//! Each case is a machine, which is the stand-in driver with a fault, and the result that gpumem must report on it.

use gpumem_tests::{Library, Standin, each, ensure, ensure_clean, ensure_error, ensure_unharmed};

/// Each function with fastai's name, its answer if nothing can be read, and its variant that returns an error.
pub(super) const QUERIES: &[(&str, Answer, &str)] = &[
    ("get", Answer::Text(ZEROS), "try_get"),
    ("get 0", Answer::Text(ZEROS), "try_get 0"),
    ("get_all", Answer::AllZeros, "try_get_all"),
    ("free", Answer::Text("0 B"), "try_free"),
    ("used", Answer::Text("0 B"), "try_used"),
    ("free_no_cache", Answer::Text("0 B"), "try_free_no_cache"),
    ("used_no_cache", Answer::Text("0 B"), "try_used_no_cache"),
    ("max_free", Answer::Text("None 0 B"), "try_max_free"),
];

pub(super) const ZEROS: &str = "GPUMemory(total=0, free=0, used=0)";

#[derive(Clone, Copy)]
pub(super) enum Answer {
    Text(&'static str),
    /// Zeros for each device that the driver counts.
    AllZeros,
}

/// The facts that are known about a device whose memory cannot be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Not even the existence of the device is known.
    Nothing,
    /// The existence of the device is known.
    Existence,
}

/// A machine on which the memory of the device cannot be read, and the words that an error must contain: the object, the cause
/// and the next step.
struct Case {
    machine: Standin,
    known: Known,
    says: Vec<String>,
}

fn case(machine: Standin, known: Known, says: &[&str]) -> Case {
    Case { machine, known, says: says.iter().map(|word| (*word).to_owned()).collect() }
}

/// Returns the functions of the driver that gpumem looks up before it calls anything, from gpumem's own list.
pub(super) fn required_of_cuda() -> Vec<&'static str> {
    let source = include_str!("../../../crates/driver/src/sys/cuda/library.rs");
    let (_, list) = source.split_once("const SYMBOLS: &[&str] = &[").expect("gpumem lists the symbols it requires");
    let (list, _) = list.split_once("];").expect("the list ends");
    let symbols: Vec<_> = list.split('"').skip(1).step_by(2).collect();
    assert!(symbols.len() > 10, "{symbols:?}");
    symbols
}

/// Returns machines on which no memory can be read as long as there is no context.
fn unreadable() -> Vec<Case> {
    use Known::{Existence, Nothing};

    let update = "the driver was updated while in use: reboot";
    let lost = "has fallen off the bus or needs a reset: look at dmesg";
    let permissions = "look at the permissions of /dev/nvidia*";
    let context = "cannot read device 0 without creating a CUDA context";
    let preload = "create the context first, for example with gpumem::preload()";
    let look_up = "look the name up in NVIDIA's documentation, and see dmesg and nvidia-smi";
    let mut cases = vec![
        // A library is missing, or is not a library.
        case(
            Standin::new().without(Library::Cuda).without(Library::Nvml),
            Nothing,
            &["cannot load libcuda", "libcuda.so", "is the NVIDIA driver installed"],
        ),
        case(
            Standin::new().without(Library::Cuda),
            Nothing,
            &["cannot load libcuda", "libcuda.so", "in a container, was it started with GPU access"],
        ),
        case(
            Standin::new().damaged(Library::Cuda),
            Nothing,
            &["cannot load libcuda", "is the NVIDIA driver installed"],
        ),
        case(Standin::new().without(Library::Nvml), Existence, &[context, "cannot load libnvidia-ml", preload]),
        case(Standin::new().damaged(Library::Nvml), Existence, &[context, "cannot load libnvidia-ml", preload]),
        // NVML reports no memory.
        case(
            Standin::new().set("figures_max=1"),
            Existence,
            &["NVML reports no memory values for device 0", "virtual GPUs and WSL", "compare nvidia-smi"],
        ),
    ];
    // A function is missing.
    for symbol in required_of_cuda() {
        let says = ["libcuda has no", symbol, "the NVIDIA driver is too old or damaged; update the driver"];
        cases.push(case(Standin::new().without_symbol(symbol), Nothing, &says));
    }
    for symbol in ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID"] {
        let says = [context, "libnvidia-ml has no", symbol, "update the driver"];
        cases.push(case(Standin::new().without_symbol(symbol), Existence, &says));
    }
    cases.push(case(
        Standin::new().without_symbol("nvmlDeviceGetMemoryInfo_v2").without_symbol("nvmlDeviceGetMemoryInfo"),
        Existence,
        &[context, "libnvidia-ml has no nvmlDeviceGetMemoryInfo", "update the driver"],
    ));
    // A call fails.
    let calls: &[(&str, Known, &[&str])] = &[
        ("cuInit=803", Nothing, &["libcuda: cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", update]),
        ("cuInit=800", Nothing, &["libcuda: cuInit", "CUDA_ERROR_NOT_PERMITTED (800)", permissions]),
        ("cuInit=801", Nothing, &["libcuda: cuInit", "CUDA_ERROR_NOT_SUPPORTED (801)", "; "]),
        ("cuInit=999", Nothing, &["libcuda: cuInit", "CUDA_ERROR_UNKNOWN (999)", look_up]),
        ("cuInit=34", Nothing, &["libcuda: cuInit", "CUDA_ERROR_STUB_LIBRARY (34)", "remove the stubs folder from"]),
        ("cuDeviceGetCount=999", Nothing, &["libcuda: cuDeviceGetCount", "CUDA_ERROR_UNKNOWN (999)", look_up]),
        ("cuDeviceGet=46", Nothing, &["libcuda: cuDeviceGet for device 0", "CUDA_ERROR_DEVICE_UNAVAILABLE (46)", lost]),
        ("cuDeviceGetUuid_v2=999", Nothing, &["libcuda: cuDeviceGetUuid_v2 for device 0", "(999)", look_up]),
        ("nvmlInit_v2=9", Existence, &[context, "NVML_ERROR_DRIVER_NOT_LOADED (9)", "modprobe nvidia", preload]),
        ("nvmlInit_v2=18", Existence, &[context, "NVML_ERROR_LIB_RM_VERSION_MISMATCH (18)", update, preload]),
        ("nvmlInit_v2=4", Existence, &[context, "nvmlInit_v2", "NVML_ERROR_NO_PERMISSION (4)", permissions]),
        ("nvmlInit_v2=999", Existence, &["libnvidia-ml: nvmlInit_v2", "NVML_ERROR_UNKNOWN (999)", look_up]),
        (
            "nvmlDeviceGetHandleByUUID=6",
            Existence,
            &[context, "nvmlDeviceGetHandleByUUID for device 0", "NVML_ERROR_NOT_FOUND (6)", "nvidia-smi -L"],
        ),
        ("nvmlDeviceGetHandleByUUID=4", Existence, &[context, "NVML_ERROR_NO_PERMISSION (4)", permissions]),
        ("nvmlDeviceGetHandleByUUID=15", Existence, &["for device 0", "NVML_ERROR_GPU_IS_LOST (15)", lost]),
        ("nvmlDeviceGetMemoryInfo_v2=15", Existence, &["for device 0", "NVML_ERROR_GPU_IS_LOST (15)", lost]),
        ("nvmlDeviceGetMemoryInfo_v2=3", Existence, &[context, "NVML_ERROR_NOT_SUPPORTED (3)", "virtual GPUs and WSL"]),
        ("nvmlDeviceGetMemoryInfo_v2=4", Existence, &[context, "NVML_ERROR_NO_PERMISSION (4)", permissions]),
        ("nvmlDeviceGetMemoryInfo_v2=999", Existence, &["for device 0", "NVML_ERROR_UNKNOWN (999)", look_up]),
    ];
    cases.extend(calls.iter().map(|(fault, known, says)| case(Standin::new().fail(*fault), *known, says)));
    cases
}

fn words(case: &Case) -> impl Iterator<Item = &str> {
    case.says.iter().map(String::as_str)
}

#[test]
fn queries_where_nothing_can_be_read() {
    let script: Vec<String> = QUERIES.iter().map(|(plain, _, twin)| format!("{plain}; {twin}")).collect();
    let script = format!("{}; handle; handle 0; count; available", script.join("; "));
    each(&unreadable(), |case| {
        let outcome = case.machine.run(&script);
        ensure_unharmed(&outcome);
        ensure(outcome.stderr.is_empty(), "a query said something on stderr", &outcome);
        let exists = case.known == Known::Existence;
        for (plain, expected, twin) in QUERIES {
            let expected = match expected {
                Answer::Text(text) => (*text).to_owned(),
                Answer::AllZeros if exists => format!("[{ZEROS}]"),
                Answer::AllZeros => "[]".to_owned(),
            };
            ensure(outcome.answer(plain) == expected, &format!("`{plain}` is not `{expected}`"), &outcome);
            ensure_error(&outcome, twin, words(case));
        }
        ensure_error(&outcome, "handle", words(case));
        ensure_error(&outcome, "handle 0", words(case));
        ensure(outcome.answer("count") == if exists { "1" } else { "0" }, "miscounted", &outcome);
        ensure(outcome.answer("available") == exists.to_string(), "is_available", &outcome);
    });
}

#[test]
fn traces_where_nothing_can_be_read() {
    let script = "new; report; data; reset; new; stop; data; drop; drop; build; build 0; sleep 5; threads";
    // Without a device, the presence of libcupti changes nothing.
    let nothing = unreadable().into_iter().filter(|case| case.known == Known::Nothing);
    let with_cupti = nothing.map(|case| Case { machine: case.machine.cupti(), ..case });
    each(&unreadable().into_iter().chain(with_cupti).collect::<Vec<_>>(), |case| {
        let outcome = case.machine.run(script);
        ensure_unharmed(&outcome);
        ensure(outcome.reports().is_empty(), "a trace that is off reported", &outcome);
        ensure(outcome.answer("data") == "device=0 used=0 peaked=0 gauge=off stale=false", "is not off", &outcome);
        ensure_error(&outcome, "build", words(case));
        ensure_error(&outcome, "build 0", words(case));
        ensure(outcome.answer("threads") == "0", "left a thread", &outcome);
        let notices: Vec<_> = outcome.stderr.lines().collect();
        ensure(notices.len() == 1, "not one notice", &outcome);
        // If a later trace may succeed, the notice is about one trace only.
        let of_all = outcome.answer("build").starts_with("error[unavailable");
        let prefix = if of_all { "gpumem: traces are off: " } else { "gpumem: a trace is off: " };
        ensure(notices[0].starts_with(prefix), "the notice", &outcome);
        ensure(case.says.iter().all(|word| notices[0].contains(word)), "the notice lacks the reason", &outcome);
    });
}

/// Exact traces do not have to read the device.
#[test]
fn exact_traces_where_nothing_can_be_read() {
    let cases = unreadable().into_iter().filter(|case| case.known == Known::Existence);
    each(&cases.collect::<Vec<_>>(), |case| {
        let script = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; new; \
                      call cuMemAlloc_v2 &a 1000; figures; drop; sleep 5; threads";
        let outcome = case.machine.clone().cupti().run(script);
        ensure(outcome.is_clean() && outcome.stderr.is_empty(), "is not exact, or printed something", &outcome);
        ensure(outcome.answer("figures") == "1000 0", "is not exact", &outcome);
        ensure(outcome.answer("threads") == "0", "sampled although allocations are intercepted", &outcome);
    });
}

#[test]
fn preload_where_nothing_can_be_read() {
    each(&unreadable(), |case| {
        let outcome = case.machine.run("preload; try_preload; other_thread current; get 0; try_get 0");
        ensure_clean(&outcome);
        if case.known == Known::Nothing {
            ensure_error(&outcome, "try_preload", words(case));
            ensure_unharmed(&outcome);
            return;
        }
        // Without NVML, the device can be read after `preload` if the driver reports its memory.
        ensure(outcome.answer("try_preload") == "done", "could not preload", &outcome);
        ensure(outcome.contexts_created() == 1, "not one context", &outcome);
        if words(case).any(|word| word.contains("preload")) {
            let memory = "GPUMemory(total=15769, free=15242, used=527)";
            ensure(outcome.answer("get 0") == memory && outcome.answer("try_get 0") == memory, "unread", &outcome);
        }
    });
    for (fault, says) in [
        ("cuDevicePrimaryCtxRetain=2", ["CUDA_ERROR_OUT_OF_MEMORY (2)", "the device is full"]),
        ("cuDevicePrimaryCtxRetain=46", ["CUDA_ERROR_DEVICE_UNAVAILABLE (46)", "look at dmesg"]),
    ] {
        let outcome = Standin::new().fail(fault).run("preload; try_preload; get");
        ensure_unharmed(&outcome);
        let says = says.into_iter().chain(["libcuda: cuDevicePrimaryCtxRetain for device 0"]);
        ensure_error(&outcome, "try_preload", says);
        ensure(outcome.answer("get") == "GPUMemory(total=16384, free=15769, used=0)", "unread", &outcome);
    }
}

/// If the process sees no device, the answer "no device" is right, and the error names the settings that may hide devices.
#[test]
fn no_device() {
    let script = "try_get; try_get 0; try_free; try_used_no_cache; handle; build; get; get_all; try_get_all; try_count; \
                  max_free; try_max_free; try_preload; new; report; data; status";
    each(
        &[
            Standin::new().devices(0),
            Standin::new().cupti().devices(0),
            Standin::new().env("CUDA_VISIBLE_DEVICES", ""),
            Standin::new().env("CUDA_VISIBLE_DEVICES", "-1"),
            Standin::new().fail("cuInit=100"),
        ],
        |machine| {
            let outcome = machine.run(script);
            ensure_unharmed(&outcome);
            let status = outcome.answer("status");
            let is_off = status.starts_with("gauge=off source=off ") && status.contains("why=no device 0");
            ensure(is_off, "promises what no trace has", &outcome);
            for command in ["try_get", "try_get 0", "try_free", "try_used_no_cache", "handle", "build", "try_preload"] {
                let says = ["no device 0", "no CUDA device is visible", "look at CUDA_VISIBLE_DEVICES and nvidia-smi"];
                ensure_error(&outcome, command, says);
            }
            for (command, answer) in [
                ("get", ZEROS),
                ("get_all", "[]"),
                ("try_get_all", "[]"),
                ("try_count", "0"),
                ("max_free", "None 0 B"),
                ("try_max_free", "None 0 B"),
                ("data", "device=0 used=0 peaked=0 gauge=off stale=false"),
            ] {
                ensure(outcome.answer(command) == answer, &format!("`{command}` is not `{answer}`"), &outcome);
            }
            ensure(outcome.reports().is_empty() && outcome.stderr.lines().count() == 1, "not one notice", &outcome);
        },
    );
}

/// If neither NVML nor the driver reports memory, gpumem reports none.
#[test]
fn numbers_that_are_not_available() {
    let outcome = Standin::new().set("figures_max=1").run("context 0; get; try_get; new; report; data; build");
    ensure_clean(&outcome);
    ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
    ensure_error(&outcome, "try_get", ["reports no memory values for device 0", "compare nvidia-smi"]);
    ensure_error(&outcome, "build", ["reports no memory values for device 0", "compare nvidia-smi"]);
    ensure(outcome.reports().is_empty(), "reported", &outcome);
    let outcome = Standin::new().set("processes=empty").run("context 0; try_get; build; data");
    ensure(outcome.answer("try_get") == "GPUMemory(total=16384, free=15242, used=527)", "no process list", &outcome);
    ensure(outcome.answer("data").ends_with("gauge=sampled stale=false"), "no process list", &outcome);
}

/// Drivers older than 510 know only the first version of the call, which counts the memory that the driver reserves as used.
#[test]
fn the_first_version_of_the_memory_call() {
    for machine in [
        Standin::new().without_symbol("nvmlDeviceGetMemoryInfo_v2"),
        Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=13"),
    ] {
        let outcome = machine.run("try_get; new; data");
        ensure_unharmed(&outcome);
        ensure(outcome.answer("try_get") == "GPUMemory(total=16384, free=15769, used=615)", "figures", &outcome);
        ensure(outcome.answer("data").ends_with("gauge=sampled stale=false"), "trace", &outcome);
    }
}

#[test]
fn numbers_that_were_not_counted_are_not_zero() {
    for (machine, script) in [
        (Standin::new().cupti().env("GPUMEM_GAUGE", "off"), "new; summary"),
        (Standin::new().cupti().env("GPUMEM_GAUGE", "off").env("GPUMEM_SIM", "16GiB"), "new; summary"),
        (Standin::new().cupti().devices(0), "new; summary"),
        (Standin::new().cupti().env("GPUMEM_GAUGE", "sampled"), "summary"),
        (Standin::new(), "summary"),
    ] {
        let outcome = machine.run(script);
        let summary = outcome.answer("summary");
        ensure(!summary.contains("nothing was allocated"), "says that nothing was", &outcome);
        ensure(summary.contains("allocations are not intercepted: "), "does not say why", &outcome);
    }
}
