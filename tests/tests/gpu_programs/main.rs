//! Graphs, imports and random programs, compared with what the driver says and with the program's own log. Switched on by
//! `GPUMEM_DEVICE=1`, and run on the stand-in driver where it is not.
//!
//! `GPUMEM_DEVICE=1 cargo test --release -p gpumem-tests --test gpu_programs -- --nocapture --test-threads=1`

use std::{
    env,
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use gpumem::{Gauge, GpuMemTrace, device_name, subscribe, unsubscribe};
use gpumem_tests::{Random, Standin, on_the_standin, on_the_standin_with_both_sources, reported_by_both};

use crate::driver::{Capture, call, done, put, retained};

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

/// Heard, and current.
fn device() -> Option<MutexGuard<'static, ()>> {
    let one = gpumem_tests::device()?;
    done("cuInit", &[0]);
    done("cuCtxSetCurrent", &[retained()]);
    subscribe().expect("allocations can be heard");
    Some(one)
}

fn exact() -> GpuMemTrace {
    let builder = GpuMemTrace::builder().gauge(Gauge::Exact).device(0);
    builder.on_exit_report(false).start().expect("the device can be heard")
}

const USED_MEM_CURRENT: u64 = 0;
const USED_MEM_HIGH: u64 = 1;

/// What the driver says of the memory of graphs.
fn graph_memory(attribute: u64) -> u64 {
    put("cuDeviceGetGraphMemAttribute", |out| vec![0, attribute, out])
}

fn synchronize() {
    done("cuCtxSynchronize", &[]);
}

/// A captured or hand-built graph that allocates.
#[derive(Clone)]
struct Graph {
    name: u64,
    executable: u64,
    /// What it allocates and does not free.
    own: Vec<u64>,
    /// A launch frees what the one before left.
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

    /// The same by hand, one node after the other.
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

/// A trace and the driver, from one moment on.
struct Compared {
    trace: GpuMemTrace,
    began: u64,
    steps: usize,
}

impl Compared {
    fn begin() -> Self {
        synchronize();
        done("cuDeviceGraphMemTrim", &[0]);
        let mut zero = 0_u64;
        done("cuDeviceSetGraphMemAttribute", &[0, USED_MEM_HIGH, &raw mut zero as u64]);
        let (began, trace) = (graph_memory(USED_MEM_CURRENT), exact());
        Self { trace, began, steps: 0 }
    }

    /// Used and peaked are the driver's attributes.
    #[track_caller]
    fn step(&mut self, what: &str) {
        let (used, high) = (graph_memory(USED_MEM_CURRENT), graph_memory(USED_MEM_HIGH));
        let data = self.trace.data();
        let expected = (used.cast_signed() - self.began.cast_signed(), high - self.began.max(used), 0, 0);
        let found = (data.used.get(), data.peaked.get(), data.untracked, data.lost);
        assert_eq!(found, expected, "(used, peaked, untracked, lost) after step {}: {what}", self.steps);
        self.steps += 1;
    }
}

const LAUNCHES: usize = 100;

/// A way to free what a launch allocated, by its name.
type Free<'a> = (&'a str, &'a dyn Fn(&Graph));

#[test]
fn graphs_equal_the_drivers_attributes_at_every_step() {
    let Some(_one) = device() else { return };
    let [stream, other] = [(); 2].map(|()| put("cuStreamCreate", |out| vec![out, 1]));
    let frees: [Free<'_>; 6] = [
        ("in the graph", &|_| {}),
        ("at the next launch", &|_| {}),
        ("cuMemFreeAsync", &|graph| graph.own.iter().for_each(|at| done("cuMemFreeAsync", &[*at, stream]))),
        ("cuMemFreeAsync on another stream", &|graph| {
            done("cuStreamSynchronize", &[stream]);
            graph.own.iter().for_each(|at| done("cuMemFreeAsync", &[*at, other]));
            done("cuStreamSynchronize", &[other]);
        }),
        ("cuMemFree", &|graph| graph.own.iter().for_each(|at| done("cuMemFree_v2", &[*at]))),
        ("another graph", &|graph| {
            let freeing = put("cuGraphCreate", |out| vec![out, 0]);
            for at in &graph.own {
                put("cuGraphAddMemFreeNode", |out| vec![out, freeing, 0, 0, *at]);
            }
            let freeing = Graph::of(freeing, Vec::new(), false);
            assert_eq!(freeing.launch(stream), 0);
            done("cuStreamSynchronize", &[stream]);
            freeing.destroy();
        }),
    ];
    for (how, free) in frees {
        for by_hand in [false, true] {
            let (inside, at_launch) = (how == "in the graph", how == "at the next launch");
            let blocks = [(64 * MIB, inside), (1000, inside), (3 * MIB, true)];
            let mut compared = Compared::begin();
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
            done("cuStreamSynchronize", &[stream]);
            compared.step("synchronised");
            if at_launch {
                graph.own.iter().for_each(|at| done("cuMemFreeAsync", &[*at, stream]));
            }
            graph.destroy();
            compared.step("destroyed");
            synchronize();
            done("cuDeviceGraphMemTrim", &[0]);
            compared.step("trimmed");
            let kind = if by_hand { "hand-built" } else { "captured" };
            println!("a {kind} graph, freed {how}: {} steps equal the driver's attributes", compared.steps);
        }
    }
    // Mapped by an upload, launched on two streams, refused while a block is live.
    let mut compared = Compared::begin();
    let graph = Graph::build(&[(48 * MIB, false)], false);
    done("cuGraphUpload", &[graph.executable, stream]);
    compared.step("uploaded");
    for on in [stream, other, stream] {
        assert_eq!(graph.launch(on), 0);
        compared.step("launched");
        assert_ne!(graph.launch(on), 0, "its block is live");
        compared.step("refused");
        done("cuMemFreeAsync", &[graph.own[0], on]);
        synchronize();
        compared.step("freed");
    }
    graph.destroy();
    done("cuDeviceGraphMemTrim", &[0]);
    compared.step("trimmed");
    for stream in [stream, other] {
        done("cuStreamDestroy_v2", &[stream]);
    }
}

/// Traces are begun and read, and what they ask the driver leaves the capture whole.
#[test]
fn a_capture_stays_whole() {
    let Some(_one) = device() else { return };
    let stream = put("cuStreamCreate", |out| vec![out, 1]);
    for mode in [Capture::Global, Capture::ThreadLocal, Capture::Relaxed] {
        let all = exact();
        let look = || {
            for gauge in [Gauge::Exact, Gauge::Pool] {
                let trace = GpuMemTrace::builder().gauge(gauge).device(0).on_exit_report(false).start();
                let mut trace = trace.expect("the device can be read");
                trace.reset();
                assert_eq!((trace.data().used.get(), trace.data().peaked.get()), (0, 0), "{gauge:?}");
            }
            gpumem::memory_stats(0).expect("allocations are heard");
        };
        let graph = Graph::capture(stream, mode, &[(64 * MIB, true)], false, look);
        let data = all.data();
        assert_eq!((data.used.get(), data.peaked.get(), data.lost, data.untracked), (0, 0, 0, 0), "{mode:?}");
        graph.destroy();
        println!("a capture ({mode:?}) stays whole and counts nothing");
    }
    done("cuStreamDestroy_v2", &[stream]);
}

/// The first trace of a process asks for the number of a block, also within a capture.
#[test]
fn a_first_trace_leaves_a_capture_whole() {
    let Some(_one) = device() else { return };
    let stream = put("cuStreamCreate", |out| vec![out, 1]);
    for mode in [Capture::Global, Capture::ThreadLocal, Capture::Relaxed] {
        unsubscribe();
        let first = || {
            subscribe().expect("allocations can be heard");
            let trace = exact();
            assert_eq!((trace.data().used.get(), trace.data().peaked.get()), (0, 0));
        };
        // It ends whole, or this would panic.
        Graph::capture(stream, mode, &[(MIB, true)], false, first).destroy();
        // A block from before the subscription is still known to be older, and one from after it is not.
        unsubscribe();
        let older = put("cuMemAlloc_v2", |out| vec![out, MIB]);
        subscribe().expect("allocations can be heard");
        let trace = exact();
        done("cuMemFree_v2", &[older]);
        let data = trace.data();
        assert_eq!((data.used.get(), data.untracked, data.lost), (-MIB.cast_signed(), 0, 0), "{mode:?}");
    }
    done("cuStreamDestroy_v2", &[stream]);
}

/// Captures, graphs, imports, and what fails.
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
fn both_sources_tell_the_same() {
    let Some(_one) = device() else { return };
    let Some([by_dispatch, by_cupti]) = reported_by_both(every_kind_of_call) else { return };
    assert_eq!(by_dispatch, by_cupti);
    for kind in ["CaptureBegun", "CaptureEnded", "worked: false", "Graphs", "ForeignHandle", "Foreign {", "Pooled"] {
        assert!(by_dispatch.iter().any(|call| call.contains(kind)), "nothing was told of {kind}: {by_dispatch:#?}");
    }
    println!("both sources told of {} facts", by_dispatch.len());
}

/// A way to allocate.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Plain,
    Array,
    Managed,
    Pinned,
    Pooled,
    Physical,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    way: Way,
    name: u64,
    counted: u64,
    /// The context that it goes with, by its place.
    context: Option<usize>,
}

/// Physical memory of this process that comes back as somebody else's, by each way that works in one process.
fn import(&Block { name: handle, counted, .. }: &Block, random: &mut Random) {
    let exported = put("cuMemExportToShareableHandle", |out| vec![out, handle, 1, 0]) & 0xffff_ffff;
    if random.below(2) == 0 {
        let imported = put("cuMemImportFromShareableHandle", |out| vec![out, exported, 1]);
        if random.below(2) == 0 {
            let at = put("cuMemAddressReserve", |out| vec![out, counted, 0, 0, 0]);
            // The stand-in driver knows only one size of what is imported.
            if call("cuMemMap", &[at, counted, 0, imported, 0]) == 0 {
                done("cuMemUnmap", &[at, counted]);
            }
            done("cuMemAddressFree", &[at, counted]);
        }
        done("cuMemRelease", &[imported]);
        driver::close(exported);
    } else {
        // CUDA_EXTERNAL_MEMORY_HANDLE_DESC: a file descriptor, which is the driver's from then on; the size.
        let description = [1, exported, 0, counted, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let external = put("cuImportExternalMemory", |out| vec![out, description.as_ptr() as u64]);
        let buffer = [0, counted, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let at = put("cuExternalMemoryGetMappedBuffer", |out| vec![out, external, buffer.as_ptr() as u64]);
        done("cuMemFree_v2", &[at]);
        done("cuDestroyExternalMemory", &[external]);
    }
}

/// Everything under one lock, so that the order of the log is that of the events.
struct World {
    /// What is in use after each event.
    log: Vec<i64>,
    traces: Vec<(GpuMemTrace, usize)>,
    blocks: Vec<Block>,
    graphs: Vec<Graph>,
    /// What graphs allocated and nobody has freed yet.
    live: Vec<u64>,
    streams: Vec<u64>,
    /// The primary one, and perhaps another.
    contexts: Vec<u64>,
    pool: u64,
    readings: usize,
    wrong: Vec<String>,
}

impl World {
    fn begin(random: &mut Random) -> Self {
        let mut properties = [0_u64; 11];
        (properties[0], properties[1]) = (1, 1);
        let mut contexts = vec![retained()];
        if random.below(10) == 0 {
            contexts.push(put("cuCtxCreate_v2", |out| vec![out, 0, 0]));
            done("cuCtxSetCurrent", &[contexts[0]]);
        }
        let streams = (0..=random.below(3)).map(|_| put("cuStreamCreate", |out| vec![out, 1])).collect();
        let pool = put("cuMemPoolCreate", |out| vec![out, properties.as_ptr() as u64]);
        let mut world = Self {
            log: Vec::new(),
            traces: Vec::new(),
            blocks: Vec::new(),
            graphs: Vec::new(),
            live: Vec::new(),
            streams,
            contexts,
            pool,
            readings: 0,
            wrong: Vec::new(),
        };
        world.note();
        world.traces.push((exact(), 0));
        world
    }

    fn note(&mut self) {
        let blocks: u64 = self.blocks.iter().map(|block| block.counted).sum();
        self.log.push((blocks + graph_memory(USED_MEM_CURRENT)).cast_signed());
    }

    fn stream(&self, random: &mut Random) -> u64 {
        self.streams[random.below(self.streams.len())]
    }

    fn step(&mut self, random: &mut Random) {
        let context = random.below(self.contexts.len());
        done("cuCtxSetCurrent", &[self.contexts[context]]);
        match random.below(20) {
            0..5 => self.allocate(context, random),
            5..9 => self.free(random),
            // Graphs are the primary context's.
            9..16 => {
                done("cuCtxSetCurrent", &[self.contexts[0]]);
                self.graph(random);
            }
            16 => self.import(random),
            17 => self.traces.push((exact(), self.log.len() - 1)),
            18 => self.read(random),
            _ => self.others(random),
        }
        self.note();
    }

    fn allocate(&mut self, context: usize, random: &mut Random) {
        let power = random.below(23);
        let bytes = 1 + random.below(1_u64 << power);
        let stream = self.stream(random);
        let (way, name, counted) = match random.below(7) {
            0 => (Way::Plain, put("cuMemAlloc_v2", |out| vec![out, bytes]), bytes),
            1 => {
                let shape = [1 + bytes % 1000, 1 + bytes % 7, 0x20 | 1 << 32];
                let name = put("cuArrayCreate_v2", |out| vec![out, shape.as_ptr() as u64]);
                (Way::Array, name, shape[0] * shape[1] * 4)
            }
            2 => (Way::Managed, put("cuMemAllocManaged", |out| vec![out, bytes, 1]), 0),
            3 => (Way::Pinned, put("cuMemAllocHost_v2", |out| vec![out, bytes]), 0),
            4 => (Way::Pooled, put("cuMemAllocAsync", |out| vec![out, bytes, stream]), bytes),
            5 => (Way::Pooled, put("cuMemAllocFromPoolAsync", |out| vec![out, bytes, self.pool, stream]), bytes),
            _ => {
                let pages = 2 * MIB * (1 + bytes % 3);
                // Pinned, to be exported by a file descriptor, on device 0.
                let properties = [1 | 1 << 32, 1_u64, 0, 0];
                (Way::Physical, put("cuMemCreate", |out| vec![out, pages, properties.as_ptr() as u64, 0]), pages)
            }
        };
        let context = Some(context).filter(|_| !matches!(way, Way::Pooled | Way::Physical));
        self.blocks.push(Block { way, name, counted, context });
    }

    fn free(&mut self, random: &mut Random) {
        if self.blocks.is_empty() {
            return;
        }
        let Block { way, name, .. } = self.blocks.swap_remove(random.below(self.blocks.len()));
        match way {
            Way::Pooled if random.below(4) > 0 => done("cuMemFreeAsync", &[name, self.stream(random)]),
            Way::Plain | Way::Managed | Way::Pooled => done("cuMemFree_v2", &[name]),
            Way::Array => done("cuArrayDestroy", &[name]),
            Way::Pinned => done("cuMemFreeHost", &[name]),
            Way::Physical => done("cuMemRelease", &[name]),
        }
    }

    fn graph(&mut self, random: &mut Random) {
        let stream = self.stream(random);
        match random.below(8) {
            0 | 1 if self.graphs.len() < 4 => {
                let block = |random: &mut Random| (1 + random.below(40 * MIB), random.below(2) == 0);
                let blocks: Vec<_> = (0..=random.below(3)).map(|_| block(random)).collect();
                let frees = random.below(2) == 0;
                if random.below(2) == 0 {
                    self.graphs.push(Graph::build(&blocks, frees));
                    return;
                }
                // In a relaxed capture, a block that is none of the graph's, which is freed before it ends.
                let relaxed = random.below(2) == 0;
                let mode = if relaxed { Capture::Relaxed } else { Capture::Global };
                let mut blip = 0;
                let captured = Graph::capture(stream, mode, &blocks, frees, || {
                    if relaxed {
                        blip = 1 + random.below(MIB);
                        let elsewhere = put("cuMemAllocAsync", |out| vec![out, blip, 0]);
                        done("cuMemFreeAsync", &[elsewhere, 0]);
                    }
                });
                let now = self.log.last().copied().unwrap_or(0);
                self.log.push(now + blip.cast_signed());
                self.graphs.push(captured);
            }
            2..5 if !self.graphs.is_empty() => {
                let graph = &self.graphs[random.below(self.graphs.len())];
                let is_refused = !graph.frees && graph.own.iter().any(|at| self.live.contains(at));
                let code = graph.launch(stream);
                assert_eq!(code != 0, is_refused, "a launch came to {code}");
                if !is_refused {
                    let new: Vec<_> = graph.own.iter().filter(|at| !self.live.contains(at)).copied().collect();
                    self.live.extend(new);
                }
                done("cuStreamSynchronize", &[stream]);
            }
            5 | 6 if !self.live.is_empty() => {
                let at = self.live.swap_remove(random.below(self.live.len()));
                match random.below(2) {
                    0 => done("cuMemFreeAsync", &[at, stream]),
                    _ => done("cuMemFree_v2", &[at]),
                }
                done("cuStreamSynchronize", &[stream]);
            }
            _ => {
                if !self.graphs.is_empty() && random.below(2) == 0 {
                    self.graphs.swap_remove(random.below(self.graphs.len())).destroy();
                }
                synchronize();
                done("cuDeviceGraphMemTrim", &[0]);
            }
        }
    }

    fn import(&mut self, random: &mut Random) {
        if let Some(physical) = self.blocks.iter().rfind(|block| block.way == Way::Physical) {
            import(physical, random);
        }
    }

    /// What fails, and what has nothing to do with memory.
    fn others(&mut self, random: &mut Random) {
        match random.below(4) {
            0 => assert_ne!(call("cuMemFree_v2", &[0x1234_0000]), 0),
            1 => assert_ne!(call("cuGraphLaunch", &[0, self.stream(random)]), 0),
            2 => {
                done("cuCtxSetCurrent", &[self.contexts[0]]);
                let at = random.below(self.streams.len());
                synchronize();
                done("cuStreamDestroy_v2", &[self.streams[at]]);
                self.streams[at] = put("cuStreamCreate", |out| vec![out, 1]);
            }
            _ if self.contexts.len() > 1 => self.end_context(),
            _ => synchronize(),
        }
    }

    /// What was allocated in it goes with it.
    fn end_context(&mut self) {
        done("cuCtxSetCurrent", &[self.contexts[0]]);
        synchronize();
        if let Some(context) = self.contexts.pop() {
            done("cuCtxDestroy_v2", &[context]);
            let place = self.contexts.len();
            self.blocks.retain(|block| block.context != Some(place) || place == 0);
        }
    }

    fn read(&mut self, random: &mut Random) {
        let at = random.below(self.traces.len());
        self.compare(at);
        if random.below(2) == 0 && at > 0 {
            drop(self.traces.swap_remove(at));
        } else {
            let now = self.log.len() - 1;
            let (trace, began) = &mut self.traces[at];
            trace.reset();
            *began = now;
        }
    }

    /// The trace and the log, if nothing is said to be unknown.
    fn compare(&mut self, at: usize) {
        let (trace, began) = &self.traces[at];
        let seen = &self.log[*began..];
        let (start, end) = (seen[0], seen[seen.len() - 1]);
        let most = seen.iter().max().copied().unwrap_or(start);
        let expected = (end - start, most - start.max(end));
        let data = trace.data();
        let found = (data.used.get(), data.peaked.get().cast_signed());
        if found != expected || (data.lost, data.untracked) != (0, 0) {
            let doubts = format!("lost {}, untracked {}", data.lost, data.untracked);
            self.wrong.push(format!("(used, peaked) is {expected:?} by the log and {found:?} by the trace, {doubts}"));
        }
        self.readings += 1;
    }

    fn end(mut self, random: &mut Random) -> (usize, Vec<String>) {
        while self.contexts.len() > 1 {
            self.end_context();
            self.note();
        }
        done("cuCtxSetCurrent", &[self.contexts[0]]);
        while !self.blocks.is_empty() {
            self.free(random);
            self.note();
        }
        for at in std::mem::take(&mut self.live) {
            done("cuMemFreeAsync", &[at, self.streams[0]]);
        }
        for graph in std::mem::take(&mut self.graphs) {
            graph.destroy();
        }
        synchronize();
        done("cuDeviceGraphMemTrim", &[0]);
        self.note();
        for at in 0..self.traces.len() {
            self.compare(at);
        }
        done("cuMemPoolDestroy", &[self.pool]);
        for stream in std::mem::take(&mut self.streams) {
            done("cuStreamDestroy_v2", &[stream]);
        }
        (self.readings, self.wrong)
    }
}

const THREADS: u64 = 3;
const STEPS: usize = 40;

/// Each program mixes kinds of memory, graphs, imports, streams, threads and contexts at random.
#[test]
fn random_programs_equal_their_own_log() {
    let Some(_one) = device() else { return };
    let is_the_standin = device_name(0).is_ok_and(|name| name.starts_with("Stand-in"));
    let programs = if is_the_standin { 300 } else { 1000 };
    let (mut readings, mut wrong) = (0, Vec::new());
    for program in 0..programs {
        let mut random = Random::new(program);
        let world = Mutex::new(World::begin(&mut random));
        thread::scope(|threads| {
            for thread in 1..=THREADS {
                let (world, seed) = (&world, program * 1000 + thread);
                threads.spawn(move || {
                    let mut random = Random::new(seed);
                    for _ in 0..STEPS {
                        world.lock().unwrap_or_else(PoisonError::into_inner).step(&mut random);
                    }
                });
            }
        });
        let world = world.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (read, of_program) = world.end(&mut random);
        readings += read;
        wrong.extend(of_program.into_iter().map(|wrong| format!("program {program}: {wrong}")));
    }
    println!("{programs} random programs: {readings} readings, {} of them wrong", wrong.len());
    assert!(wrong.is_empty(), "{:#?}", &wrong[..wrong.len().min(20)]);
}

/// The parent exports a handle, a pool with a block and an IPC block; the child imports and releases all.
#[test]
fn imports_in_two_processes() {
    let Some(_one) = device() else { return };
    let (trace, stream) = (exact(), put("cuStreamCreate", |out| vec![out, 1]));
    let check = |what: &str, used: u64| {
        let data = trace.data();
        let found = (data.used.get(), data.lost, data.untracked);
        println!("the exporting process, {what}: (used, lost, untracked) {found:?}");
        assert_eq!(found, (used.cast_signed(), 0, 0), "{what}");
    };
    let plain = put("cuMemAlloc_v2", |out| vec![out, 4 * MIB]);
    let mut ipc = [0_u64; 8];
    done("cuIpcGetMemHandle", &[ipc.as_mut_ptr() as u64, plain]);
    let properties = [1 | 1 << 32, 1_u64, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let handle = put("cuMemCreate", |out| vec![out, 2 * MIB, properties.as_ptr() as u64, 0]);
    let pool = put("cuMemPoolCreate", |out| vec![out, properties.as_ptr() as u64]);
    let pooled = put("cuMemAllocFromPoolAsync", |out| vec![out, 3 * MIB, pool, stream]);
    synchronize();
    let descriptors = [("cuMemExportToShareableHandle", handle), ("cuMemPoolExportToShareableHandle", pool)]
        .map(|(export, what)| driver::inherited(put(export, |out| vec![out, what, 1, 0]) & 0xffff_ffff));
    // The driver exports pointers only of a pool that was exported.
    let mut pointer = [0_u64; 8];
    done("cuMemPoolExportPointer", &[pointer.as_mut_ptr() as u64, pooled]);
    check("exported", 9 * MIB);
    let words = [ipc.as_slice(), &pointer, &descriptors].concat();
    let words: Vec<_> = std::hint::black_box(words).iter().map(u64::to_string).collect();
    let mut child = Command::new(env::current_exe().expect("a test has a path"));
    child.args(["--exact", "importing", "--nocapture"]).env("GPUMEM_IMPORTS", words.join(","));
    let output = child.output().expect("the test can be run again");
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check("after the importing process", 9 * MIB);
    done("cuMemFree_v2", &[plain]);
    done("cuMemRelease", &[handle]);
    done("cuMemFreeAsync", &[pooled, stream]);
    synchronize();
    done("cuMemPoolDestroy", &[pool]);
    check("freed", 0);
    done("cuStreamDestroy_v2", &[stream]);
}

/// The other process of `imports_in_two_processes`.
#[test]
fn importing() {
    let Ok(words) = env::var("GPUMEM_IMPORTS") else { return };
    let words: Vec<u64> = words.split(',').map(|word| word.parse().expect("a number")).collect();
    let (ipc, pointer, handle, pool) = (&words[..8], &words[8..16], words[16], words[17]);
    let _one = device();
    let (trace, stream) = (exact(), put("cuStreamCreate", |out| vec![out, 1]));
    let check = |what: &str| {
        let data = trace.data();
        let found = (data.used.get(), data.peaked.get(), data.lost, data.untracked);
        println!("the importing process, {what}: (used, peaked, lost, untracked) {found:?}");
        assert_eq!(found, (0, 0, 0, 0), "{what}");
    };
    let imported = put("cuMemImportFromShareableHandle", |out| vec![out, handle, 1]);
    let at = put("cuMemAddressReserve", |out| vec![out, 2 * MIB, 0, 0, 0]);
    done("cuMemMap", &[at, 2 * MIB, 0, imported, 0]);
    check("a handle imported and mapped");
    done("cuMemRelease", &[imported]);
    check("the handle released");
    done("cuMemUnmap", &[at, 2 * MIB]);
    done("cuMemAddressFree", &[at, 2 * MIB]);
    check("unmapped");
    let pool = put("cuMemPoolImportFromShareableHandle", |out| vec![out, pool, 1, 0]);
    for free in ["cuMemFreeAsync", "cuMemFree_v2"] {
        let at = put("cuMemPoolImportPointer", |out| vec![out, pool, pointer.as_ptr() as u64]);
        check("a block of a pool imported");
        done(free, &[at, stream]);
        synchronize();
        check(free);
    }
    done("cuMemPoolDestroy", &[pool]);
    check("the pool destroyed");
    let at = driver::ipc_open(ipc.try_into().expect("64 bytes"));
    check("an IPC block opened");
    done("cuIpcCloseMemHandle", &[at]);
    check("and closed");
}

/// Calls of the driver by name.
mod driver {
    use std::{ffi::CString, ptr, sync::OnceLock};

    use cudarc::driver::sys;

    /// `CUstreamCaptureMode`
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum Capture {
        Global,
        ThreadLocal,
        Relaxed,
    }

    type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> i32;

    /// The result of a call. The tests name only functions of at most six integers and pointers, which x86-64 and arm64 pass in
    /// registers, and pass pointers to what is alive and as large as the function reads or writes.
    pub(crate) fn call(function: &str, arguments: &[u64]) -> i32 {
        let name = CString::new(function).expect("names have no zeros");
        // SAFETY: loading the driver has no preconditions.
        let library = unsafe { sys::culib() };
        // SAFETY: each function that the tests name has this type, seen from its caller.
        let call = unsafe { library.get::<Function>(name.as_bytes_with_nul()) }.expect(function);
        let mut words = [0; 6];
        words[..arguments.len()].copy_from_slice(arguments);
        let [first, second, third, fourth, fifth, sixth] = words;
        // SAFETY: the arguments are those of the function, as said above.
        unsafe { call(first, second, third, fourth, fifth, sixth) }
    }

    #[track_caller]
    pub(crate) fn done(function: &str, arguments: &[u64]) {
        let code = call(function, arguments);
        assert_eq!(code, 0, "{function} {arguments:x?}");
    }

    /// What a call puts where its out-parameter is; the rest of the word is 0 where that is narrower.
    #[track_caller]
    pub(crate) fn put(function: &str, arguments: impl FnOnce(u64) -> Vec<u64>) -> u64 {
        let mut out = Box::new(0_u64);
        let at = ptr::from_mut(&mut *out).expose_provenance();
        done(function, &arguments(at as u64));
        *std::hint::black_box(out)
    }

    /// The primary context of device 0, retained for ever.
    pub(crate) fn retained() -> u64 {
        static CONTEXT: OnceLock<u64> = OnceLock::new();
        *CONTEXT.get_or_init(|| put("cuDevicePrimaryCtxRetain", |out| vec![out, 0]))
    }

    /// Closes a file descriptor that the driver gave out.
    pub(crate) fn close(descriptor: u64) {
        // SAFETY: it is the caller's own; the stand-in driver's are none, which is refused.
        unsafe { libc::close(i32::try_from(descriptor).expect("it is an int")) };
    }

    /// The same file for processes that this one starts.
    pub(crate) fn inherited(descriptor: u64) -> u64 {
        // SAFETY: duplicating a descriptor has no preconditions.
        let copy = unsafe { libc::dup(i32::try_from(descriptor).expect("it is an int")) };
        u64::try_from(copy).expect("it was duplicated")
    }

    /// Opens a block of another process, whose handle travels as a struct.
    pub(crate) fn ipc_open(handle: [u64; 8]) -> u64 {
        #[repr(C)]
        struct Handle([u64; 8]);
        type Open = unsafe extern "C" fn(*mut u64, Handle, u32) -> i32;
        const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        // SAFETY: as above.
        let library = unsafe { sys::culib() };
        // SAFETY: the function has this type.
        let open = unsafe { library.get::<Open>(b"cuIpcOpenMemHandle_v2\0") }.expect("each driver has it");
        let mut at = 0;
        // SAFETY: the out-parameter is live.
        let code = unsafe { open(&raw mut at, Handle(handle), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) };
        assert_eq!(code, 0, "cuIpcOpenMemHandle_v2");
        at
    }
}
