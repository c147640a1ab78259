//! What gpumem does where something is wrong with the driver: it never panics, hangs or ends the program, it never
//! reads a zero as truth, it creates no context that nobody asked for, and it says what is wrong and what to do.
//!
//! Each case is a machine (the stand-in driver, with what is wrong with it) and what gpumem is to say there.

use std::{
    os::unix::net::UnixDatagram,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use gpumem_tests::{Library, Outcome, Standin};

/// Each function under fastai's name, what it answers where nothing can be read, and its twin.
const QUERIES: &[(&str, Answer, &str)] = &[
    ("get", Answer::Text(ZEROS), "try_get"),
    ("get 0", Answer::Text(ZEROS), "try_get 0"),
    ("get_all", Answer::AllZeros, "try_get_all"),
    ("free", Answer::Text("0 B"), "try_free"),
    ("used", Answer::Text("0 B"), "try_used"),
    ("free_no_cache", Answer::Text("0 B"), "try_free_no_cache"),
    ("used_no_cache", Answer::Text("0 B"), "try_used_no_cache"),
    ("max_free", Answer::Text("None 0 B"), "try_max_free"),
];

const ZEROS: &str = "GPUMemory(total=0, free=0, used=0)";

#[derive(Clone, Copy)]
enum Answer {
    Text(&'static str),
    /// Zeros for each device that the driver counts.
    AllZeros,
}

/// What the driver tells of a card of which no figure can be read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Not even that it exists.
    Nothing,
    /// That it exists.
    Existence,
}

/// A machine where no memory can be read, and what an error has to name: the thing, the cause, the next step.
struct Case {
    machine: Standin,
    known: Known,
    says: Vec<String>,
}

fn case(machine: Standin, known: Known, says: &[&str]) -> Case {
    Case { machine, known, says: says.iter().map(|word| (*word).to_owned()).collect() }
}

fn standin() -> Standin {
    Standin::new()
}

/// The functions of the driver that gpumem asks for before it calls anything, from its own list.
fn required_of_cuda() -> Vec<&'static str> {
    let source = include_str!("../../../gpumem/src/sys/cuda/library.rs");
    let (_, list) = source.split_once("const SYMBOLS: &[&str] = &[").expect("gpumem lists the symbols it requires");
    let (list, _) = list.split_once("];").expect("the list ends");
    let symbols: Vec<_> = list.split('"').skip(1).step_by(2).collect();
    assert!(symbols.len() > 10, "{symbols:?}");
    symbols
}

/// Where nothing can be read, whoever asks, as long as there is no context to ask in.
fn unreadable() -> Vec<Case> {
    use Known::{Existence, Nothing};

    let update = "the driver was updated while in use: reboot";
    let lost = "has fallen off the bus or needs a reset: look at dmesg";
    let permissions = "look at the permissions of /dev/nvidia*";
    let context = "cannot read device 0 without creating a CUDA context";
    let preload = "create the context first, for example with gpumem::preload()";
    let look_up = "look the name up in NVIDIA's documentation, and see dmesg and nvidia-smi";
    let mut cases = vec![
        // A library is not there, or is none.
        case(
            standin().without(Library::Cuda).without(Library::Nvml),
            Nothing,
            &["cannot load libcuda", "libcuda.so", "is the NVIDIA driver installed"],
        ),
        case(
            standin().without(Library::Cuda),
            Nothing,
            &["cannot load libcuda", "libcuda.so", "in a container, was it started with GPU access"],
        ),
        case(standin().damaged(Library::Cuda), Nothing, &["cannot load libcuda", "is the NVIDIA driver installed"]),
        case(standin().without(Library::Nvml), Existence, &[context, "cannot load libnvidia-ml", preload]),
        case(standin().damaged(Library::Nvml), Existence, &[context, "cannot load libnvidia-ml", preload]),
        // No figures.
        case(
            standin().env("GPUMEM_STANDIN_FIGURES", "max"),
            Existence,
            &["NVML gives no memory figures for device 0", "virtual GPUs and WSL", "compare nvidia-smi"],
        ),
    ];
    // A function is not there.
    for symbol in required_of_cuda() {
        let says = ["libcuda has no", symbol, "the NVIDIA driver is too old or damaged; update the driver"];
        cases.push(case(standin().without_symbol(symbol), Nothing, &says));
    }
    for symbol in ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID"] {
        let says = [context, "libnvidia-ml has no", symbol, "update the driver"];
        cases.push(case(standin().without_symbol(symbol), Existence, &says));
    }
    cases.push(case(
        standin().without_symbol("nvmlDeviceGetMemoryInfo_v2").without_symbol("nvmlDeviceGetMemoryInfo"),
        Existence,
        &[context, "libnvidia-ml has no nvmlDeviceGetMemoryInfo", "update the driver"],
    ));
    // A call fails.
    let calls: &[(&str, Known, &[&str])] = &[
        ("cuInit=803", Nothing, &["libcuda: cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", update]),
        ("cuInit=800", Nothing, &["libcuda: cuInit", "CUDA_ERROR_NOT_PERMITTED (800)", permissions]),
        ("cuInit=801", Nothing, &["libcuda: cuInit", "CUDA_ERROR_NOT_SUPPORTED (801)", "; "]),
        ("cuInit=999", Nothing, &["libcuda: cuInit", "CUDA_ERROR_UNKNOWN (999)", look_up]),
        ("cuInit=34", Nothing, &["libcuda: cuInit", "CUDA_ERROR_STUB_LIBRARY (34)", "take the stubs folder out of"]),
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
    cases.extend(calls.iter().map(|(fault, known, says)| case(standin().fail(*fault), *known, says)));
    cases
}

/// Fails with everything about the run.
#[track_caller]
fn ensure(truth: bool, what: &str, outcome: &Outcome) {
    assert!(truth, "{what}\n{outcome}");
}

/// The program went on to its end as if nothing were wrong, and no context came into being.
#[track_caller]
fn ensure_unharmed(outcome: &Outcome) {
    ensure(outcome.is_clean(), "panicked or did not end well", outcome);
    ensure(outcome.contexts_created() == 0, "created a context", outcome);
}

/// An error that says all this.
#[track_caller]
fn ensure_error<'a>(command: &str, says: impl IntoIterator<Item = &'a str>, outcome: &Outcome) {
    let answer = outcome.answer(command);
    ensure(answer.starts_with("error["), &format!("`{command}` read something as truth"), outcome);
    for word in says {
        ensure(answer.contains(word), &format!("`{command}` does not say `{word}`"), outcome);
    }
}

fn words(case: &Case) -> impl Iterator<Item = &str> {
    case.says.iter().map(String::as_str)
}

/// Checks every case, so that one run shows all that are wrong.
#[track_caller]
fn each<T: std::panic::RefUnwindSafe>(
    cases: impl IntoIterator<Item = T>,
    check: impl Fn(&T) + std::panic::RefUnwindSafe,
) {
    let failed = cases.into_iter().filter(|case| std::panic::catch_unwind(|| check(case)).is_err()).count();
    assert_eq!(failed, 0, "this many cases failed; each is told above");
}

#[test]
fn queries_where_nothing_can_be_read() {
    let script: Vec<String> = QUERIES.iter().map(|(plain, _, twin)| format!("{plain}; {twin}")).collect();
    let script = format!("{}; handle; handle 0; count; available", script.join("; "));
    each(unreadable(), |case| {
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
            ensure_error(twin, words(case), &outcome);
        }
        ensure_error("handle", words(case), &outcome);
        ensure_error("handle 0", words(case), &outcome);
        ensure(outcome.answer("count") == if exists { "1" } else { "0" }, "miscounted", &outcome);
        ensure(outcome.answer("available") == exists.to_string(), "is_available", &outcome);
    });
}

#[test]
fn traces_where_nothing_can_be_read() {
    let script = "new; report; data; reset; new; stop; data; drop; drop; build; build 0; sleep 5; threads";
    // Where there is not even a device, that allocations could be heard helps nothing.
    let nothing = unreadable().into_iter().filter(|case| case.known == Known::Nothing);
    let with_cupti = nothing.map(|case| Case { machine: case.machine.cupti(), ..case });
    each(unreadable().into_iter().chain(with_cupti), |case| {
        let outcome = case.machine.run(script);
        ensure_unharmed(&outcome);
        ensure(outcome.reports().is_empty(), "a trace that is off reported", &outcome);
        ensure(outcome.answer("data") == "device=0 used=0 peaked=0 gauge=off stale=false", "is not off", &outcome);
        ensure_error("build", words(case), &outcome);
        ensure_error("build 0", words(case), &outcome);
        ensure(outcome.answer("threads") == "0", "left a thread", &outcome);
        let notices: Vec<_> = outcome.stderr.lines().collect();
        ensure(notices.len() == 1, "not one notice", &outcome);
        // What may be otherwise with the next trace is not said of all.
        let of_all = outcome.answer("build").starts_with("error[unavailable");
        let begins = if of_all { "gpumem: traces are off: " } else { "gpumem: a trace is off: " };
        ensure(notices[0].starts_with(begins), "the notice", &outcome);
        ensure(case.says.iter().all(|word| notices[0].contains(word)), "the notice lacks the reason", &outcome);
    });
}

/// What is heard needs no readings.
#[test]
fn exact_traces_where_nothing_can_be_read() {
    let cases = unreadable().into_iter().filter(|case| case.known == Known::Existence);
    each(cases, |case| {
        let script = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; new; \
                      call cuMemAlloc_v2 &a 1000; figures; drop; sleep 5; threads";
        let outcome = case.machine.clone().cupti().run(script);
        ensure(outcome.is_clean() && outcome.stderr.is_empty(), "is not exact without a word", &outcome);
        ensure(outcome.answer("figures") == "1000 0", "is not exact", &outcome);
        ensure(outcome.answer("threads") == "0", "sampled what is heard", &outcome);
    });
}

#[test]
fn preload_where_nothing_can_be_read() {
    each(unreadable(), |case| {
        let outcome = case.machine.run("preload; try_preload; other_thread current; get 0; try_get 0");
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        if case.known == Known::Nothing {
            ensure_error("try_preload", words(case), &outcome);
            ensure_unharmed(&outcome);
            return;
        }
        // Without NVML it is preload that makes the device readable, where the driver gives figures.
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
        let outcome = standin().fail(fault).run("preload; try_preload; get");
        ensure_unharmed(&outcome);
        ensure_error(
            "try_preload",
            says.into_iter().chain(["libcuda: cuDevicePrimaryCtxRetain for device 0"]),
            &outcome,
        );
        ensure(outcome.answer("get") == "GPUMemory(total=16384, free=15769, used=0)", "unread", &outcome);
    }
}

/// Where the process sees no device, that there is none is the truth, and the reason is what hides them.
#[test]
fn no_device() {
    let script = "try_get; try_get 0; try_free; try_used_no_cache; handle; build; get; get_all; try_get_all; try_count; \
                  max_free; try_max_free; try_preload; new; report; data; status";
    each(
        [
            standin().devices(0),
            standin().cupti().devices(0),
            standin().env("CUDA_VISIBLE_DEVICES", ""),
            standin().env("CUDA_VISIBLE_DEVICES", "-1"),
            standin().fail("cuInit=100"),
        ],
        |machine| {
            let outcome = machine.run(script);
            ensure_unharmed(&outcome);
            let status = outcome.answer("status");
            let is_off = status.starts_with("gauge=off source=off ") && status.contains("why=no device 0");
            ensure(is_off, "promises what no trace has", &outcome);
            for command in ["try_get", "try_get 0", "try_free", "try_used_no_cache", "handle", "build", "try_preload"] {
                let says = ["no device 0", "no CUDA device is visible", "look at CUDA_VISIBLE_DEVICES and nvidia-smi"];
                ensure_error(command, says, &outcome);
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

/// Whatever is wrong with NVML, the driver answers where there is a context to ask in.
#[test]
fn the_driver_answers_for_nvml_where_there_is_a_context() {
    let memory = "GPUMemory(total=15769, free=15242, used=527)";
    each(
        [
            standin().without(Library::Nvml),
            standin().damaged(Library::Nvml),
            standin().without_symbol("nvmlInit_v2"),
            standin().without_symbol("nvmlDeviceGetHandleByUUID"),
            standin().without_symbol("nvmlDeviceGetMemoryInfo_v2").without_symbol("nvmlDeviceGetMemoryInfo"),
            standin().fail("nvmlInit_v2=9"),
            standin().fail("nvmlInit_v2=18"),
            standin().fail("nvmlInit_v2=4"),
            standin().fail("nvmlDeviceGetHandleByUUID=6"),
            standin().fail("nvmlDeviceGetMemoryInfo_v2=3"),
            standin().fail("nvmlDeviceGetMemoryInfo_v2=4"),
        ],
        |machine| {
            let outcome = machine.run(
            "context 0; try_get; try_get 0; try_free_no_cache; other_thread try_get; other_thread current; new; pooled 20; \
             sleep 20; data; report; drop; sleep 5; current",
        );
            ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
            for command in ["try_get", "try_get 0", "other_thread try_get"] {
                ensure(outcome.answer(command) == memory, &format!("`{command}` is not `{memory}`"), &outcome);
            }
            // The pool grows by 32 MiB.
            let data = "device=0 used=33554432 peaked=0 gauge=sampled stale=false";
            ensure(outcome.answer("data") == data, &format!("`data` is not `{data}`"), &outcome);
            ensure(outcome.contexts_created() == 1, "created a context", &outcome);
            let tries = outcome.calls.iter().filter(|call| call.starts_with("nvmlInit_v2=")).count();
            ensure(tries <= 1, "initialises a broken NVML again for each reading", &outcome);
        },
    );
}

/// A lost device is lost for the driver too, which is not asked: it may hang.
#[test]
fn the_driver_is_not_asked_for_a_lost_device() {
    for fault in ["nvmlDeviceGetMemoryInfo_v2=15", "nvmlDeviceGetHandleByUUID=15", "nvmlDeviceGetMemoryInfo_v2=16"] {
        let outcome = standin().fail(fault).run("context 0; get; try_get; try_get_all; new; build; threads");
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
        for command in ["try_get", "try_get_all", "build"] {
            ensure_error(command, ["device 0", "look at dmesg for Xid messages"], &outcome);
        }
        ensure(!outcome.calls.iter().any(|call| call.starts_with("cuMemGetInfo")), "asked the driver", &outcome);
    }
}

/// Figures that are not available from anyone are no figures.
#[test]
fn figures_that_are_not_available() {
    let outcome =
        standin().env("GPUMEM_STANDIN_FIGURES", "max").run("context 0; get; try_get; new; report; data; build");
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
    ensure_error("try_get", ["gives no memory figures for device 0", "compare nvidia-smi"], &outcome);
    ensure_error("build", ["gives no memory figures for device 0", "compare nvidia-smi"], &outcome);
    ensure(outcome.reports().is_empty(), "reported", &outcome);
    let outcome = standin().set("processes=empty").run("context 0; try_get; build; data");
    ensure(outcome.answer("try_get") == "GPUMemory(total=16384, free=15242, used=527)", "no process list", &outcome);
    ensure(outcome.answer("data").ends_with("gauge=sampled stale=false"), "no process list", &outcome);
}

/// Drivers older than 510 know only the first version, in which what the driver reserves is in use.
#[test]
fn the_first_version_of_the_memory_call() {
    for machine in
        [standin().without_symbol("nvmlDeviceGetMemoryInfo_v2"), standin().fail("nvmlDeviceGetMemoryInfo_v2=13")]
    {
        let outcome = machine.run("try_get; new; data");
        ensure_unharmed(&outcome);
        ensure(outcome.answer("try_get") == "GPUMemory(total=16384, free=15769, used=615)", "figures", &outcome);
        ensure(outcome.answer("data").ends_with("gauge=sampled stale=false"), "trace", &outcome);
    }
}

#[test]
fn a_device_that_is_lost_between_two_calls() {
    for (fault, script, says) in [
        ("nvmlDeviceGetMemoryInfo_v2=15@2", "get 0; try_get 0", "NVML_ERROR_GPU_IS_LOST (15)"),
        ("nvmlDeviceGetMemoryInfo_v2=6@2", "get 0; try_get 0", "NVML_ERROR_NOT_FOUND (6)"),
        ("nvmlDeviceGetMemoryInfo_v2=2@2", "get 0; try_get 0", "NVML_ERROR_INVALID_ARGUMENT (2)"),
        ("nvmlDeviceGetMemoryInfo_v2=15@2", "handle; try_fast; fast", "NVML_ERROR_GPU_IS_LOST (15)"),
    ] {
        let outcome = standin().fail(fault).run(script);
        ensure_unharmed(&outcome);
        if script.starts_with("get") {
            ensure(outcome.answer("get 0") == "GPUMemory(total=16384, free=15769, used=0)", "before", &outcome);
            ensure_error("try_get 0", ["device 0", says], &outcome);
        } else {
            ensure_error("try_fast", ["device 0", says], &outcome);
            ensure(outcome.answer("fast") == "0 B", "after", &outcome);
        }
    }
}

/// Other processes and libraries write to stderr as well: what they write must not come in the middle of a line.
#[test]
fn each_notice_is_written_at_once() {
    let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(Duration::from_millis(10))).expect("a socket has one");
    let is_over = AtomicBool::new(false);
    let written = thread::scope(|scope| {
        // Each write is a message of its own.
        let reads = scope.spawn(|| {
            let (mut written, mut message) = (Vec::new(), vec![0; 1 << 16]);
            loop {
                let last = is_over.load(Ordering::SeqCst);
                match ours.recv(&mut message) {
                    Ok(length) => written.push(String::from_utf8_lossy(&message[..length]).into_owned()),
                    Err(_) if last => return written,
                    Err(_) => {}
                }
            }
        });
        let machine =
            standin().cupti().env("GPUMEM_LEAKS", "1").env("GPUMEM_SAMPLE_MS", "x").env("GPUMEM_BACKTRACE", "x");
        let machine = machine.stderr(theirs.into()).fail("nvmlDeviceGetMemoryInfo_v2=15@3");
        let outcome = machine.run(
            "context 0; exact; call cuMemAlloc_v2 &a 99999999999999; call cuMemAlloc_v2 &b 1000; unsubscribe; new; \
             await stale; build 7",
        );
        is_over.store(true, Ordering::SeqCst);
        ensure(outcome.succeeded(), "did not end well", &outcome);
        reads.join().expect("it only reads")
    });
    for start in [
        "cannot use GPUMEM_SAMPLE_MS",
        "device 0 is out of memory",
        "device 0 is sampled",
        "reports show ?",
        "process ",
    ] {
        assert!(written.iter().any(|text| text.starts_with(&format!("gpumem: {start}"))), "{start}: {written:?}");
    }
    let settings = written.iter().find(|text| text.contains("GPUMEM_SAMPLE_MS")).expect("as above");
    assert!(settings.contains("\ngpumem: cannot use GPUMEM_BACKTRACE"), "not one notice: {written:?}");
    let whole = |text: &String| text.starts_with("gpumem: ") && text.ends_with('\n');
    assert!(written.iter().all(whole), "in pieces: {written:?}");
}

/// Whatever uses them first, and however often: each is named once, with what happens instead.
#[test]
fn settings_that_cannot_be_used_are_one_notice() {
    const BAD: [&str; 6] =
        ["GPUMEM_REPORT", "GPUMEM_GAUGE", "GPUMEM_SOURCE", "GPUMEM_SAMPLE_MS", "GPUMEM_BACKTRACE", "GPUMEM_BUDGETS"];
    let machine = BAD.iter().fold(standin().cupti(), |machine, name| machine.env(name, "nonsense"));
    for script in [
        "get 0",
        "status",
        "subscribe",
        "summary",
        "memory_allocated",
        "tracker",
        "build; build 0; new; new",
        "of_thread; report; exact; report; sampled; report",
    ] {
        let outcome = machine.run(&format!("{script}; {script}"));
        let named: Vec<_> = outcome.stderr.lines().collect();
        ensure(outcome.is_clean() && named.len() == BAD.len(), "not one notice", &outcome);
        for (line, name) in named.iter().zip(BAD) {
            let begins = format!("gpumem: cannot use {name}: `nonsense` is not ");
            ensure(line.starts_with(&begins) && line.contains("; "), "the notice", &outcome);
        }
        let silent = machine.clone().env("GPUMEM_REPORT", "off").run(script);
        ensure(silent.stderr.is_empty(), "said something on stderr", &silent);
    }
}

#[test]
fn the_status_lists_the_variables_that_are_set() {
    let machine = standin().cupti().env("GPUMEM_GAUGE", " Sampled").env("GPUMEM_SAMPLE_MS", "x");
    let outcome = machine.run("environment; fork environment");
    let expected = "  GPUMEM_GAUGE= Sampled (how a trace measures, unless the program chooses its gauge): sampled|  \
                    GPUMEM_SAMPLE_MS=x (milliseconds between two readings of a sampled trace): cannot be used: `x` is not a \
                    whole number of milliseconds from 1 to 4294967295; readings are 1 ms apart";
    ensure(outcome.answers("environment") == [expected, "none"], "another list", &outcome);
    let outcome = standin().cupti().env("GPUMEM_LEAKS", "").run("environment");
    ensure(outcome.answer("environment") == "none", "none is set", &outcome);
}

/// The driver, NVML and CUPTI set handlers when they begin, which may be after gpumem has.
#[test]
fn nobody_calls_a_library_that_was_torn_down() {
    for (machine, script) in [
        (standin(), "context 0; sampled; forget; sleep 5"),
        (standin(), "subscribe; sampled; forget; sleep 5"),
        (standin().cupti(), "summary; sampled; exact; forget; forget; sleep 5"),
        (standin().cupti(), "context 0; exact; call cuMemAlloc_v2 &a 1000; forget"),
    ] {
        let outcome = machine.set("teardown=1").env("GPUMEM_LEAKS", "1").run(script);
        ensure_ended(&outcome);
        let first = outcome.calls.iter().position(|call| call.starts_with("teardown"));
        let first = first.unwrap_or_else(|| panic!("nothing was torn down\n{outcome}"));
        let late = outcome.calls[first..].iter().find(|call| !call.starts_with("teardown"));
        ensure(late.is_none(), "called after that", &outcome);
    }
}

#[track_caller]
fn ensure_ended(outcome: &Outcome) {
    ensure(outcome.is_clean(), "panicked or did not end well", outcome);
}

/// Nobody counted, which is not the same as nothing.
#[test]
fn what_is_not_counted_is_not_nothing() {
    for (machine, script) in [
        (standin().cupti().env("GPUMEM_GAUGE", "off"), "new; summary"),
        (standin().cupti().env("GPUMEM_GAUGE", "off").env("GPUMEM_SIM", "16GiB"), "new; summary"),
        (standin().cupti().devices(0), "new; summary"),
        (standin().cupti().env("GPUMEM_GAUGE", "sampled"), "summary"),
        (standin(), "summary"),
    ] {
        let outcome = machine.run(script);
        let summary = outcome.answer("summary");
        ensure(!summary.contains("nothing was allocated"), "says that nothing was", &outcome);
        ensure(summary.contains("allocations are not heard: "), "does not say why", &outcome);
    }
}

/// One card of two is lost: the other one is as before.
#[test]
fn one_lost_device_of_two() {
    let second = "GPUMemory(total=17408, free=16793, used=0)";
    let outcome = standin()
        .devices(2)
        .fail("nvmlDeviceGetMemoryInfo_v2[0]=15")
        .run("get; get 1; try_get 1; get_all; try_get_all; max_free; try_max_free; new; build 1; data");
    ensure_unharmed(&outcome);
    for (command, answer) in [
        ("get", ZEROS),
        ("get 1", second),
        ("try_get 1", second),
        ("get_all", &format!("[{ZEROS} {second}]")),
        ("max_free", "Some(1) 16.40 GiB"),
        ("build 1", "started"),
        ("data", "device=1 used=0 peaked=0 gauge=sampled stale=false"),
    ] {
        ensure(outcome.answer(command) == answer, &format!("`{command}` is not `{answer}`"), &outcome);
    }
    for command in ["try_get_all", "try_max_free"] {
        ensure_error(command, ["device 0", "NVML_ERROR_GPU_IS_LOST (15)", "look at dmesg"], &outcome);
    }
}

/// While the device cannot be read a trace says `?`, once says why, and its sampler lives on.
#[test]
fn a_device_that_is_lost_in_the_middle_of_a_trace() {
    let unknown = "\u{25b3}Used Peaked MB:      ?      ?";
    for start in ["new", "build", "build 0"] {
        for fault in
            ["nvmlDeviceGetMemoryInfo_v2=15@2", "nvmlDeviceGetMemoryInfo_v2=15@20", "nvmlDeviceGetMemoryInfo_v2=999@5"]
        {
            let script = format!(
                "context 0; {start}; pooled 1; await stale; report; data; await a_thread; drop; await no_threads"
            );
            let outcome = standin().fail(fault).run(&script);
            ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
            ensure(outcome.reports() == [unknown, &format!("{unknown} (exit)")], "told figures", &outcome);
            ensure(outcome.answer("data").ends_with("gauge=sampled stale=true"), "not stale", &outcome);
            let notices =
                outcome.stderr.matches("gpumem: reports show ? while device 0 cannot be read: libnvidia-ml").count();
            ensure(notices == 1, "not one notice", &outcome);
        }
    }
}

#[test]
fn a_device_that_comes_back_is_measured_again() {
    let outcome = standin()
        .fail("nvmlDeviceGetMemoryInfo_v2=15@10..200")
        .run("context 0; build; await stale; report; pooled 64; await fresh; report; data");
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    let reports = outcome.reports();
    ensure(reports[0].ends_with("     ?      ?"), "told figures while it was away", &outcome);
    ensure(reports[1].ends_with("    64      0"), "not what is in use since the start", &outcome);
    ensure(outcome.answer("data").ends_with("used=67108864 peaked=0 gauge=sampled stale=false"), "stale", &outcome);
}

/// What was in use at a reset that could not be read is not known later either: neither 64 nor 0 MiB since then is
/// true.
#[test]
fn a_reset_that_could_not_be_read_is_no_start() {
    let outcome = standin()
        .fail("nvmlDeviceGetMemoryInfo_v2=15@10..200")
        .run("context 0; build; await stale; pooled 64; reset; await readable; report; reset; report");
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    ensure(!outcome.reports()[0].ends_with("    64      0"), "told what was allocated before the reset", &outcome);
    ensure(outcome.reports()[1].ends_with("     0      0"), "not measured from the next reset on", &outcome);
}

#[test]
fn unknown_devices() {
    let outcome =
        standin().devices(2).run("get 2; try_get 2; handle 2; name 2; build 2; get 4294967295; try_get 4294967295");
    ensure_unharmed(&outcome);
    for command in ["try_get 2", "handle 2", "name 2", "build 2"] {
        let says = ["error[unknown device]", "no device 2", "sees CUDA devices 0 to 1", "look at CUDA_VISIBLE_DEVICES"];
        ensure_error(command, says, &outcome);
    }
    ensure_error("try_get 4294967295", ["no device 4294967295"], &outcome);
    ensure(outcome.answer("get 2") == ZEROS && outcome.answer("get 4294967295") == ZEROS, "not zeros", &outcome);
}

/// A device number is a CUDA ordinal, whatever NVML calls the card: its name and its figures are those of one card.
#[test]
fn the_right_card() {
    /// A setting, the environment, and the cards that CUDA then sees, by NVML's numbers.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [u64]);

    let two = [("CUDA_VISIBLE_DEVICES", "1,0")];
    let first = "GPU-7374616e-642d-696e-2067-707500000000";
    let cases: &[Case<'_>] = &[
        ("devices=3", &[], &[0, 1, 2]),
        ("devices=2", &[("CUDA_VISIBLE_DEVICES", "1")], &[1]),
        ("devices=2", &two, &[1, 0]),
        ("devices=3", &[("CUDA_VISIBLE_DEVICES", "2,0,7,1")], &[2, 0]),
        ("devices=2", &[("CUDA_VISIBLE_DEVICES", first)], &[0]),
        ("devices=3,fastest=reversed", &[], &[2, 1, 0]),
        ("devices=3,fastest=reversed", &[("CUDA_VISIBLE_DEVICES", "0")], &[2]),
        ("devices=3,fastest=reversed", &[("CUDA_DEVICE_ORDER", "PCI_BUS_ID")], &[0, 1, 2]),
        ("devices=3,fastest=reversed", &[("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), two[0]], &[1, 0]),
    ];
    for (setting, env, cards) in cases {
        let machine = env.iter().fold(standin().set(*setting), |machine, (name, value)| machine.env(name, value));
        let last = cards.len() - 1;
        let script =
            format!("name {last}; get_all; try_get_all; get {last}; max_free; context {last}; current; get; new; data");
        let outcome = machine.run(&script);
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        let memory = |card: &u64, used: u64| {
            let total = 16_384 + card * 1024;
            format!("GPUMemory(total={total}, free={}, used={used})", total - 615 - used)
        };
        let all: Vec<String> = cards.iter().map(|card| memory(card, 0)).collect();
        let all = format!("[{}]", all.join(" "));
        let card = &cards[last];
        // Each card has 1 GiB more than the one before.
        let freest = (0..).zip(cards.iter()).max_by_key(|(_, card)| **card).map(|(ordinal, _): (u32, _)| ordinal);
        for (command, answer) in [
            (format!("name {last}"), format!("Stand-in GPU {card}")),
            ("get_all".to_owned(), all.clone()),
            ("try_get_all".to_owned(), all),
            (format!("get {last}"), memory(card, 0)),
            ("current".to_owned(), last.to_string()),
            ("get".to_owned(), memory(card, 527)),
            ("data".to_owned(), format!("device={last} used=0 peaked=0 gauge=sampled stale=false")),
        ] {
            ensure(outcome.answer(&command) == answer, &format!("`{command}` is not `{answer}`"), &outcome);
        }
        ensure(outcome.answer("max_free").starts_with(&format!("{freest:?} ")), "max_free", &outcome);
    }
}

/// On a card that is split into MIG slices the figures are the slice's and not the card's.
#[test]
fn mig_slices() {
    let slice = "MIG-7374616e-642d-696e-206d-696700000001";
    for (machine, total) in
        [(standin().set("mig=1"), 8192), (standin().set("mig=1,devices=2").env("CUDA_VISIBLE_DEVICES", slice), 8704)]
    {
        let outcome =
            machine.run("count; try_get; get_all; try_free_no_cache; new; context 0; sleep 10; data; try_get 0");
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        let before = format!("GPUMemory(total={total}, free={total}, used=0)");
        let after = format!("GPUMemory(total={total}, free={}, used=527)", total - 527);
        ensure(outcome.answer("count") == "1", "miscounted", &outcome);
        ensure(outcome.answer("try_get") == before, "not the slice", &outcome);
        ensure(outcome.answer("get_all") == format!("[{before}]"), "not the slice", &outcome);
        ensure(outcome.answer("try_get 0") == after, "not the slice", &outcome);
        ensure(outcome.answer("data").starts_with("device=0 used=552599552 "), "not the slice", &outcome);
    }
}

/// Where nothing is wrong: no query and no trace creates a context, on any thread, and the current one stays.
#[test]
fn only_preload_creates_a_context() {
    let queries: Vec<String> = QUERIES.iter().map(|(plain, _, twin)| format!("{plain}; {twin}")).collect();
    let queries = format!("{}; handle 1; fast; name 1; new; report; drop; build 1; sleep 5; drop", queries.join("; "));
    let outcome = standin().devices(2).run(&queries);
    ensure_unharmed(&outcome);
    for (_, _, twin) in QUERIES {
        ensure(!outcome.answer(twin).starts_with("error"), &format!("`{twin}` failed"), &outcome);
    }
    ensure(!outcome.calls.iter().any(|call| call.starts_with("cuDevicePrimaryCtxRetain")), "retained one", &outcome);

    let outcome = standin().devices(2).run(&format!("context 1; {queries}; current; other_thread used_no_cache"));
    ensure(outcome.is_clean() && outcome.contexts_created() == 1, "created a context", &outcome);
    ensure(outcome.answer("current") == "1", "the current device changed", &outcome);
    ensure(outcome.answer("try_get") == "GPUMemory(total=17408, free=16266, used=527)", "not the current", &outcome);

    let outcome = standin().devices(2).run("preload; preload; try_preload; current; get_all");
    ensure(outcome.is_clean() && outcome.contexts_created() == 1, "not one context", &outcome);
    ensure(outcome.answer("get_all").starts_with("[GPUMemory(total=16384, free=15242, used=527) "), "unread", &outcome);
}

/// What is retained or pushed for one call is given back by it, and what is called was asked for before.
#[test]
fn calls_are_balanced_and_were_asked_for() {
    let queries: Vec<&str> = QUERIES.iter().map(|(.., twin)| *twin).collect();
    let script = format!("{0}; try_preload; {0}; name; new; sleep 5; report", queries.join("; "));
    for machine in [standin(), standin().without(Library::Nvml)] {
        let outcome = machine.run(&script);
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        let count = |call: &str| outcome.calls.iter().filter(|made| made.starts_with(call)).count();
        ensure(count("cuMemPoolTrimTo") > 0, "never trimmed", &outcome);
        ensure(count("cuCtxPushCurrent_v2") == count("cuCtxPopCurrent_v2"), "left a context current", &outcome);
        let kept = count("cuDevicePrimaryCtxRetain") - count("cuDevicePrimaryCtxRelease");
        ensure(kept == 1, "kept a context beyond the one that preload keeps", &outcome);
        let required = required_of_cuda();
        for call in outcome.calls.iter().filter(|call| call.starts_with("cu")) {
            let function = call.split(['[', '=']).next().unwrap_or_default();
            ensure(required.contains(&function), &format!("{function} is called and not asked for"), &outcome);
        }
    }
}

/// `no_cache` waits, then trims; where it cannot, its twin says so and the plain one is zero.
#[test]
fn emptying_the_cache() {
    let pooled = "context 0; pooled 100; give_back; pooled 1; pooled 64";
    let outcome = standin().run(&format!("{pooled}; used; used_no_cache; other_thread used"));
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    let calls: Vec<_> =
        outcome.calls.iter().filter(|call| call.contains("Synchronize") || call.contains("Trim")).collect();
    ensure(calls.last().is_some_and(|call| call.starts_with("cuMemPoolTrimTo")), "did not trim last", &outcome);
    for (fault, script, says) in [
        ("cuCtxSynchronize=999", pooled, ["cuCtxSynchronize for device 0", "CUDA_ERROR_UNKNOWN (999)"]),
        ("cuMemPoolTrimTo=1", pooled, ["cuMemPoolTrimTo for device 0", "CUDA_ERROR_INVALID_VALUE (1)"]),
        ("cuDeviceGetDefaultMemPool=999", pooled, ["MemPool for device 0", "CUDA_ERROR_UNKNOWN (999)"]),
        ("nvmlDeviceGetMemoryInfo_v2=15", pooled, ["for device 0", "NVML_ERROR_GPU_IS_LOST (15)"]),
    ] {
        let script = format!("{script}; try_free_no_cache; free_no_cache; try_used_no_cache; used_no_cache; current");
        let outcome = standin().fail(fault).run(&script);
        ensure(outcome.is_clean() && outcome.contexts_created() == 1, "panicked or did not end well", &outcome);
        ensure_error("try_free_no_cache", says, &outcome);
        ensure_error("try_used_no_cache", says, &outcome);
        ensure(outcome.answer("free_no_cache") == "0 B", "`free_no_cache`", &outcome);
        ensure(outcome.answer("used_no_cache") == "0 B", "`used_no_cache`", &outcome);
        ensure(outcome.answer("current") == "0", "the context changed", &outcome);
    }
    // A capture is not broken by asking.
    let script =
        "context 0; capture; try_free_no_cache; free_no_cache; try_used_no_cache; try_used; new; data; end_capture";
    let outcome = standin().run(script);
    ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
    for command in ["try_free_no_cache", "try_used_no_cache"] {
        let says = ["for device 0", "a stream is being captured: call this before or after the capture"];
        ensure_error(command, says, &outcome);
    }
    ensure(outcome.answer("free_no_cache") == "0 B", "`free_no_cache`", &outcome);
    ensure(outcome.answer("try_used") == "527 MiB", "could not be read", &outcome);
    ensure(outcome.answer("end_capture") == "whole", "broke the capture", &outcome);
    // Devices without pools have no cache.
    let outcome = standin().set("pools=0").run("context 0; pooled 100; try_used_no_cache");
    ensure(outcome.answer("try_used_no_cache") == "627 MiB", "no pools", &outcome);
}

/// The current device cannot be told: what asks for it says so, what names a device does not need it.
#[test]
fn the_current_device_cannot_be_told() {
    for (fault, script) in [("cuCtxGetCurrent=999", ""), ("cuCtxGetDevice=999", "context 0; ")] {
        let outcome =
            standin().fail(fault).run(&format!("{script}get; try_get; try_get 0; get_all; build; build 0; current"));
        // cudarc itself cannot make a context current where it cannot tell which is.
        ensure(outcome.is_clean(), "panicked or did not end well", &outcome);
        let call = fault.split_once('=').map(|(call, _)| call);
        for command in ["try_get", "build", "current"] {
            ensure_error(command, call.into_iter().chain(["CUDA_ERROR_UNKNOWN (999)", "see dmesg"]), &outcome);
        }
        ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
        ensure(outcome.answer("try_get 0").starts_with("GPUMemory(total=16384"), "`try_get 0`", &outcome);
        ensure(outcome.answer("build 0") == "started", "`build 0`", &outcome);
    }
}
