//! Tests what remains when a context or a primary context ends.

use gpumem_tests::{OwnProcess, part};

use super::*;

/// Prints what gpumem and NVML report when a context ends.
struct Ending {
    trace: GpuMemTrace,
    nvml: i64,
}

impl Ending {
    fn start() -> Self {
        subscribe().expect("allocations can be intercepted");
        Self { trace: exact(), nvml: nvml(0) }
    }

    fn say(&self, what: &str) -> Trace {
        let data = self.trace.data();
        println!(
            "used {}, untracked {}, lost {}, NVML {}: {what}",
            mib(data.used.get()),
            data.untracked,
            data.lost,
            mib(nvml(0) - self.nvml)
        );
        data
    }
}

/// The tests below run this test in a separate process.
#[test]
fn child() {
    match part().as_deref() {
        Some("context alone") => {
            call_ok("cuInit", &[0]);
            let ending = Ending::start();
            let context = Context::create(0);
            ending.say("a context was created");
            allocate(Way::Plain, 64 * MIB);
            allocate(Way::Array, 16 * MIB);
            assert_eq!(ending.say("64 MiB and an array of 16 MiB in it").used.get(), in_mib(80));
            context.destroy();
            let data = ending.say("the context was destroyed with both");
            assert_eq!(data.used.get(), 0);
        }
        Some("context beside") => {
            let primary = Context::primary(0);
            primary.make_current();
            let ending = Ending::start();
            let kept = allocate(Way::Plain, 32 * MIB);
            let context = Context::create(0);
            allocate(Way::Plain, 64 * MIB);
            assert_eq!(ending.say("32 MiB in the primary context, 64 MiB in another").used.get(), in_mib(96));
            context.destroy();
            let data = ending.say("the other was destroyed with its block");
            assert_eq!((data.used.get(), data.lost), (in_mib(32), 0));
            primary.make_current();
            free_block(kept);
            ending.say("the primary context's block was freed");
        }
        Some(which @ ("primary released" | "primary reset")) => {
            let context = Context::primary(0);
            context.make_current();
            let ending = Ending::start();
            allocate(Way::Plain, 64 * MIB);
            allocate(Way::Managed, 8 * MIB);
            let pool = in_mib(48);
            allocate(Way::Async, 48 * MIB);
            ending.say("64 MiB in the primary context, 8 MiB managed, 48 MiB in the pool");
            assert_eq!(ending.trace.data().used.get(), in_mib(64) + pool);
            if which == "primary reset" {
                call_ok("cuDevicePrimaryCtxReset_v2", &[0]);
            } else {
                call_ok("cuDevicePrimaryCtxRelease_v2", &[0]);
            }
            let data = ending.say(&format!("{which} with all of it but the pool's"));
            assert_eq!(data.used.get(), pool);
            println!("used: {}", status());
        }
        _ => {}
    }
}

fn run_child(part: &str) {
    let ended = OwnProcess::new("endings::child").part(part).passes();
    println!("a process of its own, {part}:");
    for line in ended.stdout.lines() {
        if ["used", "live ", "events"].iter().any(|word| line.contains(word)) {
            println!("  {line}");
        }
    }
}

#[test]
fn a_context_that_is_destroyed_takes_its_blocks_along() {
    let Some(_guard) = device() else { return };
    for what in ["context alone", "context beside"] {
        run_child(what);
    }
}

#[test]
fn a_primary_context_that_goes_takes_its_blocks_along() {
    let Some(_guard) = device() else { return };
    for what in ["primary released", "primary reset"] {
        run_child(what);
    }
}
