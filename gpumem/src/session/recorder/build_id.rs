//! The linker's id of a build: the note `NT_GNU_BUILD_ID` of an ELF file. Debuggers find separate debug information by this id.

/// The type of the note.
const BUILD_ID: u64 = 3;

/// Returns the build id from the notes of a file. A note is the length of its name, the length of its content, its type, the name and
/// the content; both are padded to four bytes.
pub(super) fn in_notes(mut notes: &[u8]) -> Option<&[u8]> {
    while notes.len() >= 12 {
        let [name, content] = [number(notes, 0, 4), number(notes, 4, 4)].map(|length| usize::try_from(length).ok());
        let kind = number(notes, 8, 4);
        let padded = |length: usize| length.checked_next_multiple_of(4);
        let start = 12_usize.checked_add(padded(name?)?)?;
        if kind == BUILD_ID && notes.get(12..16) == Some(b"GNU\0") {
            return notes.get(start..start.checked_add(content?)?);
        }
        notes = notes.get(start.checked_add(padded(content?)?)?..)?;
    }
    None
}

fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(in_notes(&notes.concat()), Some(&[1, 2, 3][..]));
        for others in [&notes[..2].concat()[..], &[0xff; 40], &notes[2][..16], &[]] {
            assert_eq!(in_notes(others), None);
        }
    }
}
