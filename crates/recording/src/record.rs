//! The outer layer of a file: a header, then records, each with its length and a checksum. A record holds compressed items.

use std::{
    io::{self, Read, Write},
    iter,
};

use miniz_oxide::inflate;

use super::{budget, bytes::Malformed};

/// The first bytes of a file. The first byte is not ASCII and the last one is a line feed, so that a transfer in text mode is
/// detected.
pub(super) const MAGIC: [u8; 8] = *b"\x89gpumem\n";

/// Reads the first bytes of a file, and returns whether the file is a recording.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn is_recording(file: impl Read) -> io::Result<bool> {
    let mut head = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut head)?;
    Ok(head == MAGIC)
}

/// The version of the format.
pub const VERSION: u16 = 1;

/// The fields are magic, version, and six zero bytes.
pub(super) const FILE_HEADER: usize = 16;

/// The fields are type, method, two zero bytes, stored length, plain length and checksum.
pub(super) const RECORD_HEADER: usize = 16;

/// The largest number of bytes of a record's items before compression. It bounds the memory that a reader reserves.
pub(super) const LARGEST: usize = 1 << 20;

/// A record that holds items.
pub(super) const ITEMS: u8 = 1;

/// The most bytes of a record for each stored byte, in addition to [`ALLOWANCE`]. This keeps a small file from occupying its
/// reader for long.
const MOST_FOR_A_BYTE: usize = 64;
/// The additional bytes that each record may have.
const ALLOWANCE: usize = 1 << 12;

/// The ways to store the items of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// The items are stored as they are.
    Plain = 0,
    /// The items are compressed by DEFLATE, without a header.
    Deflate = 1,
}

/// Writes the header of a file.
pub(super) fn write_header(to: &mut impl Write) -> io::Result<()> {
    let mut header = [0; FILE_HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&VERSION.to_le_bytes());
    to.write_all(&header)
}

/// Returns the number of bytes of the first record; `None` if it is incomplete.
pub(super) fn length_of(bytes: &[u8]) -> Option<usize> {
    let stored = bytes.get(4..8)?.try_into().map_or(0, u32::from_le_bytes) as usize;
    // No valid record stores more bytes. The header is enough for the reader to report the error.
    let length = RECORD_HEADER + if stored > LARGEST { 0 } else { stored };
    (bytes.len() >= length).then_some(length)
}

/// Creates a record with this number of items: header and stored bytes, which must be written with one call. The items are not
/// compressed if a reader would reject the result.
pub(super) fn pack(plain: &[u8], items: u64, to: &mut Vec<u8>) {
    let compressed = miniz_oxide::deflate::compress_to_vec(plain, 1);
    let is_accepted = !is_bomb(compressed.len(), plain.len()) && budget::may_have(compressed.len() as u64, items);
    let is_used = compressed.len() < plain.len() && is_accepted;
    let (method, stored) = if is_used { (Method::Deflate, &*compressed) } else { (Method::Plain, plain) };
    to.clear();
    put_record(ITEMS, method, stored, plain.len(), to);
}

/// Appends a record of this type. `plain` is the length of the stored bytes after decompression.
fn put_record(kind: u8, method: Method, stored: &[u8], plain: usize, to: &mut Vec<u8>) {
    let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes();
    let mut header = [0; RECORD_HEADER];
    header[0] = kind;
    header[1] = method as u8;
    header[4..8].copy_from_slice(&length(stored.len()));
    header[8..12].copy_from_slice(&length(plain));
    let checksum = checksum(&header[..12], stored);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    to.extend_from_slice(&header);
    to.extend_from_slice(stored);
}

const fn is_bomb(stored: usize, plain: usize) -> bool {
    plain > ALLOWANCE + stored * MOST_FOR_A_BYTE
}

/// Returns the checksum of the header up to the checksum, and of the stored bytes.
fn checksum(header: &[u8], stored: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    hasher.update(stored);
    hasher.finalize()
}

/// How and where reading a file ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The file ends after a complete record.
    Complete,
    /// The file ends within a record, which is not read: the program was killed, or the file was truncated.
    Cut {
        /// The offset of the incomplete record.
        at: u64,
    },
    /// Reading ends at a record that contradicts its checksum, or that no version of the format contains. The rest is not read.
    Damaged {
        /// The offset at which the record starts.
        at: u64,
        /// The error.
        why: &'static str,
    },
    /// Reading ends at a record that takes more work or memory than the size of the file allows. gpumem writes no such files. The
    /// rest is not read.
    AboveLimit {
        /// The offset at which the record starts.
        at: u64,
        /// The limit.
        limit: &'static str,
    },
}

fn no_recording(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Checks that a file with this header can be read.
pub(super) fn check_header(header: &[u8; FILE_HEADER]) -> io::Result<()> {
    if !header.starts_with(&MAGIC) {
        return Err(no_recording("this is not a gpumem recording".to_owned()));
    }
    let version = u16::from_le_bytes([header[8], header[9]]);
    if version != VERSION {
        return Err(no_recording(format!(
            "this recording is of version {version}, and this gpumem reads version {VERSION}; use a newer gpumem"
        )));
    }
    Ok(())
}

/// Reads the records of a file, one after the other.
#[derive(Debug)]
pub(super) struct Records<R> {
    from: R,
    /// The offsets of the next record and of the current one.
    at: u64,
    last: u64,
    end: Option<End>,
    stored: Vec<u8>,
    /// Records of types that this version does not know.
    pub(super) unknown: u64,
}

impl<R: Read> Records<R> {
    /// Reads the header.
    pub(super) fn new(mut from: R) -> io::Result<Self> {
        let mut header = [0; FILE_HEADER];
        let read = fill(&mut from, &mut header)?;
        if read < FILE_HEADER && header.starts_with(&MAGIC) {
            return Err(no_recording("this recording is cut within its header".to_owned()));
        }
        check_header(&header)?;
        Ok(Self::after_header(from))
    }

    /// Reads the file after the header.
    pub(super) fn after_header(from: R) -> Self {
        let at = FILE_HEADER as u64;
        Self { from, at, last: at, end: None, stored: Vec::new(), unknown: 0 }
    }

    /// Returns the source of the bytes. At its end, the caller may add more bytes, which are read next.
    pub(super) fn underlying(&mut self) -> &mut R {
        self.end.take_if(|end| *end == End::Complete);
        &mut self.from
    }

    /// Stops reading because of this limit.
    pub(super) fn stop(&mut self, limit: &'static str) {
        self.end = Some(End::AboveLimit { at: self.last, limit });
    }

    /// Allows the incomplete or damaged record to be read again. Returns the source of the bytes.
    pub(super) fn rewind(&mut self) -> &mut R {
        self.end.take_if(|end| !matches!(end, End::AboveLimit { .. }));
        &mut self.from
    }

    /// Returns the number of bytes that were read.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Returns how reading ended, after the last record.
    pub(super) fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Puts the items of the next record into `plain`. Returns false if there is none.
    pub(super) fn next(&mut self, plain: &mut Vec<u8>) -> io::Result<bool> {
        plain.clear();
        while self.end.is_none() {
            let mut header = [0; RECORD_HEADER];
            match fill(&mut self.from, &mut header)? {
                0 => self.end = Some(End::Complete),
                RECORD_HEADER => {
                    if self.read(&header, plain)? {
                        return Ok(true);
                    }
                }
                _ => self.end = Some(End::Cut { at: self.at }),
            }
        }
        Ok(false)
    }

    /// Reads the bytes after the header of a record. Returns false if it holds no items that can be read.
    fn read(&mut self, header: &[u8; RECORD_HEADER], plain: &mut Vec<u8>) -> io::Result<bool> {
        let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let [stored, length] = [number(4), number(8)].map(|length| length as usize);
        if stored > LARGEST || length > LARGEST || is_bomb(stored, length) {
            self.end = Some(self.damaged("its length exceeds the limit of a record"));
            return Ok(false);
        }
        self.stored.resize(stored, 0);
        if fill(&mut self.from, &mut self.stored)? < stored {
            self.end = Some(End::Cut { at: self.at });
            return Ok(false);
        }
        if checksum(&header[..12], &self.stored) != number(12) {
            self.end = Some(self.damaged("its checksum does not fit its bytes"));
            return Ok(false);
        }
        let at = self.at;
        self.last = at;
        self.at += (RECORD_HEADER + stored) as u64;
        if header[0] != ITEMS {
            self.unknown += 1;
            return Ok(false);
        }
        if let Err(Malformed(why)) = self.unpack(header[1], length, plain) {
            self.end = Some(End::Damaged { at, why });
            return Ok(false);
        }
        Ok(true)
    }

    fn unpack(&self, method: u8, length: usize, plain: &mut Vec<u8>) -> Result<(), Malformed> {
        plain.resize(length, 0);
        let is_whole = if method == Method::Plain as u8 {
            plain.clone_from(&self.stored);
            true
        } else if method == Method::Deflate as u8 {
            let stored = iter::once(self.stored.as_slice());
            inflate::decompress_slice_iter_to_slice(plain, stored, false, true).is_ok_and(|read| read == length)
        } else {
            return Err(Malformed("it is compressed in a way that this version does not know"));
        };
        if is_whole && plain.len() == length { Ok(()) } else { Err(Malformed("it cannot be decompressed")) }
    }

    fn damaged(&self, why: &'static str) -> End {
        End::Damaged { at: self.at, why }
    }
}

/// Reads until the buffer is full or the source ends. Returns the number of bytes.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match from.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(records: &[&[u8]]) -> Vec<u8> {
        let mut file = Vec::new();
        write_header(&mut file).unwrap();
        let mut packed = Vec::new();
        for plain in records {
            pack(plain, 1, &mut packed);
            file.extend_from_slice(&packed);
        }
        file
    }

    fn read(file: &[u8]) -> (Vec<Vec<u8>>, End) {
        let mut records = Records::new(file).unwrap();
        let (mut all, mut plain) = (Vec::new(), Vec::new());
        while records.next(&mut plain).unwrap() {
            all.push(plain.clone());
        }
        (all, records.end().unwrap().clone())
    }

    /// The bytes repeat, but do not compress more than a record allows.
    fn repeated() -> Vec<u8> {
        (0..100_u8).flat_map(|round| (0..100_u8).map(move |at| at.wrapping_mul(round / 10 + 1))).collect()
    }

    #[test]
    fn records_are_read_back() {
        let random: Vec<u8> = (0..1000_u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        let repeated = repeated();
        let records: [&[u8]; 4] = [&repeated, &random, b"", b"x"];
        let file = file(&records);
        assert!(file.len() < 3_000, "what repeats takes no room: {}", file.len());
        let (read, end) = read(&file);
        assert_eq!((read, end), (records.map(<[u8]>::to_vec).to_vec(), End::Complete));
    }

    #[test]
    fn each_changed_bit_is_noticed() {
        let file = file(&[b"abcabcabcabcabcabcabcabcabcabcabcabc"]);
        for bit in 0..(file.len() - FILE_HEADER) * 8 {
            let mut file = file.clone();
            file[FILE_HEADER + bit / 8] ^= 1 << (bit % 8);
            let (records, end) = read(&file);
            assert!(records.is_empty() && end != End::Complete, "bit {bit}: {end:?}");
        }
    }

    #[test]
    fn records_of_later_versions_are_skipped() {
        let mut file = file(&[]);
        put_record(200, Method::Plain, b"a", 1, &mut file);
        put_record(ITEMS, Method::Plain, b"b", 1, &mut file);
        let mut records = Records::new(file.as_slice()).unwrap();
        let mut plain = Vec::new();
        assert!(records.next(&mut plain).unwrap());
        assert_eq!((plain.as_slice(), records.unknown), (&b"b"[..], 1));
    }

    #[test]
    fn what_claims_to_be_large_reserves_nothing() {
        let mut file = file(&[b"abc"]);
        file[FILE_HEADER + 4..FILE_HEADER + 8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(read(&file).1, End::Damaged { at: 16, .. }));
    }

    #[test]
    fn a_small_file_does_not_keep_its_reader_busy() {
        let mut file = file(&[]);
        let zeros = vec![0; LARGEST];
        let bomb = miniz_oxide::deflate::compress_to_vec(&zeros, 9);
        put_record(ITEMS, Method::Deflate, &bomb, LARGEST, &mut file);
        assert!(matches!(read(&file), (records, End::Damaged { .. }) if records.is_empty()));
        // A written record is never rejected.
        let whole = self::file(&[zeros.as_slice()]);
        assert_eq!(read(&whole), (vec![zeros], End::Complete));
    }

    #[test]
    fn other_files_are_rejected_with_a_reason() {
        let error_of = |file: &[u8]| Records::new(file).unwrap_err().to_string();
        assert!(error_of(b"").contains("not a gpumem recording"));
        assert!(error_of(b"\x89gpumem\n\x01").contains("cut"));
        assert!(error_of(b"PK\x03\x04 something else entirely").contains("not a gpumem recording"));
        let mut newer = file(&[]);
        newer[8] = 9;
        assert!(error_of(&newer).contains("version 9"));
    }
}
