//! Every function exists three times: without `#[gpu_mem_trace]`, with it, and with its option `lines`. All three must create,
//! use and drop the same values in the same order, however the arguments are declared, whichever of them the body names, and
//! however the function ends. All editions use this source.

// The shapes are unusual on purpose, and the code is valid in edition 2018.
#![allow(clippy::all, clippy::pedantic)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use gpumem::sim::{SimBlock, SimGpu};
use gpumem::{Bytes, assert_gpu_mem, gpu_mem_trace};
use gpumem_tests::{Yield, reports_of};
use pollster::block_on;

thread_local! {
    static LOG: RefCell<Vec<String>> = RefCell::new(Vec::new());
    static FLAG: Cell<bool> = Cell::new(false);
}

fn log(text: impl Into<String>) {
    LOG.with(|log| log.borrow_mut().push(text.into()));
}

/// Returns which branch a body takes.
fn flag() -> bool {
    FLAG.with(Cell::get)
}

/// A value that logs its uses.
struct D(&'static str);

impl D {
    fn new(name: &'static str) -> Self {
        log(format!("+{}", name));
        Self(name)
    }

    fn touch(&self) -> u32 {
        log(format!("~{}", self.0));
        1
    }

    fn some(&self) -> Option<u32> {
        Some(self.touch())
    }

    /// Returns a temporary that borrows two others.
    fn with<'a>(&'a self, other: &'a Self) -> Pair<'a> {
        Pair(self, other, D::new("pair"))
    }
}

impl Drop for D {
    fn drop(&mut self) {
        log(format!("-{}", self.0));
    }
}

struct Pair<'a>(&'a D, &'a D, D);

impl Pair<'_> {
    fn touch(&self) -> u32 {
        self.0.touch() + self.1.touch() + self.2.touch()
    }
}

#[allow(dead_code)]
struct Fields {
    first: D,
    second: D,
    third: D,
}

impl Fields {
    fn new() -> Self {
        Self { first: D::new("first"), second: D::new("second"), third: D::new("third") }
    }
}

type Out = Result<D, u32>;

fn fallible(input: D) -> Out {
    if flag() { Err(input.touch()) } else { Ok(input) }
}

type Run = fn();
type Make = fn() -> Pin<Box<dyn Future<Output = Out>>>;

/// One function in three versions: without the attribute, with it, and with its option `lines`.
struct Variant {
    name: &'static str,
    runs: Runs,
}

enum Runs {
    Sync([Run; 3]),
    Async([Make; 3]),
}

fn end(out: Result<Out, Box<dyn std::any::Any + Send>>) {
    match out {
        Ok(Ok(value)) => log(format!("returned {}", value.0)),
        Ok(Err(number)) => log(format!("returned {}", number)),
        Err(_) => log("panicked"),
    }
}

/// Runs the function, and logs how it ended.
fn run(function: impl FnOnce() -> Out) {
    end(catch_unwind(AssertUnwindSafe(function)));
}

/// Polls a future at most this number of times, then drops it. Returns whether the future ended.
fn poll(make: Make, times: u32) -> bool {
    let mut future = make();
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..times {
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context))) {
            Ok(Poll::Pending) => log("pending"),
            Ok(Poll::Ready(out)) => {
                end(Ok(out));
                drop(future);
                return true;
            }
            Err(panic) => {
                end(Err(panic));
                drop(future);
                return true;
            }
        }
    }
    log("cancelled");
    drop(future);
    false
}

fn logged(run: impl FnOnce()) -> Vec<String> {
    LOG.with(|log| log.borrow_mut().clear());
    run();
    LOG.with(|log| log.borrow_mut().split_off(0))
}

pub(crate) fn compare(edition: u32) {
    let gpu = SimGpu::install(Bytes::gib(1)).expect("no GPUMEM_SIM in the environment");
    gpu.make_current();
    let mut shapes = Vec::new();
    functions(&mut shapes);
    async_functions(&mut shapes);
    futures(&mut shapes);
    methods(&mut shapes);
    let mut different = Vec::new();
    let mut check = |shape: &Variant, which: &str, logs: [Vec<String>; 3]| {
        assert!(logs[0].len() > 1, "{} has no drop log", shape.name);
        for (variant, log) in ["the attribute", "lines"].iter().zip(&logs[1..]) {
            if *log != logs[0] {
                different
                    .push(format!("{}{}\n  plain: {:?}\n  with {}: {:?}", shape.name, which, logs[0], variant, log));
            }
        }
    };
    for shape in &shapes {
        for way in [false, true].iter().copied() {
            FLAG.with(|flag| flag.set(way));
            match &shape.runs {
                Runs::Sync(runs) => {
                    let logs = [logged(runs[0]), logged(runs[1]), logged(runs[2])];
                    check(shape, "", logs);
                }
                Runs::Async(runs) => {
                    for times in 0.. {
                        let ended = Cell::new(false);
                        let log = |make: Make| logged(|| ended.set(poll(make, times)));
                        let logs = [log(runs[0]), log(runs[1]), log(runs[2])];
                        check(shape, &format!(" dropped after {} polls", times), logs);
                        if ended.get() {
                            break;
                        }
                    }
                }
            }
        }
    }
    let all = different.len();
    different.truncate(10);
    assert!(all == 0, "edition {}: {} differences, such as\n{}", edition, all, different.join("\n"));
    assert!(shapes.len() >= 200, "{} shapes", shapes.len());
}

/// Checks the report of each trace: the returned value and the arguments still exist when it is made, and no temporary does.
pub(crate) fn results() {
    let results = |run: Run| reports_of(run).iter().map(ToString::to_string).collect::<Vec<_>>();
    let line = |used: u64, peaked: u64| vec![format!("△Used Peaked MB: {:>6} {:>6} (step: exit)", used, peaked)];
    let temporaries: [Run; 3] = [
        || drop(last_temporary()),
        || drop(block_on(async_last_temporary())),
        || drop(block_on(future_last_temporary())),
    ];
    for run in &temporaries {
        assert_eq!(results(*run), line(7, 505));
    }
    let with_arguments: [Run; 3] = [
        || drop(arguments(take(9), take(9))),
        || drop(block_on(async_arguments(take(9), take(9)))),
        || drop(block_on(async_unnamed_arguments(take(9), take(9)))),
    ];
    for run in &with_arguments {
        assert_eq!(results(*run), line(7, 0));
    }
    let asserted = assert_gpu_mem!(used == "7 MB", peak == "512 MB", { keep(&take(505)) });
    drop(asserted);
}

fn take(mib: u64) -> SimBlock {
    SimGpu::all().expect("it is installed")[0].alloc(Bytes::mib(mib)).expect("there is room")
}

fn keep(_: &SimBlock) -> SimBlock {
    take(7)
}

#[gpu_mem_trace(ctx = "step")]
fn last_temporary() -> SimBlock {
    keep(&take(505))
}

#[gpu_mem_trace(ctx = "step")]
async fn async_last_temporary() -> SimBlock {
    keep(&take(505))
}

#[gpu_mem_trace(ctx = "step")]
fn future_last_temporary() -> Pin<Box<dyn Future<Output = SimBlock>>> {
    Box::pin(async { keep(&take(505)) })
}

#[gpu_mem_trace(ctx = "step")]
fn arguments(a: SimBlock, _: SimBlock) -> SimBlock {
    keep(&a)
}

#[gpu_mem_trace(ctx = "step")]
async fn async_arguments(a: SimBlock, _: SimBlock) -> SimBlock {
    Yield::default().await;
    keep(&a)
}

#[gpu_mem_trace(ctx = "step")]
async fn async_unnamed_arguments(_a: SimBlock, _: SimBlock) -> SimBlock {
    Yield::default().await;
    take(7)
}

/// Defines a function for each way to declare `$a` among the arguments.
macro_rules! with_arguments {
    ($kind:ident $shapes:ident $name:ident $a:ident $body:tt) => {
        $kind!($shapes, concat!(stringify!($kind), " two ", stringify!($name)),
            (_b: D, $a: D, c: D), (D::new("b"), D::new("a"), D::new("c")), $body);
        $kind!($shapes, concat!(stringify!($kind), " unnamed ", stringify!($name)),
            (_: D, mut $a: D, _: D), (D::new("b"), D::new("a"), D::new("c")), $body);
        $kind!($shapes, concat!(stringify!($kind), " tuple ", stringify!($name)),
            (_b: D, ($a, _, _c): (D, D, D), d: D),
            (D::new("b"), (D::new("a"), D::new("unnamed"), D::new("c")), D::new("d")), $body);
        $kind!($shapes, concat!(stringify!($kind), " fields ", stringify!($name)),
            (Fields { second: $a, third: ref _c, .. }: Fields, ref d: D), (Fields::new(), D::new("d")), $body);
    };
}

/// Defines a function for each way to use `a` and to end.
macro_rules! with_bodies {
    ($kind:ident $shapes:ident) => {
        with_arguments!($kind $shapes names_nothing a { pause!(); Ok(D::new("r")) });
        with_arguments!($kind $shapes borrows a { let _x = D::new("x"); pause!(); a.touch(); Ok(D::new("r")) });
        with_arguments!($kind $shapes consumes a { let _x = D::new("x"); pause!(); drop(a); pause!(); Err(1) });
        with_arguments!($kind $shapes consumes_or_not a {
            let _x = D::new("x");
            if flag() {
                pause!();
                drop(a);
            }
            pause!();
            Err(1)
        });
        with_arguments!($kind $shapes returns_it a { let _x = D::new("x"); pause!(); Ok(a) });
        with_arguments!($kind $shapes last_temporary a {
            let x = D::new("x");
            pause!();
            Err(D::new("t").touch() + x.touch())
        });
        with_arguments!($kind $shapes last_temporary_borrows a {
            let _x = D::new("x");
            pause!();
            Err(a.with(&D::new("t")).touch())
        });
        with_arguments!($kind $shapes only_a_temporary a { Err(D::new("t").touch()) });
        with_arguments!($kind $shapes last_match a {
            let _x = D::new("x");
            match D::new("m").touch() {
                0 => Ok(a),
                n if flag() => {
                    pause!();
                    Err(n + D::new("arm").touch())
                }
                _ => Ok(D::new("other")),
            }
        });
        with_arguments!($kind $shapes last_if_let a {
            let _x = D::new("x");
            if let Some(n) = D::new("some").some() { Err(n + a.touch()) } else { Ok(D::new("else")) }
        });
        with_arguments!($kind $shapes early a {
            let _x = D::new("x");
            pause!();
            if flag() {
                return Err(D::new("t").touch());
            }
            let _y = D::new("y");
            Ok(a)
        });
        with_arguments!($kind $shapes question a {
            let _x = D::new("x");
            let _y = fallible(D::new("t"))?;
            pause!();
            a.touch();
            Ok(D::new("r"))
        });
        with_arguments!($kind $shapes panics a {
            let _x = D::new("x");
            pause!();
            if flag() {
                panic!("on purpose");
            }
            let _y = D::new("y");
            Ok(a)
        });
        with_arguments!($kind $shapes closure a {
            let touch = move || a.touch();
            let _x = D::new("x");
            pause!();
            Err(touch())
        });
        with_arguments!($kind $shapes shadows a {
            let a = (D::new("x"), a);
            pause!();
            let a = &a.1;
            Err(a.touch())
        });
        with_arguments!($kind $shapes breaks a {
            let n = loop {
                let _x = D::new("x");
                pause!();
                if flag() {
                    break D::new("t").touch();
                }
                break a.touch();
            };
            Err(n)
        });
        with_arguments!($kind $shapes inner_block a {
            let _x = D::new("x");
            {
                let _y = D::new("y");
                pause!();
                Err(a.touch() + D::new("t").touch())
            }
        });
        with_arguments!($kind $shapes return_last a {
            let _x = D::new("x");
            pause!();
            return Err(D::new("t").touch() + a.touch());
        });
    };
}

macro_rules! function {
    ($shapes:ident, $name:expr, ($($arguments:tt)*), $values:tt, $body:tt) => {{
        fn plain($($arguments)*) -> Out $body
        #[gpu_mem_trace(silent)]
        fn traced($($arguments)*) -> Out $body
        #[gpu_mem_trace(silent, lines)]
        fn with_lines($($arguments)*) -> Out $body
        let runs: [Run; 3] = [|| run(|| plain $values), || run(|| traced $values), || run(|| with_lines $values)];
        $shapes.push(Variant { name: $name, runs: Runs::Sync(runs) });
    }};
}

macro_rules! async_function {
    ($shapes:ident, $name:expr, ($($arguments:tt)*), $values:tt, $body:tt) => {{
        async fn plain($($arguments)*) -> Out $body
        #[gpu_mem_trace(silent)]
        async fn traced($($arguments)*) -> Out $body
        #[gpu_mem_trace(silent, lines)]
        async fn with_lines($($arguments)*) -> Out $body
        let runs: [Make; 3] =
            [|| Box::pin(plain $values), || Box::pin(traced $values), || Box::pin(with_lines $values)];
        $shapes.push(Variant { name: $name, runs: Runs::Async(runs) });
    }};
}

macro_rules! future {
    ($shapes:ident, $name:expr, ($($arguments:tt)*), $values:tt, $body:tt) => {{
        fn plain($($arguments)*) -> Pin<Box<dyn Future<Output = Out>>> {
            Box::pin(async move $body)
        }
        #[gpu_mem_trace(silent)]
        fn traced($($arguments)*) -> Pin<Box<dyn Future<Output = Out>>> {
            Box::pin(async move $body)
        }
        #[gpu_mem_trace(silent, lines)]
        fn with_lines($($arguments)*) -> impl Future<Output = Out> {
            async move $body
        }
        let runs: [Make; 3] = [|| plain $values, || traced $values, || Box::pin(with_lines $values)];
        $shapes.push(Variant { name: $name, runs: Runs::Async(runs) });
    }};
}

#[allow(unused_variables, unused_mut, clippy::all)]
fn functions(shapes: &mut Vec<Variant>) {
    macro_rules! pause {
        () => {};
    }
    with_bodies!(function shapes);
}

#[allow(unused_variables, unused_mut, clippy::all)]
fn async_functions(shapes: &mut Vec<Variant>) {
    macro_rules! pause {
        () => {
            Yield::default().await
        };
    }
    with_bodies!(async_function shapes);
}

#[allow(unused_variables, unused_mut, clippy::all)]
fn futures(shapes: &mut Vec<Variant>) {
    macro_rules! pause {
        () => {
            Yield::default().await
        };
    }
    with_bodies!(future shapes);
}

/// Defines a method for each receiver, sync and async.
macro_rules! with_receivers {
    ($shapes:ident $name:ident $this:ident $body:tt) => {
        method!($shapes, concat!("rc ", stringify!($name)), ($this: Rc<Self>), Rc::new, $body);
        method!($shapes, concat!("pin ", stringify!($name)), ($this: Pin<Box<Self>>), Box::pin, $body);
        with_owned_receivers!($shapes $name $this $body);
    };
}

macro_rules! with_owned_receivers {
    ($shapes:ident $name:ident $this:ident $body:tt) => {
        method!($shapes, concat!("self ", stringify!($name)), ($this), std::convert::identity, $body);
        method!($shapes, concat!("mut self ", stringify!($name)), (mut $this), std::convert::identity, $body);
        method!($shapes, concat!("box ", stringify!($name)), ($this: Box<Self>), Box::new, $body);
    };
}

macro_rules! method {
    ($shapes:ident, $name:expr, ($($receiver:tt)*), $wrap:path, $body:tt) => {{
        struct This {
            first: D,
            second: D,
        }
        impl This {
            fn new() -> Self {
                Self { first: D::new("first"), second: D::new("second") }
            }
            fn plain($($receiver)*, b: D, _: D) -> Out $body
            #[gpu_mem_trace(silent)]
            fn traced($($receiver)*, b: D, _: D) -> Out $body
            #[gpu_mem_trace(silent, lines)]
            fn with_lines($($receiver)*, b: D, _: D) -> Out $body
            async fn async_plain($($receiver)*, b: D, _: D) -> Out {
                Yield::default().await;
                $body
            }
            #[gpu_mem_trace(silent)]
            async fn async_traced($($receiver)*, b: D, _: D) -> Out {
                Yield::default().await;
                $body
            }
            #[gpu_mem_trace(silent, lines)]
            async fn async_with_lines($($receiver)*, b: D, _: D) -> Out {
                Yield::default().await;
                $body
            }
        }
        let runs: [Run; 3] = [
            || run(|| $wrap(This::new()).plain(D::new("b"), D::new("c"))),
            || run(|| $wrap(This::new()).traced(D::new("b"), D::new("c"))),
            || run(|| $wrap(This::new()).with_lines(D::new("b"), D::new("c"))),
        ];
        $shapes.push(Variant { name: $name, runs: Runs::Sync(runs) });
        let runs: [Make; 3] = [
            || Box::pin($wrap(This::new()).async_plain(D::new("b"), D::new("c"))),
            || Box::pin($wrap(This::new()).async_traced(D::new("b"), D::new("c"))),
            || Box::pin($wrap(This::new()).async_with_lines(D::new("b"), D::new("c"))),
        ];
        $shapes.push(Variant { name: $name, runs: Runs::Async(runs) });
    }};
}

#[allow(dead_code, unused_braces, unused_variables, unused_mut, clippy::all)]
fn methods(shapes: &mut Vec<Variant>) {
    with_receivers!(shapes names_nothing self { Ok(D::new("r")) });
    with_receivers!(shapes last_temporary self {
        let _x = D::new("x");
        Err(D::new("t").touch() + self.first.touch())
    });
    with_owned_receivers!(shapes moves_a_field self {
        let _x = D::new("x");
        drop(self.second);
        Err(1)
    });
    with_owned_receivers!(shapes moves_a_field_or_not self {
        if flag() {
            return Ok(self.first);
        }
        Err(D::new("t").touch())
    });
    with_owned_receivers!(shapes consumes self {
        drop(self);
        Ok(D::new("r"))
    });
}
