//! Tests `gpumem info`.

use gpumem_tests::Library;

use super::*;

const GIB: u64 = 1 << 30;

#[test]
fn all_gpus_with_their_memory_and_numbers() {
    // CUDA's order is the reverse of NVML's.
    let machine = Standin::new().devices(2).set("fastest=reversed").set("used[1]=4GiB");
    let outcome = gpumem(&machine, &["info"]);
    ended(&outcome, 0, &[]);
    without_context(&outcome);
    let expected = "\
driver 580.159.01, CUDA 13.0, NVML 13.580.159.01

 GPU  CUDA  name            total  used   free  reserved
                              GiB   GiB    GiB       GiB
 ───────────────────────────────────────────────────────────
 0       1  Stand-in GPU 0     16     0  15.40     0.601
   GPU-7374616e-642d-696e-2067-707500000000
 1       0  Stand-in GPU 1     17  4.00  12.40     0.601  █▉
   GPU-7374616e-642d-696e-2067-707500000001
";
    assert_eq!(outcome.stdout, expected, "{outcome}");
    let value = json(&gpumem(&machine, &["info", "--json"]));
    assert_eq!(value["driver_version"], "580.159.01");
    assert_eq!((&value["gpus"][1]["cuda_ordinal"], &value["gpus"][1]["index"]), (&0.into(), &1.into()));
    assert_eq!(value["gpus"][1]["used_bytes"], 4 * GIB);
    assert_eq!(value["gpus"][1]["total_bytes"], 17 * GIB);
    assert_eq!(value["not_read"], Value::Array(Vec::new()));
}

#[test]
fn no_driver_is_one_line_with_the_next_step() {
    let machine = Standin::new().without(Library::Cuda).without(Library::Nvml);
    for arguments in [&["info"][..], &["info", "--json"]] {
        let outcome = gpumem(&machine, arguments);
        ended(&outcome, 2, &["GPUs cannot be read: cannot load libnvidia-ml: "]);
        assert!(outcome.stderr.contains("is the NVIDIA driver installed"), "{outcome}");
        assert_eq!(outcome.stdout, "");
    }
    let outcome = gpumem(&Standin::new().devices(0), &["info"]);
    ended(&outcome, 2, &["no GPU: the driver is running, but finds no GPU; "]);
}

#[test]
fn without_nvml_there_is_what_cuda_knows() {
    let outcome = gpumem(&Standin::new().without(Library::Nvml), &["info", "--json"]);
    ended(&outcome, 2, &["memory and versions cannot be read: cannot load libnvidia-ml: "]);
    without_context(&outcome);
    let value = json(&outcome);
    assert_eq!(value["gpus"][0]["name"], "Stand-in GPU 0");
    assert_eq!((&value["gpus"][0]["used_bytes"], &value["gpus"][0]["index"]), (&Value::Null, &Value::Null));
    let outcome = gpumem(&Standin::new().without(Library::Nvml), &["info"]);
    assert!(outcome.stdout.starts_with("driver -, CUDA -, NVML -\n"), "{outcome}");
}

#[test]
fn without_cuda_there_is_what_nvml_knows() {
    let outcome = gpumem(&Standin::new().without(Library::Cuda), &["info", "--json"]);
    ended(&outcome, 2, &["CUDA's ordinals cannot be read: cannot load libcuda: "]);
    let value = json(&outcome);
    assert_eq!(value["gpus"][0]["total_bytes"], 16 * GIB);
    assert_eq!(value["gpus"][0]["cuda_ordinal"], Value::Null);
}

#[test]
fn a_number_that_cannot_be_read_is_not_0() {
    // The cases are: a lost device next to a working one; no permission; a driver that was updated while it was in use; no memory
    // values, as under WSL; a driver that is too old.
    let lost = gpumem(&Standin::new().devices(2).fail("nvmlDeviceGetHandleByIndex_v2[1]=15"), &["info"]);
    ended(&lost, 2, &["GPU 1 cannot be read: libnvidia-ml: nvmlDeviceGetHandleByIndex_v2 for device 1 failed with"]);
    assert!(lost.stdout.contains("\n 1       -  -                   -     -      -         -\n"), "{lost}");
    assert!(lost.stdout.contains("\n 0       0  Stand-in GPU 0     16"), "{lost}");
    let rejected = gpumem(&Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=4"), &["info", "--json"]);
    ended(&rejected, 2, &["the memory of GPU 0 cannot be read: "]);
    assert!(rejected.stderr.contains("NVML_ERROR_NO_PERMISSION (4); this user may not access the GPU"), "{rejected}");
    assert_eq!(json(&rejected)["gpus"][0]["free_bytes"], Value::Null);
    let mismatch = gpumem(&Standin::new().fail("cuInit=803"), &["info"]);
    ended(&mismatch, 2, &["CUDA's ordinals cannot be read: libcuda: cuInit failed with"]);
    assert!(mismatch.stderr.contains("the driver was updated while in use: reboot"), "{mismatch}");
    let without = gpumem(&Standin::new().set("figures_max=1"), &["info", "--json"]);
    ended(&without, 2, &["the memory of GPU 0 cannot be read: NVML reports no memory values for device 0"]);
    assert_eq!(json(&without)["gpus"][0]["total_bytes"], Value::Null);
    let old = gpumem(&Standin::new().without_symbol("nvmlDeviceGetMemoryInfo_v2"), &["info"]);
    ended(&old, 0, &[]);
    assert!(old.stdout.ends_with("the reserved memory of GPU 0: a driver before 510 counts it as used\n"), "{old}");
}

#[test]
fn the_slices_of_a_gpu_in_mig_mode() {
    let outcome = gpumem(&Standin::new().set("mig=1"), &["info"]);
    ended(&outcome, 0, &[]);
    assert!(outcome.stdout.contains("\n 0         -  Stand-in GPU 0     16"), "{outcome}");
    assert!(outcome.stdout.contains("707500000000, in MIG mode\n   MIG     0  Stand-in GPU 0      8"), "{outcome}");
    let value = json(&gpumem(&Standin::new().set("mig=1"), &["info", "--json"]));
    let gpu = &value["gpus"][0];
    assert_eq!((&gpu["mig"], &gpu["cuda_ordinal"]), (&true.into(), &Value::Null));
    let slice = &gpu["mig_devices"][0];
    assert_eq!((&slice["cuda_ordinal"], &slice["total_bytes"]), (&0.into(), &(8 * GIB).into()));
    assert!(slice["uuid"].as_str().is_some_and(|uuid| uuid.starts_with("MIG-")), "{value}");
    // This driver is too old to know MIG.
    let old = json(&gpumem(&Standin::new().without_symbol("nvmlDeviceGetMigMode"), &["info", "--json"]));
    assert_eq!((&old["gpus"][0]["mig"], &old["gpus"][0]["mig_devices"]), (&false.into(), &Value::Array(Vec::new())));
}

#[test]
fn hidden_gpus_and_tools_for_other_programs() {
    let machine = Standin::new().devices(2).env("CUDA_VISIBLE_DEVICES", "1");
    let outcome = gpumem(&machine, &["info"]);
    ended(&outcome, 0, &[]);
    assert!(outcome.stdout.ends_with("CUDA's ordinal of GPU 0: CUDA_VISIBLE_DEVICES hides it\n"), "{outcome}");
    assert_eq!(json(&gpumem(&machine, &["info", "--json"]))["gpus"][1]["cuda_ordinal"], 0);
    let outcome = gpumem(&Standin::new().env("CUDA_INJECTION64_PATH", "/nowhere/tool.so"), &["info"]);
    ended(&outcome, 0, &[]);
    assert!(!outcome.calls.iter().any(|call| call.contains("injection_begins")), "{outcome}");
    assert!(outcome.stdout.contains("\n 0       0  Stand-in GPU 0"), "{outcome}");
}

/// NVML has no memory values of a GPU that uses the memory of the machine.
#[test]
fn the_memory_of_the_machine() {
    let machine =
        Standin::new().set("integrated=1").fail("nvmlDeviceGetMemoryInfo_v2=3").fail("nvmlDeviceGetMemoryInfo=3");
    let outcome = gpumem(&machine, &["info", "--json"]);
    ended(&outcome, 0, &[]);
    without_context(&outcome);
    let value = json(&outcome);
    let text = std::fs::read_to_string("/proc/meminfo").expect("this is Linux");
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")).expect("it is there");
    let total: u64 = total.trim().trim_end_matches(" kB").parse().expect("a number");
    assert_eq!(value["gpus"][0]["total_bytes"], total * 1024, "{outcome}");
    assert_eq!(
        (&value["not_read"][0]["what"], &value["not_read"][0]["is_error"]),
        (&"the memory of GPU 0".into(), &false.into())
    );
    for command in ["info", "doctor"] {
        let outcome = gpumem(&machine, &[command]);
        assert!(outcome.stdout.contains("it has no separate memory, and NVML reports no values"), "{outcome}");
    }
    // The command does not show the memory of the machine for any other GPU.
    let outcome = gpumem(&Standin::new().fail("nvmlDeviceGetMemoryInfo_v2=3"), &["info"]);
    ended(&outcome, 2, &["the memory of GPU 0 cannot be read: "]);
}
