//! The results for each statement of a function.

use std::{borrow::Cow, fmt, panic::Location};

use crate::model::{ByteDelta, Trace};

/// A line in the source of the program.
///
/// ```
/// # gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// let at = gpumem::tracker::MemTracker::new().track().at;
/// println!("{at}"); // src/main.rs:5
/// println!("{}, line {}, column {}", at.file(), at.line(), at.column());
/// assert_eq!(at.line(), line!() - 3);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceLine {
    file: Cow<'static, str>,
    line: u32,
    column: u32,
}

impl SourceLine {
    /// Creates a line of a file whose name is not part of the program.
    #[doc(hidden)]
    pub fn new(file: impl Into<Cow<'static, str>>, line: u32, column: u32) -> Self {
        Self { file: file.into(), line, column }
    }

    /// Parses `src/train.rs:12` or `src/train.rs:12:9`.
    #[doc(hidden)]
    pub fn parse(text: &str) -> Option<Self> {
        let number = |text: &str| text.parse::<u32>().ok();
        let (rest, last) = text.rsplit_once(':')?;
        let last = number(last)?;
        match rest.rsplit_once(':').and_then(|(file, line)| Some((file, number(line)?))) {
            Some((file, line)) => Some(Self::new(file.to_owned(), line, last)),
            None => Some(Self::new(rest.to_owned(), last, 1)),
        }
    }

    /// Returns the file, as the compiler names it.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the line, starting at 1.
    pub fn line(&self) -> u32 {
        self.line
    }

    /// Returns the column, starting at 1.
    pub fn column(&self) -> u32 {
        self.column
    }
}

impl From<&'static Location<'static>> for SourceLine {
    fn from(location: &'static Location<'static>) -> Self {
        Self::new(location.file(), location.line(), location.column())
    }
}

/// Writes a text such as `src/train.rs:12`.
impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// The results for one statement of a function with `#[gpu_mem_trace(lines)]`.
///
/// ```
/// # let gpu = gpumem::sim::SimGpu::install(gpumem::Bytes::gib(16))?;
/// # use gpumem::{Bytes, gpu_mem_trace, sim::{SimBlock, SimGpu}, sink::{Sink, set_sink}};
/// # let (send, outputs) = std::sync::mpsc::channel();
/// # set_sink(Sink::custom(move |output| _ = send.send(output.clone())));
/// #[gpu_mem_trace(lines)]
/// fn load(gpu: &SimGpu) -> gpumem::Result<SimBlock> {
///     let weights = gpu.alloc(Bytes::mib(20))?;
///     Ok(weights)
/// }
/// load(&gpu)?;
/// let report = outputs.try_iter().find_map(|output| output.report().cloned()).unwrap();
/// assert_eq!(report.lines[0].source, "let weights = gpu.alloc(Bytes::mib(20))?;");
/// assert_eq!(report.lines[0].trace.used.mb(), 20);
/// # Ok::<(), gpumem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Line {
    /// The line on which the statement starts; the last line of the function for the drops at its end.
    pub number: u32,
    /// The statement, without its line breaks; `}` for the drops at the end of the function.
    pub source: Cow<'static, str>,
    /// The results for only this statement.
    pub trace: Trace,
    /// The increase of the memory in use from the start of the function to the end of the statement.
    pub total: ByteDelta,
}

/// The statements of one call, in order. Each statement starts with the reading that ended the one before, so there is no gap
/// between them.
#[derive(Debug, Default)]
pub struct Lines {
    lines: Vec<Line>,
    /// The results of all statements as one trace.
    total: Option<Trace>,
}

impl Lines {
    /// Adds the next statement: its line, its text, and its trace, which started when the previous statement ended.
    pub fn push(&mut self, number: u32, source: impl Into<Cow<'static, str>>, trace: Trace) {
        let total = self.total.map_or(trace, |total| total.then(trace));
        self.lines.push(Line { number, source: source.into(), trace, total: total.used });
        self.total = Some(total);
    }

    /// Returns the results of the whole call and of its statements. `last` covers the drops at the end.
    pub fn finish(mut self, number: u32, last: Trace) -> (Trace, Vec<Line>) {
        let lines = self.lines.len();
        self.push(number, "}", last);
        let is_nothing = last.used == 0 && last.peaked == 0 && last.is_measured();
        if is_nothing {
            self.lines.truncate(lines);
        }
        (self.total.unwrap_or(last), self.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Bytes, Gauge};

    fn trace(used: i64, peaked: u64) -> Trace {
        Trace { gauge: Gauge::Exact, used: ByteDelta::new(used), peaked: Bytes::new(peaked), ..Trace::off(0) }
    }

    #[test]
    fn the_whole_equals_one_trace() {
        // Each case has (used, peaked) of each statement and of all together.
        for (statements, used, peaked) in [
            (vec![(20, 0), (-20, 0)], 0, 20),
            (vec![(10, 5), (10, 100)], 20, 100),
            (vec![(-30, 0), (0, 20)], -30, 0),
            (vec![(-30, 50), (40, 0)], 10, 40),
            (vec![(0, 0)], 0, 0),
        ] {
            let mut lines = Lines::default();
            for (number, (used, peaked)) in (1..).zip(&statements) {
                lines.push(number, "", trace(*used, *peaked));
            }
            let (total, lines) = lines.finish(9, trace(0, 0));
            assert_eq!((total.used.get(), total.peaked.get()), (used, peaked), "{statements:?}");
            assert_eq!(lines.len(), statements.len(), "nothing was dropped");
            assert_eq!(lines.last().map(|line| line.total.get()), Some(used));
        }
    }

    #[test]
    fn what_is_dropped_at_the_end_has_its_line() {
        let mut lines = Lines::default();
        lines.push(1, "let x = f();", trace(20, 0));
        let (total, lines) = lines.finish(3, trace(-20, 0));
        assert_eq!((total.used.get(), total.peaked.get()), (0, 20));
        assert_eq!(lines.iter().map(|line| (line.number, line.total.get())).collect::<Vec<_>>(), [(1, 20), (3, 0)]);
    }

    #[test]
    fn a_failed_reading_of_one_statement_is_in_the_whole() {
        let mut lines = Lines::default();
        lines.push(1, "", Trace { stale: true, lost: 1, ..trace(0, 0) });
        let (total, _) = lines.finish(2, Trace { untracked: 2, ..trace(1, 0) });
        assert!(!total.is_measured());
        assert_eq!((total.lost, total.untracked), (1, 2));
    }
}
