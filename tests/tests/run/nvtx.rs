//! Tests that NVTX ranges are scopes. The program and the other tool are written in C, with NVIDIA's headers.

use std::{
    collections::BTreeMap,
    process::{Command, Stdio},
};

use gpumem_core::model::ScopeId;
use gpumem_recording::{Item, items_of};
use gpumem_tests::{CONTEXT, skipped};

use super::*;

/// The package that contains the headers.
const HEADERS: &str = "nvidia-nvtx==13.5.25";

/// Returns the paths of the compiled program, of the compiled tool, and of a compiled library that contains a copy of NVTX. If
/// they cannot be compiled, the test is skipped and the result is `None`.
fn compiled() -> Option<[String; 3]> {
    static COMPILED: std::sync::OnceLock<Result<[String; 3], String>> = std::sync::OnceLock::new();
    COMPILED.get_or_init(compile).clone().map_err(|why| skipped(format_args!("no program with NVTX: {why}"))).ok()
}

fn compile() -> Result<[String; 3], String> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nvtx");
    let include = folder.join("nvidia/cu13/include");
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
    let library = ["-shared", "-fPIC"];
    Ok([of("program.c", "program", &[])?, of("tool.c", "tool.so", &library)?, of("linked.c", "linked.so", &library)?])
}

/// Returns the MiB that were allocated in each scope, without the scopes inside it, by the name of the scope, and the names of
/// all marks.
fn by_scope(file: &str) -> (BTreeMap<String, u64>, Vec<String>) {
    let (items, end) = items_of(File::open(file).expect("it is there")).expect("it can be read");
    assert_eq!(end, End::Complete, "{file}");
    let (mut names, mut opened, mut marks) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
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
                    EventKind::Alloc { block, .. } if !block.kind.is_taken_by_driver() => {
                        let name = open.last().map_or("-", |scope| &names[&opened[scope]]);
                        *sums.entry(name.to_owned()).or_default() += block.bytes.get() >> 20;
                    }
                    EventKind::Mark { callsite } => marks.push(names[&callsite].clone()),
                    _ => {}
                }
            }
            _ => {}
        }
    }
    (sums, marks)
}

fn expected() -> (BTreeMap<String, u64>, Vec<String>) {
    // `load` started before the driver was initialized.
    let scopes = [("load", 65), ("layer é", 2), ("bad \u{fffd} name", 4), ("-", 8), ("worker", 16), ("(no name)", 32)];
    let sums = scopes.into_iter().chain([("libcudf:read", 128), ("libcudf:(no name)", 256)]);
    let marks = ["(no name)", "libcudf:(no name)", "libcudf:(no name) (end)", "started", "started (end)", "mark é"];
    let marks = marks.into_iter().chain(["libcudf:read", "libcudf:read", "libcudf:read (end)"]);
    (sums.map(|(name, mib)| (name.to_owned(), mib)).collect(), marks.map(str::to_owned).collect())
}

#[test]
fn ranges_are_scopes() {
    let Some([program, ..]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run(&machine(), &file, &[&program]);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(by_scope(&file), expected(), "{outcome}");
}

/// Names and ranges without an end have a bounded cost, and no allocation is lost.
#[test]
fn ranges_without_end_are_bounded() {
    let Some([program, ..]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run(&machine(), &file, &[&program, "100000"]);
    assert!(outcome.is_clean(), "{outcome}");
    let (sums, _) = by_scope(&file);
    assert_eq!(sums.values().sum::<u64>(), 511, "{sums:?}");
}

/// Children of forks use NVTX while other threads of their parent do, before and after the driver is initialized.
#[test]
fn children_of_forks_wait_for_no_lock() {
    let Some([program, ..]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let outcome = run(&machine(), &file, &[&program, "0", "150"]);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(by_scope(&file).0, expected().0, "{outcome}");
}

#[test]
fn another_tool_gets_every_call() {
    let Some([program, tool, _]) = compiled() else { return };
    let folder = Folder::new();
    let (file, counted) = (folder.file("a.capture"), folder.file("counted"));
    let machine =
        machine().env("TOOL_FILE", &counted).env("NVTX_INJECTION64_PATH", &tool).env("CUDA_INJECTION64_PATH", &tool);
    let outcome = run(&machine, &file, &[&program]);
    assert!(outcome.is_clean(), "{outcome}");
    assert_eq!(by_scope(&file), expected(), "{outcome}");
    // The tool was initialized once, and counted 7 pushes and 11 pops of the program, 2 pushes and 2 pops of the tool itself, a
    // string, a domain, the start and the end of two ranges, and a mark.
    let counted = fs::read_to_string(counted).expect("the tool has written it");
    assert_eq!(counted, "1 9 13 1 1 2 2 1\n", "{outcome}");
}

/// The program is in Rust, and a library in it contains a copy of NVTX.
#[test]
fn ranges_of_a_program_that_records_itself_are_scopes() {
    let Some([.., linked]) = compiled() else { return };
    let folder = Folder::new();
    let file = folder.file("a.capture");
    let script = format!(
        "{CONTEXT}; library {linked} push early; new; library {linked} push read; call cuMemAlloc_v2 &a 2097152; \
         library {linked} mark here; library {linked} pop_payload -; call cuMemAlloc_v2 &b 1048576; drop; library {linked} pop -"
    );
    let outcome = machine().env("GPUMEM_CAPTURE", &file).run(&script);
    assert!(outcome.is_clean(), "{outcome}");
    let sums = [("read", 2), ("", 1)].map(|(name, mib)| (name.to_owned(), mib));
    assert_eq!(by_scope(&file), (sums.into(), vec!["here".to_owned()]), "{outcome}");
}
