//! Tests budgets while other threads allocate. Each test starts this executable again, which runs one module of `cases` as `cargo
//! test` does.

mod cases;

use std::collections::BTreeMap;
use std::process::Command;

use gpumem_tests::{OwnProcess, output_of};

/// The result of each test in a module of `cases`, and the output of all of them.
struct Tested {
    passed: BTreeMap<String, bool>,
    text: String,
}

fn tested(module: &str, threads: usize, env: &[(&str, &str)]) -> Tested {
    // The harness must run a module of tests, but `OwnProcess` runs a single test. Therefore only its program and its environment
    // are used.
    let own: Command = OwnProcess::new("unused").part(module).envs(env).command();
    let mut command = Command::new(own.get_program());
    command.arg(format!("cases::{module}::")).arg(format!("--test-threads={threads}")).arg("--nocapture");
    for (name, value) in own.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = output_of(&mut command);
    let text = format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let prefix = format!("test cases::{module}::");
    // With one thread, the output of a test is between its name and its result. Therefore the failed tests are taken from the
    // list at the end.
    let failed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("cases::")?.strip_prefix(module)?.strip_prefix("::"))
        .collect();
    let named = text.lines().filter_map(|line| line.strip_prefix(&prefix)?.split(' ').next());
    let passed = named.map(|name| (name.to_owned(), !failed.contains(&name))).collect();
    Tested { passed, text }
}

impl Tested {
    #[track_caller]
    fn all_pass(&self, count: usize) -> &Self {
        assert!(self.passed.len() == count && self.passed.values().all(|passed| *passed), "{}", self.text);
        self
    }

    #[track_caller]
    fn fails(&self, test: &str) -> &Self {
        assert_eq!(self.passed.get(test), Some(&false), "{test} in\n{}", self.text);
        self
    }

    #[track_caller]
    fn passes(&self, test: &str) -> &Self {
        assert_eq!(self.passed.get(test), Some(&true), "{test} in\n{}", self.text);
        self
    }

    #[track_caller]
    fn says(&self, words: &[&str]) -> &Self {
        for words in words {
            assert!(self.text.contains(words), "`{words}` is not in\n{}", self.text);
        }
        self
    }
}

#[test]
fn a_pool_is_not_counted_so_the_result_is_not_known() {
    for threads in [1, 4] {
        let ended = tested("pool", threads, &[]);
        ended.fails("of_a_test").fails("of_a_function").says(&[
            "whether `sim_threads::cases::pool::of_a_test` kept its GPU memory budget is not known: it counts its own thread, and \
             other threads allocated on simulated device 0 at the same time:",
            "2 GiB in 8 blocks: a thread without a name (the system calls it `",
            "(4 of them), tests/sim_threads/cases.rs:",
            "with the option threads = \"all\" a budget counts every thread",
            "GpuMemTrace::handle",
            "or, if they do not concern this function, leave them out with the option thread_local",
        ]);
        // A test without a limit passes, and so does a budget that does not count other threads.
        ended.passes("without_a_limit").passes("of_one_thread_only");
        // A limit that is certainly exceeded is reported.
        ended
            .fails("over_the_limit")
            .says(&["peak <= 1 MiB: it was 2 MiB", "at the same time, other threads allocated (not counted)"]);
        // A panic of the test itself is not changed.
        ended.fails("that_panics").says(&["its own panic"]);
        assert!(!ended.text.contains("`sim_threads::cases::pool::that_panics` kept"), "{}", ended.text);
    }
    // A budget whose result is not known is skipped like one that cannot be measured.
    let skipped = tested("pool", 4, &[("GPUMEM_BUDGETS", "skip")]);
    skipped.passes("of_a_test").passes("of_a_function").says(&[
        "the GPU memory budget of `sim_threads::cases::pool::of_a_test` was skipped: it counts its own thread, and other threads",
    ]);
}

#[test]
fn a_thread_with_a_name_is_named() {
    let ended = tested("named", 2, &[]);
    ended.fails("a_loader").says(&[
        "1 GiB in 1 block: thread `loader`, tests/sim_threads/cases.rs:",
        ", from tests/sim_threads/cases.rs:",
    ]);
    // The thread started before the budget, so gpumem cannot know the code for which it works.
    ended.fails("a_framework").says(&["64 MiB in 1 block: thread `DSD-0-0`"]);
}

#[test]
fn tests_without_a_budget_do_not_disturb() {
    tested("beside", 4, &[]).all_pass(2);
}

/// The thread of the pool inherits the name of the test that created the pool.
#[test]
fn a_pool_that_another_test_started_is_not_taken_for_its_own() {
    let ended = tested("pool_of_another", 4, &[]);
    ended.passes("begins_the_pool").fails("uses_the_pool").says(&[": a thread without a name (the system calls it `"]);
}

/// The thread is in a scope, but not in the scope of the budget.
#[test]
fn a_worker_of_the_test_that_is_traced_by_itself_is_not_counted_either() {
    let ended = tested("traced_worker", 4, &[]);
    ended.fails("with_a_trace").says(&["64 MiB in 1 block: a thread without a name"]);
}

#[test]
fn all_threads_are_counted_and_the_test_is_alone() {
    for threads in [1, 8] {
        let ended = tested("all", threads, &[]);
        ended.passes("kept").passes("of_an_assertion").passes("beside_a_trace").passes("waits").passes("nested");
        ended.fails("broken").says(&["peak <= 100 MiB: it was 2 GiB, ", "exact, the allocations of all threads"]);
        ended.fails("leaks").says(&["leaks <= 0 blocks: it was 1 block, 1 block over"]);
        assert_eq!(ended.passed.values().filter(|passed| !**passed).count(), 2, "{}", ended.text);
    }
}

#[test]
fn a_test_without_a_budget_disturbs_one_that_counts_all_threads() {
    let ended = tested("all_disturbed", 4, &[]);
    ended.passes("without_a_budget").fails("counts_all").says(&[
        "it counts all threads, and other tests allocated or freed on simulated device 0 at the same time:",
        "3 MiB in 1 block, 3 MiB freed: test `cases::all_disturbed::without_a_budget`, tests/sim_threads/cases.rs:",
        "give these tests the attribute #[gpu_mem_test]",
    ]);
}

#[test]
fn a_budget_of_another_device_is_not_kept() {
    let ended = tested("devices", 1, &[]);
    ended
        .fails("of_the_first")
        .passes("named")
        .says(&["it is for device 0, and its thread allocated on device 1 only: name that device"]);
}
