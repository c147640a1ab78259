//! Scopes that are sampled, and scopes that read the usage of a pool.

use super::*;

#[test]
fn a_sampled_scope_loses_no_events() {
    check("sample 100; open t sampled; open u; lost 2; sample 100; close t = 0 0 lost=0; close u = 0 0 lost=2");
}

#[test]
fn samples_change_sampled_scopes_only() {
    check("sample 100; open t sampled; sample 300; sample 150; close t = 50 150 readings=3 gap=2");
    check("sample 100; open t; sample 300; close t = 0 0");
    check("sample 100; open t sampled; alloc a 10; sample 100; close t = 0 0 readings=2");
}

#[test]
fn a_peak_is_never_negative_even_when_the_sampler_missed_the_growth() {
    check("sample 0; open t sampled; sample 300; close t = 300 0");
}

#[test]
fn each_sampled_scope_has_its_own_gaps_and_readings() {
    check(
        "sample 1; open a sampled; unread; unread; unread; sample 1; open b sampled; sample 1
         close b = 0 0 readings=2 gap=2; sample 1; close a = 0 0 readings=4 gap=5",
    );
}

#[test]
fn a_failed_reading_keeps_the_last_good_figures_and_is_reported() {
    check("sample 10; open t sampled; sample 40; unread; read t = 30 0 stale; sample 20; close t = 10 20");
    check("sample 10; open t sampled; unread; close t = 0 0 stale readings=1");
}

#[test]
fn a_scope_whose_start_was_not_read_is_stale() {
    check(
        "sample 10; open t sampled; unread; reset t = 0 0 stale; sample 40; read t = 30 0 stale; reset t = 30 0 stale; sample 50; close t = 10 0",
    );
}

#[test]
fn a_high_water_mark_is_a_peak_of_the_open_scopes_only() {
    check("usage 90 10; open t pool; usage 50 20; read t = 10 30; usage 20 10; close t = 0 40");
    check(
        "usage 0 0; open o pool; usage 40 10; open i pool; usage 15 10; close i = 0 5; usage 10 5; reset o = 5 35
         usage 5 5; close o = 0 0",
    );
    // In use may have grown after the mark was read.
    check("usage 0 0; open t pool; usage 10 30; read t = 30 0; usage 30 0; close t = 0 30");
    check(
        "usage 9 9 @1; open t pool @1; usage 7 7; alloc a @1 5; sample @1 5; open e @1; close t = 0 0; close e = 0 0",
    );
}

#[test]
fn high_water_marks_that_could_not_be_read() {
    check("usage 10 10; open t pool; usage 40 20; unread pool; read t = 10 20 stale; usage 20 20; close t = 10 20");
    check(
        "usage 10 10; open t pool; open s sampled; unread pool; close s = 0 0; reset t = 0 0 stale; usage 30 30; close t = 20 0 stale",
    );
    check("usage 1 1; open t pool; free x; close t = 0 0 untracked=0");
}
