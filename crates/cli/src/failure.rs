//! Why a command failed.

use std::{fmt, io};

/// A failure as one line on stderr, which names the thing, the cause and the next step.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something could not be done.
    Failed {
        /// The thing and what failed, such as `` `train.capture` cannot be read ``.
        what: String,
        cause: String,
        /// The next step for the user. Empty if there is none.
        next: String,
    },
    /// The reader has closed the output, which is not an error.
    ClosedPipe,
}

impl Failure {
    /// Writes `what: cause; next`. `next` may be empty.
    pub(crate) fn new(what: impl fmt::Display, cause: impl fmt::Display, next: impl fmt::Display) -> Self {
        Self::Failed { what: what.to_string(), cause: cause.to_string(), next: next.to_string() }
    }

    /// The output could not be written.
    pub(crate) fn of_output(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            Self::ClosedPipe
        } else {
            Self::new("the output cannot be written", error, "")
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Failed { what, cause, next } = self else { return Ok(()) };
        write!(f, "{what}: {cause}")?;
        if next.is_empty() { Ok(()) } else { write!(f, "; {next}") }
    }
}
