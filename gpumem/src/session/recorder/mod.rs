//! `GPUMEM_CAPTURE`: a recording of the session in a file.
//!
//! The inbox puts a copy of each event into a ring, under its lock. A separate thread empties the ring, adds definitions from the tables
//! of the session, and writes. Events that do not fit into the ring are counted in the recording; the program never waits.
//!
//! The ring is in shared memory, which outlives the process. If the process is killed, the ring still contains the unwritten
//! events, and `recording::recover` adds them to the recording.

mod build_id;
mod compiled;
mod definitions;
mod modules;
mod state;
#[cfg(all(test, feature = "sim"))]
mod tests;
mod thread;

use std::{
    hash::{BuildHasher, RandomState},
    io,
    panic::Location,
    path::Path,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use gpumem_recording::{CallsiteDefinition, Item, PoolDefinition, RingDefinition, Writer, lines_for, ring};

pub(super) use self::state::{EventTap, Recorder};
pub use self::thread::Keep;
use self::{definitions::Definer, modules::EarlyDefinitions, state::Running};
#[cfg(all(feature = "cuda", target_os = "linux"))]
use super::ranges;
use super::{Notice, Session};
use crate::{
    cgroup,
    model::{Bytes, CallsiteId, Device, EventKind, MemKind, PoolId, StackId},
    own_threads, process,
    recording_file::RecordingFile,
    ring_memory::RingPages,
    source,
};

/// The number of slots of the ring, of 64 bytes each; an allocation or a free takes one. Enough for about 10 ms of a program that does
/// nothing else.
const SLOTS: usize = 1 << 17;

/// If less memory is available, the ring has fewer slots, in private memory: the kernel might kill the program instead of failing the
/// request.
const NEEDS: u64 = 64 << 20;
const FEW_SLOTS: usize = SLOTS >> 4;

/// The longest wait for the recording at exit. Large programs have much debug information to read.
const AT_THE_END: Duration = Duration::from_secs(10);

impl Session {
    /// Starts the recording that `GPUMEM_CAPTURE` requests, before the first event.
    pub(super) fn start_recording(&'static self) {
        let Some(path) = self.settings.recording() else { return };
        match self.try_record(&path, Keep::All) {
            Ok(()) => {
                #[cfg(all(feature = "cuda", target_os = "linux"))]
                ranges::recording_started();
            }
            Err(why) => {
                let text = format_args!("cannot record to {}: {why}; the program is not recorded", path.display());
                self.notify(Notice::Recording, &text);
            }
        }
    }

    pub(super) fn try_record(&'static self, path: &Path, keep: Keep) -> io::Result<()> {
        let mut writer = Writer::new(RecordingFile::create(path, path)?)?;
        let has_room = cgroup::memory_left().is_none_or(|left| left >= NEEDS);
        let lines = lines_for(if has_room { SLOTS } else { FEW_SLOTS });
        // Events from a ring could not be added to a recording of peaks.
        let memory = if has_room && keep != Keep::Peaks { RingPages::new(lines) } else { RingPages::private(lines) }?;
        let pid = std::process::id();
        let place = RingDefinition { segment: memory.segment(), recording: RandomState::new().hash_one(pid) | 1 };
        // Written immediately, so that the recording of a killed process contains it.
        writer.write(&Definer::new(self).process())?;
        writer.write(&Item::Ring(place))?;
        writer.flush()?;
        let (to, from) = ring(memory, place.recording, writer.written().bytes);
        if has_room {
            from.memory().fetch();
        }
        let early = EarlyDefinitions::new(to.definitions());
        let stop = Arc::new(AtomicBool::new(false));
        let (done, is_done) = mpsc::sync_channel(1);
        let thread = {
            let (stop, path) = (Arc::clone(&stop), path.to_owned());
            let run = move || {
                thread::run(self, from, writer, (&path, keep, place), &stop);
                let _ = done.send(());
            };
            own_threads::spawn("recorder", run)?.thread().clone()
        };
        *self.recorder.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(Running { stop, thread, is_done });
        self.define_stacks_in(early);
        self.inbox.with_tap(|tap| {
            tap.0 = Some(Box::new(to));
            (true, ())
        });
        self.recorder.is_on.store(true, Relaxed);
        Ok(())
    }

    /// Ends the recording, if there is one. The file then contains all events so far.
    pub(super) fn end_recording(&self) {
        if process::is_forked() {
            return;
        }
        let running = self.recorder.running.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Running { stop, thread, is_done }) = running else { return };
        #[cfg(all(feature = "cuda", target_os = "linux"))]
        ranges::recording_ended();
        self.post_displaced();
        source::compare_driver_memory();
        self.stop_tap();
        stop.store(true, Relaxed);
        thread.unpark();
        let _ = is_done.recv_timeout(AT_THE_END);
    }

    /// Makes each new stack's definition precede its first event in the ring, and writes the definitions of known stacks.
    fn define_stacks_in(&self, early: EarlyDefinitions) {
        let known = self.stacks.all_before(|| {
            *self.recorder.early() = Some(early);
            self.recorder.defines_stacks.store(true, Relaxed);
        });
        for (id, stack) in known {
            self.recorder.define_early(id, &self.recorder.modules.resolve(&stack));
        }
    }

    /// Like [`number_stack`](Self::number_stack), for a session that is recorded.
    #[cold]
    pub(super) fn number_and_define(&self, addresses: &[usize]) -> StackId {
        if let Some(known) = self.stacks.find(addresses) {
            return known;
        }
        // The lock of the table is not held here: another thread may hold the lock of the loader's list while it waits for the table.
        let resolved = self.recorder.modules.resolve(addresses);
        self.stacks.number(addresses, |id| self.recorder.define_early(id, &resolved))
    }

    /// Returns a stack id that identifies the whole file. The same file has the same id for all calls, and another file at the same
    /// address has another id.
    #[cold]
    pub(super) fn number_file(&self, address: usize) -> StackId {
        self.recorder.modules.number_of(address).map_or(StackId::NONE, |file| self.number_stack(&[file]))
    }

    /// Stops recording.
    fn stop_tap(&self) {
        self.recorder.is_on.store(false, Relaxed);
        self.recorder.defines_stacks.store(false, Relaxed);
        *self.recorder.early() = None;
        // The recording is dropped after the lock, because it is large.
        if let Some(Some(ring)) = self.inbox.with_tap(|tap| (false, tap.0.take())) {
            self.recorder.missed_last.store(ring.missed(), Relaxed);
        }
    }

    /// Puts an item into the ring, after all events so far.
    pub(super) fn record_item(&self, item: impl FnOnce() -> Item) {
        if self.recorder.is_on.load(Relaxed) {
            let item = item();
            self.inbox.with_tap(|tap| {
                if let Some(ring) = &mut tap.0 {
                    ring.item(&item);
                }
                (tap.0.is_some(), ())
            });
        }
    }

    /// Returns whether this process is being recorded.
    pub(in crate::session) fn is_recorded(&self) -> bool {
        self.recorder.is_on.load(Relaxed) && !process::is_forked()
    }

    /// Records a rejected allocation of the calling thread.
    pub(super) fn record_rejected(&self, device: Option<Device>, bytes: Bytes, kind: MemKind) {
        if self.recorder.is_on.load(Relaxed) && !process::is_forked() {
            let stack = self.rejection_stack();
            self.inbox.post(&EventKind::Rejected { device, bytes, kind, stack });
        }
    }

    /// Records a mark of the program.
    pub(super) fn record_mark(&self, name: &str, location: &'static Location<'static>) {
        if self.is_recorded() {
            let callsite = self.number_callsite(Some(name), location.into(), None).id;
            self.inbox.post(&EventKind::Mark { callsite });
        }
    }

    /// Records the definition of a new callsite. The writing thread defines it as well, but only when it writes the first scope; the
    /// program may be killed before.
    pub(super) fn record_callsite(&self, id: CallsiteId) {
        self.record_item(|| Item::Callsite(self.callsite_definition(id)));
    }

    /// Records the name of a new pool, like [`record_callsite`](Self::record_callsite).
    pub(super) fn record_pool(&self, id: PoolId) {
        self.record_item(|| self.pool_definition(id));
    }

    fn pool_definition(&self, pool: PoolId) -> Item {
        Item::Pool(PoolDefinition { pool, name: self.pools.name(pool) })
    }

    fn callsite_definition(&self, id: CallsiteId) -> CallsiteDefinition {
        let mut definition = self.callsites.defined(id).definition(id);
        if self.recorder.is_injected() {
            // The location is in our library, not in the program.
            (definition.file, definition.line, definition.column) = (String::new(), 0, 0);
        }
        definition
    }
}
