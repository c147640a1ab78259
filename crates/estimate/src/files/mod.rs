//! Reads descriptions of models from files, without their weights.
//!
//! The files are given by users. Their length is limited, and endless files such as pipes are not opened.

mod config;
mod described;
mod gguf;
mod gguf_model;
mod safetensors;

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use gpumem_core::regular_file;

pub(crate) use self::config::torchvision;
pub use self::{described::Described, gguf::Gguf};
use crate::{Error, Result, ensure};

/// The longest configuration or model that is read. In memory, JSON may take a hundred times its length. The
/// configuration of a vision model with the names of 21,000 classes has 1.5 MB.
const LONGEST_TEXT: u64 = 4_000_000;

/// Opens a regular file.
fn open(path: &Path) -> Result<File> {
    regular_file::open_to_read(path).map_err(|error| file_error(path, error))
}

/// Reads a file that has at most `longest` bytes.
fn bytes(path: &Path, longest: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let mut bytes = Vec::new();
    // The file system may report a wrong length, as in /proc.
    file.take(longest + 1).read_to_end(&mut bytes).map_err(|error| file_error(path, error))?;
    let fits = bytes.len() as u64 <= longest;
    ensure(fits, || file_error(path, format!("it has more than {longest} bytes, and no such file needs that many")))?;
    Ok(bytes)
}

/// Reads a text that has at most `longest` bytes, without the mark with which programs on Windows start a text.
pub(crate) fn text(path: &Path, longest: u64) -> Result<String> {
    let bytes = bytes(path, longest)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| file_error(path, "it is not text in UTF-8"))?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text).to_owned())
}

/// Returns an error that names the file.
pub(crate) fn file_error(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::invalid(format!("{}: {what}", path.display()))
}

/// Copies this many bytes of a header.
fn copy(read: &mut impl Read, bytes: u64, to: &mut impl Write) -> Result<(), String> {
    match io::copy(&mut read.take(bytes), to) {
        Ok(found) if found == bytes => Ok(()),
        Ok(_) => Err("the file ends inside its header".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
