//! Runs the command with limits on its memory and on its processor time.

use std::{
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

/// The limits of the command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The memory that the command may have at the same time.
    megabytes: u64,
    /// The processor time that the command may use.
    seconds: u64,
}

/// The resources that the command used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) megabytes: u64,
    /// True if the command ended with 2.
    pub(crate) is_rejected: bool,
}

/// Programs that are not optimised take several times as long.
const SECOND: u64 = if cfg!(debug_assertions) { 6 } else { 1 };

impl Limits {
    /// The limits for any recording of up to 10 MB.
    pub(crate) const OF_A_RECORDING: Self = Self { megabytes: 500, seconds: 5 * SECOND };

    /// Runs the command. Returns an error if it took too much, panicked, or gave no reason for its error.
    pub(crate) fn run(self, arguments: &[&str]) -> Result<Spent, String> {
        // `ulimit -v` also limits reserved addresses that are never used. These are not memory, so the limit is four times as
        // high.
        let script = format!("ulimit -v {}; ulimit -t {}; exec \"$0\" \"$@\"", self.megabytes * 4_000, self.seconds);
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_gpumem")]).args(arguments);
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let mut pipe = child.stderr.take().ok_or("it has no stderr")?;
        let errors = thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        });
        let mut spent = Spent::default();
        let status = loop {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                break status;
            }
            spent = spent.with_peak_of(&child);
            thread::sleep(Duration::from_millis(2));
        };
        let errors = errors.join().expect("it does not panic").map_err(|error| error.to_string())?;
        spent.is_rejected = status.code() == Some(2);
        let what = |why: &str| format!("gpumem {} {why} ({status}, {spent:?}): {errors}", arguments.join(" "));
        let is_reported = errors.lines().all(|line| line.starts_with("gpumem: "));
        match status.code() {
            None => Err(what("was killed")),
            _ if spent.megabytes > self.megabytes => Err(what("took too much memory")),
            Some(0) if errors.is_empty() => Ok(spent),
            Some(2) if is_reported && !errors.is_empty() => Ok(spent),
            _ => Err(what("ended otherwise than with 0, or with 2 and a reason")),
        }
    }
}

impl Spent {
    /// Raises the memory to the peak of a running process, as the kernel reports it.
    fn with_peak_of(self, child: &Child) -> Self {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        Self { megabytes: self.megabytes.max(peak.unwrap_or(0_u64) / 1_000), ..self }
    }
}
