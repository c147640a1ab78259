//! Everything that gpumem prints, as data.

use std::{borrow::Cow, time::SystemTime};

use super::{Leaks, OutOfMemory, PeakHolders, Report, SourceLine, Stats, Tracked};

/// One gpumem output: its content, level and time, and the process, thread, device and line that it is about. Custom sinks receive
/// this.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{GpuMemTrace, sink::{Sink, set_sink}};
/// let (send, outputs) = std::sync::mpsc::channel();
/// set_sink(Sink::custom(move |output| _ = send.send(output.clone())));
/// GpuMemTrace::with_ctx("epoch").report();
/// for output in outputs.try_iter() {
///     println!("{:?} {}: {}", output.time, output.level.name(), output.content.name());
/// }
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Output {
    /// Its level.
    pub level: Level,
    /// The time at which the output was created.
    pub time: SystemTime,
    /// The process.
    pub pid: u32,
    /// The id of the thread that created it, as in [`LiveBlock::thread`](super::LiveBlock::thread). `None` if the thread does not have
    /// one yet.
    pub thread: Option<u32>,
    /// The name of the thread, if it has one.
    pub thread_name: Option<String>,
    /// The CUDA ordinal of the device that the output is about, if there is one.
    pub device: Option<u32>,
    /// The module of the function that it is about, such as `app::train`. Known only for functions with an attribute.
    pub module: Option<Cow<'static, str>>,
    /// The line that it is about: the place where a trace was opened, a tracker was called, or memory was requested.
    pub at: Option<SourceLine>,
    /// The content.
    pub content: Content,
}

/// The level of an [`Output`], from the lowest to the highest.
///
/// ```
/// use gpumem::sink::Level;
///
/// assert!(Level::Error > Level::Warning && Level::Warning > Level::Info);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// A report that the program or the user requested: a trace, a point of a tracker, a peak.
    Info,
    /// Something that needs attention: a notice, memory that was not freed, a budget that was not checked.
    Warning,
    /// Out of memory.
    Error,
}

impl Level {
    /// Returns the name in JSON.
    ///
    /// ```
    /// assert_eq!(gpumem::sink::Level::Warning.name(), "warning");
    /// ```
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The content of an [`Output`].
///
/// ```
/// use gpumem::sink::{Content, Sink, set_sink};
///
/// set_sink(Sink::custom(|output| match &output.content {
///     Content::Trace(report) => println!("{report}"),
///     Content::Leaks(leaks) => eprintln!("{} were not freed", leaks.bytes),
///     Content::Peaks(peaks) => peaks.devices.iter().for_each(|peak| eprintln!("peak: {}", peak.bytes)),
///     other => eprintln!("{}", other.name()),
/// }));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// A report of a trace.
    Trace(Report),
    /// Statistics of traces.
    Stats(Stats),
    /// A point of a tracker.
    Tracked(Tracked),
    /// An allocation that was rejected.
    OutOfMemory(Box<OutOfMemory>),
    /// Blocks that were not freed by the end of the process.
    Leaks(Leaks),
    /// The allocations that made up each device's peak, at exit.
    Peaks(Peaks),
    /// A budget that was not checked, and the reason.
    Budget(String),
    /// A message about gpumem itself, such as the reason why numbers are missing. Each message is printed once.
    Notice(String),
}

impl Content {
    /// Returns the name in JSON: `type`.
    ///
    /// ```
    /// assert_eq!(gpumem::sink::Content::Notice("no GPU".to_owned()).name(), "notice");
    /// ```
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Trace(_) => "trace",
            Self::Stats(_) => "stats",
            Self::Tracked(_) => "tracked",
            Self::OutOfMemory(_) => "out_of_memory",
            Self::Leaks(_) => "leaks",
            Self::Peaks(_) => "peaks",
            Self::Budget(_) => "budget",
            Self::Notice(_) => "notice",
        }
    }

    /// Returns the level of this content.
    ///
    /// ```
    /// use gpumem::sink::{Content, Level};
    ///
    /// assert_eq!(Content::Notice("no GPU".to_owned()).level(), Level::Warning);
    /// ```
    pub const fn level(&self) -> Level {
        match self {
            Self::Trace(_) | Self::Stats(_) | Self::Tracked(_) | Self::Peaks(_) => Level::Info,
            Self::Leaks(_) | Self::Budget(_) | Self::Notice(_) => Level::Warning,
            Self::OutOfMemory(_) => Level::Error,
        }
    }

    /// Returns whether this is a report that the program requested by a call, or statistics that replace it. Such reports go to stdout
    /// by default, the rest to stderr.
    #[doc(hidden)]
    pub const fn is_report(&self) -> bool {
        matches!(self, Self::Trace(_) | Self::Stats(_) | Self::Tracked(_))
    }
}

impl Output {
    /// Creates an output of this process and time, without thread and module, and without a line unless the content has one.
    #[doc(hidden)]
    pub fn new(content: Content, time: SystemTime, pid: u32) -> Self {
        let device = match &content {
            Content::Trace(report) => Some(report.trace.device),
            Content::Tracked(tracked) => Some(tracked.device),
            Content::OutOfMemory(oom) => Some(oom.device),
            Content::Stats(_) | Content::Leaks(_) | Content::Peaks(_) | Content::Budget(_) | Content::Notice(_) => None,
        };
        let at = match &content {
            Content::Tracked(tracked) => Some(tracked.at.clone()),
            Content::OutOfMemory(oom) => oom.line.as_deref().and_then(SourceLine::parse),
            _ => None,
        };
        let level = content.level();
        Self { level, time, pid, thread: None, thread_name: None, device, module: None, at, content }
    }

    /// Returns the report, if this is the report of a trace.
    ///
    /// ```
    /// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
    /// # use gpumem::{GpuMemTrace, sink::{Sink, set_sink}};
    /// # let (send, outputs) = std::sync::mpsc::channel();
    /// # set_sink(Sink::custom(move |output| _ = send.send(output.clone())));
    /// GpuMemTrace::with_ctx("epoch").report();
    /// let report = outputs.try_iter().find_map(|output| output.report().cloned()).unwrap();
    /// assert_eq!(report.ctx.as_deref(), Some("epoch"));
    /// # Ok::<(), gpumem::Error>(())
    /// ```
    pub fn report(&self) -> Option<&Report> {
        if let Content::Trace(report) = &self.content { Some(report) } else { None }
    }
}

/// The allocations that made up each device's peak.
///
/// `Display` is a table of at most 80 columns for each device.
///
/// Example: see [`Content`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Peaks {
    /// The peaks by the ordinal of their device.
    pub devices: Vec<PeakHolders>,
    /// True if allocations were intercepted to the end. If not, there may have been higher peaks.
    pub is_intercepted: bool,
}

impl Peaks {
    /// Returns the peaks of these devices.
    #[doc(hidden)]
    pub fn new(devices: Vec<PeakHolders>, is_intercepted: bool) -> Self {
        Self { devices, is_intercepted }
    }
}
