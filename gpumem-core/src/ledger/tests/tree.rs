//! The tree of scope paths, and the live blocks of a scope.

use super::*;

#[test]
fn each_scope_path_has_its_own_figures() {
    check(
        "open a; alloc x 10; open b; alloc y 20; free y; alloc z 5; close b = 5 15; tree /a/b = 1 5 20 30 25 2
         close a = 15 15; tree /a = 1 15 30 30 10 1; tree / = 0 15 30 0 0 0; free x; free z; tree /a = 1 0 30 30 10 1",
    );
    check("alloc w 100; open a; alloc x 10; close a = 10 0; tree /a = 1 10 10 110 10 1; tree / = 0 110 110 0 100 1");
    check("open a; alloc x 1; close a = 1 0; open a.2; alloc y 2; tree /a = 2 3 3 3 3 2; close a.2 = 2 0");
    check(
        "open a; open a.2; alloc x 4; close a.2 = 4 0; close a = 4 0; tree /a/a = 1 4 4 4 4 1; tree /a = 1 4 4 4 0 0",
    );
    // Another thread counts only while it is in the scope.
    check(
        "open a; alloc x 4 %2; tree /a = 1 0 0 4 0 0; enter a %2; alloc y 2 %2; tree /a = 1 2 2 6 2 1; close a = 6 0 whole",
    );
    check("open a; open b %2; alloc x 1 %2; tree /b = 1 1 1 1 1 1; close b %2 = 1 0; close a = 0 0");
    // A peak is one moment: events of several paths in turn.
    check(
        "open a; open b; alloc x 8; open c %2; alloc y 1 %2; free x; alloc z 3 %2; free y; alloc v 6
         tree /a/b = 1 6 8 9 14 2; tree /a = 1 6 8 9 0 0; tree /c = 1 3 4 9 4 2; tree / = 0 9 9 0 0 0",
    );
    // Allocations on another device have the same path there.
    check("open a; open b; alloc x @1 7; close b = 0 0; tree /a/b @1 = 0 7 7 0 7 1; tree /a @1 = 0 7 7 0 0 0");
    check("open a; alloc x 7; free x %2; free_failed %2; tree /a = 1 7 7 7 7 1");
    check("open a; alloc x 7 in 1; gone 1; tree /a = 1 0 7 7 7 1");
    check("open a sampled; alloc x 7; close a = 0 0 ; tree /a = 1 7 7 7 7 1");
    // Like traces, paths count only memory that is certainly on the device.
    check("open a; alloc x 1 managed; alloc y 2 pinned; alloc z 4; free x; tree /a = 1 4 4 4 4 1; close a = 4 0");
}

#[test]
fn the_live_blocks_of_a_scope() {
    check(
        "alloc w 1; open a; alloc x 10; alloc y 20 %2; inside a = 10; open b; alloc z 30 @1; inside a = 10 30; inside b = 30",
    );
    check("open a; alloc x 10; close a = 10 0; open a.2; alloc y 5; inside a.2 = 5; free y; inside a.2 = none");
    check("open a; open a.2 %2; alloc x 1; alloc y 2 %2; inside a = 1; inside a.2 = 2");
    let blocks: Vec<_> = (0..2000).map(|block| format!("alloc {block} 1;")).collect();
    let all = vec!["1"; 2000].join(" ");
    check(&format!("open a; {} inside a = {all}", blocks.concat()));
}

#[test]
fn deep_and_many_scopes_are_counted_together() {
    let mut runner = Runner::default();
    for scope in 0..100 {
        runner.line(&format!("open {scope}"));
    }
    for line in ["alloc x 1", "inside 0 = 1", "inside 63 = 1", "inside 99 = 1"] {
        runner.line(line);
    }
    let nodes = runner.ledger.nodes();
    assert_eq!(nodes.len(), 2 + 64 + 1);
    let others = nodes.iter().find(|(_, node)| node.callsite == CallsiteId::OTHERS).unwrap().1;
    assert_eq!((others.allocations, others.calls), (1, 36));
    assert!(nodes[1..].iter().all(|(_, node)| node.in_use == 1 << 20), "it counts for all scopes around it");
}

#[test]
fn a_reset_of_statistics_keeps_the_peak_of_the_process() {
    check("alloc a 5; free a; reset-peaks; alloc b 2; tree / = 0 2 5 0 7 2; reset-peaks; tree / = 0 2 5 0 7 2");
    check("alloc a 5; free a; reset-peaks; alloc b 9; tree / = 0 9 9 0 14 2");
}

/// The simple way: each path keeps a sum and a maximum, and each event changes all paths around it.
#[test]
fn the_tree_agrees_with_the_simple_way() {
    for seed in 1..60_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        let mut runner = Runner::default();
        let mut stacks = vec![Vec::<String>::new(); 3];
        let mut figures: HashMap<String, (i64, i64)> = HashMap::new();
        let mut blocks: Vec<(String, String, i64)> = Vec::new();
        let mut change = |path: &str, by: i64| {
            for end in path.match_indices('/').map(|(at, _)| at).chain([path.len()]).filter(|end| *end > 0) {
                let (sum, most) = figures.entry(path[..end].to_owned()).or_default();
                *sum += by;
                *most = (*most).max(*sum);
            }
        };
        for step in 0..300 {
            let thread = random(3);
            match random(5) {
                0 => {
                    let scope = format!("{}.{step}", ["a", "b", "c"][random(3)]);
                    runner.line(&format!("open {scope} %{}", thread + 1));
                    stacks[thread].push(scope);
                }
                1 => {
                    if let Some(scope) = stacks[thread].pop() {
                        let closed = EventKind::Close { scope: ScopeId(runner.id(&scope)) };
                        runner.post(&closed, ThreadId(u32::try_from(thread).unwrap() + 1));
                    }
                }
                2 if !blocks.is_empty() => {
                    let (block, path, size) = blocks.swap_remove(random(blocks.len()));
                    runner.line(&format!("free {block} %{}", thread + 1));
                    change(&path, -size);
                }
                _ => {
                    let size = i64::try_from(random(50)).unwrap();
                    let scopes = stacks[thread].iter().map(|scope| scope.split('.').next().unwrap());
                    let path = scopes.fold(String::new(), |path, scope| path + "/" + scope);
                    runner.line(&format!("alloc {step} {size} %{}", thread + 1));
                    change(&path, size);
                    blocks.push((step.to_string(), path, size));
                }
            }
        }
        for (path, (sum, most)) in &figures {
            let text = runner.tree(path, 0).expect(path);
            let words: Vec<i64> = text.split(' ').map(|word| word.parse().unwrap()).collect();
            assert_eq!((words[1], words[2]), (*sum, *most), "seed {seed}, {path}");
        }
    }
}

/// RMM's rule for nested counters (`statistics_resource_adaptor`): when an inner counter is closed, the outer one gets
/// `peak = max(peak, value + inner.peak)`. It is an independent way to compute the peaks of nested scopes.
#[test]
fn nested_scopes_agree_with_the_merge_rule_of_rmm() {
    #[derive(Clone, Copy, Default)]
    struct RmmCounter {
        value: i64,
        peak: i64,
    }
    for seed in 1..300_u64 {
        let mut random = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut ledger = Ledger::default();
        let mut number = 0;
        let mut apply = |kind| {
            number += 1;
            ledger.apply(&Event { number, time: Duration::from_nanos(number), thread: ThreadId(1), kind: &kind });
            ledger.last_trace()
        };
        let device = Device { family: Family::Cuda, ordinal: 0 };
        let mut stack: Vec<(ScopeId, RmmCounter)> = Vec::new();
        let mut blocks: Vec<(u64, i64)> = Vec::new();
        for step in 1..400_u64 {
            match random(6) {
                0 => {
                    let scope = ScopeId(step);
                    let spec = ScopeSpec::exact(device);
                    apply(EventKind::Open { scope, spec });
                    stack.push((scope, RmmCounter::default()));
                }
                1 => {
                    if let Some((scope, inner)) = stack.pop() {
                        let trace = apply(EventKind::Close { scope }).expect("it is open");
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
                    apply(EventKind::Free { key: Key::new(Space::Address, address), block: None });
                    if let Some((_, top)) = stack.last_mut() {
                        top.value -= bytes;
                    }
                }
                _ => {
                    let bytes = random(1000).cast_signed();
                    let block = Block::new(device, Bytes::new(bytes.unsigned_abs()), MemKind::Device);
                    apply(EventKind::Alloc { key: Key::new(Space::Address, step), block });
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
