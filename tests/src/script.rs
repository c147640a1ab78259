//! Runs scripts for the probe, in which commands are followed by the expected answers: `command = answer`. A `call` without an answer must
//! succeed.

use std::collections::BTreeMap;
use std::panic::{RefUnwindSafe, catch_unwind};

use crate::{Outcome, Standin};

/// The commands that make a context of device 0 current.
pub const CONTEXT: &str = "call cuInit 0; call cuDevicePrimaryCtxRetain &ctx 0; call cuCtxSetCurrent ctx";

/// Commands that contain other commands, with `|` between them.
const NESTING: [&str; 5] = ["other_thread ", "behind ", "at_exit ", "at_thread_exit ", "fork "];

/// The calls of the driver that gpumem may make while the program is in a call: it looks up unknown blocks and streams, and asks once
/// whether a device has separate memory.
const HARMLESS: [&str; 6] = [
    "cuDeviceGetAttribute",
    "cuptiGetDeviceId",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuStreamIsCapturing",
    "cuDeviceGetGraphMemAttribute",
];
/// CUPTI reports the context of a call. A hook must ask the driver for it.
const HARMLESS_IN_A_HOOK: [&str; 4] = ["cuCtxGetCurrent", "cuCtxGetDevice", "cuCtxGetId", "cuDevicePrimaryCtxGetState"];

/// The calls around which gpumem reads the memory that the driver holds for itself, by how their names start.
const CHANGE_THE_DRIVERS_MEMORY: [&str; 13] = [
    "cuCtx",
    "cuDevicePrimaryCtx",
    "cuFuncLoad",
    "cuGraphExecDestroy",
    "cuGraphInstantiate",
    "cuKernelGetFunction",
    "cuLaunch",
    "cuLibrary",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuModule",
    "cuStreamCreate",
];
/// The calls that read it, and what is known about a launched function. The devices are listed once.
const READ_THE_DRIVERS_MEMORY: [&str; 8] = [
    "cuCtxGetLimit",
    "cuDeviceGet",
    "cuFuncGet",
    "cuInit",
    "cuKernelGet",
    "cuMemPoolGetAttribute",
    "cuThreadExchangeStreamCaptureMode",
    "nvml",
];

/// Runs a script, compares the answers, and checks the calls of the driver that gpumem made.
///
/// # Panics
/// Panics for the same reasons as [`check_answers`], and if gpumem made a call of the driver that is not harmless.
#[track_caller]
pub fn check(machine: &Standin, script: &str) -> Outcome {
    let outcome = check_answers(machine, script);
    let harmful: Vec<_> = outcome.calls.iter().filter(|call| !is_harmless(call)).collect();
    ensure(harmful.is_empty(), &format!("called within a call: {harmful:?}"), &outcome);
    outcome
}

/// Runs a script and compares the answers.
///
/// # Panics
/// Panics if an answer differs, or if the probe does not end well.
#[track_caller]
pub fn check_answers(machine: &Standin, script: &str) -> Outcome {
    let mut expected: BTreeMap<&str, Vec<Option<&str>>> = BTreeMap::new();
    let mut steps = Vec::new();
    for step in script.split(';').map(str::trim).filter(|step| !step.is_empty()) {
        // The answer to one command on another thread is the answer of the step.
        let nests = |verb: &&&str| step.starts_with(**verb) && (**verb != NESTING[0] || step.contains('|'));
        let nesting = NESTING.iter().find(nests).map_or("", |verb| verb);
        let inner: Vec<_> = step[nesting.len()..].split('|').map(str::trim).collect();
        let commands = inner.iter().map(|part| {
            let (command, answer) =
                part.split_once(" = ").map_or((*part, None), |(command, answer)| (command, Some(answer)));
            expected.entry(command).or_default().push(answer.or(command.starts_with("call ").then_some("0")));
            command
        });
        steps.push(format!("{nesting}{}", commands.collect::<Vec<_>>().join(" | ")));
    }
    let outcome = machine.run(&steps.join("; "));
    ensure_clean(&outcome);
    for (command, expected) in expected {
        let answers = outcome.answers(command);
        ensure(answers.len() == expected.len(), &format!("`{command}` was not answered as often as asked"), &outcome);
        for (answer, expected) in answers.iter().zip(expected) {
            let is_so = expected.is_none_or(|expected| *answer == expected);
            ensure(is_so, &format!("`{command}` is not `{}` but `{answer}`", expected.unwrap_or_default()), &outcome);
        }
    }
    outcome
}

/// Returns whether the program made the call of this line, or a hook or a callback that may make it.
fn is_harmless(call: &str) -> bool {
    let Some((outer, inner)) = call.rsplit_once('>') else { return true };
    // A hook can find the primary context that is ending only by retaining it.
    let may_retain = outer.starts_with("cuDevicePrimaryCtxRe") && inner.starts_with("cuDevicePrimaryCtxRe");
    // The stand-in driver makes this call, with the setting for nested calls.
    let is_nested = ["cuMemAllocPitch_v2", "cuMemAllocManaged"].contains(&outer) && inner.starts_with("cuMemAlloc_v2");
    let in_a_hook = !outer.starts_with("callback");
    let is_one_of = |functions: &[&str]| functions.iter().any(|function| inner.starts_with(function));
    let changes = CHANGE_THE_DRIVERS_MEMORY.iter().any(|function| outer.starts_with(function));
    is_nested
        || is_one_of(&HARMLESS)
        || in_a_hook && changes && is_one_of(&READ_THE_DRIVERS_MEMORY)
        || in_a_hook && (may_retain || is_one_of(&HARMLESS_IN_A_HOOK))
}

/// Checks that a condition is true. The message of the panic contains everything about the run.
///
/// # Panics
/// Panics if the condition is false.
#[track_caller]
pub fn ensure(truth: bool, what: &str, outcome: &Outcome) {
    assert!(truth, "{what}\n{outcome}");
}

/// # Panics
/// Panics if the command has a different answer.
#[track_caller]
pub fn ensure_answer(outcome: &Outcome, command: &str, answer: &str) {
    assert_eq!(outcome.answer(command), answer, "`{command}`\n{outcome}");
}

/// Checks that the answer is an error with all these words.
///
/// # Panics
/// Panics if it is not.
#[track_caller]
pub fn ensure_error<'a>(outcome: &Outcome, command: &str, says: impl IntoIterator<Item = &'a str>) {
    let answer = outcome.answer(command);
    ensure(answer.starts_with("error["), &format!("`{command}` read something as truth"), outcome);
    for word in says {
        ensure(answer.contains(word), &format!("`{command}` does not say `{word}`"), outcome);
    }
}

/// Checks that the program ran to its end as if nothing was wrong.
///
/// # Panics
/// Panics if it did not.
#[track_caller]
pub fn ensure_clean(outcome: &Outcome) {
    ensure(outcome.is_clean(), "panicked or did not end well", outcome);
}

/// Checks the same as [`ensure_clean`], and that no context was created.
///
/// # Panics
/// Panics if the check fails.
#[track_caller]
pub fn ensure_unharmed(outcome: &Outcome) {
    ensure_clean(outcome);
    ensure(outcome.contexts_created() == 0, "created a context", outcome);
}

/// Checks every case, so that one run shows all errors.
///
/// # Panics
/// Panics if some cases fail.
#[track_caller]
pub fn each<T: RefUnwindSafe>(cases: &[T], check: impl Fn(&T) + RefUnwindSafe) {
    let failed = cases.iter().filter(|case| catch_unwind(|| check(case)).is_err()).count();
    assert_eq!(failed, 0, "this many cases failed; each is reported above");
}
