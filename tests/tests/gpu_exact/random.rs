//! Compares the traces of random programs with the programs' own logs.

use std::sync::PoisonError;

use super::{
    graphs::{Capture, Graph, MIB, USED_MEM_CURRENT, graph_memory, synchronize},
    *,
};

/// Closes a file descriptor that the driver returned.
fn close(descriptor: u64) {
    // SAFETY: the descriptor belongs to the caller. The stand-in driver's number is not an open descriptor, so `close` fails for
    // it.
    unsafe { libc::close(i32::try_from(descriptor).expect("it is an int")) };
}

/// Imports physical memory of this process again, in each way that works within one process.
pub(super) fn import(physical: &Block, random: &mut Random) {
    let (handle, bytes) = (physical.name(), physical.counted().unsigned_abs());
    let exported = call_for_output("cuMemExportToShareableHandle", |out| vec![out, handle, 1, 0]) & 0xffff_ffff;
    if random.below(2) == 0 {
        let imported = call_for_output("cuMemImportFromShareableHandle", |out| vec![out, exported, 1]);
        if random.below(2) == 0 {
            let at = call_for_output("cuMemAddressReserve", |out| vec![out, bytes, 0, 0, 0]);
            // In the stand-in driver, all imported memory has one size, so mapping another size fails.
            if call("cuMemMap", &[at, bytes, 0, imported, 0]) == 0 {
                call_ok("cuMemUnmap", &[at, bytes]);
            }
            call_ok("cuMemAddressFree", &[at, bytes]);
        }
        call_ok("cuMemRelease", &[imported]);
        close(exported);
    } else {
        // CUDA_EXTERNAL_MEMORY_HANDLE_DESC: the type, which is a file descriptor; the descriptor, which the driver owns after the
        // call; the size.
        let description = [1, exported, 0, bytes, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let external = call_for_output("cuImportExternalMemory", |out| vec![out, description.as_ptr() as u64]);
        let buffer = [0, bytes, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let at = call_for_output("cuExternalMemoryGetMappedBuffer", |out| vec![out, external, buffer.as_ptr() as u64]);
        call_ok("cuMemFree_v2", &[at]);
        call_ok("cuDestroyExternalMemory", &[external]);
    }
}

/// The state of a random program. One lock protects all of it, so that the log has the order of the events.
struct World {
    /// The bytes in use after each event.
    log: Vec<i64>,
    traces: Vec<(GpuMemTrace, usize)>,
    /// The blocks, each with the index of the context that it belongs to, if it ends with a context.
    blocks: Vec<(Block, Option<usize>)>,
    graphs: Vec<Graph>,
    /// The blocks that graphs allocated and that are not freed yet.
    live: Vec<u64>,
    streams: Vec<u64>,
    /// The contexts: the primary one, and perhaps another.
    contexts: Vec<u64>,
    pool: u64,
    readings: usize,
    mismatches: Vec<String>,
}

impl World {
    fn start(random: &mut Random) -> Self {
        let mut contexts = vec![Context::primary(0).0];
        if random.below(10) == 0 {
            contexts.push(Context::create(0).0);
            call_ok("cuCtxSetCurrent", &[contexts[0]]);
        }
        let streams = (0..=random.below(3)).map(|_| cu::stream()).collect();
        let pool = cu::pool_create(0);
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
            mismatches: Vec::new(),
        };
        world.note();
        world.traces.push((exact(), 0));
        world
    }

    fn note(&mut self) {
        let blocks: i64 = self.blocks.iter().map(|(block, _)| block.counted()).sum();
        self.log.push(blocks + graph_memory(USED_MEM_CURRENT).cast_signed());
    }

    fn stream(&self, random: &mut Random) -> u64 {
        self.streams[random.below(self.streams.len())]
    }

    fn step(&mut self, random: &mut Random) {
        let context = random.below(self.contexts.len());
        call_ok("cuCtxSetCurrent", &[self.contexts[context]]);
        match random.below(20) {
            0..5 => self.allocate(context, random),
            5..9 => self.free(random),
            // Graphs belong to the primary context.
            9..16 => {
                call_ok("cuCtxSetCurrent", &[self.contexts[0]]);
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
        let bytes = 1 + random.below(1 << power);
        let stream = self.stream(random);
        let way = match random.below(7) {
            0 => Way::Plain,
            1 => Way::Array,
            2 => Way::Managed,
            3 => Way::Pinned,
            4 => Way::On(stream),
            5 => Way::FromPool(self.pool, stream),
            _ => Way::Exportable,
        };
        let context = Some(context).filter(|_| !matches!(way, Way::On(_) | Way::FromPool(..) | Way::Exportable));
        self.blocks.push((allocate(way, bytes), context));
    }

    fn free(&mut self, random: &mut Random) {
        if self.blocks.is_empty() {
            return;
        }
        let (block, _) = self.blocks.swap_remove(random.below(self.blocks.len()));
        match block.way {
            // Each of these functions frees memory of a pool, on any stream.
            Way::On(_) | Way::FromPool(..) if random.below(4) == 0 => call_ok("cuMemFree_v2", &[block.name()]),
            Way::On(_) | Way::FromPool(..) => call_ok("cuMemFreeAsync", &[block.name(), self.stream(random)]),
            _ => free_block(block),
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
                // A relaxed capture also allocates a block that does not belong to the graph, and frees it before the capture
                // ends.
                let relaxed = random.below(2) == 0;
                let mode = if relaxed { Capture::Relaxed } else { Capture::Global };
                let mut blip = 0;
                let captured = Graph::capture(stream, mode, &blocks, frees, || {
                    if relaxed {
                        blip = 1 + random.below(MIB);
                        let elsewhere = call_for_output("cuMemAllocAsync", |out| vec![out, blip, 0]);
                        call_ok("cuMemFreeAsync", &[elsewhere, 0]);
                    }
                });
                let now = self.log.last().copied().unwrap_or(0);
                self.log.push(now + blip.cast_signed());
                self.graphs.push(captured);
            }
            2..5 if !self.graphs.is_empty() => {
                let graph = &self.graphs[random.below(self.graphs.len())];
                let is_rejected = !graph.frees && graph.own.iter().any(|at| self.live.contains(at));
                let code = graph.launch(stream);
                assert_eq!(code != 0, is_rejected, "a launch came to {code}");
                if !is_rejected {
                    let new: Vec<_> = graph.own.iter().filter(|at| !self.live.contains(at)).copied().collect();
                    self.live.extend(new);
                }
                call_ok("cuStreamSynchronize", &[stream]);
            }
            5 | 6 if !self.live.is_empty() => {
                let at = self.live.swap_remove(random.below(self.live.len()));
                match random.below(2) {
                    0 => call_ok("cuMemFreeAsync", &[at, stream]),
                    _ => call_ok("cuMemFree_v2", &[at]),
                }
                call_ok("cuStreamSynchronize", &[stream]);
            }
            _ => {
                if !self.graphs.is_empty() && random.below(2) == 0 {
                    self.graphs.swap_remove(random.below(self.graphs.len())).destroy();
                }
                synchronize();
                call_ok("cuDeviceGraphMemTrim", &[0]);
            }
        }
    }

    fn import(&mut self, random: &mut Random) {
        if let Some((physical, _)) = self.blocks.iter().rfind(|(block, _)| block.way == Way::Exportable) {
            import(physical, random);
        }
    }

    /// Makes calls that fail, and calls that have nothing to do with memory.
    fn others(&mut self, random: &mut Random) {
        match random.below(4) {
            0 => assert_ne!(call("cuMemFree_v2", &[0x1234_0000]), 0),
            1 => assert_ne!(call("cuGraphLaunch", &[0, self.stream(random)]), 0),
            2 => {
                call_ok("cuCtxSetCurrent", &[self.contexts[0]]);
                let at = random.below(self.streams.len());
                synchronize();
                call_ok("cuStreamDestroy_v2", &[self.streams[at]]);
                self.streams[at] = cu::stream();
            }
            _ if self.contexts.len() > 1 => self.end_context(),
            _ => synchronize(),
        }
    }

    /// Ends a context. Its blocks end with it.
    fn end_context(&mut self) {
        call_ok("cuCtxSetCurrent", &[self.contexts[0]]);
        synchronize();
        if let Some(context) = self.contexts.pop() {
            call_ok("cuCtxDestroy_v2", &[context]);
            let place = self.contexts.len();
            self.blocks.retain(|(_, context)| *context != Some(place) || place == 0);
        }
    }

    fn read(&mut self, random: &mut Random) {
        let at = random.below(self.traces.len());
        self.compare(at);
        if random.below(2) == 0 && at > 0 {
            drop(self.traces.swap_remove(at));
        } else {
            let now = self.log.len() - 1;
            let (trace, started) = &mut self.traces[at];
            trace.reset();
            *started = now;
        }
    }

    /// Compares the trace with the log. Unknown frees and lost events are errors, too.
    fn compare(&mut self, at: usize) {
        let (trace, started) = &self.traces[at];
        let seen = &self.log[*started..];
        let (start, end) = (seen[0], seen[seen.len() - 1]);
        let most = seen.iter().max().copied().unwrap_or(start);
        let expected = (end - start, most - start.max(end));
        let data = trace.data();
        let found = (data.used.get(), data.peaked.get().cast_signed());
        if found != expected || (data.lost, data.untracked) != (0, 0) {
            let missed = format!("lost {}, untracked {}", data.lost, data.untracked);
            self.mismatches
                .push(format!("(used, peaked) is {expected:?} by the log and {found:?} by the trace, {missed}"));
        }
        self.readings += 1;
    }

    fn end(mut self, random: &mut Random) -> (usize, Vec<String>) {
        while self.contexts.len() > 1 {
            self.end_context();
            self.note();
        }
        call_ok("cuCtxSetCurrent", &[self.contexts[0]]);
        while !self.blocks.is_empty() {
            self.free(random);
            self.note();
        }
        for at in std::mem::take(&mut self.live) {
            call_ok("cuMemFreeAsync", &[at, self.streams[0]]);
        }
        for graph in std::mem::take(&mut self.graphs) {
            graph.destroy();
        }
        synchronize();
        call_ok("cuDeviceGraphMemTrim", &[0]);
        self.note();
        for at in 0..self.traces.len() {
            self.compare(at);
        }
        call_ok("cuMemPoolDestroy", &[self.pool]);
        for stream in std::mem::take(&mut self.streams) {
            call_ok("cuStreamDestroy_v2", &[stream]);
        }
        (self.readings, self.mismatches)
    }
}

const THREADS: u64 = 3;
const STEPS: usize = 40;

/// Each program mixes kinds of memory, graphs, imports, streams, threads and contexts at random.
#[test]
fn random_programs_equal_their_own_log() {
    let Some(_guard) = device() else { return };
    let is_the_standin = device::name(0).is_ok_and(|name| name.starts_with("Stand-in"));
    let programs = if is_the_standin { 300 } else { 1000 };
    let (mut readings, mut mismatches) = (0, Vec::new());
    for program in 0..programs {
        let mut random = Random::new(program);
        let world = Mutex::new(World::start(&mut random));
        thread::scope(|threads| {
            let handles = (1..=THREADS).map(|thread| {
                let (world, seed) = (&world, program * 1000 + thread);
                threads.spawn(move || {
                    let mut random = Random::new(seed);
                    for _ in 0..STEPS {
                        world.lock().unwrap_or_else(PoisonError::into_inner).step(&mut random);
                    }
                })
            });
            // `thread::scope` waits until the threads' closures have returned, but not until the threads have ended. The driver
            // pops the contexts of a thread only when the thread ends, and the end of this program destroys a context that a
            // thread may still have.
            for handle in handles.collect::<Vec<_>>() {
                handle.join().expect("a step of the program panicked");
            }
        });
        let world = world.into_inner().unwrap_or_else(PoisonError::into_inner);
        let (read, of_program) = world.end(&mut random);
        readings += read;
        mismatches.extend(of_program.into_iter().map(|mismatch| format!("program {program}: {mismatch}")));
    }
    println!("{programs} random programs: {readings} readings, {} of them wrong", mismatches.len());
    assert!(mismatches.is_empty(), "{:#?}", &mismatches[..mismatches.len().min(20)]);
}
