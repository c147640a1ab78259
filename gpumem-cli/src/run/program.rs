//! The program: how it is started, what signals it gets, how it ends.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicBool},
    thread,
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::{
    consts::signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2},
    iterator::{SignalsInfo, exfiltrator::origin::WithOrigin},
    low_level::siginfo::{Cause, Origin, Sent},
};

use crate::failure::Failure;

/// The signals that are passed on. The kernel delivers others (those of job control, for example) to the program as well.
const SIGNALS: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

pub(super) struct Program {
    command: Command,
    name: OsString,
}

/// How a program ended.
pub(super) struct Ended {
    code: i32,
    /// That ended it.
    pub(super) signal: Option<i32>,
    /// Else an error was printed, and there is nothing to report.
    pub(super) has_started: bool,
}

impl Ended {
    /// As a shell gives it: the program's own code, or 128 and the number of the signal.
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
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        Self { command, name: words[0].clone() }
    }

    pub(super) fn environment(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.command.env(name, value);
    }

    /// Runs the program until it ends. It has our stdin, stdout and stderr, and it stays in our process group, so that the terminal
    /// delivers its signals to it.
    ///
    /// `started` gets its number.
    pub(super) fn run(mut self, started: impl FnOnce(u32)) -> Result<Ended, Failure> {
        // Before the program begins: a signal in between would end this process and leave the program alone.
        let forwarder = Forwarder::new();
        let child = match self.command.spawn() {
            Ok(child) => child,
            Err(error) => {
                // As `env` and `nohup` do.
                let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
                let what = format!("cannot start `{}`", self.name.display());
                crate::terminal::error(&Failure::new(what, error, ""));
                return Ok(Ended { code, signal: None, has_started: false });
            }
        };
        started(child.id());
        forwarder.wait(child).map_err(|error| Failure::new("cannot wait for the program", error, ""))
    }
}

/// Passes signals on, while the program runs.
struct Forwarder {
    signals: Option<SignalsInfo<WithOrigin>>,
}

impl Forwarder {
    fn new() -> Self {
        // What this process ignores (`nohup`), the program is to ignore as well: with a handler here it would not.
        let ignored = ignored_signals();
        let wanted = SIGNALS.iter().filter(|signal| ignored & (1 << (**signal - 1)) == 0);
        // Without handlers a signal ends this process, and the program goes on.
        Self { signals: SignalsInfo::<WithOrigin>::new(wanted).ok() }
    }

    fn wait(self, mut child: Child) -> io::Result<Ended> {
        let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
            return child.wait().map(Ended::from);
        };
        // Locked while a signal is sent: after the program was waited for, another process may have its number.
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
        // It is over, but still has its number.
        while waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            .is_err_and(|error| error == rustix::io::Errno::INTR)
        {}
        *is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let status = child.wait()?;
        if let Some(handle) = handle {
            handle.close();
        }
        end_at_second_signal();
        Ok(status.into())
    }
}

/// The recordings are finished now, which takes a moment. A signal does not interrupt that; a second one does.
fn end_at_second_signal() {
    let was_signalled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        _ = signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&was_signalled));
        _ = signal_hook::flag::register(signal, Arc::clone(&was_signalled));
    }
}

/// The kernel sends the signals of a terminal to all processes in its foreground, and so to the program. Those of other processes were
/// sent to this one.
fn is_for_us_alone(origin: &Origin) -> bool {
    matches!(origin.cause, Cause::Sent(Sent::User | Sent::TKill | Sent::Queue))
}

fn send(pid: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        // It may have ended.
        _ = kill_process(pid, signal);
    }
}

/// A bit for each signal that this process ignores.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let digits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0)
}
