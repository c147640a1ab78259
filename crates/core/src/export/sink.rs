//! The target of gpumem's output, and its form.

use std::{
    fmt,
    panic::{AssertUnwindSafe, RefUnwindSafe},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
};

use super::Form;
use crate::{model::parse_error, report::Output};

/// The target of everything that gpumem prints: reports of traces, points of trackers, out-of-memory reports, leaks, peaks,
/// unchecked budgets, notices. The environment variable `GPUMEM_REPORT` (`stdout`, `stderr`, `file:PATH`, `json`, `json:PATH` or
/// `off`) sets it for a whole program, and `gpumem::sink::set_sink` sets it from code.
///
/// [`FromStr`] reads the same values as the variable.
///
/// ```
/// use gpumem::sink::{Sink, set_sink};
///
/// set_sink(Sink::File("gpu-memory.log".into()));
/// # set_sink(Sink::Off);
/// assert_eq!("file:gpu-memory.log".parse::<Sink>().unwrap().to_string(), "file:gpu-memory.log"); // as in GPUMEM_REPORT
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Sink {
    /// Reports of traces and points of trackers on stdout, through `print!`, so that tests capture them. Everything else on
    /// stderr. The default.
    #[default]
    Stdout,
    /// Everything on stderr.
    Stderr,
    /// Everything as text at the end of a file. Each output is one write, so that several processes can share the file.
    File(PathBuf),
    /// Everything as JSON objects on stdout, one a line.
    Json,
    /// Everything as JSON objects at the end of a file, one a line.
    JsonFile(PathBuf),
    /// Prints nothing.
    Off,
    /// Passes everything to a function; see [`Sink::custom`]. Its panics are caught.
    Custom(Arc<dyn Fn(&Output) + Send + Sync + RefUnwindSafe>),
}

impl Sink {
    /// Passes each [`Output`] to a function, on the thread that creates the output. A panic of the function is caught, because it
    /// may run while a guard is dropped. Output from inside the function is dropped, except notices, which go to stderr.
    ///
    /// ```
    /// use gpumem::sink::{Content, Sink, set_sink};
    /// set_sink(Sink::custom(|output| match &output.content {
    ///     Content::Trace(report) => log(&report.to_string()),
    ///     Content::Notice(text) => log(text),
    ///     _ => {}
    /// }));
    /// # fn log(_: &str) {}
    /// ```
    pub fn custom(to: impl Fn(&Output) + Send + Sync + 'static) -> Self {
        let to = AssertUnwindSafe(to);
        Self::Custom(Arc::new(move |output| {
            let AssertUnwindSafe(to) = &to;
            to(output);
        }))
    }

    /// Returns the form of the sink's output.
    #[doc(hidden)]
    pub fn form(&self) -> Form {
        match self {
            Self::Json | Self::JsonFile(_) => Form::Json,
            _ => Form::Text,
        }
    }
}

/// Writes the value of `GPUMEM_REPORT` for this sink.
impl fmt::Display for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.pad("stdout"),
            Self::Stderr => f.pad("stderr"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Json => f.pad("json"),
            Self::JsonFile(path) => write!(f, "json:{}", path.display()),
            Self::Off => f.pad("off"),
            Self::Custom(_) => f.pad("a function"),
        }
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sink({self})")
    }
}

parse_error! {
    /// The error for a text that does not name a [`Sink`].
    ///
    /// ```
    /// let error = "printer".parse::<gpumem::sink::Sink>().unwrap_err();
    /// assert!(error.to_string().starts_with("`printer` is not one of stdout, stderr"));
    /// ```
    ParseSinkError: "is not one of stdout, stderr, file:PATH, json, json:PATH or off"
}

impl FromStr for Sink {
    type Err = ParseSinkError;

    fn from_str(text: &str) -> Result<Self, ParseSinkError> {
        let trimmed = text.trim();
        let (name, path) = trimmed.split_once(':').map_or((trimmed, None), |(name, path)| (name, Some(path)));
        match (name.to_ascii_lowercase().as_str(), path) {
            ("stdout", None) => Ok(Self::Stdout),
            ("stderr", None) => Ok(Self::Stderr),
            ("off", None) => Ok(Self::Off),
            ("file", Some(path)) if !path.is_empty() => Ok(Self::File(path.into())),
            ("json", None) => Ok(Self::Json),
            ("json", Some(path)) if !path.is_empty() => Ok(Self::JsonFile(path.into())),
            _ => Err(ParseSinkError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["stdout", "stderr", "off", "file:/tmp/a:b.txt", "json", "json:Out.jsonl"] {
            assert_eq!(text.parse::<Sink>().unwrap().to_string(), text);
        }
        assert_eq!(" STDERR ".parse::<Sink>().unwrap().to_string(), "stderr");
        for text in ["", "file", "file:", "stdout:", "xml", "json:"] {
            let error = text.parse::<Sink>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{text}` is not one of stdout, stderr, file:PATH")), "{error}");
        }
    }
}
