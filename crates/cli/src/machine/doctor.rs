//! The checks of `gpumem doctor`, which find out why gpumem does not work here, or not well.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use gpumem::{Gauge, intercept::Source};
use gpumem_core::{export::shortened_command, model::Bytes, report::counted};
use gpumem_driver::{
    settings::{self, Setting, settings},
    source::{self, machine},
};
use gpumem_inject::variable;
use serde::Serialize;

use super::{
    gpus::Machine,
    injection,
    processes::{Known, Process, Recording, Usage},
    system,
};
use crate::run;

/// The result of all checks. The field names are those in JSON.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Diagnosis {
    pub(crate) checks: Vec<Check>,
    pub(crate) trace: NewTrace,
    pub(crate) settings: Vec<SettingInUse>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    /// The next step for the user. Empty if there is none, or if `found` contains it.
    pub(crate) next: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Ok,
    /// Something works less well than it could.
    Warning,
    /// Something does not work.
    Problem,
}

impl Verdict {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// The gauge of a trace in a program that starts in this environment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NewTrace {
    pub(crate) gauge: &'static str,
    pub(crate) source: &'static str,
    pub(crate) why_not_exact: Option<String>,
    pub(crate) why_not_dispatch: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct SettingInUse {
    pub(crate) name: &'static str,
    /// The value in effect.
    pub(crate) value: String,
    /// Where the value comes from: `environment` or `default`.
    pub(crate) from: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) is_usable: bool,
}

impl Diagnosis {
    pub(crate) fn make() -> Self {
        // The checks include the notices that the library would print.
        gpumem::sink::set_sink(gpumem::sink::Sink::Off);
        let mut checks = Checks::default();
        let machine = checks.nvml();
        let cuda = checks.cuda();
        if let Ok(machine) = &machine {
            checks.gpus(machine);
            checks.memory(machine, &Usage::read(machine, &mut Known::default()));
        }
        let is_missing = |why: &gpumem::Error| why.is_missing_library();
        checks.device_files(Driver {
            has_libraries: !(machine.as_ref().is_err_and(is_missing) && cuda.as_ref().is_err_and(is_missing)),
            has_module: ["/proc/driver/nvidia/version", "/sys/module/nvidia"]
                .iter()
                .any(|path| Path::new(path).exists()),
            is_in_container: container().is_some(),
        });
        let machine = machine.ok();
        let status = gpumem::status();
        checks.sources(&status);
        checks.injection();
        checks.profilers(machine.as_ref());
        checks.surroundings(machine.as_ref());
        checks.command();
        let settings = settings().all();
        checks.settings(&settings);
        let text = |error: Option<gpumem::Error>| error.map(|error| error.to_string());
        let trace = NewTrace {
            gauge: status.gauge.name(),
            source: status.source.name(),
            why_not_exact: text(status.why_not_exact),
            why_not_dispatch: text(status.why_not_dispatch),
        };
        let settings = settings.into_iter().map(SettingInUse::of).collect();
        Self { checks: checks.0, trace, settings }
    }

    pub(crate) fn has_problem(&self) -> bool {
        self.checks.iter().any(|check| check.verdict == Verdict::Problem)
    }
}

const ENVIRONMENT: &str = "environment";

impl SettingInUse {
    fn of(setting: Setting) -> Self {
        let Setting { name, meaning, default, stands_for, is_usable, .. } = setting;
        let from = if stands_for.is_some() { ENVIRONMENT } else { "default" };
        Self { name, value: stands_for.unwrap_or_else(|| default.replace('`', "")), from, meaning, is_usable }
    }

    /// Returns whether the user set the value.
    pub(crate) fn is_set(&self) -> bool {
        self.from == ENVIRONMENT
    }
}

/// The parts of the driver that this machine has, apart from its device files.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux has device files"))]
struct Driver {
    /// True if NVML or CUDA can be loaded.
    has_libraries: bool,
    /// True if the kernel module is loaded. A container sees the module of its host.
    has_module: bool,
    is_in_container: bool,
}

#[cfg(target_os = "linux")]
impl Driver {
    /// Returns the next step if device files are missing. `create` is the command that creates them, which only works
    /// with a loaded module.
    fn next_step(self, create: &str) -> String {
        match self {
            Self { has_module: true, is_in_container: true, .. } => {
                "start the container with --gpus all (the driver of the host is loaded)".to_owned()
            }
            Self { has_module: true, .. } => format!("create the device files: run `{create}`"),
            Self { is_in_container: true, .. } => {
                "the host has no loaded driver: install and load it there, then start the container with --gpus all"
                    .to_owned()
            }
            Self { has_libraries: true, .. } => "load the kernel module: run `modprobe nvidia`".to_owned(),
            Self { .. } => "no driver is installed: install the NVIDIA driver".to_owned(),
        }
    }
}

#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn add(&mut self, name: &'static str, verdict: Verdict, found: impl Into<String>, next: &str) {
        self.0.push(Check { name, verdict, found: found.into(), next: next.to_owned() });
    }

    fn ok(&mut self, name: &'static str, found: impl Into<String>) {
        self.add(name, Verdict::Ok, found, "");
    }

    /// Adds a failed check. Errors of the library contain a next step.
    fn failed(&mut self, name: &'static str, verdict: Verdict, why: &impl ToString) {
        self.add(name, verdict, why.to_string(), "");
    }

    fn nvml(&mut self) -> Result<Machine, gpumem::Error> {
        let machine = Machine::read();
        match &machine {
            Ok(machine) => {
                let version = machine.nvml_version.as_deref().unwrap_or("version not known");
                self.ok("NVML", format!("{version}{}", loaded("libnvidia-ml")));
                let driver = machine.driver_version.as_deref().unwrap_or("version not known");
                let cuda = machine.cuda_version.as_ref().map(|cuda| format!(", for CUDA up to {cuda}"));
                self.ok("driver", format!("{driver}{}", cuda.unwrap_or_default()));
            }
            Err(why) => self.failed("NVML", Verdict::Problem, why),
        }
        machine
    }

    fn cuda(&mut self) -> Result<(), gpumem::Error> {
        let devices = machine::cuda_devices();
        match &devices {
            Ok(devices) if devices.is_empty() => {
                let next = if env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
                    "change CUDA_VISIBLE_DEVICES"
                } else {
                    "compare `nvidia-smi -L`"
                };
                self.add("CUDA", Verdict::Problem, "no device is visible to programs", next);
            }
            Ok(devices) => {
                let count = counted(devices.len() as u64, "device", "devices");
                self.ok("CUDA", format!("{count}{}", loaded("libcuda")));
            }
            Err(why) => self.failed("CUDA", Verdict::Problem, why),
        }
        devices.map(drop)
    }

    fn gpus(&mut self, machine: &Machine) {
        for not_read in &machine.not_read {
            let verdict = if not_read.is_error { Verdict::Problem } else { Verdict::Warning };
            self.failed("GPU", verdict, &format!("{}: {}", not_read.what, not_read.why));
        }
        if machine.gpus.is_empty() {
            let next = "in a container, start it with --gpus all; else see `lspci` and dmesg";
            self.add("GPU", Verdict::Problem, "the driver finds no GPU", next);
        }
        for gpu in &machine.gpus {
            if let (Some(index), Some(name)) = (gpu.index, &gpu.name) {
                self.ok("GPU", format!("{index}: {name}{}", if gpu.mig == Some(true) { ", in MIG mode" } else { "" }));
            }
            if gpu.mig == Some(true) && gpu.mig_devices.is_empty() {
                let next = "create instances: nvidia-smi mig -cgi";
                self.add("MIG", Verdict::Problem, "a GPU is in MIG mode and has no slices", next);
            }
        }
    }

    /// Adds a line for each GPU: its free memory and, if little is free, who has the rest.
    fn memory(&mut self, machine: &Machine, usage: &Usage) {
        for gpu in &machine.gpus {
            let (Some(index), Some(free), Some(total)) = (gpu.index, gpu.memory.free_bytes, gpu.memory.total_bytes)
            else {
                continue;
            };
            let found = format!("{index}: {} of {} are free", Bytes::new(free), Bytes::new(total));
            if free >= total / NEARLY_FULL {
                self.ok("memory", found);
                continue;
            }
            let processes: Vec<_> = usage.processes.iter().filter(|process| process.gpu == index).collect();
            let holders = match usage.gpus.iter().find(|of_gpu| of_gpu.gpu == index) {
                Some(of_gpu) => holders_in_words(&processes, of_gpu.not_listed_bytes),
                None => "its processes cannot be read, and `gpumem ps` says why".to_owned(),
            };
            self.add("memory", Verdict::Warning, format!("{found}; {holders}"), next_for_full(&processes));
        }
    }

    #[cfg(target_os = "linux")]
    fn device_files(&mut self, driver: Driver) {
        use rustix::fs::{Access, access};

        // If everything works, it does not matter how: some systems use other files.
        if is_wsl() || self.0.iter().all(|check| check.verdict == Verdict::Ok) {
            return;
        }
        let names = |name: &str| name.starts_with("nvidia") && !name.starts_with("nvidia-caps");
        let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
        let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
        files.retain(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(names));
        files.sort();
        let name = "/dev/nvidia*";
        let closed: Vec<_> = files
            .iter()
            .filter(|path| access(path.as_path(), Access::READ_OK | Access::WRITE_OK).is_err())
            .map(|path| path.display().to_string())
            .collect();
        let is_missing = |file: &str| !files.iter().any(|path| path == Path::new(file));
        let missing: Vec<_> =
            ["/dev/nvidiactl", "/dev/nvidia-uvm"].into_iter().filter(|file| is_missing(file)).collect();
        if files.is_empty() {
            self.add(name, Verdict::Problem, "there are none", &driver.next_step("nvidia-modprobe -c 0 -u"));
        } else if !closed.is_empty() {
            let next = "give this user access (group video or render)";
            self.add(name, Verdict::Problem, format!("{} cannot be opened by this user", closed.join(", ")), next);
        } else if !missing.is_empty() {
            let are = if missing.len() == 1 { "is" } else { "are" };
            let found = format!("{} {are} missing", missing.join(" and "));
            let create = if is_missing("/dev/nvidiactl") { "nvidia-modprobe -c 0 -u" } else { "nvidia-modprobe -u" };
            self.add(name, Verdict::Warning, found, &driver.next_step(create));
        } else {
            self.ok(name, format!("{} files can be opened", files.len()));
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn device_files(&mut self, _: Driver) {}

    fn sources(&mut self, status: &gpumem::intercept::Status) {
        let dispatch = source::can_intercept(Source::Dispatch);
        let cupti = source::can_intercept(Source::Cupti);
        let is_simulated = status.source == Source::Simulation;
        // All of them have the same reason, which is printed above.
        let is_blamed = |checks: &Self, why: &gpumem::Error| {
            let why = why.to_string();
            checks.0.iter().any(|check| check.found == why)
        };
        match &dispatch {
            _ if is_simulated => {}
            Ok(()) => self.ok("dispatch table", "allocations can be intercepted in libcuda, for gpumem run too"),
            Err(why) if is_blamed(self, why) => {}
            Err(why) => {
                let why = format!("{why}; `gpumem run` cannot record");
                self.failed("dispatch table", Verdict::Problem, &why);
            }
        }
        match &cupti {
            _ if is_simulated => {}
            Ok(()) => {
                let version = source::cupti_version().map_or_else(|| "version not known".to_owned(), cupti_in_words);
                let needed = if dispatch.is_ok() { "; not used while the dispatch table can be used" } else { "" };
                self.ok("CUPTI", format!("{version}{}{needed}", loaded("libcupti")));
            }
            Err(why) if is_blamed(self, why) => {}
            Err(_) if dispatch.is_ok() => self.ok("CUPTI", "not found, and not needed"),
            Err(why) => self.failed("CUPTI", Verdict::Warning, why),
        }
        let gauge = format!("gauge {}, source {}", status.gauge.name(), status.source.name());
        match &status.why_not_exact {
            None => self.ok("traces", gauge),
            Some(why) if is_blamed(self, why) => {
                self.add("traces", Verdict::Problem, gauge, "see above");
            }
            Some(why) => {
                let verdict = if status.gauge == Gauge::Off { Verdict::Problem } else { Verdict::Warning };
                self.failed("traces", verdict, &format!("{gauge}: {why}"));
            }
        }
    }

    fn injection(&mut self) {
        let found = match injection::tool() {
            Some(tool) => format!("{} is `{}`, which `gpumem run` loads as well", variable::INJECTION, tool.display()),
            None => format!("{} is not set", variable::INJECTION),
        };
        self.ok("injection", found);
    }

    /// Checks for other profilers. A process can have one CUPTI subscriber, so only programs that share a process with
    /// gpumem matter.
    fn profilers(&mut self, machine: Option<&Machine>) {
        let indices = machine.into_iter().flat_map(|machine| machine.gpus.iter().filter_map(|gpu| gpu.index));
        let mut pids: Vec<u32> = indices
            .flat_map(|index| machine::processes_on(index).unwrap_or_default())
            .map(|process| process.pid)
            .filter(|pid| system::has_loaded(*pid, "libcupti") == Some(true))
            .collect();
        pids.sort_unstable();
        pids.dedup();
        if !pids.is_empty() {
            let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
            self.ok("profilers", format!("processes with CUPTI: {}", pids.join(", ")));
        }
    }

    fn surroundings(&mut self, machine: Option<&Machine>) {
        if let Some(container) = container() {
            let found = format!("{container}: the driver may list no processes, or process ids from outside");
            self.ok("container", found);
        }
        if is_wsl() {
            let next = "traces are exact all the same; the memory of processes is in Windows' task manager";
            self.add("WSL2", Verdict::Warning, "the driver reports no memory of processes", next);
        }
        let is_mig = machine.is_some_and(|machine| machine.gpus.iter().any(|gpu| gpu.mig == Some(true)));
        if is_mig {
            self.ok("MIG", "a program sees one slice, and its memory as the device's");
        }
        if let Ok(scope) = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
            match scope.trim() {
                "0" | "1" => self.ok("ptrace", format!("scope {}", scope.trim())),
                scope => {
                    let found = format!("scope {scope}: debuggers and Python's `remote_exec` need root");
                    self.add("ptrace", Verdict::Ok, found, "`gpumem run` needs no ptrace");
                }
            }
        }
    }

    /// Checks the requirements of `gpumem run`.
    fn command(&mut self) {
        match run::check() {
            Ok(path) => self.ok("gpumem run", format!("the injected library is {}", path.display())),
            Err(why) => self.failed("gpumem run", Verdict::Problem, &why),
        }
    }

    fn settings(&mut self, settings: &[Setting]) {
        for setting in settings.iter().filter(|setting| !setting.is_usable) {
            let why = setting.stands_for.clone().unwrap_or_default();
            self.add("settings", Verdict::Problem, format!("{} {why}", setting.name), "unset or correct it");
        }
        let [recording, baseline] = [settings::settings().recording(), settings::settings().baseline.clone()];
        for (name, file) in [("GPUMEM_CAPTURE", recording), ("GPUMEM_BASELINE", baseline)] {
            let folder = file.as_deref().and_then(Path::parent).filter(|folder| *folder != Path::new(""));
            if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
                let what = format!("{name}: there is no folder `{}`", folder.display());
                self.add("settings", Verdict::Problem, what, "create it, or name a file in another folder");
            }
        }
    }
}

/// A GPU with less than this part of its memory free is nearly full.
const NEARLY_FULL: u64 = 20;
/// At most this many processes of a GPU are named.
const MOST_PROCESSES: usize = 3;

/// Returns the command that shows what the driver took on a full GPU.
fn next_for_full(processes: &[&Process]) -> &'static str {
    let is_recorded = |process: &&Process| matches!(process.recording, Recording::Recorded { .. });
    if processes.iter().any(is_recorded) {
        "`gpumem watch` shows what the driver took in recorded processes"
    } else {
        "`gpumem run` records a program, and `gpumem report` shows what the driver took"
    }
}

/// Returns who has the memory of a GPU: `in use by python train.py (4711) 65.9 GiB, tritonserver (913) 13 GiB and 2 more processes; 9 MiB
/// by no process that the driver lists`.
fn holders_in_words(processes: &[&Process], not_listed: Option<u64>) -> String {
    let named = |process: &&&Process| {
        let command =
            process.command.as_deref().map_or_else(|| "?".to_owned(), |command| shortened_command(command, 40));
        let bytes = process.used_bytes.map_or_else(|| "?".to_owned(), |bytes| Bytes::new(bytes).to_string());
        format!("{command} ({}) {bytes}", process.pid)
    };
    let words: Vec<_> = processes.iter().take(MOST_PROCESSES).map(|process| named(&process)).collect();
    let more = processes.len().saturating_sub(MOST_PROCESSES) as u64;
    let more =
        if more > 0 { format!(" and {}", counted(more, "more process", "more processes")) } else { String::new() };
    if words.is_empty() {
        return "the driver lists no process".to_owned();
    }
    let listed = format!("in use by {}{more}", words.join(", "));
    match not_listed.filter(|bytes| *bytes > 0) {
        Some(bytes) => format!("{listed}; {} by no process that the driver lists", Bytes::new(bytes)),
        None => listed,
    }
}

/// Returns the file from which this process loaded a library, such as `, /usr/lib/libcuda.so.580.159.04`. Empty if
/// there is none.
fn loaded(library: &str) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| Some(PathBuf::from(&line[line.find('/')?..])));
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(library));
        name.is_some_and(|rest| rest.starts_with(".so"))
    };
    paths.into_iter().find(is_it).map(|path| format!(", {}", path.display())).unwrap_or_default()
}

/// Turns `130002` into `of CUDA 13.0.2`. Before CUDA 12.6, the number is the interface's version.
fn cupti_in_words(version: u32) -> String {
    match version {
        100_000.. => format!("of CUDA {}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
        _ => format!("version {version} of the interface"),
    }
}

fn is_wsl() -> bool {
    fs::read_to_string("/proc/version").is_ok_and(|version| version.to_ascii_lowercase().contains("microsoft"))
}

fn container() -> Option<&'static str> {
    let variable = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    match () {
        () if variable("KUBERNETES_SERVICE_HOST") => Some("Kubernetes"),
        () if Path::new("/.dockerenv").exists() => Some("Docker"),
        () if Path::new("/run/.containerenv").exists() => Some("Podman"),
        () if variable("APPTAINER_CONTAINER") || variable("SINGULARITY_CONTAINER") => Some("Apptainer"),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_cupti() {
        assert_eq!(cupti_in_words(130_202), "of CUDA 13.2.2");
        assert_eq!(cupti_in_words(24), "version 24 of the interface");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_next_step_fits_what_is_missing_of_the_driver() {
        let next = |has_libraries, has_module, is_in_container| {
            Driver { has_libraries, has_module, is_in_container }.next_step("nvidia-modprobe -u")
        };
        assert_eq!(next(false, false, false), "no driver is installed: install the NVIDIA driver");
        assert_eq!(next(true, false, false), "load the kernel module: run `modprobe nvidia`");
        for has_libraries in [false, true] {
            assert_eq!(next(has_libraries, true, false), "create the device files: run `nvidia-modprobe -u`");
            assert!(next(has_libraries, true, true).starts_with("start the container with --gpus all"));
            assert!(
                next(has_libraries, false, true)
                    .starts_with("the host has no loaded driver: install and load it there")
            );
        }
    }

    #[test]
    fn the_processes_on_a_full_gpu_are_named() {
        let process = |pid, command: Option<&str>, used_bytes| Process {
            gpu: 0,
            pid,
            user: None,
            command: command.map(str::to_owned),
            used_bytes,
            kind: "compute",
            is_visible: Some(true),
            recording: Recording::None,
        };
        let all = [
            process(1, Some("python train.py"), Some(65 << 30)),
            process(2, None, Some(13 << 30)),
            process(3, Some("Xorg"), None),
            process(4, Some("a"), Some(1)),
            process(5, Some("b"), Some(1)),
        ];
        let all: Vec<_> = all.iter().collect();
        assert_eq!(
            holders_in_words(&all, None),
            "in use by python train.py (1) 65 GiB, ? (2) 13 GiB, Xorg (3) ? and 2 more processes"
        );
        let one = holders_in_words(&all[..1], Some(9 << 20));
        assert_eq!(one, "in use by python train.py (1) 65 GiB; 9 MiB by no process that the driver lists");
        assert_eq!(holders_in_words(&[], Some(9 << 20)), "the driver lists no process");
        assert!(next_for_full(&all).starts_with("`gpumem run` records"));
        let recorded = Process { recording: Recording::Recorded { files: Vec::new() }, ..all[0].clone() };
        assert!(next_for_full(&[all[1], &recorded]).starts_with("`gpumem watch` shows"));
    }

    #[test]
    fn what_this_process_has_loaded() {
        assert!(loaded("libc").contains("/libc.so"), "{}", loaded("libc"));
        assert_eq!(loaded("libno-such-library"), "");
    }
}
