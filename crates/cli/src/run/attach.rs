//! Attaches to a running program, for `gpumem attach`: Python 3.14 and later can run code on request, and that code
//! loads the library of `gpumem run`.

use std::{
    env, fs,
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use gpumem_inject::variable;

use super::{RecordingOptions, control, destination, library};
use crate::{failure::Failure, machine, recording, terminal};

/// The code for the interpreter that reaches the program.
const CODE: &str = include_str!("attach.py");

/// How long the command waits for the program, which runs the code between two Python instructions on its main thread.
const PATIENCE: Duration = Duration::from_secs(10);

/// The next step for a program that cannot be attached to.
const DORMANT: &str =
    "start the program with `gpumem run --dormant`, then `gpumem start` starts to record it at any time";

/// Python can run code on request since this version.
const OLDEST: (u32, u32) = (3, 14);

/// Starts to record a process. Returns the file of the recording. Without `output`, it is in the current folder.
pub(crate) fn attach(pid: u32, output: Option<PathBuf>, recorded: &RecordingOptions) -> Result<String, Failure> {
    let what = format!("process {pid}");
    let failed = |error: io::Error| Failure::new(&what, error, "");
    let folder = control::folder().map_err(failed)?;
    // The library is already loaded in the process and waits.
    if variable::socket(&folder, pid).exists() {
        return start(pid);
    }
    let process = Target::new(pid).map_err(|AttachError { cause, next }| Failure::new(&what, cause, next))?;
    let library = library::unpacked().map_err(|error| Failure::new("the library", error, ""))?;
    let file = env::current_dir().map_err(failed)?.join(output.unwrap_or_else(|| process.default_name()));
    destination::try_folder(&file)
        .map_err(|error| Failure::new(format!("cannot record to `{}`", file.display()), error, ""))?;
    let [script, answer] = ["py", "answer"].map(|extension| folder.join(format!("attach-{pid}.{extension}")));
    _ = fs::remove_file(&answer);
    let options = recorded.options(None).to_text();
    let texts =
        [folder.as_os_str().as_bytes(), file.as_os_str().as_bytes(), options.as_bytes()].map(variable::python_bytes);
    let code = format!(
        "LIBRARY = {}\nARGUMENTS = [{}]\nANSWER = {}\nSCRIPT = {}\n{CODE}",
        variable::python_bytes(library.as_os_str().as_bytes()),
        texts.join(", "),
        variable::python_bytes(answer.as_os_str().as_bytes()),
        variable::python_bytes(script.as_os_str().as_bytes()),
    );
    write_script(&script, &code).map_err(failed)?;
    process.run(&script).map_err(|AttachError { cause, next }| {
        _ = fs::remove_file(&script);
        Failure::new(&what, cause, next)
    })?;
    let until = Instant::now() + PATIENCE;
    let text = loop {
        if let Ok(text) = fs::read_to_string(&answer) {
            _ = fs::remove_file(&answer);
            break text;
        }
        if Instant::now() > until {
            let cause = "its main thread runs no Python code now, so it has not loaded the library yet";
            return Err(Failure::new(what, cause, format!("it will: try `gpumem attach {pid}` again later")));
        }
        thread::sleep(Duration::from_millis(10));
    };
    if !text.is_empty() {
        return Err(Failure::new(what, text, ""));
    }
    start(pid)
}

fn start(pid: u32) -> Result<String, Failure> {
    let file = control::send(pid, variable::START)?;
    // No command waits for the end of the program, so the next report completes the recording.
    _ = fs::File::create(recording::unattended_marker(Path::new(&file)));
    Ok(file)
}

/// Completes a recording that ended before its program, if no `gpumem run` will do it.
pub(crate) fn complete_if_unattended(file: &str) {
    let file = Path::new(file);
    if recording::unattended_marker(file).exists()
        && let Err(error) = recording::complete(file, None)
    {
        let what = format!("`{}` cannot be completed", file.display());
        terminal::error(&Failure::new(what, error, ""));
    }
}

/// Writes a script that only its owner may change. Otherwise another user could change the code that the program runs.
fn write_script(path: &Path, code: &str) -> io::Result<()> {
    _ = fs::remove_file(path);
    fs::File::options().write(true).create_new(true).mode(0o600).open(path)?.write_all(code.as_bytes())
}

/// Why a process cannot be attached to, and the next step.
#[derive(Debug, PartialEq, Eq)]
struct AttachError {
    cause: String,
    next: String,
}

impl AttachError {
    fn new(cause: impl Into<String>, next: impl Into<String>) -> Self {
        Self { cause: cause.into(), next: next.into() }
    }
}

/// A process that runs Python.
#[derive(Debug)]
struct Target {
    pid: u32,
    /// An interpreter of the same version.
    python: PathBuf,
    /// The arguments of the interpreter, with the script or program that it runs.
    arguments: Vec<Vec<u8>>,
}

impl Target {
    /// Checks everything that can be known before the attempt.
    fn new(pid: u32) -> Result<Self, AttachError> {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let Ok(known) = proc.metadata() else { return Err(AttachError::new("it is not running", "")) };
        let user = rustix::process::geteuid().as_raw();
        if user != 0 && known.uid() != user {
            let cause = format!("it belongs to another user (id {})", known.uid());
            return Err(AttachError::new(cause, "run gpumem as that user"));
        }
        for (kind, name) in [("pid", "it numbers processes"), ("mnt", "it sees files")] {
            let of = |proc: &Path| fs::read_link(proc.join("ns").join(kind)).ok();
            if let (Some(own), Some(other)) = (of(Path::new("/proc/self")), of(&proc))
                && own != other
            {
                let cause = format!("it is in another container: {name} in another way");
                return Err(AttachError::new(cause, "run gpumem in that container"));
            }
        }
        let read = |name: &str| {
            fs::read(proc.join(name)).map_err(|error| {
                let (cause, next) = control::unreadable(&error);
                AttachError::new(cause, next)
            })
        };
        let (environment, arguments) = (read("environ")?, read("cmdline")?);
        let arguments: Vec<_> = arguments.split(|byte| *byte == 0).map(<[u8]>::to_owned).collect();
        check_environment(pid, &environment)?;
        let maps = String::from_utf8_lossy(&read("maps")?).into_owned();
        let executable = fs::read_link(proc.join("exe")).unwrap_or_default();
        let python = interpreter(&executable, &maps)?;
        check_switches(&environment, &arguments)?;
        Ok(Self { pid, python, arguments })
    }

    /// Returns a name such as `server.capture` for a process that runs `server.py`.
    fn default_name(&self) -> PathBuf {
        let script = self.arguments.iter().find_map(|argument| {
            let path = Path::new(std::ffi::OsStr::from_bytes(argument));
            path.file_stem().filter(|_| path.extension().is_some_and(|extension| extension == "py"))
        });
        let stem = script.unwrap_or_else(|| "python".as_ref());
        let mut name = stem.to_owned();
        name.push(".capture");
        name.into()
    }

    /// Makes the process run a script.
    fn run(&self, script: &Path) -> Result<(), AttachError> {
        const CODE: &str = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])";
        let mut command = Command::new(&self.python);
        // With these options, the interpreter imports no files of the user.
        command.args(["-I", "-S", "-c", CODE]).arg(self.pid.to_string()).arg(script);
        let output = command.output().map_err(|error| {
            AttachError::new(format!("its interpreter `{}` cannot be started: {error}", self.python.display()), DORMANT)
        })?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed no reason");
        let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
        Err(explain(last, scope.trim()))
    }
}

/// Explains why Python could not reach the other process.
fn explain(error: &str, ptrace_scope: &str) -> AttachError {
    let is_permission = ["PermissionError", "Operation not permitted", "Permission denied"];
    if !is_permission.iter().any(|text| error.contains(text)) {
        return AttachError::new(format!("Python could not reach it: {error}"), DORMANT);
    }
    match ptrace_scope {
        "1" => AttachError::new(
            "the system lets no process change another one (kernel.yama.ptrace_scope is 1)",
            format!("run gpumem as root, or {DORMANT}"),
        ),
        "2" => AttachError::new(
            "the system lets only root change other processes (kernel.yama.ptrace_scope is 2)",
            format!("run gpumem as root, or {DORMANT}"),
        ),
        "3" => AttachError::new(
            "the system does not let any process change another one (kernel.yama.ptrace_scope is 3)",
            DORMANT,
        ),
        _ => AttachError::new(
            format!("the system does not let gpumem change it ({error})"),
            format!("run gpumem as root, in a container with the capability SYS_PTRACE, or {DORMANT}"),
        ),
    }
}

/// Rejects a process that another gpumem command is responsible for.
fn check_environment(pid: u32, environment: &[u8]) -> Result<(), AttachError> {
    if machine::variable_of(environment, variable::CONTROL).is_some() {
        return Err(AttachError::new(
            "it was started with `gpumem run --dormant`",
            format!("use `gpumem start {pid}`"),
        ));
    }
    if machine::variable_of(environment, variable::FILE).is_some() {
        return Err(AttachError::new("`gpumem run` records it already", ""));
    }
    Ok(())
}

/// Rejects a process whose settings forbid Python to run code of other processes.
fn check_switches(environment: &[u8], arguments: &[Vec<u8>]) -> Result<(), AttachError> {
    const VARIABLE: &str = "PYTHON_DISABLE_REMOTE_DEBUG";
    let by = if machine::variable_of(environment, VARIABLE).is_some() {
        VARIABLE
    } else if arguments.iter().any(|argument| argument.ends_with(b"disable-remote-debug")) {
        "-X disable-remote-debug"
    } else {
        return Ok(());
    };
    Err(AttachError::new(format!("{by} forbids its Python to run code on request"), DORMANT))
}

/// Returns the path of the interpreter of a process.
fn interpreter(executable: &Path, maps: &str) -> Result<PathBuf, AttachError> {
    let too_old = |(major, minor): (u32, u32)| {
        let cause =
            format!("its Python {major}.{minor} runs no code on request: {}.{} and later do", OLDEST.0, OLDEST.1);
        AttachError::new(cause, DORMANT)
    };
    let name = executable.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.starts_with("python") {
        let version = version_of(executable).ok_or_else(|| {
            let cause = format!("its interpreter `{}` does not report its version", executable.display());
            AttachError::new(cause, DORMANT)
        })?;
        return if version < OLDEST { Err(too_old(version)) } else { Ok(executable.to_owned()) };
    }
    // The process is another program with Python embedded.
    let library = maps.lines().find_map(|line| {
        let (_, version) = line.rsplit_once("/libpython")?;
        let (major, minor) = version.split_once(".so")?.0.split_once('.')?;
        let digits = |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().ok();
        Some((digits(major)?, digits(minor)?))
    });
    match library {
        None => Err(AttachError::new(format!("it runs `{}`, not Python", executable.display()), DORMANT)),
        Some(version) if version < OLDEST => Err(too_old(version)),
        Some((major, minor)) => {
            let name = format!("python{major}.{minor}");
            let path = env::var_os("PATH").unwrap_or_default();
            let mut found = env::split_paths(&path).map(|folder| folder.join(&name));
            let none = || {
                AttachError::new(format!("there is no `{name}`, which gpumem needs to reach the Python in it"), DORMANT)
            };
            found.find(|path| path.is_file()).ok_or_else(none)
        }
    }
}

fn version_of(python: &Path) -> Option<(u32, u32)> {
    let code = "import sys; print(*sys.version_info[:2])";
    let output = Command::new(python).args(["-I", "-S", "-c", code]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let (major, minor) = text.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lets_nobody_attach_is_named() {
        let cause = |environment: &[&str], arguments: &[&str]| {
            let arguments: Vec<_> = arguments.iter().map(|argument| argument.as_bytes().to_owned()).collect();
            check_switches(environment.join("\0").as_bytes(), &arguments).err().map(|error| error.cause)
        };
        assert_eq!(cause(&["A=b", "PYTHON_DISABLE_REMOTE_DEBUG="], &["python3", "x.py"]), None);
        let by_variable = cause(&["PYTHON_DISABLE_REMOTE_DEBUG=1"], &[]).unwrap();
        assert!(by_variable.starts_with("PYTHON_DISABLE_REMOTE_DEBUG forbids"), "{by_variable}");
        for arguments in [&["python3", "-X", "disable-remote-debug"][..], &["python3", "-Xdisable-remote-debug"]] {
            assert!(cause(&[], arguments).unwrap().starts_with("-X disable-remote-debug forbids"));
        }
    }

    #[test]
    fn a_program_of_gpumem_run_is_left_to_it() {
        let check = |environment: &[&str]| check_environment(7, environment.join("\0").as_bytes());
        assert_eq!(check(&["GPUMEM_RUN_FILE=", "X=GPUMEM_RUN_FILE=a"]), Ok(()));
        assert_eq!(check(&["GPUMEM_RUN_FILE=/a"]).unwrap_err().cause, "`gpumem run` records it already");
        let dormant = check(&["GPUMEM_RUN_FILE=/a", "GPUMEM_RUN_CONTROL=/run"]).unwrap_err();
        assert_eq!(dormant.next, "use `gpumem start 7`");
    }

    #[test]
    fn a_missing_permission_is_explained() {
        let error = "PermissionError: [Errno 1] Operation not permitted";
        for (scope, part) in [
            ("1", "ptrace_scope is 1"),
            ("2", "only root"),
            ("3", "any process"),
            ("0", "SYS_PTRACE"),
            ("", "SYS_PTRACE"),
        ] {
            let AttachError { cause, next } = explain(error, scope);
            assert!(format!("{cause}; {next}").contains(part), "{scope}: {cause}; {next}");
            assert!(next.contains("gpumem run --dormant"), "{next}");
        }
        let other = explain("RuntimeError: Can't find PyRuntime", "0");
        assert_eq!(other.cause, "Python could not reach it: RuntimeError: Can't find PyRuntime");
    }

    #[test]
    fn a_program_with_python_in_it_is_known_by_its_library() {
        let maps = |name: &str| {
            format!(
                "7f00-7f01 r-xp 00000000 08:01 1 /lib/x86_64-linux-gnu/libc.so.6\n7f02-7f03 r-xp 0 08:01 2 {name}\n"
            )
        };
        let cause = |name: &str| interpreter(Path::new("/opt/app/server"), &maps(name)).unwrap_err().cause;
        assert_eq!(cause("/usr/lib/libm.so.6"), "it runs `/opt/app/server`, not Python");
        assert!(cause("/usr/lib/libpython3.11.so.1.0").starts_with("its Python 3.11 runs no code on request"));
        assert!(cause("/usr/lib/libpython3.9d.so.1.0").starts_with("its Python 3.9 "));
        assert!(cause("/usr/lib/libpython9.99.so.1.0").starts_with("there is no `python9.99`"));
    }
}
