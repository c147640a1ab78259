//! The fold, with scripts as data. A line is one event, one millisecond after the line before; a line with `=` says
//! what the scope must have come to. Amounts are MiB, devices are `@0` unless said otherwise.
//!
//! ```text
//! open a            open a exact scope       alloc x 10      free x       lost 1
//! open a sampled    open a sampled scope     sample 100      unread       (sample: MiB in use of 1000)
//! read a = 10 15    reset a = 10 15          close a = 10 15 [stale] [lost=1] [readings=2] [gap=3]
//! ```

use std::{collections::HashMap, fmt::Write, time::Duration};

use super::*;
use crate::model::{Block, MemKind};

const MIB: i64 = 1 << 20;

#[derive(Default)]
struct Runner {
    ledger: Ledger,
    names: HashMap<String, u64>,
    number: u64,
}

impl Runner {
    fn id(&mut self, name: &str) -> u64 {
        let next = self.names.len() as u64 + 1;
        *self.names.entry(name.to_owned()).or_insert(next)
    }

    fn line(&mut self, line: &str) {
        let (event, expected) = line.split_once('=').map_or((line, None), |_| {
            let (event, expected) = line.split_once(" = ").expect(line);
            (event, Some(expected))
        });
        let mut words: Vec<&str> = event.split_whitespace().collect();
        let ordinal = match words.iter().position(|word| word.starts_with('@')) {
            Some(at) => words.remove(at)[1..].parse().expect(line),
            None => 0,
        };
        let device = Device { family: Family::Cuda, ordinal };
        let mib = |text: &str| Bytes::mib(text.parse().expect(line));
        let kind = match words[..] {
            ["open", scope] => {
                let scope = ScopeId(self.id(scope));
                EventKind::Open { scope, device, gauge: Gauge::Exact, every: Duration::ZERO }
            }
            ["open", scope, "sampled"] => {
                let scope = ScopeId(self.id(scope));
                EventKind::Open { scope, device, gauge: Gauge::Sampled, every: Duration::from_millis(1) }
            }
            ["alloc", block, size] => {
                EventKind::Alloc(Block { device, address: self.id(block), bytes: mib(size), kind: MemKind::Device })
            }
            ["free", block] => EventKind::Free { device, address: self.id(block), bytes: None },
            ["free", block, size] => EventKind::Free { device, address: self.id(block), bytes: Some(mib(size)) },
            ["sample", used] => {
                let (total, used) = (Bytes::mib(1000), mib(used));
                let free = total.checked_sub(used).expect(line);
                EventKind::Sample { device, memory: GpuMemory { total, free, used, reserved: None } }
            }
            ["unread"] => EventKind::Unread { device },
            ["read", scope] => EventKind::Read { scope: ScopeId(self.id(scope)) },
            ["reset", scope] => EventKind::Reset { scope: ScopeId(self.id(scope)) },
            ["close", scope] => EventKind::Close { scope: ScopeId(self.id(scope)) },
            ["lost", count] => EventKind::Lost { count: count.parse().expect(line) },
            _ => panic!("not an event: {line}"),
        };
        self.number += 1;
        let event = Event { number: self.number, time: Duration::from_millis(self.number), kind };
        let trace = self.ledger.apply(&event);
        match (trace, expected) {
            (None, None) => {}
            (Some(trace), Some(expected)) => {
                let told = tell(&trace);
                for word in expected.split_whitespace() {
                    assert!(told.split_whitespace().any(|said| said == word), "{line}\ncame to: {told}");
                }
                assert!(told.starts_with(&expected.split_whitespace().take(2).collect::<Vec<_>>().join(" ")), "{line}");
                let peak = trace.peak_over_start().get().cast_signed();
                assert_eq!(peak, trace.used.get().max(0) + trace.peaked.get().cast_signed(), "{line}");
            }
            (trace, _) => panic!("{line}: came to {trace:?}"),
        }
    }
}

fn tell(trace: &Trace) -> String {
    let peaked = trace.peaked.get().cast_signed();
    assert_eq!((trace.used.get() % MIB, peaked % MIB), (0, 0));
    let mut told = format!("{} {} lost={}", trace.used.mb(), peaked / MIB, trace.lost);
    if trace.stale {
        told.push_str(" stale");
    }
    if let Some(sampling) = trace.sampling {
        let gap = sampling.longest_gap.as_millis();
        let _ = write!(told, " readings={} gap={gap}", sampling.readings);
    }
    told
}

fn check(script: &str) -> Ledger {
    let mut runner = Runner::default();
    for line in script.split([';', '\n']).map(str::trim).filter(|line| !line.is_empty()) {
        runner.line(line);
    }
    runner.ledger
}

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
fn reset_begins_anew_and_nothing_falls_between() {
    check("open t; alloc a 5; reset t = 5 0; alloc b 7; reset t = 7 0; free a; free b; close t = -12 0");
    check("open o; open t; alloc a 9; free a; reset t = 0 9; read t = 0 0; close o = 0 9");
}

#[test]
fn a_closed_or_unknown_scope_comes_to_nothing() {
    check("open t; close t = 0 0; close t; read t; reset t; alloc a 1");
}

#[test]
fn devices_are_apart() {
    check("open a @0; open b @1; alloc x @1 10; close a = 0 0; close b = 10 0");
    check("open a @0; open b @1; alloc x @0 10; alloc x @1 20; free x @0; close a = 0 10; close b = 20 0");
}

#[test]
fn frees_of_blocks_that_nobody_heard_of() {
    check("open t; free x; close t = 0 0");
    check("open t; free x 10; close t = -10 0");
    check("open t; alloc a 4; free x 10; alloc b 8; close t = 2 2");
}

#[test]
fn an_address_given_out_again_without_a_free() {
    check("open t; alloc a 10; alloc a 30; read t = 30 0; free a; close t = 0 30");
}

#[test]
fn samples_move_sampled_scopes_only() {
    check("sample 100; open t sampled; sample 300; sample 150; close t = 50 150 readings=3 gap=2");
    check("sample 100; open t; sample 300; close t = 0 0");
    check("sample 100; open t sampled; alloc a 10; sample 100; close t = 0 0 readings=2");
}

#[test]
fn a_peak_is_never_negative_even_when_the_sampler_missed_the_growth() {
    check("sample 0; open t sampled; sample 300; close t = 300 0");
}

#[test]
fn each_sampled_scope_knows_its_own_gaps_and_readings() {
    check(
        "sample 1; open a sampled; unread; unread; unread; sample 1; open b sampled; sample 1
         close b = 0 0 readings=2 gap=2; sample 1; close a = 0 0 readings=4 gap=5",
    );
}

#[test]
fn a_failed_reading_keeps_the_last_good_figures_and_says_so() {
    check("sample 10; open t sampled; sample 40; unread; read t = 30 0 stale; sample 20; close t = 10 20");
    check("sample 10; open t sampled; unread; close t = 0 0 stale readings=1");
}

#[test]
fn a_scope_that_began_unread_is_never_a_number() {
    check(
        "sample 10; open t sampled; unread; reset t = 0 0 stale; sample 40; read t = 30 0 stale; reset t = 30 0 stale; sample 50; close t = 10 0",
    );
}

#[test]
fn lost_events_are_told_to_the_scopes_that_were_open() {
    check("open a; lost 3; open b; lost 1; close b = 0 0 lost=1; close a = 0 0 lost=4");
}

#[test]
fn nothing_is_left_behind() {
    let ledger = check("open a; open b; alloc x 1; alloc y 2; free y; close a = 1 2; close b = 1 2; free x");
    assert!(ledger.scopes.is_empty());
}

/// RMM's rule for counters that nest (`statistics_resource_adaptor`): a closed inner counter is folded into the outer
/// one by `peak = max(peak, value + inner.peak)`. An independent oracle for scopes that nest.
#[test]
fn nested_scopes_agree_with_the_merge_rule_of_rmm() {
    #[derive(Clone, Copy, Default)]
    struct Counter {
        value: i64,
        peak: i64,
    }
    for seed in 1..300_u64 {
        let mut random = {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            move |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % below
            }
        };
        let mut ledger = Ledger::default();
        let mut number = 0;
        let mut apply = |kind| {
            number += 1;
            ledger.apply(&Event { number, time: Duration::from_nanos(number), kind })
        };
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let mut stack: Vec<(ScopeId, Counter)> = Vec::new();
        let mut blocks: Vec<(u64, i64)> = Vec::new();
        for step in 1..400_u64 {
            match random(6) {
                0 => {
                    let scope = ScopeId(step);
                    apply(EventKind::Open { scope, device, gauge: Gauge::Exact, every: Duration::ZERO });
                    stack.push((scope, Counter::default()));
                }
                1 => {
                    if let Some((scope, inner)) = stack.pop() {
                        let trace = apply(EventKind::Close { scope }).expect("the scope is open");
                        assert_eq!(trace.used.get(), inner.value, "seed {seed}");
                        assert_eq!(trace.peak_over_start().get().cast_signed(), inner.peak, "seed {seed}");
                        if let Some((_, outer)) = stack.last_mut() {
                            outer.peak = outer.peak.max(outer.value + inner.peak);
                            outer.value += inner.value;
                        }
                    }
                }
                2 | 3 if !blocks.is_empty() => {
                    let at = usize::try_from(random(blocks.len() as u64)).unwrap();
                    let (address, bytes) = blocks.swap_remove(at);
                    apply(EventKind::Free { device, address, bytes: None });
                    if let Some((_, top)) = stack.last_mut() {
                        top.value -= bytes;
                    }
                }
                _ => {
                    let bytes = random(1000).cast_signed();
                    apply(EventKind::Alloc(Block {
                        device,
                        address: step,
                        bytes: Bytes::new(bytes.unsigned_abs()),
                        kind: MemKind::Device,
                    }));
                    blocks.push((step, bytes));
                    if let Some((_, top)) = stack.last_mut() {
                        top.value += bytes;
                        top.peak = top.peak.max(top.value);
                    }
                }
            }
        }
    }
}
