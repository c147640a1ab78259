//! Contradictions in a history.

use gpumem_core::model::Bytes;

/// The contradictions in a history: their number, and one of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Contradictions {
    count: u64,
    /// The number of bytes, and the description of the contradiction.
    example: (u64, &'static str),
}

impl Contradictions {
    /// Notes a contradiction about this number of bytes. The history is read backwards, so the contradiction noted last
    /// comes first in time and most likely causes the others.
    pub(super) fn add(&mut self, bytes: u64, what: &'static str) {
        self.count += 1;
        self.example = (bytes, what);
    }

    pub(super) fn check(&mut self, is_right: bool, bytes: u64, what: &'static str) {
        if !is_right {
            self.add(bytes, what);
        }
    }

    /// Describes one contradiction, with the number of the others. `None` if there are none.
    pub(super) fn in_words(&self) -> Option<String> {
        let (bytes, what) = self.example;
        let others = if self.count > 1 { format!(", and {} more", self.count - 1) } else { String::new() };
        (self.count > 0).then(|| format!("{} {what}{others}", Bytes::new(bytes)))
    }
}
