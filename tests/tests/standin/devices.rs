//! Tests which GPU a device number refers to.

use gpumem_tests::{Standin, ensure, ensure_clean, ensure_error, ensure_unharmed};

use super::faults::ZEROS;

#[test]
fn unknown_devices() {
    let outcome = Standin::new()
        .devices(2)
        .run("get 2; try_get 2; handle 2; name 2; build 2; get 4294967295; try_get 4294967295");
    ensure_unharmed(&outcome);
    for command in ["try_get 2", "handle 2", "name 2", "build 2"] {
        let says = ["error[unknown device]", "no device 2", "sees CUDA devices 0 to 1", "look at CUDA_VISIBLE_DEVICES"];
        ensure_error(&outcome, command, says);
    }
    ensure_error(&outcome, "try_get 4294967295", ["no device 4294967295"]);
    ensure(outcome.answer("get 2") == ZEROS && outcome.answer("get 4294967295") == ZEROS, "not zeros", &outcome);
}

/// A device number is a CUDA ordinal, and not the index of the GPU in NVML. The name and the memory must belong to the same
/// GPU.
#[test]
fn the_right_card() {
    /// The setting of the machine, the environment, and NVML's indexes of the GPUs that CUDA then sees.
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
        let machine = env.iter().fold(Standin::new().set(*setting), |machine, (name, value)| machine.env(name, value));
        let last = cards.len() - 1;
        let script =
            format!("name {last}; get_all; try_get_all; get {last}; max_free; context {last}; current; get; new; data");
        let outcome = machine.run(&script);
        ensure_clean(&outcome);
        let memory = |card: &u64, used: u64| {
            let total = 16_384 + card * 1024;
            format!("GPUMemory(total={total}, free={}, used={used})", total - 615 - used)
        };
        let all: Vec<String> = cards.iter().map(|card| memory(card, 0)).collect();
        let all = format!("[{}]", all.join(" "));
        let card = &cards[last];
        // Each GPU has 1 GiB more than the previous one.
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

/// On a GPU that is split into MIG slices, the numbers describe the slice and not the GPU.
#[test]
fn mig_slices() {
    let slice = "MIG-7374616e-642d-696e-206d-696700000001";
    for (machine, total) in [
        (Standin::new().set("mig=1"), 8192),
        (Standin::new().set("mig=1,devices=2").env("CUDA_VISIBLE_DEVICES", slice), 8704),
    ] {
        let outcome =
            machine.run("count; try_get; get_all; try_free_no_cache; new; context 0; sleep 10; data; try_get 0");
        ensure_clean(&outcome);
        let before = format!("GPUMemory(total={total}, free={total}, used=0)");
        let after = format!("GPUMemory(total={total}, free={}, used=527)", total - 527);
        ensure(outcome.answer("count") == "1", "miscounted", &outcome);
        ensure(outcome.answer("try_get") == before, "not the slice", &outcome);
        ensure(outcome.answer("get_all") == format!("[{before}]"), "not the slice", &outcome);
        ensure(outcome.answer("try_get 0") == after, "not the slice", &outcome);
        ensure(outcome.answer("data").starts_with("device=0 used=552599552 "), "not the slice", &outcome);
    }
}

/// If the current device is not known, calls that need it are errors. Calls that name a device do not need it.
#[test]
fn the_current_device_is_not_known() {
    for script in ["", "context 0; "] {
        let outcome = Standin::new()
            .fail("cuCtxGetDevice=999")
            .run(&format!("{script}get; try_get; try_get 0; get_all; build; build 0; current"));
        ensure_clean(&outcome);
        for command in ["try_get", "build", "current"] {
            ensure_error(&outcome, command, ["cuCtxGetDevice", "CUDA_ERROR_UNKNOWN (999)", "see dmesg"]);
        }
        ensure(outcome.answer("get") == ZEROS, "`get` is not zeros", &outcome);
        ensure(outcome.answer("try_get 0").starts_with("GPUMemory(total=16384"), "`try_get 0`", &outcome);
        ensure(outcome.answer("build 0") == "started", "`build 0`", &outcome);
    }
}
