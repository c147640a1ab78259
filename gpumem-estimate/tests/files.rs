//! Files on disk, and files that are cut off or lie about their length.

use std::{fs, path::PathBuf};

use gpumem_estimate::Tensors;

/// A folder that is removed with its value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-estimate-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

const FIRST: &str = r#"{"model.a.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]},
    "model.a.bias":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}}"#;
const SECOND: &str = r#"{"model.b.weight":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]}}"#;

#[test]
fn sums_by_type_and_module() {
    let folder = Folder::new("sums");
    let tensors = Tensors::from_safetensors(folder.write("a.safetensors", &safetensors(FIRST, 32))).unwrap();
    assert_eq!((tensors.sum().elements, tensors.sum().bytes.get()), (12, 32));
    let by_dtype: Vec<_> = tensors.by_dtype().into_iter().map(|(dtype, sum)| (dtype, sum.elements)).collect();
    assert_eq!(by_dtype, [("bf16".to_owned(), 8), ("f32".to_owned(), 4)]);
    assert_eq!(tensors.by_module(2).into_keys().collect::<Vec<_>>(), ["model.a"]);
}

#[test]
fn an_index_names_several_files() {
    let folder = Folder::new("index");
    folder.write("1.safetensors", &safetensors(FIRST, 32));
    folder.write("2.safetensors", &safetensors(SECOND, 6));
    let index =
        |map: &str| folder.write("model.safetensors.index.json", format!(r#"{{"weight_map":{map}}}"#).as_bytes());
    let all = r#"{"model.a.weight":"1.safetensors","model.a.bias":"1.safetensors","model.b.weight":"2.safetensors"}"#;
    let tensors = Tensors::from_safetensors(index(all)).unwrap();
    assert_eq!((tensors.all().len(), tensors.sum().elements), (3, 15));
    let error = |map: &str| Tensors::from_safetensors(index(map)).unwrap_err().to_string();
    assert!(error(r#"{"x":"2.safetensors"}"#).ends_with("the files do not have the tensor `x`"));
    for name in ["../2.safetensors", "/etc/passwd", "a/b", ""] {
        let message = error(&format!(r#"{{"x":"{name}"}}"#));
        assert!(message.ends_with(&format!("`{name}` is not the name of a file beside the index")), "{message}");
    }
    assert!(error(r#"{"x":"3.safetensors"}"#).contains("3.safetensors: "));
}

#[test]
fn files_that_lie_about_their_length_are_errors() {
    let folder = Folder::new("length");
    let error = |bytes: &[u8]| Tensors::from_safetensors(folder.write("a.safetensors", bytes)).unwrap_err().to_string();
    assert!(error(b"").ends_with("the file ends inside its header"));
    assert!(error(&safetensors(FIRST, 32)[..20]).ends_with("the file ends inside its header"));
    let mut huge = safetensors(FIRST, 32);
    huge[..8].copy_from_slice(&(1_u64 << 60).to_le_bytes());
    assert!(error(&huge).ends_with("a header of 1152921504606846976 bytes; at most 100000000 are allowed"));
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(error(&huge).contains("a header of 18446744073709551615 bytes"));
    assert!(error(&safetensors(FIRST, 31)).contains("does not take the bytes 16 to 32"));
    assert!(Tensors::from_safetensors(folder.0.join("none.safetensors")).is_err());
}
