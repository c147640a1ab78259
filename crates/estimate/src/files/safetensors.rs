//! Reads the headers of safetensors files: eight bytes with the length of a JSON object, then that object. The data is
//! not needed: a file that ends with its header is read as well.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path},
};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{bytes, copy, file_error, open};
use crate::{Bytes, Dtype, Result, Shape, TensorInfo, Tensors, dtype::PLAIN, ensure};

/// The format's own limit for its header.
const LONGEST_HEADER: u64 = 100_000_000;
/// The longest allowed index. The index of a model with 1 T parameters has about 10 MB.
const LONGEST_INDEX: u64 = 40_000_000;

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Shape,
    data_offsets: [u64; 2],
}

#[derive(Deserialize)]
struct Index {
    /// Maps the names of tensors to the names of files.
    weight_map: BTreeMap<String, String>,
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
struct Metadata {
    /// The bytes of all tensors. Some tools write it with a decimal point.
    total_size: Option<serde_json::Number>,
}

/// Reads an index whose files are not there. Returns the bytes of all tensors, and how many there are. Returns `None` if any of its
/// files is there, or if it does not contain the sum of its tensors.
pub(super) fn index_alone(path: &Path) -> Result<Option<(u64, usize)>> {
    let Index { weight_map, metadata } = index(path)?;
    let is_there = |name: &String| path.with_file_name(name).exists();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is checked, and most are exact")]
    let whole = |size: f64| (0.0..9e15).contains(&size).then_some(size as u64);
    let bytes = metadata.total_size.and_then(|size| size.as_u64().or_else(|| size.as_f64().and_then(whole)));
    let bytes = bytes.filter(|bytes| *bytes < 1 << 62 && !weight_map.values().any(is_there));
    Ok(bytes.map(|bytes| (bytes, weight_map.len())))
}

fn index(path: &Path) -> Result<Index> {
    let text = bytes(path, LONGEST_INDEX)?;
    serde_json::from_slice(&text).map_err(|error| file_error(path, format!("this is not an index: {error}")))
}

impl Tensors {
    /// Reads the header of a `.safetensors` file, or of all files that a `.safetensors.index.json` names. The rest of
    /// these files is not read.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is damaged. The error names the file.
    pub fn from_safetensors(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        let tensors = if is_index { all_files(path)? } else { one_file(path)? };
        Self::checked(tensors).map_err(|what| file_error(path, what))
    }
}

fn one_file(path: &Path) -> Result<Vec<TensorInfo>> {
    let mut file = open(path)?;
    let mut read = || {
        let mut length = [0; 8];
        copy(&mut file, 8, &mut &mut length[..])?;
        let length = u64::from_le_bytes(length);
        let fits = length <= LONGEST_HEADER;
        ensure(fits, || format!("a header of {length} bytes; at most {LONGEST_HEADER} are allowed"))?;
        // Grows with what is read, so that a short file needs little memory whatever its length says.
        let mut header = Vec::new();
        copy(&mut file, length, &mut header)?;
        tensors(&header)
    };
    read().map_err(|what| file_error(path, what))
}

/// Returns the tensors in a header.
fn tensors(header: &[u8]) -> Result<Vec<TensorInfo>, String> {
    // Entries are read one by one, so that a header needs little more memory than its bytes.
    let mut entries: BTreeMap<String, &RawValue> =
        serde_json::from_slice(header).map_err(|error| format!("the header is not a JSON object: {error}"))?;
    entries.remove("__metadata__");
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let of_tensor = |what: &dyn std::fmt::Display| format!("tensor `{name}`: {what}");
        let entry = serde_json::from_str(entry.get()).map_err(|error| of_tensor(&error))?;
        let Entry { dtype, shape, data_offsets: [start, end] } = entry;
        let dtype = dtype_of(&dtype).ok_or_else(|| of_tensor(&format!("`{dtype}` is not a type of elements")))?;
        let elements = shape.elements().filter(|elements| elements % dtype.block() == 0);
        let bytes = elements.and_then(|elements| dtype.bytes(elements));
        let length = end.checked_sub(start);
        let wrong = || of_tensor(&format!("the shape {shape} of {dtype} does not take the bytes {start} to {end}"));
        ensure(bytes.is_some() && bytes == length, wrong)?;
        tensors.push(TensorInfo { name, dtype, shape, bytes: Bytes::new(end - start) });
    }
    Ok(tensors)
}

fn all_files(index: &Path) -> Result<Vec<TensorInfo>> {
    let Index { weight_map, .. } = self::index(index)?;
    let files: BTreeSet<&String> = weight_map.values().collect();
    let mut tensors = Vec::new();
    for name in files {
        let mut parts = Path::new(name).components();
        let fits = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        ensure(fits, || file_error(index, format!("`{name}` is not the name of a file next to the index")))?;
        let found = one_file(&index.with_file_name(name))?;
        // A file may contain tensors that the index takes from another file.
        tensors.extend(found.into_iter().filter(|tensor| weight_map.get(&tensor.name) == Some(name)));
    }
    if tensors.len() == weight_map.len() {
        return Ok(tensors);
    }
    let found: BTreeSet<_> = tensors.iter().map(|tensor| &tensor.name).collect();
    let missing = weight_map.keys().find(|name| !found.contains(name));
    Err(file_error(index, format!("the files do not have the tensor `{}`", missing.map_or("", |name| name))))
}

/// Returns the type with this name. safetensors uses the names of `Dtype` in capitals, and has several formats of small
/// numbers of the same size.
fn dtype_of(name: &str) -> Option<Dtype> {
    match name {
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => Some(Dtype::F8),
        "F6_E2M3" | "F6_E3M2" => "f6".parse().ok(),
        "F4" => "f4".parse().ok(),
        _ => PLAIN.iter().find(|(plain, ..)| plain.to_ascii_uppercase() == name).map(|(_, dtype, _)| *dtype),
    }
}

#[cfg(test)]
mod tests {
    use super::tensors;

    #[test]
    fn a_header_is_read() {
        let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"c":{"dtype":"U8","shape":[0,7],"data_offsets":[16,16]}}"#;
        let found = tensors(header.as_bytes()).unwrap();
        let line = |of: &super::TensorInfo| format!("{} {} {} {}", of.name, of.dtype, of.shape, of.bytes.get());
        assert_eq!(found.iter().map(line).collect::<Vec<_>>(), ["a f32 () 4", "b bf16 (2, 3) 12", "c u8 (0, 7) 0"]);
    }

    #[test]
    fn hostile_headers_are_errors() {
        for (dtype, shape, offsets, expected) in [
            ("F32", "[2]", "[0,4]", "tensor `a`: the shape"),
            ("F32", "[2]", "[8,0]", "tensor `a`: the shape"),
            ("F32", "[4294967296,4294967296,2]", "[0,0]", "tensor `a`: the shape"),
            // Three numbers of 4 bits fill no bytes.
            ("F4", "[3]", "[0,2]", "tensor `a`: the shape"),
            ("F32", "[-1]", "[0,4]", "tensor `a`: invalid value"),
            ("F32", "[1.5]", "[0,4]", "tensor `a`: invalid type"),
            ("F33", "[1]", "[0,4]", "tensor `a`: `F33` is not a type of elements"),
        ] {
            let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
            let error = tensors(header.as_bytes()).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let (deep, nested) = ("[".repeat(1_000_000), r#"{"a":"#.repeat(1_000_000));
        for (header, expected) in [
            (String::new(), ""),
            (format!(r#"{{"__metadata__":{deep}}}"#), ": "),
            (deep, ""),
            (format!(r#"{{"a":{nested}"#), ": EOF while parsing"),
        ] {
            let error = tensors(header.as_bytes()).unwrap_err();
            assert!(error.starts_with(&format!("the header is not a JSON object{expected}")), "{error}");
        }
    }
}
