//! Tests of the allocations and frees that a budget notices on other threads.

use super::*;

#[test]
fn allocations_of_other_threads_are_noticed() {
    check(
        "watch 1 allocations; open a of own; alloc x 1; noticed = nothing; alloc y 2 %2; noticed = alloc 2 @0
         free y %2; noticed = nothing; alloc z 3 managed %2; noticed = nothing; alloc w 4 @1 %2; noticed = nothing
         unwatch 1; alloc v 5 %2; noticed = nothing; close a = 1 0",
    );
    // Threads in a scope of the watching thread, and threads with their own scopes.
    check(
        "watch 1 allocations; open a of own; enter a %2; alloc x 1 %2; noticed = nothing; leave a %2
         open b of own %3; alloc y 2 %3; noticed = alloc 2 @0 in scope; alloc z 4 %2; noticed = alloc 4 @0",
    );
    // A thread that opened a scope itself is reported as such; one in another thread's scope works for that thread.
    check(
        "watch 1 allocations; open a of own; open b %2; alloc x 1 %2; noticed = alloc 1 @0 in scope
         enter b %3; alloc y 1 %3; noticed = nothing",
    );
    // Two devices, and two watches on one device.
    check(
        "watch 1 allocations; watch 2 allocations @1; watch 3 allocations; unwatch 1; alloc x 1 %2; noticed = alloc 1 @0
         alloc y 2 @1 %2; noticed = alloc 2 @1; unwatch 3; alloc z 4 %2; noticed = nothing",
    );
    // Neither is an allocation.
    check(
        "watch 1 allocations; alloc x 8 %2; free x %2; free_failed %2; noticed = nothing; shrink x 4 %2; noticed = nothing",
    );
}

#[test]
fn what_other_threads_do_is_noticed() {
    check(
        "watch 1 others; alloc x 1; noticed = nothing; alloc y 2 %2; noticed = alloc 2 @0; free x %2; noticed = free 1 @0
         free y; noticed = nothing; open b of own %3; alloc z 4 %3; noticed = alloc 4 @0 in scope",
    );
    // Another thread in a scope of the watching thread works for it.
    check("watch 1 others; open a; enter a %2; alloc x 1 %2; noticed = nothing; free x %2; noticed = nothing");
}

#[test]
fn a_device_that_nobody_watches_costs_nothing() {
    let ledger = check(
        "watch 1 allocations; watch 2 others; alloc x 1 %2; unwatch 2; unwatch 1; alloc y 1 %2; noticed = nothing",
    );
    assert!(ledger.watches.is_empty() && ledger.fast_path == FastPath::All);
}
