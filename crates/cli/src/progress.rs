//! A progress bar for work that takes over a second.

use std::{
    fmt,
    io::{self, IsTerminal},
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Does work of unknown length. After the first second, a spinner is shown on stderr, if stderr is a terminal.
pub(crate) fn working<T>(name: &str, work: impl FnOnce() -> T) -> T {
    if !io::stderr().is_terminal() {
        return work();
    }
    let (done, wait) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if wait.recv_timeout(FIRST_SECOND) == Err(RecvTimeoutError::Timeout) {
                let spinner = ProgressBar::new_spinner().with_message(name.to_owned());
                spinner.enable_steady_tick(Duration::from_millis(100));
                // The thread ends when the sender is dropped.
                _ = wait.recv();
                spinner.finish_and_clear();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

const FIRST_SECOND: Duration = Duration::from_secs(1);

/// A progress bar. Nothing is shown in the first second, or if stderr is not a terminal. Dropping the bar removes it.
pub(crate) struct Progress {
    name: String,
    length: u64,
    done: u64,
    started: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn new(name: &str, length: u64) -> Self {
        Self { name: name.to_owned(), length, done: 0, started: Instant::now(), bar: None }
    }

    pub(crate) fn advance(&mut self, by: u64) {
        self.done += by;
        if self.bar.is_none() && self.started.elapsed() > FIRST_SECOND && io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{msg} {bar:30} {percent} %");
            let bar = ProgressBar::new(self.length).with_message(self.name.clone());
            self.bar = Some(style.map(|style| bar.clone().with_style(style)).unwrap_or(bar));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(self.done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("done", &self.done).finish_non_exhaustive()
    }
}
