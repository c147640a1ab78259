//! Facts about a thread.

use std::{env, ffi::OsString, thread};

use once_cell::sync::Lazy;

use crate::{derive::Stack, process, report::ThreadFacts, session::views::folder, source};

/// Facts about a thread that are collected while it allocates. They are resolved later, because that reads files.
#[derive(Default)]
pub(super) struct RawFacts {
    name: Option<String>,
    system_name: Option<String>,
    stack: Vec<usize>,
}

impl RawFacts {
    /// Returns the facts about the calling thread.
    pub(super) fn here() -> Self {
        let name = thread::current().name().map(ToOwned::to_owned);
        Self { name, system_name: process::thread_name(), stack: source::addresses_here() }
    }

    pub(super) fn resolved(&self) -> ThreadFacts {
        let frames = source::frames(&self.stack);
        ThreadFacts {
            name: self.name.clone(),
            system_name: self.system_name.clone(),
            functions: frames.into_iter().filter_map(|frame| frame.function).collect(),
        }
    }

    /// Returns whether the thread may belong to another test, so that debug information must be read to find out. Reading it takes a
    /// second in each process, and nextest starts a process for each test.
    pub(super) fn may_be_of_another_test(&self, own: &Self) -> bool {
        /// The harness names the thread of a test after its path, which Linux truncates.
        fn is_path(name: &str) -> bool {
            name != "main" && name.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '_' | ':'))
        }
        static RUNS_ONE_TEST: Lazy<bool> = Lazy::new(|| runs_one_test(env::args_os().skip(1)));
        let name = self.name.as_ref().or(self.system_name.as_ref());
        !*RUNS_ONE_TEST && name.is_some_and(|name| is_path(name)) && (self.name.is_none() || self.name != own.name)
    }

    pub(super) fn in_words(&self) -> String {
        match (&self.name, &self.system_name) {
            (Some(name), _) => format!("thread `{name}`"),
            (None, Some(inherited)) => format!("a thread without a name (the system calls it `{inherited}`)"),
            (None, None) => "a thread without a name".to_owned(),
        }
    }

    pub(super) fn place(&self) -> Option<String> {
        let frames = source::frames(&self.stack);
        let Stack { line, caller, library, .. } = Stack::new(&frames, folder(), source::own_module().as_deref());
        let from = caller.map_or_else(String::new, |caller| format!(", from {caller}"));
        line.map(|line| format!("{line}{from}")).or(library)
    }
}

/// Returns whether the harness runs only one test: `--exact` and one name, as nextest and editors start it.
fn runs_one_test(arguments: impl Iterator<Item = OsString>) -> bool {
    let (options, names): (Vec<_>, Vec<_>) =
        arguments.partition(|argument| argument.as_encoded_bytes().starts_with(b"-"));
    options.iter().any(|option| option == "--exact") && names.len() == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_test_has_an_exact_name() {
        for (arguments, is_one) in [
            ("tests::grows --exact --nocapture", true),
            ("--exact tests::grows --test-threads=1", true),
            // The number might be a test name.
            ("--exact tests::grows --test-threads 1", false),
            ("--exact one other", false),
            ("tests::grows", false),
            ("--exact", false),
            ("", false),
        ] {
            assert_eq!(runs_one_test(arguments.split_whitespace().map(OsString::from)), is_one, "{arguments}");
        }
    }
}
