//! Values that users type on the command line.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};

/// The help text for sizes.
pub(crate) const SIZE_HELP: &str = "Sizes have a unit: 1KiB, 1MiB, 1GiB and 1TiB are 2^10, 2^20, 2^30 and 2^40 bytes. \
                               KB, MB, GB and TB mean the same, as in nvidia-smi.";

/// Parses the path of a new recording, which cannot be a stream.
pub(crate) fn recording() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.to_str() {
        Some("-") => Err("a recording cannot be written to stdout; use a file name"),
        _ => Ok(path),
    })
}
