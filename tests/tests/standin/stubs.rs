//! The stand-in driver's stubs are those of NVIDIA's drivers, byte for byte, and each driver that is made of them works.

#![cfg(target_arch = "x86_64")]

use std::collections::HashSet;

use gpumem_tests::{DEINITIALIZED, Outcome, Patch, Place, Standin};

/// From `cuda.rs` and `physical.rs` of the stand-in driver, whose stubs jump.
const JUMPING: [&str; 8] = [
    "cuInit",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuStreamDestroy_v2",
    "cuMemGetInfo_v2",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
];

/// From `memory.rs`, whose stubs call.
const CALLING: [&str; 8] = [
    "cuMemAlloc_v2",
    "cuMemAllocPitch_v2",
    "cuMemAllocManaged",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostRegister",
    "cuArrayCreate_v2",
];

/// Calls that go through stubs of both forms, some with a failure.
const CALLS: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; \
                     call cuMemAlloc_v2 &a 1000; call cuMemAllocPitch_v2 &b &pitch 100 10 4; call cuMemAllocAsync &c 1000 0; \
                     call cuMemAllocAsync &d 1000 0; call cuMemFree_v2 a; call cuMemFree_v2 b; call cuMemFreeAsync c 0; \
                     call cuMemFreeAsync_ptsz d 0; call cuMemCreate &h 2097152 on:0 0; call cuMemRelease h";
const REFUSED: &str = "call cuMemAlloc_v2 &a 0; call cuMemRelease 7";

#[track_caller]
fn runs(machine: &Standin, script: &str) -> Outcome {
    let outcome = machine.run(&format!("{CALLS}; {REFUSED}; {script}"));
    assert!(outcome.is_clean(), "{outcome}");
    let answers = outcome.stdout.lines().filter(|line| line.starts_with("> call "));
    let failed: Vec<_> = answers.filter(|line| !line.ends_with(": 0")).collect();
    assert_eq!(failed, ["> call cuMemAlloc_v2 &a 0: 1", "> call cuMemRelease 7: 1"], "{outcome}");
    outcome
}

/// Compares bytes in hexadecimal with a pattern, in which `_` is any digit.
fn matches(bytes: &str, pattern: &str) -> bool {
    let pattern: String = pattern.split_whitespace().collect();
    let same = bytes.chars().zip(pattern.chars()).all(|(digit, wanted)| wanted == '_' || digit == wanted);
    same && bytes.len() == pattern.len()
}

#[test]
fn stubs_are_those_of_drivers_470_to_580() {
    // cmp [rip+_], 0x321cba00; je 6; jmp [rip+_]; mov eax, 4; ret
    let jumping = "813d ________ 00ba1c32 7406 ff25 ________ b804000000 c3";
    // push rbp; mov rbp, rsp; push r12; sub rsp, 8; cmp; je; call [rip+_]; what looks at the result; the end; a place for a log; what
    // returns 4
    let calling = "55 4889e5 4154 4883ec08 813d ________ 00ba1c32 0f84 ________ ff15 ________ \
                   4189c4 85c0 740f 3d58020000 7408 8d40fd 83f801 770a 4489e0 4c8b65f8 c9 c3 90 ____ \
                   41bc04000000 4489e0 4c8b65f8 c9 c3";
    for (functions, pattern) in [(JUMPING, jumping), (CALLING, calling)] {
        let count = pattern.split_whitespace().collect::<String>().len() / 2;
        let commands = functions.map(|function| format!("stub_bytes {function} {count}"));
        let outcome = Standin::new().dispatch().run(&commands.join("; "));
        for command in &commands {
            assert!(matches(outcome.answer(command), pattern), "{command} is not {pattern}\n{outcome}");
        }
    }
}

#[test]
fn stubs_share_a_word_and_have_slots_of_their_own() {
    let functions = || JUMPING.iter().chain(&CALLING);
    let commands = functions().map(|name| format!("stub {name}; slot_access {name}; slot_is {name}"));
    let outcome = runs(&Standin::new().dispatch(), &commands.collect::<Vec<_>>().join("; "));
    let (mut words, mut slots) = (HashSet::new(), HashSet::new());
    for function in functions() {
        let stub: Vec<_> = outcome.answer(&format!("stub {function}")).split(' ').collect();
        let form = if JUMPING.contains(function) { "Jumps" } else { "Calls" };
        assert_eq!(stub[..2], [form, &format!("{DEINITIALIZED:#x}")], "{function}\n{outcome}");
        words.insert(stub[2]);
        slots.insert(stub[3]);
        assert_eq!(outcome.answer(&format!("slot_access {function}")), "rw-p", "{function}\n{outcome}");
        assert_eq!(outcome.answer(&format!("slot_is {function}")), "driver", "{function}\n{outcome}");
    }
    assert_eq!((words.len(), slots.len()), (1, JUMPING.len() + CALLING.len()), "{outcome}");
}

#[test]
fn a_driver_whose_stubs_are_not_known_works() {
    let outcome = runs(&Standin::new(), "stub cuInit; stub cuMemAlloc_v2");
    for command in ["stub cuInit", "stub cuMemAlloc_v2"] {
        assert!(!outcome.answer(command).contains(&format!("{DEINITIALIZED:#x}")), "{outcome}");
    }
}

#[test]
fn drivers_that_are_to_be_refused_work() {
    for function in ["cuMemAlloc_v2", "cuMemRelease"] {
        let [stub, access, is] = ["stub", "slot_access", "slot_is"].map(|command| format!("{command} {function}"));
        let (all, good) = (format!("stub cuMemFree_v2; {stub}; {access}; {is}"), Standin::new().dispatch());
        let word = |outcome: &Outcome, stub: &str| outcome.answer(stub).split(' ').nth(2).map(str::to_owned);
        let slot = |outcome: &Outcome, stub: &str| outcome.answer(stub).split(' ').nth(3).map(str::to_owned);

        let outcome = runs(&good.clone().patch(Patch::OtherNumber(function)), &all);
        let compared = |stub| outcome.answer(stub).contains(&format!("{DEINITIALIZED:#x}"));
        assert!(!compared(&stub) && compared("stub cuMemFree_v2"), "{outcome}");

        let outcome = runs(&good.clone().patch(Patch::OtherWord(function)), &all);
        assert_ne!(word(&outcome, &stub), word(&outcome, "stub cuMemFree_v2"), "{outcome}");

        let outcome = runs(&good.clone().patch(Patch::Slot(function, Place::Relro)), &all);
        assert_eq!([outcome.answer(&access), outcome.answer(&is)], ["r--p", "driver"], "{outcome}");

        let outcome = runs(&good.clone().patch(Patch::Slot(function, Place::ReadOnly)), &all);
        assert_eq!([outcome.answer(&access), outcome.answer(&is)], ["r--p", "driver"], "{outcome}");

        let outcome = runs(&good.clone().patch(Patch::Slot(function, Place::Split)), &format!("{stub}; {access}"));
        assert_eq!(outcome.answer(&access), "rw-p", "{outcome}");
        assert!(slot(&outcome, &stub).is_some_and(|slot| slot.ends_with(['4', 'c'])), "{outcome}");

        let outcome = runs(&good.clone().bad_slot(function), &all);
        assert_eq!([outcome.answer(&access), outcome.answer(&is)], ["rw-p", "other"], "{outcome}");

        // The calls go past the slot.
        let bytes = format!("stub_bytes {function} 1");
        let outcome = runs(&good.patch(Patch::Overwritten(function)), &bytes);
        assert_eq!(outcome.answer(&bytes), "e9", "{outcome}");
    }
    let machine = Standin::new().patch(Patch::SharedSlot("cuMemFreeAsync", "cuMemFreeAsync_ptsz"));
    let outcome = runs(&machine, "slot_replace cuMemFreeAsync_ptsz; stub cuMemFreeAsync; stub cuMemFreeAsync_ptsz");
    let slots = ["stub cuMemFreeAsync", "stub cuMemFreeAsync_ptsz"].map(|stub| outcome.answer(stub).split(' ').nth(3));
    assert_eq!(slots[0], slots[1], "{outcome}");
}

/// The kernel refuses a store to the slots, so they are read-only.
#[test]
fn read_only_slots_cannot_be_replaced() {
    for place in [Place::Relro, Place::ReadOnly] {
        let machine = Standin::new().patch(Patch::Slot("cuMemAlloc_v2", place));
        let outcome = machine.run("slot_is cuMemAlloc_v2; slot_replace cuMemAlloc_v2");
        assert!(!outcome.succeeded() && outcome.answer("slot_is cuMemAlloc_v2") == "driver", "{outcome}");
        assert!(outcome.answers("slot_replace cuMemAlloc_v2").is_empty(), "{outcome}");
    }
}

#[test]
fn a_tool_takes_slots_and_gives_them_back() {
    let frees = "call cuMemFree_v2 0";
    let script = format!(
        "slot_replace cuMemAlloc_v2 cuMemFree_v2 cuMemRelease; slot_is cuMemFree_v2; {frees}; {frees}; call cuMemRelease 7; \
         slot_calls cuMemFree_v2; slot_calls cuMemAlloc_v2; slot_calls cuMemRelease; slot_replace cuMemFree_v2; {frees}; \
         slot_calls cuMemFree_v2; slot_restore cuMemFree_v2; slot_is cuMemFree_v2; {frees}; slot_calls cuMemFree_v2; \
         slot_restore cuMemFree_v2; slot_is cuMemFree_v2; {frees}; slot_calls cuMemFree_v2"
    );
    let outcome = Standin::new().dispatch().run(&format!("{CALLS}; {script}"));
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.answers("slot_is cuMemFree_v2"), ["tool", "tool", "driver"], "{outcome}");
    assert_eq!(outcome.answers("slot_calls cuMemFree_v2"), ["2", "4", "5", "5"], "{outcome}");
    assert_eq!(outcome.answer("slot_calls cuMemAlloc_v2"), "0", "{outcome}");
    assert_eq!(outcome.answer("slot_calls cuMemRelease"), "1", "{outcome}");
    assert_eq!(outcome.answer("call cuMemRelease 7"), "1", "{outcome}");
    assert_eq!(outcome.answers(frees), ["0"; 5], "{outcome}");
}

#[test]
fn a_tool_writes_over_stubs() {
    let outcome = Standin::new().dispatch().run(&format!(
        "{CALLS}; stub_bytes cuMemFree_v2 6; slot_replace cuMemAlloc_v2; stub_overwrite cuMemFree_v2 cuMemRelease; call cuMemFree_v2 0; \
         call cuMemRelease 7; slot_calls cuMemFree_v2; slot_calls cuMemRelease; stub_bytes cuMemFree_v2 6; slot_calls cuMemAlloc_v2"
    ));
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(outcome.answers("stub_bytes cuMemFree_v2 6"), ["554889e54154", "ff2500000000"], "{outcome}");
    assert_eq!(outcome.answer("call cuMemRelease 7"), "1", "{outcome}");
    for (calls, seen) in [("cuMemFree_v2", "1"), ("cuMemRelease", "1"), ("cuMemAlloc_v2", "0")] {
        assert_eq!(outcome.answer(&format!("slot_calls {calls}")), seen, "{outcome}");
    }
}

#[test]
fn stacks_go_through_the_stubs() {
    let script = "slot_walk cuMemFree_v2 cuMemRelease; call cuMemFree_v2 0; call cuMemRelease 7; slot_stack cuMemFree_v2; slot_stack cuMemRelease";
    let outcome = Standin::new().dispatch().run(&format!("{CALLS}; {script}"));
    for function in ["cuMemFree_v2", "cuMemRelease"] {
        assert_eq!(outcome.answer(&format!("slot_stack {function}")), "to main", "{outcome}");
    }
}

#[test]
fn nested_functions_call_through_the_slot() {
    let script = format!(
        "{CALLS}; slot_replace cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged; call cuMemAllocPitch_v2 &a &pitch 1000 10 4; \
         slot_calls cuMemAlloc_v2; call cuMemAllocManaged &b 1000 1; slot_calls cuMemAlloc_v2; call cuMemFree_v2 a; \
         call cuMemFree_v2 b; call cuMemFree_v2 b+0; slot_calls cuMemAllocPitch_v2; slot_calls cuMemAllocManaged"
    );
    for (nested, inner) in [("0", ["0", "0"]), ("1", ["1", "2"])] {
        let outcome = Standin::new().dispatch().set(format!("nested={nested}")).run(&script);
        assert_eq!(outcome.answers("slot_calls cuMemAlloc_v2"), inner, "{outcome}");
        assert_eq!(outcome.answer("slot_calls cuMemAllocPitch_v2"), "1", "{outcome}");
        assert_eq!(outcome.answer("slot_calls cuMemAllocManaged"), "1", "{outcome}");
        let codes =
            ["call cuMemFree_v2 a", "call cuMemFree_v2 b", "call cuMemFree_v2 b+0"].map(|call| outcome.answers(call));
        // `a` was freed by the calls before, too.
        assert_eq!(codes, [vec!["0", "0"], vec!["0", "0"], vec!["1"]], "{outcome}");
    }
}

#[test]
fn functions_of_both_versions() {
    let contexts = "call cuInit 0; call cuDevicePrimaryCtxRetain &p 0; call cuCtxCreate_v2 &c 0 0; call cuCtxGetId c &first; \
                    call cuCtxGetId 0 &current; call cuCtxGetId p &primary; let first first; let current current; let primary primary";
    let outcome = Standin::new().run(&format!(
        "{contexts}; call cuCtxAttach &c 0; call cuCtxDetach c; call cuCtxGetId c &again; call cuCtxDetach c; call cuCtxGetId c &gone; \
         call cuCtxCreate_v2 &c 0 0; call cuCtxGetId c &second; let second second; call cuCtxDestroy c; call cuCtxDestroy c+0; \
         call cuCtxSetCurrent p; call cuStreamCreate &s 0; call cuStreamDestroy s; call cuStreamDestroy s+0; \
         call cuMemHostRegister 4096 50 0; call cuMemHostRegister_v2 4096 50 0; call cuMemHostUnregister 4096; \
         call cuMemAlloc_v2 &a 50; call cuDevicePrimaryCtxReset 0; call cuMemFree_v2 a; call cuCtxGetId p &reset; let reset reset; \
         call cuDevicePrimaryCtxRelease 0; call cuDevicePrimaryCtxRelease 0; call cuCtxGetId p &late"
    ));
    let answers = |command: &str| outcome.answers(&format!("call {command}")).concat();
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(
        [answers("cuCtxDetach c"), answers("cuCtxGetId c &again"), answers("cuCtxGetId c &gone")],
        ["00", "0", "709"],
        "{outcome}"
    );
    assert_eq!([answers("cuCtxDestroy c"), answers("cuCtxDestroy c+0")], ["0", "201"], "{outcome}");
    assert_eq!([answers("cuStreamDestroy s"), answers("cuStreamDestroy s+0")], ["0", "400"], "{outcome}");
    assert_eq!(
        [answers("cuMemHostRegister 4096 50 0"), answers("cuMemHostRegister_v2 4096 50 0")],
        ["0", "712"],
        "{outcome}"
    );
    assert_eq!([answers("cuDevicePrimaryCtxReset 0"), answers("cuMemFree_v2 a")], ["0", "1"], "{outcome}");
    assert_eq!(answers("cuDevicePrimaryCtxRelease 0"), "0201", "{outcome}");
    assert_eq!(answers("cuCtxGetId p &late"), "709", "{outcome}");
    let [primary, first, current, second, reset] =
        ["primary", "first", "current", "second", "reset"].map(|name| outcome.answer(&format!("let {name} {name}")));
    assert_eq!([primary, first, current, second, reset], ["0x1", "0x2", "0x2", "0x3", "0x4"], "{outcome}");
}
