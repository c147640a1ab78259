//! Tests environment variables: values that cannot be used, and the list that `status()` prints.

use std::{
    os::unix::net::UnixDatagram,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use gpumem_tests::{Standin, ensure};

/// Other processes and libraries also write to stderr. Their text must not appear in the middle of a line.
#[test]
fn each_notice_is_written_at_once() {
    let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(Duration::from_millis(10))).expect("a socket has one");
    let is_over = AtomicBool::new(false);
    let written = thread::scope(|scope| {
        // Each write arrives as a separate message.
        let reads = scope.spawn(|| {
            let (mut written, mut message) = (Vec::new(), vec![0; 1 << 16]);
            loop {
                let last = is_over.load(Ordering::SeqCst);
                match ours.recv(&mut message) {
                    Ok(length) => written.push(String::from_utf8_lossy(&message[..length]).into_owned()),
                    Err(_) if last => return written,
                    Err(_) => {}
                }
            }
        });
        let machine =
            Standin::new().cupti().env("GPUMEM_LEAKS", "1").env("GPUMEM_SAMPLE_MS", "x").env("GPUMEM_BACKTRACE", "x");
        let machine = machine.stderr(theirs.into()).fail("nvmlDeviceGetMemoryInfo_v2=15@3");
        let outcome = machine.run(
            "context 0; exact; call cuMemAlloc_v2 &a 99999999999999; call cuMemAlloc_v2 &b 1000; unsubscribe; new; \
             await stale; build 7",
        );
        is_over.store(true, Ordering::SeqCst);
        ensure(outcome.succeeded(), "did not end well", &outcome);
        reads.join().expect("it only reads")
    });
    for start in [
        "cannot use GPUMEM_SAMPLE_MS",
        "cannot use GPUMEM_BACKTRACE",
        "device 0 is out of memory",
        "device 0 is sampled",
        "reports show ?",
        "process ",
    ] {
        assert!(written.iter().any(|text| text.starts_with(&format!("gpumem: {start}"))), "{start}: {written:?}");
    }
    let whole = |text: &String| text.starts_with("gpumem: ") && text.ends_with('\n');
    assert!(written.iter().all(whole), "in pieces: {written:?}");
}

/// One notice names each variable and says what gpumem does instead, no matter how often and where gpumem uses the variable.
#[test]
fn each_setting_that_cannot_be_used_has_one_notice() {
    const BAD: [&str; 6] =
        ["GPUMEM_REPORT", "GPUMEM_GAUGE", "GPUMEM_SOURCE", "GPUMEM_SAMPLE_MS", "GPUMEM_BACKTRACE", "GPUMEM_BUDGETS"];
    let machine = BAD.iter().fold(Standin::new().cupti(), |machine, name| machine.env(name, "nonsense"));
    for script in [
        "get 0",
        "status",
        "subscribe",
        "summary",
        "memory_allocated",
        "tracker",
        "build; build 0; new; new",
        "of_thread; report; exact; report; sampled; report",
    ] {
        let outcome = machine.run(&format!("{script}; {script}"));
        let named: Vec<_> = outcome.stderr.lines().collect();
        ensure(outcome.is_clean() && named.len() == BAD.len(), "not one notice", &outcome);
        for (line, name) in named.iter().zip(BAD) {
            let prefix = format!("gpumem: cannot use {name}: `nonsense` is not ");
            ensure(line.starts_with(&prefix) && line.contains("; "), "the notice", &outcome);
        }
        let silent = machine.clone().env("GPUMEM_REPORT", "off").run(script);
        ensure(silent.stderr.is_empty(), "said something on stderr", &silent);
    }
}

#[test]
fn the_status_lists_the_variables_that_are_set() {
    let machine = Standin::new().cupti().env("GPUMEM_GAUGE", " Sampled").env("GPUMEM_SAMPLE_MS", "x");
    let outcome = machine.run("environment; fork environment");
    let expected = "  GPUMEM_GAUGE= Sampled (how a trace measures, unless the program chooses its gauge): sampled|  \
                    GPUMEM_SAMPLE_MS=x (milliseconds between two readings of a sampled trace): cannot be used: `x` is not a \
                    whole number of milliseconds from 1 to 4294967295; readings are 1 ms apart";
    ensure(outcome.answers("environment") == [expected, "none"], "another list", &outcome);
    let outcome = Standin::new().cupti().env("GPUMEM_LEAKS", "").run("environment");
    ensure(outcome.answer("environment") == "none", "none is set", &outcome);
}
