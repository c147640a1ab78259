//! What a child process wrote, and which calls of the driver it made.

use std::fmt::{self, Display};

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    pub(crate) machine: String,
    pub(crate) script: String,
    pub(crate) exit: Option<String>,
    pub(crate) succeeded: bool,
    /// What the probe and gpumem's reports wrote.
    pub stdout: String,
    /// What gpumem's notices and panics wrote.
    pub stderr: String,
    /// The calls that the driver was asked, in order, such as `nvmlDeviceGetMemoryInfo_v2[0]=15`.
    pub calls: Vec<String>,
}

impl Outcome {
    /// Returns whether the program ended by itself with 0.
    pub fn succeeded(&self) -> bool {
        self.succeeded
    }

    /// How the program ended: `exit status: 7`, `signal: 9 (SIGKILL)`.
    pub fn exit(&self) -> &str {
        self.exit.as_deref().unwrap_or("killed by the test")
    }

    /// Returns whether that is so, and nothing in it panicked.
    pub fn is_clean(&self) -> bool {
        self.succeeded && !self.stderr.contains("panicked at")
    }

    /// What the first command of this name answered; `get 1` is found by `get 1` alone.
    ///
    /// # Panics
    /// When there is no such answer.
    pub fn answer(&self, command: &str) -> &str {
        self.answers(command).first().unwrap_or_else(|| panic!("no answer to `{command}`\n{self}"))
    }

    /// What every command of this name answered, in order.
    pub fn answers<'a>(&'a self, command: &str) -> Vec<&'a str> {
        let answer = |line: &'a str| line.strip_prefix("> ")?.strip_prefix(command)?.strip_prefix(": ");
        self.stdout.lines().filter_map(answer).collect()
    }

    /// The lines of stdout that are gpumem's reports and not the probe's answers.
    pub fn reports(&self) -> Vec<&str> {
        self.stdout.lines().filter(|line| !line.starts_with("> ")).collect()
    }

    /// How many contexts came into being.
    pub fn contexts_created(&self) -> usize {
        self.calls.iter().filter(|call| call.starts_with("context_created")).count()
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { machine, script, exit, stdout, stderr, calls, .. } = self;
        let exit = exit.as_deref().unwrap_or("none");
        writeln!(f, "machine: {machine}\nscript: {script}\nexit: {exit}\nstdout:\n{stdout}\nstderr:\n{stderr}")?;
        write!(f, "last calls: {}", calls[calls.len().saturating_sub(30)..].join(" "))
    }
}
