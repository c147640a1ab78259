//! Tests of scopes that adopt threads. Thread 1 opens the scopes unless a line says otherwise.

use super::*;

/// Each line is the rest of a script after `open a of own`, whose results show which blocks count for thread 1.
#[test]
fn a_thread_without_a_scope_counts_for_the_innermost_scope_of_the_adopter() {
    for script in [
        "alloc x 5 %2; read a = 0 0",
        "adopt a; alloc x 5 %2; read a = 5 0; inside a = 5; tree /a = 1 5 5 5 5 1",
        "adopt a; open b; alloc x 5 %2; tree /a/b = 1 5 5 5 5 1; close b = 5 0; alloc y 3 %2; tree /a/b = 1 5 5 5 5 1",
        "adopt a; open b; alloc x 5 %2; close b = 5 0; alloc y 3 %2; tree /a = 1 8 8 8 3 1; read a = 8 0",
        // The thread continues after the scope has ended.
        "adopt a; alloc x 5 %2; close a = 5 0; alloc y 3 %2; free x %2; open a.2 of own; alloc z 1 %2; read a.2 = 0 0",
        // The thread's own scope, or one that it has entered, has priority.
        "adopt a; open s %2; alloc x 5 %2; read a = 0 0; close s %2 = 5 0; alloc y 3 %2; read a = 3 0",
        "open o of own %3; adopt a; enter o %2; alloc x 5 %2; read a = 0 0; leave o %2; alloc y 3 %2; read a = 3 0",
        // The adopter's thread is in a scope that another thread opened.
        "adopt a; open o of own %3; enter o; alloc x 5 %2; read a = 5 0; read o = 5 0; leave o; alloc y 3 %2; read o = 5 0; read a = 8 0",
        // The block counts until it is freed, on any thread.
        "adopt a; alloc x 5 %2; free x %3; read a = 0 5",
        "adopt a; alloc x 5 %2; free x %2; free_failed %2; read a = 5 0",
        // A scope that is not open adopts nothing.
        "adopt b; alloc x 5 %2; read a = 0 0",
        // The outer scope is closed first.
        "adopt a; open b; adopt b; close a = 0 0; alloc x 5 %2; tree /b = 1 5 5 5 5 1",
    ] {
        check(&format!("open a of own; {script}"));
    }
}

#[test]
fn names_decide_if_they_are_known() {
    for (script, used) in [
        ("named DSD-0-0 %2; adopt a DSD-; alloc x 5 %2", 5),
        ("adopt a DSD-; named DSD-0-0 %2; alloc x 5 %2", 5),
        ("adopt a DSD-; alloc x 5 %2; named DSD-0-0 %2; alloc y 3 %2", 3),
        ("adopt a DSD-; named rayon %2; alloc x 5 %2", 0),
        ("adopt a DSD-; adopt a rayon; named DSD-0 %2; named rayon %3; alloc x 5 %2; alloc y 3 %3", 3),
        ("open b; adopt b DSD-; adopt a; named rayon %2; alloc x 5 %2", 5),
    ] {
        check(&format!("open a of own; {script}; read a = {used} 0"));
    }
    check(
        "open a of own; needs_name %2 = false; adopt a; needs_name %2 = false; adopt a DSD-; needs_name %2 = true
         open s %2; needs_name %2 = false; close s %2 = 0 0; needs_name %2 = true; named x %2; needs_name %2 = false
         ended %2; needs_name %2 = true; close a = 0 0; needs_name %2 = false",
    );
}

/// A thread allocates with the same tag again and again, so its attribution is cached.
#[test]
fn a_cached_attribution_follows_the_scopes_of_the_adopter() {
    check(
        "alloc w 1 %2; open a of own; adopt a; alloc x 5 %2; alloc y 5 %2; read a = 10 0
         open b; alloc z 1 %2; alloc z2 1 %2; read b = 2 0; tree /a/b = 1 2 2 13 2 2
         open c of own %3; adopt c; alloc v 7 %2; read c = 7 0 shared=7; read a = 12 0 shared=7; read b = 2 0 shared=7
         reset a = 12 0 shared=7; reset c = 7 0 shared=7; close c %3 = 0 0 shared=0
         alloc u 2 %2; read a = 2 0 shared=0; enter a %2; alloc t 1 %2; leave a %2; alloc s 1 %2; read a = 4 0
         close b = 6 0; close a = 4 0; alloc r 1 %2; tree / = 0 25 25 0 2 2",
    );
}

#[test]
fn two_threads_that_adopt_are_marked_if_a_thread_could_be_either_ones() {
    for script in [
        "open a of own; adopt a; open b of own %3; adopt b; read a = 0 0 shared=0",
        "open a of own; adopt a; open b of own %3; adopt b; alloc x 5 %2; read b = 5 0 shared=5; read a = 0 0 shared=5",
        // The outer scope has a shared amount as well.
        "open o of own; open a; adopt a; open b of own %3; adopt b; alloc x 5 %2; close a = 0 0 shared=5; read o = 0 0 shared=5",
        "open a of own; adopt a; open b of own %3; adopt b; alloc x 5 %2; close a = 0 0; open o; read o = 0 0 shared=0",
        // The names differ, or one thread opened both scopes.
        "open a of own; adopt a DSD-; open b of own %3; adopt b rayon; named rayon %2; alloc x 5 %2; read b = 5 0 shared=0",
        "open a of own; adopt a; open b; adopt b; alloc x 5 %2; read b = 5 0 shared=0; read a = 5 0 shared=0",
        // A thread in its own scope is not adopted.
        "open a of own; adopt a; open b of own %3; adopt b; alloc x 5; alloc y 5 %3; read a = 5 0 shared=0",
    ] {
        check(script);
    }
}

/// A device was chosen wrongly only if the adopted threads did not allocate there either.
#[test]
fn what_an_adopted_thread_allocates_is_on_the_device_of_the_adopter() {
    check("open a; adopt a; alloc x 5 @1; read a = 0 0 on=1; alloc y 5 %2; read a = 5 0 here");
}

/// Between the polls of a task its scope adopts, although no thread is in it.
#[test]
fn a_task_that_waits_adopts() {
    check("open a of own; adopt a; leave a; alloc x 5 %2; read a = 5 0; enter a %3; alloc y 3 %2; inside a = 3 5");
}

#[test]
fn the_adopter_may_have_ended() {
    check(
        "open a of own; adopt a; alloc x 5 %2; ended %1; alloc y 3 %2; open s; alloc z 1; alloc w 1 %2; read s = 1 0
         read a = 9 0; close s = 1 0; close a = 9 0",
    );
}

/// Adopted threads come and go; their owner threads are forgotten with their blocks.
#[test]
fn adopted_threads_whose_blocks_are_freed_are_forgotten() {
    let mut runner = Runner::default();
    runner.lines("open t of own; adopt t");
    for round in 0..2_000 {
        let thread = 2 + round % 7;
        runner.lines(&format!("ended %{thread}; alloc b{round} 1 %{thread}; free b{round} %{thread}"));
        assert!(runner.ledger.sums.guests.len() < 40, "round {round}: {}", runner.ledger.sums.guests.len());
        assert!(runner.ledger.places.adopters.looked_up.len() <= 8, "round {round}");
    }
    runner.line("read t = 0 1");
}

/// A budget that watches other threads treats the adopted ones as its own.
#[test]
fn an_adopted_thread_works_for_the_budget() {
    check(
        "watch 1 others; open a; adopt a; alloc x 5 %2; noticed = nothing; free x %2; noticed = nothing
         close a = 0 5; alloc y 5 %2; noticed = alloc 5 @0; free y %2; noticed = free 5 @0",
    );
}
