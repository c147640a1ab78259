//! Values that users type on the command line.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};
use gpumem_core::model::Bytes;

/// What the help of the command says of sizes.
pub(crate) const SIZE_HELP: &str = "Sizes have a unit: 1KiB, 1MiB, 1GiB and 1TiB are 2^10, 2^20, 2^30 and 2^40 bytes. \
                               KB, MB, GB and TB mean the same, as in nvidia-smi.";

/// A number with a unit, such as `80GiB`. Only 0 needs no unit: a user who types 80 does not mean 80 bytes.
pub(crate) fn size(text: &str) -> Result<Bytes, String> {
    let bytes: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if text.trim() != "0" && !text.contains(char::is_alphabetic) {
        return Err(format!("it has no unit; write a size such as {}GiB", text.trim()));
    }
    Ok(bytes)
}

/// The file of a recording that is to be written: it is no stream.
pub(crate) fn recording() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.to_str() {
        Some("-") => Err("a recording cannot be written to stdout; give the name of a file"),
        _ => Ok(path),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("100MB", Bytes::mib(100)),
            ("100MiB", Bytes::mib(100)),
            ("80GB", Bytes::gib(80)),
            ("80 gib", Bytes::gib(80)),
            ("1.5GB", Bytes::mib(1536)),
            ("64kb", Bytes::kib(64)),
            ("7B", Bytes::new(7)),
            ("0", Bytes::ZERO),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "80", "0.5", "much", "-1GiB", "1PiB", "1e3MB", "inf"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(size("80").unwrap_err(), "it has no unit; write a size such as 80GiB");
    }
}
