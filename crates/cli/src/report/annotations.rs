//! Reports exceeded limits to CI, for `--annotations`.

use std::{
    io::{self, Read, Write},
    path::{Path, PathBuf},
    str::FromStr,
};

use gpumem_core::model::one_line;
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use crate::{failure::Failure, files::open_to_read, terminal};

/// How exceeded limits are reported to CI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Annotations {
    /// As GitHub workflow commands.
    Github,
    /// A file with a JUnit test report.
    Junit(PathBuf),
}

impl FromStr for Annotations {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None if text == "github" => Ok(Self::Github),
            Some(("junit", file)) if !file.is_empty() => Ok(Self::Junit(file.into())),
            _ => Err("write github, or junit=FILE".to_owned()),
        }
    }
}

/// A limit, and a recording that was compared with it.
#[derive(Debug)]
pub(crate) struct Check {
    /// The recording. Empty if the check is about all of them.
    pub(crate) of: String,
    /// The condition, such as `the peak is at most 20 GiB`.
    pub(crate) name: String,
    /// Why the condition is not met. Empty if it is met.
    pub(crate) found: Vec<Finding>,
}

/// Why a limit was exceeded.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) text: String,
    /// The place in the program, such as `train.py:31`.
    pub(crate) place: Option<String>,
}

impl Finding {
    pub(crate) fn new(text: String) -> Self {
        Self { text, place: None }
    }

    /// Returns a GitHub workflow command, which takes a whole line.
    fn as_github(&self) -> String {
        let escaped = |text: &str| one_line(text).replace('%', "%25");
        let place = self.place.as_deref().and_then(position).map(|(file, line, column)| {
            let file = escaped(file).replace(':', "%3A").replace(',', "%2C");
            let column = column.map(|column| format!("col={column},")).unwrap_or_default();
            format!("file={file},line={line},{column}")
        });
        let place = place.unwrap_or_default();
        format!("::error {place}title=GPU memory::{}", escaped(&self.text))
    }
}

/// Returns the file, the line and the column of a place. `train.py:31` has no column.
pub(super) fn position(place: &str) -> Option<(&str, u32, Option<u32>)> {
    let number = |text: &'_ str| -> Option<(usize, u32)> {
        let (before, number) = text.rsplit_once(':')?;
        Some((before.len(), number.parse().ok()?))
    };
    let (end, last) = number(place)?;
    Some(match number(&place[..end]) {
        Some((end, line)) => (&place[..end], line, Some(last)),
        None => (&place[..end], last, None),
    })
}

impl Annotations {
    /// Prints exceeded limits on stderr, and writes the requested file. Returns whether a limit was exceeded.
    pub(crate) fn publish(requested: Option<&Self>, checks: &[Check]) -> Result<bool, Failure> {
        let found = || checks.iter().flat_map(|check| &check.found);
        for finding in found() {
            match requested {
                // If stderr is closed, the error cannot be reported anywhere else.
                Some(Self::Github) => _ = writeln!(io::stderr(), "{}", finding.as_github()),
                _ => terminal::error(&finding.text),
            }
        }
        if let Some(Self::Junit(file)) = requested {
            if is_another(file) {
                let what = format!("`{}` cannot be written", file.display());
                let cause = "it is not a JUnit test report, and would be lost";
                return Err(Failure::new(what, cause, "use another file name"));
            }
            let report = junit(checks);
            let written = report.to_string().map_err(io::Error::other);
            terminal::write_file(file, |out| out.write_all(written?.as_bytes()))?;
        }
        Ok(found().next().is_some())
    }
}

/// Returns whether the file exists and does not start as reports of tests do. It may be a recording or a baseline.
fn is_another(file: &Path) -> bool {
    let mut first = [0];
    open_to_read(file).and_then(|mut file| file.read_exact(&mut first)).is_ok() && first != *b"<"
}

/// Creates a report in which each check is a test.
fn junit(checks: &[Check]) -> Report {
    let mut suite = TestSuite::new("GPU memory");
    for Check { of, name, found } in checks {
        let mut status = TestCaseStatus::success();
        if let [first, ..] = found.as_slice() {
            status = TestCaseStatus::non_success(NonSuccessKind::Failure);
            let text: Vec<_> = found.iter().map(|finding| one_line(&finding.text)).collect();
            status.set_message(one_line(&first.text)).set_description(text.join("\n"));
        }
        let mut case = TestCase::new(one_line(name), status);
        case.set_classname(one_line(of));
        suite.add_test_case(case);
    }
    let mut report = Report::new("gpumem");
    report.add_test_suite(suite);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_marked_in_the_pull_request() {
        let finding = |place: &str| Finding { text: "5 % more\nthan 1 GiB".to_owned(), place: Some(place.to_owned()) };
        let text = "title=GPU memory::5 %25 more\\nthan 1 GiB";
        assert_eq!(finding("src/a,b.py:31").as_github(), format!("::error file=src/a%2Cb.py,line=31,{text}"));
        assert_eq!(finding("src/main.rs:31:9").as_github(), format!("::error file=src/main.rs,line=31,col=9,{text}"));
        assert_eq!(finding("cuBLAS").as_github(), format!("::error {text}"));
    }
}
