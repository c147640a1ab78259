//! Random programs, compared with their own log.

use super::*;

/// What a test keeps by itself of what it does, to be compared with what gpumem reports.
#[derive(Default)]
struct Log {
    events: u64,
    in_use: u64,
    scopes: BTreeMap<Vec<String>, Figures>,
    /// The scopes that are open, by the event that opened them: their path, and the most that was in use meanwhile.
    open: BTreeMap<u64, (Vec<String>, u64)>,
    /// The paths that each scope ever had.
    paths: BTreeMap<u64, Vec<Vec<String>>>,
    blocks: Vec<(SimBlock, AllocGroup)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Figures {
    calls: u64,
    used: u64,
    peak: u64,
    device_peak: u64,
    allocated: u64,
    allocations: u64,
}

#[derive(Clone, Debug)]
struct AllocGroup {
    event: u64,
    path: Vec<String>,
    /// The number of the thread that allocated it, then of each thread in whose scope that thread was.
    owners: Vec<u64>,
}

/// Where a thread is: in a trace of its own, or in one that it was handed.
struct Place {
    path: Vec<String>,
    owners: Vec<u64>,
    of: Guard,
}

enum Guard {
    /// And the event that opened it.
    Own(Box<GpuMemTrace>, AllocGroup),
    /// And the event that opened it.
    Handed(#[expect(dead_code)] gpumem::scope::Entered, u64),
}

impl Log {
    fn above(path: &[String]) -> impl Iterator<Item = Vec<String>> {
        (0..=path.len()).map(|depth| path[..depth].to_vec())
    }

    fn alloc(&mut self, block: SimBlock, path: &[String], owners: &[u64]) {
        self.events += 1;
        let bytes = block.bytes().get();
        self.in_use += bytes;
        for above in Self::above(path) {
            let figures = self.scopes.entry(above).or_default();
            figures.used += bytes;
            figures.peak = figures.peak.max(figures.used);
            figures.allocated += bytes;
            figures.allocations += 1;
        }
        self.blocks.push((block, AllocGroup { event: self.events, path: path.to_vec(), owners: owners.to_vec() }));
        self.see();
    }

    /// Takes a block out, to be freed.
    fn free(&mut self, at: usize) -> SimBlock {
        let (block, group) = self.blocks.swap_remove(at);
        self.in_use -= block.bytes().get();
        for above in Self::above(&group.path) {
            self.scopes.get_mut(&above).expect("it was allocated there").used -= block.bytes().get();
        }
        block
    }

    fn see(&mut self) {
        for (path, most) in self.open.values_mut() {
            *most = self.in_use.max(*most);
            let figures = self.scopes.entry(path.clone()).or_default();
            figures.device_peak = figures.device_peak.max(*most);
        }
    }

    fn opened(&mut self, path: &[String]) -> u64 {
        self.events += 1;
        self.scopes.entry(path.to_vec()).or_default().calls += 1;
        self.open.insert(self.events, (path.to_vec(), 0));
        self.paths.insert(self.events, vec![path.to_vec()]);
        self.see();
        self.events
    }

    /// A scope has another path from now on.
    fn moved(&mut self, opened: u64, to: &[String]) {
        let (path, _) = self.open.get_mut(&opened).expect("it is open");
        let from = std::mem::replace(path, to.to_vec());
        self.scopes.get_mut(&from).expect("it was opened there").calls -= 1;
        self.scopes.entry(to.to_vec()).or_default().calls += 1;
        self.paths.entry(opened).or_default().push(to.to_vec());
        self.see();
    }

    /// A thread closes a trace that is not its newest: what it opened inside is in the scope around it from now on.
    fn close_early(&mut self, places: &mut Vec<Place>, at: usize) {
        let closed = places.remove(at);
        self.left(&closed);
        let mut outer = closed.path.clone();
        outer.pop();
        let mut left = closed.path.clone();
        let mut moved: Vec<(u64, Vec<String>)> = Vec::new();
        for place in &mut places[at..] {
            let (opened, is_own) = match &place.of {
                Guard::Own(_, opened) => (opened.event, true),
                Guard::Handed(_, opened) => (*opened, false),
            };
            let to = if let Some((_, to)) = moved.iter().find(|(of, _)| *of == opened) {
                to.clone()
            } else {
                let Some((name, _)) = place.path.split_last().filter(|(_, parent)| is_own && *parent == left) else {
                    break;
                };
                let to: Vec<_> = outer.iter().cloned().chain([name.clone()]).collect();
                self.moved(opened, &to);
                moved.push((opened, to.clone()));
                to
            };
            left = std::mem::replace(&mut place.path, to.clone());
            outer = to;
        }
    }

    fn left(&mut self, place: &Place) {
        if let Guard::Own(_, opened) = &place.of {
            self.open.remove(&opened.event);
        }
    }

    #[track_caller]
    fn check(&self, gpu: &SimGpu) {
        let reported = |scope: &ScopeSummary| Figures {
            calls: scope.calls,
            used: scope.used.get(),
            peak: scope.peak.get(),
            device_peak: scope.device_peak.get(),
            allocated: scope.allocated.get(),
            allocations: scope.allocations,
        };
        let summary = gpumem::summary();
        let own = summary.scopes.iter().filter(|scope| scope.device == gpu.ordinal());
        let own: Vec<_> = own.map(|scope| (scope.path.clone(), reported(scope))).collect();
        // Each below the scope around it, and among those of one scope the highest peak first.
        for pair in own.windows(2) {
            let [(before, of_before), (after, of_after)] = pair else { unreachable!() };
            assert!(after.is_empty() || before.starts_with(&after[..after.len() - 1]), "{before:?}, {after:?}");
            let are_siblings = before.len() == after.len();
            assert!(!are_siblings || of_before.peak >= of_after.peak, "ordered by peak: {own:?}");
        }
        let has_row = |figures: &Figures| figures.calls > 0 || figures.allocations > 0;
        let mut expected = self.scopes.clone();
        expected
            .retain(|path, _| self.scopes.iter().any(|(inside, figures)| inside.starts_with(path) && has_row(figures)));
        // Where a scope was handed to, they may have gone on in it after it was closed.
        for figures in expected.values_mut() {
            figures.device_peak = figures.device_peak.max(figures.peak);
        }
        assert_eq!(own.into_iter().collect::<BTreeMap<_, _>>(), expected);
        assert_eq!((summary.untracked, summary.lost, summary.not_intercepted), (0, 0, None));
    }

    /// What is live by the innermost scope.
    #[track_caller]
    fn check_breakdown(&self, gpu: &SimGpu) {
        let reported = breakdown(gpu.ordinal()).expect("it can be read");
        let sum: Bytes = reported.parts.iter().map(|part| part.bytes).sum();
        assert_eq!(sum, reported.memory.used, "{reported}");
        assert!(reported.to_string().lines().all(|line| line.width() <= 80), "{reported}");
        let mut expected: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (block, AllocGroup { path, .. }) in &self.blocks {
            let name = if path.is_empty() { "outside of all scopes".to_owned() } else { path.join(" > ") };
            let (bytes, count) = expected.entry(name).or_default();
            (*bytes, *count) = (*bytes + block.bytes().get(), *count + 1);
        }
        let scopes = reported.parts.iter().filter(|part| part.kind == PartKind::Scope);
        let scopes: BTreeMap<_, _> = scopes.map(|part| (part.name.clone(), (part.bytes.get(), part.count))).collect();
        assert_eq!(scopes, expected);
    }

    #[track_caller]
    fn check_live(&self, trace: &GpuMemTrace, opened: &AllocGroup) {
        let is_inside = |of: &AllocGroup| {
            let is_in_path = self.paths[&opened.event].iter().any(|path| of.path.starts_with(path));
            of.owners.ends_with(&opened.owners) && of.event > opened.event && is_in_path
        };
        let inside = self.blocks.iter().filter(|(_, group)| is_inside(group));
        let mut expected: Vec<_> = inside.map(|(block, _)| block.bytes().get()).collect();
        expected.sort_unstable_by(|a, b| b.cmp(a));
        assert_eq!(sizes(&trace.live()), expected, "{opened:?}");
    }
}

/// One thread of a random history. What it does and what it writes down of it are one step: others see both or neither.
fn live_a_life(
    number: u64,
    seed: u64,
    gpu: &SimGpu,
    log: &Mutex<Log>,
    handles: &Mutex<Vec<(AllocGroup, ScopeHandle)>>,
) {
    const STEPS: usize = 400;
    gpu.make_current();
    let mut random = Random::new(seed.wrapping_mul(1000) + number);
    let mut places: Vec<Place> = Vec::new();
    for _ in 0..STEPS {
        let what = random.below(100_u32);
        let mut log = log.lock().expect("no thread has panicked");
        let (path, owners) = places
            .last()
            .map_or_else(|| (Vec::new(), vec![number]), |place| (place.path.clone(), place.owners.clone()));
        match what {
            0..35 => {
                let bytes = Bytes::new(1 + random.below(5_000));
                let block = if what.is_multiple_of(2) { gpu.alloc(bytes) } else { gpu.alloc_async(bytes) };
                log.alloc(block.expect("the device has room"), &path, &owners);
            }
            35..65 if !log.blocks.is_empty() => {
                let at = random.below(log.blocks.len());
                drop(log.free(at));
            }
            65..78 if places.len() < 6 => {
                let name = ["a", "b", "c"][random.below(3)];
                let trace = GpuMemTrace::with_ctx(name);
                let path: Vec<_> = path.into_iter().chain([name.to_owned()]).collect();
                let opened = AllocGroup { event: log.opened(&path), path: path.clone(), owners: owners.clone() };
                handles.lock().expect("no thread has panicked").push((opened.clone(), trace.handle()));
                places.push(Place { path, owners, of: Guard::Own(Box::new(trace), opened) });
            }
            78..84 if places.len() < 6 => {
                let handles = handles.lock().expect("no thread has panicked");
                let Some((opened, handle)) = handles.get(random.below(handles.len())) else { continue };
                let entered = handle.enter();
                // Of one that is closed nothing is entered.
                if let Some((path, _)) = log.open.get(&opened.event) {
                    let of = Guard::Handed(entered, opened.event);
                    let is_counted = opened.owners.contains(&number);
                    let own = (!is_counted).then_some(number);
                    let owners = own.into_iter().chain(opened.owners.iter().copied()).collect();
                    places.push(Place { path: path.clone(), owners, of });
                }
            }
            84..87 if !places.is_empty() => {
                let at = random.below(places.len());
                if matches!(places[at].of, Guard::Own(..)) {
                    log.close_early(&mut places, at);
                }
            }
            87..96 => {
                if let Some(place) = places.pop() {
                    log.left(&place);
                    drop(place);
                }
            }
            96 => log.check(gpu),
            97 => log.check_breakdown(gpu),
            _ => {
                for place in &places {
                    if let Guard::Own(trace, opened) = &place.of {
                        log.check_live(trace, opened);
                    }
                }
            }
        }
    }
    // One by one, as the log has it.
    while let Some(place) = places.pop() {
        let mut log = log.lock().expect("no thread has panicked");
        log.left(&place);
        drop(place);
    }
}

#[test]
fn random_histories_of_threads_are_counted_to_the_byte() {
    for seed in 0..8 {
        let gpu = simulated_gpu();
        let (log, handles) = (Mutex::new(Log::default()), Mutex::new(Vec::new()));
        thread::scope(|threads| {
            for number in 1..=4 {
                let (gpu, log, handles) = (&gpu, &log, &handles);
                threads.spawn(move || live_a_life(number, seed, gpu, log, handles));
            }
        });
        let mut log = log.into_inner().expect("no thread has panicked");
        log.check(&gpu);
        log.check_breakdown(&gpu);
        while !log.blocks.is_empty() {
            drop(log.free(0));
        }
        log.check(&gpu);
        assert!(log.scopes.values().all(|figures| figures.used == 0));
    }
}
