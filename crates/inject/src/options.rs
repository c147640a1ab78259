//! The options that the command passes to the library in a program.

use serde::{Deserialize, Serialize};

use crate::variable;

/// How a program is recorded, and the GPUs that it sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The allocations whose stacks are recorded: a value of the setting `GPUMEM_BACKTRACE`. That variable itself is left to the program,
    /// which may use gpumem itself.
    pub backtrace: String,
    /// The events that the recording keeps.
    pub keep: Keep,
    /// The history of PyTorch's allocator. `None` if it is not recorded.
    pub torch: Option<Torch>,
    /// The GPUs that replace the real ones.
    pub cards: Option<Cards>,
}

/// The events that a recording keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keep {
    /// All events.
    All,
    /// The latest events, in about this many bytes.
    Latest(u64),
    /// Only the peaks.
    Peaks,
}

/// The history of PyTorch's allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Torch {
    /// The maximum number of events that PyTorch keeps for each device.
    pub events: u64,
    /// True if the module of each tensor is recorded.
    pub modules: bool,
}

/// The GPUs that replace the real ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cards {
    /// The kind of replacement.
    pub mode: CardMode,
    /// The id of the shared memory in which processes note their memory on these GPUs.
    pub shared: Option<u64>,
}

/// How GPUs are replaced. Each of them has `card` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardMode {
    /// A dry run.
    Dry {
        /// `None` for the bytes of the real GPU.
        card: Option<u64>,
        /// The number of GPUs. 0 for as many as the machine has.
        cards: u32,
        /// The byte that is copied to the host from memory that does not exist.
        fill: u8,
        /// The bytes up to which blocks are real. `None` to choose them by the free memory of the GPU.
        real: Option<u64>,
    },
    /// Smaller GPUs that compute.
    Limit {
        /// The bytes of each GPU.
        card: u64,
    },
}

impl Options {
    /// Returns the value of [`variable::OPTIONS`].
    #[expect(clippy::missing_panics_doc, reason = "numbers and texts can be written")]
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("numbers and texts can be written")
    }

    /// Parses a value of [`variable::OPTIONS`].
    ///
    /// # Errors
    /// Returns an error if the text is not a valid value, for example because the library and the command have different versions.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| format!("{}={text} cannot be used: {error}", variable::OPTIONS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_back() {
        let dry = CardMode::Dry { card: Some(24 << 30), cards: 8, fill: 1, real: Some(64 << 20) };
        let all = Options {
            backtrace: "python".to_owned(),
            keep: Keep::Latest(1 << 24),
            torch: Some(Torch { events: 500_000, modules: true }),
            cards: Some(Cards { mode: dry, shared: Some(7) }),
        };
        let limit = Cards { mode: CardMode::Limit { card: 1 }, shared: None };
        let none = Options { keep: Keep::Peaks, torch: None, cards: Some(limit), ..all.clone() };
        for options in [all, none] {
            assert_eq!(Options::parse(&options.to_text()), Ok(options));
        }
        for text in ["", "dry 24GiB", "{}", r#"{"backtrace":"0","keep":"all","torch":null,"cards":null}"#] {
            let error = Options::parse(text).unwrap_err();
            assert!(error.starts_with(&format!("GPUMEM_RUN_OPTIONS={text} cannot be used: ")), "{error}");
        }
    }
}
