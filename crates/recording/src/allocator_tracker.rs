//! Turns the events of PyTorch's allocator on one device into calls of a pool.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpumem_core::model::{Bytes, TensorPool};

use crate::AllocatorSettings;

/// An event of the allocator, with an address and a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrackedEvent {
    /// A block was allocated. The size is the requested one.
    Alloc,
    /// A block was freed. `memory_allocated()` falls at this event.
    FreeRequested,
    /// No other stream uses the block any more, so it can be allocated again.
    FreeCompleted,
    /// A segment was allocated from the driver.
    SegmentAlloc,
    /// A segment will be released to the driver after this event.
    SegmentFree,
    /// An expandable segment has grown.
    SegmentMap,
    /// An expandable segment has shrunk.
    SegmentUnmap,
}

/// A part of the allocator's memory at one moment. It comes with an address and a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// A segment from the driver.
    Segment,
    /// A part of an expandable segment.
    Expandable,
    /// A block that a tensor uses.
    Block,
    /// A block that was freed, but that another stream may still use.
    Awaiting,
}

/// Tracks the allocator on one device.
#[derive(Debug)]
pub struct AllocatorTracker<P> {
    settings: AllocatorSettings,
    state: Mutex<State<P>>,
}

/// The state of the allocator. The addresses are needed for the size of a block: PyTorch rounds the requested size up, and a block of the
/// large pool also gets the rest of a segment if less than 1 MiB is left.
#[derive(Debug)]
struct State<P> {
    /// The pool. `None` before the first step of the start.
    pool: Option<P>,
    /// The bytes that the allocator holds from the driver.
    reserved: u64,
    /// The sizes of the segments, by address, without expandable ones.
    segments: BTreeMap<u64, u64>,
    /// The start addresses of the blocks of the large pool.
    large: BTreeSet<u64>,
    /// The current step of the start. `None` after all blocks that existed before the first event are known.
    initial: Option<InitialState>,
}

/// A step of the start. It notes the blocks that occur in events: their state comes from the events, and not from the snapshot.
#[derive(Debug, Default)]
struct InitialState {
    /// The blocks that occurred in events, and whether a tensor uses them.
    named: HashMap<u64, bool>,
    /// The number of events about segments.
    segment_events: u64,
}

impl<P> Default for State<P> {
    fn default() -> Self {
        Self { pool: None, reserved: 0, segments: BTreeMap::new(), large: BTreeSet::new(), initial: None }
    }
}

impl<P: TensorPool> AllocatorTracker<P> {
    /// Creates a tracker that ignores events until [`start`](Self::start) is called.
    pub fn new(settings: AllocatorSettings) -> Self {
        Self { settings, state: Mutex::default() }
    }

    /// Starts to handle events. Does nothing if the tracker has already started.
    pub fn start(&self) {
        let state = &mut *self.state();
        if state.pool.is_none() {
            *state = State { initial: Some(InitialState::default()), ..State::default() };
        }
    }

    /// Drops the pool and stops handling events.
    pub fn stop(&self) {
        *self.state() = State::default();
    }

    /// Handles an event. PyTorch holds the lock of the device, so the events of one device arrive one after the other.
    pub fn event(&self, event: TrackedEvent, address: u64, bytes: u64) {
        let state = &mut *self.state();
        if state.pool.is_none() && state.initial.is_none() {
            return;
        }
        let is_large = bytes > AllocatorSettings::SMALL;
        match event {
            TrackedEvent::Alloc => {
                let size = state.size_of_new(&self.settings, address, bytes);
                if is_large {
                    state.large.insert(address);
                }
                if let Some(initial) = &mut state.initial {
                    initial.named.insert(address, true);
                }
                if let Some(pool) = &state.pool {
                    pool.allocated(address, Bytes::new(size));
                }
            }
            TrackedEvent::FreeRequested => {
                let is_known = match &mut state.initial {
                    Some(initial) => {
                        if is_large {
                            state.large.insert(address);
                        }
                        initial.named.insert(address, false) == Some(true)
                    }
                    None => true,
                };
                if let Some(pool) = state.pool.as_ref().filter(|_| is_known) {
                    pool.freed(address);
                }
            }
            TrackedEvent::FreeCompleted => {
                if is_large {
                    state.large.remove(&address);
                }
                if let Some(initial) = &mut state.initial {
                    initial.named.insert(address, false);
                }
            }
            TrackedEvent::SegmentAlloc | TrackedEvent::SegmentMap => {
                if event == TrackedEvent::SegmentAlloc {
                    state.segments.insert(address, bytes);
                }
                state.reserve(state.reserved.saturating_add(bytes));
            }
            TrackedEvent::SegmentFree | TrackedEvent::SegmentUnmap => {
                if event == TrackedEvent::SegmentFree {
                    state.segments.remove(&address);
                }
                state.reserve(state.reserved.saturating_sub(bytes));
            }
        }
    }

    /// Returns the number of segment events since the last step of the start, for [`settle`](Self::settle). `None` if no step is left.
    pub fn segment_events(&self) -> Option<u64> {
        self.state().initial.as_ref().map(|initial| initial.segment_events)
    }

    /// Takes the next step of the start. `held` is the memory of the allocator, read after `segment_events` was called. Blocks that
    /// occurred in events have the state that the events give them. Does nothing if segments have changed since then; the caller must read
    /// the allocator again.
    ///
    /// The first step registers the pool. No event is handled during that, so each segment is either older than the pool, or has an event
    /// after it. The second step counts the blocks that did not occur in a later event.
    ///
    /// # Errors
    /// Returns the error of `register`.
    pub fn settle<E>(
        &self,
        held: &[(Held, u64, u64)],
        segment_events: u64,
        register: impl FnOnce() -> Result<P, E>,
    ) -> Result<(), E> {
        let state = &mut *self.state();
        let Some(InitialState { named, .. }) =
            state.initial.take_if(|initial| initial.segment_events == segment_events)
        else {
            return Ok(());
        };
        state.reserved = 0;
        let is_older = |(held, address, _): &&(Held, u64, u64)| match held {
            Held::Segment | Held::Expandable => true,
            Held::Block | Held::Awaiting => !named.contains_key(address),
        };
        let older: Vec<_> = held.iter().filter(is_older).copied().collect();
        state.hold(&older);
        if let Some(pool) = &state.pool {
            for (_, address, bytes) in older.into_iter().filter(|(held, ..)| *held == Held::Block) {
                pool.allocated(address, Bytes::new(bytes));
            }
            if state.reserved > 0 {
                pool.set_reserved(Bytes::new(state.reserved));
            }
        } else {
            let pool = register()?;
            // This makes the driver's blocks belong to the pool, even those that no tensor uses.
            for (segment, bytes) in &state.segments {
                pool.has_block(*segment, Bytes::new(*bytes));
                pool.allocated(*segment, Bytes::ZERO);
                pool.freed(*segment);
            }
            (state.pool, state.initial) = (Some(pool), Some(InitialState::default()));
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: TensorPool> State<P> {
    fn reserve(&mut self, bytes: u64) {
        self.reserved = bytes;
        if let Some(initial) = &mut self.initial {
            initial.segment_events += 1;
        }
        if let Some(pool) = &self.pool {
            pool.set_reserved(Bytes::new(bytes));
        }
    }

    fn hold(&mut self, held: &[(Held, u64, u64)]) {
        for (held, address, bytes) in held {
            match held {
                Held::Segment => {
                    self.segments.insert(*address, *bytes);
                    self.reserved += bytes;
                }
                Held::Expandable => self.reserved += bytes,
                Held::Block | Held::Awaiting if *bytes > AllocatorSettings::SMALL => _ = self.large.insert(*address),
                Held::Block | Held::Awaiting => {}
            }
        }
    }

    fn size_of_new(&self, settings: &AllocatorSettings, address: u64, requested: u64) -> u64 {
        // Blocks of the small pool, and all blocks in expandable segments, have the requested size, rounded up.
        let rounded = || settings.rounded(requested).unwrap_or(requested);
        if requested <= AllocatorSettings::SMALL {
            return rounded();
        }
        let segment = self.segments.range(..=address).next_back();
        let Some(end) = segment.map(|(start, bytes)| start + bytes).filter(|end| address < *end) else {
            return rounded();
        };
        let end = self.large.range(address + 1..end).next().copied().unwrap_or(end);
        settings.size_in(end - address, requested, false)
    }
}
