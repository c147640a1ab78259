//! Parses values of environment variables.

use std::{ffi::OsStr, fmt::Display, path::PathBuf, str::FromStr};

use crate::model::quoted;

/// The reason why a value cannot be used.
pub(super) struct InvalidValue {
    pub(super) detail: String,
    /// The text about the replacement value.
    pub(super) instead: &'static str,
}

pub(super) fn invalid<T>(detail: String, instead: &'static str) -> Result<T, InvalidValue> {
    Err(InvalidValue { detail, instead })
}

pub(super) fn not_one_of(text: &OsStr, names: &str) -> String {
    format!("{} is not one of {names}", value(text))
}

/// Returns the value in quotes, shortened for an error message.
pub(super) fn value(text: &OsStr) -> String {
    quoted(&text.to_string_lossy())
}

pub(super) fn lower(text: &OsStr) -> String {
    text.to_string_lossy().trim().to_ascii_lowercase()
}

/// Parses a value; `auto` becomes `None`.
pub(super) fn unless_auto<T: FromStr<Err: Display>>(
    text: &OsStr,
    instead: &'static str,
) -> Result<Option<T>, InvalidValue> {
    match text.to_string_lossy().trim() {
        text if text.eq_ignore_ascii_case("auto") => Ok(None),
        text => text.parse().map(Some).or_else(|error| invalid(format!("{error}, or auto for the best"), instead)),
    }
}

pub(super) fn path(text: &OsStr, to: &mut Option<PathBuf>) -> String {
    *to = Some(text.into());
    text.to_string_lossy().into_owned()
}

pub(super) fn flag(text: &OsStr, to: &mut bool) -> Result<String, InvalidValue> {
    *to = match &*lower(text) {
        "1" | "on" | "true" | "yes" => true,
        "0" | "off" | "false" | "no" => false,
        _ => {
            *to = true;
            return invalid(not_one_of(text, "1 or 0"), "it counts as 1");
        }
    };
    Ok(if *to { "yes" } else { "no" }.to_owned())
}

/// Replaces `%p` with the process id.
#[cfg(unix)]
pub(super) fn with_pid(path: &std::path::Path) -> PathBuf {
    use std::{
        ffi::OsString,
        os::unix::ffi::{OsStrExt, OsStringExt},
    };

    let pid = std::process::id().to_string();
    let mut rest = path.as_os_str().as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(2).position(|pair| pair == b"%p") {
        bytes.extend_from_slice(&rest[..at]);
        bytes.extend_from_slice(pid.as_bytes());
        rest = &rest[at + 2..];
    }
    bytes.extend_from_slice(rest);
    OsString::from_vec(bytes).into()
}

/// Replaces `%p` with the process id. A path that is not Unicode stays unchanged.
#[cfg(not(unix))]
pub(super) fn with_pid(path: &std::path::Path) -> PathBuf {
    match path.to_str() {
        Some(text) => text.replace("%p", &std::process::id().to_string()).into(),
        None => path.to_owned(),
    }
}
