//! A machine with the stand-in driver, and a child process on it.

use std::env;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{self, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::Outcome;
use crate::patch::Patch;
use crate::process::{built, wait};

/// A library that the stand-in driver stands in for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`.
    Cuda,
    /// `libnvidia-ml`.
    Nvml,
}

/// The location of a machine's libcupti.
#[derive(Debug, Clone)]
pub(crate) enum Cupti {
    /// The machine has none.
    Missing,
    /// It is on the loader's path.
    OnPath(String),
    /// It is in a folder below the one that this variable names.
    Under { variable: String, folder: String, name: String },
}

impl Library {
    /// The libraries that come with the driver.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Nvml];

    /// Returns the name as messages spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda",
            Self::Nvml => "libnvidia-ml",
        }
    }
}

/// A machine with the stand-in driver, and its faults.
#[derive(Debug, Clone)]
pub struct Standin {
    pub(crate) settings: Vec<String>,
    pub(crate) faults: Vec<String>,
    pub(crate) missing: Vec<Library>,
    pub(crate) damaged: Vec<Library>,
    pub(crate) hidden: Vec<String>,
    pub(crate) patches: Vec<Patch>,
    pub(crate) cupti: Cupti,
    pub(crate) env: Vec<(OsString, OsString)>,
    pub(crate) stderr: Option<Arc<OwnedFd>>,
    pub(crate) limit: Duration,
}

impl Default for Standin {
    fn default() -> Self {
        Self::new()
    }
}

impl Standin {
    /// Creates a machine with one GPU of 16 GiB and no faults, without a CUDA toolkit and therefore without libcupti. The driver's
    /// functions cannot be recognised as stubs, like the functions of drivers before 470: see [`dispatch`](Self::dispatch).
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
            // Only a program that hangs takes this long, however busy the machine is.
            limit: Duration::from_secs(180),
        }
    }

    /// Adds a setting of `GPUMEM_STANDIN`, such as `devices=2`.
    #[must_use]
    pub fn set(mut self, setting: impl Into<String>) -> Self {
        self.settings.push(setting.into());
        self
    }

    /// Sets the number of GPUs, each with 1 GiB more than the previous one.
    #[must_use]
    pub fn devices(self, count: u32) -> Self {
        self.set(format!("devices={count}"))
    }

    /// Makes the driver take memory by itself, for contexts, modules, stacks, heaps, streams and graphs; see the stand-in driver's
    /// `taken.rs`.
    #[must_use]
    pub fn driver_memory(self) -> Self {
        self.set("driver_memory=1")
    }

    /// Adds a fault of `GPUMEM_STANDIN_FAIL`, such as `cuInit=803` or `nvmlDeviceGetMemoryInfo_v2[1]=15@3`.
    #[must_use]
    pub fn fail(mut self, fault: impl Into<String>) -> Self {
        self.faults.push(fault.into());
        self
    }

    /// Removes this library.
    #[must_use]
    pub fn without(mut self, library: Library) -> Self {
        self.missing.push(library);
        self
    }

    /// Replaces this library by a file that is not a library.
    #[must_use]
    pub fn damaged(mut self, library: Library) -> Self {
        self.damaged.push(library);
        self
    }

    /// Removes this function from the driver.
    #[must_use]
    pub fn without_symbol(mut self, symbol: impl Into<String>) -> Self {
        self.hidden.push(symbol.into());
        self
    }

    /// Adds libcupti on the loader's path.
    #[must_use]
    pub fn cupti(self) -> Self {
        self.cupti_named("libcupti.so.13")
    }

    /// Adds libcupti on the loader's path under another name, such as `libcupti.so.12`.
    #[must_use]
    pub fn cupti_named(mut self, name: impl Into<String>) -> Self {
        self.cupti = Cupti::OnPath(name.into());
        self
    }

    /// Adds libcupti in `folder` below the folder that the environment's `variable` names, and not on the loader's
    /// path.
    #[must_use]
    pub fn cupti_under(mut self, variable: &str, folder: &str, name: &str) -> Self {
        self.cupti = Cupti::Under { variable: variable.to_owned(), folder: folder.to_owned(), name: name.to_owned() };
        self
    }

    /// Sets a variable of the child's environment, which otherwise has no CUDA or gpumem variables.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Sends the child's stderr to a descriptor. It is then not part of the outcome.
    #[must_use]
    pub fn stderr(mut self, to: OwnedFd) -> Self {
        self.stderr = Some(Arc::new(to));
        self
    }

    /// Sets the time limit of the child. A child that runs longer counts as hanging.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs the probe with these commands, separated by semicolons.
    ///
    /// # Panics
    /// Panics if the child cannot be set up or run, and if it hangs.
    pub fn run(&self, script: &str) -> Outcome {
        let steps = script.split(';').map(str::trim).filter(|step| !step.is_empty());
        self.run_program(&built("probe"), &steps.collect::<Vec<_>>())
    }

    /// Runs a program with these arguments.
    ///
    /// # Panics
    /// Panics for the same reasons as [`run`](Self::run).
    pub fn run_program(&self, program: &Path, arguments: &[&str]) -> Outcome {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let of_cupti =
            self.install(folder.path()).unwrap_or_else(|error| panic!("cannot install the stand-in driver: {error}"));
        let log = folder.path().join("calls");
        let output = |name: &str| File::create(folder.path().join(name)).map(Stdio::from);
        let spawned = || -> io::Result<process::Child> {
            let mut command = Command::new(program);
            for (name, _) in env::vars_os() {
                let name_text = name.to_string_lossy();
                if ["GPUMEM", "CUDA_", "LD_", "VIRTUAL_ENV", "CONDA_"]
                    .iter()
                    .any(|prefix| name_text.starts_with(prefix))
                {
                    command.env_remove(&name);
                }
            }
            command
                .args(arguments)
                .env("LD_LIBRARY_PATH", folder.path())
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
        // The stand-in driver writes no file if it is not called.
        let text = |path: &Path| {
            fs::read(path).map_or_else(|_| String::new(), |bytes| String::from_utf8_lossy(&bytes).into_owned())
        };
        let outcome = Outcome {
            machine: self.to_string(),
            script: arguments.join("; "),
            stdout: text(&folder.path().join("stdout")),
            stderr: text(&folder.path().join("stderr")),
            calls: text(&log).lines().map(str::to_owned).collect(),
            exit: exit.map(|status| status.to_string()),
            succeeded: exit.is_some_and(|status| status.success()),
        };
        assert!(outcome.exit.is_some(), "hung for {:?} and was killed\n{outcome}", self.limit);
        outcome
    }
}

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
