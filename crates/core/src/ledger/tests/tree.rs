//! Tests of the tree of scope paths, and of the live blocks of a scope.

use std::collections::BTreeMap;

use super::*;

#[test]
fn each_scope_path_has_its_own_numbers() {
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
        "open a; alloc x 4 %2; tree /a = 1 0 0 4 0 0; enter a %2; alloc y 2 %2; tree /a = 1 2 2 6 2 1; close a = 6 0",
    );
    check("open a; open b %2; alloc x 1 %2; tree /b = 1 1 1 1 1 1; close b %2 = 1 0; close a = 0 0");
    // A peak is one moment. The events alternate between several paths.
    check(
        "open a; open b; alloc x 8; open c %2; alloc y 1 %2; free x; alloc z 3 %2; free y; alloc v 6
         tree /a/b = 1 6 8 9 14 2; tree /a = 1 6 8 9 0 0; tree /c = 1 3 4 9 4 2; tree / = 0 9 9 0 0 0",
    );
    // Allocations on another device have the same path there.
    check("open a; open b; alloc x @1 7; close b = 0 0; tree /a/b @1 = 0 7 7 0 7 1; tree /a @1 = 0 7 7 0 0 0");
    check("open a; alloc x 7; free x %2; free_failed %2; tree /a = 1 7 7 7 7 1");
    check("open a; alloc x 7 in 1; gone 1; tree /a = 1 0 7 7 7 1");
    check("open a sampled; alloc x 7; close a = 0 0 ; tree /a = 1 7 7 7 7 1");
    // Paths count only memory that is certainly on the device, like traces.
    check("open a; alloc x 1 managed; alloc y 2 pinned; alloc z 4; free x; tree /a = 1 4 4 4 4 1; close a = 4 0");
}

#[test]
fn the_live_blocks_of_a_scope() {
    check(
        "alloc w 1; open a; alloc x 10; alloc y 20 %2; inside a = 10; open b; alloc z 30 @1; inside a = 10 30; inside b = 30",
    );
    check("open a; alloc x 10; close a = 10 0; open a.2; alloc y 5; inside a.2 = 5; free y; inside a.2 = none");
    check("open a; open a.2 %2; alloc x 1; alloc y 2 %2; inside a = 1; inside a.2 = 2");
    check("open a; open b; alloc x 1; close a = 1 0; alloc y 2; tree /b = 1 2 2 3 2 1; inside b = 1 2");
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

#[test]
fn a_reset_of_the_summary_keeps_what_is_in_use() {
    check(
        "open a; alloc x 5; alloc y 3; free x; close a = 3 5; reset-summary; tree /a = 0 3 3 0 0 0; tree / = 0 3 3 0 0 0
         alloc z 1; free z; tree / = 0 3 4 0 1 1; open a; alloc v 1; close a = 1 0; tree /a = 1 4 4 4 1 1",
    );
    // A scope that is open counts as opened now.
    check(
        "open a; open b; alloc x 9; free x; reset-summary; tree /a/b = 1 0 0 9 0 0; alloc y 2; tree /a = 1 2 2 9 0 0",
    );
}

/// The simple implementation: each path keeps its values, and each event changes those of all outer paths.
#[derive(Default)]
struct SimpleTree {
    /// The calls, the bytes in use and their peak; the bytes and the allocations of only this path.
    values: HashMap<String, [i64; 5]>,
    /// The scopes that each thread is in.
    threads: [Vec<Inside>; 3],
    /// The path of each open scope.
    open: BTreeMap<String, String>,
}

#[derive(Clone)]
struct Inside {
    scope: String,
    path: String,
    /// True if the thread opened the scope, false if it entered it
    is_own: bool,
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl SimpleTree {
    fn change(&mut self, path: &str, by: i64) {
        for end in path.match_indices('/').map(|(at, _)| at).chain([path.len()]).filter(|end| *end > 0) {
            let [_, sum, most, ..] = self.values.entry(path[..end].to_owned()).or_default();
            *sum += by;
            *most = (*most).max(*sum);
        }
    }

    fn call(&mut self, path: &str, by: i64) {
        self.values.entry(path.to_owned()).or_default()[0] += by;
    }

    fn reset(&mut self) {
        for [calls, sum, most, allocated, allocations] in self.values.values_mut() {
            (*calls, *most, *allocated, *allocations) = (0, *sum, 0, 0);
        }
        for path in self.open.values().cloned().collect::<Vec<_>>() {
            self.call(&path, 1);
        }
    }

    fn path(&self, thread: usize) -> String {
        self.threads[thread].last().map(|inside| inside.path.clone()).unwrap_or_default()
    }

    /// Closes a scope that may not be the latest one of its thread. Its inner scopes move to the scope around it.
    fn close(&mut self, thread: usize, at: usize) {
        let closed = self.threads[thread].remove(at);
        self.open.remove(&closed.scope);
        let (mut left, mut outer) = (closed.path.clone(), parent(&closed.path).to_owned());
        let mut moved: HashMap<String, String> = HashMap::new();
        for number in at..self.threads[thread].len() {
            let Inside { scope, path, is_own } = self.threads[thread][number].clone();
            let to = if let Some(to) = moved.get(&scope) {
                to.clone()
            } else if is_own && parent(&path) == left {
                let to = format!("{outer}/{}", &path[left.len() + 1..]);
                self.call(&path, -1);
                self.call(&to, 1);
                self.open.insert(scope.clone(), to.clone());
                moved.insert(scope, to.clone());
                to
            } else {
                break;
            };
            self.threads[thread][number].path.clone_from(&to);
            (left, outer) = (path, to);
        }
    }
}

#[test]
fn the_tree_agrees_with_the_simple_way() {
    for seed in 1..200_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        let (mut runner, mut tree) = (Runner::default(), SimpleTree::default());
        let mut blocks: Vec<(String, String, i64)> = Vec::new();
        for step in 0..300 {
            let thread = random(3);
            let (number, path) = (u32::try_from(thread).unwrap() + 1, tree.path(thread));
            match random(8) {
                0 | 1 => {
                    let name = ["a", "b", "c"][random(3)];
                    let (scope, path) = (format!("{name}.{step}"), format!("{path}/{name}"));
                    runner.line(&format!("open {scope} %{number}"));
                    tree.call(&path, 1);
                    tree.open.insert(scope.clone(), path.clone());
                    tree.threads[thread].push(Inside { scope, path, is_own: true });
                }
                2 if !tree.open.is_empty() => {
                    let (scope, path) = tree.open.iter().nth(random(tree.open.len())).unwrap();
                    let (scope, path) = (scope.clone(), path.clone());
                    runner.line(&format!("enter {scope} %{number}"));
                    tree.threads[thread].push(Inside { scope, path, is_own: false });
                }
                3 | 4 if !tree.threads[thread].is_empty() => {
                    let latest = tree.threads[thread].len() - 1;
                    let at = if random(3) == 0 { random(latest + 1) } else { latest };
                    let Inside { scope, is_own, .. } = tree.threads[thread][at].clone();
                    if is_own {
                        let closed = EventKind::Close { scope: ScopeId(runner.id(&scope)) };
                        runner.post(&closed, ThreadId(number));
                        tree.close(thread, at);
                    } else if at == latest {
                        runner.line(&format!("leave {scope} %{number}"));
                        tree.threads[thread].pop();
                    }
                }
                5 if !blocks.is_empty() => {
                    let (block, path, size) = blocks.swap_remove(random(blocks.len()));
                    runner.line(&format!("free {block} %{number}"));
                    tree.change(&path, -size);
                }
                6 if random(8) == 0 => {
                    runner.line("reset-summary");
                    tree.reset();
                }
                _ => {
                    let size = i64::try_from(random(50)).unwrap();
                    runner.line(&format!("alloc {step} {size} %{number}"));
                    tree.change(&path, size);
                    let [.., allocated, allocations] = tree.values.entry(path.clone()).or_default();
                    (*allocated, *allocations) = (*allocated + size, *allocations + 1);
                    blocks.push((step.to_string(), path, size));
                }
            }
        }
        for (path, values) in tree.values.iter().filter(|(path, _)| !path.is_empty()) {
            let text = runner.tree(path, 0).expect(path);
            let mut words: Vec<i64> = text.split(' ').map(|word| word.parse().unwrap()).collect();
            // Scripts check the peak of the device.
            words.remove(3);
            assert_eq!(words, values, "seed {seed}, {path}");
        }
    }
}
