//! Runs a part of a test in a new process, because gpumem's session belongs to the whole process.
//!
//! The test executable starts itself again to run only one test. That test calls [`part`] to find out what to do. In a usual run there is
//! no part, and the test does nothing.

use std::{
    env,
    fs::{self, File},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use tempfile::TempDir;

use crate::process::wait;

const PART: &str = "GPUMEM_TEST_PART";
/// The variables that name the machine of a test. The new process runs on the same machine.
const MACHINE: [&str; 3] = ["GPUMEM_DEVICE", "GPUMEM_SOURCE", "GPUMEM_STANDIN"];
const LIMIT: Duration = Duration::from_secs(300);

/// Returns the part of a test for which this process was started, if there is one.
pub fn part() -> Option<String> {
    env::var(PART).ok()
}

/// A process that runs one test of this executable.
#[derive(Debug)]
#[must_use = "nothing runs before `run` or `start`"]
pub struct OwnProcess(Command);

impl OwnProcess {
    /// Prepares a process that runs the test of this name, which starts with the names of its modules. Of gpumem's variables, only those
    /// that determine the machine of a test are set.
    ///
    /// # Panics
    /// Panics if the path of this executable is not known.
    pub fn new(test: &str) -> Self {
        let mut command = Command::new(env::current_exe().expect("a test has a path"));
        for (name, _) in env::vars_os() {
            let name_text = name.to_string_lossy();
            let is_ours = name_text.starts_with("GPUMEM");
            if is_ours && !MACHINE.iter().any(|machine| name_text.starts_with(machine)) {
                command.env_remove(&name);
            }
        }
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env("RUST_BACKTRACE", "0");
        Self(command)
    }

    /// Sets the answer of [`part`] in the process.
    pub fn part(self, part: &str) -> Self {
        self.env(PART, part)
    }

    /// Sets a variable of the process's environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    /// Sets variables of the process's environment.
    pub fn envs(mut self, variables: &[(&str, &str)]) -> Self {
        self.0.envs(variables.iter().copied());
        self
    }

    /// Returns the command, for a test that runs it by itself; [`Ended::of`] reads its output.
    pub fn command(self) -> Command {
        self.0
    }

    /// Starts the process.
    ///
    /// # Panics
    /// Panics if the program cannot be started.
    pub fn start(mut self) -> Running {
        Running::start(&mut self.0)
    }

    /// Runs the process to its end.
    ///
    /// # Panics
    /// Panics for the same reasons as [`Running::end`].
    #[track_caller]
    pub fn run(self) -> Ended {
        self.start().end()
    }

    /// Runs the process, which must succeed.
    ///
    /// # Panics
    /// Panics if the process fails, and for the same reasons as [`Running::end`].
    #[track_caller]
    pub fn passes(self) -> Ended {
        let ended = self.run();
        assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
        ended
    }
}

/// A running process.
#[derive(Debug)]
pub struct Running {
    child: Child,
    folder: TempDir,
}

impl Running {
    fn start(command: &mut Command) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| File::create(folder.path().join(name)).expect("a file"));
        let spawned = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
        let child = spawned.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, folder }
    }

    #[track_caller]
    fn output(mut self) -> Output {
        let status = wait(&mut self.child, LIMIT).expect("it is our child");
        let [stdout, stderr] =
            ["stdout", "stderr"].map(|name| fs::read(self.folder.path().join(name)).expect("a file"));
        let Some(status) = status else {
            let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            panic!("it did not end within {LIMIT:?} and was killed\n{stdout}\n{stderr}");
        };
        Output { status, stdout, stderr }
    }

    /// Waits for the end of the process.
    ///
    /// # Panics
    /// Panics if the process does not end in time, or has run no test.
    #[track_caller]
    pub fn end(self) -> Ended {
        Ended::of(self.output())
    }
}

/// Like [`Command::output`], but with a deadline.
///
/// # Panics
/// Panics if the program cannot be started, or does not end in time.
#[track_caller]
pub fn output_of(command: &mut Command) -> Output {
    Running::start(command).output()
}

/// The end of a process, and its output.
#[derive(Debug)]
pub struct Ended {
    /// The exit code. `None` after a signal.
    pub code: Option<i32>,
    /// The whole stdout.
    pub stdout: String,
    /// The whole stderr, without the notice that devices are simulated.
    pub stderr: String,
}

impl Ended {
    /// Reads the output of a [`command`](OwnProcess::command).
    ///
    /// # Panics
    /// Panics if the process has run no test.
    #[track_caller]
    pub fn of(output: Output) -> Self {
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(stdout.contains("running 1 test"), "{stdout}\n{stderr}");
        let stderr = stderr.split_inclusive('\n').filter(|line| !line.contains("come from a simulated GPU")).collect();
        Self { code: output.status.code(), stdout, stderr }
    }

    /// Returns the lines of stdout that start with `> `, without these characters.
    pub fn answers(&self) -> Vec<&str> {
        self.stdout.lines().filter_map(|line| line.strip_prefix("> ")).collect()
    }
}
