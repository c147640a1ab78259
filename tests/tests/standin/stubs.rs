//! Tests that the stand-in driver's stubs equal NVIDIA's, byte for byte.

#![cfg(target_arch = "x86_64")]

use gpumem_tests::Standin;

/// Compares bytes in hexadecimal with a pattern, in which `_` is any digit.
fn matches(bytes: &str, pattern: &str) -> bool {
    let pattern: String = pattern.split_whitespace().collect();
    let same = bytes.chars().zip(pattern.chars()).all(|(digit, expected)| expected == '_' || digit == expected);
    same && bytes.len() == pattern.len()
}

#[test]
fn stubs_are_those_of_drivers_470_to_580() {
    // cmp [rip+_], 0x321cba00; je 6; jmp [rip+_]; mov eax, 4; ret
    let jumping = "813d ________ 00ba1c32 7406 ff25 ________ b804000000 c3";
    // push rbp; mov rbp, rsp; push r12; sub rsp, 8; cmp; je; call [rip+_]; the check of the result; the end; a place for a log;
    // the return of 4
    let calling = "55 4889e5 4154 4883ec08 813d ________ 00ba1c32 0f84 ________ ff15 ________ \
                   4189c4 85c0 740f 3d58020000 7408 8d40fd 83f801 770a 4489e0 4c8b65f8 c9 c3 90 ____ \
                   41bc04000000 4489e0 4c8b65f8 c9 c3";
    // In the stand-in driver, the stubs of the functions in `cuda.rs`, `physical.rs`, `modules.rs` and `work.rs` jump, and the stubs of
    // those in `memory.rs` and `graphs.rs` call.
    for (functions, pattern) in [
        (
            "cuInit cuCtxSetCurrent cuStreamDestroy_v2 cuMemGetInfo_v2 cuMemCreate cuMemMap cuModuleGetFunction cuLaunchKernel",
            jumping,
        ),
        (
            "cuMemAlloc_v2 cuMemAllocManaged cuMemFree_v2 cuMemFreeAsync cuMemHostRegister cuArrayCreate_v2 cuGraphInstantiate_v2",
            calling,
        ),
    ] {
        let count = pattern.split_whitespace().collect::<String>().len() / 2;
        let commands: Vec<_> = functions.split(' ').map(|function| format!("stub_bytes {function} {count}")).collect();
        let outcome = Standin::new().dispatch().run(&commands.join("; "));
        for command in &commands {
            assert!(matches(outcome.answer(command), pattern), "{command} is not {pattern}\n{outcome}");
        }
    }
}
