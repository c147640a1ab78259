//! Tests reports in terminals that are not 80 columns wide.

use std::sync::LazyLock;

use gpumem_core::model::MemKind;
use unicode_width::UnicodeWidthStr;

use crate::{
    Ran, VIEWS, gpumem,
    recording_builder::{MIB, RecordingBuilder},
    report::{recorded, training},
};

fn in_columns(columns: &str, arguments: &[&str]) -> String {
    let Ran { code, stdout, stderr } =
        Ran::of(&gpumem(arguments).env("COLUMNS", columns).output().expect("the command starts"));
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{arguments:?}: {stdout}");
    stdout
}

/// The recording has names that are too long for a narrow terminal, stacks, scopes, and memory that is not freed.
fn long_names() -> String {
    // The file is written once, because another test may read it at the same time.
    static FILE: LazyLock<String> = LazyLock::new(write_long_names);
    FILE.clone()
}

fn write_long_names() -> String {
    let mut made = RecordingBuilder::new("train").training(2, 10, 10 * MIB);
    made.long_names("llama/modeling_llama_with_rotary");
    made.alloc(3 * MIB, MemKind::PinnedHost, 6);
    made.alloc(300 * MIB, MemKind::Device, 7);
    recorded("a-recording-with-a-name-that-is-longer-than-a-narrow-terminal.capture", made)
}

#[test]
fn no_line_is_longer_than_the_terminal_is_wide() {
    let (long, other) = (long_names(), training("widths.capture"));
    for columns in [48, 60, 79, 80, 100] {
        let check = |arguments: &[&str]| {
            let text = in_columns(&columns.to_string(), arguments);
            for line in text.lines() {
                // A single word may be longer: the terminal breaks it, so that it can be copied.
                let is_word = !line.trim().contains(' ');
                assert!(line.width() <= columns || is_word, "{columns} columns: {line}\n{arguments:?}:\n{text}");
            }
        };
        for view in VIEWS {
            for files in [&[&*long][..], &[&*other], &[&*long, &*other]] {
                check(&[&["report"], view, files].concat());
            }
        }
        check(&["diff", &other, &long, "--fail-on-increase", "10GiB"]);
    }
}

#[test]
fn names_keep_their_end_and_numbers_stay() {
    let file = long_names();
    let narrow = in_columns("60", &["report", "--table", &file]);
    assert!(narrow.contains("_rotary.rs:6"), "{narrow}");
    assert!(!narrow.contains('█') && narrow.contains("at peak") && narrow.contains("allocs"), "{narrow}");
    let wide = in_columns("200", &["report", "--table", &file]);
    let name = "llama/modeling_llama_with_rotary";
    assert!(wide.contains(&format!(" {name}: {name}.rs:6  device ")) && wide.contains('█'), "{wide}");
}

/// Output to a file is 80 columns wide, and its sentences are not broken. A width that is not a number is ignored.
#[test]
fn a_file_has_80_columns() {
    let file = long_names();
    let text = in_columns("", &["report", &file]);
    assert_eq!(text, in_columns("wide", &["report", &file]));
    assert_eq!(text, in_columns("0", &["report", &file]));
    assert!(text.lines().any(|line| line.width() > 80 && line.starts_with("Not seen: ")), "{text}");
    let table = |line: &&str| line.contains('█');
    assert!(text.lines().filter(table).all(|line| line.width() <= 80), "{text}");
    assert!(text.lines().filter(table).count() > 1, "{text}");
}

/// The number of columns does not change output for programs.
#[test]
fn json_and_formats_are_not_broken() {
    let file = long_names();
    for arguments in [&["report", "--json", &file][..], &["report", "--format", "folded", &file]] {
        assert_eq!(in_columns("40", arguments), in_columns("", arguments));
    }
}
