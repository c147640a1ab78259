//! Tests what remains when a process, a context or a primary context ends.

use std::process::Command;

use gpumem_tests::{OwnProcess, part};

use super::*;

/// Returns the used memory of device 0 as `nvidia-smi` prints it, in MiB. `None` if the command is missing.
fn smi() -> Option<i64> {
    let args = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"];
    let output = Command::new("nvidia-smi").args(args).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

#[test]
fn nothing_is_left() {
    let Some(_one) = device() else { return };
    let before = (nvml(0), smi());
    run_child("nothing left");
    // A process that has ended gives its memory back a moment later.
    let mut after = (nvml(0), smi());
    for _ in 0..50 {
        if (after.0 - before.0).abs() <= in_mib(2) {
            break;
        }
        thread::sleep(Duration::from_millis(100));
        after = (nvml(0), smi());
    }
    println!("before and after a process: NVML used {}, {}", mib(before.0), mib(after.0));
    println!("before and after a process: nvidia-smi used {:?}, {:?} MiB", before.1, after.1);
    assert!((after.0 - before.0).abs() <= in_mib(2));
    if let (Some(before), Some(after)) = (before.1, after.1) {
        assert!(before.abs_diff(after) <= 2);
    }
}

fn random_run_leaves_nothing() {
    Context::primary(0).make_current();
    subscribe().expect("allocations can be intercepted");
    let mut random = Random::new(7);
    for way in Way::ALL {
        give(take(way, 8 * MIB));
    }
    let before = (gpu_mem_get_used_no_cache(), nvml(0));
    let trace = exact();
    let mut blocks: Vec<_> = (0..500).map(|_| take(any_way(&mut random), any_bytes(&mut random))).collect();
    let during = (trace.data().used.get(), nvml(0) - before.1);
    println!("used by 500 random blocks: Exact {} B, NVML {}", during.0, mib(during.1));
    while !blocks.is_empty() {
        give(blocks.swap_remove(random.below(blocks.len())));
    }
    check(&trace, "500 random blocks, all freed", 0, trace.data().peaked.get());
    let after = (gpu_mem_get_used_no_cache(), nvml(0));
    println!("used before and after by NVML: {}, {}; status: {}", before.0, after.0, status());
    assert!(status().live.is_empty(), "nothing is live");
    // The driver keeps pages of its own for small blocks.
    assert!((after.1 - before.1).abs() <= in_mib(32), "NVML agrees");
}

/// Prints what gpumem and NVML report when a context ends.
struct Ending {
    trace: GpuMemTrace,
    nvml: i64,
}

impl Ending {
    fn begin() -> Self {
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

/// The tests beside this one run it in a process of its own.
#[test]
fn child() {
    match part().as_deref() {
        Some("nothing left") => random_run_leaves_nothing(),
        Some("context alone") => {
            done("cuInit", &[0]);
            let ending = Ending::begin();
            let context = Context::create(0);
            ending.say("a context was created");
            take(Way::Plain, 64 * MIB);
            take(Way::Array, 16 * MIB);
            assert_eq!(ending.say("64 MiB and an array of 16 MiB in it").used.get(), in_mib(80));
            context.destroy();
            let data = ending.say("the context was destroyed with both");
            assert_eq!(data.used.get(), 0);
        }
        Some("context beside") => {
            let primary = Context::primary(0);
            primary.make_current();
            let ending = Ending::begin();
            let kept = take(Way::Plain, 32 * MIB);
            let context = Context::create(0);
            take(Way::Plain, 64 * MIB);
            assert_eq!(ending.say("32 MiB in the primary context, 64 MiB in another").used.get(), in_mib(96));
            context.destroy();
            let data = ending.say("the other was destroyed with its block");
            assert_eq!((data.used.get(), data.lost), (in_mib(32), 0));
            primary.make_current();
            give(kept);
            ending.say("the primary context's block was freed");
        }
        Some(which @ ("primary released" | "primary reset")) => {
            let context = Context::primary(0);
            context.make_current();
            let ending = Ending::begin();
            take(Way::Plain, 64 * MIB);
            take(Way::Managed, 8 * MIB);
            let pool = in_mib(48);
            take(Way::Async, 48 * MIB);
            ending.say("64 MiB in the primary context, 8 MiB managed, 48 MiB in the pool");
            assert_eq!(ending.trace.data().used.get(), in_mib(64) + pool);
            if which == "primary reset" {
                done("cuDevicePrimaryCtxReset_v2", &[0]);
            } else {
                done("cuDevicePrimaryCtxRelease_v2", &[0]);
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
    let Some(_one) = device() else { return };
    for what in ["context alone", "context beside"] {
        run_child(what);
    }
}

#[test]
fn a_primary_context_that_goes_takes_its_blocks_along() {
    let Some(_one) = device() else { return };
    for what in ["primary released", "primary reset"] {
        run_child(what);
    }
}
