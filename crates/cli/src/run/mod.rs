//! `gpumem run`: starts the program with the library loaded, waits for it, and completes the recordings of its
//! processes.

pub(crate) mod attach;
mod closings;
pub(crate) mod control;
mod destination;
pub(crate) mod endings;
mod finish;
mod forwarding_library;
mod library;
mod nvml;
mod options;
mod program;
mod runtime;

use std::{
    borrow::Cow,
    env,
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use gpumem_core::export::Role;
use gpumem_driver::{ring_memory::RingPages, source::machine::cuda_devices};
use gpumem_inject::variable;

pub(crate) use self::options::{RecordingOptions, RunOptions};
use self::{
    closings::Closings,
    destination::Destination,
    finish::{Finished, LOST, finish},
    program::Program,
};
use crate::{
    exit::Exit,
    failure::Failure,
    history::History,
    progress::working,
    report::{limit::Judge, overview::Overview, summary},
    terminal,
};

/// Returns the path of the injected library, or why programs cannot be recorded.
pub(crate) fn check() -> io::Result<std::path::PathBuf> {
    let library = library::unpacked()?;
    control::folder()?;
    Ok(library)
}

/// Runs the program, recorded if that is possible.
pub(crate) fn run(options: &RunOptions) -> Result<Exit, Failure> {
    let mut program = Program::new(&options.command);
    // The program's processes find the account while this process holds it.
    let account = options.cards.account();
    let destination = match prepare(options, account.as_ref(), &mut program) {
        Ok(destination) => Some(destination),
        // The user wants a program that does not use the real GPU.
        Err(failure) if options.cards.are_replaced() => {
            terminal::error(&failure);
            terminal::error(&"the program was not started, because it would have used the real GPU");
            return Ok(Exit::Failed);
        }
        Err(failure) => {
            terminal::error(&failure);
            None
        }
    };
    let is_dormant = options.dormant && destination.is_some();
    // Without it, the end of a killed process is known to a second.
    let closings = destination.as_ref().and_then(|destination| Closings::watch(destination.file()).ok());
    let ended = program.run(|pid| {
        if is_dormant {
            terminal::error(&format_args!("process {pid} is not recorded until `gpumem start {pid}`"));
        }
    })?;
    let mut judge = Judge::new(&options.limits);
    if let Some(destination) = destination.filter(|_| ended.has_started) {
        let finished = working("completing the recordings", || finish(&destination, closings.as_deref(), is_dormant));
        endings::notify(&finished.recordings);
        explain(&finished, &destination, options);
        for path in &finished.unfinished {
            judge.unknown(path, &"its process is still running");
        }
        for (path, why) in &finished.lost {
            match why {
                Some(error) => judge.unknown(path, error),
                None => judge.unknown(path, &LOST),
            }
        }
        summarize(&finished.recordings, options, ended.signal, &mut judge);
    }
    let exit = judge.finish().unwrap_or_else(|failure| {
        terminal::error(&failure);
        Exit::Failed
    });
    Ok(if ended.code() == 0 { exit } else { Exit::Program(ended.code()) })
}

/// Tells the program's processes how to record themselves. Returns where the recordings will be.
fn prepare(options: &RunOptions, account: Option<&RingPages>, program: &mut Program) -> Result<Destination, Failure> {
    let runs_on = "the program runs without being recorded";
    if let Some(outer) = env::var_os(variable::FILE).filter(|path| !path.is_empty()) {
        let cause = format!("the `gpumem run` around it records to `{}`", outer.display());
        return Err(Failure::new("this `gpumem run` records nothing", cause, ""));
    }
    for (variable, option) in [("GPUMEM_DRY", "--dry --card"), ("GPUMEM_LIMIT", "--limit")] {
        if env::var_os(variable).is_some_and(|value| !value.is_empty()) {
            terminal::error(&format_args!("{variable} has no effect on `gpumem run`; use its option {option}"));
        }
    }
    let RunOptions { output, recorded, dormant, cards, command, .. } = options;
    let runs_on = if cards.are_replaced() { "" } else { runs_on };
    let destination = Destination::new(output.as_deref(), &command[0], &command[1..])
        .map_err(|(path, error)| Failure::new(format_args!("cannot record to `{}`", path.display()), error, runs_on))?;
    if let Some(requested) = &destination.instead_of {
        let (requested, file) = (requested.display(), destination.file().display());
        terminal::error(&format_args!("another `gpumem run` records to `{requested}`; this one records to `{file}`"));
    }
    let library = library::unpacked().map_err(|error| Failure::new("the injected library", error, runs_on))?;
    if *dormant {
        let folder =
            control::folder().map_err(|error| Failure::new("the folder for `gpumem start`", error, runs_on))?;
        program.environment(variable::CONTROL, folder);
    }
    let cards_of_program = cards.of_program(account.and_then(RingPages::segment));
    program.environment(variable::OPTIONS, recorded.options(cards_of_program).to_text());
    // Libraries of other tools are loaded too.
    for (own, other) in [(variable::INJECTION, variable::OTHER_INJECTION), (variable::NVTX, variable::OTHER_NVTX)] {
        program.environment(other, env::var_os(own).unwrap_or_default());
        program.environment(own, &library);
    }
    let is_counted = cards.count.is_some();
    if cards.are_replaced() {
        let put = nvml::put_before(program, &library, is_counted);
        _ = put.inspect_err(|error| terminal::error(&Failure::new("NVML shows the real GPU", error, "")));
    }
    if cards.dry {
        let done = preload(program, &library, is_counted);
        if let (Err(error), true) = (done, is_counted) {
            terminal::error(&Failure::new("the CUDA runtime shows the GPU of the machine", error, ""));
        }
    }
    program.environment(variable::FILE, destination.file());
    Ok(destination)
}

/// Preloads functions of the library ahead of NCCL's, and with several GPUs also ahead of the CUDA runtime's.
fn preload(program: &mut Program, library: &Path, is_counted: bool) -> io::Result<()> {
    if library.to_string_lossy().contains([' ', ':']) {
        return Err(io::Error::other(format!("the loader takes `{}` for several files", library.display())));
    }
    let mut list = OsString::new();
    if is_counted {
        list.push(runtime::unpacked(library)?);
        list.push(":");
    }
    list.push(library);
    program.first_in("LD_PRELOAD", list);
    Ok(())
}

/// Reports the recordings that are unfinished or lost, and the reason if nothing was recorded.
fn explain(finished: &Finished, destination: &Destination, options: &RunOptions) {
    let running = || destination.running();
    let who = |pid: u32| format!("process {pid}, which the program started, is still running");
    for path in &finished.unfinished {
        let of_path = |pid: &u32| path.to_string_lossy().split('.').any(|part| part == format!("pid{pid}"));
        let cause = running()
            .into_iter()
            .find(of_path)
            .map_or("a process that the program started is still running".to_owned(), who);
        let what = format!("the recording `{}` is not finished", path.display());
        let next =
            format!("`gpumem report {}` shows its contents so far", in_shell(&below_folder(path).to_string_lossy()));
        terminal::error(&Failure::new(what, cause, next));
    }
    for (path, why) in &finished.lost {
        if let Some(error) = why {
            terminal::error(&Failure::new(format!("the recording `{}`", path.display()), error, ""));
            continue;
        }
        let next = if options.recorded.only_peak {
            "--only-peak writes the recording each second: nothing is left of a process that is killed or aborts before"
        } else {
            "see the output of its process, or run it again with room on the disk or with another --output"
        };
        terminal::error(&Failure::new(format!("nothing is recorded in `{}`", path.display()), LOST, next));
    }
    let Finished { recordings, unfinished, lost } = finished;
    if !recordings.is_empty() || !unfinished.is_empty() || !lost.is_empty() {
        return;
    }
    let what = format!("nothing was recorded in `{}`", destination.file().display());
    let failure = if options.dormant {
        Failure::new(what, "`gpumem start` was not called, or nothing was allocated after it", "")
    } else if let [pid, ..] = *running() {
        let next = format!("its allocations will be in `{}`", destination.of_process(pid).display());
        Failure::new(what, who(pid), next)
    } else if env::var_os("GPUMEM_SIM").is_some_and(|devices| !devices.is_empty()) {
        let cause = "`gpumem run` records CUDA programs, and GPUMEM_SIM is set";
        Failure::new(what, cause, "a program with simulated devices records itself with GPUMEM_CAPTURE=FILE")
    } else if let Err(why) = cuda_devices() {
        Failure::new(what, why, "`gpumem doctor` shows what is missing")
    } else {
        let cause = "no process of the program asked for memory of a GPU, or it was started with another environment (`sudo`, `env -i`, a \
                     profiler: write `nsys profile gpumem run …`), or the driver could not load the library, or the recording was moved or \
                     removed";
        let next = if options.cards.count.is_some() {
            "the CUDA runtime does not start with more GPUs than the machine has if it is linked into the program statically"
        } else if options.cards.are_replaced() {
            "if it used a GPU, it was the real one"
        } else {
            ""
        };
        Failure::new(what, cause, next)
    };
    terminal::error(&failure);
    if destination.file().exists() {
        terminal::error(&format_args!("the file `{}` is from before this run", destination.file().display()));
    }
}

/// Prints the summary on stderr, because stdout belongs to the program, and compares the recordings with the limits.
fn summarize(recordings: &[PathBuf], options: &RunOptions, signal: Option<i32>, judge: &mut Judge<'_>) {
    let mut overviews = Vec::new();
    for recording in recordings {
        let recording = below_folder(recording);
        match History::read(recording) {
            Ok(history) => {
                let overview = Overview::of(&history);
                judge.add(&history, &overview);
                overviews.push(overview);
            }
            Err(failure) => {
                terminal::error(&failure);
                judge.unknown(recording, &"it cannot be read");
            }
        }
    }
    if options.recorded.has_torch()
        && !overviews.is_empty()
        && overviews.iter().all(|overview| overview.torch.is_none())
    {
        let cause = "no recorded process has used PyTorch with CUDA";
        terminal::error(&Failure::new("--torch had nothing to record", cause, ""));
    }
    if !overviews.is_empty() {
        let printed = terminal::print_text_on_stderr(|out, paint| {
            writeln!(out)?;
            if let Some(signal) = signal {
                let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
                let line = format!("The program was ended by {name} (signal {signal}).");
                writeln!(out, "{}", paint.on(Role::Alarm, line))?;
            }
            summary::write_all(&overviews, out, paint)?;
            match &*overviews {
                [only] => writeln!(out, "{}", paint.on(Role::Faint, next_step(&only.file))),
                _ => Ok(()),
            }
        });
        // If stderr is closed, the summary cannot be printed anywhere else.
        drop(printed);
    }
}

/// Returns the path relative to the current folder, as a user would type it.
fn below_folder(path: &Path) -> &Path {
    env::current_dir().ok().and_then(|folder| path.strip_prefix(folder).ok()).unwrap_or(path)
}

/// Suggests the next commands, as they are typed in a shell.
fn next_step(file: &str) -> String {
    let file = in_shell(file);
    format!("More: gpumem report --calls {file}, or --html page.html {file}")
}

fn in_shell(file: &str) -> Cow<'_, str> {
    shlex::try_quote(file).unwrap_or(file.into())
}
