//! Compares the fast path with the general path.

use super::*;

/// A ledger that uses the fast path if possible, and one that always uses the general path. They get the same events and
/// must give the same results.
#[derive(Default)]
struct Twins {
    fast: Ledger,
    general: Ledger,
    number: u64,
    /// The number of events that used the fast path.
    fast_events: usize,
}

impl Twins {
    fn post(&mut self, kind: &EventKind, thread: ThreadId) {
        self.number += 1;
        let number = self.number;
        let event = Event { number, time: Duration::from_millis(100 * number), thread, kind };
        match *kind {
            EventKind::Alloc { key, block } => {
                self.fast.set_time(event.time);
                self.general.set_time(event.time);
                self.general.alloc(key, block.bytes, block.tag(), number, thread);
                if self.fast.alloc_like_newest(key, block.bytes, block.tag(), number, thread) {
                    self.fast_events += 1;
                } else {
                    self.fast.alloc(key, block.bytes, block.tag(), number, thread);
                }
            }
            EventKind::Free { key, block } => {
                let answer = self.general.free(key, block.as_ref(), thread);
                if self.fast.free_like_newest(key, thread) {
                    self.fast_events += 1;
                    assert_eq!(answer, Answer::Applied);
                } else {
                    assert_eq!(answer, self.fast.free(key, block.as_ref(), thread));
                }
            }
            _ => assert_eq!(self.fast.apply(&event), self.general.apply(&event)),
        }
        assert_eq!(self.fast.last_trace(), self.general.last_trace(), "event {number}");
    }

    fn compare<T: PartialEq + std::fmt::Debug>(&mut self, read: impl Fn(&mut Ledger) -> T) {
        assert_eq!(read(&mut self.fast), read(&mut self.general), "event {}", self.number);
    }

    fn compare_all(&mut self) {
        self.compare(|ledger| (ledger.counts(), ledger.stats()));
        self.compare(Ledger::nodes);
        self.compare(Ledger::groups);
        self.compare(|ledger| {
            let mut blocks: Vec<_> = (0..BLOCK_PARTS).flat_map(|part| ledger.blocks(part, None)).collect();
            blocks.sort_by_key(|block| (block.number, block.key.get()));
            blocks
        });
    }

    fn compare_peak(&mut self, kept: ScopeId) {
        self.compare(|ledger| ledger.kept_peak(kept));
        self.compare(|ledger| (0..).map_while(|part| ledger.peak_part(kept, part)).collect::<Vec<_>>());
        self.compare(|ledger| ledger.release_peak(kept));
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "it is a list of possible events")]
fn the_fast_path_gives_the_figures_of_the_general_path() {
    for seed in 1..24_u64 {
        let mut numbers = numbers(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mut random = |below: usize| usize::try_from(numbers(below as u64)).unwrap();
        let mut twins = Twins::default();
        let (mut thread, mut of) =
            (ThreadId(1), Block::new(Device { family: Family::Cuda, ordinal: 0 }, Bytes::ZERO, MemKind::Pool));
        // Some histories have neither thread-local scopes nor losses. In these, most events use the fast path.
        let (has_locals, has_losses) = (seed % 3 == 0, seed % 2 == 0);
        let mut scopes: Vec<(ScopeId, bool)> = Vec::new();
        for step in 0..3000_u64 {
            if random(12) == 0 {
                thread = ThreadId(1 + u32::try_from(random(3)).unwrap());
                let device = Device { family: Family::Cuda, ordinal: u32::from(random(8) == 0) };
                let kind = [MemKind::Pool, MemKind::Device, MemKind::PinnedHost][random(3)];
                let context = u8::from(kind == MemKind::Device);
                let stack = StackId(u32::try_from(random(2)).unwrap());
                of = Block { context, stack, ..Block::new(device, Bytes::ZERO, kind) };
            }
            // Some keys have the same slot in the front cache.
            let key = Key::new(Space::Address, 512 * (1 + random(400) as u64));
            let scope = scopes.get(random(scopes.len().max(1))).copied();
            let id = ScopeId(step);
            match random(200) {
                0..90 => {
                    let block = Block { bytes: Bytes::new(random(1000) as u64), ..of };
                    twins.post(&EventKind::Alloc { key, block }, thread);
                }
                90..170 => {
                    let older = (random(40) == 0).then_some(Block { bytes: Bytes::new(7), ..of });
                    twins.post(&EventKind::Free { key, block: older }, thread);
                }
                170..175 => twins.post(&EventKind::FreeFailed, thread),
                175 => twins.post(&EventKind::Untracked, thread),
                176 => twins.post(&EventKind::Shrink { key, bytes: Bytes::new(1) }, thread),
                177 if random(4) == 0 => twins.post(&EventKind::ContextDestroyed { context: 1 }, thread),
                178 if has_losses => twins.post(&EventKind::Lost { count: 1 }, thread),
                179 if has_losses => {
                    let now = random(2) as u64;
                    twins.post(&EventKind::Displaced { now, more: now }, thread);
                }
                180..184 => {
                    let spec = ScopeSpec {
                        counts: match random(6) {
                            0 | 1 if has_locals => Counted::Own,
                            2 if has_locals => Counted::Task,
                            3 => Counted::AllThreads,
                            _ => Counted::OwnAndUnscoped,
                        },
                        callsite: CallsiteId(2 + u32::try_from(random(3)).unwrap()),
                        at_peak: random(2) == 0,
                        ..ScopeSpec::exact(of.device)
                    };
                    twins.post(&EventKind::Open { scope: id, spec }, thread);
                    scopes.push((id, spec.at_peak));
                }
                184 => {
                    twins.fast.begin_thread(thread);
                    twins.general.begin_thread(thread);
                }
                185..194 => {
                    let Some((scope, at_peak)) = scope else { continue };
                    match random(7) {
                        0 => twins.post(&EventKind::Enter { scope }, thread),
                        1 => twins.post(&EventKind::Leave { scope }, thread),
                        2 => twins.post(&EventKind::Read { scope }, thread),
                        3 => twins.post(&EventKind::Reset { scope }, thread),
                        4 => twins.post(&EventKind::ResetKeepingPeak { scope }, thread),
                        5 => {
                            twins.compare(|ledger| ledger.keep_peak(scope, id));
                            twins.compare_peak(id);
                        }
                        _ => {
                            twins.post(&EventKind::Close { scope }, thread);
                            scopes.retain(|(open, _)| *open != scope);
                            if at_peak {
                                twins.compare_peak(scope);
                            }
                        }
                    }
                }
                194 => {
                    twins.compare(|ledger| ledger.keep_device_peak(of.device, id, false));
                    twins.compare_peak(id);
                }
                195..197 => twins.compare_all(),
                _ => {}
            }
        }
        twins.compare_all();
        if !(has_locals || has_losses) {
            assert!(twins.fast_events > 300, "seed {seed}: {} events", twins.fast_events);
        }
    }
}
