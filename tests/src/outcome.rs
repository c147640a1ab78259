//! The output of a child process, and its calls of the driver.

use std::fmt::{self, Display};

/// The result of a child process.
#[derive(Debug)]
pub struct Outcome {
    pub(crate) machine: String,
    pub(crate) script: String,
    pub(crate) exit: Option<String>,
    pub(crate) succeeded: bool,
    /// The output of the probe and of gpumem's reports.
    pub stdout: String,
    /// The output of gpumem's notices and of panics.
    pub stderr: String,
    /// The calls of the driver, in order, such as `nvmlDeviceGetMemoryInfo_v2[0]=15`.
    pub calls: Vec<String>,
}

impl Outcome {
    /// Returns whether the program ended by itself with 0.
    pub fn succeeded(&self) -> bool {
        self.succeeded
    }

    /// Returns how the program ended: `exit status: 7`, `signal: 9 (SIGKILL)`.
    pub fn exit(&self) -> &str {
        self.exit.as_deref().unwrap_or("killed by the test")
    }

    /// Returns whether the program succeeded and nothing in it panicked.
    pub fn is_clean(&self) -> bool {
        self.succeeded && !self.stderr.contains("panicked at")
    }

    /// Returns the answer of the first command of this name; `get 1` is only found by `get 1`.
    ///
    /// # Panics
    /// Panics if there is no such answer.
    pub fn answer(&self, command: &str) -> &str {
        self.answers(command).first().unwrap_or_else(|| panic!("no answer to `{command}`\n{self}"))
    }

    /// Returns the answers of all commands of this name, in order.
    pub fn answers<'a>(&'a self, command: &str) -> Vec<&'a str> {
        let answer = |line: &'a str| line.strip_prefix("> ")?.strip_prefix(command)?.strip_prefix(": ");
        self.stdout.lines().filter_map(answer).collect()
    }

    /// Returns the lines of stdout that are gpumem's reports and not the probe's answers.
    pub fn reports(&self) -> Vec<&str> {
        self.stdout.lines().filter(|line| !line.starts_with("> ")).collect()
    }

    /// Returns the number of created contexts.
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
