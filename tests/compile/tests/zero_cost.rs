//! Tests the pattern of `docs/book/src/zero-cost.md`: without the feature, guards and attributes cost nothing.
//!
//! `tests/zero_cost` has a library that uses the pattern and an application that uses the library. Both stand for packages of a
//! user: a separate Cargo compiles copies of them under `target/tmp`.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder of this package.
const HERE: &str = env!("CARGO_MANIFEST_DIR");
/// The page of the documentation that describes the pattern.
const PAGE: &str = include_str!("../../../docs/book/src/zero-cost.md");
/// A folder in `target` that belongs to this test.
const COPY: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/zero_cost");

const FILES: [&str; 6] = [
    "Cargo.toml",
    "library/Cargo.toml",
    "library/src/lib.rs",
    "library/src/gpu_mem.rs",
    "application/Cargo.toml",
    "application/src/main.rs",
];

/// Copies the packages to a folder of this name. The lock file of this workspace names the versions that are available without a
/// network.
fn copied(name: &str) -> PathBuf {
    let (from, to) = (Path::new(HERE).join("../zero_cost"), Path::new(COPY).join(name));
    let gpumem = Path::new(HERE).join("../../gpumem");
    for file in FILES {
        let text = fs::read_to_string(from.join(file)).expect("the package is there");
        let text = text.replace("\"../../../gpumem\"", &format!("{:?}", gpumem.display().to_string()));
        let file = to.join(file);
        fs::create_dir_all(file.parent().expect("a file is in a folder")).expect("the folder can be made");
        fs::write(file, text).expect("the file can be written");
    }
    fs::copy(Path::new(HERE).join("../../Cargo.lock"), to.join("Cargo.lock")).expect("the lock file can be copied");
    to
}

fn program(variable: &str, otherwise: &str) -> Command {
    let mut command = Command::new(env::var_os(variable).unwrap_or_else(|| OsString::from(otherwise)));
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("GPUMEM") {
            command.env_remove(name);
        }
    }
    command
}

/// Runs Cargo with the target folder of this workspace and without a network. Returns its stdout.
#[track_caller]
fn cargo(packages: &Path, arguments: &[&str]) -> String {
    let mut command = program("CARGO", "cargo");
    command.arg("--offline").args(arguments).current_dir(packages).env("GPUMEM_SIM", "16GiB");
    command
        .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is a folder in `target`"));
    finished(&mut command)
}

#[track_caller]
fn finished(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_library_uses_the_macro_of_the_documentation() {
    let file = Path::new(HERE).join("../zero_cost/library/src/gpu_mem.rs");
    let code = fs::read_to_string(file).expect("the package is there");
    assert!(PAGE.contains(&code), "{PAGE}");
}

#[test]
fn without_the_feature_no_package_of_gpumem_is_in_the_tree() {
    let packages = copied("tree");
    let names = |package: &str, features: &[&str]| {
        let tree = ["tree", "--prefix=none", "--target=all", "--edges=normal,build,dev", "--package", package];
        let tree = cargo(&packages, &[&tree, features].concat());
        tree.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(names("library", &[]), ["library"]);
    assert_eq!(names("application", &[]), ["application", "library"]);
    for package in ["library", "application"] {
        let names = names(package, &["--features=gpumem"]);
        assert!(["gpumem", "gpumem-macros"].iter().all(|ours| names.iter().any(|name| name == ours)), "{names:?}");
    }
}

#[test]
fn without_the_feature_the_assembly_is_that_of_a_library_without_guards() {
    let [with_guards, without] = ["with_guards", "without"].map(copied);
    let file = without.join("library/src/lib.rs");
    let source = fs::read_to_string(&file).expect("it was written");
    // The lines are left empty instead of removed, because a panic message contains the number of its line.
    let ours = |line: &&str| ["gpumem", "gpu_mem", "#[macro_use]"].iter().any(|word| line.contains(word));
    let bare = source.lines().map(|line| if ours(&line) { "" } else { line }).collect::<Vec<_>>().join("\n");
    let removed = source.lines().filter(ours).count();
    assert!(removed >= 20, "{bare}");
    fs::write(&file, bare).expect("it can be written");

    let [with_guards, without] = [with_guards, without].map(|packages| {
        let mut rustc = program("RUSTC", "rustc");
        rustc.args(["--crate-name=library", "--crate-type=lib", "--edition=2021", "--emit=asm", "-Copt-level=3"]);
        rustc.args(["-Dwarnings", "-Aunexpected_cfgs", "-oassembly.s", "library/src/lib.rs"]).current_dir(&packages);
        finished(&mut rustc);
        fs::read_to_string(packages.join("assembly.s")).expect("rustc writes it")
    });
    for function in ["new", "train", "step", "shared", "later", "step_later"] {
        // A symbol contains the name of its function after the length of the name.
        let symbol = format!("{}{function}", function.len());
        assert!(without.contains(&symbol), "no function `{function}` was compiled");
    }
    assert!(without == with_guards, "compare the files assembly.s in {COPY}");
}

#[test]
fn a_library_prints_only_if_its_application_enables_the_feature() {
    let packages = copied("run");
    let run = ["run", "--quiet", "--package=application"];
    assert_eq!(cargo(&packages, &run), "");
    let printed = cargo(&packages, &[&run[..], &["--features=gpumem"]].concat());
    let scopes = printed.lines().filter_map(|line| line.split_once('(')?.1.strip_suffix(')'));
    let sum = ["step > sum", "step > sum: last", "sum > shared: exit", "step > sum: exit"];
    let step = [&sum[..], &["Trainer::train > step: exit"]].concat();
    let trained =
        [&step[..], &["trainer: step 0"], &step, &["trainer: step 1", "trainer > Trainer::train: exit"]].concat();
    let task = ["later > step: exit", "task > later: exit", "trainer > task: exit", "trainer: exit"];
    let expected = [&trained[..], &sum, &task].concat();
    assert_eq!(scopes.collect::<Vec<_>>(), expected, "{printed}");
}
