//! Runs gpumem on the stand-in driver: puts a shared object under NVIDIA's names on the loader's path of a child
//! process, with what the test wants to be wrong with it, and reports what the child wrote and which calls it made.
//!
//! The child is `probe`, which takes its commands from its arguments; `src/bin/probe/main.rs` lists them.

mod deeper;
mod device;
pub mod growth;
mod machines;
mod own_process;
mod patch;
mod pending;
mod random;
mod script;
mod simulated;
mod stub;
mod text;

use std::env;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

pub use self::{
    deeper::deeper,
    device::{device, on_the_standin, on_the_standin_with_both_sources, reported_by_both},
    machines::Machines,
    own_process::{Ended, OwnProcess, Running, part},
    pending::Yield,
    random::Random,
    script::{CONTEXT, check, check_answers, each, ensure, ensure_answer, ensure_clean, ensure_error, ensure_unharmed},
    simulated::{reported_lines, simulated_gpu},
    stub::{DEINITIALIZED, Form, Stub},
    text::{at_the_right_margin, without_line_numbers},
};
use crate::patch::{Image, Patch};

/// A library that the stand-in driver stands in for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`.
    Cuda,
    /// `libnvidia-ml`.
    Nvml,
}

/// Where a machine's libcupti lies.
#[derive(Debug, Clone)]
enum Cupti {
    /// Nowhere.
    Missing,
    /// On the loader's path.
    OnPath(String),
    /// In a folder below the one that this variable names.
    Under { variable: String, folder: String, name: String },
}

impl Library {
    /// Those that come with the driver.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Nvml];

    /// The name as messages spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::Nvml => "libnvidia-ml",
        }
    }
}

/// A machine with the stand-in driver, and everything that is to be wrong with it.
#[derive(Debug, Clone)]
pub struct Standin {
    settings: Vec<String>,
    faults: Vec<String>,
    missing: Vec<Library>,
    damaged: Vec<Library>,
    hidden: Vec<String>,
    patches: Vec<Patch>,
    cupti: Cupti,
    env: Vec<(OsString, OsString)>,
    stderr: Option<Arc<OwnedFd>>,
    limit: Duration,
}

impl Default for Standin {
    fn default() -> Self {
        Self::new()
    }
}

impl Standin {
    /// One card of 16 GiB with which nothing is wrong, on a machine without a CUDA toolkit and so without libcupti. The driver's
    /// functions cannot be recognised as stubs, as those of drivers before 470: see [`dispatch`](Self::dispatch).
    pub fn new() -> Self {
        Self {
            settings: Vec::new(),
            faults: Vec::new(),
            missing: Vec::new(),
            damaged: Vec::new(),
            hidden: Vec::new(),
            patches: vec![Patch::Unrecognisable],
            cupti: Cupti::Missing,
            env: Vec::new(),
            stderr: None,
            limit: Duration::from_secs(30),
        }
    }

    /// A setting of `GPUMEM_STANDIN`, such as `devices=2`.
    #[must_use]
    pub fn set(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// This many cards, each with 1 GiB more than the last.
    #[must_use]
    pub fn devices(self, count: u32) -> Self {
        self.set(format!("devices={count}"))
    }

    /// A fault of `GPUMEM_STANDIN_FAIL`, such as `cuInit=803` or `nvmlDeviceGetMemoryInfo_v2[1]=15@3`.
    #[must_use]
    pub fn fail(mut self, fault: impl Into<String>) -> Self {
        self.faults.push(fault.into());
        self
    }

    /// A machine without this library.
    #[must_use]
    pub fn without(mut self, library: Library) -> Self {
        self.missing.push(library);
        self
    }

    /// A machine where this library's file is no library.
    #[must_use]
    pub fn damaged(mut self, library: Library) -> Self {
        self.damaged.push(library);
        self
    }

    /// A driver that lacks this function.
    #[must_use]
    pub fn without_symbol(mut self, symbol: impl Into<String>) -> Self {
        self.hidden.push(symbol.into());
        self
    }

    /// A machine with libcupti on the loader's path.
    #[must_use]
    pub fn cupti(self) -> Self {
        self.cupti_named("libcupti.so.13")
    }

    /// A machine with libcupti on the loader's path under another name, such as `libcupti.so.12`.
    #[must_use]
    pub fn cupti_named(mut self, name: impl Into<String>) -> Self {
        self.cupti = Cupti::OnPath(name.into());
        self
    }

    /// A machine with libcupti in `folder` below the folder that the environment's `variable` names, and not on the
    /// loader's path.
    #[must_use]
    pub fn cupti_under(mut self, variable: &str, folder: &str, name: &str) -> Self {
        self.cupti = Cupti::Under { variable: variable.to_owned(), folder: folder.to_owned(), name: name.to_owned() };
        self
    }

    /// A variable of the child's environment, which has none of CUDA's or gpumem's otherwise.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// What the child writes to stderr goes there, and is not part of the outcome.
    #[must_use]
    pub fn stderr(mut self, to: OwnedFd) -> Self {
        self.stderr = Some(Arc::new(to));
        self
    }

    /// How long the child may take; after that it is taken to hang.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs the probe with these commands, separated by semicolons.
    ///
    /// # Panics
    /// When the child cannot be set up or run, and when it hangs.
    pub fn run(&self, script: &str) -> Outcome {
        let steps = script.split(';').map(str::trim).filter(|step| !step.is_empty());
        self.run_program(&built("probe"), &steps.collect::<Vec<_>>())
    }

    /// Runs a program with these arguments.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_program(&self, program: &Path, arguments: &[&str]) -> Outcome {
        let folder = Folder::new();
        let of_cupti =
            self.install(&folder.0).unwrap_or_else(|error| panic!("cannot install the stand-in driver: {error}"));
        let log = folder.0.join("calls");
        let output = |name: &str| File::create(folder.0.join(name)).map(Stdio::from);
        let spawned = || -> io::Result<process::Child> {
            let mut command = Command::new(program);
            for (name, _) in env::vars_os() {
                let name_text = name.to_string_lossy();
                if ["GPUMEM_", "CUDA_", "LD_", "VIRTUAL_ENV", "CONDA_"]
                    .iter()
                    .any(|prefix| name_text.starts_with(prefix))
                {
                    command.env_remove(&name);
                }
            }
            command
                .args(arguments)
                .env("LD_LIBRARY_PATH", &folder.0)
                .env("GPUMEM_STANDIN", self.settings.join(","))
                .env("GPUMEM_STANDIN_FAIL", self.faults.join(";"))
                .env("GPUMEM_STANDIN_LOG", &log)
                .envs(of_cupti)
                .envs(self.env.iter().map(|(name, value)| (name, value)))
                .stdin(Stdio::null())
                .stdout(output("stdout")?)
                .stderr(match &self.stderr {
                    Some(to) => Stdio::from(to.try_clone()?),
                    None => output("stderr")?,
                })
                .spawn()
        };
        let mut child = spawned().unwrap_or_else(|error| panic!("cannot start the probe: {error}"));
        let exit = wait(&mut child, self.limit).unwrap_or_else(|error| panic!("cannot wait for the probe: {error}"));
        // The stand-in driver writes no file when nobody calls it.
        let text = |path: &Path| {
            fs::read(path).map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        let outcome = Outcome {
            machine: self.to_string(),
            script: arguments.join("; "),
            stdout: text(&folder.0.join("stdout")),
            stderr: text(&folder.0.join("stderr")),
            calls: text(&log).lines().map(str::to_owned).collect(),
            exit: exit.map(|status| status.to_string()),
            succeeded: exit.is_some_and(|status| status.success()),
        };
        assert!(outcome.exit.is_some(), "hung for {:?} and was killed\n{outcome}", self.limit);
        outcome
    }

    /// Puts the shared object into `folder` under the names of the libraries that this machine has. It is one file with
    /// two names, so that the loader loads it once and both libraries see the same cards. libcupti is a file of its own, as
    /// NVIDIA's is: what finds it has to look where it lies. Returns the variable that names its folder.
    fn install(&self, folder: &Path) -> io::Result<Option<(String, PathBuf)>> {
        let mut bytes = image().patched(&self.patches);
        for symbol in &self.hidden {
            hide(&mut bytes, symbol);
        }
        let object = folder.join("standin");
        fs::write(&object, &bytes)?;
        for library in Library::ALL {
            // Where a real driver is installed, the loader would find it under the name that we do not take.
            let names = [format!("{}.so.1", library.name()), format!("{}.so", library.name())];
            let names = &names[..if system_has(library) { 2 } else { 1 }];
            for name in names {
                let file = folder.join(name);
                if self.damaged.contains(&library) || self.missing.contains(&library) && system_has(library) {
                    fs::write(file, "no library")?;
                } else if !self.missing.contains(&library) {
                    symlink(&object, file)?;
                }
            }
        }
        let (place, name, variable) = match &self.cupti {
            Cupti::Missing => return Ok(None),
            Cupti::OnPath(name) => (folder.to_owned(), name, None),
            Cupti::Under { variable, folder: inner, name } => {
                let root = folder.join("elsewhere");
                (root.join(inner), name, Some((variable.clone(), root)))
            }
        };
        fs::create_dir_all(&place)?;
        spell(&mut bytes, SONAME, name);
        fs::write(place.join(name), bytes)?;
        Ok(variable)
    }
}

/// The shared object, read once.
fn image() -> &'static Image {
    static IMAGE: OnceLock<Image> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let path = built(&format!("{}gpumem_standin{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX));
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        Image::new(bytes).unwrap_or_else(|error| panic!("cannot understand {}: {error}", path.display()))
    })
}

/// What the shared object calls itself, which no program asks for.
const SONAME: &str = "libstandi.so.0";

impl Display for Standin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.settings.iter().chain(&self.faults).cloned();
        let libraries = |word: &'static str, of: &[Library]| -> Vec<String> {
            of.iter().map(|library| format!("{word} {}", library.name())).collect()
        };
        let env = self.env.iter().map(|(name, value)| format!("{}={}", name.display(), value.display()));
        let cupti = match &self.cupti {
            Cupti::Missing => None,
            Cupti::OnPath(name) => Some(name.clone()),
            Cupti::Under { variable, folder, name } => Some(format!("${variable}/{folder}/{name}")),
        };
        let all: Vec<String> = cupti
            .into_iter()
            .chain(settings)
            .chain(libraries("without", &self.missing))
            .chain(libraries("damaged", &self.damaged))
            .chain(self.hidden.iter().map(|symbol| format!("without {symbol}")))
            .chain(self.has_dispatch().then(|| "stubs".to_owned()))
            .chain(self.patches.iter().filter(|_| self.has_dispatch()).map(|patch| format!("{patch:?}")))
            .chain(env)
            .collect();
        f.write_str(if all.is_empty() { "a sound machine" } else { "" })?;
        f.write_str(&all.join(", "))
    }
}

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    machine: String,
    script: String,
    exit: Option<String>,
    succeeded: bool,
    /// What the probe and gpumem's reports wrote.
    pub stdout: String,
    /// What gpumem's notices and panics wrote.
    pub stderr: String,
    /// The calls that the driver was asked, in order, such as `nvmlDeviceGetMemoryInfo_v2[0]=15`.
    pub calls: Vec<String>,
}

impl Outcome {
    /// Whether the program ended by itself with 0.
    pub fn succeeded(&self) -> bool {
        self.succeeded
    }

    /// Whether that is so, and nothing in it panicked.
    pub fn is_clean(&self) -> bool {
        self.succeeded && !self.stderr.contains("panicked at")
    }

    /// What the first command of this name answered; `get 1` is found by `get 1` alone.
    ///
    /// # Panics
    /// When there is no such answer.
    pub fn answer(&self, command: &str) -> &str {
        let answer =
            self.stdout.lines().find_map(|line| line.strip_prefix("> ")?.strip_prefix(command)?.strip_prefix(": "));
        answer.unwrap_or_else(|| panic!("no answer to `{command}`\n{self}"))
    }

    /// What every command of this name answered, in order.
    pub fn answers(&self, command: &str) -> Vec<&str> {
        let answer = |line: &'_ str| -> Option<usize> {
            let rest = line.strip_prefix("> ")?.strip_prefix(command)?.strip_prefix(": ")?;
            Some(line.len() - rest.len())
        };
        self.stdout.lines().filter_map(|line| Some(&line[answer(line)?..])).collect()
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

/// A folder for one run, gone afterwards.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("gpumem-tests-{}-{number}", process::id()));
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("cannot make {}: {error}", folder.display()));
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is a few small files in the system's temporary folder.
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Waits for the child, or kills it and returns `None`.
fn wait(child: &mut process::Child, limit: Duration) -> io::Result<Option<process::ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// What Cargo built beside the running test: in the same folder or the one above.
///
/// # Panics
/// When it was not built.
pub fn built(name: &str) -> PathBuf {
    let test = env::current_exe().unwrap_or_else(|error| panic!("the path of this test is not known: {error}"));
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("{name} was not built: {:?}", places.collect::<Vec<_>>()))
}

/// Whether the loader finds this library without our help.
fn system_has(library: Library) -> bool {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let name = format!("{}.so", library.name());
    cache.windows(name.len()).any(|window| window == name.as_bytes())
}

/// Spells the symbol's name differently, so that nobody finds it.
fn hide(object: &mut [u8], symbol: &str) {
    spell(object, symbol, &format!("{}?", &symbol[..symbol.len() - 1]));
}

/// Replaces a name that the loader reads, by one that is as long.
fn spell(object: &mut [u8], old: &str, new: &str) {
    assert_eq!(old.len(), new.len(), "{new} cannot take the place of {old}");
    let name = format!("\0{old}\0").into_bytes();
    // There alone: a search of the whole file takes a tenth of a second where nothing is optimised.
    let names = image().names();
    let places: Vec<usize> = names.filter(|start| object[*start..].starts_with(&name)).collect();
    assert!(!places.is_empty(), "the stand-in driver has no {old}");
    for start in places {
        object[start + 1..start + name.len() - 1].copy_from_slice(new.as_bytes());
    }
}
