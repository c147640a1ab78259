//! Tests the dispatch table: drivers for which gpumem must not use it, and other tools that also use it.

#![cfg(target_arch = "x86_64")]

use gpumem_tests::{CONTEXT, Outcome, Patch, Standin, check, each, ensure};

use super::WITHOUT_EXACT_TRACES;

/// Returns a machine with a dispatch table, and without libcupti.
fn machine() -> Standin {
    Standin::new().dispatch()
}

#[track_caller]
fn exact(machine: &Standin, script: &str) -> Outcome {
    check(machine, &format!("{CONTEXT}; exact = started; {script}"))
}

/// Checks that these slots hold the driver's own functions.
const UNTOUCHED: &str = "slot_is cuMemFree_v2 = driver; slot_is cuMemAllocAsync = driver; slot_is cuMemCreate = driver; \
                         slot_is cuStreamDestroy_v2 = driver";

/// Returns drivers that gpumem rejects because of one function, each with the reason that gpumem gives and a check of the slots.
fn rejected() -> [(Standin, &'static str, &'static str); 5] {
    let unlike_known = "cuMemAlloc_v2 does not start as in the known drivers";
    let misplaced = "the pointer of cuMemAlloc_v2 is not in the driver's writable data";
    let leads_out = "the pointer of cuMemAlloc_v2 leads out of the driver: another tool uses it";
    [
        (Standin::new(), "does not start as in the known drivers", ""),
        (machine().patch(Patch::Overwritten("cuMemAlloc_v2")), unlike_known, UNTOUCHED),
        (machine().patch(Patch::Relro("cuMemAlloc_v2")), misplaced, UNTOUCHED),
        (machine().bad_slot("cuMemAlloc_v2"), leads_out, UNTOUCHED),
        (machine().bad_slot("cuCtxDestroy_v2"), "the pointer of cuCtxDestroy_v2 leads out of the driver", UNTOUCHED),
    ]
}

#[test]
fn a_driver_that_is_rejected_is_left_alone() {
    each(&rejected(), |(machine, why, untouched)| {
        let cupti = machine.clone().cupti();
        let counted = "call cuMemAlloc_v2 &a 1000; figures = 1000 0";
        let outcome = exact(&cupti, &format!("{counted}; status; why_not_dispatch; {untouched}"));
        let status = outcome.answer("status");
        ensure(status.starts_with("gauge=exact source=cupti events=1 "), "not through CUPTI", &outcome);
        ensure(status.contains(" by=libcupti.so.13 why=none"), "not through CUPTI", &outcome);
        ensure(outcome.answer("why_not_dispatch").contains(why), "does not say why", &outcome);
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);

        // The environment requests the dispatch table only, or there is no libcupti.
        for (requested, no_cupti) in [(cupti.clone().env("GPUMEM_SOURCE", "dispatch"), false), (machine.clone(), true)]
        {
            let sampled = "new; call cuMemAlloc_v2 &a 20971520; sleep 2; figures = 20971520 0, sampled; status; \
                           why_not_dispatch = none; by_dispatch";
            let outcome = check(&requested, &format!("{CONTEXT}; {sampled}; {untouched}"));
            let status = outcome.answer("status");
            ensure(status.starts_with("gauge=sampled source=sampling events=0 "), "not sampled", &outcome);
            let error = outcome.answer("by_dispatch");
            ensure(error.starts_with("error[unavailable] "), "a trace by that source began", &outcome);
            for text in [&*outcome.stderr, status, error] {
                ensure(text.contains(why), "does not say why", &outcome);
            }
            ensure(outcome.stderr.lines().count() == 1, "not one notice", &outcome);
            let lacks_cupti = [&*outcome.stderr, status].map(|text| text.contains("cannot load libcupti"));
            ensure(lacks_cupti == [no_cupti; 2], "another reason", &outcome);
        }
    });
}

#[test]
fn libcupti_is_not_loaded_where_the_table_is_used() {
    let outcome = exact(
        &machine().cupti(),
        "call cuMemAlloc_v2 &a 1000; figures = 1000 0; why_not_dispatch = none; intercepted_by; breakdown; summary; unsubscribe; \
         subscribe = done; maps libcupti = no; slot_is cuMemAlloc_v2 = other; slot_is cuCtxDetach = other",
    );
    ensure(outcome.answer("intercepted_by").ends_with("/libcuda.so.1"), "names another library", &outcome);
    let requested = machine().cupti().env("GPUMEM_SOURCE", "cupti");
    exact(&requested, &format!("maps libcupti = yes; call cuMemAlloc_v2 &a 1000; figures = 1000 0; {UNTOUCHED}"));
    // gpumem uses the dispatch table unless CUPTI is requested.
    let status = "status = gauge=exact source=cupti events=0 untracked=0 lost=0 by=libcupti.so.13 why=none";
    check(&machine().cupti(), &format!("{CONTEXT}; by_cupti = started; new; {status}; {UNTOUCHED}; figures 1 = 0 0"));
}

#[test]
fn without_exact_traces_no_slot_is_replaced() {
    for (gauge, script) in WITHOUT_EXACT_TRACES {
        let outcome = check(&machine().env("GPUMEM_GAUGE", gauge), &format!("{script}; {UNTOUCHED}"));
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
    let outcome = check(&machine(), "new; figures = 0 0; slot_is cuMemFree_v2 = other; drop");
    ensure(outcome.contexts_created() == 0, "created a context", &outcome);
}

#[test]
fn an_error_names_who_chose_the_gauge() {
    let requested = |reported: &str, what: &str| {
        format!("error[invalid setting] cannot use {what}, and {reported}; leave one of them out")
    };
    let source = "source: `dispatch` gives exact numbers";
    // The memory of one thread is counted exactly or not at all, even if the environment requests another gauge.
    let outcome =
        check(&machine().env("GPUMEM_GAUGE", "sampled"), "sampled_by_dispatch; by_dispatch; of_thread = started");
    let by_code = requested("the program requests the gauge `sampled`", source);
    ensure(outcome.answer("sampled_by_dispatch") == by_code, "another error", &outcome);
    let by_environment = requested("GPUMEM_GAUGE is sampled", source);
    ensure(outcome.answer("by_dispatch") == by_environment, "another error", &outcome);
}

#[test]
fn one_source_at_a_time() {
    let using = |requested: &str, using: &str| {
        format!(
            "error[unavailable] cannot use the source `{requested}`: allocations are already intercepted through `{using}`; leave \
             the source out, or start the program with GPUMEM_SOURCE={requested}"
        )
    };
    let both = machine().cupti();
    let outcome = exact(&both, "by_dispatch = started; by_cupti; figures 0 = 0 0");
    ensure(outcome.answer("by_cupti") == using("cupti", "dispatch"), "another error", &outcome);
    let outcome =
        check(&both, &format!("{CONTEXT}; by_cupti = started; exact = started; by_dispatch; figures 0 = 0 0"));
    ensure(outcome.answer("by_dispatch") == using("dispatch", "cupti"), "another error", &outcome);
    // One source is used after the other. The second one knows the blocks of the first.
    let script = "by_dispatch = started; call cuMemAlloc_v2 &a 1000; call cuMemCreate &h 2097152 on:0 0; drop; unsubscribe; \
                  subscribe = done; by_dispatch = started; call cuMemFree_v2 a; figures = -1000 0; unsubscribe; drop; \
                  status";
    check(&both, &format!("{CONTEXT}; {script}"));
    // The dispatch table cannot be combined with a gauge that is not exact.
    let outcome = check(&both, &format!("{CONTEXT}; sampled_by_dispatch"));
    let reported = outcome.answer("sampled_by_dispatch");
    let expected = "error[invalid setting] cannot use source: `dispatch` gives exact numbers, and the program requests the gauge `sampled`";
    ensure(reported.starts_with(expected), "another error", &outcome);
}

#[test]
fn an_unknown_source() {
    let machine = machine().cupti().env("GPUMEM_SOURCE", "nsys");
    let outcome = check(
        &machine,
        &format!("{CONTEXT}; new; new; call cuMemAlloc_v2 &a 20971520; sleep 2; figures; exact; status; by_cupti"),
    );
    let says = "cannot use GPUMEM_SOURCE: `nsys` is not a source of allocations; write dispatch or cupti, or auto for the best";
    ensure(outcome.stderr.lines().count() == 1 && outcome.stderr.contains(says), "not one notice", &outcome);
    ensure(outcome.answer("figures") == "20971520 0, sampled", "not sampled", &outcome);
    let error = outcome.answer("exact");
    ensure(error.starts_with("error[invalid setting]") && error.contains(says), "another error", &outcome);
    ensure(outcome.answer("status").contains(says), "does not say why", &outcome);
    // The choice of the program takes precedence.
    ensure(outcome.answer("by_cupti") == "started", "no trace", &outcome);
    for text in ["", "auto", " AUTO ", "dispatch", "Dispatch "] {
        exact(
            &machine.clone().env("GPUMEM_SOURCE", text),
            "status = gauge=exact source=dispatch events=0 untracked=0 lost=0 by=libcuda.so.1 why=none",
        );
    }
}

#[test]
fn another_tool_was_first() {
    each(&["cuMemAlloc_v2", "cuMemUnmap", "cuDevicePrimaryCtxRelease"], |function| {
        let script = format!("{CONTEXT}; slot_replace {function}; new; status; {UNTOUCHED}; slot_is {function} = tool");
        let outcome = check(&machine(), &script);
        let why = format!("the pointer of {function} leads out of the driver, into ");
        for text in [&*outcome.stderr, outcome.answer("status")] {
            let by = text.split_once(&why).and_then(|(_, rest)| rest.split_once(": another tool uses it"));
            ensure(by.is_some_and(|(by, _)| by.ends_with("/probe")), "does not name the tool", &outcome);
        }
        // The tool replaces the slot between two subscriptions.
        let script = format!(
            "unsubscribe; slot_is {function} = driver; slot_replace {function}; subscribe; {UNTOUCHED}; \
             slot_is {function} = tool; slot_restore {function}; subscribe; by_dispatch = started; \
             call cuMemAlloc_v2 &a 1000; figures 1 = 1000 0"
        );
        let outcome = exact(&machine(), &script);
        let subscribed = outcome.answers("subscribe");
        let why = format!("another tool has replaced the pointer of {function}");
        ensure(subscribed[0].contains(&why) && subscribed[1] == "done", "subscribed too early or too late", &outcome);
    });
}

/// gpumem cannot know whether the other tool still calls gpumem's hooks. If the tool does, the numbers are right, but marked as
/// possibly wrong.
#[test]
fn another_tool_comes_later_and_goes_on_to_gpumem() {
    let script = "call cuMemAlloc_v2 &a 1000; slot_replace cuMemAlloc_v2; figures 0 = 1000 0, 1 lost; call cuMemAlloc_v2 &b 50; \
                  slot_calls cuMemAlloc_v2 = 1; figures = 1050 0, 1 lost; new; call cuMemAlloc_v2 &c 7; figures 1 = 7 0, 1 lost; \
                  slot_replace cuMemFree_v2 cuMemAlloc_v2; call cuMemFree_v2 a; slot_calls cuMemFree_v2 = 1; \
                  figures 1 = -993 7, 2 lost; new; figures 2 = 0 0, 2 lost; slot_is cuMemAlloc_v2 = tool; slot_is cuMemAllocAsync = other";
    exact(&machine(), script);
    // Each slot counts once, no matter how many traces are started, and counts again if the tool restores and replaces it.
    exact(
        &machine(),
        "slot_replace cuMemAlloc_v2; new; drop; new; figures 1 = 0 0, 1 lost; reset; figures = 0 0, 1 lost; drop; \
         figures 0 = 0 0, 1 lost; slot_restore cuMemAlloc_v2; slot_replace cuMemFree_v2; new; figures 1 = 0 0, 1 lost; \
         figures 0 = 0 0, 2 lost; slot_restore cuMemFree_v2; slot_replace cuMemAlloc_v2; figures 0 = 0 0, 3 lost",
    );
    // The tool restores the slot, before or after a trace was read.
    exact(
        &machine(),
        "slot_replace cuMemAlloc_v2; call cuMemAlloc_v2 &a 1000; slot_restore cuMemAlloc_v2; figures = 1000 0; slot_is cuMemAlloc_v2 = other",
    );
    exact(
        &machine(),
        "slot_replace cuMemAlloc_v2; call cuMemAlloc_v2 &a 1000; figures 0 = 1000 0, 1 lost; slot_restore cuMemAlloc_v2; new; \
         call cuMemFree_v2 a; figures 1 = -1000 0; slot_replace cuMemFree_v2; figures = -1000 0, 1 lost",
    );
}

#[test]
fn another_tool_comes_later_and_goes_past_gpumem() {
    let script = "slot_note cuMemAlloc_v2; exact; slot_replace_past cuMemAlloc_v2; call cuMemAlloc_v2 &a 1000; \
                  slot_calls cuMemAlloc_v2 = 1; figures 0 = 0 0, 1 lost; call cuMemAllocAsync &b 50 0; figures = 50 0, 1 lost; \
                  call cuMemFree_v2 a; slot_restore cuMemAlloc_v2; call cuMemAlloc_v2 &c 1000";
    let outcome = check(&machine(), &format!("{CONTEXT}; {script}; slot_is cuMemAlloc_v2 = driver; status"));
    // When the missed block is freed, gpumem looks it up.
    ensure(!outcome.answer("status").contains(" lost=0"), "no loss", &outcome);
    // The tool writes back the pointer that the slot held before gpumem replaced it.
    let script = "slot_note cuMemAlloc_v2 cuMemFree_v2; exact; call cuMemAlloc_v2 &a 1000; slot_write_back cuMemAlloc_v2 cuMemFree_v2; \
                  call cuMemAlloc_v2 &b 50; figures 0 = 1000 0, 2 lost; new; figures 1 = 0 0, 2 lost; unsubscribe; \
                  slot_is cuMemAlloc_v2 = driver; slot_is cuMemAllocAsync = driver; subscribe = done; exact; \
                  call cuMemAlloc_v2 &c 7; figures 2 = 7 0";
    check(&machine(), &format!("{CONTEXT}; {script}"));
}

/// gpumem cannot remove its hook, because the other tool calls it. The tool still calls the hook, which counts nothing.
#[test]
fn another_tool_stays_when_gpumem_goes() {
    let script = "slot_replace cuMemAlloc_v2; unsubscribe; slot_is cuMemAlloc_v2 = tool; slot_is cuMemFree_v2 = driver; \
                  call cuMemAlloc_v2 &a 1000; slot_calls cuMemAlloc_v2 = 1; status 1";
    let outcome = exact(&machine(), &script.replace("; status 1", "; status"));
    ensure(outcome.answer("status").contains(" events=0 "), "counted something", &outcome);
    // While the tool's hook is in the slot, gpumem does not use the table.
    let outcome =
        exact(&machine(), "slot_replace cuMemAlloc_v2; unsubscribe; subscribe; slot_is cuMemFree_v2 = driver");
    let expected = "another tool has replaced the pointer of cuMemAlloc_v2";
    ensure(outcome.answer("subscribe").contains(expected), "subscribed", &outcome);
    // The tool writes gpumem's hook back to the slot, because the slot held that hook before.
    exact(
        &machine(),
        "slot_replace cuMemAlloc_v2; unsubscribe; slot_restore cuMemAlloc_v2; slot_is cuMemAlloc_v2 = other; \
         call cuMemAlloc_v2 &a 1000; subscribe = done; exact; call cuMemAlloc_v2 &b 50; figures 1 = 50 0; unsubscribe; \
         slot_is cuMemAlloc_v2 = driver",
    );
}

#[test]
fn a_call_within_a_call_is_counted_once() {
    let nested = machine().set("nested=1");
    exact(
        &nested,
        "call cuMemAllocPitch_v2 &a &pitch 1000 10 4; figures = 10240 0; call cuMemFree_v2 a; figures = 0 10240",
    );
    exact(
        &nested,
        "call cuMemAllocManaged &a 1000 1; figures 0 = 0 0; status = gauge=exact source=dispatch events=1 untracked=0 lost=0 \
         managed=1000/1 by=libcuda.so.1 why=none; call cuMemFree_v2 a; call cuMemAlloc_v2 &b 7; figures = 7 0",
    );
}

#[test]
fn a_context_that_is_detached() {
    let script = "call cuCtxCreate_v2 &x 0 0; call cuMemAlloc_v2 &a 1000; call cuCtxAttach &again 0; call cuCtxDetach x; \
                  figures; call cuCtxDetach x; figures 0";
    let outcome = exact(&machine(), script);
    // CUPTI reports the end of a context. With the dispatch table, gpumem does not know how many references the context has.
    ensure(outcome.answer("figures") == "1000 0, 1 lost", "the figures are wrong and not marked", &outcome);
    ensure(outcome.answer("figures 0") == "1000 0, 2 lost", "the figures are wrong and not marked", &outcome);
}

/// The new context is on another device and has the same handle. Drivers before CUDA 12 give contexts no ids.
#[test]
fn a_context_created_while_unsubscribed() {
    for machine in [machine().devices(2), machine().devices(2).without_symbol("cuCtxGetId")] {
        let script = "call cuCtxCreate_v2 &x 0 0; exact 0; exact 1; call cuMemAlloc_v2 &a 1000; unsubscribe; \
                      call cuCtxDestroy_v2 x; call cuCtxCreate_v2 &y 0 1; subscribe = done; call cuMemAlloc_v2 &b 50; \
                      figures 0 = 1000 0, 1 lost; figures 1 = 50 0, 1 lost; call cuCtxDestroy_v2 y; figures 1 = 0 50, 1 lost; \
                      figures 0 = 0 1000, 1 lost; exact 1; call cuCtxCreate_v2 &z 0 1; call cuMemAlloc_v2 &c 7; figures = 7 0";
        let outcome = check(&machine, &format!("{CONTEXT}; {script}"));
        ensure(outcome.answer("figures") == "7 0", "another context's", &outcome);
    }
}

#[test]
fn the_process_ends_in_the_middle() {
    for _ in 0..5 {
        let outcome = check(&machine(), "call cuInit 0; exact; go_on 8; sleep 5; status");
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
        let forked = "exact; go_on 4; fork status; fork sleep 1; sleep 2";
        let outcome = check(&machine(), &format!("call cuInit 0; {forked}"));
        ensure(outcome.stdout.matches(": the child ended with 0").count() == 2, "a child did not end well", &outcome);
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
}

#[test]
fn a_hook_of_the_programs_that_panics() {
    let script = "panic_on_refusal; call cuMemAlloc_v2 &a 99999999999999; call cuMemAlloc_v2 &b 1000; figures";
    let machine = machine().env("GPUMEM_REPORT", "off");
    let outcome = machine.run(&format!("{CONTEXT}; exact; {script}"));
    ensure(outcome.succeeded() && outcome.stderr.contains("the hook's own"), "did not panic", &outcome);
    ensure(outcome.answer("call cuMemAlloc_v2 &a 99999999999999") == "2", "the call was not the driver's", &outcome);
    ensure(outcome.answer("figures") == "1000 0", "not counted any more", &outcome);
}

/// A thread can be cancelled inside a function of the driver. The C library then unwinds the stack, also through gpumem's hook.
/// During that, the program's destructors run, and the memory that they free counts.
#[test]
fn a_thread_is_cancelled_in_a_call() {
    let block = 1 << 20;
    for call in ["cuMemAllocManaged &b 5000 1", "cuMemAllocAsync &b 5000 0", "cuMemFreeHost 0", "cuGraphLaunch 0 0"] {
        let function = call.split(' ').next().unwrap_or_default();
        let script = format!(
            "call cuMemAlloc_v2 &own {block} = 0; figures = {block} 0; cancelled {call} = cancelled; figures = 0 {block}; \
             call cuMemAlloc_v2 &next 1000 = 0; figures = 1000 {}",
            block - 1000
        );
        let outcome = exact(&machine().set(format!("blocks={function}")), &script);
        ensure(outcome.stderr.is_empty(), "said something on stderr", &outcome);
    }
}
