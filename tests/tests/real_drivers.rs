//! Tests the hooks in the real libcuda of four drivers, without a GPU. The drivers come from Debian's packages. A driver that
//! cannot be downloaded is skipped, with a message.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpumem_driver::source::compare_sources::intercepted_functions;
use gpumem_tests::{built, output_of, wait};

/// The package of each driver, and the version of Debian that contains it.
const PACKAGES: [(&str, &str, &str); 4] = [
    ("470", "libnvidia-tesla-470-cuda1", "bookworm"),
    ("525", "libnvidia-tesla-cuda1", "bookworm"),
    ("535", "libcuda1", "bookworm"),
    ("550", "libcuda1", "trixie"),
];

/// The time limit for all downloads together, which are 14 MB.
const LIMIT: Duration = Duration::from_secs(120);

/// Each intercepted function returns the same code with hooks and without, and each slot holds a hook.
#[test]
fn hooks_change_no_result() {
    let drivers = Path::new(env!("CARGO_TARGET_TMPDIR")).join("drivers");
    for (version, driver) in drivers_in(&drivers) {
        let driver = match driver {
            Ok(driver) => driver,
            Err(why) => {
                gpumem_tests::skipped(format_args!("no driver {version}: {why}"));
                continue;
            }
        };
        let functions = intercepted_functions();
        let calls = functions.iter().flat_map(|name| [format!("slot_is {name}"), format!("call {name} 0 0 0 0 0 0")]);
        let calls: Vec<String> = std::iter::once("call cuInit 0".to_owned()).chain(calls).collect();
        let probe = built("probe");
        let bare = answers(Command::new(&probe).args(&calls), &driver);
        let recording = drivers.join(format!("{version}.gpumem"));
        let mut command = Command::new(built("gpumem-command"));
        command.args(["run", "--output"]).arg(&recording).arg("--").arg(&probe).arg("inject").args(&calls);
        let hooked = answers(command.env("XDG_CACHE_HOME", &drivers), &driver);
        let _ = fs::remove_file(&recording);

        assert_eq!(hooked.first().map(String::as_str), Some("> inject: 1"), "{version}: {hooked:#?}");
        let (mut known, mut codes) = (0, Vec::new());
        for (bare, hooked) in bare.iter().zip(&hooked[1..]) {
            if let Some((function, owner)) = bare.strip_prefix("> slot_is ").and_then(|answer| answer.split_once(": "))
            {
                // A driver need not have all functions.
                if !owner.starts_with("no answer") {
                    assert_eq!(owner, "driver", "{version}: {function}");
                    assert_eq!(*hooked, format!("> slot_is {function}: other"), "{version}");
                    known += 1;
                }
            } else {
                assert_eq!(bare, hooked, "{version}");
                codes.extend(bare.rsplit_once(": ").and_then(|(_, code)| code.parse::<u32>().ok()));
            }
        }
        assert_eq!(bare.len() + 1, hooked.len(), "{version}: {hooked:#?}");
        assert!(known > 50 && codes.len() == known + 1, "{version}: {known} functions, {codes:?}");
        codes.sort_unstable();
        codes.dedup();
        // In a dry run, functions with many arguments are replaced as well.
        let steps = ["call cuInit 0", "slot_is cuLaunchKernel", "slot_is cuMemcpyDtoH_v2", "slot_is cuMemAlloc_v2"];
        let mut command = Command::new(built("gpumem-command"));
        command.args(["run", "--dry", "--output"]).arg(&recording).arg("--").arg(&probe).arg("inject").args(steps);
        let dry = answers(command.env("XDG_CACHE_HOME", &drivers), &driver);
        let _ = fs::remove_file(&recording);
        assert!(dry.len() == 5 && dry[2..].iter().all(|answer| answer.ends_with(": other")), "{version}: {dry:#?}");
        println!("driver {version}: {known} of {} functions, codes {codes:?}", functions.len());
    }
}

/// Returns the answers of a program to its commands, with the libcuda of this folder.
fn answers(command: &mut Command, driver: &Path) -> Vec<String> {
    let command =
        command.env("LD_LIBRARY_PATH", driver).env_remove("CUDA_INJECTION64_PATH").env("GPUMEM_REPORT", "off");
    let output = output_of(command);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let answers: Vec<String> = text.lines().filter(|line| line.starts_with("> ")).map(str::to_owned).collect();
    // The probe fails if the driver lacks a function.
    let has_ended = output.status.code().is_some_and(|code| code < 2);
    assert!(has_ended, "{}\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    answers
}

/// Returns the folder with the libcuda of each driver, or the reason why there is none. The folders are kept from run to run.
fn drivers_in(folder: &Path) -> Vec<(&'static str, Result<PathBuf, String>)> {
    let end = Instant::now() + LIMIT;
    let is_there = |driver: &Path| driver.join("libcuda.so.1").is_file();
    let mut lists = None;
    let mut driver = |(version, package, suite): (&'static str, &str, &str)| {
        let driver = folder.join(version);
        if is_there(&driver) {
            return (version, Ok(driver));
        }
        let lists = lists.get_or_insert_with(|| Apt::new(folder.join("apt"), end));
        let result = lists.as_ref().map_err(Clone::clone).and_then(|apt| apt.unpack(package, suite, &driver));
        (version, result.map(|()| driver))
    };
    let drivers = PACKAGES.map(&mut driver).into();
    let _ = fs::remove_dir_all(folder.join("apt"));
    drivers
}

/// Debian's package manager, with separate package lists.
struct Apt {
    folder: PathBuf,
    end: Instant,
}

impl Apt {
    const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

    fn new(folder: PathBuf, end: Instant) -> Result<Self, String> {
        if !Path::new(Self::KEYS).is_file() {
            return Err(format!("{} is not there: this is not a Debian system", Self::KEYS));
        }
        let write = || -> io::Result<()> {
            for empty in ["state/lists/partial", "cache/archives/partial", "etc/apt.conf.d", "etc/preferences.d"] {
                fs::create_dir_all(folder.join(empty))?;
            }
            let source =
                |suite: &str| format!("deb [signed-by={}] http://deb.debian.org/debian {suite} non-free\n", Self::KEYS);
            fs::write(folder.join("etc/sources.list"), source("bookworm") + &source("trixie"))?;
            let at = folder.display();
            let settings = format!(
                "Dir::Etc \"{at}/etc\";\nDir::Etc::sourceparts \"-\";\nDir::State \"{at}/state\";\n\
                 Dir::State::status \"/dev/null\";\nDir::Cache \"{at}/cache\";\nAPT::Sandbox::User \"\";\n\
                 Acquire::Languages \"none\";\nAcquire::Retries \"1\";\nAcquire::http::Timeout \"10\";\n"
            );
            fs::write(folder.join("apt.conf"), settings)
        };
        write().map_err(|error| format!("{} cannot be written: {error}", folder.display()))?;
        let apt = Self { folder, end };
        apt.run("apt-get", &["update", "-qq"])?;
        Ok(apt)
    }

    /// Downloads a package and keeps its libcuda.
    fn unpack(&self, package: &str, suite: &str, driver: &Path) -> Result<(), String> {
        let failed = |error: io::Error| format!("{package} cannot be unpacked: {error}");
        let folder = self.folder.join(format!("{package}-{suite}"));
        fs::create_dir_all(&folder).map_err(failed)?;
        self.run_in(&folder, "apt-get", &["download", "-qq", &format!("{package}/{suite}")])?;
        let packages = files(&folder).map_err(failed)?;
        let [downloaded] = &packages[..] else { return Err(format!("{package} is not one file: {packages:?}")) };
        self.run_in(&folder, "dpkg-deb", &["-x", &downloaded.to_string_lossy(), "content"])?;
        let content = files(&folder.join("content")).map_err(failed)?;
        let name =
            |file: &&PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libcuda.so."));
        let library = content.iter().find(name).ok_or_else(|| format!("{package} has no libcuda: {content:?}"))?;
        fs::create_dir_all(driver).map_err(failed)?;
        fs::rename(library, driver.join("libcuda.so.1")).map_err(failed)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Result<(), String> {
        self.run_in(&self.folder, program, arguments)
    }

    /// Runs a program in this folder until it ends, or until the time is over.
    fn run_in(&self, folder: &Path, program: &str, arguments: &[&str]) -> Result<(), String> {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(folder).env("APT_CONFIG", self.folder.join("apt.conf"));
        let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| format!("{program} cannot be started: {error}"))?;
        let ended = wait(&mut child, self.end.saturating_duration_since(Instant::now()));
        let status = ended
            .map_err(|error| format!("{program}: {error}"))?
            .ok_or_else(|| format!("{program} {} takes too long", arguments.join(" ")))?;
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        if status.success() {
            return Ok(());
        }
        Err(format!("{program} {}: {}", arguments.join(" "), said.lines().last().unwrap_or("no message")))
    }
}

/// Returns the files in a folder and in all folders inside it, without links.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()? {
            kind if kind.is_dir() => all.extend(files(&entry.path())?),
            kind if kind.is_file() => all.push(entry.path()),
            _ => {}
        }
    }
    Ok(all)
}
