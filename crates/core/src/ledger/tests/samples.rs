//! Tests of sampled scopes.

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
fn a_failed_reading_keeps_the_last_good_numbers_and_is_reported() {
    check("sample 10; open t sampled; sample 40; unread; read t = 30 0 stale; sample 20; close t = 10 20");
    check("sample 10; open t sampled; unread; close t = 0 0 stale readings=1");
}

#[test]
fn a_scope_whose_start_was_not_read_is_stale() {
    check(
        "sample 10; open t sampled; unread; reset t = 0 0 stale; sample 40; read t = 30 0 stale; reset t = 30 0 stale; sample 50; close t = 10 0",
    );
}
