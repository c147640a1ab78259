//! Tests GGUF files that the Python package `gguf` wrote. `measure/gguf_files.py` made the headers in `gguf/`, and `files.jsonl`,
//! which contains the values that this package reads in them.

use std::{fs, path::PathBuf};

use gpumem_estimate::{Gguf, Step};
use serde_json::Value;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/gguf").join(name)
}

fn lines() -> Vec<Value> {
    let text = fs::read_to_string(path("files.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Reads a file that consists only of a header.
fn header(line: &Value) -> Gguf {
    let name = line["name"].as_str().unwrap();
    Gguf::read(path(&format!("{name}.gguf"))).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn each_type_has_the_size_that_the_python_package_says() {
    let lines = lines();
    let all = lines.iter().find_map(|line| line["all"].as_object()).unwrap();
    let file = Gguf::read(path("all_types.gguf")).unwrap();
    let by_dtype = file.tensors().by_dtype();
    assert_eq!(by_dtype.len(), all.len());
    for (name, sum) in by_dtype {
        assert_eq!(serde_json::json!([sum.elements, sum.bytes.get()]), all[&name], "{name}");
    }
}

#[test]
fn parameters_are_those_that_the_file_has() {
    let lines = lines();
    assert!(lines.len() > 10);
    for line in lines.iter().filter(|line| line["types"].is_object()) {
        let (name, file) = (&line["name"], header(line));
        let sum = file.tensors().sum();
        let sums = [sum.elements, sum.bytes.get()].map(Value::from);
        assert_eq!([&line["elements"], &line["bytes"]], sums.each_ref(), "{name}");
        let types: serde_json::Map<String, Value> =
            file.tensors().by_dtype().into_iter().map(|(dtype, sum)| (dtype, sum.elements.into())).collect();
        assert_eq!(Some(&types), line["types"].as_object(), "{name}");
        // `model` rejects a file whose parameters are not those of the model, so this call compares them as well.
        let model = file.model(16).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(Some(model.name.as_str()), name.as_str());
        assert!(Step::inference(1).estimate(&model).unwrap().parameters.abs_diff(sum.elements) < 100, "{name}");
    }
}

#[test]
fn metadata_that_does_not_describe_the_tensors_is_an_error() {
    let mut bytes = fs::read(path("llama-3-8b.gguf")).unwrap();
    let key = b"llama.feed_forward_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], 14336_u32.to_le_bytes());
    bytes[at..at + 4].copy_from_slice(&14337_u32.to_le_bytes());
    let file = Gguf::from_header(&bytes[..]).unwrap();
    let expected = "GGUF: the metadata describes a model with 8030654464 parameters, and the file has 8030261248";
    assert_eq!(file.model(16).unwrap_err().to_string(), expected);
    let none = Gguf::read(path("all_types.gguf")).unwrap();
    assert_eq!(none.architecture(), Some("none"));
    let unknown = none.model(16).unwrap_err().to_string();
    let expected = "GGUF: the architecture `none` is not supported; supported are llama, qwen2, qwen2moe, ";
    assert!(unknown.starts_with(expected), "{unknown}");
}
