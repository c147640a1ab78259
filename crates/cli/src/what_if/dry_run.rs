//! One dry run and its result.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use gpumem_core::model::Bytes;
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tempfile::TempDir;

use crate::{
    failure::Failure,
    history::History,
    recording::complete_for_report,
    report::overview::{DeviceOverview, Overview},
};

/// The result of a dry run.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    /// The highest value that the driver handed out to a process on one device.
    pub(super) most: u64,
    /// The memory of a card on which no request fails: the sum of all processes at their peaks, with what the driver takes for them.
    pub(super) enough: u64,
    /// The number of requests that failed for good.
    pub(super) rejected: u64,
    /// The number of values that the program read although they were not computed.
    pub(super) unknown_values: u64,
    /// Why the program failed.
    pub(super) failed: Option<String>,
}

/// Dry runs of one program. Dropping this removes their recordings.
pub(super) struct Trials {
    command: Vec<OsString>,
    folder: TempDir,
    count: AtomicUsize,
    is_interrupted: Arc<AtomicBool>,
}

impl Trials {
    pub(super) fn new(command: &[OsString]) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("gpumem-what-if-").tempdir();
        let folder = folder.map_err(|error| {
            let what = format!("`{}` cannot be written", env::temp_dir().display());
            Failure::new(what, error, "set TMPDIR to another folder")
        })?;
        let is_interrupted = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            _ = signal_hook::flag::register(signal, Arc::clone(&is_interrupted));
        }
        Ok(Self { command: command.to_owned(), folder, count: AtomicUsize::new(0), is_interrupted })
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Runs the program on a card with these variables: `NAME=VALUE`, separated by spaces.
    pub(super) fn run(&self, environment: &str, card: Bytes) -> Result<Outcome, Failure> {
        let folder = self.folder.path().join(self.count.fetch_add(1, Relaxed).to_string());
        let failed = |error| Failure::new("a dry run cannot be started", error, "");
        fs::create_dir(&folder).map_err(failed)?;
        let output = File::create(folder.join("output")).map_err(failed)?;
        let mut command = Command::new(env::current_exe().map_err(failed)?);
        command.args(["run", "--dry", "--stacks", "none", "--output"]).arg(folder.join("a.capture"));
        command.args(["--card", &format!("{}B", card.get()), "--"]).args(&self.command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        command.envs(environment.split_whitespace().filter_map(|variable| variable.split_once('=')));
        let status = self.wait(command.process_group(0).spawn().map_err(failed)?);
        // A killed process has left a part of its recording in shared memory.
        recordings(&folder).for_each(|recording| _ = complete_for_report(&recording));
        let status = status?;
        let outcome = outcome(&folder, status.success(), &status.to_string());
        _ = fs::remove_dir_all(&folder);
        Ok(outcome)
    }

    /// Waits for a dry run, and ends the processes that it has left behind. If the user ends this command, the dry run
    /// ends as well.
    fn wait(&self, mut child: Child) -> Result<ExitStatus, Failure> {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let end = |signal| _ = group.map(|group| kill_process_group(group, signal));
        loop {
            match child.try_wait() {
                Ok(Some(status)) => {
                    end(Signal::KILL);
                    return Ok(status);
                }
                Ok(None) if self.is_interrupted.load(Relaxed) => {
                    // The process has a second to end by itself.
                    end(Signal::TERM);
                    for _ in 0..50 {
                        if !matches!(child.try_wait(), Ok(None)) {
                            break;
                        }
                        thread::sleep(Duration::from_millis(20));
                    }
                    end(Signal::KILL);
                    _ = child.wait();
                    return Err(Failure::new("the dry runs are not complete", "a signal interrupted them", ""));
                }
                Ok(None) => thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(Failure::new("cannot wait for a dry run", error, "")),
            }
        }
    }
}

fn recordings(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "capture"))
}

fn outcome(folder: &Path, is_success: bool, status: &str) -> Outcome {
    let overviews: Vec<_> =
        recordings(folder).filter_map(|path| Some(Overview::of(&History::read(&path).ok()?))).collect();
    let most = |overview: &Overview| overview.devices.iter().filter_map(|device| device.peak_bytes).max();
    let peaks: Vec<u64> = overviews.iter().filter_map(most).collect();
    let enough = |overview: &Overview| overview.devices.iter().filter_map(DeviceOverview::needed_bytes).max();
    let enough = overviews.iter().filter_map(enough).sum();
    // A request that the allocator repeated successfully after emptying its cache did not fail for good.
    let missed =
        |overview: &Overview| overview.rejected.as_ref().map_or(0, |rejected| rejected.count - rejected.obtained_soon);
    let rejected = overviews.iter().map(missed).sum();
    let unknown = |overview: &Overview| overview.dry_run.as_ref().map_or(0, |dry| dry.unknown_values);
    let unknown_values = overviews.iter().map(unknown).sum();
    let most = peaks.iter().max().copied();
    let failed = match (is_success, most) {
        (true, _) if rejected > 0 => Some("an allocation failed, and the program continued without it".to_owned()),
        (true, Some(_)) => None,
        (true, None) => Some("it allocated nothing on a GPU".to_owned()),
        (false, _) => {
            let output = fs::read(folder.join("output")).unwrap_or_default();
            let output = String::from_utf8_lossy(&output);
            // The summary of `gpumem run` starts after an empty line, with the file.
            let own = output.split_once("\n\n").map_or(&*output, |(own, _)| own);
            // The message that nothing was recorded names a file of this command, so it is left out.
            let is_message = |line: &&str| !line.trim().is_empty() && !line.starts_with("gpumem: nothing was recorded");
            let lines = || own.lines().rev().filter(is_message);
            let last = lines().find(|line| !line.starts_with("gpumem: ")).or_else(|| lines().next());
            let said = last.map(|last| format!(": {last}")).unwrap_or_default();
            Some(format!("it ended with {status}{said}"))
        }
    };
    Outcome { most: most.unwrap_or(0), enough, rejected, unknown_values, failed }
}
