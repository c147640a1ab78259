//! Writes output to the sink.

use std::{
    cell::Cell,
    fmt::Display,
    fs::File,
    io::{self, IsTerminal},
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    process as std_process,
    sync::{Arc, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use crate::session::{
    Session, current,
    output::{Notice, notice::as_notice},
};
use crate::{
    descriptor,
    export::{Form, Paint, Sink},
    print, process,
    report::{Content, Output},
};

/// The longest wait for the reader of a full pipe.
const PATIENCE: Duration = Duration::from_millis(500);

thread_local! {
    /// True while this thread runs the function of a custom sink.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Sets the sink of all output. This replaces the sink of `GPUMEM_REPORT`. The child of a fork prints nothing.
///
/// ```
/// use gpumem::sink::{Sink, set_sink};
///
/// set_sink(Sink::custom(|output| {
///     if let Some(report) = output.report() {
///         println!("{} bytes more", report.trace.used.get());
///     }
/// }));
/// ```
pub fn set_sink(sink: Sink) {
    current().set_sink(sink);
}

impl Session {
    fn set_sink(&self, sink: Sink) {
        // A thread that does not exist in this copy of the process may hold the lock forever.
        if process::is_forked() {
            return;
        }
        self.print_repeats();
        let replaced = self.sink.set.write().unwrap_or_else(PoisonError::into_inner).replace(sink);
        // Dropped after the lock is released: the drop of a captured value may print something.
        drop(replaced);
    }

    pub(super) fn sink(&self) -> Sink {
        // The lines of a trace that the recorded program has opened itself are the program's.
        #[cfg(feature = "capture")]
        if print::is_captured() && self.recorder.is_injected() {
            return Sink::Stdout;
        }
        // The sink is cloned, because the function of a custom sink may set another sink.
        let set = self.sink.set.read().unwrap_or_else(PoisonError::into_inner).clone();
        set.unwrap_or_else(|| self.settings.report.clone())
    }

    /// Returns whether nothing is printed.
    pub(in crate::session) fn is_silent(&self) -> bool {
        matches!(self.sink(), Sink::Off)
    }

    /// Returns whether the calling thread is running the sink's function. The function does not get its own reports.
    pub(in crate::session) fn is_inside_sink(&self) -> bool {
        INSIDE.try_with(Cell::get).unwrap_or(true) && matches!(self.sink(), Sink::Custom(_))
    }

    /// Returns the form of the sink: text or JSON.
    pub(in crate::session) fn form(&self) -> Form {
        self.sink().form()
    }

    /// Adds the time, the process and the calling thread to this content.
    pub(in crate::session) fn output(&self, content: Content) -> Output {
        let mut output = Output::new(content, SystemTime::now(), std_process::id());
        if self.is_started() {
            output.thread = Some(self.inbox.this_thread().0).filter(|number| *number > 0);
        }
        output.thread_name = thread::current().name().map(str::to_owned);
        output
    }

    /// Writes this content. Does nothing in the child of a fork: the lock of stdout may be held there by a thread that does not exist.
    pub(in crate::session) fn print(&self, content: Content) {
        if !process::is_forked() && !self.is_silent() {
            self.write(&self.output(content));
        }
    }

    /// Writes output to the sink. In text, equal consecutive lines of traces are written once, with a count; in JSON, each is written.
    pub(in crate::session) fn write(&self, output: &Output) {
        let sink = self.sink();
        match &sink {
            Sink::Off => {}
            Sink::Json | Sink::JsonFile(_) => self.write_text(&sink, &Form::Json.write(output, Paint::PLAIN), true),
            Sink::Custom(to) => self.write_to_function(output, &**to),
            _ => {
                let text = Form::Text.write(output, self.paint(&sink, output.content.is_report()));
                if !matches!(output.content, Content::Trace(_)) {
                    self.print_repeats();
                } else if !print::is_captured() && self.is_repeated(&text) {
                    return;
                }
                self.write_text(&sink, &text, output.content.is_report());
            }
        }
    }

    /// Writes text to the sink. With the sink stdout, only reports go to stdout, and the rest to stderr.
    pub(super) fn write_text(&self, sink: &Sink, text: &str, is_report: bool) {
        match sink {
            Sink::Stdout if is_report => self.write_stdout(text),
            Sink::Json => self.write_stdout(text),
            Sink::File(path) | Sink::JsonFile(path) => self.write_file(path, text),
            // Unknown sinks end here as well, so that their output is not lost.
            _ => print::to_stderr(text),
        }
    }

    fn write_stdout(&self, text: &str) {
        if !print::to_stdout(text) {
            self.report_unwritten(&"cannot write to stdout (a closed pipe or a full disk?)");
        }
    }

    fn write_stderr(&self, output: &Output) {
        let text = Form::Text.write(output, self.paint(&Sink::Stderr, false));
        self.write_text(&Sink::Stderr, &text, false);
    }

    fn paint(&self, sink: &Sink, is_report: bool) -> Paint {
        self.paint_if(match sink {
            Sink::File(_) => false,
            // Python may write captured text anywhere.
            Sink::Stdout if is_report => !print::is_captured() && io::stdout().is_terminal(),
            _ => io::stderr().is_terminal(),
        })
    }

    fn paint_if(&self, is_terminal: bool) -> Paint {
        if is_terminal && !self.settings.no_color { Paint::ANSI } else { Paint::PLAIN }
    }

    /// Appends the text to the file with one write, so that processes can share the file. A pipe without a reader delays the program
    /// only once.
    fn write_file(&self, path: &Path, text: &str) {
        let patience = if self.was_printed(Notice::Unwritten) { Duration::ZERO } else { PATIENCE };
        let written = self.open(path).and_then(|file| print::to_file(&file, text, patience));
        if let Err(error) = written {
            // A pipe may get another reader.
            *self.sink.file.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.report_unwritten(&format_args!("cannot write to {}: {error}", path.display()));
        }
    }

    /// Opens the file and keeps it open.
    fn open(&self, path: &Path) -> io::Result<Arc<File>> {
        let mut kept = self.sink.file.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some((open, file)) if open == path => Ok(Arc::clone(file)),
            _ => {
                let file = Arc::new(descriptor::open_at_end(path)?);
                *kept = Some((path.to_owned(), Arc::clone(&file)));
                Ok(file)
            }
        }
    }

    fn write_to_function(&self, output: &Output, to: &dyn Fn(&Output)) {
        // Output that the function itself makes would recurse forever.
        if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
            // A notice is printed only once, so it must not be lost.
            if matches!(output.content, Content::Notice(_)) {
                self.write_stderr(output);
            }
            return;
        }
        // The panic hook has printed the panic. Dropping a guard must not panic.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| to(output))) {
            // Dropping the payload may panic as well.
            mem::forget(panic);
            self.report_unwritten(&"the function of the sink panicked");
        }
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }

    /// Reports once, on stderr, that output cannot be written.
    fn report_unwritten(&self, why: &dyn Display) {
        if self.is_new(Notice::Unwritten) {
            self.write_stderr(&self.output(as_notice(&format!("{why}; output is lost"))));
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::{fs, sync::Mutex};

    use tempfile::NamedTempFile;

    use super::*;
    use crate::{
        model::Bytes,
        report::Level,
        session::{GpuMemTrace, MemTracker, TestSession, breakdown},
    };

    fn session(variables: &[(&str, &str)]) -> TestSession {
        let session = TestSession::new(variables).unwrap();
        session.add(Bytes::gib(1)).unwrap();
        session
    }

    /// The outputs are a trace that holds 3 MiB, a tracker's point, a skipped budget, and the notice that the device is
    /// simulated.
    fn work(session: &TestSession) {
        session.run(|| {
            let gpu = session.add(Bytes::gib(1)).unwrap();
            let trace = GpuMemTrace::builder().ctx("step").device(gpu.ordinal()).start().unwrap();
            let block = gpu.alloc(Bytes::mib(3)).unwrap();
            drop(trace);
            MemTracker::builder().device(gpu.ordinal()).start().unwrap().track_with("main");
            current().print(Content::Budget("skipped".to_owned()));
            drop(block);
        });
    }

    #[test]
    fn a_file_gets_everything_at_its_end() {
        let file = NamedTempFile::new().unwrap();
        fs::write(&file, "before\n").unwrap();
        let target = format!("file:{}", file.path().display());
        for _ in 0..2 {
            work(&session(&[("GPUMEM_REPORT", &target)]));
        }
        let text = fs::read_to_string(&file).unwrap();
        let starts: Vec<_> = text.lines().map(|line| line.split(' ').next().unwrap()).collect();
        assert_eq!(starts[..3], ["before", "gpumem:", "△Used"], "{text}");
        assert_eq!(text.matches("△Used Peaked MB:      3      0 (step: exit)\n").count(), 2, "{text}");
        assert_eq!(text.matches("sink.rs:").count(), 2, "the tracker\n{text}");
        assert!(text.ends_with("gpumem: skipped\n") && !text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn each_json_object_says_what_when_who_and_where() {
        let file = NamedTempFile::new().unwrap();
        work(&session(&[("GPUMEM_REPORT", &format!("json:{}", file.path().display()))]));
        let lines: Vec<serde_json::Value> =
            fs::read_to_string(&file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let types: Vec<_> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
        assert_eq!(types, ["notice", "trace", "tracked", "budget"]);
        for line in &lines {
            assert_eq!(line["pid"], std_process::id(), "{line}");
            assert!(line["time"].as_str().is_some_and(|time| time.starts_with("20") && time.ends_with('Z')), "{line}");
            assert!(line["thread_name"].as_str().is_some_and(|name| name.contains("each_json_object")), "{line}");
        }
        for line in &lines[1..] {
            assert!(line["thread"].as_u64().is_some_and(|thread| thread > 0), "{line}");
        }
        for line in &lines[1..3] {
            assert_eq!((&line["device"], line["line"].is_u64()), (&1.into(), true), "{line}");
            assert!(line["file"].as_str().is_some_and(|file| file.ends_with("sink.rs")), "{line}");
        }
    }

    /// The function panics each time, and what the panic carries panics when it is dropped.
    #[test]
    fn a_function_gets_everything() {
        struct Bad;

        impl Drop for Bad {
            fn drop(&mut self) {
                panic!("in the drop of what a panic carries");
            }
        }

        let session = session(&[]);
        let seen: Arc<Mutex<Vec<(&str, Level)>>> = Arc::default();
        let to = Arc::clone(&seen);
        let sink = Sink::custom(move |output| {
            to.lock().unwrap().push((output.content.name(), output.level));
            // The function is not called for output that it makes itself.
            current().print(Content::Budget("inside".to_owned()));
            std::panic::panic_any(Bad);
        });
        session.run(|| set_sink(sink));
        work(&session);
        let expected =
            [("notice", Level::Warning), ("trace", Level::Info), ("tracked", Level::Info), ("budget", Level::Warning)];
        assert_eq!(*seen.lock().unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_written_is_reported_once() {
        let session = session(&[("GPUMEM_REPORT", "file:/no/such/folder/file")]);
        work(&session);
        session.run(|| assert!(!current().is_new(Notice::Unwritten)));
        // The disk is full.
        let session = self::session(&[("GPUMEM_REPORT", "file:/dev/full")]);
        work(&session);
        session.run(|| assert!(!current().is_new(Notice::Unwritten) || !Path::new("/dev/full").exists()));
    }

    /// The output file is a pipe without a reader, then with one, and then full.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_pipe_does_not_stop_the_program() {
        use std::{io::Read, os::unix::fs::OpenOptionsExt};

        const O_NONBLOCK: i32 = 0o4000;
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std_process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let session = session(&[("GPUMEM_REPORT", &format!("file:{}", pipe.display()))]);
        session.run(|| {
            let print = |text: String| current().print(Content::Budget(text));
            print("nobody reads".to_owned());
            assert!(current().was_printed(Notice::Unwritten));
            let mut reader = File::options().read(true).custom_flags(O_NONBLOCK).open(&pipe).unwrap();
            print("somebody reads".to_owned());
            let mut text = [0; 256];
            let length = reader.read(&mut text).unwrap();
            assert_eq!(&text[..length], b"gpumem: somebody reads\n");
            (0..100).for_each(|_| print("x".repeat(3000)));
            drop(reader);
            print("nobody reads any more".to_owned());
        });
    }

    #[test]
    fn nothing_is_printed_when_it_is_off() {
        let session = session(&[("GPUMEM_REPORT", "off")]);
        work(&session);
        session.run(|| {
            assert!(current().is_silent());
            set_sink(Sink::Stdout);
            // The lines that were not printed are printed later.
            assert!(current().is_new(Notice::Simulated));
        });
    }

    #[test]
    fn equal_lines_have_one_line_and_a_count() {
        const LINE: &str = "△Used Peaked MB:      0      0 (step)\n";
        let lines = |file: &NamedTempFile, form: &str| {
            let session = session(&[("GPUMEM_REPORT", &format!("{form}:{}", file.path().display()))]);
            session.run(|| {
                let trace = GpuMemTrace::builder().ctx("step").on_exit_report(false).start().unwrap();
                let report = |times: u32| (0..times).for_each(|_| trace.report());
                report(1);
                // The first one is written immediately.
                assert!(
                    fs::read_to_string(file).unwrap().ends_with('\n')
                        && fs::read_to_string(file).unwrap().contains("(step") == (form == "file"),
                    "{form}"
                );
                report(3);
                trace.report_with("other");
                report(2);
                current().print(Content::Budget("skipped".to_owned()));
                report(2);
                // Lines of different threads are not merged, even if they are equal.
                thread::scope(|threads| threads.spawn(|| session.run(|| report(2))).join().unwrap());
                current().print_repeats();
                report(1);
            });
            fs::read_to_string(file)
                .unwrap()
                .split_inclusive('\n')
                .filter(|line| !line.contains("simulated GPU"))
                .collect()
        };
        let text: String = lines(&NamedTempFile::new().unwrap(), "file");
        let more = |count| format!("… {count} more: {LINE}");
        let expected = [
            LINE,
            &more(3),
            &LINE.replace(')', ": other)"),
            LINE,
            &more(1),
            "gpumem: skipped\n",
            LINE,
            &more(1),
            LINE,
            &more(1),
            LINE,
        ];
        assert_eq!(text, expected.concat());
        // JSON contains every object.
        let json: String = lines(&NamedTempFile::new().unwrap(), "json");
        assert_eq!((json.lines().count(), json.matches("\"trace\"").count()), (13, 12), "{json}");
    }

    /// Lines of 3 KB and equal lines, of four processes with four threads each.
    #[test]
    fn each_line_of_threads_and_processes_is_whole_and_counted() {
        const EACH: usize = 200;
        let file = NamedTempFile::new().unwrap();
        let target = format!("file:{}", file.path().display());
        let sessions = [(); 4].map(|()| session(&[("GPUMEM_REPORT", &target)]));
        let long = |thread: usize| ["a", "b", "c", "d"][thread].repeat(3000);
        thread::scope(|threads| {
            for (session, thread) in sessions.iter().flat_map(|session| (0..4).map(move |thread| (session, thread))) {
                threads.spawn(move || {
                    session.run(|| {
                        let name = format!("step {thread}");
                        let trace = GpuMemTrace::builder().ctx(name).on_exit_report(false).start().unwrap();
                        for _ in 0..EACH {
                            (0..3).for_each(|_| trace.report());
                            current().print(Content::Budget(long(thread)));
                        }
                    });
                });
            }
        });
        for session in &sessions {
            session.run(|| current().print_repeats());
        }
        let text = fs::read_to_string(&file).unwrap();
        for thread in 0..4 {
            let whole = format!("gpumem: {}", long(thread));
            assert_eq!(text.lines().filter(|line| *line == whole).count(), 4 * EACH, "lines are not mixed");
            let report = format!("△Used Peaked MB:      0      0 (step {thread})");
            let count = |line: &str| {
                let (before, _) = line.split_once(&report)?;
                let more = before.strip_prefix("… ").and_then(|count| count.strip_suffix(" more: "));
                more.map_or(before.is_empty().then_some(1), |count| count.parse().ok())
            };
            assert_eq!(text.lines().filter_map(count).sum::<usize>(), 4 * 3 * EACH, "step {thread}");
        }
    }

    #[test]
    fn colours_are_for_terminals_alone() {
        let paint =
            |variables: &[(&str, &str)], is_terminal| session(variables).run(|| current().paint_if(is_terminal));
        assert_eq!(paint(&[], true), Paint::ANSI);
        assert_eq!(paint(&[], false), Paint::PLAIN);
        assert_eq!(paint(&[("NO_COLOR", "1")], true), Paint::PLAIN);
        assert_eq!(paint(&[("NO_COLOR", "")], true), Paint::ANSI);
        session(&[]).run(|| assert!(!breakdown(None).unwrap().to_string().contains('\u{1b}')));
    }
}
