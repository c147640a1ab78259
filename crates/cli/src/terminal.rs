//! Writes to the terminal, or to the file or pipe that replaces it.

use std::{
    env, fmt, fs,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    path::Path,
};

use gpumem_core::{export::Paint, model::one_line};
use serde::Serialize;

use crate::{failure::Failure, progress::working, report::json, wrap::wrapped};

/// Prints one line on stderr. Line breaks and control characters in names are written as escapes.
pub(crate) fn error(text: &impl fmt::Display) {
    // Some causes span several lines.
    let line = text.to_string().replace(['\n', '\r'], " ");
    let line = in_short(&one_line(&line));
    if !line.is_empty() {
        // If stderr is closed, the error cannot be reported anywhere else.
        _ = writeln!(io::stderr(), "gpumem: {line}");
    }
}

/// Shortens the middle of a line. A name in a damaged file may be as long as the file, and the cause comes before or
/// after it.
fn in_short(line: &str) -> String {
    let signs = line.chars().count();
    if signs <= LONGEST_ERROR {
        return line.to_owned();
    }
    let half = LONGEST_ERROR / 2;
    line.chars().take(half).chain(['…']).chain(line.chars().skip(signs - half)).collect()
}

const LONGEST_ERROR: usize = 1000;

/// Writes the whole output of a command to stdout.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    let mut out = io::BufWriter::with_capacity(1 << 16, io::stdout().lock());
    write(&mut out).and_then(|()| out.flush()).map_err(|error| Failure::of_output(&error))
}

/// Prints text for people: lines are not wider than the terminal.
pub(crate) fn print_text(write: impl FnOnce(&mut dyn Write, Paint) -> io::Result<()>) -> Result<(), Failure> {
    let stdout = io::stdout();
    print(|out| out.write_all(text_for(&stdout, write)?.as_bytes()))
}

/// Prints such text on stderr in a single write, so that output of the program's other processes cannot come in
/// between.
pub(crate) fn print_text_on_stderr(write: impl FnOnce(&mut dyn Write, Paint) -> io::Result<()>) -> io::Result<()> {
    let mut stderr = io::stderr();
    let text = text_for(&stderr, write)?;
    stderr.write_all(text.as_bytes())
}

/// Prints the result of a command as JSON, or as text for people.
pub(crate) fn answer(
    as_json: bool,
    value: &impl Serialize,
    write: impl FnOnce(&mut dyn Write, Paint) -> io::Result<()>,
) -> Result<(), Failure> {
    if as_json { print(|out| json::write(value, out)) } else { print_text(write) }
}

fn text_for(
    to: &(impl IsTerminal + AsFd),
    write: impl FnOnce(&mut dyn Write, Paint) -> io::Result<()>,
) -> io::Result<String> {
    let columns = columns(to);
    let paint = columns.map_or(paint_for(to), |columns| paint_for(to).in_columns(columns));
    let mut text = Vec::new();
    write(&mut text, paint)?;
    let text = String::from_utf8_lossy(&text);
    // Without a terminal, each sentence stays on one line, so that `grep` finds it.
    Ok(match columns {
        Some(columns) => wrapped(&text, columns),
        None => text.into_owned(),
    })
}

/// Returns the width of the terminal: `COLUMNS`, else its size. `None` if the output is not a terminal.
fn columns(to: &(impl IsTerminal + AsFd)) -> Option<usize> {
    let set = env::var("COLUMNS").ok().and_then(|columns| columns.trim().parse().ok());
    let size = || {
        let size = rustix::termios::tcgetwinsize(to).ok().filter(|_| to.is_terminal())?;
        Some(usize::from(size.ws_col))
    };
    // A terminal that does not know its width reports 0.
    let columns = set.filter(|columns| *columns > 0).or_else(|| size().filter(|columns| *columns > 0));
    columns.map(|columns| columns.max(LEAST_COLUMNS))
}

/// The numbers of a table need at least this many columns.
const LEAST_COLUMNS: usize = 40;

/// Writes a file, which gets its name once it is complete. `-` is stdout.
pub(crate) fn write_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    if is_stdout(path) {
        return print(write);
    }
    let failed =
        |error: io::Error| Failure::new(format!("`{}` cannot be written", path.display()), error, "use another file");
    // A path that is not a regular file, such as /dev/stdout, is written in place.
    if path.metadata().is_ok_and(|known| !known.is_file()) {
        let mut out = io::BufWriter::new(fs::File::options().write(true).open(path).map_err(failed)?);
        return write(&mut out).and_then(|()| out.flush()).map_err(failed);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let write_all = || {
        let mut out = io::BufWriter::with_capacity(1 << 16, fs::File::create(&unfinished)?);
        write(&mut out)?;
        out.flush()?;
        fs::rename(&unfinished, path)
    };
    let written = working(&format!("writing {}", one_line(&path.to_string_lossy())), write_all);
    written.map_err(|error| {
        _ = fs::remove_file(&unfinished);
        failed(error)
    })
}

/// Returns whether a name given by the user means stdout.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Returns whether stdout may have colours.
pub(crate) fn has_colours() -> bool {
    paint_for(&io::stdout()).is_coloured()
}

/// Returns colours if the output is a terminal and `NO_COLOR` is not set.
fn paint_for(to: &impl IsTerminal) -> Paint {
    let is_allowed = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if is_allowed && to.is_terminal() { Paint::ANSI } else { Paint::PLAIN }
}
