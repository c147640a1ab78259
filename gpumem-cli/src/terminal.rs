//! What is written to the terminal, or to whatever stands in its place.

use std::{
    env, fmt, fs,
    io::{self, IsTerminal, Write},
    path::Path,
};

use gpumem_core::export::{Paint, one_line};

use crate::{failure::Failure, progress::working};

/// One line on stderr. Line breaks and control characters of names are written as escapes.
pub(crate) fn error(text: &impl fmt::Display) {
    let line = text.to_string().replace(['\n', '\r'], " ");
    let line = in_short(&one_line(&line));
    if !line.is_empty() {
        // There is no other place to report that stderr is closed.
        _ = writeln!(io::stderr(), "gpumem: {line}");
    }
}

/// A name in a damaged file may be as long as the file. The cause is in front of it or behind it.
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

/// Writes a file. It gets its name when all of it is written.
pub(crate) fn write_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::new(format!("`{}` cannot be written", path.display()), error, "give another file");
    // What is no regular file, such as /dev/stdout, is written in place.
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

/// Colours, if stdout is a terminal and `NO_COLOR` is not set.
pub(crate) fn paint() -> Paint {
    paint_for(&io::stdout())
}

/// The same for stderr.
pub(crate) fn paint_on_stderr() -> Paint {
    paint_for(&io::stderr())
}

fn paint_for(to: &impl IsTerminal) -> Paint {
    let is_wanted = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    if is_wanted && to.is_terminal() { Paint::Ansi } else { Paint::Plain }
}
