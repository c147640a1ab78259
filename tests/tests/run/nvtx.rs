//! NVTX: ranges are scopes. The program and the other tool are in C, with NVIDIA's own headers.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

use gpumem_core::{
    model::ScopeId,
    recording::{Item, items_of},
};
use gpumem_tests::skipped;

use super::*;

/// The package with the headers.
const HEADERS: &str = "nvidia-nvtx-cu12==12.9.79";

/// The program and the tool, compiled; `None`, and the test is skipped, if that cannot be done.
fn compiled() -> Option<[String; 2]> {
    static COMPILED: std::sync::OnceLock<Result<[String; 2], String>> = std::sync::OnceLock::new();
    COMPILED.get_or_init(compile).clone().map_err(|why| skipped(format_args!("no program with NVTX: {why}"))).ok()
}

fn compile() -> Result<[String; 2], String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nvtx");
    let include = folder.join("nvidia/nvtx/include");
    let ran = |command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
        Ok::<_, String>((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    if !include.is_dir() {
        let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--timeout", "20", HEADERS, "--target"];
        let (is_done, why) = ran(Command::new("python3").args(pip).arg(&folder))?;
        if !is_done {
            return Err(why);
        }
    }
    let of = |source: &str, to: &str, options: &[&str]| {
        let to = folder.join(to).display().to_string();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/nvtx").join(source);
        let mut cc = Command::new("cc");
        let cc = cc.arg("-I").arg(&include).args(options).arg(source).args(["-o", &to, "-ldl", "-lpthread"]);
        let (is_done, why) = ran(cc)?;
        assert!(is_done, "{why}");
        Ok::<_, String>(to)
    };
    Ok([of("program.c", "program", &[])?, of("tool.c", "tool.so", &["-shared", "-fPIC"])?])
}

/// How many MiB were allocated in each scope itself, by name.
fn by_scope(file: &str) -> BTreeMap<String, u64> {
    let (items, end) = items_of(File::open(file).expect("it is there")).expect("it can be read");
    assert_eq!(end, End::Complete, "{file}");
    let (mut names, mut opened) = (BTreeMap::new(), BTreeMap::new());
    let (mut of_threads, mut sums) = (BTreeMap::<_, Vec<ScopeId>>::new(), BTreeMap::new());
    for item in items {
        match item {
            Item::Callsite(callsite) => _ = names.insert(callsite.id, callsite.name.unwrap_or_default()),
            Item::Event(event) => {
                let open = of_threads.entry(event.thread.0).or_default();
                match event.kind {
                    EventKind::Open { scope, spec } => {
                        opened.insert(scope, spec.callsite);
                        open.push(scope);
                    }
                    EventKind::Close { scope } => open.retain(|open| *open != scope),
                    EventKind::Alloc { block, .. } => {
                        let name = open.last().map_or("-", |scope| &names[&opened[scope]]);
                        *sums.entry(name.to_owned()).or_default() += block.bytes.get() >> 20;
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    sums
}

fn expected() -> BTreeMap<String, u64> {
    // The first MiB is allocated in `load`, which was begun before the driver was initialized, and before the next range.
    let sums = [("load", 64), ("layer é", 2), ("bad \u{fffd} name", 4), ("-", 9), ("worker", 16), ("(no name)", 32)];
    sums.map(|(name, mib)| (name.to_owned(), mib)).into()
}

#[test]
fn ranges_are_scopes() {
    let Some([program, _]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run(&machine(), &file, &[&program]);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(by_scope(&file), expected(), "{outcome}");
}

/// Names and ranges without end cost a bounded number of scopes.
#[test]
fn ranges_without_end_are_bounded() {
    let Some([program, _]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run(&machine(), &file, &[&program, "100000"]);
    assert!(outcome.is_clean(), "{outcome}");
    let sums = by_scope(&file);
    assert_eq!(sums.values().sum::<u64>(), 127, "{sums:?}");
}

#[test]
fn another_tool_gets_every_call() {
    let Some([program, tool]) = compiled() else { return };
    let folder = Folder::new();
    let (file, counted) = (folder.file("a.capture"), folder.file("counted"));
    let machine =
        machine().env("TOOL_FILE", &counted).env("NVTX_INJECTION64_PATH", &tool).env("CUDA_INJECTION64_PATH", &tool);
    let outcome = run(&machine, &file, &[&program]);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(by_scope(&file), expected(), "{outcome}");
    // It was initialized, and told 6 pushes and 9 pops.
    let counted = fs::read_to_string(counted).expect("the tool has written it");
    assert_eq!(counted, "1 6 9 1 1 1\n", "{outcome}");
}
