//! Reads the headers of GGUF files: metadata and tensors. The data is not needed: a file that ends with its header is
//! read as well.

use std::{
    fmt::Display,
    io::{self, BufReader, Read},
    path::Path,
};

use gpumem_core::report::counted;
use serde_json::{Map, Value};

use super::{copy, file_error, open};
use crate::{Bytes, Dtype, Result, Shape, TensorInfo, Tensors, ensure};

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
    /// The values by key. A text that is too long to be kept is `null`. An array has its values if they are integers and not too many.
    metadata: Map<String, Value>,
    tensors: Tensors,
}

impl Gguf {
    /// Reads the header of a `.gguf` file, or of all files that it is split into. Weights are not read.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is damaged, or if the parts contradict each other. The error names
    /// the file.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let mut file = one_file(path)?;
        let count = file.number("split.count").unwrap_or(1);
        if count > 1 {
            file.tensors.all.extend(other_parts(path, count)?);
        }
        file.tensors = Tensors::checked(file.tensors.all).map_err(|what| file_error(path, what))?;
        let found = file.tensors.all.len() as u64;
        let expected = file.number("split.tensors.count").unwrap_or(found);
        let what = || format!("the files have {} and not {expected}", counted(found, "tensor", "tensors"));
        ensure(found == expected, || file_error(path, what()))?;
        Ok(file)
    }

    /// Reads a header from another source, such as the first bytes of a file on a server.
    ///
    /// # Errors
    /// Returns an error if reading fails, or if the header is damaged.
    pub fn from_header(read: impl Read) -> Result<Self> {
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
        self.number(&format!("{}.context_length", self.architecture()?))
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.value(key)?.as_u64()
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.value(key)?.as_str()
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }
}

/// Reads the tensors in the other files of a model: `name-00001-of-00003.gguf` is the first of three.
fn other_parts(path: &Path, count: u64) -> Result<Vec<TensorInfo>> {
    let wrong =
        || file_error(path, format!("the model has {count} files, and the name does not end with the index of one"));
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(wrong)?;
    let stem = name.strip_suffix(&format!("-00001-of-{count:05}.gguf")).ok_or_else(wrong)?;
    let fits = count <= MOST_FILES;
    ensure(fits, || file_error(path, format!("the model has {count} files; at most {MOST_FILES} are allowed")))?;
    let mut tensors = Vec::new();
    for number in 2..=count {
        tensors.extend(one_file(&path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))?.tensors.all);
    }
    Ok(tensors)
}

fn one_file(path: &Path) -> Result<Gguf> {
    header(BufReader::new(open(path)?)).map_err(|what| file_error(path, what))
}

/// The description of an error in a header.
type Wrong = String;

/// A header that is being read.
struct Source<R>(io::Take<R>);

impl<R: Read> Source<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Wrong> {
        ensure(self.0.limit() >= N as u64, || format!("a header of more than {LONGEST_HEADER} bytes"))?;
        let mut bytes = [0; N];
        copy(&mut self.0, N as u64, &mut &mut bytes[..])?;
        Ok(bytes)
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
        let fits = count.checked_mul(size).is_some_and(|bytes| bytes <= self.0.limit());
        ensure(fits, || format!("the header is too short for {}", counted(count, one, many))).map(|()| count)
    }

    /// Reads a text that is preceded by its length. `None` if it has more than `longest` bytes and is skipped.
    fn text(&mut self, longest: u64) -> Result<Option<String>, Wrong> {
        let length = self.count(1, ["byte of a text", "bytes of a text"])?;
        if length > longest {
            return self.skip(length).map(|()| None);
        }
        let mut bytes = Vec::new();
        copy(&mut self.0, length, &mut bytes)?;
        String::from_utf8(bytes).map(Some).map_err(|_| "a text is not UTF-8".to_owned())
    }

    fn name(&mut self) -> Result<String, Wrong> {
        self.text(LONGEST_NAME)?.ok_or_else(|| format!("a name of more than {LONGEST_NAME} bytes"))
    }

    fn skip(&mut self, bytes: u64) -> Result<(), Wrong> {
        copy(&mut self.0, bytes, &mut io::sink())
    }

    /// Reads a value that is not an array. The numbers of the types are those in the specification.
    fn value(&mut self, kind: u32) -> Result<Value, Wrong> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.bytes()?).into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            6 => f32::from_le_bytes(self.bytes()?).into(),
            7 => (u8::from_le_bytes(self.bytes()?) != 0).into(),
            8 => self.text(LONGEST_KEPT)?.into(),
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.bytes()?).into(),
            12 => f64::from_le_bytes(self.bytes()?).into(),
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
                self.text(0)?;
            }
        } else if count > LONGEST_ARRAY {
            self.skip(count * size)?;
        } else {
            for _ in 0..count {
                let value = self.value(kind)?;
                kept.extend(value.as_u64().or(value.as_bool().map(u64::from)));
            }
        }
        // A list with only some of the numbers would look complete.
        if kept.len() as u64 != count {
            kept.clear();
        }
        Ok(kept.into())
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
        ensure(rank <= 4, || of_tensor(&format!("{rank} dimensions; at most 4 are allowed")))?;
        let mut sizes = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        let kind = self.u32()?;
        let (dtype, block) =
            dtype_of(kind).ok_or_else(|| of_tensor(&format!("the type {kind} of elements is not known")))?;
        let row = sizes.first().copied().unwrap_or(1);
        // The file stores the innermost size first.
        sizes.reverse();
        let shape = Shape::from(sizes);
        let fits = row % block == 0;
        ensure(fits, || of_tensor(&format!("the shape {shape} of {dtype} has no whole blocks of {block}")))?;
        let bytes = shape.elements().and_then(|elements| dtype.bytes(elements));
        let bytes = bytes.filter(|bytes| *bytes < 1 << 62);
        let bytes = bytes.ok_or_else(|| of_tensor(&format!("the shape {shape} of {dtype} is too large")))?;
        // The offset in the data. The size follows from the shape.
        self.u64()?;
        Ok(TensorInfo { name, dtype, shape, bytes: Bytes::new(bytes) })
    }
}

fn header(read: impl Read) -> Result<Gguf, Wrong> {
    let mut source = Source(read.take(LONGEST_HEADER));
    ensure(source.bytes()? == *b"GGUF", || "this is not a GGUF file".to_owned())?;
    match source.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() == 3 => return Err("the numbers of the file are big-endian".to_owned()),
        version => return Err(format!("the version {version} of GGUF is not known")),
    }
    // A tensor has a name, dimensions, a type and an offset. An entry of the metadata has a key, a type and a value.
    let tensors = source.count(8 + 4 + 4 + 8, ["tensor", "tensors"])?;
    let entries = source.count(8 + 4 + 1, ["entry of the metadata", "entries of the metadata"])?;
    for (count, most, of) in [(tensors, MOST_TENSORS, "tensors"), (entries, MOST_ENTRIES, "entries of the metadata")] {
        ensure(count <= most, || format!("{count} {of}; at most {most} are allowed"))?;
    }
    let mut metadata = Map::new();
    for _ in 0..entries {
        let (key, value) = source.metadata()?;
        ensure(!metadata.contains_key(&key), || format!("the key `{key}` occurs twice"))?;
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
    use serde_json::json;

    use super::{LONGEST_HEADER, MOST_ENTRIES, MOST_TENSORS, Value, header};

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [&text(key), &kind.to_le_bytes()[..], value].concat()
    }

    /// Returns the value of an array: its type, its length, and its elements.
    fn array(kind: u32, length: u64, elements: &[u8]) -> Vec<u8> {
        [&kind.to_le_bytes(), &length.to_le_bytes()[..], elements].concat()
    }

    fn tensor(name: &str, sizes: &[u64], kind: u32) -> Vec<u8> {
        let rank = u32::try_from(sizes.len()).unwrap().to_le_bytes();
        let sizes: Vec<_> = sizes.iter().flat_map(|size| size.to_le_bytes()).collect();
        [&text(name), &rank[..], &sizes, &kind.to_le_bytes(), &[0; 8]].concat()
    }

    /// Returns the start of a header, which says how many tensors and entries there are.
    fn start(tensors: u64, entries: u64) -> Vec<u8> {
        [b"GGUF\x03\0\0\0", &tensors.to_le_bytes()[..], &entries.to_le_bytes()].concat()
    }

    #[test]
    fn a_header_is_read() {
        let entries = [
            entry("general.architecture", 8, &text("llama")),
            entry("heads", 9, &array(5, 2, &[7_i32.to_le_bytes(), 8_i32.to_le_bytes()].concat())),
            entry("tokens", 9, &array(8, 2, &[text("a"), text("bc")].concat())),
            entry("negative", 5, &(-1_i32).to_le_bytes()),
            entry("count", 10, &9_u64.to_le_bytes()),
            entry("fraction", 6, &0.5_f32.to_le_bytes()),
            entry("flag", 7, &[1]),
        ];
        let tensors = [tensor("b", &[64, 2], 2), tensor("a", &[3], 0), tensor("c", &[], 1)];
        let file = [start(3, 7), entries.concat(), tensors.concat()].concat();
        let file = header(&file[..]).unwrap();
        assert_eq!(file.architecture(), Some("llama"));
        let expected = json!({
            "general.architecture": "llama", "heads": [7, 8], "tokens": [], "negative": -1, "count": 9, "fraction": 0.5, "flag": true,
        });
        assert_eq!(Value::Object(file.metadata.clone()), expected);
        let all = file.tensors().all().iter();
        let lines: Vec<_> = all.map(|tensor| format!("{} {} {}", tensor.name, tensor.dtype, tensor.shape)).collect();
        assert_eq!(lines, ["a f32 (3,)", "b q4_0 (2, 64)", "c f16 ()"]);
        let sum = file.tensors().sum();
        assert_eq!((sum.elements, sum.bytes.get()), (132, 72 + 12 + 2));
    }

    /// Some of these files return endless zeros after their first bytes.
    #[test]
    fn hostile_headers_are_errors() {
        const HUGE: u64 = 1 << 60;
        let of_tensors = |tensors: &[Vec<u8>]| [start(tensors.len() as u64, 0), tensors.concat()].concat();
        let of_entries = |entries: &[Vec<u8>]| [start(0, entries.len() as u64), entries.concat()].concat();
        let removed = |kind| of_tensors(&[tensor("a", &[32], kind)]);
        let flag = || entry("k", 7, &[0]);
        let of_array = |kind, length| of_entries(&[entry("k", 9, &array(kind, length, &[]))]);
        let with = |at: usize, bytes: &[u8]| [&start(0, 0)[..at], bytes, &start(0, 0)[at + bytes.len()..]].concat();
        assert!(header(&start(0, 0)[..]).is_ok() && header(&with(4, &[2])[..]).is_ok());
        for (file, expected) in [
            (of_tensors(&[tensor("a", &[u64::MAX, u64::MAX], 0)]), " of f32 is too large"),
            (of_tensors(&[tensor("a", &[1 << 32, 1 << 32], 0)]), " of f32 is too large"),
            (of_tensors(&[tensor("a", &[HUGE], 0)]), " of f32 is too large"),
            (
                of_tensors(&[tensor("a", &[1 << 59], 0), tensor("b", &[1 << 59], 0)]),
                "the tensors have more than 2^62 bytes",
            ),
            (of_tensors(&[tensor("a", &[1; 5], 0)]), "tensor `a`: 5 dimensions; at most 4 are allowed"),
            (of_tensors(&[tensor("a", &[33, 2], 2)]), "the shape (2, 33) of q4_0 has no whole blocks of 32"),
            (of_tensors(&[tensor("a", &[8], 0), tensor("a", &[8], 0)]), "the tensor `a` occurs twice"),
            (removed(4), "tensor `a`: the type 4 of elements is not known"),
            (removed(31), "tensor `a`: the type 31 of elements is not known"),
            (removed(36), "tensor `a`: the type 36 of elements is not known"),
            (removed(1000), "tensor `a`: the type 1000 of elements is not known"),
            (of_entries(&[entry("k", 8, &HUGE.to_le_bytes())]), "too short for 1152921504606846976 bytes of a text"),
            (of_entries(&[HUGE.to_le_bytes().to_vec()]), "too short for 1152921504606846976 bytes of a text"),
            (of_array(0, HUGE), "key `k`: the header is too short for 1152921504606846976 elements of an array"),
            (of_array(8, HUGE), "key `k`: the header is too short for 1152921504606846976 elements of an array"),
            (of_array(12, HUGE), "key `k`: the header is too short for 1152921504606846976 elements of an array"),
            (of_array(12, 2 * HUGE), "key `k`: the header is too short for 2305843009213693952 elements of an array"),
            (of_array(9, 1), "key `k`: an array of arrays"),
            (of_entries(&[entry("k", 13, &[])]), "key `k`: values of the type 13 are not known"),
            (of_entries(&[flag(), flag()]), "the key `k` occurs twice"),
            (of_entries(&[entry(&"k".repeat(65_536), 7, &[0])]), "a name of more than 65535 bytes"),
            (of_entries(&[entry("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 255])]), "key `k`: a text is not UTF-8"),
            (with(0, b"GGML"), "this is not a GGUF file"),
            (with(4, &[1]), "the version 1 of GGUF is not known"),
            (with(4, &[0, 0, 0, 3]), "the numbers of the file are big-endian"),
            (start(HUGE, 0), "the header is too short for 1152921504606846976 tensors"),
            (start(u64::MAX, 0), "the header is too short for 18446744073709551615 tensors"),
            (start(0, HUGE), "the header is too short for 1152921504606846976 entries of the metadata"),
            (start(0, u64::MAX), "the header is too short for 18446744073709551615 entries of the metadata"),
        ] {
            let error = header(&file[..]).unwrap_err();
            assert!(error.ends_with(expected), "{error}");
        }
        for length in 0..24 {
            let error = header(&start(0, 0)[..length]).unwrap_err();
            assert!(error.ends_with("inside its header"), "{length}: {error}");
        }
        let endless = |start: Vec<u8>| header(std::io::Read::chain(&start[..], std::io::repeat(0))).unwrap_err();
        for (start, expected) in [
            (start(0, LONGEST_HEADER / 13), "the header is too short for 3846153 entries of the metadata"),
            (start(0, MOST_ENTRIES + 1), "65537 entries of the metadata; at most 65536 are allowed"),
            (start(0, MOST_ENTRIES), "the key `` occurs twice"),
            (start(MOST_TENSORS + 1, 0), "262145 tensors; at most 262144 are allowed"),
            (
                [start(0, 1), (1_u64 << 59).to_le_bytes().to_vec()].concat(),
                "the header is too short for 576460752303423488 bytes of a text",
            ),
        ] {
            assert_eq!(endless(start), expected);
        }
    }
}
