//! Tests of the results and resets of scopes, threads that enter and leave them, and the order in which they are closed.

use super::*;

#[test]
fn ipyexperiments_examples() {
    check("open t; alloc a 256; close t = 256 0");
    check("open t; alloc a 256; alloc b 256; free a; close t = 256 256");
}

#[test]
fn nothing_happened() {
    check("open t; close t = 0 0");
    check("alloc a 10; open t; read t = 0 0; close t = 0 0");
}

#[test]
fn nested_and_overlapping_scopes_each_keep_their_own_peak() {
    check(
        "open outer; alloc a 10; open inner; alloc b 50; free b; close inner = 0 50
         alloc c 20; free c; close outer = 10 50",
    );
    check("open a; alloc x 30; free x; open b; alloc y 10; close a = 10 20; alloc z 5; close b = 15 0");
    check("open a; open b; open c; alloc x 7; close b = 7 0; free x; close a = 0 7; close c = 0 7");
    check("alloc x 40; open a; free x; open b; alloc y 20; free y; close a = -40 0; close b = 0 20");
}

#[test]
fn a_reset_starts_anew_and_misses_nothing() {
    check("open t; alloc a 5; reset t = 5 0; alloc b 7; reset t = 7 0; free a; free b; close t = -12 0");
    check("open o; open t; alloc a 9; free a; reset t = 0 9; read t = 0 0; close o = 0 9");
}

#[test]
fn a_closed_or_unknown_scope_has_no_numbers() {
    check("open t; close t = 0 0; close t; read t; reset t; alloc a 1");
}

#[test]
fn devices_are_counted_separately() {
    check("open a @0; open b @1; alloc x @1 10; close a = 0 0; close b = 10 0");
    check("open a @0; open b @1; alloc x @0 10; alloc y @1 20; free x; close a = 0 10; close b = 20 0");
}

/// For example two notebook cells that use one variable, and `mem::replace`.
#[test]
fn scopes_closed_in_the_order_in_which_they_were_opened() {
    check(
        "open a; alloc x 1; open b; alloc y 2; close a = 3 0
         alloc z 30; open c; alloc w 400; tree /a = 1 3 3 3 1 1; tree /a/b = 0 2 2 3 2 1
         tree /b = 1 430 430 433 30 1; tree /b/c = 1 400 400 433 400 1
         inside b = 2 30 400; inside c = 400
         close b = 432 0; free z; tree /b = 1 400 430 433 30 1; alloc v 1; close c = 371 29; tree /c = 1 1 1 433 1 1",
    );
    // Several scopes of one callsite, each opened before the last is closed.
    check(
        "open t; alloc a 1; open t.2; close t = 1 0; alloc b 2; open t.3; close t.2 = 2 0; alloc c 4; close t.3 = 4 0
         tree /t = 3 7 7 7 7 3; tree /t/t = 0 0 0 3 0 0",
    );
    // Scopes on another device, and two inside the closed one.
    check(
        "open a; open b @1; open c; close a = 0 0; alloc x 1; close b = 0 0; alloc y 2; tree /b/c = 0 1 1 1 1 1
         tree /c = 1 2 2 3 2 1; inside c = 1 2; close c = 3 0",
    );
    // A scope inside one that was entered, not opened, does not move.
    check(
        "open o %2; open a; enter o; open b; close a = 0 0; alloc x 5; tree /o/b = 1 5 5 5 5 1; close b = 5 0; leave o
         alloc y 1; tree / = 0 6 6 0 1 1",
    );
    // A thread enters its own scope again.
    check(
        "open a; open b; enter b; close a = 0 0; alloc x 5; tree /b = 1 5 5 5 5 1; inside b = 5; leave b; close b = 5 0",
    );
}

#[test]
fn a_scope_of_one_thread_leaves_out_threads_in_no_scope() {
    // It leaves out their memory, whichever thread frees it.
    check("open t of own %2; alloc a 10; alloc b 20 %2; alloc c 40 %3; free a %2; free c %3; close t = 20 0");
    check("open t of own %2; alloc b 20 %2; free b %1; close t = 0 20");
    check("alloc b 20 %2; open t of own %2; free b %1; alloc c 5 %2; close t = 5 0");
    check("alloc b 20 %1; open t of own %2; free b %2; alloc c 5 %2; close t = -15 0");
    check(
        "open p; open t of own; open u of own %2; alloc a 1; alloc b 2 %2; close t = 1 0; close u = 2 0; close p = 1 0",
    );
    check(
        "open t of own %2; open u of own %2; alloc a 7 %2; close t = 7 0; free a %2; close u = 0 7; open v of own %2
         close v = 0 0",
    );
    check("open t of own @1 %2; alloc a 7 %2; alloc b 9 @1 %2; reset t = 9 0; free b; close t = -9 0");
}

#[test]
fn a_thread_is_in_the_last_scope_that_it_entered_and_did_not_leave() {
    check("open a; open b; leave a; alloc x 1; leave b; alloc y 2; tree /a/b = 1 1 1 3 1 1; tree / = 0 3 3 0 2 1");
    check("open a; close a = 0 0; enter a; alloc x 1; leave a; leave a; tree / = 0 1 1 0 1 1");
    check("open a; enter a %2; open b %2; alloc x 1 %2; close b %3 = 1 0; alloc y 2 %2; tree /a = 1 3 3 3 2 1");
    check("open a; leave a; alloc x 1; enter a; alloc y 2; leave a; alloc z 4; close a = 7 0; tree /a = 1 2 2 7 2 1");
    check("open a; enter a; close a = 0 0; alloc x 1; leave a; alloc y 2; tree /a = 1 1 1 0 1 1");
    check("open a; leave a; enter a; close a %2 = 0 0; alloc x 1; leave a; alloc y 2; tree /a = 1 1 1 0 1 1");
}

#[test]
fn a_scope_of_one_thread_counts_the_threads_that_enter_it() {
    check(
        "open t of own; enter t %2; alloc a 10 %2; leave t %2; alloc b 20 %2; read t = 10 0; free a %3; close t = 0 10",
    );
    check("open t of own; enter t %2; open u of own %2; alloc a 1 %2; alloc b 2; close u = 1 0; close t = 3 0");
    // What a guest frees counts for its own scopes as well, and what its host frees does not.
    check(
        "alloc o 8 %2; open t of own; enter t %2; alloc h 4 %2; open u of own %2; free o %2; free h; alloc a 1 %2; inside u = 1
         close u = -7 0; inside t = 1; close t = -7 4",
    );
    // A third thread enters, and the first thread enters the guest's scope.
    check(
        "open t of own; enter t %2; open u of own %2; enter u %3; alloc a 1 %3; alloc b 2 %2; alloc c 4; enter u; alloc d 8
         inside t = 1 2 4 8; inside u = 1 2 8; free a; close u = 10 1; close t = 14 1",
    );
    check("open u of own %2; open t; enter t %2; alloc a 1 %2; leave t %2; close t = 1 0; free a; close u %2 = 0 1");
}

/// Threads 3 and 4 are in no scope.
#[test]
fn memory_of_threads_in_no_scope_counts_for_all_and_is_named_if_several_have_traces() {
    check("open a; alloc x 1; alloc y 2 %3; close a = 3 0 shared=0");
    check("open a; open b; alloc y 2 %3; close b = 2 0 shared=0; close a = 2 0 shared=0");
    check("open a; open b %2; alloc x 1; alloc y 2 %2; close b %2 = 2 0 shared=0; close a = 1 0 shared=0");
    check("open a; open b %2; alloc y 2 %3; close b %2 = 2 0 shared=2; close a = 2 0 shared=2");
    // It belongs to both traces, whichever thread frees it. A reset starts again.
    check(
        "open a; open b %2; alloc y 2 %3; alloc z 4 %4; free y; reset b %2 = 4 2 shared=6; close b %2 = 0 0 shared=0; free z %4; close a = 0 6 shared=6",
    );
    // A trace that started after the allocation, or was reset after it, did not have the memory's mark before.
    check(
        "open a; open b %2; alloc y 10 %3; open a.2; free y %3; close a.2 = -10 0 shared=10; close a = 0 10 shared=10",
    );
    check(
        "open a; open b %2; alloc y 10 %3; open a.2; open b.2 %2; free y; close b.2 %2 = -10 0 shared=10
         close a.2 = -10 0 shared=10; close b %2 = 0 10 shared=10",
    );
    check(
        "open a; open b %2; alloc y 10 %3; reset a = 10 0 shared=10; free y %3; free_failed %3; read a = 0 0 shared=20
         close b %2 = 10 0 shared=10",
    );
    check(
        "open a; open b %2; alloc y 10 %3; open a.2; open a.3; close a.2 = 0 0 shared=0; alloc z 1 %3; free y %3
         open a.4; close a.4 = 0 0 shared=0; close a.3 = -9 1 shared=11; free z %3; close a = 0 11 shared=11",
    );
    // The memory of a thread in a scope, and memory that counts for one thread only.
    check("open a; open b %2; alloc y 10; open a.2; free y %3; close a.2 = -10 0 shared=0; close a = 0 10 shared=0");
    check("open a; alloc y 10 %3; open a.2; open b %2; free y %3; close a.2 = -10 0 shared=0; close a = 0 10 shared=0");
    // A free of older memory is named as well.
    check("alloc y 2; open a; open b %2; free y %3; close b %2 = -2 0 shared=2; close a = -2 0 shared=2");
    check("open a; open b %2; free y 2 %3; close b %2 = -2 0 shared=2; free_failed %3; close a = 0 0 shared=2");
    // The traces are of other devices, or do not count such threads.
    check("open a; open b @1 %2; alloc y 2 %3; close b %2 = 0 0 shared=0; close a = 2 0 shared=0");
    check(
        "open a; open b of own %2; open c of all %4; alloc y 2 %3; close b %2 = 0 0; close c = 2 0 shared=0; close a = 2 0 shared=0",
    );
    check(
        "sample 10; open a; open b sampled %2; alloc y 2 %3; sample 12; close b %2 = 2 0 shared=0; close a = 2 0 shared=0",
    );
}

#[test]
fn lost_events_are_reported_by_the_scopes_that_were_open() {
    check("open a; lost 3; open b; lost 1; close b = 0 0 lost=1; close a = 0 0 lost=4");
}

#[test]
fn closed_scopes_leave_no_records() {
    let ledger = check("open a; open b; alloc x 1; alloc y 2; free y; close a = 1 2; close b = 1 2; free x");
    assert!(ledger.places.scopes.is_empty());
    let ledger = check("open a of own; open b of own; open c of own %2; close a = 0 0; close c = 0 0; close b = 0 0");
    assert!(ledger.sums.accounts.is_empty());
}

/// Closes scopes in the order in which they were opened. If the cost grew with the number of scopes, this would take 10^10 steps.
#[test]
fn closing_the_oldest_of_many_scopes_looks_at_few_of_them() {
    let scopes = 100_000;
    let mut runner = Runner::default();
    for scope in 0..scopes {
        runner.line(&format!("open s.{scope}"));
    }
    runner.line("alloc a 1");
    for scope in 0..scopes {
        runner.line(&format!("close s.{scope} = 1 0"));
    }
    assert!(runner.ledger.places.threads.get(ThreadId(1)).entered.is_empty());
}

/// An unsigned difference would become a very high peak.
#[test]
fn a_peak_below_the_bytes_in_use_is_no_peak() {
    assert_eq!((peak_above(10, 10), peak_above(11, 10), peak_above(-10, -30)), (Some(0), Some(1), Some(20)));
    assert_eq!((peak_above(9, 10), peak_above(i64::MIN, 1), peak_above(i64::MAX, -1)), (None, None, None));
}

/// See `accounts.rs`. Threads 3 and 4 are in no scope.
#[test]
fn a_trace_of_another_thread_changes_nothing() {
    // Both allocate at the same time. Each has its own results and its own peak.
    check(
        "open a; open b %2; alloc x 10; alloc y 20 %2; free x; alloc z 1; alloc w 2 %2; close a = 1 9; close b %2 = 22 0",
    );
    // Their scopes have the same path, so their blocks are in one group.
    check("open a; open a.2 %2; alloc x 8; alloc y 1 %2; free x; alloc z 2; close a = 2 6; close a.2 %2 = 1 0");
    // Another thread frees its own memory, or earlier memory of this thread.
    check(
        "alloc x 27 %2; alloc y 5; open a; open b %2; alloc z 33; free x %2; free y %2; free z; close a = 0 33; close b %2 = -32 0",
    );
    // The other trace starts and ends at any moment.
    for script in [
        "alloc x 5; open b %2; alloc y 7; free x; close b %2 = 0 0",
        "open b %2; alloc x 5; close b %2 = 0 0; alloc y 7; free x",
        "alloc x 5; alloc y 7; open b %2; free x; close b %2 = 0 0",
    ] {
        check(&format!("open o; open a; {script}; close a = 7 5; close o = 7 5"));
    }
    // Memory belongs to the open traces in which it was allocated, whichever thread frees it.
    check("open a; open b %2; alloc x 8; free x %2; close b %2 = 0 0; close a = 0 8");
    check("open a; alloc x 8; open b %2; open a.in; free x %2; close a.in = -8 0; close b %2 = 0 0; close a = 0 8");
    check("open a; open b %2; alloc x 8; free x %3; close b %2 = 0 0 shared=0; close a = 0 8 shared=0");
    // This includes the memory of threads in no scope, and traces of all threads.
    check("open a; alloc x 8 %3; open b %2; free x %3; close b %2 = 0 0 shared=0; close a = 0 8 shared=0");
    check("open a; alloc x 8 %2; open b %2; free x %2; close b %2 = 0 0; close a = 0 8");
    for (counts, w) in [("", 8), (" of all", 8), (" sampled", 0)] {
        let check = |script: &str| check(&format!("sample 1; open w{counts}; {script}"));
        check("alloc x 8; open b %2; free x %2; close b %2 = 0 0");
        check("alloc x 8 %3; open b %2; free x %3; close b %2 = 0 0");
        check("open b %2; alloc x 8; free x %2; close b %2 = 0 0");
        check("enter w %3; alloc x 8 %3; leave w %3; open b %2; free x %3; close b %2 = 0 0");
        check("alloc x 8; open a; open b %2; free x %2; close b %2 = 0 0; close a = -8 0");
        check(&format!("alloc x 8; close w = {w} 0; open b %2; free x %2; close b %2 = -8 0"));
        check("open b %2; alloc x 8 %2; close b %2 = 8 0; open b.2 %2; free x %2; close b.2 %2 = -8 0");
        check("alloc x 8 @1; open b @1 %2; free x %2; close b %2 = -8 0");
    }
    // Traces inside these count it too, even those that count other threads.
    check("open a; alloc x 8; open a.in of own; free x %3; close a.in = -8 0; close a = 0 8");
    check("open a of own; alloc x 8; open a.in; open b %2; free x %2; close b %2 = 0 0; close a.in = -8 0");
    check("open a; alloc x 8 %3; open a.in of own; read a.in = 0 0; free x %3; close a.in = 0 0; close a = 0 8");
    check("open a; open b %2; alloc x 8 %3; open a.in of own; free x; close a.in = -8 0 shared=8; close a = 0 8");
    // If these are closed, the free counts for the thread that frees.
    check("open a; alloc x 8; close a = 8 0; open b %2; open c; free x %2; close c = 0 0; close b %2 = -8 0");
    check("alloc x 8; open a; open b %2; free x %2; close b %2 = -8 0; close a = 0 0");
    // Threads that entered the scope count for it, and not for the trace that they opened elsewhere and left.
    check(
        "open a; open b %2; enter a %2; alloc x 7 %2; leave a %2; alloc y 3 %2; enter a %3; alloc z 5 %3
         close a = 12 0; close b %2 = 10 0",
    );
    // A thread in the scope of another device, or of a sampled trace, is in a scope.
    check("open a; open b @1 %2; alloc x 7 %2; close b %2 = 0 0 on=0; alloc y 1 %2; close a = 1 0");
    check("sample 1; open a; open b sampled %2; alloc x 7 %2; close b %2 = 0 0; close a = 0 0");
    // Failed frees, partial frees, memory at the address of another block, and the end of a context.
    check("open a; open b %2; alloc x 8; free x %2; free_failed %2; shrink x 6 %2; close a = 6 2; close b %2 = 0 0");
    check("alloc x 8; open a; open b %2; shrink x 6 %2; free x %2; free_failed %2; close b %2 = -2 0; close a = 0 0");
    check("open a; open b %2; alloc x 8 in 1; gone 1 %2; close a = 0 8; close b %2 = 0 0");
    check("alloc x 8 in 1; open a; open b %2; gone 1 %2; close a = -8 0; close b %2 = -8 0");
    check("open a; open b %2; alloc x 8; alloc x 3 %2; close a = 0 8; close b %2 = 3 0");
    // The outer scope is closed first.
    check("open a; open a.in; open b %2; close a = 0 0; alloc x 3; alloc y 5 %2; close a.in = 3 0; close b %2 = 5 0");
    // A trace of all threads counts everything.
    check("open a of all; open b %2; alloc x 8; alloc y 1 %2; alloc z 2 %3; close a = 11 0; close b %2 = 3 0");
}

/// If only one thread has traces, they have the results of the whole process.
#[test]
fn the_traces_of_one_thread_count_the_process() {
    for script in [
        "alloc x 10 %2; free x %2",
        "enter a %2; open b; alloc x 10 %2; leave a %2; free x %3",
        "open b; enter b %2; close b = 0 0; alloc y 5 %2; free o %2",
        "alloc x 10 %2; open b; free x",
        "free o %2; open b; free_failed %2",
        "free unseen 5 %2; free_failed %2",
        "shrink o 4 %2; alloc x 10 in 1 %2; gone 1 %2",
        "lost 1 %2; alloc o 9 %2",
    ] {
        let mut runner = Runner::default();
        let script = format!("alloc o 7 %4; open w of all; open a; {script}");
        runner.lines(&script);
        let result = ["w", "a"].map(|scope| {
            let scope = ScopeId(runner.id(scope));
            runner.post(&EventKind::Read { scope }, ThreadId(1)).map(|trace| (trace.used, trace.peaked))
        });
        assert_eq!(result[0], result[1], "{script}");
    }
}

#[test]
fn a_trace_says_that_its_thread_allocated_on_another_device_only() {
    check(
        "open a; alloc x 1 @1; read a = 0 0 on=1; alloc y 2; read a = 2 0 here; free y; alloc z 1 @1; close a = 0 2 here",
    );
    // Earlier events, other threads, and memory that no trace counts, have no effect.
    check(
        "alloc x 1 @1; open a; alloc y 1 @1 %2; alloc z 1 managed @1; read a = 0 0 here; alloc w 1 @2; close a = 0 0 on=2",
    );
    // The latest of several devices counts.
    check("open a @3; alloc x 1 @1; alloc y 1 @2; close a = 0 0 on=2");
    for script in [
        "enter t %2; alloc x 5 @1 %2; read t = 0 0 on=1; leave t %2; alloc y 1; alloc z 1 %2; close t = 0 0 on=1",
        "enter t; enter s; alloc x 5 @1; close s = 0 0 on=1; leave s; alloc y 2; alloc z 1 @1; close t = 2 0 here",
        "enter t; open a; alloc x 5 @1; close a = 0 0 on=1; alloc y 1 managed; close t = 0 0 on=1",
        "alloc x 5 @1; enter t; enter t %2; leave t; alloc y 5 @1; close t = 0 0 here",
        "enter t; alloc x 5; reset t = 5 0; alloc y 5; alloc z 1 @1; close t = 5 0 here",
    ] {
        check(&format!("open t of task; open s of task; {script}"));
    }
    // Only later events count after a reset.
    check(
        "open a; alloc x 1; reset a = 1 0; alloc y 1; alloc z 1 @1; read a = 1 0 here; reset a = 1 0 here; alloc w 1 @1; close a = 0 0 on=1",
    );
    // An inner scope counts for it, and has its own device.
    check(
        "open a; open b @1; alloc x 1 @1; close b = 1 0 here; read a = 0 0 on=1; open c @1; alloc y 1; close c = 0 0 on=0; close a = 1 0 here",
    );
    // Between the polls of a task, its thread may run any other task.
    check("open a; leave a; alloc x 1 @1; close a = 0 0 here");
    // The scopes count one thread, or are sampled.
    check(
        "open a of own; alloc x 1 @1; close a = 0 0 on=1; sample 1; open b sampled; alloc y 1 @1; close b = 0 0 on=1",
    );
}

/// For example the span of a request whose thread serves other requests between the polls of the task.
#[test]
fn a_scope_of_a_task_counts_what_is_allocated_while_a_thread_is_in_it() {
    // The opener is not in it. Two tasks of one thread with the same name have separate results.
    check(
        "open a of task; open a.2 of task; alloc o 100; enter a; alloc x 1; leave a; enter a.2; alloc y 20; leave a.2
         enter a; alloc z 4; free z; leave a; close a = 1 4; close a.2 = 20 0; tree /a = 2 21 25 125 25 3",
    );
    // The task counts on any thread, and so do its frees. The free of another task's block counts for that task.
    check(
        "open a of task; open b of task; enter a %2; alloc x 10 %2; leave a %2; enter b %2; free x %2; alloc y 5 %2; leave b %2
         enter a %3; alloc z 2 %3; leave a %3; free y; read b = 0 5; free z; close a = 0 10; close b %3 = 0 5",
    );
    // Tasks inside tasks, inside a trace, and inside a thread-local scope.
    check(
        "open t; open u of own; open a of task; enter a %2; open b of task %2; enter b %3; alloc x 8 %3; leave b %3; leave a %2
         alloc y 1 %3; enter a; alloc z 2; close b = 8 0; free x; close a %4 = 2 8; leave a; close u = 2 8; close t = 3 8",
    );
    // A trace that is opened inside a task is an ordinary one. A thread's trace does not count allocations in scopes opened
    // elsewhere.
    check(
        "open t; open a of task %2; alloc v 1 %2; enter a %2; open i %2; alloc x 2 %2; close i %2 = 2 0; leave a %2
         close a = 2 0; close t = 1 0",
    );
    check("open t; open a of task %2; enter a %2; alloc x 2 %2; leave a %2; close a %2 = 2 0; close t = 0 0");
    // A reset, a failed free, another device, and adopted threads.
    check(
        "open a of task; enter a; alloc x 3; reset a = 3 0; free x; free_failed; alloc w 1 @1; leave a; adopt a
         alloc y 4 %2; alloc z 1; read a = 5 0; free x %2; close a = 2 3",
    );
    let ledger = check("open a of task; enter a; alloc x 1; leave a; close a = 1 0; free x");
    assert!(ledger.sums.accounts.is_empty() && ledger.places.scopes.is_empty());
}
