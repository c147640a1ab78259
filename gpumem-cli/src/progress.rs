//! A progress bar for what takes over a second.

use std::{
    fmt,
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

/// Shows nothing in the first second, and nothing at all where stderr is no terminal. It is gone when it is dropped.
pub(crate) struct Progress {
    name: String,
    length: u64,
    done: u64,
    began: Instant,
    bar: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn new(name: &str, length: u64) -> Self {
        Self { name: name.to_owned(), length, done: 0, began: Instant::now(), bar: None }
    }

    pub(crate) fn advance(&mut self, by: u64) {
        self.done += by;
        if self.bar.is_none() && self.began.elapsed() > Duration::from_secs(1) && io::stderr().is_terminal() {
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
