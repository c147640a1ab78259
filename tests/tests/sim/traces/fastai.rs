//! Tests each example of fastai's documentation, with its exact lines.

use super::*;

#[test]
fn example_1_report_and_data() {
    let _gpu = simulated_gpu();
    let mtrace = quiet().start().unwrap();
    some_code();
    mtrace.report();
    let data = mtrace.data();
    assert_eq!((data.used.mb(), data.peaked.mb()), (0, 0));
    some_code();
    mtrace.report_with("2nd run of some_code()");
    check_lines(&["△Used Peaked MB:      0      0", "△Used Peaked MB:      0      0 (2nd run of some_code())"]);
}

#[test]
fn examples_2_and_3_are_loops() {
    let _gpu = simulated_gpu();
    let mut mtrace = quiet().start().unwrap();
    for i in 0..10 {
        mtrace.reset();
        some_code();
        mtrace.report_with(format!("i={i}"));
    }
    for i in 0..10 {
        some_code();
        mtrace.report_n_reset_with(format!("i={i}"));
    }
    let expected: Vec<_> = (0..20).map(|i| format!("△Used Peaked MB:      0      0 (i={})", i % 10)).collect();
    assert_eq!(reported_lines(), expected);
}

#[test]
fn start_and_stop() {
    let gpu = simulated_gpu();
    let mut mtrace = quiet().start().unwrap();
    mtrace.start();
    let _a = mib(&gpu, 1);
    mtrace.stop();
    let _b = mib(&gpu, 2);
    mtrace.stop();
    check(&mtrace, 1, 0);
}

#[test]
fn contexts() {
    let _gpu = simulated_gpu();
    let mtrace = quiet().ctx("foobar").start().unwrap();
    mtrace.report();
    mtrace.report_with("1st try");
    mtrace.report_with("2nd try");
    check_lines(&[
        "△Used Peaked MB:      0      0 (foobar)",
        "△Used Peaked MB:      0      0 (foobar: 1st try)",
        "△Used Peaked MB:      0      0 (foobar: 2nd try)",
    ]);
}

#[test]
fn silence() {
    let _gpu = simulated_gpu();
    let mut mtrace = quiet().silent(true).start().unwrap();
    mtrace.report(); // nothing will be printed
    mtrace.set_silent(false);
    mtrace.report(); // printing resumed
    mtrace.set_silent(true);
    mtrace.report(); // nothing will be printed
    check_lines(&["△Used Peaked MB:      0      0"]);
}

#[test]
fn the_context_manager() {
    let _gpu = simulated_gpu();
    {
        let _mtrace = GpuMemTrace::new();
        some_code();
    }
    {
        let _mtrace = GpuMemTrace::with_ctx("some context");
        some_code();
    }
    check_lines(&["△Used Peaked MB:      0      0 (exit)", "△Used Peaked MB:      0      0 (some context: exit)"]);
}

#[test]
fn a_function_that_returns_early() {
    fn some_func() -> i32 {
        let _mtrace = GpuMemTrace::with_ctx("some_func");
        // some code
        1
    }
    let _gpu = simulated_gpu();
    assert_eq!(some_func(), 1);
    check_lines(&["△Used Peaked MB:      0      0 (some_func: exit)"]);
}

#[test]
fn the_decorator() {
    #[gpu_mem_trace]
    fn some_func() -> i32 {
        // some code
        1
    }
    #[gpu_mem_trace]
    fn my_function() {}
    let _gpu = simulated_gpu();
    assert_eq!(some_func(), 1);
    my_function();
    check_lines(&[
        "△Used Peaked MB:      0      0 (some_func: exit)",
        "△Used Peaked MB:      0      0 (my_function: exit)",
    ]);
}

#[test]
fn no_report_on_exit() {
    let _gpu = simulated_gpu();
    let mut mtrace = quiet().ctx("some_func").start().unwrap();
    some_code();
    mtrace.stop();
    mtrace.report_with("measured in ctx");
    check_lines(&["△Used Peaked MB:      0      0 (some_func: measured in ctx)"]);
}

#[test]
fn printing_a_trace() {
    let gpu = simulated_gpu();
    let mtrace = quiet().start().unwrap();
    let _kept = mib(&gpu, 1500);
    assert_eq!(mtrace.to_string(), "△Used Peaked MB:  1,500      0");
    drop(mtrace);
    assert_eq!(quiet().ctx("foobar").start().unwrap().to_string(), "△Used Peaked MB:      0      0 (foobar)");
    check_lines(&[]);
}

#[test]
fn numbers_outlive_the_block() {
    let gpu = simulated_gpu();
    let (data, kept) = GpuMemTrace::scope("", |mtrace| {
        let kept = mib(&gpu, 8);
        mtrace.stop();
        (mtrace.data(), kept)
    });
    assert_eq!((data.used.mb(), data.peaked.mb()), (8, 0));
    drop(kept);
    check_lines(&["△Used Peaked MB:      8      0 (exit)"]);
}
