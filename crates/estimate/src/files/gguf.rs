//! Reads the headers of GGUF files: metadata and tensors. The data is not needed: a file that ends with its header is
//! read as well.

use std::{
    collections::BTreeMap,
    fmt::Display,
    io::{self, BufReader, ErrorKind, Read},
    path::Path,
};

use gpumem_core::{model::Bytes, report::counted};

use super::{file_error, input};
use crate::{
    dtype::Dtype,
    error::Error,
    shape::Shape,
    tensors::{TensorInfo, Tensors},
};

/// The longest allowed header. The largest vocabularies take about 20 MB.
const LONGEST_HEADER: u64 = 50_000_000;
/// The maximum number of entries of the metadata. Usually there are about 50.
const MOST_ENTRIES: u64 = 65_536;
/// The maximum number of tensors in a file. A model with 1 T parameters has about 1,000, or 50,000 with a tensor for
/// each expert.
const MOST_TENSORS: u64 = 1 << 18;
/// The maximum length of a name or key: the format's own limit for keys.
const LONGEST_NAME: u64 = 65_535;
/// Strings up to this length, such as names and templates, are kept. Longer ones are skipped.
const LONGEST_KEPT: u64 = 1 << 20;
/// Longer arrays, such as vocabularies, are counted but not kept. Settings of layers are shorter.
const LONGEST_ARRAY: u64 = 4096;
/// The maximum number of files that a model may be split into.
const MOST_FILES: u64 = 10_000;

/// The header of a GGUF file: the metadata of the model, and its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Gguf {
    metadata: BTreeMap<String, Value>,
    tensors: Tensors,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A non-negative integer.
    Number(u64),
    Fraction(f64),
    Bool(bool),
    Text(String),
    /// The values of an array, if they are integers and not too many.
    Array(Vec<u64>),
    /// A negative number, or a text that is too long to be kept.
    Other,
}

impl Gguf {
    /// Reads the header of a `.gguf` file, or of all files that it is split into. Weights are not read.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is damaged, or if the parts contradict each other. The error names
    /// the file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let mut first = one_file(path)?;
        let count = match first.metadata.get("split.count") {
            Some(Value::Number(count)) => *count,
            _ => 1,
        };
        if count > 1 {
            first.tensors.all.extend(other_parts(path, count)?);
        }
        let tensors = Tensors::checked(first.tensors.all).map_err(|what| file_error(path, what))?;
        first.tensors = tensors;
        let tensors = &first.tensors.all;
        if let Some(Value::Number(expected)) = first.metadata.get("split.tensors.count")
            && *expected != tensors.len() as u64
        {
            let found = counted(tensors.len() as u64, "tensor", "tensors");
            return Err(file_error(path, format!("the files have {found} and not {expected}")));
        }
        Ok(first)
    }

    /// Reads a header from another source, such as the first bytes of a file on a server.
    ///
    /// # Errors
    /// Returns an error if reading fails, or if the header is damaged.
    pub fn from_header(read: impl Read) -> Result<Self, Error> {
        header(read).map_err(|what| file_error(Path::new("GGUF"), what))
    }

    /// Returns the tensors.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// Returns the architecture of the model, such as `llama`.
    pub fn architecture(&self) -> Option<&str> {
        self.text("general.architecture")
    }

    /// Returns the longest sequences that the model supports.
    pub(crate) fn positions(&self) -> Option<u64> {
        match self.value(&format!("{}.context_length", self.architecture()?)) {
            Some(Value::Number(positions)) => Some(*positions),
            _ => None,
        }
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        if let Some(Value::Text(text)) = self.metadata.get(key) { Some(text) } else { None }
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }
}

/// Reads the tensors in the other files of a model: `name-00001-of-00003.gguf` is the first of three.
fn other_parts(path: &Path, count: u64) -> Result<Vec<TensorInfo>, Error> {
    let wrong =
        || file_error(path, format!("the model has {count} files, and the name does not end with the index of one"));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(wrong)?;
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf")).ok_or_else(wrong)?;
    if count > MOST_FILES {
        return Err(file_error(path, format!("the model has {count} files; at most {MOST_FILES} are allowed")));
    }
    let mut tensors = Vec::new();
    for number in 2..=count {
        tensors.extend(one_file(&path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))?.tensors.all);
    }
    Ok(tensors)
}

fn one_file(path: &Path) -> Result<Gguf, Error> {
    header(BufReader::new(input::open(path)?)).map_err(|what| file_error(path, what))
}

/// The description of an error in a header.
type Wrong = String;

/// A header that is being read.
struct Source<R> {
    read: io::Take<R>,
}

impl<R: Read> Source<R> {
    fn failed(&self, error: &io::Error) -> Wrong {
        match error.kind() {
            ErrorKind::UnexpectedEof if self.read.limit() == 0 => {
                format!("a header of more than {LONGEST_HEADER} bytes")
            }
            ErrorKind::UnexpectedEof => "the file ends inside its header".to_owned(),
            _ => error.to_string(),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        let mut bytes = [0; N];
        match self.read.read_exact(&mut bytes) {
            Ok(()) => Ok(bytes),
            Err(error) => Err(self.failed(&error)),
        }
    }

    fn u32(&mut self) -> Result<u32, Wrong> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Wrong> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Reads a length that fits into the rest of the longest header. `size` is the smallest size of an element.
    fn count(&mut self, size: u64, [one, many]: [&str; 2]) -> Result<u64, Wrong> {
        let count = self.u64()?;
        if count.checked_mul(size).is_some_and(|bytes| bytes <= self.read.limit()) {
            Ok(count)
        } else {
            Err(format!("the header is too short for {}", counted(count, one, many)))
        }
    }

    /// Reads a text that is preceded by its length. `None` if it has more than `longest` bytes and is skipped.
    fn text(&mut self, longest: u64) -> Result<Option<String>, Wrong> {
        let length = self.count(1, ["byte of a text", "bytes of a text"])?;
        if length > longest {
            self.skip(length)?;
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let found = self.read.by_ref().take(length).read_to_end(&mut bytes);
        self.check_length(found.map(|found| found as u64), length)?;
        String::from_utf8(bytes).map(Some).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn name(&mut self) -> Result<String, Wrong> {
        self.text(LONGEST_NAME)?.ok_or_else(|| format!("a name of more than {LONGEST_NAME} bytes"))
    }

    fn skip(&mut self, bytes: u64) -> Result<(), Wrong> {
        let skipped = io::copy(&mut self.read.by_ref().take(bytes), &mut io::sink());
        self.check_length(skipped, bytes)
    }

    fn check_length(&self, found: io::Result<u64>, expected: u64) -> Result<(), Wrong> {
        match found {
            Ok(found) if found == expected => Ok(()),
            Ok(_) => Err("the file ends inside its header".to_owned()),
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Reads a value that is not an array. The numbers of the types are those in the specification.
    fn value(&mut self, kind: u32) -> Result<Value, Wrong> {
        let signed = |number: i64| u64::try_from(number).map_or(Value::Other, Value::Number);
        Ok(match kind {
            0 => Value::Number(u8::from_le_bytes(self.bytes()?).into()),
            1 => signed(i8::from_le_bytes(self.bytes()?).into()),
            2 => Value::Number(u16::from_le_bytes(self.bytes()?).into()),
            3 => signed(i16::from_le_bytes(self.bytes()?).into()),
            4 => Value::Number(self.u32()?.into()),
            5 => signed(i32::from_le_bytes(self.bytes()?).into()),
            6 => Value::Fraction(f32::from_le_bytes(self.bytes()?).into()),
            7 => Value::Bool(u8::from_le_bytes(self.bytes()?) != 0),
            8 => self.text(LONGEST_KEPT)?.map_or(Value::Other, Value::Text),
            10 => Value::Number(self.u64()?),
            11 => signed(i64::from_le_bytes(self.bytes()?)),
            12 => Value::Fraction(f64::from_le_bytes(self.bytes()?)),
            kind => return Err(format!("values of the type {kind} are not known")),
        })
    }

    fn array(&mut self) -> Result<Value, Wrong> {
        let kind = self.u32()?;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err("an array of arrays".to_owned()),
            kind => return Err(format!("values of the type {kind} are not known")),
        };
        let count = self.count(size, ["element of an array", "elements of an array"])?;
        let mut kept = Vec::new();
        if kind == 8 {
            for _ in 0..count {
                let length = self.count(1, ["byte of a text", "bytes of a text"])?;
                self.skip(length)?;
            }
        } else if count > LONGEST_ARRAY {
            self.skip(count * size)?;
        } else {
            for _ in 0..count {
                match self.value(kind)? {
                    Value::Number(number) => kept.push(number),
                    Value::Bool(is_true) => kept.push(is_true.into()),
                    _ => {}
                }
            }
        }
        // A list with only some of the numbers would look complete.
        if kept.len() as u64 != count {
            kept.clear();
        }
        Ok(Value::Array(kept))
    }

    fn metadata(&mut self) -> Result<(String, Value), Wrong> {
        let key = self.name()?;
        let kind = self.u32()?;
        let value = if kind == 9 { self.array() } else { self.value(kind) };
        value.map(|value| (key.clone(), value)).map_err(|what| format!("key `{key}`: {what}"))
    }

    fn tensor(&mut self) -> Result<TensorInfo, Wrong> {
        let name = self.name()?;
        let of_tensor = |what: &dyn Display| format!("tensor `{name}`: {what}");
        let rank = self.u32()?;
        if rank > 4 {
            return Err(of_tensor(&format!("{rank} dimensions; at most 4 are allowed")));
        }
        let mut sizes = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        let kind = self.u32()?;
        let (dtype, block) =
            dtype_of(kind).ok_or_else(|| of_tensor(&format!("the type {kind} of elements is not known")))?;
        let row = sizes.first().copied().unwrap_or(1);
        // The file stores the innermost size first.
        sizes.reverse();
        let shape = Shape::from(sizes);
        if row % block != 0 {
            return Err(of_tensor(&format!("the shape {shape} of {dtype} has no whole blocks of {block}")));
        }
        let bytes = shape.elements().and_then(|elements| dtype.bytes(elements));
        let bytes = bytes.filter(|bytes| *bytes < 1 << 62);
        let bytes = bytes.ok_or_else(|| of_tensor(&format!("the shape {shape} of {dtype} is too large")))?;
        // The offset in the data. The size follows from the shape.
        self.u64()?;
        Ok(TensorInfo { name, dtype, shape, bytes: Bytes::new(bytes) })
    }
}

fn header(read: impl Read) -> Result<Gguf, Wrong> {
    let mut source = Source { read: read.take(LONGEST_HEADER) };
    if source.bytes()? != *b"GGUF" {
        return Err("this is not a GGUF file".to_owned());
    }
    match source.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() == 3 => return Err("the numbers of the file are big-endian".to_owned()),
        version => return Err(format!("the version {version} of GGUF is not known")),
    }
    // A tensor has a name, dimensions, a type and an offset. An entry of the metadata has a key, a type and a value.
    let tensors = source.count(8 + 4 + 4 + 8, ["tensor", "tensors"])?;
    let entries = source.count(8 + 4 + 1, ["entry of the metadata", "entries of the metadata"])?;
    for (count, most, of) in [(tensors, MOST_TENSORS, "tensors"), (entries, MOST_ENTRIES, "entries of the metadata")] {
        if count > most {
            return Err(format!("{count} {of}; at most {most} are allowed"));
        }
    }
    let mut metadata = BTreeMap::new();
    for _ in 0..entries {
        let (key, value) = source.metadata()?;
        if metadata.contains_key(&key) {
            return Err(format!("the key `{key}` occurs twice"));
        }
        metadata.insert(key, value);
    }
    let all = (0..tensors).map(|_| source.tensor()).collect::<Result<_, _>>()?;
    Ok(Gguf { metadata, tensors: Tensors::checked(all)? })
}

/// The types of elements by number. `-` is a type that was removed from the format.
const TYPES: &str = "f32 f16 q4_0 q4_1 - - q5_0 q5_1 q8_0 q8_1 q2_k q3_k q4_k q5_k q6_k q8_k iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl iq3_s \
                     iq2_s iq4_xs i8 i16 i32 i64 f64 iq1_m bf16 - - - tq1_0 tq2_0 - - - mxfp4 nvfp4 q1_0";

/// Returns the element type with this number, and the number of elements of a row that are stored together.
fn dtype_of(kind: u32) -> Option<(Dtype, u64)> {
    let name = TYPES.split(' ').nth(kind as usize)?;
    let dtype: Dtype = name.parse().ok()?;
    // Four blocks of 16 are stored together.
    Some((dtype, if name == "nvfp4" { 64 } else { dtype.block() }))
}

#[cfg(test)]
mod tests {
    use super::{Gguf, LONGEST_HEADER, MOST_ENTRIES, MOST_TENSORS, Value, header};

    struct File(Vec<u8>);

    fn text(text: &str) -> Vec<u8> {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes
    }

    fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [&text(key), &kind.to_le_bytes()[..], value].concat()
    }

    fn tensor(name: &str, sizes: &[u64], kind: u32) -> Vec<u8> {
        let mut bytes = text(name);
        bytes.extend(u32::try_from(sizes.len()).unwrap().to_le_bytes());
        bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        bytes
    }

    impl File {
        fn new(entries: &[Vec<u8>], tensors: &[Vec<u8>]) -> Self {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend((tensors.len() as u64).to_le_bytes());
            bytes.extend((entries.len() as u64).to_le_bytes());
            bytes.extend(entries.concat());
            bytes.extend(tensors.concat());
            Self(bytes)
        }

        fn read(&self) -> Result<Gguf, String> {
            header(&self.0[..])
        }

        fn error(&self) -> String {
            self.read().unwrap_err()
        }

        fn with(mut self, at: usize, bytes: &[u8]) -> Self {
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
            self
        }
    }

    #[test]
    fn a_header_is_read() {
        let array =
            [&5_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &7_i32.to_le_bytes(), &8_i32.to_le_bytes()].concat();
        let words = [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &text("a"), &text("bc")].concat();
        let entries = [
            entry("general.architecture", 8, &text("llama")),
            entry("heads", 9, &array),
            entry("tokens", 9, &words),
            entry("negative", 5, &(-1_i32).to_le_bytes()),
            entry("count", 10, &9_u64.to_le_bytes()),
            entry("fraction", 6, &0.5_f32.to_le_bytes()),
            entry("flag", 7, &[1]),
        ];
        let tensors = [tensor("b", &[64, 2], 2), tensor("a", &[3], 0), tensor("c", &[], 1)];
        let file = File::new(&entries, &tensors).read().unwrap();
        assert_eq!(file.architecture(), Some("llama"));
        assert_eq!(file.value("heads"), Some(&Value::Array(vec![7, 8])));
        assert_eq!(file.value("tokens"), Some(&Value::Array(vec![])));
        assert_eq!(file.value("negative"), Some(&Value::Other));
        assert_eq!(file.value("count"), Some(&Value::Number(9)));
        assert_eq!(file.value("fraction"), Some(&Value::Fraction(0.5)));
        assert_eq!(file.value("flag"), Some(&Value::Bool(true)));
        let lines: Vec<_> = file
            .tensors()
            .all()
            .iter()
            .map(|tensor| format!("{} {} {}", tensor.name, tensor.dtype, tensor.shape))
            .collect();
        assert_eq!(lines, ["a f32 (3,)", "b q4_0 (2, 64)", "c f16 ()"]);
        let sum = file.tensors().sum();
        assert_eq!((sum.elements, sum.bytes.get()), (132, 72 + 12 + 2));
    }

    #[test]
    fn hostile_tensors_are_errors() {
        let error = |tensors: &[Vec<u8>]| File::new(&[], tensors).error();
        for sizes in [&[u64::MAX, u64::MAX][..], &[1 << 32, 1 << 32], &[1 << 60]] {
            assert!(error(&[tensor("a", sizes, 0)]).ends_with(" of f32 is too large"), "{sizes:?}");
        }
        let halves = [tensor("a", &[1 << 59], 0), tensor("b", &[1 << 59], 0)];
        assert_eq!(error(&halves), "the tensors have more than 2^62 bytes");
        assert_eq!(error(&[tensor("a", &[1; 5], 0)]), "tensor `a`: 5 dimensions; at most 4 are allowed");
        let part = "tensor `a`: the shape (2, 33) of q4_0 has no whole blocks of 32";
        assert_eq!(error(&[tensor("a", &[33, 2], 2)]), part);
        for removed in [4, 5, 31, 36, 1000] {
            let expected = format!("tensor `a`: the type {removed} of elements is not known");
            assert_eq!(error(&[tensor("a", &[32], removed)]), expected);
        }
        let twice = [tensor("a", &[8], 0), tensor("a", &[8], 0)];
        assert_eq!(error(&twice), "the tensor `a` occurs twice");
    }

    #[test]
    fn hostile_metadata_is_an_error() {
        let error = |entries: &[Vec<u8>]| File::new(entries, &[]).error();
        let huge = (1_u64 << 60).to_le_bytes();
        let text_of = format!("the header is too short for {} bytes of a text", 1_u64 << 60);
        assert_eq!(error(&[entry("k", 8, &huge)]), format!("key `k`: {text_of}"));
        assert_eq!(File::new(&[entry("k", 8, &text("v"))], &[]).with(24, &huge).error(), text_of);
        for kind in [0_u32, 8, 12] {
            let array = [&kind.to_le_bytes()[..], &huge].concat();
            let expected = format!("key `k`: the header is too short for {} elements of an array", 1_u64 << 60);
            assert_eq!(error(&[entry("k", 9, &array)]), expected);
        }
        let overflow = [&12_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat();
        assert!(error(&[entry("k", 9, &overflow)]).ends_with(" elements of an array"));
        let nested = [&9_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
        assert_eq!(error(&[entry("k", 9, &nested)]), "key `k`: an array of arrays");
        assert_eq!(error(&[entry("k", 13, &[])]), "key `k`: values of the type 13 are not known");
        let twice = entry("k", 7, &[0]);
        assert_eq!(error(&[twice.clone(), twice]), "the key `k` occurs twice");
        let name = entry(&"k".repeat(65_536), 7, &[0]);
        assert_eq!(error(&[name]), "a name of more than 65535 bytes");
        let not_text = [&1_u64.to_le_bytes()[..], &[255]].concat();
        assert_eq!(error(&[entry("k", 8, &not_text)]), "key `k`: a text is not UTF-8");
    }

    #[test]
    fn counts_and_versions_that_lie_are_errors() {
        let empty = || File::new(&[], &[]);
        assert!(empty().read().is_ok());
        assert!(empty().with(4, &[2]).read().is_ok());
        assert_eq!(empty().with(0, b"GGML").error(), "this is not a GGUF file");
        assert_eq!(empty().with(4, &[1]).error(), "the version 1 of GGUF is not known");
        assert_eq!(empty().with(4, &[0, 0, 0, 3]).error(), "the numbers of the file are big-endian");
        for count in [1 << 60, u64::MAX] {
            let bytes = count.to_le_bytes();
            assert_eq!(empty().with(8, &bytes).error(), format!("the header is too short for {count} tensors"));
            let expected = format!("the header is too short for {count} entries of the metadata");
            assert_eq!(empty().with(16, &bytes).error(), expected);
        }
        for length in 0..24 {
            let error = header(&empty().0[..length]).unwrap_err();
            assert!(error.ends_with("inside its header"), "{length}: {error}");
        }
    }

    /// After its first bytes, the file returns endless zeros.
    #[test]
    fn a_header_without_an_end_is_an_error() {
        let start = |count: u64| [b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", &count.to_le_bytes()[..]].concat();
        let error = |start: Vec<u8>| header(std::io::Read::chain(&start[..], std::io::repeat(0))).unwrap_err();
        assert_eq!(error(start(LONGEST_HEADER / 13)), "the header is too short for 3846153 entries of the metadata");
        assert_eq!(error(start(MOST_ENTRIES + 1)), "65537 entries of the metadata; at most 65536 are allowed");
        assert_eq!(error(start(MOST_ENTRIES)), "the key `` occurs twice");
        let tensors = [b"GGUF\x03\0\0\0", &(MOST_TENSORS + 1).to_le_bytes()[..], &[0; 8]].concat();
        assert_eq!(error(tensors), "262145 tensors; at most 262144 are allowed");
        let text = [b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0", &(1_u64 << 59).to_le_bytes()[..]].concat();
        assert_eq!(error(text), format!("the header is too short for {} bytes of a text", 1_u64 << 59));
    }
}
