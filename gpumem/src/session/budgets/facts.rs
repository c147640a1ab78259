//! Facts about a thread.

use std::thread;

use crate::{derive::Stack, process, report::ThreadFacts, session::views::folder, source};

/// Facts about a thread that are found while it allocates. Their meaning is read from files later.
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
