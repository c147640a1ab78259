//! Tests hostile names in all outputs of the library: a terminal shows them without interpreting them, and JSON parsers get
//! them unchanged.

use std::time::UNIX_EPOCH;

use super::*;
use crate::{
    report::{Content, LiveBlock},
    testing,
};

const NAME: &str = "x\u{0}\u{1b}[5m\u{1b}]0;t\u{7}\r\t\u{7f}\u{85}\u{9b}2J\u{200b}\u{200e}\u{2028}\u{202e}\u{2066}\u{feff}\"\\\nFORGED: y";

#[track_caller]
fn assert_printable(text: &str) {
    // The colours of `Role`, none of which occurs in the name.
    let codes = ["\u{1b}[0m", "\u{1b}[1m", "\u{1b}[2m", "\u{1b}[31m", "\u{1b}[32m", "\u{1b}[36m"];
    let text = codes.iter().fold(text.to_owned(), |text, code| text.replace(code, ""));
    testing::assert_printable(&text);
    assert!(text.contains("FORGED"), "its names are not there: {text:?}");
}

/// Checks a form of the output. The match forces a new form to be added here.
fn check(form: Form, output: &Output) {
    match form {
        Form::Text => {
            assert_printable(&form.write(output, Paint::PLAIN.in_columns(400)));
            assert_printable(&form.write(output, Paint::ANSI.in_columns(400)));
            let is_short = matches!(output.content, Content::Budget(_) | Content::Notice(_));
            assert!(!is_short || form.write(output, Paint::PLAIN).lines().count() == 1);
        }
        Form::Json => {
            let line = form.write(output, Paint::PLAIN);
            assert_printable(&line);
            assert_eq!(line.lines().count(), 1);
            assert!(testing::has(&serde_json::from_str(&line).unwrap(), NAME), "{line}");
        }
    }
}

#[test]
fn all_that_is_printed() {
    for content in samples::contents(NAME) {
        let mut output = Output::new(content, UNIX_EPOCH, 7);
        (output.thread_name, output.module) = (Some(NAME.to_owned()), Some(NAME.into()));
        check(Form::Text, &output);
        check(Form::Json, &output);
    }
}

#[test]
fn all_that_a_program_prints_itself() {
    let (block, summary, breakdown) = (samples::block(NAME), samples::summary(NAME), samples::breakdown(NAME));
    let without_line = LiveBlock { line: None, ..block.clone() };
    for text in [block.to_string(), without_line.to_string(), summary.to_string(), breakdown.to_string()] {
        assert_printable(&text);
    }
    for json in [block.to_json(), summary.to_json(), breakdown.to_json()] {
        assert_printable(&json);
        assert!(testing::has(&serde_json::from_str(&json).unwrap(), NAME), "{json}");
    }
}
