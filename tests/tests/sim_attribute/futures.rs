//! Tests `async fn`, functions that return a future, and `#[async_trait]`.

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
    check(|| block_on(assert_send(fails("1"))), ["  fails > step", "fails"]);
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
    check(
        || assert_eq!(block_on(recursive(2)), 2),
        ["    recursive > recursive", "  recursive > recursive", "recursive"],
    );
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
    for (service, name) in [(&Method as &dyn Service, "Method::call"), (&Above, "Above::call"), (&Below, "Below::call")]
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
            let reported = reports(|| traced = drops(service, polls));
            assert_eq!(traced, plain, "{polls} polls");
            // The rows describe the method's body, whether the attribute is above or below `#[async_trait]`.
            let rows = reported.iter().map(|report| report.lines.len()).collect::<Vec<_>>();
            assert_eq!(rows, [vec![], vec![2, 2], vec![4, 3]][polls], "{reported:#?}");
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
