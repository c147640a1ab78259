//! Tests that the outputs in the README and in the book come from the examples, on a simulated device.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use gpumem_book_tests::PAGES;

const START: &str = "cargo run ";
/// The example that this package builds as a program. `cargo run` would build all its dependencies again, with fewer features.
const ESTIMATE: &str = "-p gpumem-estimate --example estimate";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A command and its output, as a page shows it.
struct Shown {
    page: String,
    /// Variables for the example, such as `GPUMEM_LEAKS=1`.
    variables: Vec<(String, String)>,
    /// The arguments after `cargo run`.
    arguments: String,
    output: String,
}

/// Returns the blocks of a page that show a command with an output.
fn shown(page: &str, text: &str) -> Vec<Shown> {
    let blocks = text.split("```console\n").skip(1).filter_map(|rest| rest.split_once("```").map(|(block, _)| block));
    let read = |block: &str| {
        let (command, output) = block.split_once('\n')?;
        let (before, arguments) = command.strip_prefix("$ ")?.split_once(START)?;
        let variables = before.split_whitespace().filter_map(|word| word.split_once('='));
        (!output.is_empty() && arguments.contains("--example ")).then(|| Shown {
            page: page.to_owned(),
            variables: variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            arguments: arguments.to_owned(),
            output: comparable(output),
        })
    };
    blocks.filter_map(read).collect()
}

/// Removes the parts that differ between runs and machines: times, process ids, and the lines with the memory of the device.
fn comparable(text: &str) -> String {
    let line = |line: &str| match line.split_once("gpumem: process ").and_then(|(_, rest)| rest.split_once(' ')) {
        Some((_, rest)) => format!("gpumem: process N {rest}\n"),
        // A row of statistics ends with the time of the worst call.
        None if line.ends_with(" s") => format!("{}\n", line.trim_end_matches(|c: char| " .s0123456789".contains(c))),
        None => format!("{}\n", without_value(&without_value(line, "\"time\":"), "\"pid\":")),
    };
    text.lines().filter(|line| !line.contains("GPUMemory(")).map(line).collect()
}

/// Removes the value of this key of a JSON object.
fn without_value(line: &str, key: &str) -> String {
    let value = line.split_once(key).and_then(|(before, rest)| Some((before, rest.split_once(',')?.1)));
    value.map_or_else(|| line.to_owned(), |(before, after)| format!("{before}{key}_,{after}"))
}

fn check(shown: &Shown) {
    let mut command = if shown.arguments == ESTIMATE {
        Command::new(env!("CARGO_BIN_EXE_estimate"))
    } else {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["run", "--quiet"]).args(shown.arguments.split_whitespace());
        cargo
    };
    let run = command
        .current_dir(root())
        .env("GPUMEM_SIM", "16GiB")
        .envs(shown.variables.iter().map(|(name, value)| (name, value)))
        .output()
        .expect("cargo starts");
    assert!(run.status.success(), "{}: {}", shown.arguments, String::from_utf8_lossy(&run.stderr));
    let [stdout, stderr] = [&run.stdout, &run.stderr].map(|bytes| comparable(&String::from_utf8_lossy(bytes)));
    assert!(
        stdout.contains(&shown.output) || stderr.contains(&shown.output),
        "{} shows of `{}`:\n{}\nbut it prints:\n{stdout}\nand on stderr:\n{stderr}",
        shown.page,
        shown.arguments,
        shown.output
    );
}

#[test]
fn examples_print_what_the_pages_show() {
    let pages = PAGES.iter().map(|page| (*page, root().join("docs/book/src").join(page)));
    let mut all = Vec::new();
    for (name, path) in pages.chain([("README.md", root().join("README.md"))]) {
        all.extend(shown(name, &fs::read_to_string(path).expect("pages are text")));
    }
    assert!(all.len() > 8, "outputs are found: {}", all.len());
    all.iter().for_each(check);
}
