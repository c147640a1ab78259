//! Finds the test of a process to which a thread belongs. Rust's test harness starts a thread for each test and names it after
//! the test.

use std::fmt::{self, Display};

use super::counted;
use crate::model::{Bytes, one_line};

/// The known facts about a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadFacts {
    /// The name that the program gave it.
    pub name: Option<String>,
    /// The name in the operating system, which Linux truncates to 15 bytes. A thread without its own name inherits the name of
    /// the thread that started it.
    pub system_name: Option<String>,
    /// The functions that it was in, in any order. Empty if they are not known.
    pub functions: Vec<String>,
}

/// The test to which a thread belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BelongsTo {
    /// The thread belongs to this test, which is not the one with the budget.
    OtherTest(String),
    /// The thread belongs to the test with the budget.
    ThisTest,
    /// The thread belongs to a thread pool, to a framework, or to a program that is not a test.
    NotKnown,
}

impl ThreadFacts {
    /// Returns the test that the thread runs, or the test that started the thread. `None` if it is not known.
    pub fn test(&self) -> Option<&str> {
        let is_harness = |name: &String| {
            ["test::run_test", "test::__rust_begin_short_backtrace"].iter().any(|of| name.starts_with(of))
        };
        match &self.name {
            // With one thread for all tests, tests run on the main thread.
            Some(name) if name != "main" && self.functions.iter().any(is_harness) => Some(name),
            Some(_) => None,
            // The name is not enough: the threads of a pool have the name of the test that used the pool first, and work for
            // others. Therefore the thread must also run code that was written in that test.
            None => {
                let inherited = self.system_name.as_deref()?;
                self.functions.iter().filter_map(|name| closure_of(name)).find(|test| cut_off(test) == inherited)
            }
        }
    }

    /// Returns the test to which the thread belongs, as seen from the thread with the budget.
    pub fn belongs_to(&self, own: &Self) -> BelongsTo {
        let Some(own_test) = own.test() else { return BelongsTo::NotKnown };
        // Several tests may have the same truncated name.
        let inherits =
            || self.name.is_none() && self.system_name.as_deref() == Some(own_test) && own_test.len() < LONGEST;
        // The thread may work for several tests: a pool's thread that one test started may run code of another.
        let runs_own = || self.functions.iter().filter_map(|name| closure_of(name)).any(|test| test == own_test);
        match self.test() {
            _ if runs_own() => BelongsTo::ThisTest,
            Some(test) if test != own_test => BelongsTo::OtherTest(test.to_owned()),
            Some(_) => BelongsTo::ThisTest,
            None if inherits() => BelongsTo::ThisTest,
            None => BelongsTo::NotKnown,
        }
    }
}

/// Linux truncates thread names to this number of bytes.
const LONGEST: usize = 15;

/// Returns the name of a thread as Linux stores it.
fn cut_off(name: &str) -> &str {
    let mut end = name.len().min(LONGEST);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

/// Returns the function in which a closure was written, without its crate, as tests are named: `tests::a` for
/// `sim::tests::a::{{closure}}`. The closure may be an argument of a generic function.
fn closure_of(function: &str) -> Option<&str> {
    let end = ["::{{closure}}", "::{closure#"].iter().filter_map(|mark| function.find(mark)).min()?;
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let start = function[..end].char_indices().rev().take_while(|(_, c)| is_path(*c)).last()?.0;
    let (its_crate, path) = function[start..end].split_once("::")?;
    (!its_crate.is_empty()).then_some(path)
}

/// The allocations and frees of a thread on the device of a budget that does not count it, or that requires that no other test
/// runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherThread {
    /// The thread or its test, in words.
    pub who: String,
    /// The place of the first of these calls, if it is known.
    pub place: Option<String>,
    /// The number of threads.
    pub threads: u64,
    /// The blocks that it allocated.
    pub blocks: u64,
    /// The sum of their sizes.
    pub bytes: Bytes,
    /// The sum of the blocks that it freed.
    pub freed: Bytes,
}

impl OtherThread {
    /// Adds up threads with the same name and place. The most active come first.
    pub fn largest(all: Vec<Self>) -> Vec<Self> {
        let mut sums: Vec<Self> = Vec::new();
        for thread in all {
            match sums.iter_mut().find(|sum| (&sum.who, &sum.place) == (&thread.who, &thread.place)) {
                None => sums.push(thread),
                Some(sum) => {
                    sum.threads += thread.threads;
                    sum.blocks += thread.blocks;
                    sum.bytes = sum.bytes + thread.bytes;
                    sum.freed = sum.freed + thread.freed;
                }
            }
        }
        sums.sort_by_key(|sum| std::cmp::Reverse((sum.bytes, sum.freed)));
        sums
    }
}

/// Writes a text such as `2 GiB in 8 blocks: thread "loader", src/main.rs:12`.
impl Display for OtherThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, place, threads, blocks, bytes, freed } = self;
        write!(f, "{bytes:>12} in {}", counted(*blocks, "block", "blocks"))?;
        if *freed > 0 {
            write!(f, ", {freed} freed")?;
        }
        write!(f, ": {}", one_line(who))?;
        if *threads > 1 {
            write!(f, " ({threads} of them)")?;
        }
        place.iter().try_for_each(|place| write!(f, ", {}", one_line(place)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(name: Option<&str>, system_name: &str, functions: &[&str]) -> ThreadFacts {
        ThreadFacts {
            name: name.map(ToOwned::to_owned),
            system_name: Some(system_name.to_owned()),
            functions: functions.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    const OF_HARNESS: [&str; 2] = ["test::__rust_begin_short_backtrace", "test::run_test::{{closure}}"];

    fn own() -> ThreadFacts {
        facts(Some("tests::forward_is_frugal"), "tests::forward_", &OF_HARNESS)
    }

    #[test]
    fn a_thread_of_the_harness_is_that_of_its_test() {
        let newer = ["test::__rust_begin_short_backtrace::<core::result::Result<(), alloc::string::String>>"];
        for functions in [&OF_HARNESS[..], &newer] {
            let other = facts(Some("tests::forward_again"), "tests::forward_", functions);
            assert_eq!(other.belongs_to(&own()), BelongsTo::OtherTest("tests::forward_again".to_owned()));
        }
        assert_eq!(own().belongs_to(&own()), BelongsTo::ThisTest);
        // One thread just has such a name, and the functions of the other are not known.
        for functions in [&["loader::run"][..], &[]] {
            let named = facts(Some("tests::forward_again"), "tests::forward_", functions);
            assert_eq!(named.belongs_to(&own()), BelongsTo::NotKnown);
        }
        // Here one thread runs all tests.
        assert_eq!(facts(Some("main"), "sim-1234", &OF_HARNESS).test(), None);
    }

    #[test]
    fn a_thread_without_a_name_runs_code_of_the_test_that_started_it() {
        let of = |system_name, functions: &[&str]| facts(None, system_name, functions).belongs_to(&own());
        let other = BelongsTo::OtherTest("tests::forward_in_parallel".to_owned());
        let prefix = "std::sys::backtrace::__rust_begin_short_backtrace";
        let generic = format!("{prefix}::<krate::tests::forward_in_parallel::{{closure#0}}, ()>");
        assert_eq!(of("tests::forward_", &["krate::tests::forward_in_parallel::{{closure}}::{{closure}}"]), other);
        assert_eq!(of("tests::forward_", &["krate::tests::forward_in_parallel::{closure#0}"]), other);
        assert_eq!(of("tests::forward_", &[&generic]), other);
        assert_eq!(of("tests::forward_", &["krate::tests::forward_is_frugal::{{closure}}"]), BelongsTo::ThisTest);
        // The thread was started by this test, or by one whose name has the same start.
        assert_eq!(of("tests::forward_", &["krate::pool::Pool::new::{{closure}}"]), BelongsTo::NotKnown);
        let (short, worker) =
            (facts(Some("forward"), "forward", &OF_HARNESS), facts(None, "forward", &["krate::work"]));
        assert_eq!(worker.belongs_to(&short), BelongsTo::ThisTest);
        // The threads of a pool have the name of the test that used it first.
        let pool = ["rayon_core::registry::ThreadBuilder::run", "krate::work"];
        assert_eq!(of("tests::other", &pool), BelongsTo::NotKnown);
        assert_eq!(of("tests::other", &["krate::tests::forward_in_parallel::{{closure}}"]), BelongsTo::NotKnown);
        let for_this = ["krate::tests::other::{{closure}}", "krate::tests::forward_is_frugal::{{closure}}"];
        assert_eq!(of("tests::other", &for_this), BelongsTo::ThisTest);
        assert_eq!(of("DSD-0-0", &[]), BelongsTo::NotKnown);
    }

    #[test]
    fn a_program_that_is_no_test_has_no_tests() {
        let main = facts(Some("main"), "server", &["server::main"]);
        let worker = facts(None, "server", &["server::main::{{closure}}"]);
        assert_eq!(worker.belongs_to(&main), BelongsTo::NotKnown);
        assert_eq!(main.belongs_to(&worker), BelongsTo::NotKnown);
    }

    #[test]
    fn names_of_closures() {
        for (function, test) in [
            ("a::b::c::{{closure}}", Some("b::c")),
            ("a::c::{closure#1}::{closure#0}", Some("c")),
            ("x::<a::c::{closure#1}>", Some("c")),
            ("<a::T as a::U>::c::{{closure}}", None),
            ("a::c", None),
            ("::{{closure}}", None),
            ("{{closure}}", None),
        ] {
            assert_eq!(closure_of(function), test, "{function}");
        }
        assert_eq!(cut_off("1234567890123é"), "1234567890123é");
        assert_eq!(cut_off("12345678901234é"), "12345678901234");
    }
}
