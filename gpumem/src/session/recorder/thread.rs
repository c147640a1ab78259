//! The thread that writes a recording.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread::park_timeout,
    time::{Duration, Instant},
};

use gpumem_core::model::ThreadId;
use gpumem_recording::{
    ClockPair, Finished, Item, Part, RingDefinition, RingReader, WHOLE_FILE, Writer, new_path, old_path,
};

use super::definitions::Definer;
use crate::{
    clock, process,
    recording_file::RecordingFile,
    report::counted,
    ring_memory::RingPages,
    session::{Notice, Session},
    source,
};

/// The interval at which the ring is emptied.
const EVERY: Duration = Duration::from_millis(4);

/// The longest time until events are in the file.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// The interval at which the clocks are compared.
const CLOCK_EVERY: Duration = Duration::from_secs(1);

/// The interval at which the recorder checks which threads of the program have ended.
const THREADS_EVERY: Duration = Duration::from_millis(250);

/// The interval at which a recording of the peaks is written again while they rise.
const PEAKS_EVERY: Duration = Duration::from_secs(1);

/// The part of the events that the recording keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The recording keeps all events.
    All,
    /// The recording keeps only the latest events. The value is the approximate largest size in bytes.
    Latest(u64),
    /// The recording keeps the blocks that were live at the peak of each device and at the end.
    Peaks,
}

/// Writes until it is told to stop, or until a write fails.
pub(super) fn run(
    session: &'static Session,
    ring: RingReader<RingPages>,
    writer: Writer<RecordingFile>,
    (path, keep, place): (&Path, Keep, RingDefinition),
    stop: &AtomicBool,
) {
    let mut recorder = Recorder {
        session,
        ring,
        place,
        writer,
        definer: Definer::new(session),
        has_defined: false,
        missed: 0,
        path: path.to_owned(),
        keep,
        part: match keep {
            Keep::All => None,
            Keep::Latest(_) => Some(Part::latest()),
            Keep::Peaks => Some(Part::peaks()),
        },
        threads: HashMap::new(),
        first_clock: None,
        started_with: 0,
    };
    source::open_nvml();
    let is_written = recorder.run(stop);
    // All items of the ring are now in the recording, or cannot be written.
    recorder.ring.memory().discard();
    if recorder.missed > 0 {
        let (missed, path) = (counted(recorder.missed, "event", "events"), path.display());
        let text = format_args!("the recording {path} lacks {missed}: more came than could be written");
        session.notify(Notice::Missed, &text);
    }
    if let Err(error) = is_written {
        session.stop_tap();
        let text = format_args!(
            "cannot write the recording {}: {error}; it ends here, so record to another file",
            path.display()
        );
        session.notify(Notice::Recording, &text);
    }
}

struct Recorder {
    session: &'static Session,
    ring: RingReader<RingPages>,
    /// The place of the ring.
    place: RingDefinition,
    writer: Writer<RecordingFile>,
    definer: Definer,
    /// True if definitions were written since the last flush.
    has_defined: bool,
    /// The number of items that did not fit into the ring.
    missed: u64,
    path: PathBuf,
    keep: Keep,
    /// The kept part of earlier events, if not all are kept.
    part: Option<Part>,
    /// The definitions, if not all events are kept.
    threads: HashMap<ThreadId, Item>,
    first_clock: Option<ClockPair>,
    /// The size of the file after the kept part of earlier events was written.
    started_with: u64,
}

impl Recorder {
    fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        self.clock()?;
        let (mut flushed, mut compared, mut rewritten) = (Instant::now(), Instant::now(), Instant::now());
        let mut looked = Instant::now();
        loop {
            if looked.elapsed() >= THREADS_EVERY {
                looked = Instant::now();
                process::exit_without_program();
            }
            // Read first, because the ring must be emptied once more after the stop.
            let is_last = stop.load(Relaxed);
            source::read_pools();
            self.empty_ring()?;
            if is_last {
                break;
            }
            if compared.elapsed() >= CLOCK_EVERY {
                compared = Instant::now();
                self.clock()?;
                source::compare_driver_memory();
            }
            if self.keep == Keep::Peaks {
                if rewritten.elapsed() >= PEAKS_EVERY {
                    self.rewrite()?;
                    // The interval counts from the end of slow work.
                    rewritten = Instant::now();
                }
                park_timeout(EVERY);
                continue;
            }
            // If the process is killed, the events in the ring survive, but their definitions only if they are in the file.
            if self.has_defined || flushed.elapsed() >= FLUSH_EVERY {
                flushed = Instant::now();
                self.flush()?;
            }
            park_timeout(EVERY);
        }
        let missed = self.session.recorder.missed_last.load(Relaxed);
        if missed > 0 {
            self.missed += missed;
            self.writer.write(&Item::Missed(missed))?;
        }
        if self.keep == Keep::Peaks {
            self.rewrite()?;
        }
        // Even without allocations, this shows that they would have been recorded.
        self.definer.interception(&mut |definition| self.writer.write(&definition))?;
        self.clock()?;
        // Recorded events are safe before debug information is read.
        self.flush()?;
        if !self.session.recorder.is_injected() {
            for symbols in self.definer.symbols() {
                self.writer.write(&symbols)?;
            }
        }
        self.writer.write(&Item::Finished(Finished::default()))?;
        self.writer.flush()
    }

    fn empty_ring(&mut self) -> io::Result<()> {
        while let Some(mut item) = self.ring.next() {
            if let Some(part) = &mut self.part {
                match &item {
                    Item::Event(event) => part.apply(event),
                    Item::Thread(thread) => _ = self.threads.insert(thread.thread, item.clone()),
                    Item::ThreadReused(thread) => part.start_thread(*thread),
                    Item::Missed(count) => part.miss(*count),
                    _ => {}
                }
            }
            if let Item::Missed(count) = item {
                self.missed += count;
            }
            if self.keep == Keep::Peaks {
                self.ring.release(0);
                continue;
            }
            self.define(&mut item)?;
            match &item {
                Item::Event(event) => self.writer.write_event(event)?,
                item => self.writer.write(item)?,
            }
            let (held, slots) = self.ring.held();
            if self.writer.is_flushed() || held > slots / 4 {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn define(&mut self, item: &mut Item) -> io::Result<()> {
        self.definer.define(item, |definition| {
            self.has_defined = true;
            self.writer.write(&definition)
        })
    }

    /// Flushes the file, and then releases the slots of the items that it contains.
    fn flush(&mut self) -> io::Result<()> {
        self.has_defined = false;
        self.writer.flush()?;
        self.ring.release(self.writer.written().bytes);
        match self.keep {
            // Leave space for events even if live blocks take much of the file.
            Keep::Latest(limit) if self.writer.written().bytes > (limit / 2).max(self.started_with + limit / 4) => {
                self.restart()
            }
            _ => Ok(()),
        }
    }

    /// Makes the file the older part of the recording, replacing the previous one, and starts a new file with the live blocks.
    #[cold]
    fn restart(&mut self) -> io::Result<()> {
        self.clock()?;
        self.writer.flush()?;
        let path = self.path.clone();
        self.write_part()?;
        // If the process is killed here, the ring must not be added to the wrong file. Both contain everything that is not in the
        // ring.
        self.ring.set_recorded(WHOLE_FILE);
        let old = old_path(&path);
        let _ = fs::remove_file(&old);
        // The process may also be killed here. Therefore the recording keeps its name until the new file gets it, if the file system
        // supports links.
        if fs::hard_link(&path, &old).is_err() {
            fs::rename(&path, &old)?;
        }
        fs::rename(new_path(&path), &path)?;
        self.ring.set_recorded(self.writer.written().bytes);
        Ok(())
    }

    /// Writes the recording of the peaks in place of the previous one.
    fn rewrite(&mut self) -> io::Result<()> {
        self.write_part()?;
        fs::rename(new_path(&self.path), &self.path)
    }

    /// Starts a new file with the kept items, and flushes it.
    fn write_part(&mut self) -> io::Result<()> {
        let Some(part) = &self.part else { return Ok(()) };
        let (definition, items) = (part.definition(), part.items());
        self.writer = Writer::new(RecordingFile::create(&new_path(&self.path), &self.path)?)?;
        self.definer = Definer::new(self.session);
        self.writer.write(&self.definer.process())?;
        self.writer.write(&Item::Ring(self.place))?;
        self.writer.write(&Item::Part(definition))?;
        if let Some(first) = self.first_clock {
            self.writer.write(&Item::Clock(first))?;
        }
        self.clock()?;
        if self.missed > 0 {
            self.writer.write(&Item::Missed(self.missed))?;
        }
        for mut thread in self.threads.clone().into_values() {
            self.define(&mut thread)?;
            self.writer.write(&thread)?;
        }
        for mut item in items {
            self.define(&mut item)?;
            match &item {
                Item::Event(event) => self.writer.write_event(event)?,
                item => self.writer.write(item)?,
            }
        }
        self.has_defined = false;
        self.writer.flush()?;
        self.started_with = self.writer.written().bytes;
        Ok(())
    }

    /// Compares the counter of the processor with the clock of the session.
    fn clock(&mut self) -> io::Result<()> {
        let pair = ClockPair { ticks: clock::ticks(), time: self.session.inbox.age() };
        self.first_clock.get_or_insert(pair);
        self.writer.write(&Item::Clock(pair))
    }
}
