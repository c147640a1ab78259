//! The blocks that were allocated and freed between two lines of a program.

use std::{
    fmt::{self, Display},
    io::Write,
    panic::Location,
    time::SystemTime,
};

use crate::session::{Session, current, output::Notice, views};
use crate::{
    derive::tracked_groups,
    error::Result,
    export::Paint,
    ledger::Counts,
    model::{Device, Family, Gauge},
    report::{Content, Groups, SourceLine, Tracked, difference, live},
    source::Devices,
};

/// Prints which blocks of GPU memory were allocated and freed between two lines of a program, as Pytorch-Memory-Utils does for
/// PyTorch.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// use gpumem::{Bytes, track, tracker::MemTracker};
///
/// let mut tracker = MemTracker::new();
/// let weights = (0..7).map(|_| gpu.alloc(Bytes::mib(9))).collect::<Result<Vec<_>, _>>()?;
/// for block in &weights {
///     block.label("conv4.weight", &[512, 512, 3, 3], "f32")?;
/// }
/// track!(tracker);
/// // 13:59:03Z src/main.rs:11 (main)  device 0: 70 MiB used, 63 MiB live
/// //     MiB  blocks
/// //  ───────────────────────────────────────────────────
/// //  +   63  7 × 9 MiB  f32 (512, 512, 3, 3)  conv4.weight
/// # let text = tracker.track().to_string();
/// # assert!(text.ends_with("device 0: 70 MiB used, 63 MiB live"), "{text}");
/// # drop(weights);
/// # Ok::<(), gpumem::Error>(())
/// ```
///
/// The time is UTC. `used` is that of the whole device, with other processes and the CUDA context; `live` is what this process
/// allocated and did not free, of the blocks that are known. Below are the blocks that are more (`+`) and less (`-`) than at the last
/// call, by their [labels](crate::tracker::label); blocks without a label by their size and by where they were allocated: the line, if it is
/// known, and the scopes. The first call lists everything that is known. Blocks that came and went between two calls are not listed.
///
/// Blocks are known if allocations are intercepted, from the process's first trace, tracker or [`subscribe`](crate::intercept::subscribe) on.
/// Where they are not, the total is printed alone, and stderr says once why. Of memory that a framework's own allocator gives
/// out again, the allocator's blocks are seen. A block that gets its label after a call has been there under its size before: it
/// leaves one group for another.
///
/// The device is fixed when the tracker starts. Without a GPU a tracker is off, as a [`GpuMemTrace`](crate::session::GpuMemTrace) is.
pub struct MemTracker {
    session: &'static Session,
    /// None is off.
    device: Option<(Device, &'static dyn Devices)>,
    to: Option<Box<dyn Write + Send>>,
    groups: Groups,
    counts: Counts,
    is_first: bool,
    /// In a recording.
    #[cfg(feature = "capture")]
    number: u64,
}

impl MemTracker {
    /// A tracker of the current device, which prints to where reports go.
    pub fn new() -> Self {
        Self::builder().start_or_off()
    }

    /// A tracker with settings.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// use gpumem::tracker::MemTracker;
    ///
    /// # let path = std::env::temp_dir().join("gpumem-doc-mem_track.txt");
    /// let file = std::fs::File::create(&path)?;
    /// let mut tracker = MemTracker::builder().device(0).to(file).start()?;
    /// tracker.track_with("after load");
    /// # assert!(std::fs::read_to_string(&path)?.contains(" (after load)"));
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn builder() -> MemTrackerBuilder {
        MemTrackerBuilder { device: None, to: None }
    }

    /// Prints the line that calls it, how much is in use, and which blocks came and went since the last call. What is returned
    /// is the same as data.
    #[track_caller]
    pub fn track(&mut self) -> Tracked {
        self.track_now(Location::caller(), None)
    }

    /// As [`track`](Self::track), with a word on the line; [`track!`](crate::track) gives the name of the function.
    #[track_caller]
    pub fn track_with(&mut self, word: impl Display) -> Tracked {
        self.track_now(Location::caller(), Some(word.to_string()))
    }

    fn track_now(&mut self, at: impl Into<SourceLine>, word: Option<String>) -> Tracked {
        let Some((device, of)) = self.device.filter(|_| crate::session::alive().is_ok()) else {
            let nothing = Device { family: Family::Cuda, ordinal: 0 };
            return Tracked::at(SystemTime::now(), at.into(), word, self.device.map_or(nothing, |(device, _)| device));
        };
        let mut tracked = Tracked::at(SystemTime::now(), at.into(), word, device);
        let session = self.session;
        tracked.is_first = std::mem::replace(&mut self.is_first, false);
        tracked.used = match of.read(device.ordinal) {
            Ok(memory) => Some(memory.used),
            Err(error) => {
                session.notify_stale(device, &error);
                None
            }
        };
        let why_not_intercepted = views::why_not_intercepted(session);
        #[cfg(feature = "capture")]
        self.record(&tracked, why_not_intercepted.is_none());
        if let Some(why) = why_not_intercepted {
            session.notify(Notice::NoBlocks, &format_args!("which blocks came and went is not known, because {why}"));
        } else {
            let counts = session.inbox.counts();
            let groups = groups(session, device);
            tracked.live = Some(live(&groups));
            tracked.changes = Some(difference(&self.groups, &groups));
            tracked.lost = counts.lost - self.counts.lost;
            session.notify_missed(tracked.lost, counts.untracked.saturating_sub(self.counts.untracked));
            (self.groups, self.counts) = (groups, counts);
        }
        self.tell(&tracked);
        tracked
    }

    #[cfg(feature = "capture")]
    fn record(&self, tracked: &Tracked, is_intercepted: bool) {
        record_request!(
            self.session,
            Tracked {
                time: tracked.time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
                tracker: self.number,
                file: tracked.at.file().to_owned(),
                line: tracked.at.line(),
                column: tracked.at.column(),
                word: tracked.word.clone(),
                used: tracked.used,
                is_intercepted,
            }
        );
    }

    /// One write for each call, so that lines of several trackers do not mix.
    fn tell(&mut self, tracked: &Tracked) {
        let output = self.session.output(Content::Tracked(tracked.clone()));
        let Some(to) = &mut self.to else { return self.session.write(&output) };
        let text = self.session.form().write(&output, Paint::Plain);
        // Who reads the file while the program runs, or after it was killed, finds all of it.
        if let Err(error) = to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
            let text = format_args!("cannot write what a tracker saw: {error}; it is lost");
            self.session.notify(Notice::UnwrittenTracker, &text);
        }
    }
}

/// The blocks on a device that are live now.
fn groups(session: &Session, device: Device) -> Groups {
    let inbox = &session.inbox;
    tracked_groups(inbox, session, device, |blocks| session.labels().of_blocks(inbox, blocks))
}

#[cfg(feature = "capture")]
impl Drop for MemTracker {
    fn drop(&mut self) {
        if self.device.is_some() {
            record_request!(self.session, TrackerEnded { tracker: self.number });
        }
    }
}

impl Default for MemTracker {
    fn default() -> Self {
        Self::new()
    }
}

/// State and settings. Does not read the device.
impl fmt::Debug for MemTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.map(|(device, _)| device.ordinal);
        f.debug_struct("MemTracker")
            .field("device", &device)
            .field("groups", &self.groups.len())
            .finish_non_exhaustive()
    }
}

/// Settings of a [`MemTracker`] that is yet to start.
#[must_use = "nothing is tracked before `start`"]
pub struct MemTrackerBuilder {
    device: Option<u32>,
    to: Option<Box<dyn Write + Send>>,
}

impl MemTrackerBuilder {
    /// The CUDA ordinal of the device, instead of the calling thread's current one.
    pub fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// Writes there, such as to a file, instead of to where reports go: as JSON lines where reports are, else as text. A
    /// write that fails is said once on stderr, and tracking goes on.
    pub fn to(mut self, to: impl Write + Send + 'static) -> Self {
        self.to = Some(Box::new(to));
        self
    }

    /// Starts the tracker, and hearing allocations.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn start(self) -> Result<MemTracker> {
        let Self { device, to } = self;
        let session = current();
        let device = of_number(session, device)?;
        Ok(MemTracker::started(session, device, to))
    }

    /// Starts the tracker, or one that is off, where [`start`](Self::start) would give an error; the error is then said once on
    /// stderr.
    pub fn start_or_off(self) -> MemTracker {
        let Self { device, to } = self;
        let session = current();
        let device = of_number(session, device).unwrap_or_else(|error| {
            session.notify_off(&error);
            None
        });
        MemTracker::started(session, device, to)
    }
}

impl MemTracker {
    fn started(
        session: &'static Session,
        device: Option<(Device, &'static dyn Devices)>,
        to: Option<Box<dyn Write + Send>>,
    ) -> Self {
        let counts = device.map(|_| session.begun().inbox.counts()).unwrap_or_default();
        #[cfg(feature = "capture")]
        let number = session.next_tracker();
        #[cfg(feature = "capture")]
        if let Some((device, _)) = device {
            record_request!(session, TrackerStarted { tracker: number, device });
        }
        Self {
            session,
            device,
            to,
            groups: Groups::new(),
            counts,
            is_first: true,
            #[cfg(feature = "capture")]
            number,
        }
    }
}

/// The device of that number, or the current one, and whatever is intercepted there. None where `GPUMEM_GAUGE` says off.
fn of_number(session: &'static Session, ordinal: Option<u32>) -> Result<Option<(Device, &'static dyn Devices)>> {
    crate::session::alive()?;
    if session.settings().gauge()? == Some(Gauge::Off) {
        return Ok(None);
    }
    let devices = session.devices()?;
    let device = devices.device(ordinal)?;
    devices.check(device.ordinal)?;
    session.prepare(devices);
    Ok(Some((device, devices)))
}

impl fmt::Debug for MemTrackerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemTrackerBuilder").field("device", &self.device).finish_non_exhaustive()
    }
}
