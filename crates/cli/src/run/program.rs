//! Starts the program, forwards signals to it, and waits for its end.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, fs::MetadataExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::{
    consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{SignalsInfo, exfiltrator::origin::WithOrigin},
    low_level::siginfo::{Cause, Origin, Sent},
};

use super::control::is_stopped;
use crate::{failure::Failure, files};

/// The signals that are forwarded. The kernel delivers others, such as those of job control, to the program as well.
const SIGNALS: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

pub(super) struct Program {
    words: Vec<OsString>,
    environment: Vec<(String, OsString)>,
}

/// How a program ended.
pub(super) struct Ended {
    code: i32,
    /// The signal that ended the program.
    pub(super) signal: Option<i32>,
    /// True if the program was started. If not, an error was printed, and there is no report.
    pub(super) has_started: bool,
}

impl Ended {
    /// Returns the exit code that a shell would return: the program's own code, or 128 plus the number of the signal.
    pub(super) fn code(&self) -> u8 {
        u8::try_from(self.code).unwrap_or(u8::MAX)
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        let signal = status.signal();
        let code = status.code().or_else(|| Some(128 + signal?)).unwrap_or(255);
        Self { code, signal, has_started: true }
    }
}

impl Program {
    pub(super) fn new(words: &[OsString]) -> Self {
        Self { words: words.to_owned(), environment: Vec::new() }
    }

    pub(super) fn environment(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.environment.push((name.to_owned(), value.as_ref().to_owned()));
    }

    /// Puts an entry first in a variable that is a colon-separated list, before the entries of this environment. An
    /// empty list is dropped, because an empty entry would mean the current folder.
    pub(super) fn first_in(&mut self, list: &str, entry: impl AsRef<OsStr>) {
        let mut entries = entry.as_ref().to_owned();
        if let Some(rest) = env::var_os(list).filter(|rest| !rest.is_empty()) {
            entries.push(":");
            entries.push(rest);
        }
        self.environment(list, entries);
    }

    fn start(&self) -> io::Result<Child> {
        let spawn = |program: &OsStr, words: &[OsString]| {
            let environment = self.environment.iter().map(|(name, value)| (name, value));
            Command::new(program).args(words).envs(environment).spawn()
        };
        let (program, words) = (&self.words[0], &self.words[1..]);
        let started = spawn(program, words);
        // Shells do the same with a script that does not name its interpreter.
        match script(program) {
            Some(script) if started.as_ref().is_err_and(|error| error.raw_os_error() == Some(NO_PROGRAM)) => {
                spawn(SHELL.as_ref(), &[&[script.into_os_string()], words].concat())
            }
            _ => started,
        }
    }

    /// Runs the program until it ends. The program shares our stdin, stdout and stderr, and stays in our process group,
    /// so that the terminal delivers its signals to it.
    ///
    /// `started` is called with the program's process id.
    pub(super) fn run(self, started: impl FnOnce(u32)) -> Result<Ended, Failure> {
        // Set the handlers before the program starts: a signal in between would end this process and leave the program
        // behind.
        let forwarder = Forwarder::new();
        let child = match self.start() {
            Ok(child) => child,
            Err(error) => {
                // `env` and `nohup` exit with the same codes.
                let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                let what = format!("cannot start `{}`", self.words[0].display());
                crate::terminal::error(&Failure::new(what, error, ""));
                return Ok(Ended { code, signal: None, has_started: false });
            }
        };
        started(child.id());
        forwarder.wait(child).map_err(|error| Failure::new("cannot wait for the program", error, ""))
    }
}

/// Forwards signals while the program runs.
struct Forwarder {
    signals: Option<SignalsInfo<WithOrigin>>,
}

impl Forwarder {
    fn new() -> Self {
        // The program must ignore the signals that this process ignores (`nohup`). A handler here would prevent that.
        let ignored = ignored_signals();
        let requested = SIGNALS.iter().filter(|signal| ignored & (1 << (**signal - 1)) == 0);
        // Without handlers, a signal ends this process while the program continues.
        Self { signals: SignalsInfo::<WithOrigin>::new(requested).ok() }
    }

    fn wait(self, mut child: Child) -> io::Result<Ended> {
        let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
            return child.wait().map(Ended::from);
        };
        // The lock is held while a signal is sent. After the program has been waited for, another process may get its
        // id.
        let is_over = Arc::new(Mutex::new(false));
        let handle = self.signals.as_ref().map(SignalsInfo::handle);
        if let Some(mut signals) = self.signals {
            let is_over = Arc::clone(&is_over);
            thread::spawn(move || {
                for origin in &mut signals {
                    let is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
                    if !*is_over && is_for_us_alone(&origin) {
                        send(pid, origin.signal);
                    }
                }
            });
        }
        loop {
            // With `NOWAIT`, a program that has ended stays a zombie, so no other process can get its id yet.
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(Some(status)) if status.stopped() => stop_with(pid),
                _ => break,
            }
        }
        *is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let status = child.wait()?;
        if let Some(handle) = handle {
            handle.close();
        }
        end_at_second_signal();
        Ok(status.into())
    }
}

/// Stops this process when the program has stopped, and continues with it. A process that waits for `gpumem run` must
/// see the stop as if it waited for the program itself.
fn stop_with(program: Pid) {
    // Each stop is reported once.
    _ = waitid(WaitId::Pid(program), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
    // Signals of the terminal stop and continue both processes, so the program may already be running again.
    thread::sleep(Duration::from_millis(20));
    if !is_stopped(program.as_raw_pid().unsigned_abs()) {
        return;
    }
    let own = rustix::process::getpid();
    // Another process may continue only the program, which a stopped process would not notice. Therefore this process
    // stops only if the watcher runs.
    let pids = [program, own].map(|pid| pid.as_raw_nonzero().to_string());
    let mut watcher = Command::new(SHELL);
    watcher.args(["-c", WATCH, "sh"]).args(pids).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let Ok(mut watcher) = watcher.spawn() else { return };
    // The system delivers the signal before this call returns.
    _ = kill_process(own, Signal::STOP);
    // Another process has continued this one.
    _ = watcher.kill();
    _ = watcher.wait();
    _ = kill_process(program, Signal::CONT);
}

/// A script that continues the second process as soon as the first one is no longer stopped. It uses only builtins that
/// every shell has, and `sleep`.
const WATCH: &str = "while read -r stat < /proc/$1/stat; do case ${stat##*)} in ' T'*|' t'*) sleep 0.05;; *) break;; esac; done; kill -CONT $2";

const SHELL: &str = "/bin/sh";

/// The kernel's error for a file that it cannot execute: `ENOEXEC`.
const NO_PROGRAM: i32 = rustix::io::Errno::NOEXEC.raw_os_error();

/// Returns the path of a program if it may be a script, which means that its first line is text.
fn script(program: &OsStr) -> Option<PathBuf> {
    let path = if program.as_bytes().contains(&b'/') {
        PathBuf::from(program)
    } else {
        let is_program =
            |path: &PathBuf| path.metadata().is_ok_and(|known| known.is_file() && known.mode() & 0o111 != 0);
        env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(program)).find(is_program)?
    };
    let mut header = Vec::new();
    files::open_to_read(&path).ok()?.take(4096).read_to_end(&mut header).ok()?;
    let is_text = header.split(|byte| *byte == b'\n').next().is_some_and(|line| !line.contains(&0));
    // The shell would take a name that starts with a dash for an option.
    let path = if path.as_os_str().as_bytes().starts_with(b"-") { Path::new(".").join(path) } else { path };
    is_text.then_some(path)
}

/// Lets the second signal end this process. The recordings are being completed, which takes a moment and is not
/// interrupted by the first signal.
fn end_at_second_signal() {
    let was_signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        _ = signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&was_signalled));
        _ = signal_hook::flag::register(signal, Arc::clone(&was_signalled));
    }
}

/// Returns whether a signal was sent to this process only, as signals from other processes are. The kernel sends the
/// signals of a terminal to all processes in its foreground, including the program.
fn is_for_us_alone(origin: &Origin) -> bool {
    matches!(origin.cause, Cause::Sent(Sent::User | Sent::TKill | Sent::Queue))
}

fn send(pid: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        // An error is ignored, because the program may have ended.
        _ = kill_process(pid, signal);
    }
}

/// Returns a bit for each signal that this process ignores.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let digits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}
