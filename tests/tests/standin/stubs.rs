//! Tests that the stand-in driver's stubs are those of NVIDIA's drivers, byte for byte.

#![cfg(target_arch = "x86_64")]

use gpumem_tests::Standin;

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
    // push rbp; mov rbp, rsp; push r12; sub rsp, 8; cmp; je; call [rip+_]; the check of the result; the end; a place for a log; the return
    // of 4
    let calling = "55 4889e5 4154 4883ec08 813d ________ 00ba1c32 0f84 ________ ff15 ________ \
                   4189c4 85c0 740f 3d58020000 7408 8d40fd 83f801 770a 4489e0 4c8b65f8 c9 c3 90 ____ \
                   41bc04000000 4489e0 4c8b65f8 c9 c3";
    // The functions are from `cuda.rs` and `physical.rs` of the stand-in driver, whose stubs jump, and from `memory.rs`, whose stubs call.
    for (functions, pattern) in [
        ("cuInit cuCtxSetCurrent cuStreamDestroy_v2 cuMemGetInfo_v2 cuMemCreate cuMemMap", jumping),
        ("cuMemAlloc_v2 cuMemAllocManaged cuMemFree_v2 cuMemFreeAsync cuMemHostRegister cuArrayCreate_v2", calling),
    ] {
        let count = pattern.split_whitespace().collect::<String>().len() / 2;
        let commands: Vec<_> = functions.split(' ').map(|function| format!("stub_bytes {function} {count}")).collect();
        let outcome = Standin::new().dispatch().run(&commands.join("; "));
        for command in &commands {
            assert!(matches(outcome.answer(command), pattern), "{command} is not {pattern}\n{outcome}");
        }
    }
}

#[test]
fn nested_functions_call_through_the_slot() {
    let script = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx; \
         slot_replace cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemAllocManaged; call cuMemAllocPitch_v2 &a &pitch 1000 10 4; \
         slot_calls cuMemAlloc_v2; call cuMemAllocManaged &b 1000 1; slot_calls cuMemAlloc_v2; call cuMemFree_v2 a; \
         call cuMemFree_v2 b; call cuMemFree_v2 b+0; slot_calls cuMemAllocPitch_v2; slot_calls cuMemAllocManaged";
    for (nested, inner) in [("0", ["0", "0"]), ("1", ["1", "2"])] {
        let outcome = Standin::new().dispatch().set(format!("nested={nested}")).run(script);
        assert_eq!(outcome.answers("slot_calls cuMemAlloc_v2"), inner, "{outcome}");
        assert_eq!(outcome.answer("slot_calls cuMemAllocPitch_v2"), "1", "{outcome}");
        assert_eq!(outcome.answer("slot_calls cuMemAllocManaged"), "1", "{outcome}");
        let codes = ["call cuMemFree_v2 a", "call cuMemFree_v2 b", "call cuMemFree_v2 b+0"];
        assert_eq!(codes.map(|call| outcome.answer(call)), ["0", "0", "1"], "{outcome}");
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
