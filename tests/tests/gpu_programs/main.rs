//! Compares graphs, imports and random programs with the driver's figures and with the program's own log.
//! `GPUMEM_DEVICE=1` runs them on a GPU, otherwise they run on the stand-in driver.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_programs -- --nocapture --test-threads=1`

mod driver;
mod graphs;
mod imports;
mod random;

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use gpumem::{
    Gauge, GpuMemTrace, device,
    intercept::{subscribe, unsubscribe},
};
use gpumem_tests::{Random, Standin, on_the_standin, on_the_standin_with_both_sources, reported_by_both};

use crate::{
    driver::{Capture, call, done, put, retained},
    random::{Block, Way, import},
};

const MIB: u64 = 1 << 20;

/// Two processes cannot share the stand-in driver's memory.
#[test]
fn on_the_stand_in_driver() {
    on_the_standin(&["imports_in_two_processes"]);
}

/// The other runs have one source each.
#[cfg(target_arch = "x86_64")]
#[test]
fn on_the_stand_in_driver_with_both_sources() {
    on_the_standin_with_both_sources(Standin::new());
}

/// Returns a device whose allocations are intercepted and that is current.
fn device() -> Option<MutexGuard<'static, ()>> {
    let one = gpumem_tests::device()?;
    done("cuInit", &[0]);
    done("cuCtxSetCurrent", &[retained()]);
    subscribe().expect("allocations can be intercepted");
    Some(one)
}

fn exact() -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(0);
    // The log has the whole process.
    builder.all_threads().on_exit_report(false).start().expect("allocations can be intercepted")
}

fn synchronize() {
    done("cuCtxSynchronize", &[]);
}

/// A captured or hand-built graph that allocates.
#[derive(Clone)]
struct Graph {
    name: u64,
    executable: u64,
    /// The blocks that it allocates and does not free.
    own: Vec<u64>,
    /// True if a launch frees the blocks that the launch before it left.
    frees: bool,
}

impl Graph {
    /// Captures allocations on a stream: each size, and whether it is freed in the capture.
    fn capture(stream: u64, mode: Capture, blocks: &[(u64, bool)], frees: bool, meanwhile: impl FnOnce()) -> Self {
        done("cuStreamBeginCapture_v2", &[stream, mode as u64]);
        let alloc = |(bytes, freed): &(u64, bool)| {
            let address = put("cuMemAllocAsync", |out| vec![out, *bytes, stream]);
            (address, *freed)
        };
        let allocated: Vec<_> = blocks.iter().map(alloc).collect();
        meanwhile();
        for (address, _) in allocated.iter().filter(|(_, freed)| *freed) {
            done("cuMemFreeAsync", &[*address, stream]);
        }
        let graph = put("cuStreamEndCapture", |out| vec![stream, out]);
        Self::of(graph, allocated, frees)
    }

    /// Does the same by hand, one node after the other.
    fn build(blocks: &[(u64, bool)], frees: bool) -> Self {
        let graph = put("cuGraphCreate", |out| vec![out, 0]);
        let mut last: Option<u64> = None;
        let mut node = |function: &str, parameter: u64| {
            let before = last.unwrap_or(0);
            let (nodes, count) = if last.is_some() { (&raw const before as u64, 1) } else { (0, 0) };
            last = Some(put(function, |out| vec![out, graph, nodes, count, parameter]));
        };
        let mut alloc = |(bytes, freed): &(u64, bool)| {
            // CUDA_MEM_ALLOC_NODE_PARAMS: CUmemPoolProps (pinned, on device 0), accesses, bytes, address.
            let mut parameters = [0_u64; 15];
            (parameters[0], parameters[1], parameters[13]) = (1, 1, *bytes);
            node("cuGraphAddMemAllocNode", parameters.as_mut_ptr() as u64);
            let address = std::hint::black_box(&parameters)[14];
            if *freed {
                node("cuGraphAddMemFreeNode", address);
            }
            (address, *freed)
        };
        let allocated = blocks.iter().map(&mut alloc).collect();
        Self::of(graph, allocated, frees)
    }

    fn of(name: u64, allocated: Vec<(u64, bool)>, frees: bool) -> Self {
        let executable = put("cuGraphInstantiateWithFlags", |out| vec![out, name, frees.into()]);
        let own = allocated.into_iter().filter(|(_, freed)| !freed).map(|(address, _)| address).collect();
        Self { name, executable, own, frees }
    }

    fn launch(&self, stream: u64) -> i32 {
        call("cuGraphLaunch", &[self.executable, stream])
    }

    fn destroy(&self) {
        done("cuGraphExecDestroy", &[self.executable]);
        done("cuGraphDestroy", &[self.name]);
    }
}

/// Tests captures, graphs, imports, and calls that fail.
fn every_kind_of_call() {
    let stream = put("cuStreamCreate", |out| vec![out, 1]);
    for mode in [Capture::Global, Capture::Relaxed] {
        let graph = Graph::capture(stream, mode, &[(MIB, true), (1000, false)], false, || {});
        done("cuGraphUpload", &[graph.executable, stream]);
        assert_eq!(graph.launch(stream), 0);
        assert_ne!(graph.launch(stream), 0, "its block is live");
        done("cuMemFreeAsync", &[graph.own[0], stream]);
        done("cuStreamSynchronize", &[stream]);
        graph.destroy();
    }
    let graph = put("cuGraphCreate", |out| vec![out, 0]);
    done("cuStreamBeginCaptureToGraph", &[stream, graph, 0, 0, 0, Capture::Global as u64]);
    put("cuStreamEndCapture", |out| vec![stream, out]);
    done("cuGraphDestroy", &[graph]);
    let mut nothing = 0_u64;
    assert_ne!(call("cuStreamEndCapture", &[stream, &raw mut nothing as u64]), 0, "nothing is captured");
    done("cuDeviceGraphMemTrim", &[0]);
    let properties = [1 | 1 << 32, 1_u64, 0, 0];
    let name = put("cuMemCreate", |out| vec![out, 2 * MIB, properties.as_ptr() as u64, 0]);
    let physical = Block { way: Way::Physical, name, counted: 2 * MIB, context: None };
    for seed in 0..8 {
        import(&physical, &mut Random::new(seed));
    }
    done("cuMemRelease", &[name]);
    done("cuStreamDestroy_v2", &[stream]);
}

#[test]
fn both_sources_report_the_same() {
    let Some(_one) = device() else { return };
    let Some([by_dispatch, by_cupti]) = reported_by_both(every_kind_of_call) else { return };
    assert_eq!(by_dispatch, by_cupti);
    for kind in ["CaptureBegun", "CaptureEnded", "succeeded: false", "Graphs", "ForeignHandle", "Foreign {", "Pooled"] {
        assert!(by_dispatch.iter().any(|call| call.contains(kind)), "nothing was reported of {kind}: {by_dispatch:#?}");
    }
    println!("both sources recorded {} events", by_dispatch.len());
}
