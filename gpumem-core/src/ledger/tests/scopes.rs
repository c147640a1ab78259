//! Tests the figures and resets of scopes, threads that enter and leave them, and the order in which they are closed.

use super::*;

#[test]
fn fastai_deleted_test_sequence() {
    check(
        "open t; alloc a 10; alloc b 15; free b; read t = 10 15
         free a; read t = 0 25
         alloc c 10; reset t = 10 15; free c; read t = -10 0",
    );
}

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
fn a_reset_begins_anew_and_misses_nothing() {
    check("open t; alloc a 5; reset t = 5 0; alloc b 7; reset t = 7 0; free a; free b; close t = -12 0");
    check("open o; open t; alloc a 9; free a; reset t = 0 9; read t = 0 0; close o = 0 9");
}

#[test]
fn a_closed_or_unknown_scope_has_no_figures() {
    check("open t; close t = 0 0; close t; read t; reset t; alloc a 1");
}

#[test]
fn devices_are_counted_separately() {
    check("open a @0; open b @1; alloc x @1 10; close a = 0 0; close b = 10 0");
    check("open a @0; open b @1; alloc x @0 10; alloc y @1 20; free x; close a = 0 10; close b = 20 0");
}

/// Examples are two cells of a notebook that use one variable, and `mem::replace`.
#[test]
fn scopes_closed_in_the_order_in_which_they_were_opened() {
    check(
        "open a; alloc x 1; open b; alloc y 2; close a = 3 0
         alloc z 30; open c; alloc w 400; tree /a = 1 3 3 3 1 1; tree /a/b = 0 2 2 3 2 1
         tree /b = 1 430 430 433 30 1; tree /b/c = 1 400 400 433 400 1
         inside b = 2 30 400; inside c = 400
         close b = 432 0; free z; tree /b = 1 400 430 433 30 1; alloc v 1; close c = 371 29; tree /c = 1 1 1 433 1 1",
    );
    // There are several scopes of one callsite, each opened before the last is closed.
    check(
        "open t; alloc a 1; open t.2; close t = 1 0; alloc b 2; open t.3; close t.2 = 2 0; alloc c 4; close t.3 = 4 0
         tree /t = 3 7 7 7 7 3; tree /t/t = 0 0 0 3 0 0",
    );
    // There are scopes on another device, and two inside the closed one.
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
fn a_scope_of_one_thread_counts_what_that_thread_allocated() {
    check("open t of 2; alloc a 10; alloc b 20 %2; alloc c 40 %3; free a %2; close t = 20 0");
    check("open t of 2; alloc b 20 %2; free b %1; close t = 0 20");
    check("alloc b 20 %2; open t of 2; free b %1; alloc c 5 %2; close t = -15 0");
    check("open p; open t of 1; open u of 2; alloc a 1; alloc b 2 %2; close t = 1 0; close u = 2 0; close p = 3 0");
    check(
        "open t of 2; open u of 2; alloc a 7 %2; close t = 7 0; free a %2; close u = 0 7; open v of 2; close v = 0 0",
    );
    check("open t of 2 @1; alloc a 7 %2; alloc b 9 @1 %2; reset t = 9 0; free b; close t = -9 0");
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
        "open t of 1; enter t %2; alloc a 10 %2; leave t %2; alloc b 20 %2; read t = 10 0; free a %3; close t = 0 10",
    );
    check("open t of 1; enter t %2; open u of 2 %2; alloc a 1 %2; alloc b 2; close u = 1 0; close t = 3 0");
    // A thread's own blocks count for it in any scope, and any thread may free them.
    check(
        "alloc o 8 %2; open t of 1; enter t %2; alloc h 4 %2; open u of 2 %2; free o %3; free h; alloc a 1 %2; inside u = 1
         close u = -11 0; inside t = 1; close t = 1 3",
    );
    // A third thread enters, and the first thread enters the guest's scope.
    check(
        "open t of 1; enter t %2; open u of 2 %2; enter u %3; alloc a 1 %3; alloc b 2 %2; alloc c 4; enter u; alloc d 8
         inside t = 1 2 4 8; inside u = 1 2 8; free a; close u = 10 1; close t = 14 1",
    );
    check("open u of 2 %2; open t; enter t %2; alloc a 1 %2; leave t %2; close t = 1 0; free a; close u %2 = 0 1");
}

#[test]
fn a_trace_reports_that_it_overlaps_a_trace_of_another_thread() {
    check("open a; open b; alloc x 1; close b = 1 0 alone; close a = 1 0 alone");
    check("open a; open b %2; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    check("open a; close a = 0 0 alone; open b %2; close b %2 = 0 0 alone; open a.2; close a.2 = 0 0 alone");
    check("open a; open b %2; read a = 0 0 overlapped; close a = 0 0 overlapped; close b %2 = 0 0 overlapped");
    // Traces overlap on the same device, with any gauge.
    check("open a; open b @1 %2; close b %2 = 0 0 alone; close a = 0 0 alone");
    check("sample 10; open a; open b sampled %2; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    // After a reset, only later traces count.
    check(
        "open a; open b %2; close b %2 = 0 0 overlapped; reset a = 0 0 overlapped; read a = 0 0 alone; close a = 0 0 alone",
    );
    check("open a; open b %2; reset a = 0 0 overlapped; close b %2 = 0 0 overlapped; close a = 0 0 overlapped");
    // The trace's own thread closed the newest trace; another thread closed one before.
    check("open a; open b %2; close b %2 = 0 0 overlapped; open c; close c = 0 0 alone; close a = 0 0 overlapped");
    check(
        "open b %2; open c %3; open a; reset a = 0 0 overlapped; close c = 0 0 overlapped; close b = 0 0 overlapped; close a = 0 0 overlapped",
    );
    // A trace that counts one thread does not include other threads.
    check("open a of 1; open b %2; alloc x 1 %2; close b %2 = 1 0 overlapped; close a = 0 0 alone");
    check("open a; open b of 2 %2; close b %2 = 0 0 alone; close a = 0 0 overlapped");
    // It does not matter which thread closes a trace.
    check("open a; close a %2 = 0 0 alone; open b; close b %3 = 0 0 alone");
}

#[test]
fn lost_events_are_reported_by_the_scopes_that_were_open() {
    check("open a; lost 3; open b; lost 1; close b = 0 0 lost=1; close a = 0 0 lost=4");
}

#[test]
fn closed_scopes_leave_no_records() {
    let ledger = check("open a; open b; alloc x 1; alloc y 2; free y; close a = 1 2; close b = 1 2; free x");
    assert!(ledger.scopes.is_empty());
    let ledger = check("open a of 1; open b of 1; open c of 2; close a = 0 0; close c = 0 0; close b = 0 0");
    assert!(ledger.thread_levels.is_empty());
}

/// They are closed in the order in which they were opened. If the cost grew with the number of scopes, this would take 10^10
/// steps.
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
    assert!(runner.ledger.thread(ThreadId(1)).entered.is_empty());
}

/// An unsigned difference would become a very high peak.
#[test]
fn a_peak_below_the_bytes_in_use_is_no_peak() {
    assert_eq!((peak_above(10, 10), peak_above(11, 10), peak_above(-10, -30)), (Some(0), Some(1), Some(20)));
    assert_eq!((peak_above(9, 10), peak_above(i64::MIN, 1), peak_above(i64::MAX, -1)), (None, None, None));
}

/// From the moment at which a trace of another thread overlaps, it reports the allocations of its own scope, as `summary`
/// does.
#[test]
fn a_trace_that_overlaps_another_threads_counts_its_own_scope() {
    // Another thread frees its own blocks, or earlier blocks of this thread: neither are of this scope.
    check("alloc x 27 %2; alloc y 5; open a; open b %2; alloc z 33; free x %2; free y %2; free z; close a = 0 33 own");
    // Blocks that were counted before the other trace opened are counted when they are freed, whichever thread
    // allocated them.
    check("open a; alloc x 30; alloc y 40 %3; open b %2; read a = 70 0 own; free x; free y %3; close a = 0 70 own");
    check("open a; alloc y 40 %3; reset a = 40 0; alloc z 2 %3; open b %2; free y %3; free z; close a = 0 2 own");
    // Both allocate at once. Each has its own figures, and its own peak.
    check(
        "open a; open b %2; alloc x 10; alloc y 20 %2; free x; alloc z 1; alloc w 2 %2
         close a = 1 9 own overlapped; close b %2 = 22 0 own overlapped",
    );
    // Events before the overlap count as without it: the whole process, and its peak.
    check(
        "open a; alloc p 40 %3; free p; alloc x 10; alloc y 5 %2; open b %2; alloc z 100 %2; free x
         read a = 5 35 own; alloc v 60; close a = 65 0 own; close b %2 = 100 0 own",
    );
    // A block that was allocated in the scope counts wherever it is freed, even before the overlap.
    check("open a; alloc x 10; open b %2; free x %2; close b %2 = 0 0 own; close a = 0 10 own");
    // The scopes inside count, and those around it do too, each from its own beginning.
    check(
        "open a; alloc x 1; open b %2; open a.in; alloc y 2; free x; alloc z 4; free z; close a.in = 2 4 own; free y
         close a = 0 6 own; close b %2 = 0 0 own",
    );
    // Threads that entered the scope count for it, and not for the trace that they opened elsewhere.
    check(
        "open a; open b %2; enter a %2; alloc x 7 %2; leave a %2; alloc y 3 %2; enter a %3; alloc z 5 %3
         close a = 12 0 own; close b %2 = 3 0 own",
    );
    // A reset begins again, with the whole process if no other trace is open then.
    check(
        "open a; open b %2; alloc x 1; alloc y 2 %2; reset a = 1 0 own; alloc z 4; alloc u 8 %2; close b %2 = 10 0 own
         reset a = 4 0 own; alloc v 16 %2; close a = 16 0 whole alone",
    );
    // There is a second overlap, and a trace without an overlap beside one that has one.
    check(
        "open a; open b %2; close b %2 = 0 0 own; open a.in; alloc x 1 %2; close a.in = 1 0 whole alone; open a.next
         alloc y 2 %2; open c %2; alloc z 4 %2; alloc w 8; close a.next = 10 0 own; close a = 8 0 own; close c %2 = 4 0 own",
    );
    // There are failed frees, freed parts, and the end of a context.
    check("open a; open b %2; alloc x 8; free x; free_failed; shrink x 6; close a = 6 2 own; close b %2 = 0 0 own");
    check("open a; open b %2; alloc x 8 in 1; gone 1; close a = 0 8 own; close b %2 = 0 0 own");
    // There are scopes of another device, kinds that no trace counts, and gauges that do not know the owner of memory.
    check("open a; open b %2; alloc x 8 @1; alloc y 4 managed; close a = 0 0 own; close b %2 = 0 0 own");
    check(
        "sample 10; open a; open b sampled %2; alloc x 8 %2; sample 18; close b %2 = 8 0 whole overlapped; close a = 0 0 own",
    );
    check("open a of 1; open b %2; alloc x 8; alloc y 1 %2; close a = 8 0 whole alone; close b %2 = 1 0 own");
    // The scope around it is closed first.
    check(
        "open a; open a.in; open b %2; close a = 0 0 own; alloc x 3; alloc y 5 %2; close a.in = 3 0 own; close b %2 = 5 0 own",
    );
    // Each block is compared with each of these scopes, so there are at most 64 of a thread.
    let mut script: String = (0..70).flat_map(|at| ["open a".to_owned(), at.to_string(), "; ".to_owned()]).collect();
    script += "open b %2; alloc x 1; alloc y 2 %2; close b %2 = 2 0 own; close a0 = 1 0 own; close a63 = 1 0 own; \
               close a64 = 3 0 whole overlapped; close a69 = 3 0 whole overlapped";
    check(&script);
}

/// Events are not counted one by one any more after the last of these scopes.
#[test]
fn scopes_that_count_by_themselves_leave_nothing_behind() {
    let ledger = check(
        "open a; open b %2; open c %2; alloc x 1; close c %2 = 0 0; reset a = 1 0; close a = 0 0; close b %2 = 0 0; \
         open d; open e; close d = 0 0; close e = 0 0",
    );
    assert!(ledger.own_scopes.is_empty() && !ledger.has_thread_scopes);
    assert!(ledger.meters.0.iter().all(|meter| meter.open_traces.alone.is_empty()));
}

#[test]
fn a_trace_says_that_its_thread_allocated_on_another_device_only() {
    check(
        "open a; alloc x 1 @1; read a = 0 0 on=1; alloc y 2; read a = 2 0 here; free y; alloc z 1 @1; close a = 0 2 here",
    );
    // Earlier events, other threads, and memory that no trace counts have no effect.
    check(
        "alloc x 1 @1; open a; alloc y 1 @1 %2; alloc z 1 managed @1; read a = 0 0 here; alloc w 1 @2; close a = 0 0 on=2",
    );
    // The newest of several devices counts.
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
    // A scope in it counts for it, and has its own.
    check(
        "open a; open b @1; alloc x 1 @1; close b = 1 0 here; read a = 0 0 on=1; open c @1; alloc y 1; close c = 0 0 on=0; close a = 1 0 here",
    );
    // A task that only enters the scope for its polls may have any other task beside it.
    check("open a; leave a; alloc x 1 @1; close a = 0 0 here");
    // The scopes count one thread, or are sampled.
    check("open a of 1; alloc x 1 @1; close a = 0 0 on=1; sample 1; open b sampled; alloc y 1 @1; close b = 0 0 on=1");
}

/// An example is the span of a request, whose thread serves others between the polls of the task.
#[test]
fn a_scope_of_a_task_counts_what_is_allocated_while_a_thread_is_in_it() {
    // The opener is not in it. Two tasks of one thread, of the same name, have their own figures.
    check(
        "open a of task; open a.2 of task; alloc o 100; enter a; alloc x 1; leave a; enter a.2; alloc y 20; leave a.2
         enter a; alloc z 4; free z; leave a; close a = 1 4 alone whole; close a.2 = 20 0 alone whole; tree /a = 2 21 25 125 25 3",
    );
    // The task counts on any thread, and so do its frees. The free of another task's block counts for that task.
    check(
        "open a of task; open b of task; enter a %2; alloc x 10 %2; leave a %2; enter b %2; free x %2; alloc y 5 %2; leave b %2
         enter a %3; alloc z 2 %3; leave a %3; free y; read b = 0 5; free z; close a = 0 10; close b %3 = 0 5",
    );
    // There are tasks inside of tasks, of a trace, and of a scope of one thread.
    check(
        "open t; open u of 1; open a of task; enter a %2; open b of task %2; enter b %3; alloc x 8 %3; leave b %3; leave a %2
         alloc y 1 %3; enter a; alloc z 2; close b = 8 0; free x; close a %4 = 2 8; leave a; close u = 2 8; close t = 3 8 alone whole",
    );
    // The task overlaps no trace, and a trace that is opened in it is an ordinary one.
    check(
        "open t; open a of task %2; alloc v 1 %2; enter a %2; open i %2; alloc x 2 %2; close i %2 = 2 0; leave a %2
         close a = 2 0 alone; close t = 1 0 overlapped own",
    );
    check(
        "open t; open a of task %2; enter a %2; alloc x 2 %2; leave a %2; close a %2 = 2 0; close t = 2 0 alone whole",
    );
    // There are a reset, a failed free, another device, and adopted threads.
    check(
        "open a of task; enter a; alloc x 3; reset a = 3 0; free x; free_failed; alloc w 1 @1; leave a; adopt a
         alloc y 4 %2; alloc z 1; read a = 5 0; free x %2; close a = 2 3",
    );
    let ledger = check("open a of task; enter a; alloc x 1; leave a; close a = 1 0; free x");
    assert!(ledger.thread_levels.is_empty() && ledger.scopes.is_empty());
}
