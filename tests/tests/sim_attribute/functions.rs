//! Tests functions of every kind.

use super::*;

#[gpu_mem_trace]
fn plain() {}

#[gpu_mem_trace]
    #[rustfmt::skip]
    fn in_one_line() -> i32 { 1 }

#[gpu_mem_trace]
extern "C" fn for_c(n: i32) -> i32 {
    n
}

#[gpu_mem_trace]
fn early(n: i32) -> &'static str {
    if n > 0 {
        return "early";
    }
    "late"
}

#[gpu_mem_trace]
fn question(text: &str) -> Result<i32, std::num::ParseIntError> {
    let n: i32 = text.parse()?;
    Ok(n + 1)
}

#[gpu_mem_trace]
fn panics() {
    panic!("on purpose");
}

#[gpu_mem_trace]
fn never() -> ! {
    panic!("on purpose")
}

#[gpu_mem_trace]
fn factorial(n: u64) -> u64 {
    if n == 0 { 1 } else { n * factorial(n - 1) }
}

#[gpu_mem_trace]
fn outer() -> i32 {
    #[gpu_mem_trace]
    fn inner() -> i32 {
        7
    }
    inner()
}

#[test]
fn report_when_they_end() {
    check(plain, ["plain"]);
    check(in_one_line, ["in_one_line"]);
    check(|| for_c(1), ["for_c"]);
    check(|| assert_eq!(early(1), "early"), ["early"]);
    check(|| assert_eq!(early(0), "late"), ["early"]);
    check(|| assert_eq!(question("41"), Ok(42)), ["question"]);
    check(|| assert!(question("x").is_err()), ["question"]);
    let nested = ["      factorial > factorial", "    factorial > factorial", "  factorial > factorial", "factorial"];
    check(|| assert_eq!(factorial(3), 6), nested);
    check(|| assert_eq!(outer(), 7), ["  outer > inner", "outer"]);
}

#[test]
fn report_when_they_panic() {
    check(|| assert!(catch_unwind(panics).is_err()), ["panics"]);
    check(|| assert!(catch_unwind(|| never()).is_err()), ["never"]);
}

#[gpu_mem_trace]
fn generic<T, const N: usize>(value: &T) -> [T; N]
where
    T: Copy,
{
    [*value; N]
}

#[gpu_mem_trace]
fn longest<'a>(a: &'a str, b: &'a str) -> &'a str {
    if a.len() > b.len() { a } else { b }
}

#[gpu_mem_trace]
fn both_places(numbers: impl IntoIterator<Item = u32>) -> impl Iterator<Item = u32> {
    numbers.into_iter().map(|n| n + 1)
}

#[gpu_mem_trace]
fn borrowing<'a>(text: &'a str, by: &'a str) -> impl Iterator<Item = &'a str> + use<'a> {
    text.split(by)
}

struct Point {
    x: i32,
    y: i32,
}

#[gpu_mem_trace]
fn patterns(
    (a, mut b): (i32, i32),
    Point { x, y: renamed }: Point,
    [first, ..]: [i32; 3],
    _: i32,
    _ignored: i32,
) -> i32 {
    b += 1;
    a + b + x + renamed + first
}

#[test]
fn keep_their_signature() {
    check(|| assert_eq!(generic::<_, 2>(&1), [1, 1]), ["generic"]);
    check(|| assert_eq!(longest("ab", "c"), "ab"), ["longest"]);
    check(|| assert!(both_places([1, 2]).eq([2, 3])), ["both_places"]);
    check(|| assert!(borrowing("a b", " ").eq(["a", "b"])), ["borrowing"]);
    let patterns = || patterns((1, 2), Point { x: 3, y: 4 }, [5, 6, 7], 8, 9);
    check(|| assert_eq!(patterns(), 16), ["patterns"]);
}

#[gpu_mem_trace]
fn inner_attributes() -> i32 {
    #![allow(unused_variables)]
    //! And an inner comment.
    const LOCAL: i32 = 2;
    let unused = 1;
    LOCAL
}

/// Documented.
#[must_use]
#[inline(never)]
#[gpu_mem_trace]
#[track_caller]
#[deprecated(note = "still here")]
fn attributed() -> u32 {
    std::panic::Location::caller().line()
}

#[test]
#[expect(deprecated, reason = "the attribute must have been kept")]
fn keep_their_attributes() {
    check(|| assert_eq!(inner_attributes(), 2), ["inner_attributes"]);
    let here = || (attributed(), line!());
    check(|| assert_eq!(here().0, here().1), ["attributed"; 2]);
}

#[test]
#[gpu_mem_trace]
fn a_test_below_its_attribute() {}

#[gpu_mem_trace]
#[test]
fn a_test_above_its_attribute() {}

#[test]
fn may_be_tests() {
    check(a_test_below_its_attribute, ["a_test_below_its_attribute"]);
    check(a_test_above_its_attribute, ["a_test_above_its_attribute"]);
}

#[gpu_mem_trace]
#[expect(clippy::used_underscore_binding, reason = "it is the guard's name")]
fn hygienic(_trace: i32, trace: i32, gpumem: i32) -> i32 {
    let __private = 1;
    _trace + trace + gpumem + __private
}

#[test]
fn leave_all_names_to_the_user() {
    check(|| assert_eq!(hygienic(1, 2, 3), 7), ["hygienic"]);
}

/// A value whose `drop` is traced, so that dropping the value adds a line to the reports.
struct Says;

impl Drop for Says {
    #[gpu_mem_trace]
    fn drop(&mut self) {}
}

#[gpu_mem_trace]
fn with_locals() {
    #[gpu_mem_trace(ctx = "body")]
    fn body() {}
    let _says = Says;
    body();
}

#[test]
fn outlive_their_locals() {
    check(with_locals, ["  with_locals > body", "  with_locals > Says::drop", "with_locals"]);
}

macro_rules! written_by_a_macro {
        ($visibility:vis $name:ident $body:block $ctx:literal $item:item) => {
            #[gpu_mem_trace]
            $visibility fn $name() $body

            #[gpu_mem_trace(ctx = $ctx)]
            $item
        };
        ($item:item) => {
            #[gpu_mem_trace]
            $item
        };
    }
written_by_a_macro! {
    impl Says {
        fn hello() {}
    }
}
written_by_a_macro!(pub(super) by_macro { plain() } "literal" fn item() {});

#[test]
fn may_be_written_by_a_macro() {
    check(by_macro, ["  by_macro > plain", "by_macro"]);
    check(item, ["literal"]);
    check(Says::hello, ["Says::hello"]);
}
