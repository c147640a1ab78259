//! Tests of threads in scopes of other threads.

use super::*;

#[test]
fn guests_whose_blocks_are_freed_are_forgotten() {
    let mut runner = Runner::default();
    runner.line("open t of own");
    for round in 0..20_000 {
        let thread = 2 + round % 7;
        runner.lines(&format!("ended %{thread}; enter t %{thread}; alloc {round} 1 %{thread}; leave t %{thread}"));
        // One block in a hundred is not freed.
        if round % 100 > 0 {
            runner.line(&format!("free {round} %{thread}"));
        }
        // At most 200 guests have live blocks, and a few entered during the last scan. The next scan starts at twice as many, and
        // a few enter during it.
        assert!(runner.ledger.sums.guests.len() < 2 * (200 + 10) + 10, "round {round}");
    }
    runner.line("read t = 200 1");
    assert_eq!(runner.ledger.sums.guests.len(), runner.ledger.sums.guests.owners());
}

/// New threads enter the scope `t`, so that guests are forgotten.
fn guests_of_t(runner: &mut Runner, count: usize) {
    for _ in 0..count {
        runner.lines("ended %9; enter t %9; leave t %9");
    }
}

/// After 2^32 threads and guests, all later ones share one owner thread.
#[test]
fn the_last_owner_thread_has_no_host() {
    let mut runner = Runner::default();
    runner.line("alloc w 1 %2");
    runner.ledger.places.threads.owner_threads = OwnerThread::LAST.0;
    runner.lines(
        "open t of own %3; enter t %2; alloc x 5 %2; leave t %2; enter t %2; alloc y 5 %2; read t = 10 0; free x
         close t = 5 5",
    );
}

#[test]
fn a_scope_of_a_guest_keeps_its_hosts_after_the_guest_has_ended() {
    let mut runner = Runner::default();
    runner.lines("open t of own; enter t %2; open s %2; ended %2");
    guests_of_t(&mut runner, 100);
    runner.lines("enter s %3; alloc x 5 %3; read t = 5 0");
}

#[test]
fn a_block_whose_free_fails_repeatedly_keeps_its_hosts() {
    let mut runner = Runner::default();
    runner.lines("open t of own; enter t %2; alloc x 1 %2; leave t %2");
    for round in 0..200 {
        runner.lines("free x %2; read t = 0 1");
        guests_of_t(&mut runner, round % 13);
        runner.line("free_failed %2");
        guests_of_t(&mut runner, round % 7);
        runner.line("read t = 1 0");
    }
}

/// A thread is in all scopes that it has entered and not left, wherever these were opened and in whatever order it leaves them.
#[test]
fn a_thread_counts_for_each_scope_that_it_is_in() {
    const TASKS: &str = "open t of task; open s of task; open u of task %3";
    for script in [
        "enter t; enter s; alloc x 8; alloc y 2; inside t = 2 8; free x; close s = 2 8; close t = 2 8; close u = 0 0",
        "enter s %2; enter t %2; alloc x 8 %2; alloc y 2 %2; free x; close s = 2 8; close t = 2 8",
        "enter t %2; enter u %2; enter s %2; alloc x 5 %2; close t = 5 0; close s = 5 0; close u = 5 0",
        "enter t; enter s; alloc x 1; enter t %2; alloc y 2 %2; enter s %2; alloc z 4 %2; close t = 7 0; close s = 5 0",
        "enter t; enter s; leave t; alloc x 5; close t = 0 0; close s = 5 0",
        "enter t; enter s; enter u; leave s; alloc x 5; leave t; alloc y 2; close t = 5 0; close s = 0 0; close u = 7 0",
        "enter t; open a; enter s; alloc x 5; leave t; alloc y 2; close t = 7 0; close s = 7 0; close a = 7 0",
        "enter t; enter s; open a; alloc x 5; close a = 5 0; leave s; alloc y 2; close t = 7 0; close s = 5 0",
        "close s = 0 0; enter t; enter s; alloc x 5; leave t; alloc y 2; close t = 5 0",
        "enter t; enter t; alloc x 5; leave t; alloc y 2; leave t; alloc z 1; close t = 7 0",
    ] {
        check(&format!("{TASKS}; {script}"));
    }
}

/// Entering and leaving takes a limited time however many scopes a thread is in.
#[test]
fn a_thread_in_many_scopes_counts_for_the_first_ones_and_the_innermost() {
    let mut runner = Runner::default();
    let mut each = |line: &str| (1..=100).for_each(|task| runner.line(&line.replace('#', &task.to_string())));
    each("open t# of task");
    each("enter t#");
    runner.lines("alloc x 1; read t1 = 1 0; read t16 = 1 0; read t17 = 0 0; read t100 = 1 0");
    // The first ones are left first.
    for left in 1..=98 {
        runner.line(&format!("leave t{left}"));
    }
    runner.lines(
        "alloc y 1; read t98 = 0 0; read t99 = 1 0; leave t100; alloc z 1; close t100 = 2 0; leave t99
         close t99 = 2 0",
    );
    assert!(runner.ledger.sums.guests.len() < 1000, "{}", runner.ledger.sums.guests.len());
}

/// Tasks are counted like guests.
#[test]
fn tasks_that_have_ended_are_forgotten() {
    let mut runner = Runner::default();
    for _ in 0..2000 {
        runner.lines("open a of task; enter a; alloc x 1; leave a; close a = 1 0; free x");
    }
    assert!(runner.ledger.sums.guests.len() < 100, "{}", runner.ledger.sums.guests.len());
    runner.lines("open a of task; enter a %2; alloc x 1 %2; leave a %2");
    guests_of_t(&mut runner, 100);
    runner.line("close a = 1 0");
}

/// Such a scope counts like one that its opener enters, although the opener does not enter it.
#[test]
fn a_task_without_a_number_of_its_own_counts_the_process() {
    let mut runner = Runner::default();
    runner.line("open o");
    runner.ledger.places.threads.owner_threads = OwnerThread::LAST.0;
    runner.lines(
        "open a of task; enter a; alloc x 1; leave a; alloc y 2; read a = 3 0; close a = 3 0; free x; close o = 2 1",
    );
}

/// Two threads may open scopes in an order other than that of their ids, so that a scan may already have passed the id of a new
/// one.
#[test]
fn a_task_that_starts_during_a_scan_keeps_its_hosts() {
    let mut runner = Runner::default();
    runner.lines("open o of task; enter o");
    for round in 0..3000 {
        // Later scopes have lower ids.
        runner.names.insert(format!("t.{round}"), 1_000_000 - round);
        runner.line(&format!("open t.{round} of task"));
        if let Some(older) = round.checked_sub(5) {
            runner.lines(&format!("enter t.{older} %2; alloc x{round} 1 %2; leave t.{older} %2; read o = 1 0"));
            runner.lines(&format!("free x{round} %2; close t.{older} = 0 1; reset o = 0 1"));
        }
    }
}
