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
    inbox::LedgerView,
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
/// The time is UTC. `used` is the memory in use on the whole device, including other processes and the CUDA context. `live` is the memory
/// of this process's known blocks. The rows are the blocks that were added (`+`) and removed (`-`) since the last call, grouped by their
/// [labels](crate::tracker::label). Blocks without a label are grouped by size, line (if it is known) and scopes. The first call lists all
/// known blocks. Blocks that were allocated and freed between two calls are not listed.
///
/// Blocks are known if allocations are intercepted, starting with the process's first trace, tracker or
/// [`subscribe`](crate::intercept::subscribe). If they are not intercepted, only the total is printed, and a notice on stderr gives the
/// reason. If a framework has its own allocator, the blocks are those that the allocator requests from the driver. If a block is labelled
/// between two calls, it moves from the group of its size to the group of its label.
///
/// The device is fixed when the tracker starts. Without a GPU a tracker is off, as a [`GpuMemTrace`](crate::session::GpuMemTrace) is.
pub struct MemTracker {
    session: &'static Session,
    /// The device. `None` if the tracker is off.
    device: Option<(Device, &'static dyn Devices)>,
    to: Option<Box<dyn Write + Send>>,
    groups: Groups,
    counts: Counts,
    is_first: bool,
}

impl MemTracker {
    /// Starts a tracker of the current device that prints to the sink of reports.
    pub fn new() -> Self {
        Self::builder().start_or_off()
    }

    /// Returns the settings of a new tracker.
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

    /// Prints the calling line, the memory in use, and the blocks that were added and removed since the last call. Returns the same data.
    ///
    /// ```
    /// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::Bytes;
    /// # let mut tracker = gpumem::tracker::MemTracker::new();
    /// let block = gpu.alloc(Bytes::mib(9))?;
    /// let tracked = tracker.track(); // prints
    /// assert_eq!(tracked.live, Some(Bytes::mib(9)));
    /// assert_eq!(tracked.changes.unwrap()[0].count, 1); // one block more
    /// # drop(block);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[track_caller]
    pub fn track(&mut self) -> Tracked {
        self.track_now(Location::caller(), None)
    }

    /// Like [`track`](Self::track), with a text after the line. [`track!`](crate::track) passes the name of the function.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # let mut tracker = gpumem::tracker::MemTracker::new();
    /// let tracked = tracker.track_with("after load"); // 13:59:03Z src/main.rs:11 (after load)  device 0: …
    /// assert_eq!(tracked.ctx.as_deref(), Some("after load"));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    #[track_caller]
    pub fn track_with(&mut self, ctx: impl Display) -> Tracked {
        self.track_now(Location::caller(), Some(ctx.to_string()))
    }

    fn track_now(&mut self, at: impl Into<SourceLine>, ctx: Option<String>) -> Tracked {
        let Some((device, of)) = self.device.filter(|_| crate::session::alive().is_ok()) else {
            let nothing = Device { family: Family::Cuda, ordinal: 0 };
            return Tracked::at(SystemTime::now(), at.into(), ctx, self.device.map_or(nothing, |(device, _)| device));
        };
        let mut tracked = Tracked::at(SystemTime::now(), at.into(), ctx, device);
        let session = self.session;
        tracked.is_first = std::mem::replace(&mut self.is_first, false);
        tracked.used = match of.read(device.ordinal) {
            Ok(memory) => Some(memory.used),
            Err(error) => {
                session.notify_stale(device, &error);
                None
            }
        };
        if let Some(why) = views::why_not_intercepted(session) {
            session.notify(
                Notice::NoBlocks,
                &format_args!("which blocks were allocated and freed is not known, because {why}"),
            );
        } else {
            let counts = session.inbox.counts();
            let groups = groups(session, device);
            tracked.live = Some(live(&groups));
            tracked.changes = Some(difference(&self.groups, &groups));
            tracked.lost = counts.lost - self.counts.lost;
            session.notify_missed(tracked.lost, counts.untracked.saturating_sub(self.counts.untracked));
            (self.groups, self.counts) = (groups, counts);
        }
        self.print(&tracked);
        tracked
    }

    /// Prints the output with a single write, so that lines of several trackers do not mix.
    fn print(&mut self, tracked: &Tracked) {
        let output = self.session.output(Content::Tracked(tracked.clone()));
        let Some(to) = &mut self.to else { return self.session.write(&output) };
        let text = self.session.form().write(&output, Paint::PLAIN);
        // The output is flushed, so that the file is complete while the program runs, and if it is killed.
        if let Err(error) = to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
            let text = format_args!("cannot write the output of a tracker: {error}; it is lost");
            self.session.notify(Notice::UnwrittenTracker, &text);
        }
    }
}

/// Returns the live blocks of a device, grouped.
fn groups(session: &Session, device: Device) -> Groups {
    let inbox = &session.inbox;
    tracked_groups(inbox, session, device, |blocks| session.labels().of_blocks(inbox, blocks))
}

impl Default for MemTracker {
    fn default() -> Self {
        Self::new()
    }
}

/// Shows the state and the settings. Does not read the device.
impl fmt::Debug for MemTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device.map(|(device, _)| device.ordinal);
        f.debug_struct("MemTracker")
            .field("device", &device)
            .field("groups", &self.groups.len())
            .finish_non_exhaustive()
    }
}

/// Settings of a [`MemTracker`], from [`MemTracker::builder`].
#[must_use = "nothing is tracked before `start`"]
pub struct MemTrackerBuilder {
    device: Option<u32>,
    to: Option<Box<dyn Write + Send>>,
}

impl MemTrackerBuilder {
    /// Sets the CUDA ordinal of the device. The default is the calling thread's current device.
    pub fn device(mut self, ordinal: u32) -> Self {
        self.device = Some(ordinal);
        self
    }

    /// Writes to this writer, such as a file, instead of the sink of reports. The format is the sink's: JSON lines or text. If a
    /// write fails, one notice is printed on stderr, and the tracker continues.
    pub fn to(mut self, to: impl Write + Send + 'static) -> Self {
        self.to = Some(Box::new(to));
        self
    }

    /// Starts the tracker and the interception of allocations.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::tracker::MemTracker;
    /// let error = MemTracker::builder().device(99).start().unwrap_err();
    /// assert!(error.is_unknown_device());
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no such device.
    pub fn start(self) -> Result<MemTracker> {
        let Self { device, to } = self;
        let session = current();
        let device = find_device(session, device)?;
        Ok(MemTracker::started(session, device, to))
    }

    /// Starts the tracker. If [`start`](Self::start) would return an error, the tracker is off, and the error is printed once on stderr.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::tracker::MemTracker;
    /// let mut tracker = MemTracker::builder().device(99).start_or_off(); // stderr says why it is off
    /// assert_eq!(tracker.track().used, None);
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn start_or_off(self) -> MemTracker {
        let Self { device, to } = self;
        let session = current();
        let device = find_device(session, device).unwrap_or_else(|error| {
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
        let counts = device.map(|_| session.ensure_started().inbox.counts()).unwrap_or_default();
        Self { session, device, to, groups: Groups::new(), counts, is_first: true }
    }
}

/// Returns the device with this ordinal, or the current one, and starts to intercept allocations. `None` if `GPUMEM_GAUGE` is off.
fn find_device(session: &'static Session, ordinal: Option<u32>) -> Result<Option<(Device, &'static dyn Devices)>> {
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
