//! Tests of the names of scopes in reports.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Waker},
};

use gpumem_macros::gpu_mem_trace;

use crate::{
    export::Sink,
    model::Bytes,
    report::Content,
    session::{GpuMemTrace, MemTracker, TestSession, set_sink, summary},
    source::sim::SimGpu,
};

mod a {
    use super::*;

    #[gpu_mem_trace(crate = crate)]
    pub(super) fn forward(gpu: &SimGpu) {
        std::mem::forget(gpu.alloc_async(Bytes::kib(1)));
    }
}

mod b {
    use super::*;

    #[gpu_mem_trace(crate = crate)]
    pub(super) fn forward(gpu: &SimGpu) {
        std::mem::forget(gpu.alloc_async(Bytes::kib(2)));
    }

    #[gpu_mem_trace(crate = crate, ctx = "given")]
    pub(super) fn named() {}

    #[gpu_mem_trace(crate = crate)]
    pub(super) async fn later() {}
}

struct Wrap<T>(T);

#[gpu_mem_trace(crate = crate)]
impl<T: Copy> Wrap<T> {
    fn run(&self) -> T {
        self.0
    }
}

/// The line of each report, and the module that printed it.
type ReportedLines = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// Returns a session with one device, and the lines and modules of its traces.
fn session() -> (TestSession, SimGpu, ReportedLines) {
    session_with(&[])
}

/// Creates a session with these environment variables.
fn session_with(variables: &[(&str, &str)]) -> (TestSession, SimGpu, ReportedLines) {
    let session = TestSession::new(variables).unwrap();
    let gpu = session.add(Bytes::gib(1)).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&lines);
    let sink = Sink::custom(move |output| {
        if let Content::Trace(report) = &output.content {
            let module = output.module.as_ref().map(ToString::to_string);
            to.lock().unwrap().push((report.to_string(), module));
            assert!(output.at.as_ref().unwrap().file().ends_with("session/tests.rs"));
        }
    });
    session.run(|| set_sink(sink));
    (session, gpu, lines)
}

/// Returns the names of the outermost scopes.
fn outermost(session: &TestSession) -> Vec<String> {
    let scopes = session.run(summary).scopes;
    let mut names: Vec<_> =
        scopes.iter().filter(|scope| scope.path.len() == 1).map(|scope| scope.path.concat()).collect();
    names.sort();
    names
}

#[test]
fn functions_are_told_apart_by_module_where_one_name_is_not_enough() {
    let (session, gpu, lines) = session();
    session.run(|| a::forward(&gpu));
    assert_eq!(outermost(&session), ["forward"]);
    session.run(|| b::forward(&gpu));
    assert_eq!(outermost(&session), ["a::forward", "b::forward"]);
    session.run(|| (a::forward(&gpu), b::forward(&gpu)));
    assert_eq!(outermost(&session), ["a::forward", "b::forward"]);
    // fastai's line has the short name.
    let lines = lines.lock().unwrap();
    let line = "△Used Peaked MB:      0      0 (forward: exit)";
    let expected =
        ["a", "b", "a", "b"].map(|module| (line.to_owned(), Some(format!("gpumem::session::tests::{module}"))));
    assert_eq!(*lines, expected);
}

#[test]
fn methods_are_told_apart_by_their_type() {
    let (session, _gpu, lines) = session();
    session.run(|| Wrap(7_u8).run());
    assert_eq!(outermost(&session), ["Wrap::run"]);
    session.run(|| Wrap("text").run());
    assert_eq!(outermost(&session), ["Wrap<&str>::run", "Wrap<u8>::run"]);
    assert!(lines.lock().unwrap().iter().all(|(line, _)| line.ends_with("(Wrap::run: exit)")), "{lines:?}");
}

#[test]
fn a_name_that_a_user_gave_is_one_scope_wherever_it_is_opened() {
    let (session, gpu, _lines) = session();
    session.run(|| {
        drop(GpuMemTrace::with_ctx("forward"));
        drop(GpuMemTrace::with_ctx("forward"));
        a::forward(&gpu);
        b::named();
        drop(GpuMemTrace::with_ctx("given"));
        (0..3).for_each(|step| drop(GpuMemTrace::with_ctx(format!("step {step}"))));
        assert!(pin!(b::later()).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    });
    assert_eq!(outermost(&session), ["a::forward", "forward", "given", "later", "step 0", "step 1", "step 2"]);
    let scopes = session.run(summary).scopes;
    let calls = |name: &str| scopes.iter().find(|scope| scope.path == [name]).unwrap().calls;
    assert_eq!([calls("forward"), calls("a::forward"), calls("given")], [2, 1, 2]);
}

/// A second function with the same name does not change the blocks of the first.
#[test]
fn trackers_see_no_difference_where_a_name_becomes_longer() {
    let (session, gpu, _lines) = session();
    let mut tracker = session.run(|| MemTracker::builder().to(std::io::sink()).start().unwrap());
    let mut paths = |work: &dyn Fn()| -> Vec<String> {
        session.run(|| {
            work();
            tracker.track().changes.unwrap().iter().map(|change| change.path.join(" > ")).collect()
        })
    };
    assert_eq!(paths(&|| a::forward(&gpu)), ["forward"]);
    assert_eq!(paths(&|| b::forward(&gpu)), ["b::forward"]);
    assert_eq!(paths(&|| ()), [""; 0]);
}

/// Collects the notices of the session about `GPUMEM`.
fn notices_of_filter(session: &TestSession) -> Arc<Mutex<Vec<String>>> {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&notices);
    let sink = Sink::custom(move |output| {
        if let Content::Notice(notice) = &output.content
            && notice.starts_with("GPUMEM: ")
        {
            to.lock().unwrap().push(notice.clone());
        }
    });
    session.run(|| set_sink(sink));
    notices
}

#[test]
fn a_name_that_no_trace_had_is_said_once() {
    let (session, gpu, _) = session_with(&[("GPUMEM", "tain=off,load=off,info")]);
    let notices = notices_of_filter(&session);
    session.run(|| {
        let say = || crate::session::current().notify_unmatched();
        // A program without traces is a helper of another program, so there is no notice.
        say();
        let trace = |ctx: &str| GpuMemTrace::builder().ctx(ctx).device(gpu.ordinal()).start().unwrap();
        drop((trace("train"), trace("load")));
        say();
        say();
    });
    assert_eq!(*notices.lock().unwrap(), ["GPUMEM: no trace was named `tain` (near: `train`)"]);
}

#[test]
fn a_name_that_is_not_kept_apart_is_said() {
    let (session, gpu, _) = session_with(&[("GPUMEM", "tain=off,line 1500=off,line 2=off")]);
    let notices = notices_of_filter(&session);
    session.run(|| {
        for number in 0..1_600 {
            drop(GpuMemTrace::builder().ctx(format!("line {number}")).device(gpu.ordinal()).start().unwrap());
        }
        crate::session::current().notify_unmatched();
    });
    let expected = "GPUMEM: no trace was named `tain`; `line 1500` has no effect: \
                    after 1,024 names of one line, names are not kept apart; use `line #`";
    assert_eq!(*notices.lock().unwrap(), [expected]);
}

#[test]
fn a_filter_that_is_above_all_amounts_is_said() {
    for (largest, expected) in [
        (9, &["GPUMEM: no line was printed, because all amounts are below its limits; the largest is 9 MiB"][..]),
        (10, &[]),
    ] {
        let (session, gpu, _) = session_with(&[("GPUMEM", "request #>=10MiB")]);
        let notices = notices_of_filter(&session);
        session.run(|| {
            for (request, mib) in [1, largest, 3].into_iter().enumerate() {
                let name = format!("request {request}");
                let trace = GpuMemTrace::builder().ctx(name).device(gpu.ordinal()).start().unwrap();
                drop(gpu.alloc(Bytes::mib(mib)).unwrap());
                drop(trace);
            }
            crate::session::current().notify_unmatched();
        });
        assert_eq!(*notices.lock().unwrap(), expected);
    }
}

#[test]
fn a_filter_is_for_lines_alone() {
    let filter = "off,step=lines,step=every=2,load>=10MiB,request #=lines";
    let (session, gpu, lines) = session_with(&[("GPUMEM", filter)]);
    session.run(|| {
        let trace = |ctx: &str| GpuMemTrace::builder().ctx(ctx).device(gpu.ordinal()).start().unwrap();
        let outer = trace("train");
        for _ in 0..3 {
            let step = trace("step");
            drop(gpu.alloc(Bytes::mib(3)).unwrap());
            assert_eq!(step.data().peaked.mb(), 3);
        }
        for mib in [9, 10] {
            let load = trace("load");
            drop(gpu.alloc(Bytes::mib(mib)).unwrap());
            drop(load);
        }
        drop(trace("request 7"));
        outer.report();
        // The scopes exist even if nothing is printed.
        assert_eq!(summary().scopes.iter().map(|scope| scope.calls).sum::<u64>(), 1 + 3 + 2 + 1);
    });
    let expected = [
        "△Used Peaked MB:      0      3   (train > step: exit)",
        "△Used Peaked MB:      0      3   (train > step: exit)",
        "△Used Peaked MB:      0     10   (train > load: exit)",
        "△Used Peaked MB:      0      0   (train > request 7: exit)",
    ];
    assert_eq!(lines.lock().unwrap().iter().map(|(line, _)| line).collect::<Vec<_>>(), expected);
}
