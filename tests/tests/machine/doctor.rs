//! Tests `gpumem doctor`.

use std::fs;

use gpumem_tests::Library;

use super::*;

fn machine() -> Standin {
    Standin::new().dispatch().env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"))
}

/// Returns the checks with this name: for each, its verdict, its finding and the next step.
#[track_caller]
fn checks(machine: &Standin, name: &str) -> Vec<(String, String)> {
    let outcome = gpumem(machine, &["doctor", "--json"]);
    without_context(&outcome);
    let value = json(&outcome);
    let checks = value["checks"].as_array().expect("a list").clone();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let problem = checks.iter().any(|check| check["verdict"] == "problem");
    ended(&outcome, i32::from(problem), &[]);
    let named = checks.iter().filter(|check| check["name"] == name);
    named
        .map(|check| (text(&check["verdict"]), format!("{}; {}", text(&check["found"]), text(&check["next"]))))
        .collect()
}

#[track_caller]
fn has(machine: &Standin, name: &str, verdict: &str, words: &str) {
    let checks = checks(machine, name);
    assert!(checks.iter().any(|(is, text)| is == verdict && text.contains(words)), "{machine}: {checks:?}");
}

#[test]
fn a_sound_machine_has_no_problem() {
    let outcome = gpumem(&machine().devices(2).cupti(), &["doctor"]);
    ended(&outcome, 0, &[]);
    without_context(&outcome);
    for line in [
        "ok       NVML            13.580.159.01\n",
        "ok       driver          580.159.01, for CUDA up to 13.0\n",
        "ok       CUDA            2 devices, /",
        "ok       GPU             1: Stand-in GPU 1\n",
        "ok       dispatch table  allocations can be intercepted in libcuda",
        "ok       CUPTI           of CUDA 13.2.2, /",
        "ok       traces          gauge exact, source dispatch\n",
        "ok       injection       CUDA_INJECTION64_PATH is not set\n",
        "ok       gpumem run      the injected library is /",
        "\n\nNo setting is set: `gpumem doctor --settings` lists the defaults.\n",
    ] {
        assert!(outcome.stdout.contains(line), "{line}\n{outcome}");
    }
    let value = json(&gpumem(&machine(), &["doctor", "--json"]));
    assert_eq!((&value["trace"]["gauge"], &value["trace"]["why_not_exact"]), (&"exact".into(), &Value::Null));
}

#[test]
fn each_failure_has_its_line() {
    has(&machine().without(Library::Nvml), "NVML", "problem", "is the NVIDIA driver installed");
    has(&machine().without(Library::Cuda), "CUDA", "problem", "cannot load libcuda");
    has(&machine().without(Library::Cuda).without(Library::Nvml), "traces", "problem", "off");
    has(&machine().fail("cuInit=803"), "CUDA", "problem", "the driver was updated while in use: reboot");
    has(&machine().fail("nvmlInit_v2=18"), "NVML", "problem", "the driver was updated while in use: reboot");
    has(&machine().fail("nvmlDeviceGetMemoryInfo_v2=4"), "GPU", "problem", "NVML_ERROR_NO_PERMISSION");
    has(&machine().devices(2).fail("nvmlDeviceGetHandleByIndex_v2[1]=15"), "GPU", "problem", "GPU 1: libnvidia-ml");
    has(&machine().devices(0), "GPU", "problem", "the driver finds no GPU");
    has(&machine().env("CUDA_VISIBLE_DEVICES", ""), "CUDA", "problem", "change CUDA_VISIBLE_DEVICES");
    has(&machine().set("mig=1"), "MIG", "ok", "one slice");
    // The result depends on this machine.
    assert_eq!(checks(&machine().without(Library::Nvml), "/dev/nvidia*").len(), 1);
    // This driver is too old for dispatch. The checks are made without and with CUPTI.
    let old = Standin::new();
    has(&old, "dispatch table", "problem", "`gpumem run` cannot record");
    has(&old, "traces", "warning", "gauge sampled, source sampling: ");
    has(&old, "CUPTI", "warning", "GPUMEM_CUPTI names the file or its folder");
    has(&old.clone().cupti(), "traces", "ok", "gauge exact, source cupti");
}

#[test]
fn settings_and_other_tools() {
    has(
        &machine().env("CUDA_INJECTION64_PATH", "/opt/tool.so"),
        "injection",
        "ok",
        "`/opt/tool.so`, which `gpumem run` loads as well",
    );
    has(&machine().env("GPUMEM_GAUGE", "nonsense"), "settings", "problem", "GPUMEM_GAUGE cannot be used: ");
    has(&machine().env("GPUMEM_GAUGE", "off"), "traces", "problem", "GPUMEM_GAUGE is off");
    for name in ["GPUMEM_CAPTURE", "GPUMEM_BASELINE"] {
        let what = format!("{name}: there is no folder `/nonexist`");
        has(&machine().env(name, "/nonexist/x"), "settings", "problem", &what);
    }
    has(&machine().env("GPUMEM_SIM", "16GiB"), "traces", "ok", "gauge exact, source simulation");
    let value = json(&gpumem(&machine().env("GPUMEM_SAMPLE_MS", "5"), &["doctor", "--json"]));
    let settings = value["settings"].as_array().expect("a list");
    let of = |name: &str| settings.iter().find(|setting| setting["name"] == name).expect("it is listed").clone();
    assert_eq!(
        (&of("GPUMEM_SAMPLE_MS")["value"], &of("GPUMEM_SAMPLE_MS")["from"]),
        (&"5".into(), &"environment".into())
    );
    assert_eq!((&of("GPUMEM_GAUGE")["value"], &of("GPUMEM_GAUGE")["from"]), (&"auto".into(), &"default".into()));
}

#[test]
fn only_settings_that_are_set_are_listed_unless_all_are_wanted() {
    let set = machine().env("GPUMEM_SAMPLE_MS", "5").env("GPUMEM_LEAKS", "1");
    let listed = |outcome: &Outcome| -> Vec<String> {
        let lines = outcome.stdout.lines().skip_while(|line| !line.starts_with(" setting"));
        let names = lines.filter_map(|line| line.split_whitespace().next());
        names.filter(|name| name.starts_with("GPUMEM")).map(str::to_owned).collect()
    };
    let outcome = gpumem(&set, &["doctor"]);
    assert_eq!(listed(&outcome), ["GPUMEM_SAMPLE_MS", "GPUMEM_LEAKS"], "{outcome}");
    let others = " other settings have their defaults: `gpumem doctor --settings` lists all.\n";
    assert!(outcome.stdout.ends_with(others), "{outcome}");
    let all = gpumem(&set, &["doctor", "--settings"]);
    assert!(all.stdout.contains("\n GPUMEM_SAMPLE_MS        environment  5\n"), "{all}");
    assert!(all.stdout.contains("\n GPUMEM_GAUGE            default      auto\n"), "{all}");
    assert!(!all.stdout.contains("--settings"), "{all}");
    let in_json = json(&gpumem(&set, &["doctor", "--json"]))["settings"].as_array().expect("a list").len();
    assert_eq!(listed(&all).len() + usize::from(all.stdout.contains("\n NO_COLOR")), in_json);
    // Without a setting there is no table.
    assert_eq!(listed(&gpumem(&machine(), &["doctor"])), [""; 0]);
}

/// `GPUMEM_CAPTURE` is for programs, not for the command.
#[test]
fn a_recording_is_not_replaced() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    fs::write(&file, "an older recording").expect("it can be written");
    for command in ["doctor", "info", "ps"] {
        let outcome = gpumem(&machine().env("GPUMEM_CAPTURE", file.path()).env("GPUMEM_LEAKS", "1"), &[command]);
        ended(&outcome, 0, &[]);
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "an older recording", "{outcome}");
    }
}

/// The stand-in GPU has 16 GiB.
#[test]
fn a_gpu_that_is_nearly_full_names_who_has_its_memory() {
    has(&machine(), "memory", "ok", "0: 15.40 GiB of 16 GiB are free; ");
    let full =
        machine().set("used=15700MiB").set("compute=4000000001:15000MiB:python").set("graphics=4000000002:45MiB:Xorg");
    has(
        &full,
        "memory",
        "warning",
        "0: 69 MiB of 16 GiB are free; in use by python (4000000001) 14.65 GiB, Xorg (4000000002) 45 MiB; 655 MiB by no process that the \
         driver lists; `gpumem run` records a program",
    );
    let without = machine().set("used=15700MiB").set("processes=unavailable");
    has(&without, "memory", "warning", "0: 69 MiB of 16 GiB are free; the driver lists no process; ");
}
