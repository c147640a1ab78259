//! What the linker calls a build: the note `NT_GNU_BUILD_ID` of an ELF file. Debug information is found by it elsewhere.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

/// The type of a segment with notes, and of the note.
const PT_NOTE: u64 = 4;
const BUILD_ID: u64 = 3;

/// More notes than that are not looked through.
const MOST: u64 = 1 << 16;

/// The build id of a file; empty if it has none, or cannot be read.
pub(super) fn of(file: &Path) -> Vec<u8> {
    File::open(file).and_then(read).ok().flatten().unwrap_or_default()
}

fn read(mut file: impl Read + Seek) -> io::Result<Option<Vec<u8>>> {
    let header = part(&mut file, 0, 64)?;
    // 64 bits, little-endian.
    if header[..6] != *b"\x7fELF\x02\x01" {
        return Ok(None);
    }
    let (table, size, count) = (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2));
    for at in 0..count {
        let segment = part(&mut file, table.saturating_add(at * size), 56)?;
        if number(&segment, 0, 4) != PT_NOTE {
            continue;
        }
        let notes = part(&mut file, number(&segment, 8, 8), number(&segment, 32, 8).min(MOST))?;
        if let Some(id) = in_notes(&notes) {
            return Ok(Some(id.to_vec()));
        }
    }
    Ok(None)
}

/// Each note has the length of its name, that of its content, its type, and both, padded to four bytes.
pub(super) fn in_notes(mut notes: &[u8]) -> Option<&[u8]> {
    while notes.len() >= 12 {
        let [name, content] = [number(notes, 0, 4), number(notes, 4, 4)].map(|length| usize::try_from(length).ok());
        let kind = number(notes, 8, 4);
        let padded = |length: usize| length.checked_next_multiple_of(4);
        let begin = 12_usize.checked_add(padded(name?)?)?;
        if kind == BUILD_ID && notes.get(12..16) == Some(b"GNU\0") {
            return notes.get(begin..begin.checked_add(content?)?);
        }
        notes = notes.get(begin.checked_add(padded(content?)?)?..)?;
    }
    None
}

fn part(file: &mut (impl Read + Seek), at: u64, length: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = Vec::new();
    if file.take(length).read_to_end(&mut bytes)? as u64 == length {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A file with one segment of notes.
    fn file(notes: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 120];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (file[32], file[54], file[56]) = (64, 56, 1);
        (file[64], file[72]) = (4, 120);
        file[96..98].copy_from_slice(&u16::try_from(notes.len()).unwrap().to_le_bytes());
        file.extend_from_slice(notes);
        file
    }

    fn note(name: &[u8], kind: u8, content: &[u8]) -> Vec<u8> {
        let mut note = vec![0; 12];
        (note[0], note[4], note[8]) = (u8::try_from(name.len()).unwrap(), u8::try_from(content.len()).unwrap(), kind);
        for part in [name, content] {
            note.extend_from_slice(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn it_is_found_among_other_notes() {
        let notes = [note(b"GNU\0", 1, b"abi"), note(b"stapsdt\0", 3, b"12345"), note(b"GNU\0", 3, b"\x01\x02\x03")];
        assert_eq!(read(Cursor::new(file(&notes.concat()))).unwrap(), Some(vec![1, 2, 3]));
        assert_eq!(read(Cursor::new(file(&notes[..2].concat()))).unwrap(), None);
    }

    #[test]
    fn files_of_other_kinds_have_none() {
        for bytes in [&b""[..], b"#!/bin/sh\n", &[0x7f; 200], &file(&[0xff; 40]), &file(&[])[..100]] {
            assert!(read(Cursor::new(bytes)).ok().flatten().is_none());
        }
        assert_eq!(of(Path::new("/no/such/file")), Vec::<u8>::new());
    }
}
