//! What `#[gpu_mem_trace]` accepts, and what each use prints.
//!
//! The attribute must be clean in the strictest crate, so this one is.
#![deny(warnings, clippy::pedantic)]
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::task::{Context, Waker};

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, Gauge, Report, Sink, gpu_mem_trace};
use gpumem_tests::Yield;
use pollster::block_on;

/// The simulated devices 0 and 1.
fn gpus() -> &'static [SimGpu; 2] {
    static GPUS: OnceLock<[SimGpu; 2]> = OnceLock::new();
    GPUS.get_or_init(|| [0, 1].map(|_| SimGpu::install(Bytes::gib(1)).expect("no GPUMEM_SIM in the environment")))
}

thread_local! {
    static REPORTS: RefCell<Vec<Report>> = const { RefCell::new(Vec::new()) };
}

/// What this thread reported while `run` ran. One test at a time: a trace counts the whole process.
fn reports<T>(run: impl FnOnce() -> T) -> Vec<Report> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    gpus();
    REPORTS.take();
    gpumem::set_sink(Sink::custom(|report| REPORTS.with_borrow_mut(|reports| reports.push(report.clone()))));
    drop(run());
    REPORTS.take()
}

fn lines<T>(run: impl FnOnce() -> T) -> Vec<String> {
    // Tests that are traced themselves run beside this one.
    let alone = |report: &Report| report.to_string().replace(" [overlaps other threads]", "");
    reports(run).iter().map(alone).collect()
}

fn exit(ctx: &str) -> String {
    format!("△Used Peaked MB:      0      0 ({ctx}: exit)")
}

/// `run` must print one line for each of `contexts`, in this order.
#[track_caller]
fn check<const N: usize, T>(run: impl FnOnce() -> T, contexts: [&str; N]) {
    assert_eq!(lines(run), contexts.map(exit));
}

mod free_functions {
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
        check(|| assert_eq!(factorial(3), 6), ["factorial"; 4]);
        check(|| assert_eq!(outer(), 7), ["inner", "outer"]);
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

    /// Reports into the same lines when it is dropped.
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
        check(with_locals, ["body", "Says::drop", "with_locals"]);
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
        check(by_macro, ["plain", "by_macro"]);
        check(item, ["literal"]);
        check(Says::hello, ["Says::hello"]);
    }
}

mod figures {
    use super::*;

    fn take(gpu: usize, mib: u64) -> SimBlock {
        gpus()[gpu].alloc(Bytes::mib(mib)).expect("there is room")
    }

    #[gpu_mem_trace]
    fn forward(input: SimBlock) -> SimBlock {
        let _scratch = take(1, 512);
        drop(input);
        take(1, 20)
    }

    #[gpu_mem_trace(device = 1)]
    fn on_device_1() -> [SimBlock; 2] {
        drop(take(1, 7));
        [take(0, 100), take(1, 3)]
    }

    #[gpu_mem_trace]
    async fn across_await() -> SimBlock {
        let scratch = take(1, 30);
        Yield::default().await;
        drop(scratch);
        take(1, 10)
    }

    #[gpu_mem_trace]
    async fn consumes(input: SimBlock) -> Bytes {
        Yield::default().await;
        input.bytes()
    }

    #[gpu_mem_trace]
    async fn names_nothing(_: SimBlock) -> Bytes {
        Yield::default().await;
        Bytes::ZERO
    }

    #[gpu_mem_trace]
    fn by_hand(input: SimBlock) -> impl Future<Output = Bytes> {
        async move { input.bytes() }
    }

    #[gpu_mem_trace]
    async fn moves(input: SimBlock) {
        drop(input);
        Yield::default().await;
    }

    #[gpu_mem_trace]
    fn parameter_only(_input: SimBlock) {}

    #[test]
    fn are_those_of_the_function() {
        // On a device of their own, so that no other test sees what is taken between two of these reports.
        gpus()[1].make_current();
        let input = take(1, 10);
        assert_eq!(lines(|| forward(input)), ["△Used Peaked MB:     10    512 (forward: exit)"]);
        assert_eq!(lines(on_device_1), ["△Used Peaked MB:      3      4 (on_device_1: exit)"]);
        assert_eq!(lines(|| block_on(across_await())), ["△Used Peaked MB:     10     20 (across_await: exit)"]);
        let input = take(1, 10);
        assert_eq!(lines(|| parameter_only(input)), ["△Used Peaked MB:      0      0 (parameter_only: exit)"]);

        // What a body does not move is dropped after its report, named or not.
        for future in [
            (|input| Box::pin(consumes(input)) as Pin<Box<dyn Future<Output = Bytes>>>) as fn(SimBlock) -> _,
            |input| Box::pin(names_nothing(input)),
            |input| Box::pin(by_hand(input)),
        ] {
            let input = take(1, 10);
            assert_eq!(reports(|| block_on(future(input)))[0].trace.used, 0);
        }
        let input = take(1, 10);
        assert_eq!(lines(|| block_on(moves(input))), ["△Used Peaked MB:    -10      0 (moves: exit)"]);

        let mut context = Context::from_waker(Waker::noop());
        let mut cancelled = Box::pin(across_await());
        let started = lines(|| assert!(cancelled.as_mut().poll(&mut context).is_pending()));
        assert!(started.is_empty());
        assert_eq!(lines(|| drop(cancelled)), ["△Used Peaked MB:      0     30 (across_await: exit)"]);

        let mut ended = Box::pin(across_await());
        let told = lines(|| while ended.as_mut().poll(&mut context).is_pending() {});
        assert_eq!(told, ["△Used Peaked MB:     10     20 (across_await: exit)"], "told at its end");
        assert!(lines(|| drop(ended)).is_empty(), "and not again");
    }
}

mod options {
    use super::*;

    #[gpu_mem_trace(ctx = "step")]
    fn named() {}

    #[gpu_mem_trace(silent)]
    fn silent() {}

    #[gpu_mem_trace(silent = true)]
    fn silent_true() {}

    #[gpu_mem_trace(silent = false)]
    fn silent_false() {}

    #[gpu_mem_trace(on_exit_report = false)]
    fn no_exit() {}

    #[gpu_mem_trace(on_exit_report)]
    fn on_exit() {}

    #[gpu_mem_trace(skip)]
    fn skipped() {}

    #[gpu_mem_trace(thread_local, gauge = "exact")]
    fn of_one_thread() -> SimBlock {
        let take = || gpus()[0].alloc(Bytes::mib(5)).expect("there is room");
        drop(std::thread::scope(|threads| threads.spawn(take).join().expect("it runs")));
        take()
    }

    #[gpu_mem_trace(thread_local = false)]
    fn of_all_threads() {
        drop(std::thread::scope(|threads| threads.spawn(|| gpus()[0].alloc(Bytes::mib(5))).join().expect("it runs")));
    }

    #[gpu_mem_trace(gauge = "off")]
    fn unmeasured() {}

    #[gpu_mem_trace(gauge = "sampled")]
    fn sampled() {}

    #[gpu_mem_trace()]
    fn empty() {}

    #[gpu_mem_trace(ctx = "all", silent = false, on_exit_report = true, device = 0, gauge = "exact", crate = gpumem)]
    fn all() {}

    #[gpu_mem_trace(crate = super::gpumem_here::renamed)]
    fn renamed() {}

    #[test]
    fn do_what_they_say() {
        check(named, ["step"]);
        check(silent, []);
        check(silent_true, []);
        check(silent_false, ["silent_false"]);
        check(no_exit, []);
        check(on_exit, ["on_exit"]);
        check(skipped, []);
        check(empty, ["empty"]);
        check(unmeasured, []);
        check(sampled, ["sampled"]);
        assert_eq!(reports(sampled)[0].trace.gauge, Gauge::Sampled);
        assert_eq!(reports(all)[0].trace.gauge, Gauge::Exact);
        check(all, ["all"]);
        check(renamed, ["renamed"]);
        assert_eq!(lines(of_one_thread), ["△Used Peaked MB:      5      0 (of_one_thread: exit)"]);
        assert_eq!(lines(of_all_threads), ["△Used Peaked MB:      0      5 (of_all_threads: exit)"]);
    }
}

mod gpumem_here {
    pub(super) use ::gpumem as renamed;
}

/// The user's own `gpumem`, `core`, `Result`, … hide nothing that the attribute needs.
mod shadowed {
    #![allow(dead_code, unused_macros, non_camel_case_types, non_upper_case_globals)]
    use super::check;
    use ::gpumem::gpu_mem_trace;

    mod gpumem {}
    mod std {}
    mod core {}
    struct Result;
    struct Option;
    struct Some;
    struct String;
    struct Box;
    struct GpuMemTrace;
    struct str;
    struct bool;

    const _trace: u8 = 0;
    const _budget: u8 = 0;
    const _line: u8 = 0;
    const lines: u8 = 0;
    const text: u8 = 0;
    static trace: u8 = 0;
    struct body;

    macro_rules! format {
        () => {};
    }

    trait Builder: Sized {
        fn builder(&self) {}
        fn ctx(self, _: u8) {}
        fn silent(self, _: u8) {}
        fn start_or_off(self) {}
        fn into(self) {}
    }
    impl<T> Builder for T {}

    #[gpu_mem_trace(silent = false, gauge = "exact")]
    fn shadowed() -> Result {
        Result
    }

    #[gpu_mem_trace(lines, max_peak = 0)]
    fn with_lines() -> Result {
        Result
    }

    #[gpu_mem_trace(lines)]
    async fn asynchronous(n: u8) -> Result {
        let _ = ::gpumem::assert_gpu_mem!(peak == 0, { n });
        Result
    }

    #[test]
    fn all_paths_are_absolute() {
        check(shadowed, ["shadowed"]);
        check(with_lines, ["with_lines"]);
        check(|| super::block_on(asynchronous(1)), ["asynchronous"]);
    }
}

mod methods {
    #![allow(clippy::boxed_local, clippy::unused_self)]
    use super::*;
    use std::rc::Rc;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Model<T = u8> {
        weight: T,
    }

    impl<T: Clone + Default> Model<T> {
        #[gpu_mem_trace]
        fn by_ref(&self) -> &T {
            &self.weight
        }

        #[gpu_mem_trace]
        fn by_mut(&mut self) -> &mut T {
            &mut self.weight
        }

        #[gpu_mem_trace]
        fn by_value(mut self) -> T {
            self.weight = T::default();
            self.weight
        }

        #[gpu_mem_trace]
        fn boxed(self: Box<Self>) -> T {
            self.weight
        }

        #[gpu_mem_trace]
        fn rc(self: Rc<Self>) -> T {
            self.weight.clone()
        }

        #[gpu_mem_trace]
        fn arc(self: &Arc<Self>) -> &T {
            &self.weight
        }

        #[gpu_mem_trace]
        fn pinned(self: Pin<&mut Self>) {}

        #[gpu_mem_trace]
        fn associated() -> Self {
            Self::default()
        }

        #[gpu_mem_trace]
        fn generic<U>(&self, u: U) -> U {
            u
        }
    }

    #[test]
    fn with_every_receiver() {
        let mut model = Model { weight: 1 };
        check(|| assert_eq!(model.by_ref(), &1), ["Model::by_ref"]);
        check(|| *model.by_mut() = 2, ["Model::by_mut"]);
        check(|| model.clone().by_value(), ["Model::by_value"]);
        check(|| Box::new(model.clone()).boxed(), ["Model::boxed"]);
        check(|| Rc::new(model.clone()).rc(), ["Model::rc"]);
        let shared = Arc::new(model.clone());
        check(|| assert_eq!(shared.arc(), &2), ["Model::arc"]);
        check(|| Pin::new(&mut model).pinned(), ["Model::pinned"]);
        check(Model::<u8>::associated, ["Model::associated"]);
        check(|| model.generic("u"), ["Model::generic"]);
    }

    trait Layer<T> {
        fn forward(&self, input: T) -> T;

        #[gpu_mem_trace]
        fn twice(&self, input: T) -> T {
            self.forward(self.forward(input))
        }

        #[gpu_mem_trace]
        fn create() -> Self
        where
            Self: Default,
        {
            Self::default()
        }

        fn generic_default() {}
    }

    impl<T> Layer<T> for Model<Vec<T>> {
        #[gpu_mem_trace]
        fn forward(&self, input: T) -> T {
            input
        }
    }

    impl Layer<i32> for [f32] {
        #[gpu_mem_trace]
        fn forward(&self, input: i32) -> i32 {
            input
        }
    }

    mod elsewhere {
        use super::*;

        impl<T> Layer<T> for Model<Option<T>> {
            #[gpu_mem_trace]
            fn forward(&self, input: T) -> T {
                input
            }
        }

        impl Model<bool> {
            #[gpu_mem_trace]
            pub(super) fn from_elsewhere() {}
        }
    }

    #[test]
    fn of_traits() {
        let model = Model { weight: vec![1] };
        check(|| model.forward(1), ["Model::forward"]);
        let twice = ["Model::forward", "Model::forward", "Model::twice"];
        check(|| model.twice(1), twice);
        check(<Model<Vec<u8>> as Layer<u8>>::create, ["Model::create"]);
        check(|| [1.0].as_slice().forward(1), ["[f32]::forward"]);
        check(|| Model { weight: Some(1) }.forward(1), ["Model::forward"]);
        check(Model::from_elsewhere, ["Model::from_elsewhere"]);
        check(<Model<Vec<u8>> as Layer<u8>>::generic_default, []);
    }

    #[test]
    fn called_through_a_trait_object() {
        trait Object {
            #[gpu_mem_trace]
            fn call(&self) {}
        }
        impl Object for u8 {}
        let object: &dyn Object = &1_u8;
        check(|| object.call(), ["u8::call"]);
    }
}

mod impl_blocks {
    use super::*;

    struct Matrix<const N: usize>;

    #[gpu_mem_trace]
    impl<const N: usize> Matrix<{ N }> {
        #![allow(clippy::unused_self, non_upper_case_globals)]
        const Size: usize = N;

        pub(super) const fn size() -> usize {
            Self::Size
        }

        fn new() -> Self {
            Self
        }

        fn rows(&self) -> usize {
            Self::size()
        }

        #[gpu_mem_trace(ctx = "its own")]
        fn own(&self) {}

        #[gpumem::gpu_mem_trace(ctx = "by path")]
        fn own_by_path(&self) {}

        #[cfg_attr(all(), gpu_mem_trace(ctx = "conditional"))]
        fn own_conditional(&self) {}

        #[gpu_mem_trace(skip)]
        fn skipped(&self) {}

        async fn asynchronous(&self) -> usize {
            Yield::default().await;
            N
        }
    }

    #[gpu_mem_trace(silent)]
    impl Matrix<9> {
        fn quiet() {}

        #[gpu_mem_trace]
        fn loud() {}
    }

    #[gpu_mem_trace]
    impl<const N: usize> Iterator for Matrix<N> {
        type Item = usize;

        fn next(&mut self) -> Option<usize> {
            None
        }
    }

    #[test]
    fn trace_every_method_once() {
        let mut matrix = Matrix::<3>;
        check(Matrix::<3>::new, ["Matrix::new"]);
        check(|| assert_eq!(matrix.rows(), 3), ["Matrix::rows"]);
        check(|| matrix.own(), ["its own"]);
        check(|| matrix.own_by_path(), ["by path"]);
        check(|| matrix.own_conditional(), ["conditional"]);
        check(|| matrix.skipped(), []);
        let future = matrix.asynchronous();
        check(|| block_on(future), ["Matrix::asynchronous"]);
        check(|| matrix.next(), ["Matrix::next"]);
        check(Matrix::quiet, []);
        check(Matrix::loud, ["Matrix::loud"]);
    }
}

mod futures {
    use super::*;

    #[gpu_mem_trace]
    async fn step(n: u32) -> u32 {
        Yield::default().await;
        n + 1
    }

    #[gpu_mem_trace]
    async fn fails(text: &str) -> Result<u32, std::num::ParseIntError> {
        let n = text.parse()?;
        Ok(step(n).await)
    }

    #[gpu_mem_trace]
    async fn panics() {
        Yield::default().await;
        panic!("on purpose");
    }

    const fn assert_send<F: Send>(future: F) -> F {
        future
    }

    #[test]
    fn report_when_they_end() {
        check(|| block_on(assert_send(step(1))), ["step"]);
        check(|| block_on(assert_send(fails("1"))), ["step", "fails"]);
        check(|| block_on(fails("x")), ["fails"]);
        let panicking = AssertUnwindSafe(|| block_on(panics()));
        check(|| assert!(catch_unwind(panicking).is_err()), ["panics"]);
    }

    #[test]
    fn report_when_they_are_dropped() {
        let mut context = Context::from_waker(Waker::noop());
        let mut future = Box::pin(step(1));
        check(|| assert!(future.as_mut().poll(&mut context).is_pending()), []);
        check(|| drop(future), ["step"]);
        check(|| drop(step(1)), []); // never polled, never started
    }

    type AnyError = Box<dyn std::error::Error + Send + Sync>;

    #[gpu_mem_trace]
    async fn borrows<'a>(numbers: &'a mut [u32], mut at: usize, _unused: String) -> Result<&'a mut u32, AnyError> {
        const FAR: usize = 9;
        if at > FAR {
            return Err("too far".into());
        }
        while at > 1 {
            at -= 1;
            Yield::default().await;
        }
        let step: u32 = "1".parse()?;
        numbers[at] += step;
        Ok(&mut numbers[at])
    }

    #[gpu_mem_trace]
    async fn unsized_result() -> Box<dyn Fn(&str) -> usize + Send> {
        Box::new(|text| text.len() + 1)
    }

    #[gpu_mem_trace]
    async fn opaque<T: Into<u32>>(numbers: Vec<T>) -> Result<impl Iterator<Item = u32>, AnyError> {
        Yield::default().await;
        let first: u32 = "1".parse()?;
        Ok(numbers.into_iter().map(move |n| n.into() + first))
    }

    #[gpu_mem_trace]
    async fn elided(text: &str) -> (&str, Option<impl std::fmt::Debug + use<>>) {
        (text, Some(1))
    }

    #[gpu_mem_trace]
    async fn never() -> ! {
        panic!("on purpose")
    }

    #[gpu_mem_trace]
    async fn empty() {}

    #[gpu_mem_trace]
    async fn recursive(n: u32) -> u32 {
        if n == 0 {
            return 1;
        }
        n * Box::pin(recursive(n - 1)).await
    }

    #[test]
    fn keep_their_signature() {
        let mut numbers = [1, 2, 3];
        let mut at = |at| block_on(borrows(&mut numbers, at, String::new())).map(|n| *n).map_err(|e| e.to_string());
        check(|| assert_eq!(at(2), Ok(3)), ["borrows"]);
        check(|| assert_eq!(at(10), Err("too far".to_owned())), ["borrows"]);
        check(|| assert_eq!(block_on(assert_send(unsized_result()))("ab"), 3), ["unsized_result"]);
        check(|| assert!(block_on(opaque(vec![1_u8])).unwrap().eq([2])), ["opaque"]);
        check(|| assert_eq!(block_on(elided("a")).0, "a"), ["elided"]);
        check(|| assert!(catch_unwind(|| block_on(never())).is_err()), ["never"]);
        check(|| block_on(empty()), ["empty"]);
        check(|| assert_eq!(block_on(recursive(2)), 2), ["recursive"; 3]);
    }

    #[gpu_mem_trace]
    fn by_hand(n: u32) -> impl Future<Output = u32> + Send {
        let m = n + 1;
        async move {
            Yield::default().await;
            m
        }
    }

    #[gpu_mem_trace]
    fn boxed<'a>(n: &'a u32) -> Pin<Box<dyn Future<Output = u32> + 'a>> {
        Box::pin(async move {
            Yield::default().await;
            *n
        })
    }

    #[gpu_mem_trace]
    fn factory() -> impl Fn() -> Pin<Box<dyn Future<Output = u32>>> {
        || Box::pin(async { 1 })
    }

    #[test]
    fn that_a_function_returns() {
        check(|| drop(by_hand(1)), []);
        check(|| assert_eq!(block_on(by_hand(1)), 2), ["by_hand"]);
        check(|| drop(boxed(&1)), []);
        check(|| assert_eq!(block_on(boxed(&1)), 1), ["boxed"]);
        check(|| factory()(), ["factory"]);
    }

    #[async_trait::async_trait]
    trait Service {
        async fn call(&self, n: u32) -> Result<u32, std::num::ParseIntError>;

        #[gpu_mem_trace]
        async fn default(&self) -> u32 {
            Yield::default().await;
            1
        }
    }

    struct Method;

    #[async_trait::async_trait]
    impl Service for Method {
        #[gpu_mem_trace]
        async fn call(&self, n: u32) -> Result<u32, std::num::ParseIntError> {
            Yield::default().await;
            "2".parse::<u32>().map(|m| n + m)
        }
    }

    struct Above;

    #[gpu_mem_trace]
    #[async_trait::async_trait]
    impl Service for Above {
        async fn call(&self, n: u32) -> Result<u32, std::num::ParseIntError> {
            Yield::default().await;
            Ok(n + "2".parse::<u32>()?)
        }
    }

    struct Below;

    #[async_trait::async_trait]
    #[gpu_mem_trace]
    impl Service for Below {
        async fn call(&self, n: u32) -> Result<u32, std::num::ParseIntError> {
            Yield::default().await;
            Ok(n + "2".parse::<u32>()?)
        }
    }

    #[test]
    fn of_async_trait() {
        for (service, name) in
            [(&Method as &dyn Service, "Method::call"), (&Above, "Above::call"), (&Below, "Below::call")]
        {
            let mut future = service.call(1);
            let mut context = Context::from_waker(Waker::noop());
            check(|| assert!(future.as_mut().poll(&mut context).is_pending()), []);
            check(|| assert_eq!(block_on(future), Ok(3)), [name]);
        }
        check(|| block_on(Method.default()), ["Method::default"]);
    }

    thread_local! {
        static DROPS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    struct Noted(&'static str);

    impl Drop for Noted {
        fn drop(&mut self) {
            DROPS.with_borrow_mut(|drops| drops.push(self.0));
        }
    }

    #[async_trait::async_trait]
    trait Drops {
        async fn value(&self, a: Noted, (b, _): (Noted, Noted)) -> u32;
        async fn nothing(&self, a: Noted, (b, _): (Noted, Noted));
    }

    struct Plain;

    macro_rules! drops {
        ($ty:ty $(, $outer:meta)? ; $(inner: $inner:meta)?) => {
            $(#[$outer])?
            #[async_trait::async_trait]
            $(#[$inner])?
            impl Drops for $ty {
                async fn value(&self, _a: Noted, (b, _): (Noted, Noted)) -> u32 {
                    let _local = Noted("local");
                    Yield::default().await;
                    drop(b);
                    1
                }

                async fn nothing(&self, a: Noted, (_b, _): (Noted, Noted)) {
                    let _local = Noted("local");
                    Yield::default().await;
                    drop(a);
                }
            }
        };
    }
    drops!(Plain;);
    drops!(Above, gpu_mem_trace(lines););
    drops!(Below; inner: gpu_mem_trace(lines));

    #[test]
    fn of_async_trait_drop_their_arguments_as_they_did() {
        let drops = |service: &dyn Drops, polls: usize| {
            let arguments = || (Noted("a"), (Noted("b"), Noted("c")));
            let mut both = Vec::new();
            for which in 0..2 {
                let (a, bc) = arguments();
                let mut future: Pin<Box<dyn Future<Output = ()> + '_>> = if which == 0 {
                    let value = service.value(a, bc);
                    Box::pin(async { assert_eq!(value.await, 1) })
                } else {
                    service.nothing(a, bc)
                };
                let mut context = Context::from_waker(Waker::noop());
                for _ in 0..polls {
                    let _ = future.as_mut().poll(&mut context);
                    DROPS.with_borrow_mut(|drops| drops.push("polled"));
                }
                drop(future);
                both.push(DROPS.take());
            }
            both
        };
        for polls in 0..3 {
            let plain = drops(&Plain, polls);
            for service in [&Above as &dyn Drops, &Below] {
                let mut traced = Vec::new();
                let told = reports(|| traced = drops(service, polls));
                assert_eq!(traced, plain, "{polls} polls");
                // The rows are those of the body, however the method is written out.
                let rows = told.iter().map(|report| report.lines.len()).collect::<Vec<_>>();
                assert_eq!(rows, [vec![], vec![2, 2], vec![4, 3]][polls], "{told:#?}");
            }
        }
    }

    trait Native {
        async fn call(&self) -> u32;
    }

    #[gpu_mem_trace]
    impl Native for Method {
        async fn call(&self) -> u32 {
            Yield::default().await;
            1
        }
    }

    #[test]
    fn of_a_trait_without_help() {
        check(|| block_on(Native::call(&Method)), ["Method::call"]);
    }
}
