//! Limits the repetition of names.

use std::io;

use crate::history::{Change, History};

/// For each byte of a recording, names may take this many bytes in formats with a line or a row for each event, which
/// repeat names. Ordinary recordings need less than a tenth of it.
const MOST_TEXTS: u64 = 128;

/// Returns an error if the places, written once for each event, take too many bytes. `length` returns the length of an
/// origin's place in bytes.
pub(super) fn check_texts(history: &History, length: impl Fn(u32) -> usize) -> io::Result<()> {
    let length_of = |change: Change| length(history.lives.block(change.block).origin) as u64;
    check("places, repeated for each event,", history, history.lives.changes().map(length_of).sum())
}

/// Returns an error if the names of scopes, written once for each call, take too many bytes.
pub(super) fn check_scopes(history: &History, lengths: impl Iterator<Item = usize>) -> io::Result<()> {
    check("scopes, repeated for each call,", history, lengths.map(|length| length as u64).sum())
}

fn check(of: &str, history: &History, texts: u64) -> io::Result<()> {
    let most = history.bytes.max(2 << 20) * MOST_TEXTS;
    if texts <= most {
        return Ok(());
    }
    let why = format!("the names of {of} have {texts} bytes (at most {most}): write another format");
    Err(io::Error::other(why))
}
