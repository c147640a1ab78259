//! Compares the memory of graphs and captures with the attributes that the driver keeps about it.

use super::{random::import, *};

pub(super) const MIB: u64 = 1 << 20;

pub(super) const USED_MEM_CURRENT: u64 = 0;
pub(super) const USED_MEM_HIGH: u64 = 1;

/// Returns the driver's value of an attribute of graph memory.
pub(super) fn graph_memory(attribute: u64) -> u64 {
    call_for_output("cuDeviceGetGraphMemAttribute", |out| vec![0, attribute, out])
}

pub(super) fn synchronize() {
    call_ok("cuCtxSynchronize", &[]);
}

/// `CUstreamCaptureMode`
#[derive(Clone, Copy, Debug)]
pub(super) enum Capture {
    Global,
    ThreadLocal,
    Relaxed,
}

/// A captured or hand-built graph that allocates.
#[derive(Clone)]
pub(super) struct Graph {
    name: u64,
    pub(super) executable: u64,
    /// The blocks that a launch allocates and the graph does not free.
    pub(super) own: Vec<u64>,
    /// True if a launch frees the blocks that the launch before it left.
    pub(super) frees: bool,
}

impl Graph {
    /// Captures allocations on a stream. For each block, `blocks` contains its size, and whether it is freed in the capture. The
    /// function `meanwhile` runs during the capture.
    pub(super) fn capture(
        stream: u64,
        mode: Capture,
        blocks: &[(u64, bool)],
        frees: bool,
        meanwhile: impl FnOnce(),
    ) -> Self {
        call_ok("cuStreamBeginCapture_v2", &[stream, mode as u64]);
        let alloc = |(bytes, freed): &(u64, bool)| {
            let address = call_for_output("cuMemAllocAsync", |out| vec![out, *bytes, stream]);
            (address, *freed)
        };
        let allocated: Vec<_> = blocks.iter().map(alloc).collect();
        meanwhile();
        for (address, _) in allocated.iter().filter(|(_, freed)| *freed) {
            call_ok("cuMemFreeAsync", &[*address, stream]);
        }
        let graph = call_for_output("cuStreamEndCapture", |out| vec![stream, out]);
        Self::of(graph, allocated, frees)
    }

    /// Builds the graph that [`capture`](Self::capture) would capture, one node after the other.
    pub(super) fn build(blocks: &[(u64, bool)], frees: bool) -> Self {
        let graph = call_for_output("cuGraphCreate", |out| vec![out, 0]);
        let mut last: Option<u64> = None;
        let mut node = |function: &str, parameter: u64| {
            let before = last.unwrap_or(0);
            let (nodes, count) = if last.is_some() { (&raw const before as u64, 1) } else { (0, 0) };
            last = Some(call_for_output(function, |out| vec![out, graph, nodes, count, parameter]));
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
        let executable = call_for_output("cuGraphInstantiateWithFlags", |out| vec![out, name, frees.into()]);
        let own = allocated.into_iter().filter(|(_, freed)| !freed).map(|(address, _)| address).collect();
        Self { name, executable, own, frees }
    }

    pub(super) fn launch(&self, stream: u64) -> i32 {
        call("cuGraphLaunch", &[self.executable, stream])
    }

    pub(super) fn destroy(&self) {
        call_ok("cuGraphExecDestroy", &[self.executable]);
        call_ok("cuGraphDestroy", &[self.name]);
    }
}

/// Tests captures, graphs, imports, and calls that fail.
pub(super) fn every_kind_of_call() {
    let stream = cu::stream();
    for mode in [Capture::Global, Capture::Relaxed] {
        let graph = Graph::capture(stream, mode, &[(MIB, true), (1000, false)], false, || {});
        call_ok("cuGraphUpload", &[graph.executable, stream]);
        assert_eq!(graph.launch(stream), 0);
        assert_ne!(graph.launch(stream), 0, "its block is live");
        call_ok("cuMemFreeAsync", &[graph.own[0], stream]);
        call_ok("cuStreamSynchronize", &[stream]);
        graph.destroy();
    }
    let graph = call_for_output("cuGraphCreate", |out| vec![out, 0]);
    call_ok("cuStreamBeginCaptureToGraph", &[stream, graph, 0, 0, 0, Capture::Global as u64]);
    call_for_output("cuStreamEndCapture", |out| vec![stream, out]);
    call_ok("cuGraphDestroy", &[graph]);
    let mut nothing = 0_u64;
    assert_ne!(call("cuStreamEndCapture", &[stream, &raw mut nothing as u64]), 0, "nothing is captured");
    call_ok("cuDeviceGraphMemTrim", &[0]);
    let physical = allocate(Way::Exportable, 2 << 20);
    for seed in 0..8 {
        import(&physical, &mut Random::new(seed));
    }
    free_block(physical);
    call_ok("cuStreamDestroy_v2", &[stream]);
}

/// Compares a trace with the driver's attributes, both from the same moment on.
struct Compared {
    trace: GpuMemTrace,
    started: u64,
    steps: usize,
}

impl Compared {
    fn start() -> Self {
        synchronize();
        call_ok("cuDeviceGraphMemTrim", &[0]);
        let mut zero = 0_u64;
        call_ok("cuDeviceSetGraphMemAttribute", &[0, USED_MEM_HIGH, &raw mut zero as u64]);
        let (started, trace) = (graph_memory(USED_MEM_CURRENT), exact());
        Self { trace, started, steps: 0 }
    }

    /// Checks that used and peaked equal the driver's attributes.
    #[track_caller]
    fn step(&mut self, what: &str) {
        let (used, high) = (graph_memory(USED_MEM_CURRENT), graph_memory(USED_MEM_HIGH));
        let data = self.trace.data();
        let expected = (used.cast_signed() - self.started.cast_signed(), high - self.started.max(used), 0, 0);
        let found = (data.used.get(), data.peaked.get(), data.untracked, data.lost);
        assert_eq!(found, expected, "(used, peaked, untracked, lost) after step {}: {what}", self.steps);
        self.steps += 1;
    }
}

const LAUNCHES: usize = 100;

/// The name of a way to free the blocks that a launch allocated, and the function that does it.
type Free<'a> = (&'a str, &'a dyn Fn(&Graph));

#[test]
fn graphs_equal_the_drivers_attributes_at_every_step() {
    let Some(_guard) = device() else { return };
    let [stream, other] = [(); 2].map(|()| cu::stream());
    let frees: [Free<'_>; 6] = [
        ("in the graph", &|_| {}),
        ("at the next launch", &|_| {}),
        ("cuMemFreeAsync", &|graph| graph.own.iter().for_each(|at| call_ok("cuMemFreeAsync", &[*at, stream]))),
        ("cuMemFreeAsync on another stream", &|graph| {
            call_ok("cuStreamSynchronize", &[stream]);
            graph.own.iter().for_each(|at| call_ok("cuMemFreeAsync", &[*at, other]));
            call_ok("cuStreamSynchronize", &[other]);
        }),
        ("cuMemFree", &|graph| graph.own.iter().for_each(|at| call_ok("cuMemFree_v2", &[*at]))),
        ("another graph", &|graph| {
            let freeing = call_for_output("cuGraphCreate", |out| vec![out, 0]);
            for at in &graph.own {
                call_for_output("cuGraphAddMemFreeNode", |out| vec![out, freeing, 0, 0, *at]);
            }
            let freeing = Graph::of(freeing, Vec::new(), false);
            assert_eq!(freeing.launch(stream), 0);
            call_ok("cuStreamSynchronize", &[stream]);
            freeing.destroy();
        }),
    ];
    for (how, free) in frees {
        for by_hand in [false, true] {
            let (inside, at_launch) = (how == "in the graph", how == "at the next launch");
            let blocks = [(64 * MIB, inside), (1000, inside), (3 * MIB, true)];
            let mut compared = Compared::start();
            let graph = if by_hand {
                Graph::build(&blocks, at_launch)
            } else {
                Graph::capture(stream, Capture::Global, &blocks, at_launch, || {})
            };
            compared.step("made");
            for _ in 0..LAUNCHES {
                assert_eq!(graph.launch(stream), 0);
                compared.step("launched");
                free(&graph);
                compared.step(how);
            }
            call_ok("cuStreamSynchronize", &[stream]);
            compared.step("synchronised");
            if at_launch {
                graph.own.iter().for_each(|at| call_ok("cuMemFreeAsync", &[*at, stream]));
            }
            graph.destroy();
            compared.step("destroyed");
            synchronize();
            call_ok("cuDeviceGraphMemTrim", &[0]);
            compared.step("trimmed");
            let kind = if by_hand { "hand-built" } else { "captured" };
            println!("a {kind} graph, freed {how}: {} steps equal the driver's attributes", compared.steps);
        }
    }
    // This graph is mapped by an upload and launched on two streams. A launch fails while a block of the graph is live.
    let mut compared = Compared::start();
    let graph = Graph::build(&[(48 * MIB, false)], false);
    call_ok("cuGraphUpload", &[graph.executable, stream]);
    compared.step("uploaded");
    for on in [stream, other, stream] {
        assert_eq!(graph.launch(on), 0);
        compared.step("launched");
        assert_ne!(graph.launch(on), 0, "its block is live");
        compared.step("refused");
        call_ok("cuMemFreeAsync", &[graph.own[0], on]);
        synchronize();
        compared.step("freed");
    }
    graph.destroy();
    call_ok("cuDeviceGraphMemTrim", &[0]);
    compared.step("trimmed");
    for stream in [stream, other] {
        call_ok("cuStreamDestroy_v2", &[stream]);
    }
}

/// Traces are started and read during a capture. Their calls of the driver do not break the capture.
#[test]
fn a_capture_stays_whole() {
    let Some(_guard) = device() else { return };
    let stream = cu::stream();
    for mode in [Capture::Global, Capture::ThreadLocal, Capture::Relaxed] {
        let all = exact();
        let look = || {
            let trace = GpuMemTrace::builder().gauge(Gauge::Exact).device(0).on_exit_report(false).start();
            let mut trace = trace.expect("the device can be read");
            trace.reset();
            assert_eq!((trace.data().used.get(), trace.data().peaked.get()), (0, 0));
            gpumem::torch::memory_stats(0).expect("allocations are intercepted");
        };
        let graph = Graph::capture(stream, mode, &[(64 * MIB, true)], false, look);
        let data = all.data();
        assert_eq!((data.used.get(), data.peaked.get(), data.lost, data.untracked), (0, 0, 0, 0), "{mode:?}");
        graph.destroy();
        println!("a capture ({mode:?}) stays whole and counts nothing");
    }
    call_ok("cuStreamDestroy_v2", &[stream]);
}

/// The first trace after a subscription asks the driver for the id of a block, even during a capture.
#[test]
fn a_first_trace_leaves_a_capture_whole() {
    let Some(_guard) = device() else { return };
    let stream = cu::stream();
    for mode in [Capture::Global, Capture::ThreadLocal, Capture::Relaxed] {
        unsubscribe();
        let first = || {
            subscribe().expect("allocations can be intercepted");
            let trace = exact();
            assert_eq!((trace.data().used.get(), trace.data().peaked.get()), (0, 0));
        };
        // If the capture were broken, this would panic.
        Graph::capture(stream, mode, &[(MIB, true)], false, first).destroy();
        // The free of a block that is older than the subscription still counts.
        unsubscribe();
        let older = call_for_output("cuMemAlloc_v2", |out| vec![out, MIB]);
        subscribe().expect("allocations can be intercepted");
        let trace = exact();
        call_ok("cuMemFree_v2", &[older]);
        let data = trace.data();
        assert_eq!((data.used.get(), data.untracked, data.lost), (-MIB.cast_signed(), 0, 0), "{mode:?}");
    }
    call_ok("cuStreamDestroy_v2", &[stream]);
}
