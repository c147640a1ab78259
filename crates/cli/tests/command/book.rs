//! Runs each command of the book's pages about the command, and compares its output with the page.

use std::fs;

use crate::{
    Ran, folder, linked,
    recording_builder::{MIB, RecordingBuilder},
    within,
};

/// Returns the blocks of the page that start with a command, and their lines.
fn commands(page: &str) -> Vec<(String, String)> {
    let mut blocks = Vec::new();
    for block in page.split("```console\n").skip(1) {
        let block = block.split("```").next().unwrap_or_default();
        for command in block.split("$ ").skip(1) {
            let (line, output) = command.split_once('\n').unwrap_or((command, ""));
            blocks.push((line.to_owned(), output.to_owned()));
        }
    }
    blocks
}

#[test]
fn the_outputs_in_the_book_are_what_the_command_prints() {
    let folder = folder("book");
    let training = |mib: u64| RecordingBuilder::new("train").training(3, 10, mib * MIB).file();
    let recordings = [("train", 10), ("before", 10), ("after", 12), ("rank-0", 10), ("rank-1", 11), ("rank-2", 12)];
    for (name, mib) in recordings {
        fs::write(folder.join(format!("{name}.capture")), training(mib)).unwrap();
    }
    fs::create_dir_all(folder.join("new")).unwrap();
    fs::write(folder.join("new/train.capture"), training(12)).unwrap();
    let pages = ["command.md", "ci.md"].map(|name| {
        let commands = commands(&fs::read_to_string(linked(name)).expect("the page is there"));
        assert!(commands.len() > 2, "{name}: {commands:?}");
        commands
    });
    let mut last = None;
    for (line, expected) in pages.concat() {
        if line == "echo $?" {
            assert_eq!(last.map(|code| format!("{code}\n")).as_deref(), Some(expected.as_str()));
            continue;
        }
        let arguments: Vec<_> = line.strip_prefix("gpumem ").expect("it is our command").split(' ').collect();
        let Ran { code, stdout, stderr } = within(&folder, &arguments);
        assert_eq!(stderr, "", "{line}");
        assert_eq!(stdout, expected, "{line}:\n{stdout}\n");
        last = code;
    }
}
