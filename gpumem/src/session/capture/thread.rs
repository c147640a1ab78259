//! The thread that writes a recording.

use std::{
    fs::{self, File},
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread::park_timeout,
    time::{Duration, Instant},
};

use gpumem_core::capture::{ClockPair, Item, RingReader, Writer, ring_path};

use super::definitions::Definer;
use crate::{
    session::{Notice, Session},
    sys::{clock, ring_file::RingFile},
};

/// The ring is emptied so often.
const EVERY: Duration = Duration::from_millis(4);

/// What was recorded is in the file after this time at the latest.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// The clocks are compared so often.
const CLOCK_EVERY: Duration = Duration::from_secs(1);

/// Writes until it is to stop, or the file cannot be written.
pub(super) fn run(
    session: &'static Session,
    ring: RingReader<RingFile>,
    writer: Writer<File>,
    path: &Path,
    stop: &AtomicBool,
) {
    let mut recorder =
        Recorder { session, ring, writer, definer: Definer::new(session), has_defined: false, missed: 0 };
    let is_written = recorder.run(stop);
    // All that was in the ring is in the recording now, or cannot be written.
    let _ = fs::remove_file(ring_path(path));
    if recorder.missed > 0 {
        let (missed, path) = (recorder.missed, path.display());
        let text =
            format_args!("the recording {path} lacks {missed} events: they came faster than they could be written");
        session.notify(Notice::Missed, &text);
    }
    if let Err(error) = is_written {
        session.stop_tap();
        let text = format_args!("cannot write the recording {}: {error}; it ends here", path.display());
        session.notify(Notice::Capture, &text);
    }
}

struct Recorder {
    session: &'static Session,
    ring: RingReader<RingFile>,
    writer: Writer<File>,
    definer: Definer,
    /// Definitions were written since the last flush.
    has_defined: bool,
    /// What the ring had no room for.
    missed: u64,
}

impl Recorder {
    fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        self.clock()?;
        let (mut flushed, mut compared) = (Instant::now(), Instant::now());
        loop {
            // First: nothing comes after it.
            let is_last = stop.load(Relaxed);
            self.empty_ring()?;
            if is_last {
                break;
            }
            if compared.elapsed() >= CLOCK_EVERY {
                compared = Instant::now();
                self.clock()?;
            }
            // If the process is killed, the events of the ring are known. What they mean is known only if it is in the file.
            if self.has_defined || flushed.elapsed() >= FLUSH_EVERY {
                flushed = Instant::now();
                self.flush()?;
            }
            park_timeout(EVERY);
        }
        let missed = self.session.capture.missed_last.load(Relaxed);
        if missed > 0 {
            self.missed += missed;
            self.writer.write(&Item::Missed(missed))?;
        }
        self.clock()?;
        // What was recorded is safe before debug information is read.
        self.flush()?;
        if self.session.capture.is_injected() {
            return Ok(());
        }
        for symbols in self.definer.symbols() {
            self.writer.write(&symbols)?;
        }
        self.writer.flush()
    }

    fn empty_ring(&mut self) -> io::Result<()> {
        while let Some(mut item) = self.ring.next() {
            self.definer.define(&mut item, |definition| {
                self.has_defined = true;
                self.writer.write(&definition)
            })?;
            match &item {
                Item::Event(event) => self.writer.write_event(event)?,
                Item::Missed(count) => {
                    self.missed += count;
                    self.writer.write(&item)?;
                }
                item => self.writer.write(item)?,
            }
            let (held, slots) = self.ring.held();
            if self.writer.is_flushed() || held > slots / 4 {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// What was read of the ring is in the file now, so its slots are given free.
    fn flush(&mut self) -> io::Result<()> {
        self.has_defined = false;
        self.writer.flush()?;
        self.ring.release(self.writer.written().bytes);
        Ok(())
    }

    /// Compares the counter of the processor with the clock of the session.
    fn clock(&mut self) -> io::Result<()> {
        let pair = ClockPair { ticks: clock::ticks(), time: self.session.inbox.age() };
        self.writer.write(&Item::Clock(pair))
    }
}
