//! Tests that a library is known for each block, even for a small one.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use gpumem_core::model::library;

use super::*;

/// Compiles the program and its libraries, which are in C, into the folder. Returns the path of the folder.
fn compiled(folder: &Folder) -> String {
    let of = |source: &str, to: &str, options: &[&str]| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/callers").join(source);
        let mut cc = Command::new("cc");
        let output = cc.arg("-O1").args(options).arg(source).args(["-ldl", "-lpthread", "-o"]).arg(folder.file(to));
        let output = output.output().expect("there is a compiler of C");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let shared = ["-shared", "-fPIC"];
    let paddings = [("libone.so", "0"), ("libtwo.so", "64"), ("libthree.so", "128"), ("libcudart.so.12", "192")];
    for (name, padding) in paddings {
        of("library.c", name, &[&shared[..], &[&format!("-DPADDING=\"{padding}\"")]].concat());
    }
    of("program.c", "program", &[]);
    folder.file("")
}

/// Returns the allocated bytes of each library, and the number of different stacks of blocks below 1 MiB.
fn by_library(file: &str) -> (BTreeMap<String, u64>, usize) {
    let mut reader = Reader::new(File::open(file).expect("it is there")).expect("it can be read");
    let (mut blocks, mut sums) = (Vec::new(), BTreeMap::new());
    while let Some(step) = reader.step().expect("it can be read") {
        if let Step::Event(event) = step
            && let EventKind::Alloc { block, .. } = event.kind
            && !block.kind.is_taken_by_driver()
        {
            blocks.push(block);
        }
    }
    assert_eq!(reader.end(), Some(&End::Complete), "{file}");
    let definitions = reader.definitions();
    for block in &blocks {
        let frames = definitions.frames(block.stack);
        *sums.entry(library(&frames).unwrap_or("not known").to_owned()).or_default() += block.bytes.get();
    }
    let small: BTreeSet<_> =
        blocks.iter().filter(|block| block.bytes.get() < 1 << 20).map(|block| block.stack.0).collect();
    (sums, small.len())
}

#[test]
fn each_block_has_the_library_that_called() {
    let folder = Folder::new();
    let (file, libraries) = (folder.file("a.capture"), compiled(&folder));
    let program = folder.file("program");
    let all = [("libone.so", 120), ("libthree.so", 14), ("libtwo.so", 120_128 + (4 << 20)), ("program", 120_000_000)];
    let all: BTreeMap<_, _> = all.map(|(name, bytes)| (name.to_owned(), bytes)).into();
    let unknown: BTreeMap<_, _> = [("not known".to_owned(), all.values().sum())].into();
    for (stacks, expected) in [("native", (&all, 4)), ("python", (&all, 4)), ("none", (&unknown, 1))] {
        let command = ["run", "--stacks", stacks, "-o", &file, "--", &program, &libraries];
        let outcome = machine().run_program(&built("gpumem-command"), &command);
        assert!(outcome.is_clean(), "{outcome}");
        let (sums, functions) = by_library(&file);
        assert_eq!((&sums, functions), expected, "{outcome}");
    }
}
